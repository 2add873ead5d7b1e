"""The training text, from made-up archives and never the network: what is kept, what is dropped and by which rule."""

from __future__ import annotations

import hashlib
import io
import shutil
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from infill_engine import cli
from infill_engine.fetch import FetchError
from infill_engine.training import corpus
from infill_engine.training.corpus import Corpus, Manifest, ManifestError, Package, documents, load_manifest

Files = Mapping[str, str | bytes]


def code(seed: str, lines: int = 60) -> str:
    """A Python module that has nothing in common with that of another seed."""
    words = [hashlib.sha256(f"{seed} {number}".encode()).hexdigest().translate(LETTERS) for number in range(lines)]
    return "".join(f"def {word[:12]}({word[12:20]}):\n    return {word[20:30]}.{word[30:40]}\n" for word in words)


LETTERS = str.maketrans("0123456789", "ghijklmnop")


def raw(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


def wheel(files: Files) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name), raw(text))
    return buffer.getvalue()


def tarball(files: Files, mode: str = "w:gz", links: Mapping[str, str] | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        for name, target in (links or {}).items():
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            archive.addfile(link)
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(raw(text))
            archive.addfile(entry, io.BytesIO(raw(text)))
    return buffer.getvalue()


class Shelf:
    """A corpus folder whose archives are already there, and the manifest of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.packages: list[Package] = []

    def put(self, name: str, data: bytes, **fields: Any) -> None:
        package = {
            "version": "1.0",
            "registry": "pypi",
            "licence": ("MIT",),
            "languages": ("python",),
            "split": "train",
        }
        package |= {"name": name, "sha256": hashlib.sha256(data).hexdigest(), **fields}
        self.packages.append(msgspec.convert(package, Package))
        archives = self.folder / "archives"
        archives.mkdir(parents=True, exist_ok=True)
        (archives / self.packages[-1].sha256).write_bytes(data)

    def build(self, package_bytes: int = 10**6) -> Corpus:
        return corpus.build(Manifest(package_bytes, tuple(self.packages)), self.folder, lambda *_: None)

    def paths(self, split: corpus.Split = "train") -> list[str]:
        return [document.path for document in documents(self.folder, split)]


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "corpus")


def test_source_is_kept_with_its_language_and_path(shelf: Shelf) -> None:
    texts = {f"one/{name}": code(name) for name in ("a.py", "b.rs", "c.go", "d.tsx", "e.md", "f.txt")}
    script = "#!/usr/bin/env bash\n" + code("script")
    everything = ("python", "typescript", "go", "rust", "shell")
    shelf.put("one", tarball(texts | {"one/bin/run": script}), registry="npm", languages=everything)
    shelf.put("two", wheel({"two/a.py": code("two")}), split="held")
    built = shelf.build()
    found = {document.path: document for document in documents(shelf.folder, "train")}
    assert {path: document.language for path, document in found.items()} == {
        "a.py": "python",
        "b.rs": "rust",
        "bin/run": "shell",
        "c.go": "go",
        "d.tsx": "typescript",
    }
    assert found["a.py"].text == code("a.py")
    assert found["a.py"].package == "one"
    assert shelf.paths("held") == ["two/a.py"]
    assert built.kept["python", "held"] == corpus.Amount(1, len(code("two")))
    assert built.dropped == {}


@pytest.mark.parametrize("mode", ["w:gz", "w:xz", "w:bz2"])
def test_every_form_of_tarball_is_read(shelf: Shelf, mode: str) -> None:
    shelf.put("one", tarball({"./one-1.0/src/a.py": code("a")}, mode), registry="debian")
    shelf.build()
    assert shelf.paths() == ["src/a.py"]


def test_a_header_belongs_to_the_language_that_the_package_names_first(shelf: Shelf) -> None:
    shelf.put("one", tarball({"one/a.h": code("a")}), registry="debian", languages=["cpp", "c"])
    shelf.put("two", tarball({"two/a.h": code("b")}), registry="debian", languages=["shell", "c", "cpp"])
    shelf.build()
    assert [document.language for document in documents(shelf.folder, "train")] == ["cpp", "c"]


def test_line_ends_become_lf_and_a_byte_order_mark_goes(shelf: Shelf) -> None:
    shelf.put("one", wheel({"a.py": b"\xef\xbb\xbf" + code("a").replace("\n", "\r\n").encode()}))
    shelf.build()
    assert [document.text for document in documents(shelf.folder, "train")] == [code("a")]


@pytest.mark.parametrize(
    ("path", "text", "rule"),
    [
        ("../a.py", code("a"), "unsafe"),
        ("one/../../a.py", code("a"), "unsafe"),
        ("/etc/a.py", code("a"), "unsafe"),
        ("one/trio/a.py", code("a"), "reserved"),
        ("one/_vendor/a.py", code("a"), "vendored"),
        ("node_modules/x/a.py", code("a"), "vendored"),
        ("third_party/a.py", code("a"), "vendored"),
        ("dist/a.py", code("a"), "vendored"),
        ("tests/fixtures/a.py", code("a"), "fixture"),
        ("tests/__snapshots__/a.py", code("a"), "fixture"),
        ("a.py", "import os\n", "size"),
        ("a.py", code("a", 4000), "size"),
        ("a_pb2.py", code("a"), "generated"),
        ("a.py", "# Code generated by protoc. DO NOT EDIT.\n" + code("a"), "generated"),
        ("a.py", "# This file was automatically generated\n" + code("a"), "generated"),
        ("a.py", code("a").encode() + b"\xff", "encoding"),
        ("a.py", code("a") + "\0", "encoding"),
        ("a.py", code("a").replace("\n", "\r"), "encoding"),
        ("a.py", "# GNU General\n Public License\n" + code("a"), "licence"),
        ("a.py", code("a") + "# sourceMappingURL=a.map\n", "compiled"),
        ("a.py", code("a") + "#" * 301, "long line"),
        ("a.py", "".join(f"{number}, " + "\n" for number in range(400)), "data"),
        ("a.py", "名前の一覧\n" * 100, "data"),
        ("a.py", "x\n" + " \n" * 800, "data"),
    ],
)
def test_what_nobody_wrote_is_dropped(shelf: Shelf, path: str, text: str | bytes, rule: corpus.Rule) -> None:
    shelf.put("one", wheel({path: text, "kept.py": code("kept")}))
    assert shelf.build().dropped == {rule: 1}
    assert shelf.paths() == ["kept.py"]


def test_a_file_that_a_project_wrote_itself_is_no_generated_one(shelf: Shelf) -> None:
    """The markers count at the top alone: what writes such files says the same words further down."""
    shelf.put("one", wheel({"a.py": code("a", 100) + 'HEADER = "# Generated by one. DO NOT EDIT."\n'}))
    assert shelf.build().dropped == {}


def test_folders_are_skipped(shelf: Shelf) -> None:
    files = {f"one/{folder}/a.py": code(folder) for folder in ("test", "tester", "src/test")}
    shelf.put("one", tarball(files), registry="npm", skip=["test"])
    assert shelf.build().dropped == {"fixture": 1}
    assert shelf.paths() == ["src/test/a.py", "tester/a.py"]


def test_nothing_of_an_archive_reaches_the_disk(shelf: Shelf, tmp_path: Path) -> None:
    attack = tarball({"one/../../../evil.py": code("a"), "one/in/evil.py": code("b")}, links={"one/in": str(tmp_path)})
    shelf.put("one", attack, registry="npm")
    shelf.build()
    assert list(tmp_path.rglob("evil.py")) == []
    assert sorted(path.name for path in shelf.folder.iterdir()) == [
        "archives",
        "held.jsonl.gz",
        "summary.json",
        "train.jsonl.gz",
    ]


@pytest.mark.parametrize(("limit", "value"), [("MAX_UNPACKED", 1000), ("MAX_MEMBERS", 1)])
@pytest.mark.parametrize(("pack", "registry"), [(wheel, "pypi"), (tarball, "npm")])
def test_an_archive_beyond_the_limits_is_refused(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, pack: Any, registry: str, limit: str, value: int
) -> None:
    monkeypatch.setattr(corpus, limit, value)
    shelf.put("one", pack({"one/a.py": code("a"), "one/b.py": code("b")}), registry=registry)
    with pytest.raises(FetchError, match="archive of one is too large"):
        shelf.build()


@pytest.mark.parametrize("registry", ["pypi", "npm", "debian"])
@pytest.mark.parametrize("data", [b"", b"no archive", tarball({"one/a.py": code("a")})[:-400]])
def test_an_archive_that_cannot_be_read_is_named(shelf: Shelf, registry: str, data: bytes) -> None:
    shelf.put("one", data, registry=registry)
    with pytest.raises(FetchError, match="archive of one cannot be read"):
        shelf.build()


def test_the_same_text_is_kept_once(shelf: Shelf) -> None:
    spaced = code("a").replace("\n", "\n\n").replace("    ", "\t")
    shelf.put("one", wheel({"a.py": code("a"), "b.py": spaced, "c.py": code("c")}))
    assert shelf.build().dropped == {"duplicate": 1}
    assert len(shelf.paths()) == 2


def test_nearly_the_same_text_is_kept_once(shelf: Shelf) -> None:
    shelf.put("one", wheel({"a.py": code("a", 100), "b.py": code("a", 100) + code("b", 5), "c.py": code("c", 100)}))
    assert shelf.build().dropped == {"near-duplicate": 1}
    assert "c.py" in shelf.paths()


def test_files_that_share_a_half_are_both_kept(shelf: Shelf) -> None:
    shelf.put("one", wheel({f"{one}.py": code("both", 50) + code(one, 50) for one in ("a", "b")}))
    assert shelf.build().dropped == {}


def test_training_loses_what_is_held_out(shelf: Shelf) -> None:
    """Whatever the packages are called, and also what is only nearly the same."""
    shelf.put("aaa", wheel({"same.py": code("a", 100), "near.py": code("b", 100) + code("c", 5), "own.py": code("d")}))
    shelf.put("zzz", wheel({"a.py": code("a", 100), "b.py": code("b", 100)}), split="held")
    assert shelf.build().dropped == {"duplicate": 1, "near-duplicate": 1}
    assert shelf.paths("held") == ["a.py", "b.py"]
    assert shelf.paths("train") == ["own.py"]


def test_no_package_gives_more_than_its_share(shelf: Shelf) -> None:
    size = len(code("a"))
    files = {f"{name}.py": code(name) for name in "abcdefgh"} | {"a.sql": code("sql")}
    shelf.put("one", wheel(files), languages=["python", "sql"])
    shelf.put("two", wheel({f"{name}.py": code(f"two {name}") for name in "abcdefgh"}), package_bytes=5 * size)
    built = shelf.build(package_bytes=3 * size)
    assert [document.package for document in documents(shelf.folder, "train")] == ["one"] * 4 + ["two"] * 5
    assert built.kept["sql", "train"].files == 1
    assert built.dropped == {"cap": 8}


def test_the_same_manifest_gives_the_same_bytes(shelf: Shelf, tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        shelf.put(name, wheel({f"{letter}.py": code(name + letter) for letter in "dbca"}), split="train")
    shelf.build(package_bytes=10_000)
    first = [(shelf.folder / name).read_bytes() for name in ("train.jsonl.gz", "held.jsonl.gz", "summary.json")]
    other = Shelf(tmp_path / "elsewhere")
    shutil.copytree(shelf.folder / "archives", other.folder / "archives")
    other.packages = shelf.packages[::-1]
    other.build(package_bytes=10_000)
    assert first == [(other.folder / name).read_bytes() for name in ("train.jsonl.gz", "held.jsonl.gz", "summary.json")]
    order = [(document.package, document.path) for document in documents(shelf.folder, "train")]
    assert order == sorted(order)


def test_a_corpus_that_is_not_there_says_how_to_build_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"infill-engine corpus --out"):
        next(documents(tmp_path, "train"))


class Registries:
    """Commands named pip, npm and apt-get, each of which puts the same files into the current folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files = folder / "files"
        self.log = folder / "log"
        programs = folder / "bin"
        for part in (self.files, programs):
            part.mkdir(parents=True)
        for name in ("python", "npm", "apt-get"):
            script = programs / name
            script.write_text(f'#!/bin/sh\necho "{name} $*" >> {self.log}\ncp {self.files}/* . 2>/dev/null; exit 0\n')
            script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
        monkeypatch.setattr(corpus.sys, "executable", str(programs / "python"))

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def registries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registries:
    return Registries(tmp_path / "registries", monkeypatch)


@pytest.mark.parametrize(
    ("registry", "file", "asked"),
    [
        ("pypi", "one-1.0-py3-none-any.whl", "one==1.0"),
        ("npm", "one-1.0.tgz", "one@1.0"),
        ("debian", "one_1.0.orig.tar.gz", "--tar-only one"),
    ],
)
def test_an_archive_is_fetched_once(shelf: Shelf, registries: Registries, registry: str, file: str, asked: str) -> None:
    data = (wheel if registry == "pypi" else tarball)({"one/a.py": code("a")})
    (registries.files / file).write_bytes(data)
    shelf.put("one", data, registry=registry)
    shutil.rmtree(shelf.folder)
    shelf.build()
    assert [call for call in registries.calls() if call.endswith(asked)]
    calls = len(registries.calls())
    shelf.build()
    assert len(registries.calls()) == calls
    assert len(shelf.paths()) == 1


def test_a_damaged_archive_is_fetched_again(shelf: Shelf, registries: Registries) -> None:
    data = tarball({"one/a.py": code("a")})
    (registries.files / "one-1.0.tgz").write_bytes(data)
    shelf.put("one", data, registry="npm")
    (shelf.folder / "archives" / shelf.packages[0].sha256).write_bytes(data[:-1])
    shelf.build()
    assert shelf.paths() == ["a.py"]


def test_an_archive_with_another_hash_is_refused(shelf: Shelf, registries: Registries) -> None:
    (registries.files / "one-1.0.tgz").write_bytes(tarball({"one/a.py": code("other")}))
    shelf.put("one", tarball({"one/a.py": code("a")}), registry="npm")
    (archive,) = (shelf.folder / "archives").iterdir()
    archive.unlink()
    with pytest.raises(FetchError, match=r"one-1\.0\.tgz is not the archive that the manifest names"):
        shelf.build()
    assert list((shelf.folder / "archives").iterdir()) == []


def test_a_version_that_is_gone_is_named(shelf: Shelf, registries: Registries) -> None:
    (registries.files / "one_1.1.orig.tar.gz").write_bytes(b"newer")
    shelf.put("one", b"", registry="debian")
    (shelf.folder / "archives" / shelf.packages[0].sha256).write_bytes(b"damaged")
    with pytest.raises(FetchError, match=r"debian no longer has one 1\.0"):
        shelf.build()


def test_a_client_that_is_missing_is_named(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    shelf.put("one", b"", registry="npm")
    shutil.rmtree(shelf.folder)
    with pytest.raises(FetchError, match="npm is needed to fetch one: install it"):
        shelf.build()


PACKAGE = {
    "name": "one",
    "version": "1.0",
    "registry": "pypi",
    "sha256": "0" * 64,
    "licence": ["MIT"],
    "languages": ["python"],
    "split": "train",
}


def manifest(path: Path, *packages: Mapping[str, Any]) -> Path:
    tables = [f"[[packages]]\n{''.join(f'{key} = {value!r}' + chr(10) for key, value in p.items())}" for p in packages]
    path.write_text("package_bytes = 100_000\n" + "\n".join(tables))
    return path


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"name": "trio"}, "trio is reserved"),
        ({"name": "@fastify/static", "registry": "npm"}, "@fastify/static is reserved"),
        ({"name": "node-undici", "registry": "debian"}, "node-undici is reserved"),
        ({"licence": ["GPL-3.0"]}, "GPL-3.0"),
        ({"licence": []}, "needs a licence"),
        ({"split": "test"}, "test"),
        ({"languages": ["cobol"]}, "cobol"),
        ({"sha256": "0" * 63}, "sha256"),
        ({"name": "--config=x"}, "no package's name"),
        ({"name": "../one"}, "no package's name"),
        ({"version": "1.0 -x"}, "no package's name"),
        ({"version": "some/where"}, "no package's name"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_manifest_is_checked(tmp_path: Path, change: Mapping[str, Any], fault: str) -> None:
    with pytest.raises(ManifestError, match=fault):
        load_manifest(manifest(tmp_path / "m.toml", PACKAGE | change))


def test_a_package_stands_in_one_split(tmp_path: Path) -> None:
    other = PACKAGE | {"name": "node-one", "registry": "debian", "split": "held"}
    with pytest.raises(ManifestError, match="twice"):
        load_manifest(manifest(tmp_path / "m.toml", PACKAGE, other))


def test_the_command_prints_what_it_built(shelf: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = wheel({"a.py": code("a"), "_vendor/b.py": code("b")})
    shelf.put("one", data)
    path = manifest(tmp_path / "m.toml", PACKAGE | {"sha256": hashlib.sha256(data).hexdigest()})
    arguments = ["corpus", "--manifest", str(path), "--out", str(shelf.folder)]
    assert cli.main([*arguments, "--dry-run"]) == 0
    assert "0 of 1 archives to fetch" in capsys.readouterr().out
    assert not (shelf.folder / "train.jsonl.gz").exists()
    assert cli.main(arguments) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["dropped:", "vendored", "1"] in rows
    assert any(row[0] == "python" for row in rows if row)


def test_a_bad_manifest_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.toml"
    path.write_text("packages = 3")
    assert cli.main(["corpus", "--manifest", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


class TestCommitted:
    """The project's own manifest."""

    def test_every_language_is_in_both_splits(self) -> None:
        """But TOML, of which there is too little to hold some out."""
        packages = load_manifest().packages
        for split in corpus.SPLITS:
            found = {language for package in packages if package.split == split for language in package.languages}
            assert found >= set(corpus.LANGUAGES) - {"toml"}

    def test_enough_is_held_out(self) -> None:
        assert 120 <= len(load_manifest().packages) <= 200
        assert sum(package.split == "held" for package in load_manifest().packages) >= 25

    def test_the_languages_have_their_shares(self) -> None:
        kept = load_manifest().kept
        total = sum(kept.values())
        assert 150e6 < total < 300e6
        assert 0.35 < kept["python"] / total < 0.45
        assert 0.15 < (kept["typescript"] + kept["javascript"]) / total < 0.25
        assert all(kept[language] > 0.02 * total for language in ("go", "rust", "java", "c", "cpp"))
