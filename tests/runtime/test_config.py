"""The schema: the defaults that users were promised, and every setting that cannot work refused by name."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any, get_type_hints

import msgspec
import pytest

from freewheel.errors import ConfigError
from freewheel.rollout.reward_stage import GroupPolicy
from freewheel.runtime import config as schema
from freewheel.runtime.config import TrainConfig
from freewheel.runtime.config_files import all_keys, section_of, to_config

PROMISED = {
    "staleness_threshold": 3,
    "max_staleness_allowed": 5,
    "max_queue_size": 1000,
    "min_batch_count": 1,
    "batch_timeout": 30.0,
    "generation_timeout": 30.0,
    "batch_generation_interval": 0.1,
    "max_sync_retries": 3,
    "sync_timeout": 30.0,
    "sync_retry_delay": 1.0,
}


def nested(settings: dict[str, Any]) -> dict[str, Any]:
    """From dotted keys to sections."""
    values: dict[str, Any] = {}
    for path, value in settings.items():
        *sections, name = path.split(".")
        inner = values
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return values


def refused(settings: dict[str, Any]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        to_config(nested(settings))
    return caught.value


@pytest.mark.parametrize("key", PROMISED)
def test_keys_that_users_know_have_the_defaults_they_know(key: str):
    value = getattr(TrainConfig().async_training, key)
    assert value == PROMISED[key] and type(value) is type(PROMISED[key])


OURS = [one for one in vars(schema).values() if section_of(one) and one.__module__ == schema.__name__]


@pytest.mark.parametrize("struct", OURS, ids=lambda one: one.__name__)
def test_every_key_says_what_it_means(struct: type):
    body = ast.parse(textwrap.dedent(inspect.getsource(struct))).body[0].body  # type: ignore[attr-defined]
    for field, below in zip(body, [*body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and section_of(get_type_hints(struct)[field.target.id]) is None:
            assert isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant), field.target.id


def wrong_for(kind: Any) -> Any:
    """A value that no key of this type takes."""
    return object() if section_of(kind) else {"neither": "text nor number"} if "dict" not in str(kind) else 3.5


def kinds(struct: Any = TrainConfig, path: str = "") -> dict[str, Any]:
    found = {}
    for name, kind in get_type_hints(struct).items():
        inner = section_of(kind)
        if inner is None:
            found[path + name] = kind
        else:
            found |= kinds(inner, f"{path}{name}.")
    return found


@pytest.mark.parametrize("key", list(all_keys()))
def test_a_wrong_type_is_refused_with_the_full_key_and_what_would_be_right(key: str):
    error = refused({key: wrong_for(kinds()[key])})
    assert error.key == key
    assert ": give " in str(error) or ": choose " in str(error)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"trainer.total_step": 5}, "trainer.total_step = 5: unknown key; did you mean trainer.total_steps?"),
        ({"staleness_threshold": 2}, "did you mean async_training.staleness_threshold?"),
        ({"rolout": {"n": 4}}, "did you mean rollout?"),
        ({"qqq": 1}, "unknown key; there are mode, seed,"),
        ({"observe.alerts.queue_size.abov": 1}, "did you mean observe.alerts.queue_size.above?"),
        ({"rollout.api_key": "sk-secret"}, "rollout.api_key = '<hidden>': unknown key"),
        ({"trainer": 5}, "trainer = 5: this is a section: give its keys"),
        ({"trainer.total_steps": 1e9}, "give a whole number: 1000000000"),
        ({"trainer.total_steps": 10**22}, "give at most 1000000000"),
        ({"model.path": "???"}, "the file marks this value as one that you must give"),
    ],
)
def test_what_is_refused_is_refused_with_what_was_probably_meant(settings: dict[str, Any], says: str):
    assert says in str(refused(settings))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", -1),
        ("seed", 2**64),
        ("mode", "synchronous"),
        ("model.path", " "),
        ("model.lora", {"rank": 0}),
        ("data.epochs", 0),
        ("data.max_prompt_tokens", 0),
        ("data.too_long", "cut"),
        ("rollout.n", 0),
        ("rollout.temperature", 0.0),
        ("rollout.top_p", 1.5),
        ("rollout.top_k", -1),
        ("rollout.slots", 0),
        ("rollout.replicas", "many"),
        ("rollout.n_gpus_per_node", -1),
        ("rollout.tensor_parallel_size", 0),
        ("rollout.gpu_memory_share", 1.5),
        ("rollout.gpu_memory_share", "most"),
        ("rollout.urls", []),
        ("rollout.urls", ["127.0.0.1:8000"]),
        ("rollout.urls", ["http://127.0.0.1:8000?api_key=secret"]),
        ("rollout.rollouter_class", "no_colon"),
        ("reward.function", "module:"),
        ("reward.timeout_s", 0.0),
        ("reward.on_failure", "fallback: much"),
        ("algorithm.clip_low", 1.0),
        ("algorithm.name", "sarsa"),
        ("optimizer.lr", 0.0),
        ("optimizer.betas", [0.9, 1.0]),
        ("trainer.total_steps", 0),
        ("trainer.keep_last", 0),
        ("trainer.world_size", 0),
        ("trainer.compile", "fast"),
        ("async_training.weight_transport", "pigeon"),
        ("async_training.verify_every_syncs", -1),
        ("trainer.save_every_steps", 0),
        ("async_training.staleness_threshold", -1),
        ("async_training.max_queue_size", 0),
        ("async_training.batch_timeout", 0.0),
        ("async_training.sync_timeout", float("nan")),
        ("async_training.sync_retry_delay", -0.1),
        ("async_training.selection_window", 0),
        ("async_training.sync_every_steps", 0),
        ("eval.prompts", -1),
        ("eval.temperature", -0.1),
        ("observe.prometheus_port", 70000),
        ("observe.statistics_every_s", 0.0),
        ("ray.address", ""),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_full_key(key: str, value: Any):
    error = refused({key: value})
    assert error.key.startswith(key)


PAIRS: list[tuple[str, dict[str, Any]]] = [
    ("async_training.max_staleness_allowed", {"async_training.max_staleness_allowed": 2}),
    ("async_training.max_queue_size", {"async_training.max_queue_size": 31}),
    ("async_training.max_queue_size", {"async_training.max_queue_size": 100, "async_training.sync_every_steps": 4}),
    ("async_training.min_batch_count", {"async_training.min_batch_count": 5}),
    ("async_training.min_batch_count", {"async_training.min_batch_count": 2, "mode": "sync"}),
    ("async_training.selection_window", {"async_training.selection_window": 66}),
    ("trainer.n_gpus_per_node", {"trainer.n_gpus_per_node": 1, "trainer.device": "cpu"}),
    ("rollout.n_gpus_per_node", {"rollout.n_gpus_per_node": 0, "rollout.device": "cuda"}),
    ("rollout.replicas", {"rollout.replicas": 1, "rollout.n_gpus_per_node": 2}),
    ("rollout.tensor_parallel_size", {"rollout.tensor_parallel_size": 2}),
    ("rollout.gpu_memory_share", {"rollout.gpu_memory_share": 0.5}),
    ("rollout.vllm", {"rollout.vllm": {"enforce_eager": True}}),
    ("rollout.urls", {"rollout.urls": ["http://127.0.0.1:8000"]}),
    (
        "rollout.replicas",
        {"rollout.engine": "vllm", "rollout.urls": ["http://127.0.0.1:8000"], "rollout.replicas": 2},
    ),
    ("trainer.world_size", {"trainer.world_size": 2, "trainer.n_gpus_per_node": 4}),
    ("rollout.n", {"rollout.n": 1}),
    ("algorithm.mini_batches", {"algorithm.mini_batches": 33}),
    ("optimizer.warmup_steps", {"optimizer.warmup_steps": 41}),
    ("optimizer.critic_lr", {"optimizer.critic_lr": 1e-5}),
    ("data.train", {"data.train": "mine.jsonl"}),
    ("data.train", {"data.task": "rows"}),
    ("model.path", {"data.task": "gsm8k"}),
    ("eval.samples", {"eval.samples": 4}),
    ("data.eval_split", {"data.eval_split": "train"}),
    ("observe.alerts.queue_size", {"observe.alerts": {"queue_size": {"above": 1, "below": 2}}}),
    ("observe.alerts.queue_size", {"observe.alerts": {"queue_size": {}}}),
]


@pytest.mark.parametrize(("key", "settings"), PAIRS, ids=[" ".join(settings) for _, settings in PAIRS])
def test_two_keys_that_do_not_agree_are_refused(key: str, settings: dict[str, Any]):
    assert refused(settings).key == key


@pytest.mark.parametrize(
    "settings",
    [
        {"async_training.max_staleness_allowed": 3},
        {"async_training.max_queue_size": 32},
        {"async_training.min_batch_count": 4},
        {"async_training.selection_window": 65},
        {"async_training.max_staleness_allowed": 0, "mode": "one_step_off"},
        {"rollout.n": 1, "algorithm.name": "ppo"},
        {"rollout.replicas": 4, "rollout.n_gpus_per_node": 2},
        {"rollout.engine": "vllm", "rollout.vllm": {"enforce_eager": True}, "rollout.gpu_memory_share": 0.5},
        {"trainer.world_size": 2, "trainer.device": "cpu"},
        {"optimizer.critic_lr": 1e-5, "algorithm.name": "ppo"},
        {"eval.samples": 4, "eval.temperature": 1.0},
        {"data.eval_split": "train", "eval.prompts": 0},
        {"data.task": "my_tasks:task"},
        {"observe.alerts": {"queue_size": {"above": 2, "below": 1}}},
    ],
    ids=lambda settings: " ".join(settings),
)
def test_what_is_just_possible_is_taken(settings: dict[str, Any]):
    taken = to_config(nested(settings)).to_dict()
    for path, value in settings.items():
        found: Any = taken
        for name in path.split("."):
            found = found[name]
        assert found == value


def test_the_bound_of_every_config_that_is_taken_is_within_what_is_allowed():
    for mode in ("sync", "one_step_off", "fully_async"):
        for threshold in range(4):
            for allowed in range(6):
                settings = {
                    "mode": mode,
                    "async_training.staleness_threshold": threshold,
                    "async_training.max_staleness_allowed": allowed,
                }
                try:
                    config = to_config(nested(settings))
                except ConfigError:
                    assert mode == "fully_async" and allowed < threshold
                else:
                    assert config.bounds.max_lag <= config.bounds.max_lag_allowed


def test_a_judge_is_checked_by_its_own_schema_and_named_in_full():
    assert refused({"reward.judge.outer_ratio": 0.1}).key == "reward.judge.outer_ratio"
    assert refused({"reward.judge.nope": 1}).key == "reward.judge.nope"
    judged = to_config(nested({"reward.judge.api_endpoint": "http://127.0.0.1:1/v1", "reward.judge.judge.reasks": 2}))
    assert judged.reward.judge == {"api_endpoint": "http://127.0.0.1:1/v1", "judge": {"reasks": 2}}


@pytest.mark.parametrize("where", ["api_key", "judge.endpoint"])
def test_a_key_is_refused_wherever_it_stands_and_not_shown(where: str):
    inner: Any = "sk-secret" if where == "api_key" else [{"url": "http://a/v1", "api_key": "sk-secret"}]
    error = refused({f"reward.judge.{where}": inner})
    assert "sk-secret" not in str(error) and "OPENAI_API_KEY" in str(error)


def test_what_yaml_makes_of_bare_words_is_understood():
    assert to_config({"data": {"chat_template": True}}).data.chat_template == "on"
    assert to_config({"data": {"chat_template": False}}).data.chat_template == "off"
    on_failure = to_config({"reward": {"on_failure": {"fallback": -1.0}}}).reward.on_failure
    assert GroupPolicy.of(on_failure, 0).fallback == -1.0
    assert to_config({"trainer": None}) == TrainConfig(), "a section whose keys are all commented out"
    assert to_config({"model": {"lora": None}}).model.lora is None


def test_the_learning_rate_goes_by_the_model():
    assert TrainConfig().lr == 3e-4
    assert to_config({"model": {"path": "Qwen/Qwen2.5-0.5B"}}).lr == 1e-6
    assert to_config({"optimizer": {"lr": 1e-2}}).lr == 1e-2


def test_a_config_survives_the_way_through_plain_values():
    config = to_config({"model": {"lora": {"rank": 4}}, "observe": {"alerts": {"queue_size": {"above": 900}}}})
    assert to_config(config.to_dict()) == config
    assert msgspec.json.decode(msgspec.json.encode(config.to_dict()))["model"]["lora"]["rank"] == 4
