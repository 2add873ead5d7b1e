"""What other plugins send and read: their bodies, streams, refusals; over TCP also who may call."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from infill_engine.compat import DOCUMENTS, MOST_LINES, MOST_TOKENS, Ask, LlamaBody, LlamaExtra, OpenAIBody, Reply
from infill_engine.endpoints import MAX_BODY
from infill_engine.gap import GapText
from infill_engine.protocol import (
    MAX_SNIPPET,
    MAX_SNIPPETS,
    Candidate,
    End,
    Final,
    InfillRequest,
    Snippet,
    Timing,
    decode_request,
    encode,
)
from scripted import ScriptedEngine, Steps
from service import Call, Service, serving

DIALECTS = ("/infill", "/v1/completions", "/v1/fim/completions")

#: What each plugin sends, by what its sources say, around the same cursor: `    return |` before a second function.
BEFORE, AFTER = "def area(r):\n    pi = 3.14\n    return ", "\n\n\ndef side(a):\n    return a\n"
LLAMA_VIM = {
    "id_slot": 0,
    "input_prefix": "def area(r):\n    pi = 3.14\n",
    "input_suffix": AFTER,
    "input_extra": [{"text": "import math\n", "time": [12, 345], "filename": "geometry.py"}],
    "prompt": "    return ",
    "n_predict": 128,
    "stop": [],
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.9,
    "samplers": ["top_k", "top_p", "infill"],
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 250,
    "response_fields": [
        "content",
        "timings/prompt_n",
        "timings/prompt_ms",
        "timings/prompt_per_token_ms",
        "timings/prompt_per_second",
        "timings/predicted_n",
        "timings/predicted_ms",
        "timings/predicted_per_token_ms",
        "timings/predicted_per_second",
        "truncated",
        "tokens_cached",
    ],
}
LLAMA_VIM_RING = {
    "id_slot": 0,
    "input_prefix": "",
    "input_suffix": "",
    "input_extra": [{"text": "import math\n", "time": [1, 2], "filename": "geometry.py"}],
    "prompt": "",
    "n_predict": 0,
    "temperature": 0.0,
    "samplers": [],
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 1,
    "t_max_predict_ms": 1,
    "response_fields": [""],
}
LLAMA_VSCODE = {
    "id_slot": 0,
    "input_prefix": "def area(r):\n    pi = 3.14\n",
    "input_suffix": AFTER,
    "input_extra": [{"text": "import math\n", "time": 1765000000000, "filename": "file:///geometry.py"}],
    "prompt": "    return ",
    "n_predict": 128,
    "n_cmpl": 3,
    "top_k": 40,
    "top_p": 0.99,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "n_indent": 4,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
}
MINUET = {"model": "infill", "stream": True, "max_tokens": 56, "top_p": 0.9, "prompt": BEFORE, "suffix": AFTER}
CONTINUE = {
    "model": "infill",
    "prompt": BEFORE,
    "suffix": AFTER,
    "max_tokens": 4096,
    "temperature": 0.01,
    "stop": ["/src/", "#- coding: utf-8", "```"],
    "stream": True,
}
ZED_CODESTRAL = {
    "model": "codestral-latest",
    "prompt": BEFORE,
    "suffix": AFTER,
    "max_tokens": 150,
    "temperature": 0.2,
    "top_p": 1.0,
    "stream": False,
}
ZED_OPENAI = {
    "model": "qwen",
    "prompt": f"<|fim_prefix|>{BEFORE}<|fim_suffix|>{AFTER}<|fim_middle|>",
    "max_tokens": 64,
    "stop": ["<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"],
    "environment": None,
}

TIMING = Timing(queue_ms=1.0, encode_ms=20.0, denoise_ms=40.0, steps=4, committed=5, encoded=10, reused=30)


def circle(request: InfillRequest) -> Steps:
    """Answers for the cursor above, and says what was asked by failing for any other."""
    assert (request.prefix, request.head) == ("def area(r):\n    pi = 3.14\n", "    return ")
    assert (request.tail, request.suffix) == ("", AFTER)
    yield Candidate("pi * r")
    yield Candidate("pi * r ** 2", (0.9,) * 5, (2, 4, 6, 9, 11), (End(11, None, 0.9),))
    yield Final("end", timing=TIMING)


def lines(request: InfillRequest) -> Steps:
    """Three lines; the suffix follows the second best."""
    one, two = End(3, -2.0, 0.1), End(9, -0.5, 0.1)
    yield Candidate("a()\n", ends=(one,))
    yield Candidate("a()\nbb()\n", ends=(one, two))
    yield Candidate("a()\nbb()\nccc()", (0.5,) * 3, (3, 8, 13), (one, End(8, -0.5, 0.1), End(13, -3.0, 0.2)))
    yield Final("limit", timing=TIMING)


def endless(request: InfillRequest) -> Steps:
    yield Candidate("first\nsecond line of it\n", ends=(End(5, -1.0, 0.0), End(23, -2.0, 0.0)))
    while True:
        time.sleep(0.001)
        yield None


def post(service: Service, path: str, body: Any, **headers: str) -> Call:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Call(service.app, "POST", path, data, headers=headers)


async def told(service: Service, path: str, body: Any) -> Any:
    await service.ready()
    call = post(service, path, body)
    status, answer = await call.status(), await call.json()
    assert status == 200, answer
    return answer


async def streamed(service: Service, path: str, body: Any) -> list[Any]:
    """The events of a stream, the closing one as it stands."""
    await service.ready()
    call = post(service, path, body)
    assert await call.status() == 200
    assert call.headers["content-type"].startswith("text/event-stream")
    *blocks, rest = (await call.body()).split(b"\n\n")
    assert rest == b""
    data = [block.removeprefix(b"data: ") for block in blocks]
    return [one.decode() if one == b"[DONE]" else json.loads(one) for one in data]


async def test_llama_vim_finds_what_it_shows() -> None:
    async with serving(circle).running() as service:
        await service.ready()
        call = post(service, "/infill", LLAMA_VIM)
        assert await call.status() == 200
        raw = await call.body()
    # It looks at the text before it parses it: an object on one line, with no blank after the colon.
    assert raw.startswith(b'{"')
    assert b"\n" not in raw
    assert b'"content":"pi * r ** 2"' in raw
    assert json.loads(raw) == {
        "content": "pi * r ** 2",
        "truncated": False,
        "tokens_cached": 30,
        "timings/prompt_n": 10,
        "timings/prompt_ms": 20.0,
        "timings/prompt_per_token_ms": 2.0,
        "timings/prompt_per_second": 500.0,
        "timings/predicted_n": 5,
        "timings/predicted_ms": 40.0,
        "timings/predicted_per_token_ms": 8.0,
        "timings/predicted_per_second": 125.0,
    }


async def test_llama_vims_request_to_warm_the_cache_generates_nothing() -> None:
    async with serving(circle).running() as service:
        assert await told(service, "/infill", LLAMA_VIM_RING) == {}
        assert await told(service, "/infill", {**LLAMA_VIM, "n_predict": 0, "response_fields": ["content"]}) == {
            "content": ""
        }
        assert service.scheduler.requests == 0
        engine = service.scheduler.engine
        assert isinstance(engine, ScriptedEngine)
        await service.until(lambda: ("prime", "0") in engine.turns)


def test_the_last_of_llamas_extras_are_the_snippets() -> None:
    extras = [LlamaExtra(f"x = {number}\r\n", f"{number}.py") for number in range(MAX_SNIPPETS + 2)]
    extras.append(LlamaExtra("y" * (MAX_SNIPPET + 1)))
    request = LlamaBody(input_prefix="", input_suffix="", input_extra=extras).ask().request("d")
    decode_request(encode(request))
    assert request.snippets[:2] == (Snippet("y" * MAX_SNIPPET, ""), Snippet("x = 9\n", "9.py"))
    assert len(request.snippets) == MAX_SNIPPETS
    assert LlamaBody(input_prefix="", input_suffix="").ask().request("d").snippets == ()


async def test_llama_vscode_finds_what_it_shows() -> None:
    async with serving(circle).running() as service:
        answer = await told(service, "/infill", LLAMA_VSCODE)
        health = Call(service.app, "GET", "/health")
        assert await health.status() == 200
        assert await health.json() == {"status": "ok"}
        models = Call(service.app, "GET", "/v1/models")
        assert await models.status() == 200
        (model,) = (await models.json())["data"]
        assert (model["id"], model["name"], model["object"]) == ("scripted", "scripted", "model")
        assert model["context_length"] > 0
        props = Call(service.app, "GET", "/props")
        assert await props.status() == 200
        assert (await props.json())["default_generation_settings"]["n_ctx"] == model["context_length"]
    assert answer["content"] == "pi * r ** 2"
    assert answer["generation_settings"]["n_ctx"] == model["context_length"]
    assert (answer["tokens_cached"], answer["tokens_evaluated"], answer["tokens_predicted"]) == (30, 40, 5)
    assert answer["timings"]["predicted_per_second"] == 125.0
    assert (answer["stop"], answer["stop_type"], answer["stopped_eos"]) == (True, "eos", True)


async def test_minuet_finds_the_text_in_the_stream() -> None:
    async with serving(circle).running() as service:
        *chunks, done = await streamed(service, "/v1/completions", MINUET)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "pi * r ** 2"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "stop"
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_minuet_finds_the_text_in_mistrals_stream_too() -> None:
    async with serving(circle).running() as service:
        *chunks, done = await streamed(service, "/v1/fim/completions", MINUET)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "pi * r ** 2"


async def test_continue_finds_a_delta_in_every_chunk() -> None:
    async with serving(circle).running() as service:
        *chunks, done = await streamed(service, "/v1/fim/completions", CONTINUE)
    assert done == "[DONE]"
    assert all(isinstance(chunk["choices"][0]["delta"]["content"], str) for chunk in chunks)
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "pi * r ** 2"
    assert not any("error" in chunk for chunk in chunks)


async def test_zed_parses_mistrals_answer() -> None:
    async with serving(circle).running() as service:
        answer = await told(service, "/v1/fim/completions", ZED_CODESTRAL)
    assert {type(answer[name]) for name in ("id", "object", "model")} == {str}
    assert type(answer["created"]) is int
    assert answer["choices"] == [
        {"message": {"content": "pi * r ** 2", "role": "assistant"}, "finish_reason": "stop", "index": 0}
    ]
    assert answer["usage"] == {"prompt_tokens": 40, "completion_tokens": 5, "total_tokens": 45}


async def test_zeds_prompt_with_markers_is_taken_apart() -> None:
    async with serving(circle).running() as service:
        answer = await told(service, "/v1/completions", ZED_OPENAI)
    assert answer["choices"] == [{"text": "pi * r ** 2", "finish_reason": "stop", "index": 0, "logprobs": None}]
    assert answer["object"] == "text_completion"
    assert answer["usage"] == {"prompt_tokens": 40, "completion_tokens": 5, "total_tokens": 45}


@pytest.mark.parametrize(
    ("prompt", "suffix", "before", "after"),
    [
        ("<fim_prefix>a\nb<fim_suffix>c\n<fim_middle>", None, "a\nb", "c\n"),
        ("<|fim_prefix|>a<|fim_middle|>", None, "a", ""),
        ("<fim_prefix>a<|fim_suffix|>b<|fim_middle|>", None, "<fim_prefix>a<|fim_suffix|>b<|fim_middle|>", ""),
        ("<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>", "", "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>", ""),
        ("a<|fim_suffix|>b", None, "a<|fim_suffix|>b", ""),
    ],
)
def test_markers_count_only_where_a_whole_prompt_is_made_of_them(
    prompt: str, suffix: str | None, before: str, after: str
) -> None:
    ask = OpenAIBody(prompt=prompt, suffix=suffix).ask()
    assert (ask.before, ask.after) == (before, after)


async def test_openais_usage_comes_as_a_chunk_of_its_own_where_asked_for() -> None:
    async with serving(circle).running() as service:
        *_, usage, done = await streamed(
            service, "/v1/completions", {**MINUET, "stream_options": {"include_usage": True}}
        )
    assert done == "[DONE]"
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 45)


async def test_llamas_stream_ends_with_the_whole_of_figures() -> None:
    async with serving(lines).running() as service:
        *parts, last = await streamed(service, "/infill", {"input_prefix": "", "input_suffix": "\nx", "stream": True})
    assert all(part["stop"] is False for part in parts)
    assert "".join(part["content"] for part in [*parts, last]) == "a()\nbb()"
    assert (last["stop"], last["stop_type"], last["timings"]["prompt_n"]) == (True, "limit", 10)


@pytest.mark.parametrize("path", DIALECTS)
async def test_the_text_ends_where_the_suffix_follows_best(path: str) -> None:
    async with serving(lines).running() as service:
        assert await text_of(service, path, "", "\nx") == "a()\nbb()"


@pytest.mark.parametrize("path", DIALECTS)
async def test_where_code_follows_in_the_line_it_is_one_line(path: str) -> None:
    async with serving(lines).running() as service:
        assert await text_of(service, path, "", ")\nx") == "a()"


@pytest.mark.parametrize("path", DIALECTS)
async def test_line_ends_come_back_as_they_came(path: str) -> None:
    seen: list[InfillRequest] = []

    def script(request: InfillRequest) -> Steps:
        seen.append(request)
        return lines(request)

    async with serving(script).running() as service:
        assert await text_of(service, path, "if x:\r\n    ", "\r\ny\r\n") == "a()\r\nbb()"
    assert (seen[0].prefix, seen[0].head, seen[0].suffix) == ("if x:\n", "    ", "\ny\n")


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (["b"], "a()\n"),
        (["()\nbb"], "a"),
        (["nowhere"], "a()\nbb()"),
        (["\n"], "a()"),
        (["a"], ""),
        ([""], "a()\nbb()"),
    ],
)
async def test_the_text_ends_before_a_stop_string(path: str, stop: list[str], text: str) -> None:
    async with serving(lines).running() as service:
        assert await text_of(service, path, "", "\nx", stop=stop) == text


@pytest.mark.parametrize("path", DIALECTS)
async def test_a_stop_string_that_is_certain_ends_the_job(path: str) -> None:
    async with serving(endless).running() as service:
        assert await text_of(service, path, "", "\nx", stop=["rst"]) == "fi"
        engine = service.scheduler.engine
        assert isinstance(engine, ScriptedEngine)
        assert await asyncio.to_thread(engine.closed.wait, 5)


async def test_what_ends_by_a_stop_string_says_so() -> None:
    async with serving(lines).running() as service:
        llama = await told(service, "/infill", {"input_prefix": "", "input_suffix": "\nx", "stop": ["b"]})
        openai = await told(service, "/v1/completions", {"prompt": "", "suffix": "\nx", "stop": "b"})
        cut = await told(service, "/v1/completions", {"prompt": "", "suffix": "\nx"})
    assert (llama["stop_type"], llama["stopping_word"], llama["stopped_word"]) == ("word", "b", True)
    assert openai["choices"][0]["finish_reason"] == "stop"
    assert cut["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_hanging_up_cancels(path: str, stream: bool) -> None:
    async with serving(endless).running() as service:
        await service.ready()
        call = post(service, path, body_of(path, "", "\nx", stream=stream))
        engine = service.scheduler.engine
        assert isinstance(engine, ScriptedEngine)
        await service.until(lambda: len(engine.turns) > 1)
        call.hang_up()
        await call.done()
        assert await asyncio.to_thread(engine.closed.wait, 5)
        await service.until(lambda: service.scheduler.live == 0)


async def test_hanging_up_in_the_middle_of_a_stream_cancels() -> None:
    async with serving(endless).running() as service:
        await service.ready()
        call = post(service, "/v1/completions", body_of("/v1/completions", "", "\nx", stream=True))
        assert await call.status() == 200
        assert b'"first"' in await call.part()
        call.hang_up()
        await call.done()
        engine = service.scheduler.engine
        assert isinstance(engine, ScriptedEngine)
        assert await asyncio.to_thread(engine.closed.wait, 5)


async def test_requests_at_the_same_time_do_not_end_each_other() -> None:
    def slow(request: InfillRequest) -> Steps:
        for _ in range(20):
            time.sleep(0.001)
            yield None
        yield from lines(request)

    async with serving(slow).running() as service:
        await service.ready()
        calls = [post(service, "/v1/completions", {"prompt": "x\n", "suffix": ""}) for _ in range(DOCUMENTS + 4)]
        assert [await call.status() for call in calls] == [200] * len(calls)
        texts = [(await call.json())["choices"][0]["text"] for call in calls]
    assert texts == ["a()\nbb()"] * len(calls)


async def test_requests_of_one_place_share_a_document_and_others_do_not() -> None:
    seen: list[str] = []

    def script(request: InfillRequest) -> Steps:
        seen.append(request.document)
        return lines(request)

    first, second = "".join(f"a{i}\n" for i in range(9)), "".join(f"b{i}\n" for i in range(9))
    async with serving(script).running() as service:
        for before in (first, second, first + "a", second + "b", first[6:] + "a9\n", "new\n"):
            await told(service, "/v1/completions", {"prompt": before})
    assert seen[0] == seen[2] == seen[4]
    assert seen[1] == seen[3]
    assert len(set(seen)) == 3


REFUSED = [
    b"",
    b"\xff",
    b"[" * 100_000,
    b"[]",
    b'{"prompt": 3}',
    b'{"prompt": ["a", "b"]}',
    b'{"prompt": [1, 2]}',
    b'{"suffix": "x"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "x", "max_tokens": 0}',
    b'{"prompt": "x", "max_tokens": 1e400}',
    b'{"prompt": "x", "stop": 7}',
    b'{"prompt": "x", "stop": [' + b'"a",' * 100_000 + b'"b"]}',
    b'{"prompt": "x", "stream": "yes"}',
]


@pytest.mark.parametrize("body", REFUSED)
@pytest.mark.parametrize("path", DIALECTS)
async def test_what_does_not_fit_is_refused_in_one_line(path: str, body: bytes) -> None:
    call = post(serving(lines), path, body)
    assert await call.status() == 400
    assert_refusal(path, 400, await call.json())


async def test_an_absurd_indentation_is_refused() -> None:
    call = post(serving(lines), "/infill", {"input_prefix": "", "input_suffix": "", "n_indent": 10**15})
    assert await call.status() == 400
    await call.done()


@pytest.mark.parametrize("field", ["n", "best_of", "echo", "logprobs"])
async def test_what_openai_has_and_this_does_not_is_refused_by_name(field: str) -> None:
    call = post(serving(lines), "/v1/completions", {"prompt": "x", field: True if field == "echo" else 2})
    assert await call.status() == 400
    error = (await call.json())["error"]
    assert (error["param"], error["type"]) == (field, "invalid_request_error")


@pytest.mark.parametrize("path", DIALECTS)
async def test_a_body_over_the_cap_is_not_read_to_its_end(path: str) -> None:
    chunk = b"x" * (MAX_BODY // 4)
    call = Call(serving(lines).app, "POST", path, *[chunk] * 100)
    assert await call.status() == 413
    assert_refusal(path, 413, await call.json())
    assert call.read <= MAX_BODY + len(chunk)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", DIALECTS)
async def test_before_the_model_is_ready_the_status_says_so(path: str, stream: bool) -> None:
    service = serving(lines)
    call = post(service, path, body_of(path, "x", "", stream=stream))
    assert await call.status() == 503
    assert "starting" in assert_refusal(path, 503, await call.json())
    health = Call(service.app, "GET", "/health")
    assert await health.status() == 503
    assert (await health.json())["error"]["type"] == "unavailable_error"


@pytest.mark.parametrize("path", DIALECTS)
async def test_an_engine_with_all_it_can_do_says_so(path: str) -> None:
    async with serving(lines, max_live=0).running() as service:
        await service.ready()
        call = post(service, path, body_of(path, "x", ""))
        assert await call.status() == 503
        assert "0 requests already" in assert_refusal(path, 503, await call.json())


@pytest.mark.parametrize("path", DIALECTS)
async def test_a_request_that_fails_ends_alone(path: str) -> None:
    def broken(request: InfillRequest) -> Steps:
        yield Candidate("first\nsecond line of it\n", ends=(End(5, -1.0, 0.0), End(23, -2.0, 0.0)))
        raise KeyError("secret")

    async with serving(broken).running() as service:
        await service.ready()
        call = post(service, path, body_of(path, "x", ""))
        assert await call.status() == 500
        assert "secret" not in assert_refusal(path, 500, await call.json())
        first, *_, last = await streamed(service, path, body_of(path, "x", "", stream=True))
        assert "first" in json.dumps(first)
        assert "KeyError" in assert_refusal(path, 500, last)


@pytest.mark.parametrize(
    ("body", "deadline_ms"),
    [
        ({}, 3000),
        ({"t_max_predict_ms": 250}, 250),
        ({"t_max_prompt_ms": 500, "t_max_predict_ms": 250}, 750),
        ({"t_max_prompt_ms": 500, "t_max_predict_ms": 0}, 3000),
        ({"t_max_predict_ms": -5}, 3000),
        ({"t_max_predict_ms": 10**12}, 60_000),
    ],
)
async def test_the_deadline_is_what_llamas_clients_grant(body: dict[str, int], deadline_ms: int) -> None:
    seen: list[InfillRequest] = []

    def script(request: InfillRequest) -> Steps:
        seen.append(request)
        return lines(request)

    async with serving(script).running() as service:
        await told(service, "/infill", {"input_prefix": "", "input_suffix": "", **body})
        await told(service, "/infill", {"input_prefix": "", "input_suffix": "", "n_predict": -1})
        await told(service, "/v1/completions", {"prompt": "", "max_tokens": 4096})
        await told(service, "/v1/completions", {"prompt": "", "max_tokens": None})
    assert [request.deadline_ms for request in seen] == [deadline_ms, 3000, 3000, 3000]
    # None is refused because the next key would overtake it: none can.
    assert {request.priority for request in seen} == {"explicit"}
    assert [request.max_tokens for request in seen] == [128, MOST_TOKENS, MOST_TOKENS, 128]


def ask_for(before: str, after: str = "", n_indent: int | None = None) -> InfillRequest:
    return Ask(before=before, after=after, max_tokens=8, stops=(), n_indent=n_indent).request("d")


@pytest.mark.parametrize(
    ("before", "n_indent", "columns"),
    [
        ("if x:\n    y = ", None, 4),
        ("x = ", None, None),
        ("if x:\n\t\ty = ", None, 16),
        ("if x:\n\t\ty = ", 2, 16),
        ("if x:\n\t\ty = 1\n", 2, 16),  # A client that sends no blank head says how deep it was.
        ("if x:\n        y = 1\n    ", 6, 6),
        ("if x:\n", 4, 4),
        ("if x:\n    y = ", 0, None),
    ],
)
def test_a_later_line_is_indented_as_the_cursors(before: str, n_indent: int | None, columns: int | None) -> None:
    assert ask_for(before, n_indent=n_indent).min_indent == columns


@given(st.text("ab \t\r\n", max_size=12), st.text("ab \r\n", max_size=12))
def test_a_gap_lies_between_the_newlines_around_the_cursor(before: str, after: str) -> None:
    request = ask_for(before, after)
    assert request.prefix + request.head == before.replace("\r\n", "\n")
    assert request.tail + request.suffix == after.replace("\r\n", "\n")
    assert "\n" not in request.head + request.tail
    assert request.prefix == "" or request.prefix.endswith("\n")
    assert request.suffix == "" or request.suffix.startswith("\n")
    assert request.max_lines == (1 if request.tail.strip() else MOST_LINES)


PIECES = [b"a", b"ab", b"x = 1", b" ", b"()", b"\n", b"\n\n", b"\n    ", b"\n    x", b"x = 1\n", "\u00e9".encode()]


@st.composite
def runs(draw: st.DrawFn) -> list[Candidate]:
    """The candidates of a gap as the engine tells them: after finished lines, which are scored a pass later, and in
    the end."""
    scored, text = draw(st.booleans()), GapText(a_request(draw(st.sampled_from([1, 2, 32]))), b"")
    told: list[Candidate] = []
    open_end: tuple[int, float] | None = None
    reason = None
    for piece in draw(st.lists(st.sampled_from(PIECES), max_size=40)):
        if open_end:
            reason = text.score(open_end[0], draw(st.sampled_from([-3.0, -2.0, -1.9, -1.0])), open_end[1])
            open_end = None
            if reason:
                break
        at = text.length
        reason = text.append(piece, 0.5)
        if piece.startswith(b"\n"):
            if scored:
                open_end = (at, 0.1)
            else:
                text.score(at, None, 0.1)
            if not reason:
                told.append(text.candidate())
        if reason:
            break
    else:
        if draw(st.booleans()):
            reason = "end"
            text.score(text.length, None, draw(st.sampled_from([0.2, 0.8])))
    if reason != "end":
        text.close()
    return [*told, text.candidate()]


def a_request(max_lines: int) -> InfillRequest:
    return InfillRequest(
        client="c", document="d", suffix="\nx = 1\n", max_lines=max_lines, min_indent=None, max_tokens=64
    )


def parts(reply: Reply, candidates: list[Candidate]) -> Iterator[str]:
    for candidate in candidates:
        yield reply.grow(candidate)
        if reply.stop:
            return
    yield reply.close()


@settings(max_examples=400, deadline=None)
@given(runs(), st.lists(st.text("ax1\n", min_size=1, max_size=4), max_size=2), st.sampled_from([1, 32]))
def test_what_is_streamed_is_what_is_told_at_once(run: list[Candidate], stops: list[str], max_lines: int) -> None:
    at_once = Reply(stops, max_lines)
    at_once._candidate = run[-1]
    whole = at_once.close()
    assert "".join(parts(Reply(stops, max_lines), run)) == whole
    assert not any(stop in whole for stop in stops)


def test_finished_lines_are_streamed_before_the_end() -> None:
    reply = Reply((), 32)
    assert reply.grow(Candidate("a()\n", ends=(End(3, -1.0, 0.0),))) == "a()"
    assert reply.grow(Candidate("a()\nwhile b:\n", ends=(End(3, -1.0, 0.0), End(12, -2.0, 0.0)))) == ""
    ends = (End(3, -1.0, 0.0), End(12, -2.0, 0.0), End(20, -0.5, 0.0))
    assert reply.grow(Candidate("a()\nwhile b:\n    c()\nd", ends=ends)) == "\nwhile b:\n    c()"
    assert reply.close() == ""


def test_a_line_that_may_turn_out_to_be_a_repetition_waits() -> None:
    reply = Reply((), 32)
    assert reply.grow(Candidate("\n    x = 1\n", ends=(End(10, None, 0.0),))) == ""
    assert reply.grow(Candidate("\n    x = 1\n    x = 1\n", ends=(End(10, None, 0.0), End(20, None, 0.0)))) == ""


HOST = {"host": "127.0.0.1:8012"}


def call_tcp(service: Service, path: str, body: Any = None, **headers: str) -> Call:
    data = b"" if body is None else json.dumps(body).encode()
    return Call(service.tcp, "GET" if body is None else "POST", path, data, headers={**HOST, **headers})


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:8012", "[::1]:8012", "127.0.0.2:1"])
async def test_this_machine_may_be_called_by_any_of_its_names(host: str) -> None:
    async with serving(lines).running() as service:
        await service.ready()
        call = call_tcp(service, "/v1/completions", {"prompt": "x"}, host=host)
        assert await call.status() == 200
        await call.done()


@pytest.mark.parametrize("host", ["example.com", "localhost.example.com", "10.0.0.1", "", "[::1", "127.0.0.1.nip.io"])
@pytest.mark.parametrize("path", [*DIALECTS, "/health", "/metrics", "/openapi.json"])
async def test_a_name_that_somebody_else_gave_us_is_refused(path: str, host: str) -> None:
    service = serving(lines)
    call = call_tcp(service, path, {"prompt": "x"} if path in DIALECTS else None, host=host)
    assert await call.status() == 403
    assert_refusal(path, 403, await call.json())


async def test_web_pages_are_refused_and_get_no_cors_headers() -> None:
    service = serving(lines)
    call = call_tcp(service, "/v1/completions", {"prompt": "x"}, origin="http://localhost:3000")
    assert await call.status() == 403
    assert not any(name.startswith("access-control") for name in call.headers)
    preflight = Call(service.tcp, "OPTIONS", "/v1/completions", headers={**HOST, "origin": "https://example.com"})
    assert await preflight.status() == 405
    assert not any(name.startswith("access-control") for name in preflight.headers)


@pytest.mark.parametrize(
    "given_key", ["", "Bearer ", "Bearer wrong", "Basic s3cret", "s3cret", "Bearer s3cretx", "Bearer \u00e9"]
)
@pytest.mark.parametrize("path", [*DIALECTS, "/props", "/v1/models", "/metrics"])
async def test_without_the_key_nothing_is_told(path: str, given_key: str) -> None:
    async with serving(lines, api_key="s3cret").running() as service:
        await service.ready()
        headers = {"authorization": given_key} if given_key else {}
        call = call_tcp(service, path, {"prompt": "x"} if path in DIALECTS else None, **headers)
        assert await call.status() == 401
        assert call.headers["www-authenticate"] == "Bearer"
        assert "Bearer KEY" in assert_refusal(path, 401, await call.json())
        assert service.scheduler.requests == 0


async def test_with_the_key_everything_is_served_and_health_needs_none() -> None:
    async with serving(lines, api_key="s3cret").running() as service:
        await service.ready()
        for path in (*DIALECTS, "/props", "/v1/models", "/metrics"):
            body = body_of(path, "x", "") if path in DIALECTS else None
            call = call_tcp(service, path, body, authorization="Bearer s3cret")
            assert await call.status() == 200
            await call.done()
        health = call_tcp(service, "/health")
        assert await health.status() == 200
        await health.done()


@pytest.mark.parametrize("path", ["/v1/stop", "/v1/infill", "/v1/prime", "/v1/status"])
async def test_our_own_protocol_is_not_there_over_tcp(path: str) -> None:
    service = serving(lines)
    call = call_tcp(service, path, {} if path != "/v1/status" else None)
    assert await call.status() == 404
    assert not service.stopped.is_set()
    assert path not in (await document_of(service.tcp))["paths"]
    assert path in (await document_of(service.app))["paths"]


async def document_of(app: Any) -> Any:
    call = Call(app, "GET", "/openapi.json", headers=HOST)
    assert await call.status() == 200
    return await call.json()


def body_of(path: str, before: str, after: str, **fields: Any) -> dict[str, Any]:
    if path == "/infill":
        return {"input_prefix": before, "input_suffix": after, **fields}
    return {"prompt": before, "suffix": after, **fields}


async def text_of(service: Service, path: str, before: str, after: str, **fields: Any) -> str:
    """The text of an answer, which a stream tells as well."""
    read = {
        "/infill": lambda one: one["content"],
        "/v1/completions": lambda one: one["choices"][0]["text"],
        "/v1/fim/completions": lambda one: one["choices"][0].get("message", one["choices"][0].get("delta"))["content"],
    }[path]
    text = read(await told(service, path, body_of(path, before, after, **fields)))
    parts = await streamed(service, path, body_of(path, before, after, stream=True, **fields))
    assert "".join(read(part) for part in parts if part != "[DONE]") == text
    return str(text)


def assert_refusal(path: str, status: int, answer: Any) -> str:
    """The message of a refusal in the shape that the path's clients know."""
    if path in ("/infill", "/health", "/props"):
        error = answer["error"]
        assert error["code"] == status
        assert error["type"]
        message = error["message"]
    elif path in ("/v1/completions", "/v1/models"):
        error = answer["error"]
        assert set(error) == {"message", "type", "param", "code"}
        message = error["message"]
    elif path == "/v1/fim/completions":
        assert answer["object"] == "error"
        message = answer["message"]
    else:
        message = answer["error"]
    assert message
    assert "\n" not in message
    return str(message)
