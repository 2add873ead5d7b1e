"""The text that the embedded model is trained and measured on: source files of permissively licensed packages.

A manifest names the packages, each with its version, hash, licence and split. `build` fetches their archives with the
registries' own clients, reads them without unpacking anything to disk or running anything of theirs, keeps what people
wrote, drops duplicates within and across splits, and writes one file a split. The same manifest gives the same bytes.

It knows nothing of tokens and gaps.
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from infill_engine.fetch import FetchError, Report

Registry = Literal["pypi", "npm", "debian"]
Split = Literal["held", "train"]
Language = Literal[
    "python", "typescript", "javascript", "go", "rust", "java", "c", "cpp", "shell", "sql", "yaml", "toml", "markdown"
]
Licence = Literal["MIT", "BSD-2-Clause", "BSD-3-Clause", "0BSD", "Apache-2.0", "ISC", "PSF-2.0", "Unlicense", "Zlib"]
#: Why a file was left out, in the order in which the rules are asked.
Rule = Literal[
    "unsafe", "reserved", "vendored", "fixture", "size", "generated", "encoding", "licence", "compiled", "long line",
    "data", "cap", "duplicate", "near-duplicate",
]  # fmt: skip
#: Held out first: where two splits have the same text, training loses it.
SPLITS: tuple[Split, ...] = get_args(Split)
LANGUAGES: tuple[Language, ...] = get_args(Language)
RULES: tuple[Rule, ...] = get_args(Rule)

#: Projects that are kept for evaluation elsewhere: in no split, neither as packages nor as folders of others.
RESERVED = frozenset({
    "litestar", "structlog", "copier", "hatchling", "anyio", "zarr", "pdm", "dulwich", "nicegui", "msgspec", "trio",
    "kombu", "fastify", "got", "undici", "zod", "hono", "pino",
})  # fmt: skip

#: The committed manifest.
MANIFEST = Path(__file__).with_name("corpus.toml")

#: Bytes of a file that is worth learning from; a smaller one is boilerplate, a larger one data.
MIN_BYTES, MAX_BYTES = 600, 200_000
#: Characters of a line that somebody wrote.
MAX_LINE = 300
#: Limits of one archive: files, and bytes unpacked. The largest of the manifest have 67,000 files, and 274 MiB.
MAX_MEMBERS, MAX_UNPACKED = 300_000, 4 * 2**30

_SUFFIXES: dict[str, Language] = {
    ".py": "python",
    ".ts": "typescript",
    ".tsx": "typescript",
    ".mts": "typescript",
    ".js": "javascript",
    ".jsx": "javascript",
    ".mjs": "javascript",
    ".cjs": "javascript",
    ".go": "go",
    ".rs": "rust",
    ".java": "java",
    ".c": "c",
    ".h": "c",
    ".cc": "cpp",
    ".cpp": "cpp",
    ".cxx": "cpp",
    ".hh": "cpp",
    ".hpp": "cpp",
    ".hxx": "cpp",
    ".sh": "shell",
    ".bash": "shell",
    ".zsh": "shell",
    ".bats": "shell",
    ".sql": "sql",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".toml": "toml",
    ".md": "markdown",
}
_SHEBANG = re.compile(rb"#!.*\b(sh|bash|zsh)\b")

_VENDORED = frozenset({
    "vendor", "vendored", "_vendor", "_vendored", "node_modules", "bower_components", "third_party", "third-party",
    "thirdparty", "3rdparty", "external", "extern", "deps", "godeps", "dist", "build",
})  # fmt: skip
_FIXTURES = frozenset({
    "fixture", "fixtures", "__fixtures__", "testdata", "test_data", "test-data", "snapshots", "__snapshots__",
    "baselines", "golden", "goldens", "cassettes",
})  # fmt: skip
_GENERATED_NAME = re.compile(
    r"(_pb2(_grpc)?\.py|\.pb\.(go|cc|h)|\.pb\.gw\.go|\.gen\.go|\.d\.[cm]?ts|[.-]min\.[cm]?js|-lock\.ya?ml)$"
    r"|^(zz_generated|changelog|changes|history|authors|contributors|licen[cs]e|copying|notice)\b"
)
_GENERATED = re.compile(
    r"\bgenerated (by|from)\b|do not (edit|modify)|@generated|\bauto(matically)?[ -]?generated", re.IGNORECASE
)
_COPYLEFT = re.compile(
    r"general\s+public\s+licen[cs]e|SPDX-License-Identifier:.*GPL|Mozilla\s+Public\s+License", re.IGNORECASE
)
_COMPILED = re.compile(r"sourceMappingURL=|\"__esModule\"|_interopRequire|\b__(awaiter|generator|importDefault)\b")
#: What no client takes for an option, a path or an address.
_NAME = re.compile(r"(@[a-z0-9][\w.-]*/)?[A-Za-z0-9][\w.+-]*")
_VERSION = re.compile(r"[A-Za-z0-9][\w.+~-]*")
#: Characters at a file's top in which it says where it comes from.
_TOP = 2_000


class ManifestError(ValueError):
    """A manifest that cannot be built; the text is one line that says what to change."""


class Package(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One package of one registry, known by the hash of its archive."""

    name: str
    version: str
    registry: Registry
    #: Of the wheel, the npm tarball, or the upstream tarball of the Debian source package.
    sha256: str
    #: The licences it may be used under, any of them.
    licence: tuple[Licence, ...]
    #: Files in other languages are not looked at. The first of c and cpp says which `.h` files are.
    languages: tuple[Language, ...]
    split: Split
    #: Folders of it to leave out, such as a compiler's test programs.
    skip: tuple[str, ...] = ()
    #: Instead of the manifest's `package_bytes`, for a large one in a language that few packages bring.
    package_bytes: int | None = None


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the corpus is made of."""

    #: Most bytes of text of one package in one language, so that no style prevails; which files is drawn by hash.
    package_bytes: int
    packages: tuple[Package, ...]
    #: Bytes by language that this manifest gave, all splits together; for people, and for the test of the shares.
    kept: dict[Language, int] = {}


class Document(msgspec.Struct, frozen=True):
    """One source file. `text` ends its lines with "\\n" alone."""

    package: str
    language: Language
    #: Inside the package, without the archive's top folder.
    path: str
    text: str


class Amount(msgspec.Struct, frozen=True):
    files: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Corpus:
    """What `build` wrote, and what became of the files it read."""

    folder: Path
    kept: Mapping[tuple[Language, Split], Amount]
    dropped: Mapping[Rule, int]

    def rows(self) -> Iterator[tuple[str, ...]]:
        """The summary as a table: for each language with text its share, then files and kB a split; then the drops."""
        total = sum(amount.bytes for amount in self.kept.values()) or 1
        yield ("language", "share", *(f"{split} {unit}" for split in SPLITS for unit in ("files", "kB")))
        for language in LANGUAGES:
            amounts = [self.kept.get((language, split), Amount()) for split in SPLITS]
            if any(amount.files for amount in amounts):
                share = sum(amount.bytes for amount in amounts) / total
                yield (language, f"{share:.1%}", *_cells(amounts))
        sums = [
            Amount(
                sum(amount.files for (_, of), amount in self.kept.items() if of == split),
                sum(amount.bytes for (_, of), amount in self.kept.items() if of == split),
            )
            for split in SPLITS
        ]
        yield ("all", "", *_cells(sums))
        for rule in RULES:
            if rule in self.dropped:
                yield (f"dropped: {rule}", "", f"{self.dropped[rule]:,}")


def load_manifest(path: Path = MANIFEST) -> Manifest:
    """Reads and checks a manifest. Raises `ManifestError`, and `OSError` where it cannot be read."""
    try:
        manifest = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Manifest)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise ManifestError(f"{path} is not a corpus manifest: {error}") from None
    seen: set[str] = set()
    for package in manifest.packages:
        project = _project(package)
        if project in seen:
            raise ManifestError(f"{path}: {package.name} stands there twice: remove one of them")
        seen.add(project)
        if RESERVED & set(re.split(r"[@/]", project)):
            raise ManifestError(f"{path}: {package.name} is reserved for evaluation: remove it")
        if not re.fullmatch(r"[0-9a-f]{64}", package.sha256):
            raise ManifestError(f"{path}: {package.name} needs the sha256 of its archive, 64 lower-case digits")
        if not (_NAME.fullmatch(package.name) and _VERSION.fullmatch(package.version)):
            raise ManifestError(f"{path}: {package.name} {package.version} is no package's name and version")
        if not package.licence or not package.languages:
            raise ManifestError(f"{path}: {package.name} needs a licence and a language")
    return manifest


def build(manifest: Manifest, folder: Path, report: Report) -> Corpus:
    """Fetches what is missing and writes `held.jsonl.gz`, `train.jsonl.gz` and `summary.json` into `folder`.

    Archives are kept there too, under their hashes: a build that was broken off goes on where it was. Raises
    `FetchError` where an archive cannot be had or is not the one that the manifest names, `OSError` for the disk.
    """
    fetcher = _Fetcher(folder, report)
    order = sorted(manifest.packages, key=lambda package: (SPLITS.index(package.split), package.name))
    archives = {package.sha256: fetcher.archive(package, number / len(order)) for number, package in enumerate(order)}
    seen = _Seen()
    kept: Counter[tuple[Language, Split]] = Counter()
    size: Counter[tuple[Language, Split]] = Counter()
    dropped: Counter[Rule] = Counter()
    for split in SPLITS:
        part = folder / f"{split}.jsonl.gz.part"
        with open(part, "wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as file:
            for number, package in enumerate(order):
                if package.split != split:
                    continue
                report(f"reading {package.name}", number / len(order))
                limit = package.package_bytes or manifest.package_bytes
                for document in _documents(package, archives[package.sha256], limit, seen, dropped):
                    file.write(msgspec.json.encode(document) + b"\n")
                    kept[document.language, split] += 1
                    size[document.language, split] += len(document.text.encode())
    for split in SPLITS:
        os.replace(folder / f"{split}.jsonl.gz.part", _split_file(folder, split))
    corpus = Corpus(folder, {key: Amount(kept[key], size[key]) for key in kept}, dict(dropped))
    summary = {
        "kept": [
            {"language": language, "split": split, "files": amount.files, "bytes": amount.bytes}
            for (language, split), amount in sorted(corpus.kept.items())
        ],
        "dropped": dict(sorted(dropped.items())),
    }
    (folder / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary)) + b"\n")
    return corpus


def documents(folder: Path, split: Split) -> Iterator[Document]:
    """The documents of a split, in the order in which they were written: by package, then by path.

    Raises `FileNotFoundError` with what to do where the corpus has not been built.
    """
    path = _split_file(folder, split)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: build it with `infill-engine corpus --out {folder}`")
    decode = msgspec.json.Decoder(Document).decode
    with gzip.open(path, "rb") as file:
        for line in file:
            yield decode(line)


def missing(manifest: Manifest, folder: Path) -> list[Package]:
    """The packages whose archives `build` would have to fetch."""
    return [package for package in manifest.packages if not (folder / "archives" / package.sha256).exists()]


class _Fetcher:
    """Brings archives into a folder with pip, npm and apt-get, so that mirrors and proxies are whatever those are set
    up with. Wheels and tarballs only: fetching them runs nothing of theirs."""

    def __init__(self, folder: Path, report: Report) -> None:
        self._folder = folder.resolve()
        self._archives = self._folder / "archives"
        self._archives.mkdir(parents=True, exist_ok=True)
        self._report = report
        self._apt: list[str] | None = None

    def archive(self, package: Package, progress: float) -> Path:
        """The verified archive; a damaged one is fetched again."""
        path = self._archives / package.sha256
        if path.exists() and _sha256(path) == package.sha256:
            return path
        self._report(f"fetching {package.name} {package.version}", progress)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=self._folder) as work:
            self._run(package, self._command(package), Path(work))
            files = [file for file in Path(work).iterdir() if file.is_file()]
            if package.registry == "debian":  # A source package may have further tarballs beside upstream's.
                files = [file for file in files if f"_{package.version}.orig.tar." in file.name]
            if len(files) != 1:
                raise FetchError(
                    f"{package.registry} no longer has {package.name} {package.version}: "
                    "give the manifest a version that it has, with its sha256"
                )
            if (found := _sha256(files[0])) != package.sha256:
                raise FetchError(
                    f"{files[0].name} is not the archive that the manifest names (sha256 {found}, "
                    f"not {package.sha256}): look at what changed before you trust it"
                )
            os.replace(files[0], path)
        return path

    def _command(self, package: Package) -> list[str]:
        match package.registry:
            case "pypi":
                # Universal wheels alone, whatever Python runs this; -P: the current folder's modules are none of pip's.
                command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
                command += ["--no-input", "--disable-pip-version-check", "--only-binary=:all:", "--platform=any"]
                command += ["--python-version=3.12", "--implementation=py", "--abi=none", "--dest=."]
                return [*command, f"{package.name}=={package.version}"]
            case "npm":
                return ["npm", "pack", "--silent", "--ignore-scripts", f"{package.name}@{package.version}"]
            case "debian":
                if self._apt is None:
                    self._apt = self._source_lists(package)
                return [*self._apt, "source", "--download-only", "--tar-only", package.name]

    def _source_lists(self, package: Package) -> list[str]:
        """apt-get with lists of its own that hold source packages; the system's are left as they are."""
        apt = self._folder / "apt"
        for part in ("lists/partial", "archives/partial"):
            (apt / part).mkdir(parents=True, exist_ok=True)
        sources = apt / "bookworm.list"
        sources.write_text("deb-src http://deb.debian.org/debian bookworm main\n")
        command = ["apt-get", "-qq", "-o", f"Dir::Etc::sourcelist={sources}", "-o", "Dir::Etc::sourceparts=-"]
        command += ["-o", f"Dir::State::lists={apt / 'lists'}", "-o", f"Dir::Cache={apt}"]
        self._run(package, [*command, "update"], apt)
        return command

    def _run(self, package: Package, command: Sequence[str], folder: Path) -> None:
        try:
            done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        except FileNotFoundError:
            raise FetchError(f"{command[0]} is needed to fetch {package.name}: install it") from None
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.strip()] or [f"{command[0]} said nothing"]
            raise FetchError(f"cannot fetch {package.name} {package.version}: {said[-1].strip()}: try again online")


def _documents(package: Package, archive: Path, limit: int, seen: _Seen, dropped: Counter[Rule]) -> Iterator[Document]:
    """What is kept of a package, by path; counts what is not."""
    found: list[Document] = []
    for path, data in _members(package, archive):
        verdict = _judge(package, path, data)
        if isinstance(verdict, Document):
            found.append(verdict)
        elif verdict is not None:
            dropped[verdict] += 1
    found.sort(key=lambda document: hashlib.sha256(document.path.encode()).digest())
    kept: list[Document] = []
    total: Counter[Language] = Counter()
    for document in found:
        size = len(document.text.encode())
        rule: Rule | None = "cap" if total[document.language] + size > limit else seen.add(document.text)
        if rule:
            dropped[rule] += 1
        else:
            kept.append(document)
            total[document.language] += size
    yield from sorted(kept, key=lambda document: document.path)


def _members(package: Package, archive: Path) -> Iterator[tuple[str, bytes | int]]:
    """Regular files of an archive: path without the tarball's top folder, and content; its size alone where that is
    beyond `MAX_BYTES`. Reads in memory, so no name in it can reach the disk. Raises `FetchError`."""
    unpacked = count = 0

    def within_limits(size: int) -> bool:
        nonlocal unpacked, count
        unpacked, count = unpacked + size, count + 1
        if unpacked > MAX_UNPACKED or count > MAX_MEMBERS:
            raise FetchError(f"the archive of {package.name} is too large: leave it out of the manifest")
        return size <= MAX_BYTES

    try:
        if package.registry == "pypi":
            with zipfile.ZipFile(archive) as wheel:
                for entry in wheel.infolist():
                    if not entry.is_dir():
                        small = within_limits(entry.file_size)
                        yield entry.filename, wheel.read(entry) if small else entry.file_size
        else:
            with tarfile.open(archive, "r|*") as tarball:
                for member in tarball:
                    small = within_limits(member.size)
                    if member.isfile():
                        name = member.name.removeprefix("./")
                        name = name if name.startswith("/") else name.partition("/")[2] or name
                        file = tarball.extractfile(member) if small else None
                        yield name, file.read() if file else member.size
    except FetchError:
        raise
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, RuntimeError) as error:
        raise FetchError(f"the archive of {package.name} cannot be read ({error}): leave it out") from None


def _judge(package: Package, path: str, data: bytes | int) -> Document | Rule | None:
    """The document that a file is, the rule that drops it, or None for what is no source in a wanted language."""
    language = _language(package, path, data)
    if language is None:
        return None
    *folders, name = PurePosixPath(path.lower()).parts
    places = set(folders)
    if path.startswith("/") or "\\" in path or ".." in places:
        return "unsafe"
    if places & RESERVED:
        return "reserved"
    if places & _VENDORED:
        return "vendored"
    if places & _FIXTURES or any(path.startswith(f"{folder}/") for folder in package.skip):
        return "fixture"
    if isinstance(data, int) or not MIN_BYTES <= len(data) <= MAX_BYTES:
        return "size"
    if _GENERATED_NAME.search(name):
        return "generated"
    try:
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return "encoding"
    if "\r" in text or "\0" in text:
        return "encoding"
    return _judge_text(text) or Document(package.name, language, path, text)


def _judge_text(text: str) -> Rule | None:
    top = text[:_TOP]
    if _GENERATED.search(top):
        return "generated"
    if _COPYLEFT.search(top):
        return "licence"
    if _COMPILED.search(text):
        return "compiled"
    if max(map(len, text.split("\n"))) > MAX_LINE:
        return "long line"
    solid = sum(map(len, text.split()))
    digits = sum(text.count(digit) for digit in "0123456789")
    foreign = 0 if text.isascii() else len(text) - len(text.encode("ascii", "ignore"))
    if solid < len(text) / 4 or digits > 0.2 * solid or foreign > 0.2 * solid:
        return "data"
    return None


def _language(package: Package, path: str, data: bytes | int) -> Language | None:
    suffix = PurePosixPath(path).suffix.lower()
    language = _SUFFIXES.get(suffix)
    if not suffix and isinstance(data, bytes) and _SHEBANG.match(data[:64]):
        language = "shell"
    if suffix == ".h":
        language = next((one for one in package.languages if one in ("c", "cpp")), None)
    return language if language in package.languages else None


class _Seen:
    """The texts that were kept so far. Finds the same text again, and nearly the same one.

    Near-duplicates are found by MinHash (Broder 1997) over shingles of 5 tokens with 64 hash functions, banded for
    locality-sensitive hashing (Leskovec et al., Mining of Massive Datasets, section 3.4): 16 bands of 4 rows bring 9 in
    10 pairs of Jaccard similarity 0.6 together. Of those, pairs whose estimated similarity reaches 0.75 count.
    """

    SHINGLE, BANDS, ROWS, SIMILAR = 5, 16, 4, 0.75
    _TOKEN = re.compile(rb"\w+|[^\w\s]")

    def __init__(self) -> None:
        random = np.random.default_rng(20_260_101)
        count = self.BANDS * self.ROWS
        self._multiply = random.integers(0, 2**63, count, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        self._add = random.integers(0, 2**63, count, dtype=np.uint64)
        self._texts: set[bytes] = set()
        self._signatures: list[NDArray[np.uint32]] = []
        self._bands: dict[tuple[int, bytes], list[int]] = {}

    def add(self, text: str) -> Rule | None:
        """Remembers the text, or says why it is none to keep."""
        tokens = self._TOKEN.findall(text.encode())
        digest = hashlib.blake2b(b" ".join(text.encode().split()), digest_size=16).digest()
        if digest in self._texts:
            return "duplicate"
        signature = self._signature(tokens)
        keys = [(band, rows.tobytes()) for band, rows in enumerate(signature.reshape(self.BANDS, self.ROWS))]
        for other in {index for key in keys for index in self._bands.get(key, ())}:
            if np.mean(self._signatures[other] == signature) >= self.SIMILAR:
                return "near-duplicate"
        self._texts.add(digest)
        for key in keys:
            self._bands.setdefault(key, []).append(len(self._signatures))
        self._signatures.append(signature)
        return None

    def _signature(self, tokens: Sequence[bytes]) -> NDArray[np.uint32]:
        """uint32 [BANDS * ROWS]: the least hash of any shingle, by each hash function."""
        words = np.fromiter(map(zlib.crc32, tokens), np.uint64, len(tokens))
        width = min(self.SHINGLE, len(words))
        shingles = np.zeros(len(words) - width + 1, np.uint64)
        for start in range(width):
            shingles = shingles * np.uint64(0x9E3779B97F4A7C15) + words[start : start + len(shingles)]
        shingles ^= shingles >> np.uint64(32)
        shingles = np.unique(shingles * np.uint64(0xBF58476D1CE4E5B9))
        least = np.full(len(self._add), 2**32 - 1, np.uint32)
        for start in range(0, len(shingles), 4096):
            block = shingles[start : start + 4096, None] * self._multiply + self._add
            least = np.minimum(least, (block >> np.uint64(32)).astype(np.uint32).min(axis=0))
        return least


def _project(package: Package) -> str:
    """The name by which a project is one, whichever registry carries it."""
    name = package.name.lower().replace("_", "-")
    return re.sub(r"^(node|python)-", "", name) if package.registry == "debian" else name


def _split_file(folder: Path, split: Split) -> Path:
    return folder / f"{split}.jsonl.gz"


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _cells(amounts: Sequence[Amount]) -> list[str]:
    return [cell for amount in amounts for cell in (f"{amount.files:,}", f"{amount.bytes // 1000:,}")]
