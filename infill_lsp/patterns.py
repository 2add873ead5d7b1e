"""Patterns as in a `.gitignore`: which paths they are about, as git reads them.

They come from whoever wrote a workspace, so whatever stands in one, matching takes no longer than the product of the
lengths of pattern and path: of each star the shortest match is final, which loses nothing, and nothing goes back behind
it. A regular expression of the whole pattern would: `*a*a*a*a*b` takes minutes for a name of 60 characters, and all of
the server stands still meanwhile.

Paths have "/" between names. It does not know where patterns come from, nor what is done with what they match.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

#: What matches one name of a path; None stands for any number of names.
_Part = re.Pattern[str] | None

_ANY = re.compile(".*", re.DOTALL)
#: The pieces of a pattern for one name.
_GLOB = re.compile(
    r"\\(?P<escaped>.)|(?P<set>\[[!^]?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\])|(?P<stars>\*+)|(?P<any>\?)|(?P<other>[^\[\\])",
    re.DOTALL,
)
_IN_SET = re.compile(r"\\(?P<escaped>.)|\[:(?P<named>\w+):\]|(?P<other>.)", re.DOTALL)
#: Named sets of characters, ASCII alone as in git.
_NAMED = {
    "alnum": "a-zA-Z0-9",
    "alpha": "a-zA-Z",
    "blank": " \\t",
    "cntrl": "\\x00-\\x1f\\x7f",
    "digit": "0-9",
    "graph": "!-~",
    "lower": "a-z",
    "print": " -~",
    "punct": "!-/:-@\\[-`{-~",
    "space": "\\s",
    "upper": "A-Z",
    "xdigit": "0-9A-Fa-f",
}


@dataclass(frozen=True, slots=True)
class _Rule:
    """One pattern: whether what it matches is ignored, or taken back."""

    parts: tuple[_Part, ...]
    ignores: bool
    folders_only: bool

    def matches(self, names: Sequence[str]) -> bool:
        """Whether the path of these names matches; not what is in a folder that does."""
        parts = self.parts
        last = parts[-1]
        if last is not None and last.fullmatch(names[-1]) is None:
            return False
        if len(parts) == 2 and parts[0] is None:
            return True
        at = name = 0
        #: Behind the last None, and the name that it was tried from.
        after, tried = -1, 0
        while name < len(names):
            part = parts[at] if at < len(parts) else _ANY
            if part is None:
                at = after = at + 1
                tried = name
            elif at < len(parts) and part.fullmatch(names[name]):
                at, name = at + 1, name + 1
            elif after >= 0:
                tried += 1
                at, name = after, tried
            else:
                return False
        return at == len(parts)


class Patterns:
    """The patterns of one file, or of a setting, in their order."""

    def __init__(self, lines: Sequence[str]) -> None:
        #: The last one first: what it says holds.
        self._rules = [rule for line in reversed(lines) if (rule := _rule(line)) is not None]

    def says(self, path: str) -> bool | None:
        """Whether the path, a folder's if it ends with "/", is ignored; None where no pattern is about it.

        What is in a folder that is ignored is not asked about.
        """
        is_folder = path.endswith("/")
        names = path.rstrip("/").split("/")
        for rule in self._rules:
            if (is_folder or not rule.folders_only) and rule.matches(names):
                return rule.ignores
        return None

    def match(self, path: str) -> bool:
        """Whether a file, or a folder that it is in, is ignored."""
        names = path.split("/")
        folders = ("/".join(names[:depth]) + "/" for depth in range(1, len(names)))
        return any(self.says(each) for each in (*folders, path))


def _rule(line: str) -> _Rule | None:
    """None for a line that is no pattern, or a pattern that matches nothing: git passes over it, too."""
    if not line.strip() or line.startswith("#"):
        return None
    pattern = line if line.endswith("\\ ") else line.rstrip()
    ignores = not pattern.startswith("!")
    pattern = pattern if ignores else pattern[1:]
    folders_only = pattern.endswith("/")
    pattern = pattern.removesuffix("/")
    anywhere = "/" not in pattern
    globs = pattern.removeprefix("/").split("/")
    try:
        parts: list[_Part] = [None if glob == "**" and not anywhere else _part(glob) for glob in globs]
    except (ValueError, re.error):
        return None
    if anywhere:
        parts.insert(0, None)
    elif parts[-1] is None:
        parts.append(_ANY)  # Of a folder all that is in it, and not itself.
    return _Rule(tuple(parts), ignores, folders_only)


def _part(glob: str) -> re.Pattern[str]:
    """What matches one name. Raises `ValueError` and `re.error` for what matches none."""
    if not glob:
        raise ValueError("no name is empty")
    pieces = [""]  # Between stars; each matches texts of one length alone.
    end = 0
    for found in _GLOB.finditer(glob):
        if found.start() != end:
            break
        end = found.end()
        if found["stars"]:
            pieces.append("")
        elif found["set"]:
            pieces[-1] += _set(found["set"])
        else:
            pieces[-1] += "." if found["any"] else re.escape(found["escaped"] or found["other"])
    if end != len(glob):
        raise ValueError("a bracket or an escape is not ended")
    first, *middle = pieces
    last = f".*{middle.pop()}" if middle else ""
    return re.compile(first + "".join(f"(?>.*?{piece})" for piece in middle) + last, re.DOTALL)


def _set(glob: str) -> str:
    """The set of characters in brackets, as a regular expression's."""
    inner = glob[1:-1]
    first = int(inner[:1] in ("!", "^"))
    pieces: list[str] = []
    for found in _IN_SET.finditer(inner, first):
        if found["named"]:
            pieces.append(_NAMED.get(found["named"], ""))
        elif found["other"] == "-" and first < found.start() < len(inner) - 1:  # At either end it stands for itself.
            pieces.append("-")
        else:
            pieces.append(re.escape(found["escaped"] or found["other"]))
    return f"[{'^' * first}{''.join(pieces)}]"
