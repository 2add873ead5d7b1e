"""Settings: every value that does not fit is named in one line, and it alone falls back to its default."""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from infill_lsp.core import Trigger
from infill_lsp.reference import MANIFEST, ROOT, manifest, schema, written
from infill_lsp.settings import Deadline, Field, Priming, Settings, fields, read, settle


def parse(options: object) -> tuple[Settings, list[str]]:
    """The settings that the editor alone gives in `options`, and a line for each value not used."""
    effective = settle([read(options)])
    return effective.settings, list(effective.problems)


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


# Layers.


def test_later_layers_hold_over_earlier_ones_value_by_value() -> None:
    file = read({"max_lines": 8, "deadline": {"automatic": 100, "invoked": 200}}, "infill.toml")
    effective = settle([file, read({"maxLines": 9}), read({"deadline": {"invoked": 300}})])
    assert effective.settings == Settings(max_lines=9, deadline=Deadline(automatic=100, invoked=300))
    assert effective.sources["max_lines",] == "editor"
    assert effective.sources["deadline", "automatic"] == "infill.toml"
    assert effective.sources["enabled",] == "default"


def test_a_file_has_names_in_snake_case_and_is_named_in_what_is_wrong() -> None:
    layer = read({"maxLines": 8, "log_level": "loud"}, "infill.toml")
    assert layer.values == {}
    assert layer.problems == (
        "infill.toml: maxLines: no such setting; did you mean max_lines?",
        'infill.toml: log_level: got "loud", takes "error", "warning", "info", "debug" or null; it is not used',
    )


def test_an_empty_table_of_lua_is_an_empty_object() -> None:
    assert parse({"languages": [], "deadline": []}) == (Settings(), [])


WORKSPACE = ".infill.toml of shop"


@pytest.mark.parametrize(
    ("person", "workspace", "holds"),
    [
        ({}, {"enabled": False}, Settings(enabled=False)),
        ({}, {"trigger": "manual"}, Settings(trigger="manual")),
        ({}, {"aggressiveness": "quiet"}, Settings(aggressiveness="quiet")),
        ({}, {"max_lines": 3, "debounce": 50}, Settings(max_lines=3, debounce=50)),
        ({"parseCheck": False}, {"parse_check": True}, Settings(parse_check=True)),
        ({}, {"priming": {"enabled": False}}, Settings(priming=Priming(enabled=False))),
        ({"exclude": ["a"]}, {"exclude": ["b", "!a"]}, Settings(exclude=("b", "!a", "a"))),
        (
            {"languages": {"*": False, "c": True, "go": True}},
            {"languages": {"c": False}},
            Settings(languages={"*": False, "c": False, "go": True}),
        ),
    ],
)
def test_a_workspace_may_restrict(person: object, workspace: object, holds: Settings) -> None:
    effective = settle([read(person)], [read(workspace, WORKSPACE)])
    assert effective.settings == holds
    assert effective.problems == ()
    assert any(WORKSPACE in source for source in effective.sources.values())


@pytest.mark.parametrize(
    ("person", "workspace", "says"),
    [
        ({"enabled": False}, {"enabled": True}, "enabled: a workspace can only switch it off; false stays"),
        ({}, {"engine": {"python": "/tmp/evil"}}, 'engine.python: a workspace cannot set this; "" stays'),
        ({}, {"engine": {"address": "http://h:1"}}, 'engine.address: a workspace cannot set this; "" stays'),
        ({}, {"model": "/tmp/evil"}, 'model: a workspace cannot set this; "auto" stays'),
        ({}, {"max_lines": 33}, "max_lines: a workspace can only lower it; 32 stays"),
        ({"parseCheck": True}, {"parse_check": False}, "parse_check: a workspace can only switch it on; true stays"),
        ({}, {"aggressiveness": "eager"}, 'aggressiveness: a workspace can only lower it; "balanced" stays'),
        (
            {"languages": {"c": False}},
            {"languages": {"c": True}},
            'languages: a workspace can only switch languages off; {"c": false} stays',
        ),
        ({}, {"log_level": "debug"}, "log_level: a workspace cannot set this; null stays"),
    ],
)
def test_a_workspace_cannot_widen(person: object, workspace: object, says: str) -> None:
    effective = settle([read(person)], [read(workspace, WORKSPACE)])
    assert effective.settings == parse(person)[0]
    assert effective.problems == (f"{WORKSPACE}: {says}",)
    assert WORKSPACE not in effective.sources.values()


def values_of(field: Field) -> st.SearchStrategy[Any]:
    """Values that a setting takes."""
    if field.options:
        return st.sampled_from(field.options)
    match field.kind:
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType(ge=int(least), le=int(most)):
            return st.integers(least, most)
        case inspect.VarTupleType():
            return st.lists(st.sampled_from(["a", "b/", "!a"]), max_size=3)
        case inspect.DictType():
            return LANGUAGES
    return st.just(field.default)


@given(st.data())
def test_whatever_a_workspace_says_it_never_widens(data: st.DataObject) -> None:
    field = data.draw(st.sampled_from(list(fields().values())))
    ours, theirs = data.draw(values_of(field)), data.draw(values_of(field))
    holds = field.restricted(ours, theirs)
    rank = field.options.index if field.options else lambda value: value
    match field.restriction:
        case "never":
            assert holds == ours
        case "add":
            assert set(holds) == {*ours, *theirs}
            assert holds[len(holds) - len(ours) :] == tuple(ours)  # Of patterns the last that matches holds.
        case "lower" if not isinstance(ours, dict):
            assert rank(holds) == min(rank(ours), rank(theirs))
        case "raise":
            assert rank(holds) == max(rank(ours), rank(theirs))


LANGUAGES = st.dictionaries(st.sampled_from(["*", "c", "go", "python"]), st.booleans())


@given(LANGUAGES, LANGUAGES)
def test_no_language_is_offered_that_the_person_or_the_workspace_switched_off(
    ours: dict[str, bool], theirs: dict[str, bool]
) -> None:
    settings = settle([read({"languages": ours})], [read({"languages": theirs}, WORKSPACE)]).settings
    for language in ("c", "go", "python", "rust"):
        wanted = Settings(languages=ours).offers(language) and Settings(languages=theirs).offers(language)
        assert settings.offers(language) == wanted


# What they mean.


def test_silence_says_which_setting_makes_it() -> None:
    def reason(settings: Settings, language: str = "python", trigger: Trigger = "automatic") -> str:
        silence = settings.silence(language, trigger)
        return "" if silence is None else silence.reason

    assert reason(Settings()) == ""
    assert "infill.enabled" in reason(Settings(enabled=False))
    assert "markdown (infill.languages)" in reason(Settings(languages={"markdown": False}), "markdown")
    assert "infill.languages" in reason(Settings(languages={"*": False, "c": True}))
    assert reason(Settings(languages={"*": False, "c": True}), "c") == ""
    assert "infill.trigger" in reason(Settings(trigger="manual"))
    assert reason(Settings(trigger="manual"), trigger="invoked") == ""


@pytest.mark.parametrize(
    ("languages", "off"),
    [
        ({}, ""),
        ({"vue": False}, "vue"),
        ({"vue": False, "typescript": True}, "vue"),
        ({"typescript": False}, "typescript"),
        ({"*": False, "go": True}, "typescript"),
        ({"*": False, "vue": True}, ""),
        ({"*": False, "typescript": True}, ""),
        ({"*": False, "vue": True, "typescript": False}, "typescript"),
    ],
)
def test_a_document_that_is_switched_off_is_so_with_what_is_embedded_in_it(
    languages: dict[str, bool], off: str
) -> None:
    silence = Settings(languages=languages).silence("typescript", "automatic", "vue")
    assert (silence.reason if silence else "") == (off and f"completions are switched off for {off} (infill.languages)")


def test_comments_and_strings_are_switched_off_apart() -> None:
    assert all(Settings().silence_inside(kind) is None for kind in ("comment", "docstring", "string", "line"))
    quiet = Settings(comments=False)
    assert [kind for kind in ("comment", "docstring", "string", "line") if quiet.silence_inside(kind)] == [
        "comment",
        "docstring",
    ]
    assert Settings(strings=False).silence_inside("string") is not None
    assert Settings(strings=False).silence_inside("comment") is None


# What is written of them.


def test_what_is_written_of_the_settings_is_up_to_date() -> None:
    stale = [path for path, text in written().items() if not path.exists() or path.read_text() != text]
    assert stale == [], "run `make settings`"


def test_each_setting_has_one_line_of_help() -> None:
    for field in fields().values():
        assert field.help.endswith(".")
        assert "\n" not in field.help
        assert "|" not in field.help + field.takes  # It would end a cell of the tables.


@pytest.mark.parametrize("wire", [True, False])
def test_the_schemas_say_what_is_taken(wire: bool) -> None:
    rules = pytest.importorskip("jsonschema_rs").validator_for(schema(lambda f: f.wire.split(".") if wire else f.key))
    good = json.loads(msgspec.json.encode(Settings())) if wire else {"max_lines": 8, "engine": {"token_file": "t"}}
    assert rules.is_valid(good)
    for bad in (
        {"zzz": 1},
        {"enabled": "yes"},
        {"deadline": {"automatic": 1}},
        {"languages": {"c": 1}},
        {"trigger": "x"},
    ):
        assert not rules.is_valid(bad)
        assert parse(bad)[1]


def test_editors_offer_nothing_that_the_server_does_not_take() -> None:
    shown = manifest(json.loads((ROOT / MANIFEST).read_text()))["contributes"]["configuration"][0]["properties"]
    assert len(shown) == len(fields())
    for name, known in shown.items():
        bounds = [known[bound] for bound in ("minimum", "maximum") if bound in known]
        for value in (known["default"], *known.get("enum", ()), *bounds):
            options: object = value
            for part in reversed(name.split(".")[1:]):
                options = {part: options}
            assert parse(options)[1] == [], name


def test_a_workspace_of_vscode_cannot_set_what_a_workspaces_files_cannot() -> None:
    current = json.loads((ROOT / MANIFEST).read_text())
    shown = current["contributes"]["configuration"][0]["properties"]
    machine = {name for name, known in shown.items() if known["scope"] == "machine"}
    assert machine >= {"infill.engine.python", "infill.engine.address", "infill.engine.tokenFile", "infill.model"}
    restricted = current["capabilities"]["untrustedWorkspaces"]["restrictedConfigurations"]
    assert {*shown, *machine, "infill.server.path"} <= set(restricted), "nor anything, where it is not trusted"
