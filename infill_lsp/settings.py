"""What a person can set, under the section `infill`: names, types, defaults and bounds, defined here once.

A value that does not fit is reported in one line and its default is used; nothing is dropped in silence.
Does not know how settings travel, nor what they do.
"""

from __future__ import annotations

import difflib
import json
import sys
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta, Struct

# The description of a type is what a person is told that a key takes.
Switch = Annotated[bool, Meta(description="true or false")]
Name = Annotated[str, Meta(min_length=1, description="a text that is not empty")]
Milliseconds = Annotated[int, Meta(ge=10, le=60_000, description="a whole number from 10 to 60000")]
Lines = Annotated[int, Meta(ge=1, le=256, description="a whole number from 1 to 256")]
LogLevel = Literal["error", "warning", "info", "debug"]
Patterns = Annotated[tuple[str, ...], Meta(max_length=1000, description="a list of patterns as in a .gitignore")]
MaybeLogLevel = Annotated[LogLevel | None, Meta(description='"error", "warning", "info", "debug" or null')]

S = TypeVar("S", bound=Struct)


class Deadline(Struct, frozen=True, rename="camel"):
    """Milliseconds after which the best text so far is shown."""

    #: While typing.
    automatic: Milliseconds = 400
    #: When asked for by a key.
    invoked: Milliseconds = 3000


class Engine(Struct, frozen=True, rename="camel"):
    """How the resident engine is started."""

    #: The Python interpreter that has `infill-lsp[engine]` installed.
    python: Name = sys.executable


class Priming(Struct, frozen=True, rename="camel"):
    """What is known of the workspace's folders."""

    #: Whether their files are indexed, and remembered by the engine.
    enabled: Switch = True
    #: Files and folders that are left out, beside those that .gitignore and .ignore name.
    exclude: Patterns = ()


class Settings(Struct, frozen=True, rename="camel"):
    """The section `infill`, validated."""

    enabled: Switch = True
    #: "embedded", or another model that the engine can load.
    model: Name = "embedded"
    deadline: Deadline = Deadline()
    engine: Engine = Engine()
    priming: Priming = Priming()
    #: The most lines a suggestion may have.
    max_lines: Lines = 32
    #: What goes to the log on stderr; null: what the command line says.
    log_level: MaybeLogLevel = None


def parse(options: object) -> tuple[Settings, list[str]]:
    """The settings in `options` (decoded JSON; None: all defaults), and a line for each value not used."""
    problems: list[str] = []
    return _section(Settings, options, "infill", problems), problems


def _section(kind: type[S], options: object, path: str, problems: list[str]) -> S:
    if options is None:
        return kind()
    if not isinstance(options, dict):
        problems.append(f"{path}: got {_shown(options)}, takes an object; using the defaults")
        return kind()
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    values: dict[str, Any] = {}
    for key, value in options.items():
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(fields)}"
            problems.append(f"{path}.{key}: no such setting; {hint}")
            continue
        field = fields[key]
        if isinstance(field.type, type) and issubclass(field.type, Struct):
            values[field.name] = _section(field.type, value, f"{path}.{key}", problems)
            continue
        try:
            values[field.name] = msgspec.convert(value, field.type)
        except msgspec.ValidationError:
            takes = next(meta.description for meta in get_args(field.type) if isinstance(meta, Meta))
            problems.append(f"{path}.{key}: got {_shown(value)}, takes {takes}; using {json.dumps(field.default)}")
    return kind(**values)


def _shown(value: object) -> str:
    """The value as JSON, short enough for one line."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
