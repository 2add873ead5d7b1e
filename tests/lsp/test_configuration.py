"""Settings as an editor's server takes them: asked for, pushed, and from files, for each folder, while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from editor import Editor, fake_model, ready
from infill_engine import protocol
from infill_engine.protocol import Final, Status
from lsprotocol import types
from peer import listening, plain
from pygls.exceptions import JsonRpcInvalidParams

from infill_lsp.server import create_server

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def quick(shared_home: Path) -> str:
    return fake_model(shared_home, "quick", {"return ": "a + b", "# say ": "hello", '"say ': "hello"})


@pytest.fixture
def config(shared_home: Path) -> Iterator[Path]:
    folder = shared_home / "config"
    folder.mkdir(exist_ok=True)
    yield folder / "infill.toml"
    (folder / "infill.toml").unlink(missing_ok=True)


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    folder = tmp_path / "shop"
    folder.mkdir()
    return folder


@pytest.fixture
def bank(tmp_path: Path) -> Path:
    folder = tmp_path / "bank"
    folder.mkdir()
    return folder


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    """Waits for what the server notices in its own time."""
    async with asyncio.timeout(20):
        while not await is_so():  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.1)


def write(file: Path, text: str) -> None:
    file.write_text(text)


async def offered(editor: Editor, folder: Path, name: str = "a.py") -> bool:
    """Whether something is offered by hand in a document of the folder."""
    editor.open("return ", (folder / name).as_uri())
    items = await editor.complete(0, 7)
    editor.close()
    return bool(items)


async def why(editor: Editor, character: int = 7) -> str:
    place: dict[str, Any] = {"line": 0, "character": character}
    answer = await editor.ask("infill/why", {"textDocument": {"uri": editor.uri}, "position": place})
    return str(answer.reason)


async def test_an_editor_is_asked_for_each_folder_and_again_when_it_says_so(
    editor: Editor, quick: str, shop: Path, bank: Path
) -> None:
    model = await ready(quick)
    settings = {"": {"model": model}, bank.as_uri(): {"model": model, "enabled": False}}
    await editor.start(folders=[shop, bank], settings=settings)
    assert await offered(editor, shop)
    assert not await offered(editor, bank)
    editor.client.set_configuration({"model": model}, section="infill", scope_uri=bank.as_uri())
    editor.client.set_configuration({"model": model, "maxLines": 0}, section="infill", scope_uri=shop.as_uri())
    editor.configure(None)
    await editor.shown(1)
    assert await offered(editor, bank)
    assert editor.messages == ["infill.maxLines: got 0, takes a whole number from 1 to 256; it is not used"]


async def test_the_server_asks_to_be_told_where_it_can(editor: Editor, quick: str) -> None:
    registered: list[types.Registration] = []
    editor.client.feature(types.CLIENT_REGISTER_CAPABILITY)(lambda params: registered.extend(params.registrations))
    await editor.start(settings={"": {"enabled": False}})
    await until(lambda: asyncio.sleep(0, bool(registered)))
    (registration,) = registered
    assert registration.method == types.WORKSPACE_DID_CHANGE_CONFIGURATION


@pytest.mark.parametrize("answers", [True, False])
async def test_an_editor_that_does_not_say_its_settings_is_not_waited_for_long(
    editor: Editor, quick: str, answers: bool
) -> None:
    async def asked(_: types.ConfigurationParams) -> list[object]:
        if answers:
            raise JsonRpcInvalidParams("no settings here")
        await over.wait()
        return []

    over = asyncio.Event()
    editor.client.protocol.fm.features[types.WORKSPACE_CONFIGURATION] = asked
    await editor.start(options={"model": await ready(quick)}, settings={"": {}})
    editor.open("return ")
    assert (await editor.item(0, 7)).insert_text == "a + b"
    over.set()


async def test_who_asks_right_after_a_change_is_answered_by_the_new_settings(editor: Editor, quick: str) -> None:
    async def asked(params: types.ConfigurationParams) -> list[object]:
        await over.wait()
        return [{"languages": {"python": False}} for _ in params.items]

    over = asyncio.Event()
    await editor.start(options={"model": await ready(quick)}, settings={"": {}})
    editor.open("return ")
    document = {"textDocument": {"uri": editor.uri}}
    assert (await editor.ask("infill/status", document)).state != "off"
    editor.client.protocol.fm.features[types.WORKSPACE_CONFIGURATION] = asked
    editor.configure({})
    status = asyncio.create_task(editor.ask("infill/status", document))
    await asyncio.sleep(0.2)
    over.set()
    assert (await status).state == "off"


async def test_an_editor_that_never_says_that_it_listens_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infill_lsp.configuration.PATIENCE_S", 0.01)
    async with asyncio.timeout(20):
        await create_server().settled()


async def test_the_persons_file_is_read_and_followed(editor: Editor, quick: str, shop: Path, config: Path) -> None:
    model = await ready(quick)
    write(config, f'model = "{model}"\nenabled = false\n')
    await editor.start(folders=[shop])
    assert not await offered(editor, shop)
    write(config, f'model = "{model}"\n')
    await until(lambda: offered(editor, shop))
    write(config, "enabled = fal")
    await editor.shown(1)
    assert "cannot be read (" in editor.messages[0]
    assert await offered(editor, shop)


async def test_a_folders_file_switches_it_off_and_on_while_the_server_runs(
    editor: Editor, quick: str, shop: Path, bank: Path
) -> None:
    (shop / ".infill.toml").write_text("enabled = false")
    await editor.start(options={"model": await ready(quick)}, folders=[shop, bank])
    assert not await offered(editor, shop)
    assert await offered(editor, bank)
    (shop / ".infill.toml").unlink()
    await until(lambda: offered(editor, shop))


async def test_a_folder_cannot_choose_programs_models_or_addresses(editor: Editor, quick: str, shop: Path) -> None:
    (shop / "evil").write_text(f"#!/bin/sh\ntouch {shop}/started\n")
    (shop / "evil").chmod(0o755)
    (shop / ".infill.toml").write_text(
        f'model = "evil"\nengine.python = "{shop}/evil"\nengine.address = "http://127.0.0.1:1"\ntrigger = "auto"\n'
    )
    await editor.start(options={"model": await ready(quick)}, folders=[shop])
    assert await offered(editor, shop)
    await editor.shown(1)
    (message,) = editor.messages
    lines = message.splitlines()
    assert len(lines) == 3
    assert all("of shop: " in line and "a workspace cannot set this" in line for line in lines)
    assert not (shop / "started").exists()


async def test_the_memory_of_one_folder_is_switched_off(editor: Editor, quick: str, shop: Path, bank: Path) -> None:
    for folder in (shop, bank):
        (folder / "a.py").write_text("x = 1\n")
    (shop / ".infill.toml").write_text("[priming]\nenabled = false\n")
    await editor.start(options={"model": await ready(quick)}, folders=[shop, bank])

    async def indexed() -> list[str]:
        status = await editor.ask("infill/status", None)
        return sorted(folder.name for folder in status.folders if folder.state == "ready")

    async def is_bank() -> bool:
        return await indexed() == ["bank"]

    await until(is_bank)
    (shop / ".infill.toml").unlink()

    async def are_both() -> bool:
        return await indexed() == ["bank", "shop"]

    await until(are_both)


async def test_languages_kinds_triggers_and_documents_are_switched_off_apart(
    editor: Editor, quick: str, shop: Path
) -> None:
    options = {"model": await ready(quick), "aggressiveness": "eager"}
    (shop / ".infill.toml").write_text('exclude = ["gen/"]')
    await editor.start(options=options, folders=[shop])
    assert not await offered(editor, shop, "gen/b/a.py")
    editor.open("return ", (shop / "a.py").as_uri())

    async def set_to(**more: object) -> None:
        editor.configure({"infill": {**options, **more}})
        await editor.ask("infill/status", None)  # Messages are taken in order, and settings in a moment.

    async def reason(wanted: str, character: int = 7) -> None:
        async def is_so() -> bool:
            return wanted in await why(editor, character)

        await until(is_so)

    assert await editor.complete(0, 7, automatic=True)
    await set_to(languages={"python": False})
    await reason("infill.languages")
    assert await editor.complete(0, 7) == []
    await set_to(trigger="manual")
    await reason("infill.trigger")
    assert await editor.complete(0, 7, automatic=True) == []
    assert await editor.complete(0, 7)
    assert await editor.complete(0, 7, automatic=True) == []  # Not from what is known either.
    editor.close()
    editor.open("# say ", (shop / "b.py").as_uri())
    await set_to(comments=False)
    await reason("infill.comments", 6)
    assert await editor.complete(0, 6) == []


async def test_keys_within_the_debounce_are_not_asked_about(editor: Editor, home: Path) -> None:
    asked: list[str] = []

    async def answer(target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if target == "/v1/status":
            await plain(writer, protocol.encode(Status(version="1", pid=1, state="ready", model="m")))
        elif target == "/v1/infill":
            asked.append(protocol.decode_request(body).head)
            await plain(writer, protocol.encode(Final("end")) + b"\n")
        else:
            await plain(writer, b"{}")

    async with listening(answer):
        await editor.start(options={"model": "m", "debounce": 400})
        editor.open("retur")
        first = asyncio.create_task(editor.complete(0, 5, automatic=True))
        await asyncio.sleep(0.05)
        editor.edit((0, 5), (0, 5), "n ")
        second = asyncio.create_task(editor.complete(0, 7, automatic=True))
        assert await first is None
        assert await second == []
    assert asked == ["return "]
