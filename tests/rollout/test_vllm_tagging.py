"""Each token is of the weights that made it, whenever the news arrive, and never of later ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from freewheel.rollout.vllm.tracking import Timeline, TokenVersions

steps = st.lists(st.sampled_from(["update", "add", "end", "batch", "batch", "batch", "late end"]), max_size=60)


@given(steps=steps, data=st.data())
def test_every_token_has_the_version_that_made_it(steps: list[str], data: st.DataObject) -> None:
    """An engine in small: a batch gives every live request some tokens under the weights that serve then. What a
    request's tokens are of is asked while it lives, and also after later versions were seen."""
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


def test_a_request_that_is_not_heard_of_when_the_version_changes_is_not_taken_for_newer() -> None:
    tags = TokenVersions(3)
    tags.begin("on its way")
    tags.batch(4, {})
    assert tags.of("on its way", 2).tolist() == [3, 3]
    tags.batch(5, {"on its way": 1, "not ours": 7})
    assert tags.of("on its way", 3).tolist() == [3, 5, 5]


@given(
    pauses=st.lists(st.tuples(st.floats(0.001, 5), st.floats(0, 5)), max_size=8),
    asked=st.lists(st.tuples(st.integers(0, 8), st.floats(0, 1)), max_size=20),
)
def test_what_is_made_between_two_changes_is_of_the_version_between_them(
    pauses: list[tuple[float, float]], asked: list[tuple[int, float]]
) -> None:
    """Generation stands still from a pause to the change at its end: tokens are made outside of pauses alone."""
    line, now, generating = Timeline(10), 0.0, []
    for worked_s, paused_s in pauses:
        generating.append((now, now + worked_s))
        now += worked_s + paused_s
        line.changed(now, 10 + len(generating))
    generating.append((now, now + 1.0))
    for place, share in asked:
        version = place % len(generating)
        since, until = generating[version]
        made_s = since + share * (until - since)
        found = line.at(made_s)
        assert found <= 10 + version, "never newer"
        if made_s not in (since, until):
            assert found == 10 + version


def test_at_the_moment_of_a_change_the_older_version_is_meant() -> None:
    line = Timeline(0)
    line.changed(5.0, 1)
    line.changed(5.0, 2)
    assert [line.at(moment) for moment in (4.9, 5.0, 5.1)] == [0, 1, 2]
