"""TRL's own `GRPOTrainer` on a tiny model, rewarded by `JudgeReward`, with a mock judge on loopback."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="runs in TRL's environment: make env-trl")

import pandas as pd
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from freewheel.errors import ConfigError
from freewheel.integrations.trl import JudgeReward

pytestmark = [
    pytest.mark.trl,
    # Torch and transformers have warnings of their own; ours stay errors.
    pytest.mark.filterwarnings("ignore", "error:::freewheel"),
]

GENERATIONS = 4
STEPS = 3
PLAIN = Dataset.from_list([{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(3) for b in range(2)])


def chat(row: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": row["prompt"]}]}


CHATS = PLAIN.map(chat)


def starts_well(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    """A rule that a random model satisfies now and then."""
    return float(solution_str[:1].isdigit() or solution_str[:1].islower())


class Run:
    """What a training left behind."""

    def __init__(self, trainer: GRPOTrainer, folder: Path) -> None:
        self.history = [entry for entry in trainer.state.log_history if "reward" in entry]
        self.trainer = trainer
        tables = sorted((folder / "completions").glob("*.parquet"))
        self.rows = pd.concat([pd.read_parquet(table) for table in tables], ignore_index=True)

    def values(self, metric: str) -> list[float]:
        return [entry[metric] for entry in self.history]


@pytest.fixture
def train(tmp_path: Path, example: Any, tokenizer: Any) -> Callable[..., Run]:
    """Trains, and gives back each completion of each step with its rewards and its advantage."""

    def run(reward: Any, data: Dataset = PLAIN, **settings: Any) -> Run:
        args = GRPOConfig(
            output_dir=str(tmp_path),
            **{
                "max_steps": STEPS,
                "num_generations": GENERATIONS,
                "per_device_train_batch_size": 2 * GENERATIONS,
                "max_completion_length": 8,
                "learning_rate": 1e-3,
                "use_cpu": True,
                "bf16": False,
                "logging_steps": 1,
                "log_completions": True,
                "report_to": "none",
                "save_strategy": "no",
                "disable_tqdm": True,
                **settings,
            },
        )
        trainer = GRPOTrainer(
            model=example.tiny_model(tokenizer),
            processing_class=tokenizer,
            reward_funcs=reward,
            train_dataset=data,
            args=args,
        )
        trainer.train()
        return Run(trainer, tmp_path)

    return run


def test_each_completion_is_rewarded_with_the_judges_score_of_it(mock, make_reward, train, score):
    server = mock()
    run = train(make_reward(server.url))
    assert len(run.rows) == STEPS * 2 * GENERATIONS
    for row in run.rows.itertuples():
        assert row.judge == score(row.completion, row.prompt)
    assert run.values("rewards/judge/mean") == pytest.approx(run.values("judge/judge_score"))
    assert run.values("judge/judge_failed") == [0.0] * STEPS
    assert server.counts().most_received == 1


def test_conversations_are_judged_by_what_was_asked_and_said(mock, make_reward, train, score):
    run = train(make_reward(mock().url, ground_truth="answer"), CHATS)
    answers = {row["prompt"][1]["content"]: row["answer"] for row in CHATS}
    for row in run.rows.itertuples():
        asked = row.prompt[1]["content"]
        question = f"[system]\nAdd.\n\n[user]\n{asked}"
        assert row.judge == score(row.completion[0]["content"], question, reference=answers[asked])


def test_a_failed_judgement_is_left_out_of_its_groups_mean_and_the_training_goes_on(mock, make_reward, train, score):
    server = mock(error_share=0.4, seed=3)
    run = train(make_reward(server.url, judge={"max_attempts": 1}))
    failed = run.rows["judge/judge"].str.startswith("failed")
    assert 0 < failed.sum() < len(run.rows)
    assert (run.rows["judge"].isna() == failed).all()
    assert (run.rows.loc[failed, "advantage"] == 0).all()
    for row in run.rows[~failed].itertuples():
        assert row.judge == score(row.completion, row.prompt)
    for _, group in run.rows.groupby(run.rows.index // GENERATIONS):
        known = group["judge"].dropna()
        if len(known) > 1:
            expected = (known - known.mean()) / (known.std() + 1e-4)
            assert group["advantage"][known.index].to_list() == pytest.approx(expected.to_list(), abs=1e-4)
    assert sum(run.values("judge/judge_failed")) == pytest.approx(failed.sum() / (2 * GENERATIONS))


def test_a_judge_that_is_down_teaches_nothing_and_breaks_nothing(mock, make_reward, train):
    run = train(make_reward(mock(error_share=1.0).url, judge={"max_attempts": 1, "request_deadline_s": 0.2}))
    assert run.rows["judge"].isna().all()
    assert (run.rows["advantage"] == 0).all()
    assert run.values("reward") == [None] * STEPS
    assert all(math.isfinite(entry["loss"]) for entry in run.history)


async def some_numbers(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def test_beside_other_functions_trl_counts_a_none_as_zero_unless_on_failure_says_otherwise(mock, make_reward, train):
    """What 1.16.0 does: the sum skips None, so a failed row competes without its quality."""
    settings = {"judge": {"max_attempts": 1}}
    server = mock(error_share=0.4, seed=3)
    for on_failure in (None, "group_mean"):
        server.reset()
        run = train([some_numbers, make_reward(server.url, on_failure=on_failure, **settings)], scale_rewards="none")
        rows = run.rows
        failed = rows["judge/judge"].str.startswith("failed")
        assert 0 < failed.sum() < len(rows)
        known = rows["judge"].where(~failed)
        means = known.groupby(rows.index // GENERATIONS).transform("mean")
        total = rows["some_numbers"] + known.fillna(means if on_failure else 0.0).fillna(0.0)
        advantage = total - total.groupby(rows.index // GENERATIONS).transform("mean")
        assert rows["advantage"].to_list() == pytest.approx(advantage.to_list(), abs=1e-4)
        for table in Path(run.trainer.args.output_dir).glob("completions/*"):
            table.unlink()


def test_normalised_before_the_sum_a_failed_row_counts_as_its_groups_mean(mock, make_reward, train):
    server = mock(error_share=0.4, seed=3)
    reward = make_reward(server.url, judge={"max_attempts": 1})
    rows = train([some_numbers, reward], multi_objective_aggregation="normalize_then_sum", max_steps=1).rows
    assert rows["judge"].isna().any()
    normal = [
        (rows[name] - of_group.transform("mean")) / (of_group.transform("std") + 1e-4)
        for name in ("some_numbers", "judge")
        for of_group in [rows[name].groupby(rows.index // GENERATIONS)]
    ]
    total = normal[0] + normal[1].fillna(0.0)
    expected = (total - total.mean()) / (total.std() + 1e-4)
    assert rows["advantage"].to_list() == pytest.approx(expected.to_list(), abs=1e-3)


def test_the_whole_reward_is_rule_plus_quality_minus_penalty(mock, make_reward, train, score):
    """Lengths are counted in TRL's own token ids; a gated row keeps rule and penalty."""
    server = mock()
    ratios = {"peak_ratio": 0.1, "outer_ratio": 0.9}
    whole = make_reward(server.url, rule=starts_well, ground_truth="answer", reward_coefficient=0.1, **ratios)
    seen: list[tuple[str, str, str, int]] = []

    def record(prompts: Any, completions: Any, completion_ids: Any, answer: Any, **kwargs: Any) -> list[float]:
        seen.extend(zip(prompts, completions, answer, map(len, completion_ids), strict=True))
        return [0.0] * len(prompts)

    rows = train([whole, record], max_steps=4, max_completion_length=16).rows
    sent, penalised = set(), 0
    for start in range(0, len(seen), GENERATIONS):
        group = seen[start : start + GENERATIONS]
        median = statistics.median(length for *_, length in group)
        for number, (prompt, completion, answer, length) in enumerate(group, start):
            right = starts_well("", completion, answer, {})
            quality = 0.1 * score(completion, prompt, reference=answer) if right else 0.0
            penalty = min(1.0, max(0.0, (abs(length - median) / median - 0.1) / 0.8))
            assert rows["freewheel"][number] == pytest.approx(right + quality - penalty)
            assert rows["freewheel/judge"][number].partition(":")[0] == ("scored" if right else "skipped")
            penalised += penalty > 0
            sent |= {(prompt, completion)} if right else set()
    assert 0 < penalised < len(seen) and 0 < len(sent) < len(seen)
    assert server.counts().received == len(sent)


def test_what_is_generated_twice_is_sent_once(mock, make_reward, train):
    server = mock()
    run = train(make_reward(server.url), max_completion_length=1, temperature=0.01, max_steps=2)
    distinct = len(run.rows[["prompt", "completion"]].drop_duplicates())
    assert distinct < len(run.rows)
    assert server.counts().received == distinct


def test_a_column_that_the_dataset_does_not_have_ends_the_training_with_its_name(mock, make_reward, train):
    with pytest.raises(ConfigError, match=r"ground_truth = 'solution': .* it has answer"):
        train(make_reward(mock().url, ground_truth="solution"))


def test_the_trainers_event_loop_is_free_while_the_judge_thinks(mock, make_reward, train):
    """Two functions of 0.5 s judges take 0.5 s: TRL gathers them on one loop."""
    rewards = [make_reward(mock(latency_s=0.5).url, name=f"judge_{n}") for n in range(2)]
    ticks: list[float] = []

    async def ticking(prompts: list[str], **kwargs: Any) -> list[float]:
        for _ in range(10):
            await asyncio.sleep(0.02)
            ticks.append(asyncio.get_running_loop().time())
        return [0.0] * len(prompts)

    train([*rewards, ticking], max_steps=1)
    assert max(b - a for a, b in itertools.pairwise(ticks)) < 0.25


def test_an_engine_that_breaks_costs_one_batch_of_rewards(mock, make_reward, train, monkeypatch, caplog):
    from freewheel.judge import EngineDied, Judge

    honest, calls = Judge.submit, []

    def submit(self: Judge, requests: Any, **kwargs: Any) -> Any:
        calls.append(self)
        if len(calls) == 2:
            raise EngineDied("the judge's process died 6 times within 60 s")
        return honest(self, requests, **kwargs)

    monkeypatch.setattr(Judge, "submit", submit)
    with caplog.at_level(logging.ERROR, logger="freewheel.rewards"):
        run = train(make_reward(mock().url))
    assert run.rows["judge"].isna().groupby(run.rows["step"]).sum().to_list() == [0, 2 * GENERATIONS, 0]
    assert "died 6 times" in caplog.text
    assert calls[0] is calls[1] and calls[2] is not calls[1]


def test_trl_takes_it_as_an_asynchronous_function_with_a_name(mock, make_reward):
    from trl.trainer.utils import get_callable_name, is_async_callable

    reward: JudgeReward = make_reward(mock().url)
    assert is_async_callable(reward)
    assert get_callable_name(reward) == "judge"
