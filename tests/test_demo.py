"""The demo as a person runs it: the whole process, the real server and engine, the fake model in the engine."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
DEMO = EXAMPLES / "demo.py"


def load_demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["demo"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


demo: Any = load_demo()
GAPS = [demo.Gap.at(place) for place in demo.PLACES]
SAME, OTHER, NOTHING, BEGUN = GAPS[0], GAPS[1], GAPS[2], GAPS[4]


@dataclass
class Home:
    """Folders of a test's own, with the fake model's table in them."""

    folder: Path

    @property
    def model(self) -> str:
        return f"fake:{self.folder / 'table.json'}"

    @property
    def environment(self) -> dict[str, str]:
        folders = {"RUNTIME": "run", "CACHE": "cache", "CONFIG": "config"}
        own = {f"INFILL_{name}_DIR": str(self.folder / folder) for name, folder in folders.items()}
        return os.environ | own | {"TERM": "xterm-256color", "COLUMNS": "100"}

    def write(self, **table: object) -> None:
        (self.folder / "table.json").write_text(json.dumps(table))

    def command(self, *options: str) -> list[str]:
        return [sys.executable, str(DEMO), "--model", self.model, *options]

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(*options), env=self.environment, capture_output=True, text=True, timeout=120)

    def engine(self, command: str) -> str:
        """What `infill-engine` says about this home's engine."""
        arguments = [sys.executable, "-m", "infill_engine", command, "--model", self.model]
        return subprocess.run(arguments, env=self.environment, capture_output=True, text=True).stdout


@pytest.fixture
def home() -> Iterator[Home]:
    # A Unix socket's path is short: pytest's own temporary folders are too deep.
    with tempfile.TemporaryDirectory(prefix="infill-") as folder:
        home = Home(Path(folder))
        yield home
        home.engine("stop")


def author_everywhere(**others: object) -> dict[str, object]:
    """The fake model's table by which each gap gets what the author wrote, but for `others`."""
    return {gap.place.after: gap.author for gap in GAPS} | others


def test_the_sample_project_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    from shop.cart import Cart
    from shop.catalog import read_catalog
    from shop.pricing import CategoryOff, PercentOff
    from shop.receipt import receipt

    stock = tmp_path / "stock.csv"
    stock.write_text("code,name,price,category\nt,Tea,450,drinks\nm,Mug,1250,things\n", encoding="utf-8")
    cart = Cart(read_catalog(stock))
    for code in ("t", "m", "t"):
        cart.add(code)
    rows = receipt(cart, [PercentOff(10), CategoryOff("drinks", 50)]).split("\n")
    assert [row.split()[-1] for row in rows] == ["9.00", "12.50", "-" * 40, "21.50", "-4.50", "4.95", "21.95", "3.50"]
    assert {len(row) for row in rows} == {40}


@pytest.mark.parametrize("gap", GAPS, ids=lambda gap: gap.place.title)
def test_a_place_is_one_part_of_its_file(gap: Any) -> None:
    whole = (EXAMPLES / "shop" / gap.place.file).read_text(encoding="utf-8")
    assert whole.count(gap.place.after) == 1
    assert gap.author.strip()
    assert gap.text[: gap.offset] + gap.author + gap.text[gap.offset :] == whole
    lines = gap.text.split("\n")
    assert "\n".join([*lines[: gap.row], lines[gap.row][: gap.column]]) == gap.text[: gap.offset]


@pytest.mark.process
def test_plainly_it_says_what_came_and_whether_it_is_the_authors(home: Home) -> None:
    beginning = BEGUN.author.split("\n")[0]
    table = author_everywhere(**{OTHER.place.after: "product.price == category", BEGUN.place.after: beginning})
    del table[NOTHING.place.after]
    home.write(**table)

    result = home.run("--plain")

    assert (result.returncode, result.stderr) == (0, "")
    assert "\x1b" not in result.stdout
    places = re.split(r"^\d/\d  ", result.stdout.partition("What was offered")[0], flags=re.M)[1:]
    summary = result.stdout.partition("What was offered")[2].split("\n")[2:]
    for gap, shown, row in zip(GAPS, places, summary, strict=False):
        text = {OTHER: "product.price == category", NOTHING: None, BEGUN: beginning}.get(gap, gap.author)
        same = text == gap.author
        right = "yes" if same else "as far as it goes" if gap is BEGUN else "no"
        steps = re.search(r"(\d+) denoise steps", shown)
        assert steps is not None, shown
        if text is None:
            assert "‹" not in shown
            offered = "nothing"
        else:
            ghost = shown.partition("‹")[2].partition("›")[0]
            assert re.sub(r" *\n\d+ ", "\n", ghost) == text
            # The fake model writes a byte a slot, and the canvas is the one of the last step.
            canvas = next(line for line in shown.split("\n") if line.startswith(f"step {steps[1]} "))
            assert "|".join(text.replace("\n", "⏎")) in canvas
            more = text.count("\n")
            offered = text.split("\n")[0] + (f" (+{more})" if more else "")
        assert ("wrote the same" in shown) is same
        assert ("wrote this and more" in shown) is (gap is BEGUN)
        assert re.fullmatch(rf"{gap.place.title} +{re.escape(offered)} +\d+ +{steps[1]} +{right} *", row)
    assert len(places) == len(GAPS)
    assert "`infill-engine stop --model fake:" in result.stdout
    assert "no engine" not in home.engine("status")


@pytest.mark.process
def test_on_a_terminal_every_canvas_is_drawn_as_it_comes(home: Home) -> None:
    home.write(**author_everywhere())
    ours, its = os.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("4H", 40, 100, 0, 0))
    with subprocess.Popen(home.command("--place", "1"), env=home.environment, stdin=its, stdout=its, stderr=its) as run:
        os.close(its)
        screen = read_all(ours)
    assert run.returncode == 0, screen
    assert "\x1b[" in screen
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen)
    steps = re.search(r"(\d+) denoise steps", text)
    assert steps is not None, text
    drawn = [int(step) for step in re.findall(r"step +(\d+) ", text)]
    assert set(drawn) == set(range(1, int(steps[1]) + 1))
    assert "░" in text
    assert "wrote the same" in text


def read_all(terminal: int) -> str:
    """What a terminal gets until nobody has it open any more."""
    data = b""
    try:
        while piece := os.read(terminal, 65536):
            data += piece
    except OSError:  # Linux' way to say so.
        pass
    os.close(terminal)
    return data.decode()


@pytest.mark.process
def test_a_picture_of_a_place_is_saved(home: Home) -> None:
    home.write(**author_everywhere())
    picture = home.folder / "picture.svg"
    result = home.run("--place", "4", "--svg", str(picture))
    assert result.returncode == 0, result.stderr
    root = ElementTree.parse(picture).getroot()
    assert root.tag.endswith("svg")
    assert "url(http" not in picture.read_text().replace('"', "")
    text = "".join(root.itertext()).replace("\xa0", " ")
    assert GAPS[3].author in text
    assert "wrote the same" in text


@pytest.mark.process
@pytest.mark.parametrize(
    ("table", "options", "complaint"),
    [
        ({}, [], "nothing was offered at any place: run `infill-lsp doctor`"),
        (author_everywhere(), ["--svg", "/nowhere/picture.svg"], "No such file or directory: '/nowhere/picture.svg'"),
        (None, [], "cannot read the fake model's table"),
    ],
)
def test_what_is_missing_is_one_line(
    home: Home, table: dict[str, object] | None, options: list[str], complaint: str
) -> None:
    if table is not None:
        home.write(**table)
    result = home.run("--place", "1", *options)
    assert result.returncode == 1
    assert complaint in result.stderr
    assert result.stderr.startswith("demo: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.process
def test_a_server_that_dies_is_one_line(home: Home) -> None:
    home.write(**author_everywhere(step_s=0.5))
    with started(home) as run:
        (server,) = children(run)
        os.kill(server, signal.SIGKILL)
        assert run.wait(30) == 1
        assert run.stderr is not None
        assert run.stderr.read() == "demo: infill-lsp ended: it said nothing\n"


@pytest.mark.process
def test_ctrl_c_leaves_nothing_but_the_engine(home: Home) -> None:
    home.write(**author_everywhere(step_s=0.5))
    with started(home) as run:
        (server,) = children(run)
        run.send_signal(signal.SIGINT)
        said, complaint = run.communicate(timeout=30)
    assert (run.returncode, complaint) == (130, "")
    assert "infill-engine stop" in said.rstrip().rpartition("\n")[2]
    assert not Path(f"/proc/{server}").exists()
    assert "ready" in home.engine("status")


def started(home: Home) -> subprocess.Popen[str]:
    """The demo at the moment at which it asks for the first place, which a slow model takes seconds to answer."""
    run = subprocess.Popen(
        home.command(), env=home.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    assert any(line.startswith("The canvas") for line in run.stdout), "it ended before"
    return run


def children(process: subprocess.Popen[str]) -> list[int]:
    """The processes that a process has started and that still run."""
    return [int(child) for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
