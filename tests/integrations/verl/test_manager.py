"""`FreewheelRewardManager` as verl's reward worker holds it, row by row, in this process."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import open_dict
from transformers import PreTrainedTokenizerFast

from freewheel.errors import ConfigError
from freewheel.integrations.verl import FreewheelRewardManager
from freewheel.integrations.verl.settings import SETTLE_S, Settings
from freewheel.judge.testing import JudgeProfile, MockJudge, RunningJudge
from freewheel.rewards import RewardFailed, exact_match, register_rule

from .scoring_functions import moody
from .stage import Answer, ours, rollouts, verl_config

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]

Run = Callable[..., list[dict[str, Any]]]
LOGGER = "freewheel.integrations.verl"


@pytest.fixture(scope="module")
def judge() -> Iterator[RunningJudge]:
    """7 for everything; no score for what is unratable, and a 400 for what is too long."""
    with MockJudge(
        JudgeProfile(scores={"unratable": "no idea", "x": "7"}, max_prompt_chars=3_000)
    ).in_process() as mock:
        yield mock


@pytest.fixture
def run(tokenizer: PreTrainedTokenizerFast, tokenizer_path: Path, judge: RunningJudge) -> Run:
    def run(
        answers: Sequence[Answer],
        *overrides: str,
        compute_score: Any = None,
        n: int = 4,
        drop: Sequence[str] = (),
        at_once: int = 1000,
    ) -> list[dict[str, Any]]:
        settings = ours(judge.url, reward_coefficient=0.1)
        config = verl_config(tokenizer_path, *settings, *overrides, n=n)
        batch = rollouts(tokenizer, answers)
        for key in drop:
            batch.non_tensor_batch.pop(key)

        async def all_rows() -> list[dict[str, Any]]:
            manager = FreewheelRewardManager(config, tokenizer, compute_score)  # verl takes the loop that runs here
            rows: list[dict[str, Any]] = []
            try:
                for start in range(0, len(batch), at_once):
                    some = range(start, min(start + at_once, len(batch)))
                    rows += await asyncio.gather(*(manager.run_single(batch[row : row + 1]) for row in some))
            finally:
                manager.scorer.close()
            return rows

        return asyncio.run(all_rows())

    return run


def row_scores(rows: Sequence[dict[str, Any]]) -> list[float]:
    return [round(row["reward_score"], 5) for row in rows]


def column(rows: Sequence[dict[str, Any]], key: str) -> list[Any]:
    return [row["reward_extra_info"][key] for row in rows]


def assert_collates(rows: Sequence[dict[str, Any]]) -> None:
    """As verl 0.9.1 does: the first row's keys, for all rows, into arrays of plain values."""
    for key in rows[0]["reward_extra_info"]:
        values = np.array([row["reward_extra_info"][key] for row in rows])
        assert values.shape == (len(rows),)
        assert key == "pred" or values.dtype.kind in "fiU", (key, values.dtype)
        if values.dtype.kind == "f":
            assert np.isfinite(values).all(), key
    assert {tuple(row["reward_extra_info"]) for row in rows} == {tuple(rows[0]["reward_extra_info"])}
    assert all(math.isfinite(row["reward_score"]) for row in rows)


RIGHT, WRONG = "x #### 4", "x #### 5"


@pytest.mark.parametrize(
    ("bad", "question", "reason"),
    [("unratable #### 4", "", "unparseable"), ("x" * 120 + " #### 4", "q" * 20_000, "rejected")],
)
def test_a_row_that_the_judge_fails_on_gets_the_mean_of_its_group_and_is_marked(
    run: Run, bad: str, question: str, reason: str
) -> None:
    answers = [Answer(text, "a") for text in (RIGHT, WRONG)]
    answers += [Answer(bad, "a", info={"question": question} if question else {}), Answer(RIGHT, "a")]
    rows = run(answers, "+reward.reward_kwargs.length_penalty_config.enable=false")
    assert row_scores(rows) == [1.7, 0.0, round((1.7 + 0.0 + 1.7) / 3, 5), 1.7]
    assert column(rows, "judge_status") == ["scored", "skipped", "failed", "scored"]
    assert column(rows, "reward_mask") == [1, 1, 0, 1]
    assert rows[2]["reward_extra_info"]["judge_reason"] == reason
    assert_collates(rows)


def test_a_group_that_fails_as_a_whole_keeps_its_rule_scores(run: Run) -> None:
    rows = run([Answer("unratable #### 4", "a") for _ in range(4)])
    assert row_scores(rows) == [1.0] * 4
    assert_collates(rows)


def test_a_compute_score_that_raises_fails_its_row_alone(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    texts = (RIGHT, "x boom", WRONG, "x nan")
    with caplog.at_level(logging.ERROR, LOGGER):
        rows = run([Answer(text, "a") for text in texts], compute_score=moody)
    assert row_scores(rows) == [1.7, 0.85, 0.0, 0.85]
    assert column(rows, "judge_reason") == ["", "compute_score", "judge_gate: the rule score is 0", "compute_score"]
    assert column(rows, "original_score") == [1.0, 0.5, 0.0, 0.5]
    assert_collates(rows)
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == 2 and "ZeroDivisionError" in logged[0] and "ConfigError" in logged[1]


def test_a_failure_that_repeats_is_logged_the_first_and_the_tenth_time(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, LOGGER):
        run([Answer("boom", f"u{row // 4}") for row in range(40)], compute_score=moody)
    assert [record.args[1] for record in caplog.records if isinstance(record.args, tuple)] == [1, 10]


def test_a_group_without_any_rule_score_gets_the_mean_of_its_data_source_and_is_masked(run: Run) -> None:
    answers = [Answer(RIGHT, "a") for _ in range(4)] + [Answer("x boom", "b") for _ in range(4)]
    rows = run(answers, compute_score=moody, at_once=4)
    assert row_scores(rows)[4:] == [1.0] * 4
    assert column(rows, "reward_mask")[4:] == [0] * 4


@pytest.mark.parametrize("extra_keys", ["[]", "[pred,steps]"])
def test_dicts_and_numbers_from_one_compute_score_collate_and_named_parts_are_reported(
    run: Run, caplog: pytest.LogCaptureFixture, extra_keys: str
) -> None:
    texts = ("x dict #### 4", RIGHT, "x long dict #### 5", "x boom")
    answers = [Answer(text, "a") for text in texts]
    rows = run(answers, f"+reward.reward_kwargs.extra_keys={extra_keys}", compute_score=moody)
    assert column(rows, "acc") == [1.0, 1.0, 0.0, pytest.approx(2 / 3)]
    if extra_keys == "[]":
        assert_collates(rows)
        assert "pred" not in rows[0]["reward_extra_info"]
        assert any("pred, steps" in record.getMessage() for record in caplog.records)
    else:
        assert column(rows, "pred") == ["4", None, "5", None]
        assert column(rows, "steps")[0] == str([1] * len(texts[0]))


def test_a_group_that_never_completes_is_logged_and_scored_without_the_penalty(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    lengths = (20, 20, 60)
    answers = [Answer("x" * (length - 7) + " #### 4", "lonely") for length in lengths]
    rows = run(answers, "+reward.reward_kwargs.group_deadline_s=0.5")
    assert row_scores(rows) == [1.7, 1.7, 1.7]
    assert column(rows, "group_complete") == [0, 0, 0]
    assert any("uid lonely: 3 of 4 rows came" in record.getMessage() for record in caplog.records)


def test_a_validation_row_does_not_wait_for_a_training_group(run: Run) -> None:
    rows = run([Answer(RIGHT, "a", split="test"), Answer(RIGHT, "b", split="test")], n=8)
    assert column(rows, "group_complete") == [1, 1]


def test_rows_without_a_split_count_as_validation_if_no_more_come(
    run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("freewheel.integrations.verl.settings.SETTLE_S", 0.3)
    rows = run([Answer(RIGHT, "a", split=None), Answer(RIGHT, "b", split=None)], n=8)
    assert column(rows, "group_complete") == [1, 1]
    assert any("put split" in record.getMessage() for record in caplog.records)


async def test_a_group_that_settles_does_not_wait_for_an_older_ones_deadline(
    tokenizer: PreTrainedTokenizerFast, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("freewheel.integrations.verl.settings.SETTLE_S", 0.3)
    manager = FreewheelRewardManager(verl_config(tokenizer_path, n=8), tokenizer, None)
    batch = rollouts(tokenizer, [Answer(RIGHT, "train"), Answer(RIGHT, "validation", split=None)])
    older = asyncio.ensure_future(manager.run_single(batch[0:1]))
    await asyncio.sleep(0.2)
    row = await asyncio.wait_for(manager.run_single(batch[1:2]), 20)
    assert row["reward_extra_info"]["group_complete"] == 1 and not older.done()
    older.cancel()
    manager.scorer.close()


def test_a_judge_that_cannot_be_started_fails_its_rows_and_not_the_run(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr("freewheel.judge.Judge.submit", broken)
    rows = run([Answer(RIGHT, "a") for _ in range(4)])
    assert row_scores(rows) == [1.0] * 4 and column(rows, "judge_reason") == ["engine"] * 4
    assert "no more processes" in caplog.text


CONFIG = "reward.reward_kwargs.length_penalty_config"


@pytest.mark.parametrize(
    ("overrides", "start"),
    [
        ([f"{CONFIG}.api_key=null"], "No API key: the judge at http://127.0.0.1:"),
        (
            [f"~{CONFIG}.api_endpoint", f"~{CONFIG}.api_key", f"+{CONFIG}.enable_openai_reward=true"],
            "No api_endpoint: the judge is off",
        ),
    ],
)
def test_a_judge_that_lacks_key_or_endpoint_is_off_and_the_log_names_the_remedy_once(
    run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, overrides: list[str], start: str
) -> None:
    if "No api_endpoint" in start:
        monkeypatch.setenv("OPENAI_API_KEY", "EMPTY")  # no key goes to an endpoint that nobody named
    rows = run([Answer(RIGHT, "a") for _ in range(4)], *overrides)
    assert column(rows, "judge_status") == ["skipped"] * 4
    [message] = [one.getMessage() for one in caplog.records if "the judge" in one.getMessage()]
    assert message.startswith(start) and message.endswith("on every node (EMPTY for a server without keys)")


def test_a_uid_that_is_used_again_is_a_new_group(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freewheel.integrations.grouping.LATE_S", 0.0)
    answers = [Answer("x" * (length - 7) + " #### 4", "own") for length in (20, 20, 20, 20, 60, 60, 60, 60)]
    rows = run(answers, at_once=4)
    assert column(rows, "median_length") == [20.0] * 4 + [60.0] * 4 and row_scores(rows) == [1.7] * 8


def test_rows_without_a_uid_are_scored_alone_with_a_warning(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    rows = run([Answer(RIGHT, "a"), Answer(WRONG, "a")], drop=["uid"])
    assert row_scores(rows) == [1.7, 0.0]
    assert sum("no uid" in record.getMessage() for record in caplog.records) == 1


def test_a_failure_raises_if_on_failure_is_raise(run: Run) -> None:
    with pytest.raises(RewardFailed, match="unparseable"):
        run([Answer("unratable #### 4", "a")], "+reward.reward_kwargs.length_penalty_config.on_failure=raise", n=1)


def test_a_data_source_that_verl_does_not_know_is_scored_by_freewheels_rule(run: Run) -> None:
    register_rule("house/", exact_match)
    rows = run([Answer("x", "a", truth=truth, source="house/letters") for truth in "xyxx"])
    assert column(rows, "original_score") == [1.0, 0.0, 1.0, 1.0]


def test_an_async_compute_score_is_awaited(run: Run) -> None:
    async def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
        await asyncio.sleep(0)
        return 0.5

    assert row_scores(run([Answer(RIGHT, "a")], compute_score=functools.partial(score), n=1)) == [1.2]


# -- settings ---------------------------------------------------------------------------------------------------------


def test_an_unknown_setting_is_refused_by_its_full_name_and_verls_own_are_accepted(tokenizer_path: Path) -> None:
    for key in ("group_deadline", "length_penalty_config.penalty"):
        with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
            Settings.of(verl_config(tokenizer_path, f"+reward.reward_kwargs.{key}=5"))
    Settings.of(verl_config(tokenizer_path, "+reward.reward_kwargs.max_resp_len=5"))


KEY = "sk-0123456789abcdef"
NOWHERE = "http://127.0.0.1:9"


def test_the_key_does_not_show_in_the_actors_name(tokenizer_path: Path) -> None:
    first, second = (
        Settings.of(verl_config(tokenizer_path, *ours(NOWHERE, api_key=key))) for key in (KEY, f"{KEY}-other")
    )
    assert first.identity() == second.identity()
    assert KEY not in repr(first) and KEY.encode() not in pickle.dumps(first)
    key = first.length_penalty_config.key
    assert key is not None and key.reveal() == KEY, "the process that was given the key knows it"


def test_a_key_as_text_does_not_reach_several_workers_and_the_error_names_the_remedy(
    tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def key_elsewhere(config: Any) -> str:
        """The key that the actor has, in an environment like this one."""
        key = pickle.loads(pickle.dumps(Settings.of(config))).length_penalty_config.key
        return str(key.reveal())

    config = verl_config(tokenizer_path, *ours(NOWHERE, api_key=KEY), workers=2)
    with pytest.raises(ConfigError, match="set OPENAI_API_KEY in the environment") as caught:
        Settings.of(config)
    assert KEY not in str(caught.value)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert key_elsewhere(config) == KEY and not caplog.records
    monkeypatch.setenv("OPENAI_API_KEY", "another")
    assert key_elsewhere(config) == "another" and "the key in OPENAI_API_KEY is used" in caplog.text
    keyless = verl_config(tokenizer_path, *ours(NOWHERE), workers=2)
    assert key_elsewhere(keyless) == "EMPTY", "the environment's key is not for a server without keys"


def test_a_config_may_be_yaml_and_no_error_shows_its_text(tokenizer_path: Path, tmp_path: Path) -> None:
    def settings(given: str) -> Settings:
        config = verl_config(tokenizer_path)
        with open_dict(config):
            config.reward.reward_kwargs = {"length_penalty_config": given}
        return Settings.of(config)

    text = f"penalty_scale: 2.0\napi_endpoint: {NOWHERE}\napi_key: {KEY}\n"
    file = tmp_path / "rewards.yaml"
    file.write_text(text)
    for given in (text, str(file)):
        assert settings(given).length_penalty_config.penalty_scale == 2.0 and settings(given).wants_judge
    for wrong in (f"api_key={KEY}", f"- api_key: {KEY}", f"api_key: '{KEY}", f"apikey: {KEY}"):
        with pytest.raises(ConfigError, match="length_penalty_config") as caught:
            settings(wrong)
        assert KEY not in str(caught.value), wrong


@pytest.mark.parametrize(
    ("split", "sizes"), [("train", (8,)), ("train_sft", (8,)), ("test", (1,)), ("validation", (1,)), (None, (8, 1))]
)
def test_a_groups_size_follows_the_rows_split(tokenizer_path: Path, split: str | None, sizes: tuple[int, ...]) -> None:
    settings = Settings.of(verl_config(tokenizer_path, n=8))
    assert settings.sizes(split) == sizes and settings.settle_s == SETTLE_S


async def test_a_step_with_more_rows_than_the_workers_hold_is_a_warning(
    tokenizer: PreTrainedTokenizerFast, tokenizer_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    FreewheelRewardManager(verl_config(tokenizer_path, "data.train_batch_size=1024", n=8), tokenizer, None)
    assert "set reward.num_workers=9" in caplog.text
