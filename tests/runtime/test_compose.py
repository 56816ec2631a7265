"""A YAML file, a command line and a run directory become a config, and Hydra leaves no trace of itself."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest
import yaml
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hypothesis import example, given, settings
from hypothesis import strategies as st

from freewheel.errors import ConfigError
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
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.yaml").write_text("trainer:\n  total_steps: 7\n  groups_per_step: 4\noptimizer:\n  lr: 1e-5\n")
    return tmp_path


def refused(*overrides: str, **where: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        compose(overrides, **where)
    return caught.value


def changes(*overrides: str, **where: Any) -> dict[str, Any]:
    return {key: new for key, (_, new) in find_differences(TrainConfig(), compose(overrides, **where)).items()}


def test_without_anything_the_schema_is_the_config():
    assert compose() == TrainConfig()


def test_a_file_goes_over_the_schema_and_an_override_over_the_file(folder: Path):
    found = changes("trainer.total_steps=9", "rollout.n=4", config_path=folder, config_name="mine")
    assert found == {
        "trainer.total_steps": 9,
        "trainer.groups_per_step": 4,
        "optimizer.lr": 1e-5,
        "rollout.n": 4,
    }


def test_the_last_of_two_overrides_holds():
    assert changes("seed=1", "seed=2") == {"seed": 2}


def test_a_path_is_relative_to_the_working_directory_and_a_name_may_have_its_ending(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(folder.parent)
    assert compose(config_path=folder.name, config_name="mine.yaml").trainer.total_steps == 7


def test_a_file_may_build_on_one_of_the_package_and_interpolate(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STEPS", "12")
    text = "defaults: [sync, _self_]\ntrainer: {total_steps: '${oc.decode:${oc.env:STEPS}}'}\nseed: ${rollout.n}\n"
    (folder / "built.yaml").write_text(text)
    found = changes("rollout.n=6", config_path=folder, config_name="built")
    assert found == {"mode": "sync", "trainer.total_steps": 12, "seed": 6, "rollout.n": 6}


def test_a_folder_of_the_users_is_a_group_of_choices(folder: Path):
    (folder / "size").mkdir()
    (folder / "size" / "small.yaml").write_text("# @package _global_\ntrainer: {groups_per_step: 2}\n")
    assert compose(["+size=small"], config_path=folder, config_name="mine").trainer.groups_per_step == 2


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizer.betas=[0.8,0.9]", {"optimizer.betas": (0.8, 0.9)}),
        ("trainer.save_every_steps=null", {"trainer.save_every_steps": None}),
        ("optimizer.lr=1e-5", {"optimizer.lr": 1e-5}),
        ('data.system_prompt="a, b = [c]"', {"data.system_prompt": "a, b = [c]"}),
        ("reward.on_failure=fallback: -1.0", {"reward.on_failure": "fallback: -1.0"}),
        ("trainer={total_steps: 3, groups_per_step: 2}", {"trainer.total_steps": 3, "trainer.groups_per_step": 2}),
        ("+seed=4", {"seed": 4}),
        ("++seed=4", {"seed": 4}),
        ("~trainer.total_steps", {}),
        ("data.chat_template=on", {"data.chat_template": "on"}),
        ("reward.judge.penalty_scale=0.5", {"reward.judge": {"penalty_scale": 0.5}}),
    ],
)
def test_overrides_have_hydras_grammar(override: str, expected: dict[str, Any]):
    assert changes(override) == expected


def test_a_tilde_takes_back_what_a_file_says(folder: Path):
    found = changes("~optimizer.lr", "~trainer.groups_per_step", config_path=folder, config_name="mine")
    assert found == {"trainer.total_steps": 7}


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
def test_a_mapping_of_the_users_own_that_is_given_whole_replaces_what_was_there(
    tmp_path: Path, overrides: list[str], expected: dict[str, Any]
):
    before = to_config({"rollout": {"engine": "vllm", "vllm": {"enforce_eager": True}}})
    assert compose(overrides, base=before).rollout.vllm == expected, "a run that is resumed"
    (tmp_path / "mine.yaml").write_text("rollout: {engine: vllm, vllm: {enforce_eager: true}}\n")
    assert compose(overrides, config_path=tmp_path, config_name="mine").rollout.vllm == expected


def test_which_mappings_are_the_users_own():
    assert mapping_keys() == {"rollout.vllm", "reward.judge", "observe.alerts"}
    judge = compose(["reward.judge={penalty_scale: 0.5}", "observe.alerts={queue_size: {above: 5}}"])
    assert judge.reward.judge == {"penalty_scale": 0.5} and set(judge.observe.alerts) == {"queue_size"}


def test_settings_inside_what_is_off_by_default_turn_it_on():
    assert compose(["model.lora.rank=4"]).model.lora is not None
    assert compose(["observe.alerts.queue_size.above=900"]).observe.alerts["queue_size"].above == 900


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trainer.total_step=3", "trainer.total_step = 3: unknown key; did you mean trainer.total_steps?"),
        ("trainer.total_steps=many", "trainer.total_steps = 'many': give a whole number"),
        ("trainer.total_steps=2.5", "trainer.total_steps = 2.5: give a whole number"),
        ("trainer.total_steps=0", "trainer.total_steps = 0: give a whole number of at least 1"),
        ("mode=synk", "mode = 'synk': give sync, one_step_off or fully_async"),
        ("optimizer.betas=[0.9]", "optimizer.betas = [0.9]: give a list of 2"),
        ("trainer.total_steps", "write key=value"),
        ("trainer.total_steps=[1", "write key=value"),
        ("=3", "write key=value"),
        ("seed=1,2", "seed = '1,2': a run takes one value"),
        ("~nothing", "'~nothing'"),
        ("data.system_prompt=${nothing.here}", "data.system_prompt = \"Interpolation key 'nothing.here' not found\""),
        ("data.system_prompt=${oc.env:NOT_SET_ANYWHERE}", "data.system_prompt = "),
        ("hydra.run.dir=elsewhere", "hydra.run.dir = 'elsewhere': Hydra merges settings here and does nothing else"),
        ("+nothing@model=x", "'nothing'"),
    ],
)
def test_an_override_that_cannot_work_is_refused_with_a_remedy(override: str, says: str):
    assert says in str(refused(override))


def test_a_key_on_the_command_line_is_never_shown():
    for override in ("reward.judge.api_key=sk-secret", "reward.judge.api_key=[sk-secret", "api_key=sk-secret"):
        assert "sk-secret" not in str(refused(override))


def test_a_name_or_a_folder_that_is_not_there_is_told_with_what_is(folder: Path):
    assert "freewheel comes with cluster, default, gsm8k, sync" in str(refused(config_name="clusters"))
    assert f"{folder} comes with mine" in str(refused(config_path=folder, config_name="yours"))
    assert refused(config_path=folder / "nowhere").key == "--config-path"
    assert "give its folder" in str(refused(config_path=folder / "mine.yaml"))


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("trainer:\n  total_steps: 3\n   keep_last: 2\n", 3, "not YAML"),
        ("seed: 1\nmode: sync\nseed: 2\n", 3, "seed is given twice"),
        ("a: [1, 2\n", 2, "not YAML"),
        ("\tseed: 1\n", 1, "not YAML"),
    ],
)
def test_a_file_that_is_not_yaml_is_told_by_its_line(folder: Path, text: str, line: int, says: str):
    (folder / "bad.yaml").write_text(text)
    error = refused(config_path=folder, config_name="bad")
    assert f"bad.yaml:{line}'" in str(error) and says in str(error)


def test_a_bad_file_that_another_one_names_is_told_by_its_own_line(folder: Path):
    (folder / "first.yaml").write_text("defaults: [second, _self_]\n")
    (folder / "second.yaml").write_text("seed: 1\n a: 2\n")
    assert "second.yaml:2'" in str(refused(config_path=folder, config_name="first"))
    (folder / "first.yaml").write_text("defaults: [third, _self_]\n")
    assert "third" in str(refused(config_path=folder, config_name="first"))


@pytest.mark.parametrize(("text", "says"), [("- 1\n", "must hold keys"), ("hydra: {run: {dir: x}}\n", "Hydra merges")])
def test_a_file_of_another_kind_is_refused(folder: Path, text: str, says: str):
    (folder / "other.yaml").write_text(text)
    assert says in str(refused(config_path=folder, config_name="other"))


def test_an_empty_file_is_the_defaults(folder: Path):
    (folder / "empty.yaml").write_text("# nothing yet\n")
    assert compose(config_path=folder, config_name="empty") == TrainConfig()


def test_hydra_leaves_no_trace(folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(elsewhere)
    handlers, stored = list(logging.getLogger().handlers), set(ConfigStore.instance().repo)
    compose(["seed=1"], config_path=folder, config_name="mine")
    refused("seed=x", config_path=folder, config_name="mine")
    refused("data.system_prompt=${no}")
    assert Path.cwd() == elsewhere and not list(elsewhere.iterdir())
    assert logging.getLogger().handlers == handlers
    assert not GlobalHydra.instance().is_initialized()
    assert {name for name in ConfigStore.instance().repo if "freewheel" in name} == set() and stored


def test_an_application_keeps_its_own_hydra(folder: Path):
    with initialize_config_dir(config_dir=str(folder), version_base="1.3"):
        before = GlobalHydra.instance().hydra
        compose(["seed=1"])
        assert GlobalHydra.instance().hydra is before


@pytest.mark.parametrize("name", configs())
def test_files_of_the_package_are_valid_and_repeat_no_default(name: str):
    values = yaml.safe_load((PACKAGED / f"{name}.yaml").read_text())
    given = sum(len(section) if isinstance(section, dict) else 1 for section in values.values())
    assert len(changes(config_name=name)) == given, "each key of it changes something"


def test_the_cluster_is_the_one_that_users_know():
    config = compose(config_name="cluster")
    assert (config.trainer.n_gpus_per_node, config.trainer.nnodes, config.trainer.device) == (4, 2, "cuda")
    assert (config.rollout.n_gpus_per_node, config.rollout.nnodes) == (2, 1)


# -- a run's own file -------------------------------------------------------------------------------------------------

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip) | st.sampled_from(
    [
        "${mode}",
        r"\${a}",
        r"\\${b}",
        "${",
        "x${",
        "a: b",
        "- 1",
        "null",
        "1e-5",
        "true",
        "on",
        "#",
        "'",
        '"',
        " x ",
        "!!x",
    ]
)


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    options = [*(get_args(kind) if get_origin(kind) not in (Literal, dict, list, tuple) else ()), kind]
    found: list[st.SearchStrategy[Any]] = []
    for option in options:
        if get_origin(option) is Literal:
            found.append(st.sampled_from(get_args(option)))
        elif option in SIMPLE:
            found.append(SIMPLE[option])
        elif get_origin(option) is tuple:
            found.append(st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)).map(list))
        elif get_origin(option) is list:
            found.append(st.lists(TEXTS, min_size=1, max_size=3))
    return st.one_of(found) if found else st.nothing()


SIMPLE: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(1, 40),
    float: st.floats(1e-12, 1),
    str: TEXTS,
    type(None): st.none(),
}


def changed(struct: Any = TrainConfig) -> st.SearchStrategy[dict[str, Any]]:
    """Any keys of the schema with values of their types; most of them are possible together."""
    parts: dict[str, st.SearchStrategy[Any]] = {}
    for field in msgspec.structs.fields(struct):
        inner = section_of(field.type)
        strategy = changed(inner) if inner is not None else values_of(field.type)
        if not strategy.is_empty:
            parts[field.name] = strategy
    return st.fixed_dictionaries({}, optional=parts)


def possible(values: dict[str, Any]) -> TrainConfig:
    """Key by key, leaving out what the rest does not go with."""
    kept: dict[str, Any] = {}
    for section, wanted in values.items():
        for key, value in wanted.items() if isinstance(wanted, dict) else [(None, wanted)]:
            attempt = msgspec.json.decode(msgspec.json.encode(kept))
            if key is None:
                attempt[section] = value
            else:
                attempt.setdefault(section, {})[key] = value
            try:
                to_config(attempt)
            except ConfigError:
                continue
            kept = attempt
    return to_config(kept)


@settings(max_examples=60, deadline=None)
@example({"model": {"path": "0\x85"}})
@example({"data": {"system_prompt": " \u2028a\u2029\r\x85b\n"}})
@given(changed())
def test_a_run_reads_back_what_it_wrote_whatever_the_settings(tmp_path_factory: Any, values: dict[str, Any]):
    config = possible(values)
    path = tmp_path_factory.getbasetemp() / "round-trip.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load(path) == config


@settings(max_examples=10, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=50))
def test_text_of_a_run_that_is_resumed_is_not_interpolated_again(texts: list[str]):
    config = to_config({"data": {"system_prompt": texts[0]}, "model": {"lora": {"target_modules": texts}}})
    assert compose(["seed=3"], base=config) == to_config(config.to_dict() | {"seed": 3})


def test_a_file_that_a_person_edited_is_checked_as_a_new_one(tmp_path: Path):
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
