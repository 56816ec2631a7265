"""freewheel in verl's real reward loop, each run with separate actors: incomplete groups, odd results, and its end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from freewheel.judge.testing import JudgeProfile, MockJudge, RunningJudge

from .stage import (
    FUNCTIONS,
    LENGTHS,
    WITH_PENALTY,
    Answer,
    columns,
    ours,
    reward_loop,
    rollouts,
    scores,
    text_of,
    until,
    verl_config,
)

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def judge() -> Iterator[RunningJudge]:
    with MockJudge(JudgeProfile(scores={"x": "7"})).in_process() as mock:
        yield mock


def test_a_group_that_never_completes_does_not_end_the_run(
    ray_session: None, judge: RunningJudge, tokenizer: Any, tokenizer_path: Path
) -> None:
    settings = [*ours(judge.url, reward_coefficient=0.1), "+reward.reward_kwargs.group_deadline_s=1"]
    answers = [Answer(text_of(length), "lonely") for length in LENGTHS[1:]]
    answers += [Answer(text_of(length), "whole") for length in LENGTHS] + [Answer(text_of(20), "alone")]
    with reward_loop(verl_config(tokenizer_path, *settings, workers=2)) as loop:
        result = loop.compute_rm_score(rollouts(tokenizer, answers))
    assert scores(result) == [1.7, 1.7, 1.7, *WITH_PENALTY, 1.7]
    assert columns(result)["group_complete"] == [0] * 3 + [1] * 4 + [0]


def test_a_compute_score_whose_dict_does_not_pickle_is_scored_all_the_same(
    ray_session: None, judge: RunningJudge, tokenizer: Any, tokenizer_path: Path
) -> None:
    settings = [f"reward.custom_reward_function.path={FUNCTIONS}", "reward.custom_reward_function.name=unpicklable"]
    settings.append("+reward.reward_kwargs.extra_keys=[match]")
    answers = [Answer(text_of(length), "a") for length in LENGTHS]
    with reward_loop(
        verl_config(tokenizer_path, *ours(judge.url, reward_coefficient=0.1), *settings, workers=2)
    ) as loop:
        result = loop.compute_rm_score(rollouts(tokenizer, answers))
    assert scores(result) == WITH_PENALTY
    assert columns(result)["acc"] == [0.5] * 4 and "re.Match" in columns(result)["match"][0]


def test_nothing_is_left_of_a_run_whose_workers_are_killed(
    ray_session: Path, judge: RunningJudge, tokenizer: Any, tokenizer_path: Path
) -> None:
    config = verl_config(tokenizer_path, *ours(judge.url, reward_coefficient=0.2), workers=2)
    before = _engines(ray_session)
    with reward_loop(config) as loop:
        loop.compute_rm_score(rollouts(tokenizer, [Answer(text_of(length), "a") for length in LENGTHS]))
        assert len(_engines(ray_session) - before) == 1, "one engine for both workers"
    until(lambda: not _engines(ray_session) - before)


def _engines(folder: Path) -> set[int]:
    """Processes of this Ray in which a judge's engine runs."""
    found = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                command, environment = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
            except OSError:
                continue  # it ended meanwhile
            if b"freewheel.judge.transport" in command and str(folder).encode() in environment:
                found.add(int(process.name))
    return found
