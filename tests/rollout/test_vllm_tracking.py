"""Versions of tokens are never newer than the weights that made them; late samples are found from token counts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from freewheel.rollout.vllm.tracking import Timeline, TokenVersions, Watch

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


@given(
    pauses=st.lists(st.tuples(st.floats(0.001, 5), st.floats(0, 5)), max_size=8),
    asked=st.lists(st.tuples(st.integers(0, 8), st.floats(0, 1)), max_size=20),
)
def test_tokens_made_between_two_changes_have_the_version_between_them(
    pauses: list[tuple[float, float]], asked: list[tuple[int, float]]
) -> None:
    """No tokens are made from a pause to the change at its end."""
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


def test_at_the_moment_of_a_change_the_older_version_counts() -> None:
    line = Timeline(0)
    line.changed(5.0, 1)
    line.changed(5.0, 2)
    assert [line.at(moment) for moment in (4.9, 5.0, 5.1)] == [0, 1, 2]


def test_a_sample_without_a_new_token_is_late_and_one_with_new_tokens_is_not() -> None:
    watch = Watch(4)
    for name in ("stuck", "continues"):
        watch.begin(name, 10.0, 0.0)
    assert watch.look(5.0, {"stuck": 1, "continues": 1}) == {}
    assert watch.look(10.0, {"stuck": 1, "continues": 5}) == {}
    assert watch.look(15.0, {"stuck": 1, "continues": 7}) == {}, "exactly at its timeout"
    assert watch.look(16.0, {"stuck": 1, "continues": 9}) == {"stuck": 11.0}
    watch.end("stuck", 16.0)
    assert watch.look(17.0, {"continues": 9}) == {}


def test_a_sample_without_a_slot_is_never_late_until_a_slot_is_free() -> None:
    watch = Watch(1)
    watch.begin("first", 10.0, 0.0)
    watch.begin("second", 10.0, 0.0)
    for now in range(5, 60, 5):
        assert watch.look(float(now), {"first": now}) == {}
    watch.end("first", 55.0)
    assert watch.look(60.0, {}) == {}
    assert watch.look(66.0, {}) == {"second": 11.0}


def test_a_sample_before_its_first_token_is_late_only_if_no_sample_gets_tokens() -> None:
    """It may wait for memory. A core that hangs makes tokens for nobody."""
    watch = Watch(2)
    for name in ("writes", "is read", "has no slot"):
        watch.begin(name, 10.0, 0.0)
    assert watch.look(8.0, {"writes": 3}) == {}
    assert watch.look(16.0, {"writes": 6}) == {}
    assert watch.look(27.0, {"writes": 6}) == {"writes": 11.0, "is read": 11.0}


def test_the_watch_looks_four_times_within_the_shortest_timeout() -> None:
    watch = Watch(2)
    assert watch.look_every_s is None
    watch.begin("a", 8.0, 0.0)
    watch.begin("b", 2.0, 0.0)
    assert watch.look_every_s == 0.5
    for name in ("a", "b", "b"):
        watch.end(name, 1.0)
    assert watch.look_every_s is None
