"""Names in settings: built-in ones, `module:name`, and what the error says about the others."""

from __future__ import annotations

import json
import math

import pytest

from freewheel.errors import ConfigError
from freewheel.utils.registry import Registry, find_object, kept_in_memory, objects_in_memory

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


def test_objects_in_memory_of_overlapping_users_end_with_their_own_user() -> None:
    """A run in the background may end while an evaluation lasts, and the other way round. Both may have an object."""
    run, evaluation = {"shared": "object", "mine": "of the run"}, {"shared": "object"}
    for first, second in ((run, evaluation), (evaluation, run)):
        first_block, second_block = kept_in_memory(first), kept_in_memory(second)
        first_block.__enter__()
        second_block.__enter__()
        first_block.__exit__(None, None, None)
        assert objects_in_memory() == second
        assert find_object("reward.function", "in_memory:shared") == "object"
        second_block.__exit__(None, None, None)
        assert objects_in_memory() == {}
