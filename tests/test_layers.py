"""The arrows between the three packages go one way, and the language server stays light."""

from __future__ import annotations

import ast
import importlib.util
import pkgutil
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

#: What each package may import of the others; a name allows everything below it.
ALLOWED = {
    "infill_kernels": (),
    "infill_engine": ("infill_kernels",),
    "infill_lsp": ("infill_engine.protocol",),
}


def modules(package: str) -> Iterator[tuple[str, Path]]:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (folder,) = spec.submodule_search_locations
    for path in sorted(Path(folder).rglob("*.py")):
        yield ".".join((package, *path.relative_to(folder).with_suffix("").parts)), path


def imports(name: str, source: str) -> Iterator[str]:
    """The modules a module may import, wherever in it; `from a import b` counts as a.b."""
    package = name.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = importlib.util.resolve_name("." * node.level + base, package)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def crossings(package: str, name: str, source: str) -> list[str]:
    """Imports of a module of `package` that no arrow allows."""
    others = ALLOWED.keys() - {package}
    return [
        target
        for target in imports(name, source)
        if target.split(".")[0] in others
        and not any(f"{target}.".startswith(f"{allowed}.") for allowed in ALLOWED[package])
    ]


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_follow_the_arrows(package: str) -> None:
    found = {name: crossings(package, name, path.read_text()) for name, path in modules(package)}
    assert len(found) > 1
    assert {name: targets for name, targets in found.items() if targets} == {}


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("infill_kernels", "import infill_engine"),
        ("infill_engine", "def f():\n    from infill_lsp import core"),
        ("infill_lsp", "from infill_engine import scheduler"),
        ("infill_lsp", "import infill_engine.server as s"),
        ("infill_lsp", "import infill_kernels"),
    ],
)
def test_a_forbidden_import_is_seen(package: str, source: str) -> None:
    assert len(crossings(package, f"{package}.module", source)) == 1


def test_an_allowed_import_is_not_reported() -> None:
    source = "import torchish\nfrom infill_engine import protocol\nfrom infill_engine.protocol import Final"
    assert crossings("infill_lsp", "infill_lsp.module", source) == []


def test_kernels_import_what_computes_and_nothing_else() -> None:
    found = {
        target.split(".")[0]
        for name, path in modules("infill_kernels")
        for target in imports(name, path.read_text())
        if target.split(".")[0] not in sys.stdlib_module_names
    }
    assert found == {"infill_kernels", "torch", "triton", "numpy", "numba", "llvmlite"}


def test_what_is_optional_is_not_loaded_by_what_can_do_without() -> None:
    optional = {"triton", "numba", "llvmlite", "prometheus_client"}
    assert "infill_engine.smollm" in loaded_by("infill_kernels", "infill_engine.smollm", blocked=optional)
    assert "infill_engine.protocol" in loaded_by("infill_engine.protocol", blocked={*optional, "torch"})


def loaded_by(*names: str, blocked: Collection[str] = ()) -> set[str]:
    """What a fresh interpreter has loaded after importing these; `blocked` are as if they were not installed."""
    script = f"""
import sys
sys.modules |= dict.fromkeys({list(blocked)})
import {", ".join(names)}
print(*(name for name, module in sys.modules.items() if module))
"""
    result = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return set(result.stdout.split())


def test_the_language_server_loads_neither_torch_nor_the_engine() -> None:
    import infill_lsp

    names = [f"infill_lsp.{module.name}" for module in pkgutil.iter_modules(infill_lsp.__path__)]
    names.remove("infill_lsp.__main__")
    loaded = loaded_by(*names)
    assert loaded >= set(names)
    assert "torch" not in loaded
    assert {name for name in loaded if name.startswith(("infill_engine.", "infill_kernels"))} == {
        "infill_engine.protocol"
    }


def test_initialize_waits_for_nothing_that_comes_later() -> None:
    """lsprotocol alone takes most of the time that an editor should wait."""
    loaded = loaded_by("infill_lsp.cli", "infill_lsp.server")
    assert loaded.isdisjoint({"httpcore", "tree_sitter", "infill_engine.protocol"})
