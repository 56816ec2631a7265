"""Configurations are read, merged, checked and written; every error names its key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from freewheel.errors import ConfigError
from freewheel.rollout.reward_stage import GroupPolicy
from freewheel.runtime.config import TrainConfig
from freewheel.runtime.config_files import (
    PACKAGED,
    compose,
    configs,
    find_differences,
    load,
    mapping_keys,
    section_of,
    to_config,
    to_yaml,
    walk_keys,
)

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


def test_documented_keys_have_their_documented_defaults():
    section = TrainConfig().async_training
    found = {key: getattr(section, key) for key in PROMISED}
    assert found == PROMISED and [*map(type, found.values())] == [*map(type, PROMISED.values())]


def wrong_for(kind: Any) -> Any:
    """A value that no key of this type takes."""
    return object() if section_of(kind) else {"neither": "text nor number"} if "dict" not in str(kind) else 3.5


KINDS = dict(walk_keys())


@pytest.mark.parametrize("key", KINDS)
def test_a_value_of_a_wrong_type_is_refused_with_key_and_remedy(key: str):
    error = refused({key: wrong_for(KINDS[key])})
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
        ({"trainer.total_steps": 2.5}, "trainer.total_steps = 2.5: give a whole number"),
        ({"trainer.total_steps": 1e9}, "give a whole number from 1 to 1000000000: 1000000000"),
        ({"trainer.total_steps": 10**22}, "give a whole number from 1 to 1000000000"),
        ({"model.path": "???"}, "the file marks this value as one that you must give"),
    ],
)
def test_an_unknown_key_is_refused_with_a_suggestion(settings: dict[str, Any], says: str):
    assert says in str(refused(settings))


OUT_OF_RANGE: dict[Any, str] = {
    -1: "seed rollout.top_k rollout.n_gpus_per_node async_training.verify_every_syncs eval.prompts"
    " async_training.staleness_threshold",
    -0.1: "async_training.sync_retry_delay eval.temperature",
    0: "data.epochs data.max_prompt_tokens rollout.n rollout.slots rollout.tensor_parallel_size trainer.total_steps"
    " trainer.keep_last trainer.world_size trainer.save_every_steps async_training.max_queue_size"
    " async_training.selection_window async_training.sync_every_steps model.lora.rank"
    " rollout.temperature reward.timeout_s optimizer.lr async_training.batch_timeout observe.statistics_every_s"
    " rollout.gpu_memory_share",
    1.0: "algorithm.clip_low",
    1.5: "rollout.top_p rollout.gpu_memory_share",
    70_000: "observe.prometheus_port",
    2**64: "seed",
    float("nan"): "async_training.sync_timeout",
    " ": "model.path ray.address",
    "another": "mode data.too_long rollout.replicas rollout.gpu_memory_share algorithm.name trainer.compile"
    " async_training.weight_transport",
    "fallback: much": "reward.on_failure",
    (): "rollout.urls",
    ("127.0.0.1:8000",): "rollout.urls",
    ("http://127.0.0.1:8000?api_key=secret",): "rollout.urls",
    (0.9, 1.0): "optimizer.betas",
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for value, keys in OUT_OF_RANGE.items() for key in keys.split()]
)
def test_a_value_out_of_range_is_refused_by_its_full_key(key: str, value: Any):
    error = refused({key: list(value) if isinstance(value, tuple) else value})
    assert error.key.startswith(key) and "secret" not in str(error)


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
    ("rollout.replicas", {"rollout.engine": "vllm", "rollout.urls": ["http://127.0.0.1:8000"], "rollout.replicas": 2}),
    ("trainer.world_size", {"trainer.world_size": 2, "trainer.n_gpus_per_node": 4}),
    ("rollout.n", {"rollout.n": 1}),
    ("rollout.n", {"rollout.n": 1, "algorithm.name": "reinforce_pp"}),
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
def test_two_contradicting_keys_are_refused(key: str, settings: dict[str, Any]):
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
        {"rollout.n": 1, "algorithm.name": "reinforce_pp", "algorithm.baseline": "batch"},
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
def test_limiting_values_are_accepted(settings: dict[str, Any]):
    taken = to_config(nested(settings)).to_dict()
    for path, value in settings.items():
        found: Any = taken
        for name in path.split("."):
            found = found[name]
        assert found == value


@given(st.sampled_from(["sync", "one_step_off", "fully_async"]), st.integers(0, 4), st.integers(0, 6))
def test_the_lag_of_every_accepted_configuration_is_within_its_bound(mode: str, threshold: int, allowed: int):
    versions = {"staleness_threshold": threshold, "max_staleness_allowed": allowed}
    try:
        config = to_config({"mode": mode, "async_training": versions})
    except ConfigError:
        assert mode == "fully_async" and allowed < threshold
    else:
        assert config.bounds.max_lag <= config.bounds.max_lag_allowed


def test_judge_settings_are_checked_by_their_own_schema():
    assert refused({"reward.judge.outer_ratio": 0.1}).key == "reward.judge.outer_ratio"
    assert refused({"reward.judge.nope": 1}).key == "reward.judge.nope"
    assert "OPENAI_API_KEY" in str(refused({"reward.judge.api_key": "a key"})), "tests/test_security.py has all places"
    judged = to_config(nested({"reward.judge.api_endpoint": "http://127.0.0.1:1/v1", "reward.judge.judge.reasks": 2}))
    assert judged.reward.judge == {"api_endpoint": "http://127.0.0.1:1/v1", "judge": {"reasks": 2}}


def test_yamls_reading_of_bare_words_is_understood():
    assert to_config({"data": {"chat_template": True}}).data.chat_template == "on"
    assert to_config({"data": {"chat_template": False}}).data.chat_template == "off"
    on_failure = to_config({"reward": {"on_failure": {"fallback": -1.0}}}).reward.on_failure
    assert GroupPolicy.of(on_failure, 0).on_failure == -1.0
    assert to_config({"trainer": None}) == TrainConfig(), "a section whose keys are all commented out"
    assert to_config({"model": {"lora": None}}).model.lora is None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.yaml").write_text("trainer:\n  total_steps: 7\n  groups_per_step: 4\noptimizer:\n  lr: 1e-5\n")
    return tmp_path


def refused_overrides(*overrides: str, **where: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        compose(overrides, **where)
    return caught.value


def changes(*overrides: str, **where: Any) -> dict[str, Any]:
    return {key: new for key, (_, new) in find_differences(TrainConfig(), compose(overrides, **where)).items()}


def test_the_default_configuration_is_the_schemas(tmp_path: Path):
    assert compose() == TrainConfig() and (TrainConfig().lr, compose(["model.path=org/name"]).lr) == (3e-4, 1e-6)
    (tmp_path / "empty.yaml").write_text("# nothing yet\n")
    assert compose(config_path=tmp_path, config_name="empty") == TrainConfig()


def test_overrides_win_over_files_and_files_over_the_schema(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder.parent)
    overrides = ("rollout.n=3", "trainer.total_steps=9", "rollout.n=4", "~optimizer.lr")
    found = changes(*overrides, config_path=folder.name, config_name="mine.yaml")
    assert found == {"trainer.total_steps": 9, "trainer.groups_per_step": 4, "rollout.n": 4}


def test_a_file_may_list_others_and_refer_to_keys_and_variables(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STEPS", "12")
    text = "defaults: [sync, {}]\ntrainer: {{total_steps: '${{oc.env:STEPS}}'}}\nseed: ${{rollout.n}}\n"
    (folder / "built.yaml").write_text(text.format("_self_"))
    found = changes("rollout.n=6", "run_dir=runs/${mode}-${oc.env:NOT_SET,1}", config_path=folder, config_name="built")
    expected = {"mode": "sync", "trainer.total_steps": 12, "seed": 6, "rollout.n": 6}
    assert found == expected | {"run_dir": "runs/sync-1"}
    (folder / "first.yaml").write_text("defaults: [mine, built]\noptimizer: {lr: 1e-6}\n")
    found = changes("rollout.n=6", config_path=folder, config_name="first")
    assert found == expected | {"trainer.groups_per_step": 4, "optimizer.lr": 1e-6}, "the later file wins"
    (folder / "last.yaml").write_text("defaults: [_self_, mine]\noptimizer: {lr: 1e-6}\n")
    assert changes(config_path=folder, config_name="last")["optimizer.lr"] == 1e-5


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizer.betas=[0.8,0.9]", {"optimizer.betas": (0.8, 0.9)}),
        ("trainer.save_every_steps=null", {"trainer.save_every_steps": None}),
        ("optimizer.lr=1e-5", {"optimizer.lr": 1e-5}),
        ('data.system_prompt="a, b = [c]"', {"data.system_prompt": "a, b = [c]"}),
        ("data.system_prompt=Be brief, please: yes", {"data.system_prompt": "Be brief, please: yes"}),
        ("reward.on_failure=fallback: -1.0", {"reward.on_failure": "fallback: -1.0"}),
        ("trainer={total_steps: 3, groups_per_step: 2}", {"trainer.total_steps": 3, "trainer.groups_per_step": 2}),
        ("trainer={total_steps:3,groups_per_step:2}", {"trainer.total_steps": 3, "trainer.groups_per_step": 2}),
        (
            "reward.judge={model_name:m,judge:{sampling:{seed:1}}}",
            {"reward.judge": {"model_name": "m", "judge": {"sampling": {"seed": 1}}}},
        ),
        ("run_dir=2026-11-19", {"run_dir": "2026-11-19"}),
        ("data.system_prompt=", {"data.system_prompt": ""}),
        ("+seed=4", {"seed": 4}),
        ("++seed=4", {"seed": 4}),
        ("~trainer.total_steps", {}),
        ("data.chat_template=on", {"data.chat_template": "on"}),
        ("reward.judge.penalty_scale=0.5", {"reward.judge": {"penalty_scale": 0.5}}),
    ],
)
def test_an_override_is_a_key_and_a_yaml_value(override: str, expected: dict[str, Any]):
    assert changes(override) == expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["rollout.vllm={seed: 3}"], {"seed": 3}),
        (["rollout.vllm.seed=3"], {"enforce_eager": True, "seed": 3}),
        (["~rollout.vllm", "rollout.vllm={seed: 3}"], {"seed": 3}),
        (["~rollout.vllm", "rollout.vllm.seed=3"], {"seed": 3}),
        (["~rollout.vllm"], {}),
        (["rollout.vllm={}"], {}),
    ],
)
def test_a_whole_mapping_replaces_the_earlier_one(tmp_path: Path, overrides: list[str], expected: dict[str, Any]):
    before = to_config({"rollout": {"engine": "vllm", "vllm": {"enforce_eager": True}}})
    assert compose(overrides, base=before).rollout.vllm == expected, "a run that is resumed"
    (tmp_path / "mine.yaml").write_text("rollout: {engine: vllm, vllm: {enforce_eager: true}}\n")
    assert compose(overrides, config_path=tmp_path, config_name="mine").rollout.vllm == expected


def test_a_key_in_an_optional_section_or_a_free_mapping_is_taken():
    assert mapping_keys() == ["rollout.vllm", "reward.judge", "observe.alerts"]
    found = compose(["reward.judge={penalty_scale: 0.5}", "observe.alerts.queue_size.above=900", "model.lora.rank=4"])
    assert found.reward.judge == {"penalty_scale": 0.5}
    assert found.observe.alerts["queue_size"].above == 900
    assert found.model.lora is not None and found.model.lora.rank == 4


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trainer.total_steps=many", "trainer.total_steps = 'many': give a whole number"),
        ("mode=synk", "mode = 'synk': give sync, one_step_off or fully_async"),
        ("optimizer.betas=[0.9]", "optimizer.betas = [0.9]: give a list of 2"),
        ("trainer.total_steps", "write key=value"),
        ("trainer.total_steps=[1", "write key=value"),
        ("=3", "write key=value"),
        ("seed=1,2", "seed = '1,2': give a whole number"),
        ("~nothing", "override = '~nothing': there is nothing to restore: no such key"),
        ("~model.lora.rank", "there is nothing to restore"),
        ("data.system_prompt=${nothing.here}", "= '${nothing.here}': correct ${…}: give a full key, or oc.env:NAME"),
        ("data.system_prompt=${seed.here}", "correct ${…}"),
        ("data.system_prompt=${data.system_prompt}", "correct ${…}"),
        ("data.system_prompt=${oc.env:NOT_SET_ANYWHERE}", "correct ${…}"),
        ("hydra.run.dir=elsewhere", "hydra = {'run': {'dir': 'elsewhere'}}: unknown key"),
    ],
)
def test_an_invalid_override_is_refused_with_a_remedy(override: str, says: str):
    assert says in str(refused_overrides(override))


def test_a_missing_file_or_folder_is_reported_with_the_existing_ones(folder: Path):
    assert "freewheel comes with cluster, default, gsm8k, sync" in str(refused_overrides(config_name="clusters"))
    assert f"{folder} comes with mine" in str(refused_overrides(config_path=folder, config_name="yours"))
    assert refused_overrides(config_path=folder / "nowhere").key == "--config-path"
    assert "give its folder" in str(refused_overrides(config_path=folder / "mine.yaml"))


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("trainer:\n  total_steps: 3\n   keep_last: 2\n", 3, "not YAML"),
        ("seed: 1\nmode: sync\nseed: 2\n", 3, "seed is given twice"),
        ("a: [1, 2\n", 2, "not YAML"),
        ("\tseed: 1\n", 1, "not YAML"),
    ],
)
def test_invalid_yaml_is_reported_with_its_line(folder: Path, text: str, line: int, says: str):
    (folder / "bad.yaml").write_text(text)
    error = refused_overrides(config_path=folder, config_name="bad")
    assert f"bad.yaml:{line}'" in str(error) and says in str(error)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- 1\n", "the file must hold keys with values"),
        ("defaults: [bad, _self_]\n", "bad.yaml:2': this is not YAML"),
        ("defaults: [nowhere]\n", "other.yaml: defaults = 'nowhere': there is no nowhere.yaml in "),
        ("defaults: [other]\n", "other.yaml: defaults = 'other': it lists itself"),
        ("defaults: [size: small]\n", "list names of files, such as [sync, _self_]"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(folder: Path, text: str, says: str):
    (folder / "bad.yaml").write_text("seed: 1\n a: 2\n")
    (folder / "other.yaml").write_text(text)
    assert says in str(refused_overrides(config_path=folder, config_name="other"))


@pytest.mark.parametrize("name", configs())
def test_packaged_files_are_valid_and_repeat_no_default(name: str):
    values = yaml.safe_load((PACKAGED / f"{name}.yaml").read_text())
    given = sum(len(section) if isinstance(section, dict) else 1 for section in values.values())
    found = changes(config_name=name)
    assert len(found) == given, "each key of it changes something"
    if name == "cluster":  # as it was promised
        wanted = {"trainer.n_gpus_per_node": 4, "trainer.nnodes": 2, "trainer.device": "cuda"}
        assert found == wanted | {"rollout.n_gpus_per_node": 2, "rollout.device": "cuda", "ray.address": "auto"}


# -- a run's own file -------------------------------------------------------------------------------------------------

HARD = ["${mode}", r"\${a}", r"\\${b}", "${", "x${", "a: b", "- 1", "null"]
HARD += ["1e-5", "true", "on", "#", "'", '"', " x ", "!!x"]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip) | st.sampled_from(HARD)


@settings(max_examples=60, deadline=None)
@example(["0\x85", " \u2028a\u2029\r\x85b\n"], 1e-5)
@given(st.lists(TEXTS, min_size=1, max_size=4), st.floats(1e-12, 1))
def test_a_written_configuration_reads_back_the_same(tmp_path_factory: Any, texts: list[str], number: float):
    first, last = texts[0], texts[-1]
    values = {
        "model": {"path": first, "lora": {"target_modules": texts}},
        "data": {"task": "rows", "train": first, "system_prompt": last},
        "rollout": {"engine": "vllm", "vllm": {first: last, "number": number}},
        "optimizer": {"lr": number},
        "observe": {"alerts": {last: {"above": number}}},
    }
    config = to_config(values)
    path = tmp_path_factory.getbasetemp() / "round-trip.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load(path) == config == to_config(config.to_dict())


@settings(max_examples=10, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=50))
def test_text_of_a_resumed_run_is_not_interpolated_again(texts: list[str]):
    config = to_config({"data": {"system_prompt": texts[0]}, "model": {"lora": {"target_modules": texts}}})
    assert compose(["seed=3"], base=config) == to_config(config.to_dict() | {"seed": 3})


def test_an_edited_configuration_is_checked_again(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text("optimizer: {lr: 1e-5}\n")
    assert load(path).optimizer.lr == 1e-5
    path.write_text("optimizer: {lr: -1}\n")
    with pytest.raises(ConfigError, match=r"optimizer\.lr = -1"):
        load(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "nowhere.yaml")
    path.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(path)
