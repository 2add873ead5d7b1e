"""What the engine measures: every end is counted, times of answers alone, nothing of the user's."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from infill_engine import models, protocol
from infill_engine.config import EngineConfig
from infill_engine.metrics import Metrics
from infill_engine.protocol import Candidate, Final, InfillRequest, Proposals, Timing
from infill_engine.top import Reading
from scripted import Steps, ask
from service import Call, Service, serving

TIMING = Timing(
    queue_ms=5.0,
    encode_ms=20.0,
    denoise_ms=75.0,
    steps=4,
    committed=10,
    encoded=30,
    reused=90,
    snippets=1,
    late_snippets=2,
    proposed=Proposals(lookup=6),
    accepted=Proposals(lookup=3),
)


def read(metrics: Metrics) -> Reading:
    return Reading.parse(metrics.exposition(live=1, background=2, cache_bytes=3).decode())


def test_an_answer_tells_where_its_time_went() -> None:
    metrics = Metrics()
    metrics.finished(ask(), Final("end", timing=TIMING))
    found = read(metrics)
    for name, seconds in {"queue": 0.005, "encode": 0.02, "total": 0.1}.items():
        assert found.total(f"infill_{name}_seconds_count") == 1
        assert found.total(f"infill_{name}_seconds_sum") == pytest.approx(seconds)
    assert found.total("infill_tokens_per_pass_sum") == 2.5
    assert found.total("infill_committed_tokens_total") == 10
    assert found.total("infill_request_passes_total") == 4
    assert found.by("infill_context_tokens_total", "source") == {"encoded": 30, "reused": 90}
    assert found.by("infill_snippets_total", "state") == {"used": 1, "late": 2}
    assert found.by("infill_proposed_tokens_total", "source") == {"mask": 0, "lookup": 6, "last": 0}
    assert found.by("infill_accepted_tokens_total", "source") == {"mask": 0, "lookup": 3, "last": 0}


@pytest.mark.parametrize("reason", ["cancelled", "superseded", "busy", "starting", "error"])
def test_what_was_not_answered_is_counted_by_its_reason_alone(reason: protocol.Reason) -> None:
    metrics = Metrics()
    metrics.finished(ask(), Final(reason))
    found = read(metrics)
    assert found.by("infill_requests_total", "reason") == {reason: 1}
    assert found.total("infill_total_seconds_count") == 0


def test_a_request_without_a_pass_has_no_pace() -> None:
    metrics = Metrics()
    metrics.finished(ask(), Final("deadline"))
    assert read(metrics).total("infill_tokens_per_pass_count") == 0


def test_passes_and_encoding_are_measured_on_their_own() -> None:
    metrics = Metrics()
    metrics.stepped(canvases=3, rows=40, seconds=0.02)
    metrics.stepped(canvases=1, rows=8, seconds=0.01)
    metrics.encoded(tokens=64, seconds=0.1)
    found = read(metrics)
    assert found.total("infill_step_seconds_count") == 2
    assert found.total("infill_step_seconds_sum") == pytest.approx(0.03)
    assert found.total("infill_pass_canvases_sum") == 4
    assert found.total("infill_pass_rows_sum") == 48
    assert (found.total("infill_encoded_tokens_total"), found.total("infill_encoding_seconds_total")) == (64, 0.1)


def test_gauges_are_as_they_are_now() -> None:
    metrics = Metrics()
    metrics.exposition(live=9, background=9, cache_bytes=9)
    found = read(metrics)
    assert found.total("infill_live_requests") == 1
    assert found.total("infill_background") == 2
    assert found.total("infill_cache_bytes") == 3


def test_two_engines_share_no_figures() -> None:
    one, other = Metrics(), Metrics()
    one.finished(ask(), Final("end"))
    assert read(other).total("infill_requests_total") == 0


def endless(request: InfillRequest) -> Steps:
    yield Candidate("secret_text")
    while True:
        time.sleep(0.001)
        yield None


async def measured(service: Service) -> str:
    call = Call(service.app, "GET", "/metrics")
    assert await call.status() == 200
    assert call.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return (await call.body()).decode()


async def test_the_engine_counts_why_requests_end_and_tells_nothing_of_them() -> None:
    async with serving(endless, max_live=2).running() as service:
        await service.ready()
        body = protocol.encode(ask("secret_document", client="secret_client", head="secret_head"))
        calls = []
        for _ in range(2):
            calls.append(Call(service.app, "POST", "/v1/infill", body))
            assert await calls[-1].status() == 200
            await calls[-1].part()
        found = Reading.parse(await measured(service))
        assert found.by("infill_requests_total", "reason").get("superseded") == 1
        assert found.total("infill_live_requests") == 1
        assert found.total("infill_cache_bytes") == 12_345
        for call in calls:
            call.hang_up()
            await call.done()
        reasons = {"superseded": 1, "cancelled": 1}
        await service.until(lambda: read(service.metrics).by("infill_requests_total", "reason") == reasons)
        assert "secret" not in await measured(service)


async def test_a_real_engine_measures_its_passes_and_its_encoding(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"x = ": "y + 1"}))
    service = Service(lambda report: models.load(EngineConfig(model=f"fake:{table}", threads=1), report))
    async with service.running():
        await service.ready()
        call = Call(service.app, "POST", "/v1/infill", protocol.encode(ask(head="x = ", deadline_ms=5000)))
        assert await call.status() == 200
        assert b'"end"' in await call.body()
        await service.until(lambda: read(service.metrics).total("infill_requests_total") == 1)
    found = read(service.metrics)
    assert found.total("infill_step_seconds_count") == found.total("infill_request_passes_total") > 0
    assert found.total("infill_encoded_tokens_total") >= found.by("infill_context_tokens_total", "source")["encoded"]
    assert found.total("infill_committed_tokens_total") >= len("y + 1")
