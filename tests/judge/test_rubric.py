"""A rubric that exists is valid, and its identity covers what is sent and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from freewheel.errors import ConfigError
from freewheel.judge.rubric import BUILTIN, Rubric, load_rubric

CRITERIA: dict[str, Any] = {"name": "r", "system": "s", "parser": "criteria"}


@pytest.mark.parametrize(
    ("key", "fields"),
    [
        ("rubric.name", {"name": " "}),
        ("rubric.system", {"system": ""}),
        ("rubric.system", {"system": "a\ud800"}),
        ("rubric.parser", {"parser": "integr"}),
        ("rubric.parser", {"parser": "module:"}),
        ("rubric.parser", {"parser": "module.function"}),
        ("rubric.place", {"place": "middle"}),
        ("rubric.low", {"low": float("nan")}),
        ("rubric.high", {"high": float("inf")}),
        ("rubric.low", {"low": 10.0}),
        ("rubric.low", {"low": 11.0}),
        ("rubric.low", {"low": 1.2, "high": 1.8}),
        ("rubric.low", {"low": True}),
        ("rubric.criteria", {"criteria": {"clarity": 1.0}}),
        ("rubric.criteria", {**CRITERIA, "criteria": {}}),
        ("rubric.criteria", {**CRITERIA, "criteria": {"a": 0.0, "b": 0.0}}),
        ("rubric.criteria.a", {**CRITERIA, "criteria": {"a": -1.0, "b": 2.0}}),
        ("rubric.criteria.a", {**CRITERIA, "criteria": {"a": float("nan")}}),
        ("rubric.criteria", {**CRITERIA, "criteria": {" ": 1.0}}),
        ("rubric.criteria", {**CRITERIA, "criteria": {"a": 1e308, "b": 1e308}}),
        ("rubric.json_schema", {"json_schema": {}}),
        ("rubric.json_schema", {"parser": "json", "json_schema": {"a": object()}}),
        ("rubric.json_field", {"parser": "json", "json_field": ""}),
        ("rubric.use_response_format", {"use_response_format": True}),
        ("rubric.use_response_format", {"parser": "package.module:function", "use_response_format": True}),
        ("rubric.template", {"template": "no placeholder"}),
        ("rubric.template", {"template": "{prompt} only"}),
        ("rubric.template", {"template": "{response}{answer}"}),
        ("rubric.template", {"template": "{response}{response}"}),
        ("rubric.template", {"template": "{response.__class__}"}),
        ("rubric.template", {"template": "{response!r}"}),
        ("rubric.template", {"template": "{response:>10}"}),
        ("rubric.template", {"template": "{response} {"}),
        ("rubric.template", {"template": "{response} {}"}),
    ],
)
def test_a_field_that_cannot_work_is_refused_by_its_name(key: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        Rubric(**{"name": "r", "system": "s", **fields})
    assert error.value.key == key
    assert str(error.value).startswith(key)


def test_the_default_rubric_asks_for_one_integer_from_1_to_10() -> None:
    rubric = BUILTIN["integer"]
    assert (rubric.parser, rubric.low, rubric.high, rubric.place) == ("integer", 1.0, 10.0, "only")
    assert "one integer from 1 to 10 and nothing else" in rubric.system
    assert rubric.closing_text().endswith("one integer from 1 to 10 and nothing else.")


@pytest.mark.parametrize("name", BUILTIN)
def test_a_built_in_rubric_loads_by_its_name_and_survives_json(name: str) -> None:
    rubric = load_rubric(name)
    assert rubric is BUILTIN[name]
    assert load_rubric(rubric) is rubric
    assert msgspec.json.decode(msgspec.json.encode(rubric), type=Rubric) == rubric


def test_the_identity_changes_with_what_is_sent() -> None:
    base = BUILTIN["json"]
    variants = [
        base,
        *(
            msgspec.structs.replace(base, **change)
            for change in (
                {"system": base.system + "!"},
                {"template": "Look:\n{response}"},
                {"closing": "Go."},
                {"high": 20.0},
                {"json_field": "quality"},
                {"use_response_format": True},
                {"use_response_format": True, "json_schema": {"type": "object"}},
                {"use_response_format": True, "json_schema": {"type": "object", "title": "t"}},
            )
        ),
    ]
    assert len({variant.identity() for variant in variants}) == len(variants)
    assert all(len(variant.identity()) == 32 for variant in variants)


def test_the_identity_does_not_change_with_how_the_reply_is_read() -> None:
    base = msgspec.structs.replace(BUILTIN["integer"], closing="One integer, please.")
    for change in (
        {"place": "last"},
        {"reminder": "Again, please."},
        {"parser": "package.module:function"},
        {"name": "other"},
        {"high": 20.0},
    ):
        assert msgspec.structs.replace(base, **change).identity() == base.identity()
    weighted = BUILTIN["criteria"]
    other = msgspec.structs.replace(weighted, criteria=dict.fromkeys(weighted.criteria, 1.0))
    assert other.identity() == weighted.identity()


def test_the_identity_ignores_the_order_of_a_schemas_keys() -> None:
    first = msgspec.structs.replace(BUILTIN["json"], use_response_format=True, json_schema={"a": 1, "b": 2})
    second = msgspec.structs.replace(first, json_schema={"b": 2, "a": 1})
    assert first.identity() == second.identity()


def test_the_response_format_names_every_criterion() -> None:
    assert BUILTIN["criteria"].response_format() is None
    found = msgspec.structs.replace(BUILTIN["criteria"], name="my rubric", use_response_format=True).response_format()
    assert found is not None
    assert found["type"] == "json_schema"
    assert found["json_schema"]["name"] == "my_rubric"
    schema = found["json_schema"]["schema"]
    assert schema["required"] == ["correctness", "completeness", "clarity"]
    assert schema["properties"]["clarity"] == {"type": "number", "minimum": 1.0, "maximum": 10.0}


def test_a_schema_of_the_user_is_sent_unchanged() -> None:
    schema = {"type": "object", "properties": {"score": {"type": "integer"}}}
    rubric = msgspec.structs.replace(BUILTIN["json"], json_schema=schema, use_response_format=True)
    assert rubric.response_format() == {"type": "json_schema", "json_schema": {"name": "json", "schema": schema}}


def test_a_rubric_loads_from_a_json_and_from_a_toml_file(tmp_path: Path) -> None:
    as_json = tmp_path / "strict.json"
    as_json.write_text(json.dumps({"system": "Judge.", "parser": "number", "low": 0, "high": 5}))
    as_toml = tmp_path / "strict.toml"
    as_toml.write_text('system = "Judge."\nparser = "number"\nlow = 0\nhigh = 5\n')
    assert load_rubric(str(as_json)) == load_rubric(as_toml)
    assert load_rubric(as_json).name == "strict"
    assert load_rubric(as_json).high == 5.0


def test_a_base_supplies_missing_fields() -> None:
    rubric = load_rubric({"base": "criteria", "name": "mine", "criteria": {"truth": 1.0}})
    assert rubric.system == BUILTIN["criteria"].system
    assert rubric.criteria == {"truth": 1.0}


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("intger", "integer, number, yes_no, json, criteria"),
        ("missing.json", "cannot be read"),
        ({"name": "x", "system": "y", "hihg": 5}, "rubric.hihg"),
        ({"name": "x", "system": "y", "high": "ten"}, "$.high"),
        ({"name": "x"}, "system"),
        ({"name": "x", "system": "y", "low": 12}, "rubric.low"),
        ({"base": "intger"}, "integer, number, yes_no, json, criteria"),
        (7, "built-in name"),
    ],
)
def test_an_error_lists_the_choices(spec: Any, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_rubric(spec)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("name", "content"), [("a.json", b"{"), ("a.json", b"[]"), ("a.toml", b"a ="), ("a.toml", b"\xff")]
)
def test_a_broken_file_is_a_config_error(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError):
        load_rubric(path)
