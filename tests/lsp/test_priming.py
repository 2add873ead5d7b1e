"""Snippets for a gap: what the file uses and what is like it, and nothing that is there anyway."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from marked import at

from infill_lsp import priming
from infill_lsp.core import Gap, Snippet
from infill_lsp.extraction import cut
from infill_lsp.index import Index
from infill_lsp.priming import MOST_CHUNKS, MOST_WORDS, rarest, retrieve, used

PATIENCE_S = 20.0


class Project:
    """A folder with an index of it."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "project"
        self.folder.mkdir()
        self.index = Index(str(self.folder), home=tmp_path / "cache")

    def write(self, path: str, text: str) -> None:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def retrieve(self, marked: str, path: str = "main.py", limit: int = 4) -> list[Snippet]:
        """Snippets at the `|` of an open document."""
        if self.index.status.state == "stopped":
            self.index.start()
        snapshot = at(marked, uri=(self.folder / path).as_uri())
        self.index.update(snapshot.uri, "\n".join(snapshot.lines))
        assert self.index.settle(PATIENCE_S)
        gap = cut(snapshot, "invoked")
        assert isinstance(gap, Gap)
        return retrieve(self.index, snapshot, gap, limit)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    monkeypatch.setattr(priming, "BUDGET_S", PATIENCE_S)  # Even where others keep the machine busy.
    made = Project(tmp_path)
    # Enough of other files for words to be rare or frequent.
    for number in range(30):
        made.write(f"noise/n{number}.py", f"def noise_{number}(self):\n    value = {number}\n    return value + self\n")
    yield made
    made.index.stop()


def test_finds_what_has_the_rare_words_near_the_gap(project: Project) -> None:
    project.write(
        "lib/http.py", "def send_request(url):\n    connection = connect(url)\n    return connection.read()\n"
    )
    best, *_ = project.retrieve("def fetch(self, url):\n    value = connect(url)\n    |\n")
    assert (best.path, best.first_line, best.last_line) == ("lib/http.py", 0, 2)
    assert best.text.startswith("def send_request(url):")
    assert "connect" in best.why()
    assert "value" not in best.why()


def test_definitions_of_what_is_imported_and_used_come_first(project: Project) -> None:
    project.write("shop/cart.py", "class Cart:\n    def add(self, item):\n        self.items.append(item)\n")
    project.write("other/cart.py", "class Cart:\n    def unrelated(self):\n        pass\n")
    project.write("shop/price.py", "def total(cart):\n    return sum(cart)\n\n\ndef unused(cart):\n    return None\n")
    project.write(
        "shop/like.py", "def checkout_all(checkout, basket):\n    basket = checkout(basket)\n    return basket\n"
    )
    found = project.retrieve(
        "from shop.cart import Cart as C\nimport shop.price as p\nfrom shop.price import unused\n\n\n"
        "def checkout(basket):\n    c = C()\n    x = p.total(c)\n    |\n"
    )
    assert [snippet.path for snippet in found[:2]] == ["shop/price.py", "shop/cart.py"]
    assert [snippet.why() for snippet in found[:2]] == [
        "p.total is imported, and used here",
        "C is imported, and used here",
    ]
    assert "def unused" not in found[0].text
    assert "shop/like.py" in {snippet.path for snippet in found[2:]}
    assert [snippet.score for snippet in found] == sorted((snippet.score for snippet in found), reverse=True)


def test_the_text_around_the_gap_is_not_given_again(project: Project) -> None:
    body = "def handle(event):\n    frobnicate(event)\n    persist(event)\n    notify(event)\n"
    project.write("main.py", body + "\n\ndef answer_of_the_gap():\n    frobnicate(1)\n")
    project.write("copy.py", body)
    project.write("other.py", "def similar(event):\n    frobnicate(event)\n    return event.name\n")
    found = project.retrieve(body + "\n\ndef again(event):\n    frobnicate(event)\n    |\n")
    assert {snippet.path for snippet in found} == {"other.py"}


def test_the_same_thing_is_not_given_twice(project: Project) -> None:
    for name in "abc":
        project.write(f"{name}.py", "def send(url):\n    connection = open_it(url)\n    return connection.read()\n")
    assert len(project.retrieve("def fetch(url):\n    value = open_it(url)\n    |\n")) == 1


def test_far_parts_of_the_same_file_count(project: Project) -> None:
    far = "def helper(x):\n    return frobnicate(x)\n"
    middle = "\n".join(f"VALUE_{number} = {number}" for number in range(600))
    found = project.retrieve(f"{far}\n\n{middle}\n\n\ndef near(x):\n    y = frobnicate(x)\n    |\n")
    assert [(snippet.path, snippet.first_line) for snippet in found] == [("main.py", 0)]


def test_the_nearer_and_the_younger_of_two_alike_comes_first(project: Project) -> None:
    body = "    value = frobnicate(x)\n    return value\n"
    for path in ("far/a.py", "app/b.py", "far/c.py"):
        project.write(path, f"def f_{path[4]}(x):\n    {path[4] * 3} = 1\n{body}")
        os.utime(project.folder / path, (1, 1))
    os.utime(project.folder / "far/c.py", (time.time(), time.time()))
    found = project.retrieve("def g(x):\n    y = frobnicate(x)\n    |\n", path="app/main.py")
    assert [snippet.path for snippet in found][-1] == "far/a.py"
    assert len(found) == 3


def test_of_two_alike_what_is_open_or_was_just_written_comes_first(project: Project) -> None:
    """Which of them that is, not which comes first by its name."""
    old = time.time() - 60 * 86_400
    for name in "abc":
        project.write(f"{name}/x.py", f"def polygon_area_{name}(polygon):\n    return polygon.area_{name}\n")
        os.utime(project.folder / f"{name}/x.py", (old, old))

    def first() -> str:
        return project.retrieve("def f(polygon):\n    area = polygon.area\n    |\n")[0].path

    before = first()
    others = [name for name in "abc" if f"{name}/x.py" != before]
    os.utime(project.folder / f"{others[0]}/x.py")
    until = time.monotonic() + PATIENCE_S
    while first() != f"{others[0]}/x.py" and time.monotonic() < until:
        time.sleep(0.05)
    assert first() == f"{others[0]}/x.py"
    opened = project.folder / f"{others[1]}/x.py"
    project.index.update(opened.as_uri(), opened.read_text())
    assert first() == f"{others[1]}/x.py"


def test_what_is_deleted_or_closed_is_not_given(project: Project) -> None:
    project.write("a.py", "def send(url):\n    return frobnicate(url)\n")
    marked = "def fetch(url):\n    value = frobnicate(url)\n    |\n"
    assert [snippet.path for snippet in project.retrieve(marked)] == ["a.py"]
    (project.folder / "a.py").unlink()
    assert project.retrieve(marked) == []
    project.index.update((project.folder / "b.py").as_uri(), "def other(url):\n    return frobnicate(url, 1)\n")
    assert [snippet.path for snippet in project.retrieve(marked)] == ["b.py"]
    project.index.close((project.folder / "b.py").as_uri())
    assert project.retrieve(marked) == []


def test_without_anything_to_go_by_there_is_nothing(project: Project) -> None:
    assert project.retrieve("|") == []
    assert project.retrieve("x = |", path="../elsewhere/main.py") == []
    assert project.retrieve("def fetch(url):\n    return frobnicate(|", limit=0) == []


def test_an_index_that_has_not_begun_gives_nothing(tmp_path: Path) -> None:
    index = Index(str(tmp_path), home=tmp_path / "cache")
    snapshot = at("import os\n\nos.path.join(|\n", uri=(tmp_path / "a.py").as_uri())
    gap = cut(snapshot, "invoked")
    assert isinstance(gap, Gap)
    assert retrieve(index, snapshot, gap, 4) == []


def test_only_the_rarest_words_are_asked_for() -> None:
    frequencies = {f"word{number}": number for number in range(1, 100)}
    assert list(rarest(frequencies, 10_000)) == [f"word{number}" for number in range(1, MOST_WORDS + 1)]
    assert rarest({"many": 10 * MOST_CHUNKS, "rare": 3}, 10**6) == {"rare": 3}
    assert rarest({"common": 90}, 100) == {}
    assert rarest({"alone": 1}, 1) == {"alone": 1}
    assert rarest({}, 0) == {}


@pytest.mark.parametrize(
    ("imports", "near", "found"),
    [
        ("from a.b import c", "c(1)", {"c": ("a.b", "c")}),
        ("from a import (\n    c,  # why\n    d as e,\n)", "e(c)", {"c": ("a", "c"), "e": ("a", "d")}),
        ("from .a import c", "x.c + c.d", {"c": (".a", "c"), "c.d": (".a.c", "d")}),
        ("import a.b as c, d", "c.e(d.f)", {"d.f": ("d", "f"), "c.e": ("a.b", "e")}),
        ("if x:\n    from a import c", "c", {"c": ("a", "c")}),
        ("from a import *\nfrom b import", "c", {}),
        ("import a", "b.a.c", {}),
    ],
)
def test_names_of_other_modules_near_the_gap(imports: str, near: str, found: dict[str, tuple[str, str]]) -> None:
    assert used(at(f"{imports}\n|"), near) == found


def test_what_the_header_of_the_definition_names_is_in_scope_however_far_above_it_is(project: Project) -> None:
    project.write("shop/cart.py", "class Cart:\n    def add(self, item):\n        self.items.append(item)\n")
    body = "".join(f"    a{number} = {number}\n" for number in range(40))
    start = "from shop.cart import Cart\n\n\n"
    best, *_ = project.retrieve(f"{start}def checkout(basket: Cart):\n{body}    basket.|\n")
    assert (best.path, best.why()) == ("shop/cart.py", "Cart is imported, and used here")
    outside = project.retrieve(f"{start}def checkout(basket: Cart):\n{body}\n\nbasket.|\n")
    assert all("imported" not in snippet.why() for snippet in outside)
