"""Settings: every value that does not fit is named in one line, and it alone falls back to its default."""

from __future__ import annotations

import sys

import pytest

from infill_lsp.settings import Deadline, Settings, parse


@pytest.mark.parametrize("options", [None, {}])
def test_nothing_set_means_defaults(options: object) -> None:
    settings, problems = parse(options)
    assert settings == Settings()
    assert problems == []
    assert settings.engine.interpreter == sys.executable


def test_values_arrive_under_their_wire_names() -> None:
    settings, problems = parse({"enabled": False, "maxLines": 3, "deadline": {"automatic": 250}, "logLevel": "debug"})
    assert problems == []
    assert settings == Settings(enabled=False, max_lines=3, deadline=Deadline(automatic=250), log_level="debug")


@pytest.mark.parametrize(
    ("options", "key", "got", "takes"),
    [
        ({"enabled": "yes"}, "infill.enabled", '"yes"', "true or false"),
        ({"model": ""}, "infill.model", '""', "not empty"),
        ({"model": None}, "infill.model", "null", "not empty"),
        ({"maxLines": 0}, "infill.maxLines", "0", "1 to 256"),
        ({"maxLines": True}, "infill.maxLines", "true", "1 to 256"),
        ({"logLevel": "loud"}, "infill.logLevel", '"loud"', '"debug"'),
        ({"deadline": {"automatic": 1.5}}, "infill.deadline.automatic", "1.5", "10 to 60000"),
        ({"priming": {"exclude": "*.md"}}, "infill.priming.exclude", '"*.md"', "a list of up to 1000 texts"),
        ({"priming": {"enabled": 1}}, "infill.priming.enabled", "1", "true or false"),
        ({"deadline": 400}, "infill.deadline", "400", "an object"),
        (["enabled"], "infill", '["enabled"]', "an object"),
    ],
)
def test_a_bad_value_is_named_with_what_it_got_and_takes(options: object, key: str, got: str, takes: str) -> None:
    settings, problems = parse(options)
    assert settings == Settings()
    (problem,) = problems
    assert problem.startswith(f"{key}: got {got}, takes ")
    assert takes in problem
    assert "\n" not in problem


def test_a_bad_value_leaves_the_others_alone() -> None:
    settings, problems = parse({"model": 3, "maxLines": 5, "deadline": {"automatic": -1, "invoked": 900}})
    assert settings == Settings(max_lines=5, deadline=Deadline(invoked=900))
    assert [problem.split(":")[0] for problem in problems] == ["infill.model", "infill.deadline.automatic"]


def test_an_unknown_key_gets_the_nearest_one() -> None:
    settings, problems = parse({"maxLine": 5, "engine": {"pyton": "/usr/bin/python3"}, "zzz": 1})
    assert settings == Settings()
    assert problems[0] == "infill.maxLine: no such setting; did you mean maxLines?"
    assert problems[1] == "infill.engine.pyton: no such setting; did you mean python?"
    assert problems[2].startswith("infill.zzz: no such setting; it takes enabled, languages,")


def test_a_long_value_stays_on_one_short_line() -> None:
    _, problems = parse({"enabled": ["line\n"] * 1000})
    assert len(problems[0]) < 160
    assert "\n" not in problems[0]
