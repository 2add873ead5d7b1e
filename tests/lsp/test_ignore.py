"""What may be read of a workspace: never secrets, never what git ignores, nothing that is no source text."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infill_lsp import ignore
from infill_lsp.ignore import BINARY_FILES, GENERATED_FILES, SECRET_FILES, SECRET_FOLDERS, Ignore, Refused, is_secret
from infill_lsp.patterns import Patterns

#: A name for every pattern of secret files.
SECRET_NAMES = """
    .env .env.local .envrc production.env .dev.vars .dev.vars.staging prod.tfvars prod.tfvars.json terraform.tfstate
    terraform.tfstate.backup local.settings.json server.key Server.Pem AuthKey.p8 a.p12 a.pfx a.pkcs12 a.der a.crt
    a.cert a.cer a.csr a.jks a.jceks a.bks release.keystore krb5.keytab a.kdb a.kdbx putty.ppk a.gpg a.pgp a.asc
    a.agekey
    office.ovpn a.mobileprovision id_rsa id_rsa.old id_dsa id_ecdsa_sk id_ed25519.old authorized_keys known_hosts
    known_hosts.old keystore.properties .netrc _netrc .authinfo .authinfo.txt .pgpass .my.cnf .mylogin.cnf .htpasswd
    .git-credentials .gitcookies .msmtprc rclone.conf wp-config.php credentials credentials.json credentials.toml
    credentials.tfrc.json aws-credentials.json secrets.yml secrets.yaml secrets.json secrets.toml secrets.prod.yml
    secrets.prod.yaml my.secret my.secrets .npmrc .pypirc .yarnrc.yml auth.json .boto .s3cfg .dockercfg
    .dockerconfigjson .terraformrc terraform.rc .vault-token .databrickscfg ngrok.yml kubeconfig prod.kubeconfig
    service-account.json service-account-prod.json service_account.json client_secret_1.json
    app-firebase-adminsdk-x1.json .bash_history .zsh_history prod.env.local app.env.production .flaskenv
    a.pk8 a.pkcs8 a.jwk
    ssh_host_rsa_key pip.conf .sentryclirc passwords.txt .vault_pass .vault_pass.txt .vault-pass vault.yml vault.yaml
    wallet.dat secret.yml secret.yaml auth.toml NuGet.Config kaggle.json token.json kubeconfig.yaml
    serviceAccountKey.json client-secret.json
    .docker/config.json home/.m2/settings.xml .gradle/gradle.properties .config/hub .config/gh/hosts.yml
"""
SECRETS = SECRET_NAMES.split()

PLAIN_NAMES = """
    keys.py credentials.py secrets.py environment.yml monkey.py env.py token.py key.go secret_santa.py auth.py
    config.json settings.xml gradle.properties hosts.yml hub vaults.py tokens.json prod.env.js
    history.md README.md Dockerfile Makefile package.json pyproject.toml .gitignore certificates.rs
"""
PLAIN = PLAIN_NAMES.split()


def write(folder: Path, files: dict[str, str | bytes]) -> Ignore:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return Ignore(str(folder))


def listed(rules: Ignore) -> set[str]:
    return {path for listing in rules.walk() for path, _ in listing.files}


def reason(rules: Ignore, path: str) -> str:
    with pytest.raises(Refused) as refused:
        rules.read(path)
    return refused.value.reason


@pytest.mark.parametrize("name", SECRETS)
def test_secret_files(name: str) -> None:
    assert is_secret(name)
    assert is_secret(f"/home/a/project/deep/{name}")


@pytest.mark.parametrize("name", PLAIN)
def test_files_that_only_sound_secret(name: str) -> None:
    assert not is_secret(name)
    assert not is_secret(f"secrets/credentials/{name}")


def test_every_pattern_of_secrets_has_an_example() -> None:
    unused = [
        p for p in SECRET_FILES if not any(ignore.re.match(ignore.translate(p), name.lower()) for name in SECRETS)
    ]
    assert unused == []
    assert len(SECRET_FILES) >= 40
    assert len(SECRET_FOLDERS) >= 20


@pytest.mark.parametrize("folder", sorted(SECRET_FOLDERS))
def test_nothing_in_a_secret_folder_is_read(tmp_path: Path, folder: str) -> None:
    rules = write(tmp_path, {f"a/{folder}/b/config.py": "x = 1\n", f"{folder.upper()}/c.py": "x = 1\n", "ok.py": "1\n"})
    assert is_secret(f"/home/a/{folder}/config")
    assert listed(rules) == {"ok.py"}
    assert reason(rules, f"a/{folder}/b/config.py") == "secret"


def test_secret_files_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = write(tmp_path, dict.fromkeys((*SECRETS, "a.py"), "KEY=1\n"))
    assert listed(rules) == {"a.py"}
    rules.read("a.py")
    monkeypatch.setattr(ignore.os, "open", lambda *_: pytest.fail("opened"))
    assert {reason(rules, name) for name in SECRETS} == {"secret"}


@pytest.mark.parametrize("pattern", GENERATED_FILES + BINARY_FILES)
def test_names_of_what_nobody_writes(tmp_path: Path, pattern: str) -> None:
    rules = write(tmp_path, {pattern.replace("*", "x").upper(): "text\n"})
    assert listed(rules) == set()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"a\0b", "binary"),
        (b"\xff\xfea\0b\0", "binary"),
        ("é".encode("latin-1"), "binary"),
        (b"# Code generated by protoc. DO NOT EDIT.\nx = 1\n", "generated"),
        (b"/* @generated */\n", "generated"),
        (b"x=1;" * 5_000, "minified"),
        (b"x" * 400 + b"\n" + (b"y" * 400 + b"\n") * 100, "minified"),
        (b"x = 1\n" * 100_000, "huge"),
    ],
)
def test_content_that_is_not_read(tmp_path: Path, content: bytes, why: str) -> None:
    assert reason(write(tmp_path, {"a.py": content}), "a.py") == why


def test_text_is_read_with_one_kind_of_line_end(tmp_path: Path) -> None:
    rules = write(tmp_path, {"a.py": b"\xef\xbb\xbfa\r\nb\rc\n"})
    assert rules.read("a.py").text == "a\nb\nc\n"


def test_nearer_rules_win_and_what_is_excluded_stays_out(tmp_path: Path) -> None:
    files = {
        ".gitignore": "*.log.py\nbuild/\n!keep/\n/top.py\n",
        "sub/.gitignore": "!b.log.py\n",
        "sub/.ignore": "c.py\n",
        "a.log.py": "",
        "top.py": "",
        "sub/top.py": "",
        "sub/b.log.py": "",
        "sub/c.py": "",
        "build/keep/d.py": "",
        "gen/e.py": "",
    }
    write(tmp_path, {name: text or "x\n" for name, text in files.items()})
    seen = {"sub/top.py", "sub/b.log.py", "gen/e.py"}
    own = {".gitignore", "sub/.gitignore", "sub/.ignore"}
    assert listed(Ignore(str(tmp_path))) == seen | own
    assert listed(Ignore(str(tmp_path), ["gen/", "b.log.py"])) == {"sub/top.py"} | own


def test_rules_of_the_repository_around_the_folder_hold(tmp_path: Path) -> None:
    files = {".git/info/exclude": "local.py\n", ".gitignore": "/pkg/out/\n[\n", "pkg/out/a.py": "x\n"}
    write(tmp_path, {**files, "pkg/local.py": "x\n", "pkg/b.py": "x\n"})
    assert listed(Ignore(str(tmp_path / "pkg"))) == {"b.py"}


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.parametrize("named", [None, "~/my ignores"])
def test_what_the_person_ignores_everywhere_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str | None
) -> None:
    home = tmp_path / "home"
    files = {"my ignores": "named.py\n", ".config/git/ignore": "usual.py\n"}
    write(home, files if named is None else {**files, ".gitconfig": f'[core]\n\texcludesFile = "{named}"\n'})
    write(tmp_path / "project", {".git/HEAD": "", "pkg/named.py": "x\n", "pkg/usual.py": "x\n"})
    monkeypatch.setenv("HOME", str(home))
    for name in ("XDG_CONFIG_HOME", "GIT_CONFIG_GLOBAL"):
        monkeypatch.delenv(name, raising=False)
    left = "named.py" if named is None else "usual.py"
    assert listed(Ignore(str(tmp_path / "project/pkg"))) == {left}
    monkeypatch.setenv("PATH", str(tmp_path))
    ignore._personal_excludes.cache_clear()
    assert listed(Ignore(str(tmp_path / "project/pkg"))) == {"named.py"}  # Without git the usual file counts.


def test_links_lead_nowhere(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    write(outside, {"secret.py": "x\n"})
    rules = write(inside, {"a.py": "x\n", "d/b.py": "x\n"})
    (inside / "loop").symlink_to(inside)
    (inside / "away").symlink_to(outside)
    (inside / "link.py").symlink_to(outside / "secret.py")
    assert listed(rules) == {"a.py", "d/b.py"}
    assert reason(rules, "link.py") == "unreadable"
    assert reason(rules, "away/secret.py") == "ignored"
    assert reason(rules, "loop/a.py") == "ignored"
    assert list(rules.walk("away")) == []


def test_what_is_no_file_does_not_block(tmp_path: Path) -> None:
    rules = write(tmp_path, {"a.py": "x\n"})
    os.mkfifo(tmp_path / "pipe.py")
    assert listed(rules) == {"a.py"}
    assert reason(rules, "pipe.py") == "unreadable"
    assert reason(rules, "missing.py") == "unreadable"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read any folder")
def test_a_folder_that_may_not_be_read_is_said(tmp_path: Path) -> None:
    rules = write(tmp_path, {"closed/a.py": "x\n", "b.py": "x\n"})
    (tmp_path / "closed").chmod(0)
    try:
        assert [(each.folder, each.readable) for each in rules.walk()] == [("", True), ("closed", False)]
    finally:
        (tmp_path / "closed").chmod(0o700)


def test_a_folder_of_many_files_is_told_of_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infill_lsp.ignore.LISTED", 3)
    names = {f"{number}.py" for number in range(7)} | {f"d/{number}.py" for number in range(3)}
    rules = write(tmp_path, dict.fromkeys(names, "x\n"))
    sizes = [(each.folder, len(each.files)) for each in rules.walk()]
    assert sizes == [("", 3), ("", 3), ("", 1), ("d", 3), ("d", 0)]
    assert listed(rules) == names


NAMES = st.sampled_from(["a", "b", "ab", "a.x", "b.x", "aabab.x", "a*", "[a]", "-", "Ab!"])
PIECES = [
    "a",
    "b",
    "x",
    "*",
    "**",
    "?",
    ".",
    "[ab]",
    "[!a]",
    "[^b]",
    "[]a]",
    "[a-]",
    "[[:alpha:]]",
    "\\a",
    "\\*",
    "[",
    "\\",
]
PATTERNS = st.builds(
    "".join,
    st.tuples(
        st.sampled_from(["", "", "!"]),
        st.sampled_from(["", "", "/", "**/"]),
        st.sampled_from(["a", "b", "*.x", "a*", "?b", "[ab]", "a/b", "b/*", "a/**", "a/**/b", "*", "**/*a*b*", "a//b"])
        | st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join),
        st.sampled_from(["", "", "/"]),
    ),
)
RULES = st.lists(PATTERNS, max_size=4)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(paths=st.lists(st.lists(NAMES, min_size=1, max_size=3), max_size=12), top=RULES, nested=RULES)
def test_the_same_files_are_ignored_as_by_git(
    tmp_path: Path, paths: list[list[str]], top: list[str], nested: list[str]
) -> None:
    folder = tmp_path / "repository"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    environment = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path), "GIT_CONFIG_GLOBAL": os.devnull}
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True, env=environment)
    for parts in paths:
        with contextlib.suppress(FileExistsError, NotADirectoryError, IsADirectoryError):
            file = folder.joinpath(*parts)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("x\n")
    (folder / ".gitignore").write_text("\n".join(top))
    if (folder / "a").is_dir():
        (folder / "a" / ".gitignore").write_text("\n".join(nested))
    git = ["git", "ls-files", "-z", "--others", "--exclude-standard"]
    said = subprocess.run(git, cwd=folder, check=True, env=environment, capture_output=True, text=True).stdout
    assert listed(Ignore(str(folder))) == set(filter(None, said.split("\0")))


@pytest.mark.parametrize(
    "pattern", ["*a*a*a*a*a*a*a*a*b", "*" * 60 + "b", "[a-z]*" * 20 + "Z", "**/a/" * 20 + "b", "**/*a/" * 20 + "b"]
)
def test_no_pattern_takes_time_to_match(pattern: str) -> None:
    assert not Patterns([pattern]).match("a" * 250)
    assert not Patterns([pattern]).match("/".join("a" * 250))
