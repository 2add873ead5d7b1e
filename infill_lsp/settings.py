"""What a person can set, under the section `infill`: each setting's name, type, default, bounds and meaning, once.

Values come in layers, the later over the earlier; what a workspace says comes last and can only restrict. A value that
does not fit is reported in one line and left out; nothing is dropped in silence. Does not know where layers come from,
nor what a setting does.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

import msgspec
from msgspec import Meta, Struct, inspect

from infill_lsp.core import Silence, Trigger

LogLevel = Literal["error", "warning", "info", "debug"]
#: From the least to the most that is offered.
Aggressiveness = Literal["quiet", "balanced", "eager"]

#: What a workspace may do to a value: nothing, lower it, raise it, or add to it. Of words the first is the lowest, and
#: false is lower than true.
Restriction = Literal["never", "lower", "raise", "add"]


def _setting(help: str, workspace: Restriction = "never", takes: str = "") -> Meta:
    """One line of help, what a workspace may do, and what the setting takes where its type has no words for that."""
    return Meta(description=help, extra={"workspace": workspace, "takes": takes})


Text = Annotated[str, Meta(min_length=1)]
Milliseconds = Annotated[int, Meta(ge=10, le=60_000)]
Patterns = Annotated[tuple[str, ...], Meta(max_length=1000)]


class Deadline(Struct, frozen=True, rename="camel"):
    """When a request ends."""

    automatic: Annotated[
        Milliseconds, _setting("Milliseconds after which the best text so far is shown, while typing.", "lower")
    ] = 400
    invoked: Annotated[
        Milliseconds,
        _setting("Milliseconds after which the best text so far is shown, when asked for by hand.", "lower"),
    ] = 3000


class Priming(Struct, frozen=True, rename="camel"):
    """What is known of the workspace's folders."""

    enabled: Annotated[
        bool,
        _setting(
            "Index the folders and let the engine remember their files. Off: what it remembers is removed.", "lower"
        ),
    ] = True
    exclude: Annotated[
        Patterns,
        _setting(
            "Files and folders that are not read for that, as patterns of a .gitignore, beside what those name.", "add"
        ),
    ] = ()


class Completion(Struct, frozen=True, rename="camel"):
    """Editors without inline completion."""

    fallback: Annotated[
        Literal["off", "auto"],
        _setting(
            "Offer the text as an entry of the completion menu where the editor draws no inline completions.", "lower"
        ),
    ] = "auto"


class Holes(Struct, frozen=True, rename="camel"):
    """Places that are to be filled later."""

    markers: Annotated[
        Annotated[tuple[Text, ...], Meta(max_length=100)],
        _setting("Texts that mark a hole, beside `...`, `???`, `TODO` and `pass  # ...`."),
    ] = ()


class Engine(Struct, frozen=True, rename="camel"):
    """The resident engine."""

    python: Annotated[
        str, _setting("The Python that has `infill-lsp[engine]` installed. Empty: the one that runs the server.")
    ] = ""
    address: Annotated[
        Annotated[str, Meta(pattern=r"^(https?://[^/?#@\s]+/?)?$")],
        _setting(
            "An engine that runs elsewhere, such as `http://127.0.0.1:8013`. Empty: one is started here.",
            takes="http://HOST:PORT or https://HOST:PORT",
        ),
    ] = ""
    token_file: Annotated[str, _setting("The file that holds the token of the engine at that address.")] = ""

    @property
    def interpreter(self) -> str:
        """The Python that starts an engine."""
        return self.python or sys.executable


class Settings(Struct, frozen=True, rename="camel"):
    """The section `infill`, validated."""

    enabled: Annotated[bool, _setting("Offer completions.", "lower")] = True
    languages: Annotated[
        Mapping[str, bool],
        _setting(
            "Languages in which completions are offered or not, by language id; `*` stands for all others.", "lower"
        ),
    ] = {}
    exclude: Annotated[
        Patterns, _setting("Documents in which nothing is offered, as patterns of a .gitignore.", "add")
    ] = ()
    trigger: Annotated[
        Literal["manual", "auto"], _setting("Offer completions while typing, or only when asked for by hand.", "lower")
    ] = "auto"
    comments: Annotated[bool, _setting("Offer completions inside comments and docstrings.", "lower")] = True
    strings: Annotated[bool, _setting("Offer completions inside strings.", "lower")] = True
    aggressiveness: Annotated[
        Aggressiveness, _setting("How sure a completion must be: `quiet` shows fewer, `eager` more.", "lower")
    ] = "balanced"
    max_lines: Annotated[
        Annotated[int, Meta(ge=1, le=256)], _setting("Lines that a completion may have at most.", "lower")
    ] = 32
    parse_check: Annotated[
        bool, _setting("Offer nothing that would make a file unparsable that is parsable.", "raise")
    ] = True
    debounce: Annotated[
        Annotated[int, Meta(ge=0, le=5_000)],
        _setting("Milliseconds to wait for another key stroke before a completion is made.", "raise"),
    ] = 0
    deadline: Deadline = Deadline()
    priming: Priming = Priming()
    completion: Completion = Completion()
    holes: Holes = Holes()
    model: Annotated[
        Text,
        _setting(
            "The model: `auto`, which is what was chosen with `infill-engine use` (the embedded one before that), "
            "a name that `infill-engine models` lists, a folder, a GGUF file, or a hub id."
        ),
    ] = "auto"
    device: Annotated[
        Annotated[str, Meta(pattern=r"^[a-z]+(:[0-9]+)?$")],
        _setting(
            "Where an engine that is started here runs: `auto`, or a device such as `cpu` or `cuda:0`.",
            takes='"auto", "cpu", "cuda" or the like',
        ),
    ] = "auto"
    engine: Engine = Engine()
    statistics: Annotated[
        bool, _setting("Count what is shown and accepted, on this machine alone and without any text.", "lower")
    ] = True
    log_level: Annotated[
        LogLevel | None, _setting("What goes to the log on stderr. Unset: what the command line says.")
    ] = None

    @property
    def off(self) -> Silence | None:
        """Why nothing is offered in any language; None where something may be."""
        if not self.enabled:
            return Silence("completions are switched off (infill.enabled)")
        if not self.languages.get("*", True) and not any(self.languages.values()):
            return Silence("completions are switched off for all languages (infill.languages)")
        return None

    def offers(self, language: str, around: str = "") -> bool:
        """Whether completions are offered in a language, in a document that is of the language `around`: a document
        that is switched off is so with all that is embedded in it, which else goes by its own switch if it has one."""
        every = self.languages.get("*", True)
        if not self.enabled or not self.languages.get(around, True):
            return False
        return self.languages.get(language, self.languages.get(around, every))

    def silence(self, language: str, trigger: Trigger, around: str = "") -> Silence | None:
        """Why nothing is offered in a language, or without being asked for; None where it is. As `offers`."""
        if self.off is not None:
            return self.off
        if not self.offers(language, around):
            of = language if self.languages.get(around, True) else around
            return Silence(f"completions are switched off for {of} (infill.languages)")
        if trigger == "automatic" and self.trigger == "manual":
            return Silence("completions are made only when asked for by hand (infill.trigger)")
        return None

    def silence_inside(self, kind: str) -> Silence | None:
        """Why nothing is offered in a gap of a kind, None where it is."""
        if kind in ("comment", "docstring") and not self.comments:
            return Silence(f"completions are switched off inside a {kind} (infill.comments)")
        if kind == "string" and not self.strings:
            return Silence("completions are switched off inside a string (infill.strings)")
        return None


#: A setting's name and those of what it is in, as in TOML and in Python.
Key: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Field:
    """One setting."""

    key: Key
    #: The key as on the wire, with dots between.
    wire: str
    type: Any
    default: Any

    @property
    def help(self) -> str:
        return str(self._known.extra_json_schema["description"])  # type: ignore[index]

    @property
    def restriction(self) -> Restriction:
        found: Restriction = self._known.extra["workspace"]  # type: ignore[index]
        return found

    @property
    def kind(self) -> inspect.Type:
        """The type with its bounds."""
        return self._known.type

    @property
    def _known(self) -> inspect.Metadata:
        known = inspect.type_info(self.type)
        assert isinstance(known, inspect.Metadata)
        return known

    @property
    def takes(self) -> str:
        """What it takes, in words."""
        if self.options:
            *words, last = [json.dumps(word) for word in self.options]
            if isinstance(self.kind, inspect.UnionType):
                words, last = [*words, last], "null"
            return f"{', '.join(words)} or {last}"
        return str(self._known.extra["takes"]) or _words(self.kind)  # type: ignore[index]

    @property
    def workspace(self) -> str:
        """What a workspace may do to it, in words; "" for nothing."""
        if self.restriction in ("never", "add"):
            return "" if self.restriction == "never" else "add to it"
        if isinstance(self.kind, inspect.DictType):
            return "switch languages off"
        if isinstance(self.kind, inspect.BoolType):
            return "switch it off" if self.restriction == "lower" else "switch it on"
        if isinstance(self.kind, inspect.LiteralType):
            lower = self.options[0] if len(self.options) == 2 else ""
            return f"set {json.dumps(lower)}" if lower else "lower it"
        return "lower it" if self.restriction == "lower" else "raise it"

    @property
    def options(self) -> tuple[str, ...]:
        """The words it takes, the lowest first; none where it takes any."""
        return tuple(_options(self.type))

    def restricted(self, ours: Any, theirs: Any) -> Any:
        """The person's value under the workspace's: never more than the person allows."""
        if self.restriction == "never":
            return ours
        if self.restriction == "add":
            # Of patterns the last that matches holds: ours cannot be taken back.
            return (*(each for each in theirs if each not in ours), *ours)
        choose = min if self.restriction == "lower" else max
        if isinstance(ours, Mapping):
            return {
                key: choose(ours.get(key, ours.get("*", True)), theirs.get(key, theirs.get("*", True)))
                for key in (*ours, *theirs)
            }
        rank = self.options.index if self.options else None
        return choose(ours, theirs, key=rank)


@dataclass(frozen=True, slots=True)
class Layer:
    """What one source says: the values that fit, and a line for each that does not."""

    #: How a person knows the source.
    source: str
    values: Mapping[Key, Any]
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Effective:
    """The settings that hold, by which source each does, and what was not used."""

    settings: Settings
    values: Mapping[Key, Any]
    sources: Mapping[Key, str]
    problems: tuple[str, ...]


#: The source of what nobody set.
DEFAULT = "default"
#: The editor, as a source: its names are those of the wire.
EDITOR = "editor"


@cache
def fields() -> Mapping[Key, Field]:
    """Every setting, in the order of `Settings`."""
    return {field.key: field for field in _fields(Settings, (), "")}


def read(options: object, source: str = EDITOR) -> Layer:
    """The values in `options`: decoded JSON of the editor, or decoded TOML of a file. None: none are set."""
    values: dict[Key, Any] = {}
    problems: list[str] = []
    wire = source == EDITOR
    _read(options, _tree(wire), "infill" if wire else source, "." if wire else ": ", values, problems)
    return Layer(source, values, tuple(problems))


def settle(layers: Sequence[Layer], workspace: Sequence[Layer] = ()) -> Effective:
    """The settings of the layers, the later over the earlier, and under what the workspace says."""
    values = {key: field.default for key, field in fields().items()}
    sources = dict.fromkeys(values, DEFAULT)
    problems = [problem for layer in (*layers, *workspace) for problem in layer.problems]
    for layer in layers:
        values |= layer.values
        sources |= dict.fromkeys(layer.values, layer.source)
    for layer in workspace:
        for key, theirs in layer.values.items():
            field, ours = fields()[key], values[key]
            holds = values[key] = field.restricted(ours, theirs)
            if holds != ours:
                sources[key] = f"{sources[key]}, {layer.source}" if field.restriction == "add" else layer.source
            if not _keeps(holds, theirs):
                may = f"can only {field.workspace}" if field.workspace else "cannot set this"
                problems.append(f"{layer.source}: {'.'.join(key)}: a workspace {may}; {_shown(ours)} stays")
    return Effective(_build(Settings, (), values), values, sources, tuple(problems))


def _fields(kind: type[Struct], key: Key, wire: str) -> list[Field]:
    found: list[Field] = []
    for field in msgspec.structs.fields(kind):
        inner, name = (*key, field.name), wire + field.encode_name
        if isinstance(field.type, type) and issubclass(field.type, Struct):
            found += _fields(field.type, inner, name + ".")
        else:
            default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
            found.append(Field(inner, name, field.type, default))
    return found


def _build(kind: type[Any], key: Key, values: Mapping[Key, Any]) -> Any:
    given = {}
    for field in msgspec.structs.fields(kind):
        inner = (*key, field.name)
        given[field.name] = values[inner] if inner in values else _build(field.type, inner, values)
    return kind(**given)


@cache
def _tree(wire: bool) -> Mapping[str, Any]:
    """The settings by name, in mappings as they are nested in JSON or TOML."""
    tree: dict[str, Any] = {}
    for field in fields().values():
        *outer, name = field.wire.split(".") if wire else field.key
        node = tree
        for each in outer:
            node = node.setdefault(each, {})
        node[name] = field
    return tree


def _read(
    options: object, tree: Mapping[str, Any], where: str, joint: str, values: dict[Key, Any], problems: list[str]
) -> None:
    if options is None or options == []:  # An empty table of Lua may be either.
        return
    if not isinstance(options, dict):
        problems.append(f"{where}: got {_shown(options)}, takes an object; it is not used")
        return
    for name, value in options.items():
        place = f"{where}{joint}{name}"
        if name not in tree:
            import difflib

            near = difflib.get_close_matches(str(name), tree, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(tree)}"
            problems.append(f"{_short(place)}: no such setting; {hint}")
        elif isinstance(field := tree[name], Field):
            if value == [] and isinstance(field.default, dict):
                value = {}
            try:
                values[field.key] = msgspec.convert(value, field.type)
            except msgspec.ValidationError:
                problems.append(f"{place}: got {_shown(value)}, takes {field.takes}; it is not used")
        else:
            _read(value, field, place, ".", values, problems)


def _keeps(holds: Any, theirs: Any) -> bool:
    """Whether what a workspace says is part of what holds."""
    if isinstance(theirs, tuple):
        return set(theirs) <= set(holds)
    if isinstance(theirs, Mapping):
        return all(holds[key] == value for key, value in theirs.items())
    return bool(holds == theirs)


def _options(kind: Any) -> Iterator[str]:
    """The words of a type; `msgspec.inspect` would sort them."""
    if get_origin(kind) is Literal:
        yield from get_args(kind)
    elif get_origin(kind) is Annotated:
        yield from _options(get_args(kind)[0])
    elif isinstance(kind, UnionType) or get_origin(kind) is Union:
        for each in get_args(kind):
            yield from _options(each)


def _words(kind: inspect.Type) -> str:
    match kind:
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType(ge=least, le=most):
            return f"a whole number from {least} to {most}"
        case inspect.StrType(min_length=least):
            return "a text that is not empty" if least else "a text"
        case inspect.VarTupleType(max_length=most):
            return f"a list of up to {most} texts"
        case inspect.DictType():
            return "an object of true and false"
    raise AssertionError(f"no words for {kind}")


def _shown(value: object) -> str:
    """The value as JSON, short enough for one line."""
    return _short(json.dumps(value, ensure_ascii=False, default=str))


def _short(text: str) -> str:
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= 60 else text[:57] + "..."
