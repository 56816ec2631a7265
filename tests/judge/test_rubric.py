"""A rubric that exists is valid, and its identity covers what is sent and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from freewheel.errors import ConfigError
from freewheel.judge.rubric import BUILTIN, load_rubric

CRITERIA: dict[str, Any] = {"parser": "criteria"}
OWN: dict[str, Any] = {"parser": "package.module:function"}


@pytest.mark.parametrize(
    ("key", "fields"),
    [
        ("name", {"name": " "}),
        ("system", {"system": ""}),
        ("system", {"system": "a\ud800"}),
        ("closing", {"closing": "a\ud800"}),
        ("parser", {"parser": "module:"}),
        ("parser", {"parser": "module.function"}),
        ("place", {"place": "middle"}),
        ("low", {"low": float("nan")}),
        ("high", {"high": float("inf")}),
        ("high", {"high": "ten"}),
        ("low", {"low": 10.0}),
        ("low", {"low": 1.2, "high": 1.8}),
        ("low", {"low": True}),
        ("criteria", {"criteria": {"clarity": 1.0}}),
        ("criteria", {**CRITERIA, "criteria": {}}),
        ("criteria", {**CRITERIA, "criteria": {"a": 0.0, "b": 0.0}}),
        ("criteria", {**CRITERIA, "criteria": {"a": -1.0, "b": 2.0}}),
        ("criteria", {**CRITERIA, "criteria": {"a": float("nan")}}),
        ("criteria", {**CRITERIA, "criteria": {" ": 1.0}}),
        ("criteria", {**CRITERIA, "criteria": {"a": 1e308, "b": 1e308}}),
        ("json_schema", {"json_schema": {}}),
        ("json_schema", {"parser": "json", "json_schema": {"a": object()}}),
        ("json_field", {"parser": "json", "json_field": ""}),
        ("use_response_format", {"use_response_format": True}),
        ("use_response_format", {**OWN, "use_response_format": True}),
        *(
            ("template", {"template": template})
            for template in (
                *("no placeholder", "{prompt} only", "{response}{answer}", "{response}{response}"),
                *("{response.__class__}", "{response!r}", "{response:>10}", "{response} {", "{response} {}"),
            )
        ),
    ],
)
def test_a_field_that_cannot_work_is_refused_by_its_name(key: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^rubric.{key} = ") as error:
        load_rubric({"name": "r", "system": "s", **fields})
    assert error.value.key == f"rubric.{key}"


def test_a_built_in_rubric_loads_by_its_name_and_the_default_asks_for_one_integer_from_1_to_10() -> None:
    for name, rubric in BUILTIN.items():
        assert load_rubric(name) is load_rubric(rubric) is rubric
    rubric = BUILTIN["integer"]
    assert (rubric.parser, rubric.low, rubric.high, rubric.place) == ("integer", 1.0, 10.0, "only")
    assert "one integer from 1 to 10 and nothing else" in rubric.system
    assert rubric.closing_text().endswith("one integer from 1 to 10 and nothing else.")


def test_the_identity_changes_with_what_is_sent() -> None:
    schema = {"use_response_format": True, "json_schema": {"type": "object", "title": "t"}}
    changes: list[dict[str, Any]] = [
        {},
        {"system": "Judge!"},
        {"template": "Look:\n{response}"},
        {"closing": "Go."},
        {"high": 20.0},
        {"json_field": "quality"},
        {"use_response_format": True},
        {"use_response_format": True, "json_schema": {"type": "object"}},
        schema,
    ]
    identities = [msgspec.structs.replace(BUILTIN["json"], **change).identity() for change in changes]
    assert len(set(identities)) == len(changes)
    assert {len(identity) for identity in identities} == {32}
    other_order = dict(reversed(schema["json_schema"].items()))
    same = msgspec.structs.replace(BUILTIN["json"], use_response_format=True, json_schema=other_order)
    assert same.identity() == identities[-1]


@pytest.mark.parametrize(
    ("base", "change"),
    [
        ("integer", {"place": "last"}),
        ("integer", {"reminder": "Again, please."}),
        ("integer", OWN),
        ("integer", {"name": "other"}),
        ("integer", {"high": 20.0}),
        ("criteria", {"criteria": {"correctness": 1.0, "completeness": 1.0, "clarity": 1.0}}),
    ],
)
def test_the_identity_does_not_change_with_how_the_reply_is_read(base: str, change: dict[str, Any]) -> None:
    rubric = msgspec.structs.replace(BUILTIN[base], closing="Judge, please.")
    assert msgspec.structs.replace(rubric, **change).identity() == rubric.identity()


def test_the_response_format_is_the_users_schema_or_names_every_criterion() -> None:
    assert BUILTIN["criteria"].response_format() is None
    rubric = msgspec.structs.replace(BUILTIN["criteria"], name="my rubric", use_response_format=True)
    score = {"type": "number", "minimum": 1.0, "maximum": 10.0}
    names = ["correctness", "completeness", "clarity"]
    made = {
        "type": "object",
        "properties": dict.fromkeys(names, score),
        "required": names,
        "additionalProperties": False,
    }
    found = {"name": "my_rubric", "strict": True, "schema": made}
    assert rubric.response_format() == {"type": "json_schema", "json_schema": found}
    schema = {"type": "object", "properties": {"score": {"type": "integer"}}}
    rubric = msgspec.structs.replace(BUILTIN["json"], json_schema=schema, use_response_format=True)
    assert rubric.response_format() == {"type": "json_schema", "json_schema": {"name": "json", "schema": schema}}


def test_a_rubric_loads_from_a_json_and_from_a_toml_file_and_from_a_base(tmp_path: Path) -> None:
    as_json, as_toml = tmp_path / "strict.json", tmp_path / "strict.toml"
    as_json.write_text(json.dumps({"system": "Judge.", "parser": "number", "low": 0, "high": 5}))
    as_toml.write_text('system = "Judge."\nparser = "number"\nlow = 0\nhigh = 5\n')
    assert load_rubric(str(as_json)) == load_rubric(as_toml)
    assert (load_rubric(as_json).name, load_rubric(as_json).high) == ("strict", 5.0)
    based = load_rubric({"base": "criteria", "name": "mine", "criteria": {"truth": 1.0}})
    assert (based.system, based.criteria) == (BUILTIN["criteria"].system, {"truth": 1.0})


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("intger", "integer, number, yes_no, json, criteria"),
        ("missing.json", "cannot be read"),
        ({"name": "x", "system": "y", "hihg": 5}, "rubric.hihg = 5: unknown key; known are name, system, parser"),
        ({"name": "x"}, "rubric.system = None: it is missing"),
        ({"base": "intger"}, "integer, number, yes_no, json, criteria"),
        (7, "built-in name"),
    ],
)
def test_an_error_lists_the_choices(spec: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_rubric(spec)


def test_a_broken_file_is_a_config_error_with_its_name(tmp_path: Path) -> None:
    for name, content in (("a.json", b"{"), ("a.json", b"[]"), ("a.toml", b"a ="), ("a.toml", b"\xff")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=name):
            load_rubric(tmp_path / name)
