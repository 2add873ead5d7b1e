"""Where settings come from: the person's own file, the editor, and the files with which a workspace restricts them.

Says what holds for a folder and for a document, and where each value comes from. It does not know LSP, nor what a
setting does.
"""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from infill_lsp.core import Silence, Trigger
from infill_lsp.settings import DEFAULT, Effective, Layer, Settings, read, settle

if TYPE_CHECKING:
    from infill_lsp.patterns import Patterns

#: The person's file, and those of a workspace with the table in them that is ours.
USER_FILE = "infill.toml"
WORKSPACE_FILES: Mapping[str, tuple[str, ...]] = {"pyproject.toml": ("tool", "infill"), ".infill.toml": ()}
#: Bytes of the longest file that is read.
MAX_BYTES = 1024 * 1024

NOTHING = Layer(DEFAULT, {})


def user_file() -> Path:
    """The person's settings. `INFILL_CONFIG_DIR` overrides the folder."""
    folder = os.environ.get("INFILL_CONFIG_DIR")
    if not folder:
        import platformdirs

        folder = platformdirs.user_config_dir("infill-lsp")
    return Path(folder) / USER_FILE


@dataclass(frozen=True, slots=True)
class Found:
    """What files say: the person's, and those of each folder."""

    user: Layer
    workspace: Mapping[str, tuple[Layer, ...]]


class Sources:
    """All that is said about settings in one editor. Folders and documents are named by their URIs."""

    def __init__(self) -> None:
        self._initialization = self._pushed = NOTHING
        self._pulled: Mapping[str, Layer] = {}
        self._found = Found(NOTHING, {})
        self._files: dict[str, _File] = {}
        self._effective: dict[str, Effective] = {}

    @classmethod
    def of_files(cls, *folders: str) -> Sources:
        """What files alone say, without an editor."""
        sources = cls()
        sources.take(sources.look(folders))
        return sources

    @property
    def general(self) -> Settings:
        """What holds in no folder, and for what all folders share: the engine and the log."""
        return self.effective().settings

    @property
    def problems(self) -> list[str]:
        """A line for each value that is not used."""
        lines = [line for folder in ("", *self._found.workspace) for line in self.effective(folder).problems]
        return list(dict.fromkeys(lines))

    @property
    def everywhere(self) -> Mapping[str, Effective]:
        """What holds in each folder; without any, what holds in none, under ""."""
        return {folder: self.effective(folder) for folder in self._found.workspace or ("",)}

    @property
    def off(self) -> Silence | None:
        """Why nothing is offered in any folder; None where something may be."""
        reasons = [effective.settings.off for effective in self.everywhere.values()]
        return reasons[0] if all(reasons) else None

    def effective(self, folder: str = "") -> Effective:
        """The settings of a folder, and where they come from; "" is none."""
        if folder not in self._effective:
            editor = self._pulled.get(folder, self._pulled.get("", self._pushed))
            layers = (self._found.user, self._initialization, editor)
            self._effective[folder] = settle(layers, self._found.workspace.get(folder, ()))
        return self._effective[folder]

    def folder_of(self, document: str) -> str:
        """The innermost folder that a document lies in, whatever its scheme: a cell of a notebook, or an unsaved file,
        belongs to the folder too. "" without one."""
        path = _path(document)
        return max((folder for folder in self._found.workspace if _inside(path, _path(folder))), key=len, default="")

    def for_document(self, document: str) -> Settings:
        return self.effective(self.folder_of(document)).settings

    def silence(self, document: str, language: str, trigger: Trigger, around: str = "") -> Silence | None:
        """Why nothing is offered in a document, None where it is: `language` is the one at the cursor, `around` the
        document's own."""
        folder = self.folder_of(document)
        settings = self.effective(folder).settings
        if (silence := settings.silence(language, trigger, around)) is not None:
            return silence
        if settings.exclude:
            path = _path(document)
            if _patterns(settings.exclude).match(path[len(_path(folder)) :].lstrip("/")):
                return Silence("the document is excluded (infill.exclude)")
        return None

    def initialize(self, options: object) -> None:
        """What the editor says at its start: the section itself, or under `infill`."""
        self._initialization = read(options.get("infill", options) if isinstance(options, dict) else options)
        self._effective.clear()

    def push(self, section: object) -> None:
        """What the editor says unasked, in place of what it said so before."""
        self._pushed = read(section)
        self._effective.clear()

    def pull(self, sections: Mapping[str, object]) -> None:
        """What the editor answered for each folder and for none; null where it has nothing to say."""
        self._pulled = {folder: read(section) for folder, section in sections.items() if section is not None}
        self._effective.clear()

    def look(self, folders: Sequence[str]) -> Found:
        """Reads the files of the person and of these folders, as far as they changed. Blocks, and touches nothing that
        another method reads: belongs in a thread, one at a time."""
        path = user_file()
        user = self._file(path, _homely(path), ())
        return Found(user, {folder: self._restrictions(folder) for folder in folders})

    def take(self, found: Found) -> bool:
        """From now on this is what files say, and these are the folders. Returns whether it is anything new."""
        if found == self._found:
            return False
        self._found = found
        self._effective.clear()
        return True

    def _restrictions(self, folder: str) -> tuple[Layer, ...]:
        parts = urlsplit(folder)
        if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
            return ()
        root = Path(_path(folder))
        return tuple(
            layer
            for name, table in WORKSPACE_FILES.items()
            if (layer := self._file(root / name, f"{name} of {root.name}", table)) is not NOTHING
        )

    def _file(self, path: Path, source: str, table: tuple[str, ...]) -> Layer:
        return self._files.setdefault(str(path), _File(path, source, table)).layer()


class _File:
    """One file with settings, read again where it changed."""

    def __init__(self, path: Path, source: str, table: tuple[str, ...]) -> None:
        self._path = path
        self._source = source
        #: The names of the table that holds the section; none where the file is the section.
        self._table = table
        self._stamp: tuple[int, ...] | None = None
        self._layer = NOTHING

    def layer(self) -> Layer:
        stamp = self._look()
        if stamp != self._stamp:
            self._stamp = stamp
            self._layer = NOTHING if stamp is None else self._read()
        return self._layer

    def _look(self) -> tuple[int, ...] | None:
        try:
            found = self._path.stat()
        except (OSError, ValueError):
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> Layer:
        try:
            section: Any = tomllib.loads(_text(self._path))
        except (OSError, ValueError) as error:
            # Half an edit is no reason to drop what held before. What others have in a file is theirs to see to.
            why = error.strerror if isinstance(error, OSError) else str(error)
            problem = () if self._table else (f"{self._source}: cannot be read ({why}): it is not used",)
            return Layer(self._source, self._layer.values, problem)
        for name in self._table:
            section = section.get(name) if isinstance(section, dict) else None
        return NOTHING if section is None else read(section, self._source)


@cache
def _patterns(exclude: tuple[str, ...]) -> Patterns:
    from infill_lsp.patterns import Patterns

    return Patterns(exclude)


def _text(path: Path) -> str:
    """Raises `OSError` and `ValueError` where the file holds no text of a sensible size."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # A pipe must not block.
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("no file")
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError("too long")
    return data.decode("utf-8-sig")


def _homely(path: Path) -> str:
    """The path as a person writes it."""
    home = os.path.expanduser("~")
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def _path(uri: str) -> str:
    return unquote(urlsplit(uri).path).rstrip("/")


def _inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")
