"""`examples/verl/run_grpo.sh` as far as it goes without a GPU: verl's real configuration, and a real reward loop."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from transformers import PreTrainedTokenizerFast
from verl.experimental.reward_loop import migrate_legacy_reward_impl
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config

from freewheel.judge.testing import JudgeProfile, MockJudge

from .stage import Answer, columns, reward_loop, rollouts, scores, text_of

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]

SCRIPT = Path(__file__).parents[3] / "examples/verl/run_grpo.sh"


def arguments(tmp_path: Path, *more: str, **variables: str) -> list[str]:
    """What the script calls Python with."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHON": str(python), **variables}
    done = subprocess.run([SCRIPT, *more], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def composed(overrides: list[str]) -> DictConfig:
    with initialize_config_module(version_base=None, config_module="verl.trainer.config"):
        return compose("ppo_trainer", overrides=overrides)


def test_the_script_reports_what_is_missing(tmp_path: Path) -> None:
    done = subprocess.run([SCRIPT], capture_output=True, text=True, env={"PATH": os.environ["PATH"], "HOME": "/"})
    assert done.returncode != 0 and "JUDGE_URL" in done.stderr


def test_the_script_starts_a_valid_verl_run_that_freewheel_scores(
    ray_session: None, tokenizer: PreTrainedTokenizerFast, tokenizer_path: Path, tmp_path: Path
) -> None:
    with MockJudge(JudgeProfile(scores={"unratable": "?", "x": "7"})).in_process() as judge:
        told = arguments(
            tmp_path,
            "reward.num_workers=2",  # the machine's; all else is the script's
            MODEL=str(tokenizer_path),
            JUDGE_URL=judge.url,
            JUDGE_MODEL="judge",
            OPENAI_API_KEY="EMPTY",
        )
        assert told[:2] == ["-m", "verl.trainer.main_ppo"]
        assert not any("EMPTY" in argument for argument in told), "verl prints its configuration"
        config = composed(told[2:])
        validate_config(
            config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config)
        )
        texts = [*map(text_of, (20, 20, 20, 30, 30, 30)), "unratable xxxxxxx #### 4", text_of(50)]
        with reward_loop(migrate_legacy_reward_impl(config)) as loop:
            result = loop.compute_rm_score(rollouts(tokenizer, [Answer(text, "a") for text in texts]))
    # The median of 20, 20, 20, 24, 30, 30, 30, 50 is 27: 50 lies beyond 50% of it, the others within 30%.
    mean = round((6 * 1.7 + 1.2) / 7, 5)
    assert scores(result) == [1.7] * 6 + [mean, 1.2]
    assert columns(result)["judge_status"] == ["scored"] * 6 + ["failed", "scored"]
