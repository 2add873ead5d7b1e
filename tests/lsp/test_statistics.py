"""Counting what is offered and accepted, by the server in this process, and showing it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from datetime import date, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lsprotocol import types
from scripted_engine import Scripted, from_table, served

from infill_lsp import statistics
from infill_lsp.statistics import Statistics, add, database, percentile, read, report, retained

TEXT = "first + second"


def counted() -> Counter[str]:
    """All that was written, whatever the day; latencies as one number for each source."""
    found: Counter[str] = Counter()
    for name, count in sum(read(database()).values(), Counter[str]()).items():
        found[name.split()[0]] += count
    return found


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "RETAINED_S", 0.0)


async def test_a_plain_editor_counts_by_the_command_of_the_item(home: Path) -> None:
    async with served(Scripted(from_table({"return ": TEXT}))) as (editor, _):
        await editor.initialize(options={"model": "m"}, declares={})
        editor.open("return \n")
        for _ in range(2):
            (item,) = await editor.complete(0, 7, automatic=True) or []
        assert item.command is not None
        editor.edit((0, 7), (0, 7), TEXT)
        command = {"command": item.command.command, "arguments": item.command.arguments}
        assert await editor.ask(types.WORKSPACE_EXECUTE_COMMAND, command) is None
        await editor.ask(types.WORKSPACE_EXECUTE_COMMAND, command)  # It counts once.
        text = await editor.ask(types.WORKSPACE_EXECUTE_COMMAND, {"command": "infill.server.stats"})
        assert "100%" in text
    characters = len(TEXT.replace(" ", ""))
    assert counted() == {
        "offered": 1,
        "accepted": 1,
        "characters": len(TEXT),
        "written": 1,
        "known": 1,
        "watched": characters,
        "retained": characters,
    }


async def test_our_editors_say_what_they_draw_and_take_in_parts(home: Path) -> None:
    async with served(Scripted(from_table({"return ": "é𝔘" + TEXT}))) as (editor, server):
        await editor.initialize(options={"model": "m"}, declares={"infill": {}})
        editor.open("return \n")
        (item,) = await editor.complete(0, 7, automatic=True) or []
        assert item.command is not None
        assert item.command.arguments
        (id,) = item.command.arguments
        assert server.statistics._counts["offered"] == 0
        for _ in range(2):
            editor.tell("infill/offered", {"id": id})
        editor.tell("infill/partiallyAccepted", {"id": id, "length": 3})
        editor.tell("infill/partiallyAccepted", {"id": id, "length": 8})
        editor.edit((0, 7), (0, 7), "é𝔘first")
        assert await editor.complete(0, 15, automatic=True)  # The rest, under the same id.
        editor.tell("infill/partiallyAccepted", {"id": id, "length": 2})
        editor.tell("infill/accepted", {"id": id})
        editor.tell("infill/accepted", {"id": "no such"})
        for nonsense in (None, {}, {"id": []}, {"id": id, "length": "x"}, [1]):
            editor.tell("infill/partiallyAccepted", nonsense)
        assert await editor.complete(0, 0, automatic=True) is not None
    counts = counted()
    assert (counts["offered"], counts["partly"], counts["accepted"]) == (1, 1, 1)
    assert counts["characters"] == len("é𝔘" + TEXT)


async def test_switched_off_nothing_is_counted_nor_written(home: Path) -> None:
    async with served(Scripted(from_table({"return ": TEXT}))) as (editor, _):
        await editor.initialize(options={"model": "m", "statistics": False}, declares={})
        editor.open("return \n")
        (item,) = await editor.complete(0, 7, automatic=True) or []
        command = {"command": "infill.server.accepted", "arguments": item.command.arguments if item.command else []}
        await editor.ask(types.WORKSPACE_EXECUTE_COMMAND, command)
    assert not database().exists()


async def test_what_is_written_holds_nothing_of_what_was_typed(home: Path) -> None:
    async with served(Scripted(from_table({"secret_name = ": "secret_value"}))) as (editor, _):
        await editor.initialize(options={"model": "m"}, declares={})
        editor.uri = "file:///secret_folder/a.py"
        editor.open("secret_name = \n")
        assert await editor.complete(0, 14, automatic=True)
    assert counted()["offered"] == 1
    assert b"secret" not in database().read_bytes()


async def test_open_offers_are_bounded(home: Path) -> None:
    counts = Statistics(lambda uri: None)
    for i in range(2 * statistics.OPEN_OFFERS):
        counts.offer(str(i), "u", 0, "x")
    counts.accepted("0")
    assert counts._counts["accepted"] == 0
    counts.accepted(str(statistics.OPEN_OFFERS))
    assert counts._counts["accepted"] == 1
    await counts.aclose()


async def test_what_is_retained_is_looked_for_where_it_went(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines written above it move it away."""
    monkeypatch.setattr(statistics, "RETAINED_S", 0.3)
    async with served(Scripted(from_table({"return ": TEXT}))) as (editor, _):
        await editor.initialize(options={"model": "m"}, declares={})
        editor.open("return \n")
        (item,) = await editor.complete(0, 7, automatic=True) or []
        assert item.command is not None
        editor.edit((0, 7), (0, 7), TEXT)
        command = {"command": item.command.command, "arguments": item.command.arguments}
        assert await editor.ask(types.WORKSPACE_EXECUTE_COMMAND, command) is None
        for row in range(40):
            editor.edit((row, 0), (row, 0), f"line_{row} = {row}\n")
        while "retained" not in counted():
            await asyncio.sleep(0.05)
            await editor.ask(types.WORKSPACE_EXECUTE_COMMAND, {"command": "infill.server.stats"})
    assert counted()["retained"] == counted()["watched"] == len(TEXT.replace(" ", ""))


@given(st.text("ab c\n(", max_size=30), st.text("ab c\n(", max_size=30))
def test_what_is_retained_is_between_nothing_and_all(text: str, now: str) -> None:
    whole = retained(text, text)
    assert whole == len("".join(text.split()))
    assert 0 <= retained(text, now) <= whole
    assert retained(text, f"x\n{text}\ny") == whole


def test_the_counts_may_lie_in_any_folder(tmp_path: Path) -> None:
    path = tmp_path / "what? #1 100%20" / "s.sqlite"
    add(path, date.today(), {"offered": 4})
    assert date.today().isoformat() in report(path)


def test_days_add_up_and_old_ones_go(tmp_path: Path) -> None:
    path, today = tmp_path / "new" / "s.sqlite", date.today()
    add(path, today - timedelta(statistics.KEPT_DAYS + 1), {"offered": 9})
    for _ in range(2):
        add(path, today, {"offered": 4, "accepted": 1, "written 100": 3, "known 5": 1})
    assert read(path) == {today.isoformat(): {"offered": 8, "accepted": 2, "written 100": 6, "known 5": 2}}
    counts = read(path)[today.isoformat()]
    assert percentile(counts, ("known", "written"), 0.5) == 100
    assert percentile(counts, ("known",), 0.95) == 5
    text = report(path)
    assert f"{today.isoformat()}       8      2        0   25% ███" in text


def test_stats_are_a_command_line(home: Path) -> None:
    def run() -> str:
        command = [sys.executable, "-m", "infill_lsp", "stats"]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    assert run() == "nothing was offered yet\n"
    add(database(), date.today(), {"offered": 1})
    assert date.today().isoformat() in run()
    strange = home / "100% mine? yes#1"
    add(strange / "statistics.sqlite", date.today(), {"offered": 1})
    assert date.today().isoformat() in report(strange / "statistics.sqlite")
    database().write_text("no database" * 1000)
    assert run().count("\n") == 1


async def test_a_full_disk_costs_the_counts_and_nothing_else(home: Path) -> None:
    (home / "cache").write_text("no folder")
    async with served(Scripted(from_table({"return ": TEXT}))) as (editor, _):
        await editor.initialize(options={"model": "m"}, declares={})
        editor.open("return \n")
        assert await editor.complete(0, 7, automatic=True)
        text = await editor.ask(types.WORKSPACE_EXECUTE_COMMAND, {"command": "infill.server.stats"})
        assert "\n" not in text
