"""Whatever a hook hands over becomes something that can be written."""

from __future__ import annotations

import json
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from freewheel.observe.metrics import numbers, plain, without_nonfinite

ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.builds(np.float32, st.floats(width=32)),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner),
    max_leaves=20,
)


@given(ANYTHING)
def test_everything_can_be_written_as_json_that_all_readers_take(value):
    finite, _ = without_nonfinite(plain({"x": value}))
    assert json.loads(json.dumps(finite, allow_nan=False)) == finite


def test_numpy_and_torch_numbers_become_numbers():
    import torch

    found = plain(
        {
            "a": np.float32(0.5),
            "b": np.arange(3),
            "c": torch.tensor(2),
            "d": torch.tensor([1.5, 2.5]),
            "e": np.bool_(True),
        }
    )
    assert found == {"a": 0.5, "b": [0, 1, 2], "c": 2, "d": [1.5, 2.5], "e": True}
    assert type(found["e"]) is bool


def test_what_is_no_value_becomes_its_text():
    class Odd:
        def __str__(self):
            raise RuntimeError("no")

    assert plain({"odd": Odd(), "kind": ValueError("x")}) == {"odd": "<Odd>", "kind": "x"}


def test_a_structure_that_contains_itself_ends():
    round_and_round: dict = {}
    round_and_round["self"] = round_and_round
    assert json.dumps(plain(round_and_round)).startswith('{"self": {"self": ')


def test_nonfinite_numbers_are_named_by_path():
    found = without_nonfinite({"a": math.nan, "b": {"c": math.inf, "d": 1.0}, "e": [1.0, -math.inf]})
    assert found == ({"a": None, "b": {"c": None, "d": 1.0}, "e": [1.0, None]}, ["a", "b/c", "e"])


def test_numbers_have_paths_and_booleans_and_text_are_none():
    values = {"queue": {"queue_size": 3, "full": True, "why": "x"}, "reward": 0.5, "huge": 10**400, "list": [1]}
    assert dict(numbers(values)) == {"queue/queue_size": 3.0, "reward": 0.5, "huge": math.inf}
