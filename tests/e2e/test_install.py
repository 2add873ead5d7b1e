"""From the .vsix and nothing else to a completion, and back to nothing: what a person sees, and what lies on the disk.

pip finds what it installs in a folder of wheels, and torch at an index of this test's own. That torch is the one of the
Python that runs the tests: what is installed of it is a wheel that points there, since unpacking it takes a minute. All
else is installed in earnest.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import threading
import tomllib
import venv
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from urllib.parse import quote

import pytest
from journeys import REPOSITORY, TOOLS, Engine, is_running, program, wait_for
from packaging.requirements import Requirement
from vscode import MARKS, Profile, Window, extension, free_port

pytestmark = MARKS

CONSTRAINTS = REPOSITORY / "constraints.txt"
#: The Python beneath the virtual environment of the tests: what anybody has.
PYTHON = sys._base_executable  # type: ignore[attr-defined]
UV = "uv==0.9.13"
OFFER, NOT_INSTALLED = "Infill needs its engine", "the engine is not installed"


@pytest.fixture(scope="session")
def wheels() -> Path:
    """What the server and the engine need beside torch, downloaded once."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["engine"]]
    wanted = [text for text in needed if Requirement(text).name != "torch"]
    known = hashlib.sha256("\n".join([sys.version, *wanted, CONSTRAINTS.read_text()]).encode()).hexdigest()
    folder, stamp = TOOLS / "wheels", TOOLS / "wheels" / known
    if not stamp.exists():
        shutil.rmtree(folder, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:", "-c", CONSTRAINTS, "-d", folder]
        subprocess.run([*pip, *wanted], check=True)
        stamp.touch()
    return folder


@pytest.fixture(scope="session")
def uv() -> Path:
    """The folder with uv in it."""
    folder = TOOLS / "uv"
    if not (folder / "bin" / "uv").exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, UV]
        subprocess.run(pip, check=True)
    return folder / "bin"


@pytest.fixture
def storage(profile: Profile) -> Path:
    """Where the extension keeps its environments."""
    return profile.home / "User" / "globalStorage" / "infill-lsp.infill"


@pytest.fixture
def offline(wheels: Path, engine: Engine, tmp_path: Path) -> Mapping[str, str]:
    """The environment of `engine`, in which pip finds those wheels and nothing else."""
    assert os.environ["INFILL_CACHE_DIR"].startswith(str(tmp_path)), "a journey removes what lies there"
    nothing = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": tmp_path.as_uri(), "PIP_EXTRA_INDEX_URL": ""}
    return {**os.environ, **nothing, "PIP_FIND_LINKS": str(wheels)}


@pytest.fixture
def project(project: Path) -> Path:
    """With a file to write in."""
    (project / "shapes.py").write_bytes(b"def area(w, h):\n    \n")
    return project


def torch_of_the_tests(folder: Path, site: Path) -> None:
    """Puts a wheel into the folder that makes torch importable from where the tests have it.

    site: gets links to it and to what it needs, so that nothing else comes from there."""
    version = metadata.version("torch")
    info = f"torch-{version}.dist-info"
    site.mkdir()
    for module in modules("torch"):
        (site / module.name).symlink_to(module)
    files = {
        "torch_of_the_tests.pth": f"{site}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    folder.mkdir(parents=True)
    name = f"torch-{version}-py3-none-any.whl"
    with zipfile.ZipFile(folder / name, "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
    (folder / "index.html").write_text(f'<!doctype html><a href="{quote(name)}">{name}</a>')


def modules(package: str) -> set[Path]:
    """What a package and those that it needs have installed, but for what pip knows them by."""
    found: set[Path] = set()
    names, seen = [package], set[str]()
    while names:
        name = names.pop()
        if name in seen:
            continue
        seen.add(name)
        distribution = metadata.distribution(name)
        tops = {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}
        found |= {Path(str(distribution.locate_file(top))) for top in tops if not top.endswith(".dist-info")}
        needed = [Requirement(text) for text in distribution.requires or ()]
        names += [each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


@contextmanager
def index(folder: Path, port: int) -> Iterator[None]:
    """A package index on this machine."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield
        server.shutdown()


def of_version(vsix: Path, version: str, target: Path) -> Path:
    """The same extension with another version."""
    with zipfile.ZipFile(vsix) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name in ("extension/package.json", "extension.vsixmanifest"):
                data = data.replace(b'"version": "0.1.0"', f'"version": "{version}"'.encode())
                data = data.replace(b'Version="0.1.0"', f'Version="{version}"'.encode())
            new.writestr(name, data)
    return target


def environments(storage: Path) -> set[str]:
    """Those that are whole: their kind and version."""
    return {marker.parent.name.rpartition("-")[0] for marker in storage.glob("*/infill.json")}


def test_from_the_vsix_alone_to_a_completion_an_upgrade_and_nothing_again(
    profile: Profile,
    storage: Path,
    project: Path,
    vsix: Path,
    offline: Mapping[str, str],
    engine: Engine,
    window: Window,
    tmp_path: Path,
) -> None:
    engine.answers({"return ": "w * h"})
    torch_of_the_tests(tmp_path / "index" / "simple" / "torch", tmp_path / "torch")
    port = free_port()
    user = {"infill.deadline.automatic": 10_000}
    machine = {
        "infill.install.python": PYTHON,
        "infill.install.tool": "pip",
        "infill.install.torchIndex": f"http://127.0.0.1:{port}/simple",
        "infill.model": engine.model,
    }
    profile.settings(user, machine)
    profile.install(vsix)
    with profile.served(offline) as address, window.visiting(address):
        window.open(f"{address}/?folder={project}", "shapes.py", NOT_INSTALLED)
        assert environments(storage) == {"server-0.1.0"}
        window.wait_for_notice(OFFER)
        window.wait_for_notice("300 MB to download")
        window.shoot("vscode-install-offer.png")

        window.answer("Install")  # Nothing answers at the index.
        window.wait_for_notice("PyTorch could not be installed: no connection")
        window.wait_for_status("PyTorch could not be installed")
        window.shoot("vscode-install-failed.png")
        assert environments(storage) == {"server-0.1.0"}

        with index(tmp_path / "index", port):
            window.answer("Retry")
            window.wait_for_status("setting up the engine")
            window.shoot("vscode-install-progress.png")
            window.wait_for_status("ready", seconds=240)
            assert environments(storage) == {"server-0.1.0", "engine-0.1.0"}
            window.go(2)
            window.type("return ")
            window.wait_for_ghost("w * h")
            window.shoot("vscode-install-first.png")
            window.press("Tab")
            wait_for(lambda: window.cursor == "Ln 2, Col 17", "cursor at the end", seen=lambda: window.cursor)
            window.save()
            assert (project / "shapes.py").read_bytes() == b"def area(w, h):\n    return w * h\n"
            old = engine.wait_until_ready().pid

            profile.install(of_version(vsix, "0.1.1", tmp_path / "newer.vsix"))
            window.do("open", url=f"{address}/?folder={project}")
            both = {"server-0.1.1", "engine-0.1.1"}
            wait_for(lambda: environments(storage) == both, "both anew", 240, seen=lambda: environments(storage))
            window.wait_for_status("ready")
            assert not is_running(old)
            assert OFFER not in " ".join(window.texts(".notification-list-item-message"))

        new = engine.wait_until_ready().pid
        assert "engine-0.1.1" in Path(f"/proc/{new}/cmdline").read_text()
        window.command("Infill: Remove all data")
        wait_for(lambda: "Environments" in "".join(window.texts(".monaco-dialog-box")), "question")
        window.shoot("vscode-remove.png")
        window.click(".monaco-dialog-box .monaco-button", "Remove")
        window.wait_for_notice("removed.")
        window.wait_for_status("all data was removed")
        assert not storage.exists()
        assert not is_running(new)
        assert not (tmp_path / "cache" / "index").exists()


def test_a_python_that_cannot_make_environments_is_named_with_what_to_install(
    profile: Profile,
    storage: Path,
    project: Path,
    vsix: Path,
    offline: Mapping[str, str],
    window: Window,
    tmp_path: Path,
) -> None:
    bare = tmp_path / "bare"
    venv.create(bare, with_pip=False)
    # As Debian has it: Python without the package that holds these modules.
    (next(bare.glob("lib/python*/site-packages")) / "sitecustomize.py").write_text(
        "import sys\nsys.modules['ensurepip'] = None\n"
    )
    profile.settings({}, {"infill.install.python": str(bare / "bin" / "python"), "infill.install.tool": "pip"})
    profile.install(vsix)
    with profile.served(offline) as address, window.visiting(address):
        window.open(f"{address}/?folder={project}", "shapes.py", "ensurepip is missing")
        window.wait_for_notice("ensurepip is missing")
        window.shoot("vscode-install-ensurepip.png")
        if "ID=debian" in Path("/etc/os-release").read_text():
            window.wait_for_notice(f"sudo apt install python3.{sys.version_info.minor}-venv")
        assert environments(storage) == set()

        # Once it is cured, "Retry" is all it takes.
        next(bare.glob("lib/python*/site-packages/sitecustomize.py")).unlink()
        window.answer("Retry")
        window.wait_for_status(NOT_INSTALLED)
        assert environments(storage) == {"server-0.1.0"}
        window.wait_for_notice(OFFER)
        window.answer("Not now")
        wait_for((storage / "not-now").exists, "answer that is kept")
        window.do("open", url=f"{address}/?folder={project}")
        window.wait_for_status(NOT_INSTALLED)
        assert OFFER not in " ".join(window.texts(".notification-list-item-message"))


def test_uv_and_the_python_of_the_python_extension_are_taken_where_they_are(
    profile: Profile,
    storage: Path,
    project: Path,
    vsix: Path,
    wheels: Path,
    offline: Mapping[str, str],
    uv: Path,
    window: Window,
    tmp_path: Path,
) -> None:
    asked = tmp_path / "asked"
    python = program(tmp_path / "python", f'echo asked >> {asked}; exec {PYTHON} "$@"')
    profile.install(vsix)
    # What is used of it: the same interface, another publisher's program behind it.
    api = (
        f"const executable = {{ uri: require('vscode').Uri.file('{python}') }};"
        "exports.activate = () => ({ environments: { getActiveEnvironmentPath: () => ({ path: 'chosen' }), "
        "resolveEnvironment: async ({ path }) => (path === 'chosen' ? { executable } : undefined) } });"
    )
    profile.install(extension(tmp_path / "python.vsix", "ms-python", "python", "Python", api))
    profile.settings({}, {"infill.install.tool": "uv"})
    home = tmp_path / "home"
    home.mkdir()
    (home / ".profile").write_text(f'PATH="{uv}:$PATH"\n')  # VS Code takes the PATH of a login shell.
    environment = {
        **offline,
        "HOME": str(home),
        "UV_CACHE_DIR": str(tmp_path / "uv"),
        "UV_FIND_LINKS": str(wheels),
        "UV_NO_CONFIG": "1",
        "UV_NO_INDEX": "1",
        "UV_OFFLINE": "1",
    }
    with profile.served(environment) as address, window.visiting(address):
        window.open(f"{address}/?folder={project}", "shapes.py", NOT_INSTALLED)
        window.wait_for_notice(OFFER)
    assert asked.exists(), "another Python was taken"
    (made,) = storage.glob("server-0.1.0*/pyvenv.cfg")
    assert "uv = " in made.read_text()
