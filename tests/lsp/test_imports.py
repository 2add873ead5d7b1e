"""What a file calls what it imports, in the ways in which languages write it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infill_lsp.imports import _READERS, parts, read


@pytest.mark.parametrize(
    ("language", "text", "names", "modules"),
    [
        ("python", "from a.b import (c,  # why\n  d as e)\n", {"c": ("a.b", "c"), "e": ("a.b", "d")}, {}),
        ("python", "import a.b as c, d\n", {}, {"c": "a.b", "d": "d"}),
        ("typescript", 'import { a, type b as c } from "./x/y";\n', {"a": ("./x/y", "a"), "c": ("./x/y", "b")}, {}),
        ("javascript", "import * as n from '../m.js'\n", {}, {"n": "../m"}),
        ("javascriptreact", 'import D, {\n  a,\n} from "m"\n', {"D": ("m", "D"), "a": ("m", "a")}, {"D": "m"}),
        ("javascript", 'const { a: b } = require("./m");\n', {"b": ("./m", "a")}, {}),
        ("javascript", 'const m = require("x")\n', {"m": ("x", "m")}, {"m": "x"}),
        ("typescript", 'import "./side-effect";\nexport { a } from "./m";\n', {"a": ("./m", "a")}, {}),
        # As many as would take minutes if each was read to the end of the text.
        ("typescript", 20_000 * "export const a = b\n" + "import {\n  c\n} from 'd'\n", {"c": ("d", "c")}, {}),
        ("go", 'import (\n\t"a/b"\n\tx "c/d"\n\t_ "e"\n)\n', {}, {"b": "a/b", "x": "c/d"}),
        ("go", 'import "example.org/a/v2"\n', {}, {"a": "example.org/a/v2"}),
        (
            "java",
            "import a.b.C;\nimport static a.b.D.m;\nimport a.*;\n",
            {"C": ("a.b.C", "C"), "m": ("a.b.D.m", "m")},
            {},
        ),
        ("kotlin", "import a.b.C as D\n", {"D": ("a.b.C", "C")}, {}),
        ("scala", "import a.b.{C, D => E}\n", {"C": ("a.b.C", "C"), "E": ("a.b.D", "D")}, {}),
        ("php", "use A\\B\\C as D;\nuse function A\\f;\n", {"D": ("A\\B\\C", "C"), "f": ("A\\f", "f")}, {}),
        ("ruby", "require 'a'\n", {}, {}),
        ("nothing of that name", "import a\n", {}, {}),
    ],
)
def test_imports_are_read(language: str, text: str, names: dict[str, tuple[str, str]], modules: dict[str, str]) -> None:
    found = read(text, language)
    assert (found.names, found.modules) == (names, modules)


def test_nested_uses_of_rust() -> None:
    found = read("use crate::a::{b, c::{d as e, self}, *};\npub(crate) use x::Y;\nuse std::io;\n", "rust")
    assert found.names == {
        "b": ("crate::a", "b"),
        "e": ("crate::a::c", "d"),
        "c": ("crate::a", "c"),
        "Y": ("x", "Y"),
        "io": ("std", "io"),
    }
    assert found.modules["c"] == "crate::a::c"


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("a.b", ["a", "b"]),
        (".a", ["a"]),
        (".", []),
        ("./a/b.service", ["a", "b.service"]),
        ("crate::a::B", ["a", "B"]),
        ("example.org/a", ["example.org", "a"]),
        ("A\\B", ["A", "B"]),
    ],
)
def test_a_modules_name_has_parts(module: str, names: list[str]) -> None:
    assert parts(module) == names


@given(
    st.sampled_from(sorted(_READERS)),
    st.text(alphabet="import from use{}()*,;:'\"./\\\n as const=requi e", max_size=200),
)
def test_no_text_is_a_fault(language: str, text: str) -> None:
    found = read(text, language)
    assert all(name and module for module, name in found.names.values())
