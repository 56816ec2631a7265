"""Names in settings: built-in ones, `module:name`, and what the error says about the others."""

from __future__ import annotations

import json
import math

import pytest

from freewheel.errors import ConfigError
from freewheel.utils.registry import Registry


@pytest.fixture
def registry() -> Registry[object]:
    registry: Registry[object] = Registry({"dumps": "json:dumps"}, example="my_codecs:zip")
    registry.register("loads")(json.loads)
    return registry


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("dumps", json.dumps),
        ("loads", json.loads),
        ("math:sqrt", math.sqrt),
        ("json:JSONDecoder.decode", json.JSONDecoder.decode),
    ],
)
def test_finds_built_in_entries_and_module_paths(registry: Registry[object], spec: str, expected: object) -> None:
    assert registry.find("codec", spec) is expected


@pytest.mark.parametrize(
    ("spec", "remedy"),
    [
        ("dump", "choose dumps, loads, or give module:name of your own, such as my_codecs:zip"),
        (":dumps", "choose dumps, loads"),
        ("json:", "choose dumps, loads"),
        ("no_such_module:name", "there is no module no_such_module"),
        ("json:no_such_name", "the module json has no no_such_name"),
        ("codecs/mine.py:zip", "give the module's name and not its file"),
    ],
)
def test_an_unknown_name_is_an_error_with_key_value_and_remedy(
    registry: Registry[object], spec: str, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=r"^codec = ") as raised:
        registry.find("codec", spec)
    assert repr(spec) in str(raised.value)
    assert remedy in str(raised.value)


def test_a_registry_lists_its_names_and_refuses_a_second_entry_of_one_name(registry: Registry[object]) -> None:
    assert list(registry) == ["dumps", "loads"]
    assert "loads" in registry
    with pytest.raises(ValueError, match="'loads' is registered already"):
        registry.register("loads")
