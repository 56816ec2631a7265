"""Versions of tokens are never newer than the weights that made them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from freewheel.rollout.vllm.api import Timeline, TokenVersions

steps = st.lists(st.sampled_from(["update", "add", "end", "batch", "batch", "batch", "late end"]), max_size=60)


@given(steps=steps, data=st.data())
def test_every_token_has_the_version_that_made_it(steps: list[str], data: st.DataObject) -> None:
    """A model of an engine: a batch gives every live request some tokens under the current weights. The versions of
    its tokens are read while it lives, also after later versions were seen."""
    version, number = 0, 0
    tags = TokenVersions(version)
    truth: dict[str, list[int]] = {}
    live: list[str] = []
    for step in steps:
        if step == "update":
            version += data.draw(st.integers(1, 2))
        elif step == "add":
            name = f"request {number}"
            number += 1
            tags.begin(name)
            truth[name] = []
            live.append(name)
        elif step == "batch":
            tags.batch(version, {name: len(truth[name]) for name in live})
            for name in live:
                truth[name] += [version] * data.draw(st.integers(0, 3))
        elif live:
            name = live.pop(data.draw(st.integers(0, len(live) - 1)))
            if step == "end":
                assert tags.of(name, len(truth[name])).tolist() == truth[name]
                tags.end(name)
                del truth[name]
    for name, made in truth.items():
        count = data.draw(st.integers(0, len(made)))
        assert tags.of(name, count).tolist() == made[:count]


def test_a_request_that_is_on_its_way_while_the_version_changes_keeps_the_older_version() -> None:
    tags = TokenVersions(3)
    tags.begin("on its way")
    tags.batch(4, {})
    assert tags.of("on its way", 2).tolist() == [3, 3]
    tags.batch(5, {"on its way": 1, "not ours": 7})
    assert tags.of("on its way", 3).tolist() == [3, 5, 5]


@given(st.lists(st.tuples(st.floats(0.001, 5), st.floats(0, 5)), max_size=8), st.data())
def test_tokens_made_between_two_changes_have_the_version_between_them(
    pauses: list[tuple[float, float]], data: st.DataObject
) -> None:
    """No tokens are made from a pause to the change at its end. At the moment of a change the older version counts."""
    line, now = Timeline(10), 0.0
    for version, (worked_s, paused_s) in enumerate(pauses, start=10):
        began, made_s = now, data.draw(st.floats(now, now + worked_s))
        now += worked_s + paused_s
        line.changed(now, version + 1)
        assert line.at(made_s) <= version and line.at(now) <= version, "never newer"
        if began < made_s < now:
            assert line.at(made_s) == version
    assert line.at(now + 0.1) == 10 + len(pauses)
