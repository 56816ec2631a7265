"""TRL's own `GRPOTrainer` on a tiny model, rewarded by `JudgeReward`, with a mock judge on loopback."""

from __future__ import annotations

import logging
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
    """The log and the table of completions of a training."""

    def __init__(self, trainer: GRPOTrainer, folder: Path) -> None:
        self.history = [entry for entry in trainer.state.log_history if "reward" in entry]
        tables = sorted((folder / "completions").glob("*.parquet"))
        self.rows = pd.concat([pd.read_parquet(table) for table in tables], ignore_index=True)

    def values(self, metric: str) -> list[float]:
        return [entry[metric] for entry in self.history]


@pytest.fixture
def train(tmp_path: Path, example: Any, tokenizer: Any) -> Callable[..., Run]:
    """Trains and returns each completion of each step with its rewards and its advantage."""

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


def test_each_completion_of_a_conversation_is_judged_with_its_prompt_and_reference(mock, make_reward, train, score):
    server = mock()
    run = train(make_reward(server.url, ground_truth="answer"), CHATS)
    assert len(run.rows) == STEPS * 2 * GENERATIONS
    assert run.values("rewards/judge/mean") == pytest.approx(run.values("judge/judge_score"))
    assert run.values("judge/judge_failed") == [0.0] * STEPS
    assert server.counts().most_received == 1
    answers = {row["prompt"][1]["content"]: row["answer"] for row in CHATS}
    for row in run.rows.itertuples():
        asked = row.prompt[1]["content"]
        question = f"[system]\nAdd.\n\n[user]\n{asked}"
        assert row.judge == score(row.completion[0]["content"], question, reference=answers[asked])


def test_a_failed_judgement_is_left_out_of_its_groups_mean_and_training_continues(mock, make_reward, train, score):
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


def test_a_column_that_the_dataset_does_not_have_ends_the_training_with_its_name(mock, make_reward, train):
    with pytest.raises(ConfigError, match=r"ground_truth = 'solution': .* it has answer"):
        train(make_reward(mock().url, ground_truth="solution"))


def test_an_engine_that_breaks_fails_one_batch_of_rewards(mock, make_reward, train, monkeypatch, caplog):
    from freewheel.judge import Judge, JudgeDied

    honest, calls = Judge.submit, []

    def submit(self: Judge, requests: Any, **kwargs: Any) -> Any:
        calls.append(self)
        if len(calls) == 2:
            raise JudgeDied("the judge's process died 6 times within 60 s")
        return honest(self, requests, **kwargs)

    monkeypatch.setattr(Judge, "submit", submit)
    with caplog.at_level(logging.ERROR, logger="freewheel.rewards"):
        run = train(make_reward(mock().url))
    assert run.rows["judge"].isna().groupby(run.rows["step"]).sum().to_list() == [0, 2 * GENERATIONS, 0]
    assert "died 6 times" in caplog.text
    assert calls[0] is calls[1] and calls[2] is not calls[1]
