"""What may be read of a workspace folder: every file that is read or listed for context comes from here.

Not read are: what `.gitignore`, `.ignore`, the repository's and the person's own exclude files and the settings leave
out; names that stand for secrets; what people did not write (dependencies, binary, generated, minified and huge
files); and symbolic links, which lead in circles or out of the folder. In doubt a file is not read.

It does not know what a text is read for. Paths are relative to the folder, with "/" between names.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import translate
from functools import cache, lru_cache
from typing import Literal

from infill_lsp.patterns import Patterns

#: Why a file is not read.
Reason = Literal["ignored", "secret", "binary", "generated", "minified", "huge", "unreadable"]

#: Names (lower case) of files that hold keys, passwords or tokens.
SECRET_FILES = (
    # environment files
    ".env*",
    "*.env",
    "*.env.local",
    "*.env.production",
    ".flaskenv",
    ".dev.vars*",
    "*.tfvars",
    "*.tfvars.json",
    "*.tfstate",
    "*.tfstate.*",
    "local.settings.json",
    # keys and certificates
    "*.pem",
    "*.key",
    "*.p8",
    "*.pk8",
    "*.pkcs8",
    "*.jwk",
    "*.p12",
    "*.pfx",
    "*.pkcs12",
    "*.der",
    "*.crt",
    "*.cert",
    "*.cer",
    "*.csr",
    "*.jks",
    "*.jceks",
    "*.bks",
    "*.keystore",
    "*.keytab",
    "*.kdb",
    "*.kdbx",
    "*.ppk",
    "*.gpg",
    "*.pgp",
    "*.asc",
    "*.agekey",
    "*.ovpn",
    "*.mobileprovision",
    "id_rsa*",
    "id_dsa*",
    "id_ecdsa*",
    "id_ed25519*",
    "authorized_keys*",
    "known_hosts*",
    "ssh_host_*",
    "keystore.properties",
    # passwords of tools and services
    ".netrc",
    "_netrc",
    ".authinfo*",
    ".pgpass",
    ".my.cnf",
    ".mylogin.cnf",
    ".htpasswd",
    ".git-credentials",
    ".gitcookies",
    ".msmtprc",
    "rclone.conf",
    "pip.conf",
    ".sentryclirc",
    "passwords.txt",
    ".vault_pass*",
    ".vault-pass*",
    "vault.yml",
    "vault.yaml",
    "wallet.dat",
    "wp-config.php",
    "credentials",
    "credentials.json",
    "credentials.toml",
    "credentials.tfrc.json",
    "*-credentials.json",
    "secrets.yml",
    "secrets.yaml",
    "secrets.json",
    "secrets.toml",
    "secrets.*.yml",
    "secrets.*.yaml",
    "secret.yml",
    "secret.yaml",
    "*.secret",
    "*.secrets",
    # tokens of clouds and package registries
    ".npmrc",
    ".pypirc",
    ".yarnrc.yml",
    "auth.json",
    "auth.toml",
    "nuget.config",
    "kaggle.json",
    "token.json",
    ".boto",
    ".s3cfg",
    ".dockercfg",
    ".dockerconfigjson",
    ".terraformrc",
    "terraform.rc",
    ".vault-token",
    ".databrickscfg",
    "ngrok.yml",
    "kubeconfig",
    "*.kubeconfig",
    "kubeconfig.*",
    "service-account*.json",
    "service_account*.json",
    "serviceaccount*.json",
    "client_secret*.json",
    "client-secret*.json",
    "*firebase-adminsdk*.json",
    # what was typed into shells
    ".*_history",
)

#: Files (lower case) that hold them where they are in a folder of that name.
SECRET_PATHS = frozenset(
    {".docker/config.json", ".m2/settings.xml", ".gradle/gradle.properties", ".config/hub", "gh/hosts.yml"}
)

#: Names (lower case) of folders in which nothing is ever read.
SECRET_FOLDERS = frozenset(
    {
        ".1password",
        ".aliyun",
        ".aws",
        ".azure",
        ".bitcoin",
        ".bluemix",
        ".chef",
        ".credentials",
        ".databricks",
        ".electrum",
        ".ethereum",
        ".fly",
        ".gcloud",
        ".gnupg",
        ".heroku",
        ".kube",
        ".mozilla",
        ".netlify",
        ".oci",
        ".password-store",
        ".pki",
        ".pulumi",
        ".railway",
        ".secrets",
        ".snowflake",
        ".ssh",
        ".terraform.d",
        ".thunderbird",
        ".vault",
        ".vercel",
        ".wrangler",
    }
)

#: Names of folders that tools fill: versions, dependencies, caches, outputs.
TOOL_FOLDERS = frozenset(
    {
        ".bzr",
        ".cache",
        ".direnv",
        ".eggs",
        ".git",
        ".gradle",
        ".hg",
        ".hypothesis",
        ".idea",
        ".ipynb_checkpoints",
        ".jj",
        ".mypy_cache",
        ".next",
        ".nox",
        ".nuxt",
        ".nyc_output",
        ".pnpm-store",
        ".pytest_cache",
        ".ruff_cache",
        ".svelte-kit",
        ".svn",
        ".terraform",
        ".tox",
        ".venv",
        ".vs",
        ".yarn",
        "__pycache__",
        "__pypackages__",
        "bower_components",
        "node_modules",
        "site-packages",
        "venv",
    }
)

#: Names (lower case) of files that tools write.
GENERATED_FILES = (
    "*.min.js",
    "*.min.css",
    "*.bundle.js",
    "*.map",
    "*.lock",
    "package-lock.json",
    "npm-shrinkwrap.json",
    "pnpm-lock.yaml",
    "go.sum",
    "*_pb2.py",
    "*_pb2.pyi",
    "*_pb2_grpc.py",
    "*.pb.go",
    "*.pb.h",
    "*.pb.cc",
    "*.g.dart",
    "*.designer.cs",
    "*.snap",
)

#: Endings (lower case) of files that are no text, or text that is data.
BINARY_FILES = (
    *("*.png", "*.jpg", "*.jpeg", "*.gif", "*.bmp", "*.ico", "*.icns", "*.webp", "*.tif", "*.tiff", "*.svg", "*.psd"),
    *("*.mp3", "*.mp4", "*.wav", "*.ogg", "*.flac", "*.avi", "*.mov", "*.mkv", "*.webm"),
    *("*.zip", "*.gz", "*.bz2", "*.xz", "*.zst", "*.7z", "*.rar", "*.tar", "*.tgz", "*.jar", "*.war", "*.whl", "*.egg"),
    *("*.so", "*.so.*", "*.o", "*.a", "*.dll", "*.dylib", "*.exe", "*.lib", "*.obj", "*.class", "*.pyc", "*.pyo"),
    *("*.wasm", "*.bin", "*.dat", "*.db", "*.sqlite", "*.sqlite3", "*.db-wal", "*.db-shm", "*.mdb", "*.img", "*.iso"),
    *("*.pdf", "*.doc", "*.docx", "*.xls", "*.xlsx", "*.ppt", "*.pptx", "*.odt", "*.ttf", "*.otf", "*.woff", "*.woff2"),
    *("*.npy", "*.npz", "*.pt", "*.pth", "*.ckpt", "*.safetensors", "*.gguf", "*.onnx", "*.pkl", "*.parquet", "*.h5"),
    *("*.csv", "*.tsv", "*.jsonl", "*.ipynb", "*.log", "*.swp"),
)

#: Files with rules, in each folder; what the later one says holds.
IGNORE_FILES = (".gitignore", ".ignore")

#: Bytes of the longest file that is read, and of the longest file with rules.
MAX_BYTES = 512 * 1024
MAX_RULES_BYTES = 256 * 1024
#: Files of a folder that are told of at once: of 200,000 in one folder only so many are held.
LISTED = 1000

#: Seconds to wait for git to say where the person's own rules are, and what of the environment it looks at for that.
GIT_S = 2.0
_WHERE_GIT_LOOKS = ("HOME", "XDG_CONFIG_HOME", "GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "GIT_CONFIG_NOSYSTEM")

#: Characters a line has in a minified file: on the average, or one of them.
MINIFIED_MEAN, MINIFIED_LINE = 160, 5_000
#: Characters at a file's start in which a tool says that it wrote the file.
MARKED = 1_000

_SECRET = re.compile("|".join(map(translate, SECRET_FILES)))
_GENERATED = re.compile("|".join(map(translate, GENERATED_FILES)))
_BINARY = re.compile("|".join(map(translate, BINARY_FILES)))
_MARK = re.compile(r"@generated\b|\bDO NOT (?:EDIT|MODIFY)\b|\b[Cc]ode generated by\b|\b[Aa]uto-?generated\b")


class Refused(Exception):
    """A file that is not read; `reason` says why."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Source:
    """A file's text, LF only, and the `os.stat_result` of when it was read."""

    text: str
    stat: os.stat_result


@dataclass(frozen=True, slots=True)
class Listing:
    """One folder ("" is the workspace folder itself) and the files in it that may be read, as far as names tell; or
    some of its files, where it has many."""

    folder: str
    files: list[tuple[str, os.stat_result]]
    #: False where the system denied the look, or another look: then `files` is empty.
    readable: bool = True


def is_secret(path: str) -> bool:
    """Whether a file of this name, or in a folder of such a name, is never completed and never read for context."""
    *folders, name = path.lower().split("/")
    if _SECRET.match(name) is not None or not SECRET_FOLDERS.isdisjoint(folders):
        return True
    return bool(folders) and f"{folders[-1]}/{name}" in SECRET_PATHS


@lru_cache(maxsize=1024)
def leads_to_secret(path: str) -> bool:
    """Whether this path, or where it is absolute what it is a symbolic link to, has such a name. Each key stroke asks:
    what a link led to when it was first asked about is kept."""
    return is_secret(path) or (os.path.isabs(path) and is_secret(os.path.realpath(path)))


def unfit(text: str) -> Reason | None:
    """Why a text (of a file, or of an open document) is not worth reading; None where it is."""
    if len(text) > MAX_BYTES:
        return "huge"
    if "\0" in text:
        return "binary"
    if _MARK.search(text, 0, MARKED):
        return "generated"
    lines = text.count("\n") + 1
    if len(text) > MINIFIED_MEAN * lines + MINIFIED_LINE or max(map(len, text.split("\n"))) > MINIFIED_LINE:
        return "minified"
    return None


def lf(text: str) -> str:
    """The text with "\\n" for each line end that LSP knows."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


class Ignore:
    """The rules of one workspace folder, each read when it is first needed. Not thread-safe.

    `exclude` holds patterns as in a `.gitignore` at the top of the folder; no file can take them back.
    """

    def __init__(self, root: str, exclude: Sequence[str] = ()) -> None:
        self.root = os.path.realpath(root)
        self._exclude = Patterns(exclude)
        self._rules: dict[str, Patterns] = {}
        self._folders: dict[str, bool] = {"": True}
        self._outer: list[tuple[str, Patterns]] | None = None

    def refusal(self, path: str) -> Reason | None:
        """Why a file of this name is not read, None where it may be. Looks at the rules, not at the file."""
        if is_secret(path):
            return "secret"
        folder, _, name = path.rpartition("/")
        lower = name.lower()
        if _BINARY.match(lower):
            return "binary"
        if _GENERATED.match(lower):
            return "generated"
        if not path.isprintable() or not self.enters(folder) or self._ignored(path):
            return "ignored"
        return None

    @property
    def outside(self) -> list[str]:
        """The folders around this one whose rules hold here, too."""
        git, folder, found = _git_folder(self.root), self.root, list[str]()
        while git is not None and folder != git:
            folder = os.path.dirname(folder)
            found.append(folder)
        return [*found, os.path.join(git, ".git", "info")] if git is not None and found else found

    def ignored(self, path: str) -> bool:
        """Whether a rule of a `.gitignore` or the like leaves the file out, or a folder that it is in."""
        parts = path.split("/")
        folders = ("/".join(parts[:count]) + "/" for count in range(1, len(parts)))
        return any(map(self._ruled_out, (*folders, path)))

    def enters(self, folder: str) -> bool:
        """Whether the folder is looked into, as far as names and rules tell."""
        known = self._folders.get(folder)
        if known is None:
            parent, _, name = folder.rpartition("/")
            lower = name.lower()
            known = (
                self.enters(parent)
                and name not in TOOL_FOLDERS
                and lower not in SECRET_FOLDERS
                and not lower.endswith(".egg-info")
                and name.isprintable()
                and not self._ignored(folder + "/")
            )
            self._folders[folder] = known
        return known

    def read(self, path: str) -> Source:
        """Raises `Refused` where the file may not be read, cannot be, or is not worth it."""
        if (reason := self.refusal(path)) is not None:
            raise Refused(reason)
        full = os.path.join(self.root, path)
        folder = os.path.dirname(full)
        if os.path.realpath(folder) != folder:
            raise Refused("ignored")
        try:
            # A pipe that nobody writes to would block.
            descriptor = os.open(full, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            raise Refused("unreadable") from None
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise Refused("unreadable")
            if status.st_size > MAX_BYTES:
                raise Refused("huge")
            try:
                data = file.read(MAX_BYTES + 1)
            except OSError:
                raise Refused("unreadable") from None
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise Refused("binary") from None
        text = lf(text)
        if (reason := unfit(text)) is not None:
            raise Refused(reason)
        return Source(text, status)

    def leads_away(self, path: str) -> bool:
        """Whether the path is a symbolic link now: what is behind it is read neither from disk nor from an editor."""
        return os.path.islink(self._full(path))

    def walk(self, start: str = "") -> Iterator[Listing]:
        """The folder `start` and what is below it, folder by folder, nearest first; each at least once."""
        if not self.enters(start) or os.path.realpath(self._full(start)) != self._full(start):
            return
        queue = deque([start])
        while queue:
            folder = queue.popleft()
            files: list[tuple[str, os.stat_result]] = []
            try:
                with os.scandir(self._full(folder)) as entries:
                    for entry in entries:
                        path = f"{folder}/{entry.name}" if folder else entry.name
                        if entry.is_dir(follow_symlinks=False):
                            if self.enters(path):
                                queue.append(path)
                        elif entry.is_file(follow_symlinks=False) and self.refusal(path) is None:
                            status = _status(entry)
                            if status is not None:
                                files.append((path, status))
                                if len(files) == LISTED:
                                    yield Listing(folder, files)
                                    files = []
            except OSError:
                if os.path.lexists(self._full(folder)):  # Not gone since it was seen, but denied.
                    yield Listing(folder, [], readable=False)
            else:
                yield Listing(folder, files)

    def _full(self, path: str) -> str:
        return os.path.join(self.root, path) if path else self.root

    def _ignored(self, path: str) -> bool:
        """`path` ends with "/" where it is a folder. The nearest folder that has a rule for it decides, as in git."""
        return bool(self._exclude.says(path)) or self._ruled_out(path)

    def _ruled_out(self, path: str) -> bool:
        folder = path.rstrip("/")
        while folder:
            folder = folder.rpartition("/")[0]
            said = self._rules_in(folder).says(path[len(folder) + 1 if folder else 0 :])
            if said is not None:
                return said
        for prefix, rules in self._outer_rules():
            said = rules.says(prefix + path)
            if said is not None:
                return said
        return False

    def _rules_in(self, folder: str) -> Patterns:
        if folder not in self._rules:
            self._rules[folder] = _rules_of(self._full(folder))
        return self._rules[folder]

    def _outer_rules(self) -> list[tuple[str, Patterns]]:
        """Rules from outside the folder, the nearest first, each with how the folder is called from there."""
        if self._outer is None:
            folder, prefix = self.root, ""
            found: list[tuple[str, Patterns]] = []
            git = _git_folder(folder)
            while git is not None and folder != git:
                folder, name = os.path.split(folder)
                prefix = f"{name}/{prefix}"
                found.append((prefix, _rules_of(folder)))
            if git is not None:
                found.append((prefix, Patterns(_lines(os.path.join(git, ".git", "info", "exclude")))))
            found.append((prefix, Patterns(_lines(_personal_excludes(*map(os.environ.get, _WHERE_GIT_LOOKS))))))
            self._outer = found
        return self._outer


def _git_folder(folder: str) -> str | None:
    """The nearest folder, from here up, that holds a repository."""
    while not os.path.exists(os.path.join(folder, ".git")):
        parent = os.path.dirname(folder)
        if parent == folder:
            return None
        folder = parent
    return folder


@cache
def _personal_excludes(*_environment: str | None) -> str:
    """The file of patterns that the person's git leaves out everywhere (git-config(1), core.excludesFile). Asked once
    for an environment: nothing in a folder can change the answer, and git takes 2 ms."""
    command = ["git", "config", "--type=path", "--get", "core.excludesFile"]
    with suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(command, capture_output=True, cwd="/", timeout=GIT_S, stdin=subprocess.DEVNULL)
        if said.returncode == 0:
            return os.fsdecode(said.stdout.removesuffix(b"\n"))
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return os.path.join(config, "git", "ignore")


def _rules_of(folder: str) -> Patterns:
    return Patterns([line for name in IGNORE_FILES for line in _lines(os.path.join(folder, name))])


def _lines(path: str) -> list[str]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        with open(descriptor, encoding="utf-8", errors="replace") as file:
            return file.read(MAX_RULES_BYTES).split("\n")
    except OSError:  # A folder, or a pipe.
        return []


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return entry.stat(follow_symlinks=False)
    except OSError:
        return None
