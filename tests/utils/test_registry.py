"""Names in settings: built-in ones, `module:name`, and what the error says about the others."""

from __future__ import annotations

import json
import math

import pytest

from freewheel.errors import ConfigError
from freewheel.utils.registry import Registry

CODECS: Registry[object] = Registry({"dumps": "json:dumps"}, example="my_codecs:zip")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("dumps", json.dumps),
        ("math:sqrt", math.sqrt),
        ("json:JSONDecoder.decode", json.JSONDecoder.decode),
    ],
)
def test_finds_built_in_entries_and_module_paths(spec: str, expected: object) -> None:
    assert CODECS.find("codec", spec) is expected


@pytest.mark.parametrize(
    ("spec", "remedy"),
    [
        ("dump", "choose dumps, or give module:name of your own, such as my_codecs:zip"),
        (":dumps", "choose dumps"),
        ("json:", "choose dumps"),
        ("no_such_module:name", "there is no module no_such_module"),
        ("json:no_such_name", "the module json has no no_such_name"),
        ("codecs/mine.py:zip", "give the module's name and not its file"),
    ],
)
def test_an_unknown_name_is_an_error_with_key_value_and_remedy(spec: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=r"^codec = ") as raised:
        CODECS.find("codec", spec)
    assert repr(spec) in str(raised.value)
    assert remedy in str(raised.value)
