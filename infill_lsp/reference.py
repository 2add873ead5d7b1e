"""What is written of the settings elsewhere, made from their one definition: JSON schemas, tables, VS Code's manifest.

`python -m infill_lsp.reference` writes all of it into a clone of the repository. It knows how each place wants it, and
no setting by name.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from infill_lsp.settings import Field, fields

ROOT = Path(__file__).parents[1]
MANIFEST = "editors/vscode/package.json"
#: Where a table stands in Markdown: between these lines.
BEGIN, END = "<!-- settings: begin -->", "<!-- settings: end -->"
#: Where it stands in Neovim's help: below this tag, up to the next ruler.
HELP_TAG = "*infill-server-settings*"
RULER = "=" * 78
HELP_WIDTH = 78


def written(root: Path = ROOT) -> dict[Path, str]:
    """The text that each file has to have, made of what else is in it."""

    def changed(name: str, change: Callable[[str], str]) -> tuple[Path, str]:
        path = root / name
        return path, change(_text(path))

    return dict(
        (
            (root / "docs/settings.schema.json", _json(schema(lambda field: field.wire.split(".")))),
            (root / "docs/infill.toml.schema.json", _json(schema(lambda field: field.key))),
            changed("docs/settings.md", lambda text: _between(text, table())),
            changed("editors/vscode/README.md", lambda text: _between(text, vscode_table(_text(root / MANIFEST)))),
            changed("editors/neovim/doc/infill.txt", _help),
            changed(MANIFEST, lambda text: _json(manifest(json.loads(text)))),
        )
    )


def schema(names: Callable[[Field], Any]) -> dict[str, Any]:
    """The JSON schema of the section, its keys named by `names`: the parts of a setting's name, the outermost first."""
    top: dict[str, Any] = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "infill", **_object()}
    for field in fields().values():
        *outer, name = names(field)
        node = top
        for each in outer:
            node = node["properties"].setdefault(each, _object())
        node["properties"][name] = _value(field)
    return top


def table() -> str:
    """The settings as a table in Markdown."""
    rows = ["| key | takes | default | what it does | a workspace may |", "|---|---|---|---|---|"]
    for field in fields().values():
        cells = (f"`{field.wire}`", field.takes, f"`{json.dumps(field.default)}`", field.help, field.workspace or "–")
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def vscode_table(manifest_text: str) -> str:
    """The settings of the extension, with its own, as a table in Markdown."""
    rows = ["| Setting | Default | What it does |", "|---|---|---|"]
    for section in manifest(json.loads(manifest_text))["contributes"]["configuration"]:
        for name, known in section["properties"].items():
            default = json.dumps(known["default"])
            rows.append(f"| `{name}` | `{default}` | {known['markdownDescription']} |")
    return "\n".join(rows)


def manifest(current: Mapping[str, Any]) -> dict[str, Any]:
    """VS Code's manifest with the server's settings in the first section; the others are the extension's own."""
    new = json.loads(json.dumps(current))
    _, *own = new["contributes"]["configuration"]
    properties = {f"infill.{field.wire}": _property(field, order) for order, field in enumerate(fields().values())}
    new["contributes"]["configuration"] = [{"title": "Infill", "properties": properties}, *own]
    trust = new["capabilities"]["untrustedWorkspaces"]
    ours = list(properties)  # One that is given again holds over the person's: it could widen what is read, too.
    names = {name for section in own for name in section["properties"]}
    trust["restrictedConfigurations"] = [*(each for each in trust["restrictedConfigurations"] if each in names), *ours]
    return dict(new)


def _value(field: Field) -> dict[str, Any]:
    value = msgspec.json.schema(field.type)
    if "anyOf" in value:  # Words or null: editors show one list.
        del value["anyOf"]
        value |= {"type": ["string", "null"], "enum": [*field.options, None]}
    elif field.options:
        value |= {"type": "string", "enum": list(field.options)}
    return {**value, "default": field.default}


def _property(field: Field, order: int) -> dict[str, Any]:
    """What VS Code shows. A folder cannot set what a workspace's own files cannot."""
    value = _value(field)
    help = value.pop("description")
    scope = "machine" if field.restriction == "never" else "resource"
    return {**value, "scope": scope, "order": order, "markdownDescription": help}


def _object() -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": {}}


def _help(text: str) -> str:
    """Neovim's help with its list of the settings."""
    before, tag, after = text.partition(HELP_TAG + "\n")
    _, ruler, rest = after.partition(RULER)
    if not tag or not ruler:
        raise ValueError(f"no {HELP_TAG} and ruler in the help file")
    lines = []
    for field in fields().values():
        lines += [f"{field.wire}", *_wrapped(f"{field.help} Takes {field.takes}; default {_lua(field.default)}.")]
    return f"{before}{tag}\n{chr(10).join(lines)}\n\n{ruler}{rest}"


def _wrapped(text: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, HELP_WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 4, break_on_hyphens=False)


def _lua(value: object) -> str:
    if value is None:
        return "nil"
    return "{}" if value in ((), {}) else json.dumps(value)


def _between(text: str, table: str) -> str:
    pattern = re.compile(f"(?<={re.escape(BEGIN)}\n).*?(?={re.escape(END)})", re.DOTALL)
    new, count = pattern.subn(lambda _: table + "\n", text)
    if count != 1:
        raise ValueError(f"no {BEGIN} and {END}")
    return new


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def main() -> int:
    """Writes what is out of date, and says what that was."""
    if not (ROOT / MANIFEST).exists():
        print("infill-lsp: this is no clone of the repository: there is nothing to write into", file=sys.stderr)
        return 1
    for path, text in written().items():
        if not path.exists() or _text(path) != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
