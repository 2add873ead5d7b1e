"""What a file calls the things of other modules that it imports, read off its import lines.

By regular expressions, since the lines around a cursor are often too broken for a tree; each is linear in the text. It
knows how languages write imports, not where modules lie.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from infill_lsp import languages

#: Imports of one file that are looked at.
MOST = 500


@dataclass(frozen=True, slots=True)
class Imports:
    """Names that the file has from elsewhere."""

    #: A name -> its module, and what it is called there.
    names: dict[str, tuple[str, str]] = field(default_factory=dict)
    #: What stands for a whole module -> the module. Its members are written behind it.
    modules: dict[str, str] = field(default_factory=dict)


#: A module, its member ("" for the module itself), and what the file calls it.
_Found = Iterator[tuple[str, str, str]]


def read(text: str, language: str) -> Imports:
    """The imports in a text, LF only; none in a language whose imports are not known."""
    found = Imports()
    reader = _READERS.get(languages.name_of(language))
    for number, (module, name, local) in enumerate(reader(text) if reader else ()):
        if number == MOST:
            break
        if name:
            found.names[local] = module, name
        else:
            found.modules[local] = module
    return found


def parts(module: str) -> list[str]:
    """The names that a module's name is made of, however it is written."""
    separators = r"/" if "/" in module else r"::|\\|\."
    return [part for part in re.split(separators, module) if part not in _HERE]


#: What stands for the file's own place in a module's name.
_HERE = {"", ".", "..", "crate", "self", "super", "~", "@"}

# `from a.b import (c as d, e)`, `import a.b as c, d`, and one of their parts; a star is passed over.
_PYTHON_FROM = re.compile(r"^[ \t]*from[ \t]+([.\w]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n#;]*)", re.MULTILINE)
_PYTHON_IMPORT = re.compile(r"^[ \t]*import[ \t]+([^\n#;(]*)", re.MULTILINE)
_AS = re.compile(r"([\w.]+)(?:\s+as\s+(\w+))?")
_PYTHON_COMMENT = re.compile(r"#[^\n]*")


def _python(text: str) -> _Found:
    for module, imported in _PYTHON_FROM.findall(text):
        for part in _PYTHON_COMMENT.sub("", imported).strip("()").split(","):
            if match := _AS.fullmatch(part.strip()):
                yield module, match[1], match[2] or match[1]
    for imported in _PYTHON_IMPORT.findall(text):
        for part in imported.split(","):
            if match := _AS.fullmatch(part.strip()):
                yield match[1], "", match[2] or match[1]


# `import a, { b as c } from "m"`, `import * as n from "m"`, `const { b: c } = require("m")`, `const n = require("m")`.
_SCRIPT_FROM = re.compile(r"^[ \t]*(?:import|export)\b([\s\w$*{},]*)\bfrom\s*['\"]([^'\"\n]+)['\"]", re.MULTILINE)
_SCRIPT_REQUIRE = re.compile(
    r"^[ \t]*(?:const|let|var)\s+([\w$]+|\{[^}]*\})\s*=\s*(?:await\s+import|require)\(\s*['\"]([^'\"\n]+)['\"]",
    re.MULTILINE,
)
_SCRIPT_PART = re.compile(r"(?:type\s+)?([\w$]+)(?:\s*(?:\bas\b|:)\s*([\w$]+))?")
_SCRIPT_MODULE = re.compile(r"\*\s*as\s+([\w$]+)")
_SCRIPT_ENDING = re.compile(r"\.[cm]?[jt]sx?$")


def _script(text: str) -> _Found:
    for clause, written in (*_SCRIPT_FROM.findall(text), *_SCRIPT_REQUIRE.findall(text)):
        module = _SCRIPT_ENDING.sub("", written)
        outside, _, rest = clause.partition("{")
        for part in rest.partition("}")[0].split(","):
            if match := _SCRIPT_PART.fullmatch(part.strip()):
                yield module, match[1], match[2] or match[1]
        if match := _SCRIPT_MODULE.search(outside):
            yield module, "", match[1]
        elif match := re.match(r"\s*(?:type\s+)?([\w$]+)", outside):
            yield module, match[1], match[1]  # a default export is often called so where it is made, too
            yield module, "", match[1]


# `import "a/b"`, `import ( x "a/b" )`.
_GO_IMPORT = re.compile(r"^[ \t]*import[ \t]*(\([^)]*\)|[^\n(]*)", re.MULTILINE)
_GO_PART = re.compile(r"^[ \t(]*(?:([\w.]+)[ \t]+)?[\"`]([^\"`\n]+)[\"`]", re.MULTILINE)
_GO_VERSION = re.compile(r"/v\d+$|\.v\d+$")


def _go(text: str) -> _Found:
    for imported in _GO_IMPORT.findall(text):
        for local, module in _GO_PART.findall(imported):
            if local not in ("_", "."):
                yield module, "", local or _GO_VERSION.sub("", module).rpartition("/")[2]


# `use a::{b, c::{d as e, self}};`
_RUST_USE = re.compile(r"^[ \t]*(?:pub(?:\([^)]*\))?[ \t]+)?use[ \t\n]+([^;]*);", re.MULTILINE)
_RUST_TOKEN = re.compile(r"[\w*]+|::|[{},]")


def _rust(text: str) -> _Found:
    for imported in _RUST_USE.findall(text):
        path: list[str] = []
        outer: list[int] = []  # how long the path is around each open brace
        local = ""
        renaming = False
        for token in (*_RUST_TOKEN.findall(imported), ","):
            if token == "{":
                outer.append(len(path))
            elif token in ",}":
                if len(path) > (outer[-1] if outer else 0):
                    module, name = (path[:-1], path[-1]) if path[-1] != "self" else (path[:-2], "".join(path[-2:-1]))
                    if name not in ("", "*"):
                        yield "::".join(module) or name, name, local or name
                        yield "::".join([*module, name]), "", local or name
                local, renaming = "", False
                if token == "}" and outer:
                    del path[outer.pop() :]
                del path[outer[-1] if outer else 0 :]
            elif token == "as":
                renaming = True
            elif renaming:
                local = token
            elif token != "::":
                path.append(token)


# `import a.b.C;`, `import static a.b.C.m;`, `import a.b.C as D`, `import a.b.{C, D => E}`.
_DOTTED_IMPORT = re.compile(
    r"^[ \t]*import[ \t]+(?:static[ \t]+)?([\w.]+?)(?:\.\{([^}]*)\}|(?:[ \t]+as[ \t]+(\w+))?)[ \t]*;?[ \t]*$",
    re.MULTILINE,
)
_SCALA_PART = re.compile(r"(\w+)(?:\s*(?:=>|\bas\b)\s*(\w+))?")


def _dotted(text: str) -> _Found:
    for path, several, local in _DOTTED_IMPORT.findall(text):
        if several:
            for part in several.split(","):
                if match := _SCALA_PART.fullmatch(part.strip()):
                    yield f"{path}.{match[1]}", match[1], match[2] or match[1]
        elif name := path.rpartition(".")[2]:
            yield path, name, local or name


# `use A\B\C as D;`, `use function A\b;`
_PHP_USE = re.compile(r"^[ \t]*use[ \t]+(?:function[ \t]+|const[ \t]+)?([\w\\]+)(?:[ \t]+as[ \t]+(\w+))?", re.MULTILINE)


def _php(text: str) -> _Found:
    for path, local in _PHP_USE.findall(text):
        name = path.rpartition("\\")[2]
        yield path, name, local or name


_READERS: dict[str, Callable[[str], _Found]] = {
    "python": _python,
    "javascript": _script,
    "typescript": _script,
    "tsx": _script,
    "go": _go,
    "rust": _rust,
    "java": _dotted,
    "kotlin": _dotted,
    "scala": _dotted,
    "php": _php,
}
