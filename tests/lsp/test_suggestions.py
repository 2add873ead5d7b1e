"""What is offered while somebody types, by the server in this process and an engine that writes what a test says."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from editor import Editor, until
from hypothesis import given
from hypothesis import strategies as st
from infill_engine.protocol import Candidate, Event, Final, InfillRequest
from lsprotocol import types
from marked import at
from pygls.exceptions import JsonRpcException
from scripted_engine import Scripted, from_table, served, status, sure

from infill_lsp import cache
from infill_lsp.cache import Cache
from infill_lsp.client import EngineError
from infill_lsp.confidence import fitted
from infill_lsp.core import Edit
from infill_lsp.suggestions import accepted

TABLE = {"return ": "first + second", "print(": "a, b)", "if a:\n": "    pass\n    more()", "first + second\n": "end()"}


@pytest.fixture
async def engine() -> Scripted:
    return Scripted(from_table(TABLE))


@pytest.fixture
async def typing(home: Path, engine: Scripted) -> AsyncIterator[Editor]:
    """An editor that has said hello."""
    async with served(engine) as (editor, _):
        await editor.initialize(options={"model": "m"})
        yield editor


async def offered(editor: Editor, line: int, character: int) -> list[str] | None:
    """The texts that are offered while typing; None for the answer null."""
    items = await editor.complete(line, character, automatic=True)
    return None if items is None else [str(item.insert_text) for item in items]


def typed(engine: Scripted) -> int:
    return len(engine.asked("typed"))


async def test_what_is_sure_is_offered_of_a_text_that_broke_off(typing: Editor, engine: Scripted) -> None:
    """The file parses as it is, and would not with the whole of it."""
    probs = (0.99, 0.98, 0.9, 0.01)
    engine.write = lambda request: [Candidate("first(a, [", probs, (5, 7, 8, 10)), Final("unsure")]
    typing.open("x = 1\n\ny = 2\n")
    assert await offered(typing, 1, 0) == ["first"]
    assert engine.requests[0].min_prob == fitted().floor > 0


# Typing into a suggestion.


async def test_typing_into_a_suggestion_and_back_needs_no_engine(typing: Editor, engine: Scripted) -> None:
    typing.open("x = 1\nreturn \ny = 2\n")
    assert await offered(typing, 1, 7) == ["first + second"]
    for i, character in enumerate("first"):
        typing.edit((1, 7 + i), (1, 7 + i), character)
        assert await offered(typing, 1, 8 + i) == ["first + second"[i + 1 :]]
    for i in range(12, 9, -1):
        typing.edit((1, i - 1), (1, i), "")
        assert await offered(typing, 1, i - 1) == ["first + second"[i - 8 :]]
    typing.edit((1, 9), (1, 9), "rs")
    assert await offered(typing, 1, 11) == ["t + second"]
    assert typed(engine) == 1


async def test_after_a_partial_accept_the_rest_is_the_same_suggestion(typing: Editor, engine: Scripted) -> None:
    typing.open("if a:\n")
    whole = await typing.complete(1, 0, automatic=True)
    typing.edit((1, 0), (1, 0), "    pass\n")
    rest = await typing.complete(2, 0, automatic=True)
    assert whole is not None
    assert rest is not None
    assert [item.insert_text for item in (*whole, *rest)] == ["    pass\n    more()", "    more()"]
    assert whole[0].command == rest[0].command
    assert typed(engine) == 1


async def test_a_bracket_that_the_editor_closed_is_replaced(typing: Editor, engine: Scripted) -> None:
    engine.write = from_table({"x = ": "f(a)"})
    typing.open("x = \n")
    assert await offered(typing, 0, 4) == ["f(a)"]
    typing.edit((0, 4), (0, 4), "f()")
    (item,) = await typing.complete(0, 6, automatic=True) or []
    assert item.insert_text == "a)"
    assert item.range == types.Range(types.Position(0, 6), types.Position(0, 7))
    assert typed(engine) == 1


@pytest.mark.parametrize(
    ("start", "end", "text", "line"),
    [((0, 4), (0, 5), "2", 1), ((2, 0), (2, 0), "\n", 1), ((2, 4), (2, 5), "3", 1), ((0, 0), (1, 0), "", 0)],
)
async def test_an_edit_elsewhere_asks_anew(
    typing: Editor, engine: Scripted, start: tuple[int, int], end: tuple[int, int], text: str, line: int
) -> None:
    typing.open("x = 1\nreturn \ny = 2\n")
    assert await offered(typing, 1, 7) == ["first + second"]
    typing.edit(start, end, text)
    assert await offered(typing, line, 7) == ["first + second"]
    assert typed(engine) == 2


async def test_other_text_than_the_suggestion_asks_anew(typing: Editor, engine: Scripted) -> None:
    typing.open("return \n")
    assert await offered(typing, 0, 7) == ["first + second"]
    typing.edit((0, 7), (0, 7), "g")
    assert await offered(typing, 0, 8) == []
    assert typed(engine) == 2


async def test_other_settings_make_what_was_offered_void(typing: Editor, engine: Scripted) -> None:
    typing.open("return \n")
    assert await offered(typing, 0, 7) == ["first + second"]
    typing.configure({"infill": {"model": "m", "maxLines": 4}})
    async with asyncio.timeout(20):
        while typed(engine) == 1:
            assert await offered(typing, 0, 7) == ["first + second"]


async def test_who_waits_while_settings_change_is_answered(typing: Editor, engine: Scripted) -> None:
    typing.open("return \n")
    engine.goes_on.clear()
    waiting = asyncio.create_task(offered(typing, 0, 7))
    await until(lambda: typed(engine) == 1)
    typing.configure({"infill": {"model": "m", "trigger": "manual"}})
    async with asyncio.timeout(20):
        while "infill.trigger" not in (await typing.ask("infill/why", where(typing, 0, 3))).reason:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    engine.goes_on.set()
    assert await waiting == ["first + second"]


TEXT = st.text(st.sampled_from("ab(\n)é𝔘 "), max_size=12)


@given(before=TEXT, text=TEXT.filter(bool), after=TEXT, size=st.integers(0, 12), eol=st.sampled_from(["\n", "\r\n"]))
def test_the_rest_of_a_suggestion_leads_to_the_same_document(
    before: str, text: str, after: str, size: int, eol: str
) -> None:
    snapshot = replace(at(f"{before}|{after}"), eol=eol)
    kept = Cache()
    whole = Edit(snapshot.row, snapshot.column, snapshot.column, text.replace("\n", eol))
    kept.put(snapshot, whole)
    some = Edit(snapshot.row, snapshot.column, snapshot.column, text[:size].replace("\n", eol))
    now = accepted(snapshot, some)
    assert now.characters == sum(map(len, now.lines))
    found = kept.find(now)
    assert [one.edit.text for one in found] == ([text[size:].replace("\n", eol)] if size < len(text) else [])
    for one in found:
        assert accepted(now, one.edit).lines == accepted(snapshot, whole).lines


@given(one=TEXT, text=TEXT.filter(bool), other=TEXT, cursor=st.integers(0, 12))
def test_a_suggestion_is_used_only_where_it_leads_to_the_same_document(
    one: str, text: str, other: str, cursor: int
) -> None:
    snapshot = at(f"{one}|{one}")
    kept = Cache()
    kept.put(snapshot, whole := Edit(snapshot.row, snapshot.column, snapshot.column, text))
    now = at(f"{other[:cursor]}|{other[cursor:]}")
    for found in kept.find(now):
        assert accepted(now, found.edit).lines == accepted(snapshot, whole).lines


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Cache()
    places = [replace(at("x = |"), uri=f"file:///{i}") for i in range(2 * cache.MOST)]
    for place in places:
        kept.put(place, Edit(0, 4, 4, "1"))
    assert sum(bool(kept.find(place)) for place in places) == cache.MOST
    kept.drop()
    monkeypatch.setattr(cache, "MOST_CHARACTERS", 100)
    for place in places[:50]:
        kept.put(place, Edit(0, 4, 4, "1"))
    assert sum(bool(kept.find(place)) for place in places) == 25


async def test_an_answer_is_for_the_newest_text_and_the_newest_request_alone(typing: Editor, engine: Scripted) -> None:
    typing.open("return \n")
    engine.goes_on.clear()
    older = asyncio.create_task(offered(typing, 0, 7))
    await until(lambda: typed(engine) == 1)
    newer = asyncio.create_task(offered(typing, 0, 7))
    await until(lambda: typed(engine) == 2)
    cancelled = asyncio.create_task(typing.complete(0, 7, msg_id="mine", automatic=True))
    await until(lambda: typed(engine) == 3)
    typing.client.cancel_request(types.CancelParams("mine"))
    with pytest.raises(JsonRpcException) as caught:
        await cancelled
    assert caught.value.code == types.LSPErrorCodes.RequestCancelled
    await until(lambda: engine.cancelled == engine.requests[2:])
    last = asyncio.create_task(offered(typing, 0, 7))
    await until(lambda: typed(engine) == 4)
    typing.edit((1, 0), (1, 0), "x")
    assert (await typing.ask("infill/status", None)).state == "busy"  # The edit has arrived.
    engine.goes_on.set()
    assert [await older, await newer, await last] == [None, None, None]
    assert await offered(typing, 0, 7) == ["first + second"]


# What is prepared ahead.


async def test_what_follows_is_there_when_the_suggestion_is_accepted(typing: Editor, engine: Scripted) -> None:
    engine.write = from_table({"return ": "first", "return first": " + second"})
    typing.open("return \n")
    assert await offered(typing, 0, 7) == ["first"]
    await until(lambda: len(engine.asked("speculation")) == 1)
    typing.edit((0, 7), (0, 7), "first")
    assert await offered(typing, 0, 12) == [" + second"]
    assert typed(engine) == 1


async def test_what_is_prepared_ends_with_the_next_key(typing: Editor, engine: Scripted) -> None:
    typing.open("return \n")

    def write(request: InfillRequest) -> list[Event]:
        if request.priority == "typed":
            engine.goes_on.clear()
        return from_table(TABLE)(request)

    engine.write = write
    assert await offered(typing, 0, 7) == ["first + second"]
    await until(lambda: len(engine.asked("speculation")) == 1)
    assert engine.cancelled == []
    typing.edit((0, 7), (0, 7), "f")
    await until(lambda: engine.cancelled == engine.asked("speculation"))


async def test_what_the_deadline_cut_short_is_finished_and_the_editor_told(home: Path) -> None:
    def write(request: InfillRequest) -> list[Event]:
        if request.priority == "typed":
            return [sure("first"), Final("deadline")]
        return [sure("first + second"), Final("end")] if request.head == "return " else [Final("end")]

    engine = Scripted(write)
    async with served(engine) as (editor, _):
        await editor.initialize(options={"model": "m"}, declares={"infill": {"refresh": True}})
        editor.open("𝔘 = 1\nreturn \n")
        assert await offered(editor, 1, 7) == ["first"]
        await until(lambda: bool(editor.refreshes))
        (told,) = editor.refreshes
        assert (told.textDocument.uri, told.version) == (editor.uri, 1)
        assert (told.position.line, told.position.character) == (1, 7)
        assert await offered(editor, 1, 7) == ["first + second"]
        assert typed(engine) == 1


async def test_what_is_not_worth_showing_so_far_is_not_asked_for_again(typing: Editor, engine: Scripted) -> None:
    engine.write = lambda _: [sure("]);"), Final("deadline")]
    typing.open("return \n")
    assert await offered(typing, 0, 7) == []
    assert (await typing.ask("infill/why", where(typing, 0, 7))).reason.startswith("closers")
    assert [request.priority for request in engine.requests] == ["typed"]


@pytest.mark.parametrize("begun", [[], [sure("f")]], ids=["read too late", "too short to be judged"])
async def test_who_got_nothing_since_time_was_up_gets_it_with_more(home: Path, begun: list[Event]) -> None:
    def write(request: InfillRequest) -> list[Event]:
        return [*begun, Final("deadline")] if request.priority == "typed" else from_table(TABLE)(request)

    engine = Scripted(write)
    async with served(engine) as (editor, _):
        await editor.initialize(options={"model": "m"}, declares={"infill": {"refresh": True}})
        editor.open("return \n")
        assert await offered(editor, 0, 7) == []
        await until(lambda: bool(editor.refreshes))
        assert await offered(editor, 0, 7) == ["first + second"]


async def test_beside_a_menu_what_came_too_late_is_told_of_at_the_cursor_that_there_is(home: Path) -> None:
    def write(request: InfillRequest) -> list[Event]:
        return [Final("deadline")] if request.priority != "speculation" else from_table(TABLE)(request)

    engine = Scripted(write)
    async with served(engine) as (editor, _):
        await editor.initialize(options={"model": "m"}, declares={"infill": {"refresh": True}})
        editor.open("re\n")
        place = types.Range(types.Position(0, 0), types.Position(0, 2))
        entry = types.SelectedCompletionInfo(place, "return ")
        assert await editor.complete(0, 2, selected=entry) == []
        await until(lambda: bool(editor.refreshes))
        (told,) = editor.refreshes
        assert (told.version, told.position.line, told.position.character) == (1, 0, 2)
        assert [item.insert_text for item in await editor.complete(0, 2, selected=entry)] == ["return first + second"]
        # What would follow waits until the entry is accepted.
        assert len(engine.asked("speculation")) == 1


async def test_an_engine_that_becomes_ready_answers_who_got_nothing(home: Path) -> None:
    away = True

    def write(request: InfillRequest) -> list[Event]:
        return [Final("starting")] if away else from_table(TABLE)(request)

    engine = Scripted(write)
    engine.states = [status("starting")]
    async with served(engine) as (editor, _):
        await editor.initialize(options={"model": "m"}, declares={"infill": {"refresh": True}})
        editor.open("return \n")
        assert await offered(editor, 0, 7) == []
        away = False
        engine.states = [status("ready", pid=2)]
        await until(lambda: bool(editor.refreshes))
        assert await offered(editor, 0, 7) == ["first + second"]


async def test_nobody_is_told_of_another_text_than_the_one_that_is_there(home: Path) -> None:
    def write(request: InfillRequest) -> list[Event]:
        if request.priority == "typed":
            engine.goes_on.clear()
            return [sure("first"), Final("deadline")]
        return [sure("first + second"), Final("end")]

    engine = Scripted(write)
    async with served(engine) as (editor, _):
        await editor.initialize(options={"model": "m"}, declares={"infill": {"refresh": True}})
        editor.open("return \n")
        assert await offered(editor, 0, 7) == ["first"]
        await until(lambda: len(engine.asked("speculation")) == 1)
        editor.edit((1, 0), (1, 0), "x")
        assert (await editor.ask("infill/status", None)).state == "ready"  # The edit has arrived.
        engine.goes_on.set()
        assert (await editor.ask("infill/why", where(editor, 0, 7))).shown
        assert editor.refreshes == []


async def test_what_an_editor_shows_and_does_not_ask_for_again_may_only_grow(home: Path) -> None:
    def write(request: InfillRequest) -> list[Event]:
        if request.priority == "typed":
            return [sure("first"), Final("deadline")]
        return [sure("fairly_other"), Final("end")]

    engine = Scripted(write)
    async with served(engine) as (editor, _):
        await editor.initialize(options={"model": "m"}, declares={})
        editor.open("return \n")
        assert await offered(editor, 0, 7) == ["first"]
        await until(lambda: len(engine.asked("speculation")) == 2)
        editor.edit((0, 7), (0, 7), "f")
        assert await offered(editor, 0, 8) == ["irst"]
        assert editor.refreshes == []


# Several, and menus.


async def test_asked_by_hand_there_are_several_that_differ_in_more_than_space(typing: Editor, engine: Scripted) -> None:
    texts = ["one(a)", "two(b)", "two( b )"]

    def write(request: InfillRequest) -> list[Event]:
        return [sure(texts[len(request.avoid)]), Final("end")]

    engine.write = write
    typing.open("x = \n")
    items = await typing.complete(0, 4)
    assert [item.insert_text for item in items or []] == ["one(a)", "two(b)"]
    assert [request.avoid for request in engine.asked("explicit")] == [(), ("one(a)",), ("one(a)", "two(b)")]
    assert await offered(typing, 0, 4) == ["one(a)"]
    typing.edit((0, 4), (0, 4), "tw")
    assert await offered(typing, 0, 6) == ["o(b)"]
    assert await offered(typing, 0, 6) == ["o(b)"]
    typing.edit((0, 4), (0, 6), "")
    assert await offered(typing, 0, 4) == ["two(b)"]  # The last used goes first.


async def test_lines_selected_in_visual_mode_are_no_entry_of_a_menu(typing: Editor) -> None:
    typing.open("def f():\n    return \n")
    where = types.Range(types.Position(0, 4), types.Position(1, 11))
    items = await typing.complete(1, 11, selected=types.SelectedCompletionInfo(where, "f():\n    return "))
    assert [(item.insert_text, item.range) for item in items or []] == [
        ("first + second", types.Range(types.Position(1, 11), types.Position(1, 11)))
    ]
    assert await typing.complete(1, 11, selected=types.SelectedCompletionInfo(where, "other\ntext")) == []


# Status, reasons, and switching off.


def where(editor: Editor, line: int, character: int) -> dict[str, Any]:
    return {"textDocument": {"uri": editor.uri}, "position": {"line": line, "character": character}}


async def test_an_editor_that_wants_it_is_told_how_things_are(home: Path, engine: Scripted) -> None:
    engine.states = [status("starting", "loading"), status("fetching", "fetching", 0.5), status("ready")]
    async with served(engine) as (editor, _):
        await editor.initialize(options={"model": "m"}, declares={"infill": {"status": True}})
        await until(lambda: bool(editor.statuses) and editor.statuses[-1].state == "ready")
        assert [one.state for one in editor.statuses][-3:] == ["starting", "fetching", "ready"]
        assert editor.statuses[-2].progress == 0.5
        editor.statuses.clear()
        editor.open("return \n")
        assert await offered(editor, 0, 7) == ["first + second"]
        assert [one.state for one in editor.statuses] == ["busy", "ready"]
        editor.configure({"infill": {"model": "m", "enabled": False}})
        await until(lambda: editor.statuses[-1].state == "off")
        assert "infill.enabled" in editor.statuses[-1].message


async def test_the_status_has_the_folders_that_there_are(home: Path, engine: Scripted, tmp_path: Path) -> None:
    folder = tmp_path / "shop"
    folder.mkdir()
    (folder / "a.py").write_text("a = 1\n")
    async with served(engine) as (editor, _):
        await editor.initialize(options={"model": "m"}, declares={"infill": {"status": True}}, folders=[folder])

        def shown() -> list[tuple[str, str]]:
            return [(one.name, one.state) for one in editor.statuses[-1].folders] if editor.statuses else []

        await until(lambda: shown() == [("shop", "ready")])
        editor.change_folders(removed=[folder])
        await until(lambda: shown() == [])


async def test_a_status_after_an_engines_fault_is_not_busy(home: Path) -> None:
    engine = Scripted(lambda request: [Final("error", "no luck: try again")])
    async with served(engine) as (editor, _):
        await editor.initialize(options={"model": "m"}, declares={"infill": {"status": True}})
        editor.open("return \n")
        assert await offered(editor, 0, 7) == []
        await until(lambda: editor.statuses[-1].state == "ready")
        assert editor.messages == ["no luck: try again"]


async def test_an_engine_that_goes_and_comes_back_is_told_of(
    home: Path, engine: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infill_lsp.server.ENGINE_POLL_S", 0.01)
    async with served(engine) as (editor, _):
        await editor.initialize(options={"model": "m"}, declares={"infill": {"status": True}})
        editor.open("return \n")
        await until(lambda: bool(editor.statuses) and editor.statuses[-1].state == "ready" and bool(engine.primed))
        for away, state in ((True, "stopped"), (EngineError("it hangs: end it"), "error")):
            engine.away = away
            await until(lambda state=state: editor.statuses[-1].state == state)  # type: ignore[misc]
            engine.away = False
            await until(lambda: editor.statuses[-1].state == "ready")
        assert [one.message for one in editor.statuses if one.state == "error"] == ["it hangs: end it"]
        engine.primed.clear()
        engine.states = [status("ready", pid=2)]  # Another process, which another editor has started.
        await until(lambda: bool(engine.primed))


async def test_switched_off_the_engine_is_told_that_nobody_asks(typing: Editor, engine: Scripted) -> None:
    typing.open("return \n")
    assert await offered(typing, 0, 7) == ["first + second"]
    typing.configure({"infill": {"model": "m", "languages": {"*": False}}})
    await until(lambda: len(engine.left) == 1)
    assert engine.left == [engine.requests[0].client]
    assert await offered(typing, 0, 7) == []


async def test_the_reason_is_told_for_a_document_and_for_a_place(typing: Editor, engine: Scripted) -> None:
    typing.open("return \n")
    why = await typing.ask("infill/why", where(typing, 0, 7))
    assert why.shown
    why = await typing.ask("infill/why", where(typing, 0, 3))
    assert (why.shown, why.reason) == (False, "the cursor is in the middle of a word")
    assert (await typing.ask("infill/status", {"textDocument": {"uri": typing.uri}})).state == "ready"
    why = await typing.ask(
        "infill/why", {"textDocument": {"uri": "file:///no"}, "position": {"line": 0, "character": 0}}
    )
    assert (why.shown, why.reason) == (False, "the document is not open")
    typing.uri = "file:///project/.env"
    typing.open("KEY=\n")
    told = await typing.ask("infill/status", {"textDocument": {"uri": typing.uri}})
    assert (told.state, told.message) == ("off", ".env may hold secrets")
    typing.open("x" * 3_000 + "\nreturn \n", uri="file:///project/long.py")  # A line of it is off, and no other.
    assert (await typing.ask("infill/status", {"textDocument": {"uri": typing.uri}})).state == "ready"
    typing.uri = "file:///project/.env"
    command = {
        "command": "infill.server.why",
        "arguments": [{"uri": typing.uri, "position": {"line": 0, "character": 4}}],
    }
    assert await typing.ask(types.WORKSPACE_EXECUTE_COMMAND, command) == ".env may hold secrets"
    assert typing.messages == ["Infill: .env may hold secrets"]


@pytest.mark.parametrize("link", ["file", "folder"])
async def test_a_link_with_a_harmless_name_to_a_secret_is_silent(
    typing: Editor, engine: Scripted, tmp_path: Path, link: str
) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/notes").write_text("KEY=\n")
    opened = tmp_path / "notes.txt" if link == "file" else tmp_path / "cloud/notes"
    if link == "file":
        opened.symlink_to(tmp_path / ".aws/notes")
    else:
        (tmp_path / "cloud").symlink_to(tmp_path / ".aws")
    typing.uri = opened.as_uri()
    typing.open("KEY=\n")
    assert await offered(typing, 0, 4) == []
    assert engine.requests == []
    told = await typing.ask("infill/status", {"textDocument": {"uri": typing.uri}})
    assert (told.state, told.message) == ("off", f"{opened.name} may hold secrets")


async def test_a_document_without_a_file_is_not_looked_for_where_the_server_runs(
    typing: Editor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".aws").mkdir()
    monkeypatch.chdir(tmp_path / ".aws")
    typing.open("return \n", uri="untitled:Untitled-1")
    assert await offered(typing, 0, 7) == ["first + second"]


async def test_asking_why_disturbs_nobody(typing: Editor, engine: Scripted) -> None:
    typing.open("return \n")
    engine.goes_on.clear()
    waiting = asyncio.create_task(offered(typing, 0, 7))
    await until(lambda: typed(engine) == 1)
    asking = asyncio.create_task(typing.ask("infill/why", where(typing, 0, 7)))
    await until(lambda: typed(engine) == 2)
    assert engine.requests[0].document != engine.requests[1].document
    engine.goes_on.set()
    assert await waiting == ["first + second"]
    assert (await asking).shown


async def test_the_engine_is_restarted_by_command(typing: Editor, engine: Scripted) -> None:
    assert await typing.ask(types.WORKSPACE_EXECUTE_COMMAND, {"command": "infill.server.restartEngine"}) is None
    assert engine.stopped == 1


async def test_a_fault_that_nobody_waits_for_is_logged_without_its_text(
    home: Path, engine: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(text: str) -> None:
        raise ValueError(text)

    async with served(engine) as (editor, _):
        await editor.initialize(options={"model": "m"})
        asyncio.get_running_loop().call_soon(fail, "a person's text")
        editor.open("return \n")
        assert await offered(editor, 0, 7) == ["first + second"]
    assert "a fault in infill-lsp: ValueError" in caplog.text
    assert "a person's text" not in caplog.text


async def test_a_log_level_that_is_taken_back_is_the_command_lines_again(home: Path) -> None:
    loggers = {name: logging.getLogger(name) for name in ("", "pygls")}
    before = {name: logger.level for name, logger in loggers.items()}
    try:
        async with served(Scripted(from_table(TABLE))) as (editor, _):
            await editor.initialize(options={"model": "m"})
            editor.configure({"infill": {"logLevel": "debug"}})
            await until(lambda: all(logger.level == logging.DEBUG for logger in loggers.values()))
            editor.configure({"infill": {}})
            await until(lambda: all(logger.level == logging.WARNING for logger in loggers.values()))
    finally:
        for name, level in before.items():
            loggers[name].setLevel(level)
