"""`LengthPenaltyConfig`: defaults, forms, refused values, and where a key may go."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from freewheel.judge import ConfigError, Secret
from freewheel.judge.rubric import BUILTIN
from freewheel.rewards import LengthPenaltyConfig, LengthPenaltyRewardManager
from freewheel.rewards.config import OnFailure, as_config

from .conftest import KEY, Characters

QIANFAN = "https://qianfan.baidubce.com/v2/chat/completions"
OURS = "https://judge.example/v1/chat/completions"

DEFAULTS = {
    "enable": True,
    "penalty_scale": 1.0,
    "max_penalty": 1.0,
    "peak_ratio": 0.3,
    "outer_ratio": 0.5,
    "enable_openai_reward": None,
    "api_key": None,
    "model_name": "deepseek-v3",
    "api_endpoint": QIANFAN,
    "use_async_io": False,
    "max_concurrent_requests": "auto",
    "reward_coefficient": 1.0,
    "system_prompt": None,
    "judge_gate": "on",
    "batch_timeout_s": 300.0,
    "num_async_workers": None,
}


def test_it_is_a_dataclass_with_the_promised_keys_and_defaults() -> None:
    config = LengthPenaltyConfig()
    assert dataclasses.is_dataclass(config)
    assert {key: getattr(config, key) for key in DEFAULTS} == DEFAULTS


def test_the_rubric_asks_for_one_integer_from_1_to_10_and_a_system_prompt_replaces_only_its_words() -> None:
    rubric = LengthPenaltyConfig().judge_config().loaded_rubric
    assert rubric == BUILTIN["integer"] and "integer" in rubric.system and "10" in rubric.system
    named = LengthPenaltyConfig(system_prompt="Be strict.").judge_config().loaded_rubric
    assert named.system == "Be strict."
    for one in (rubric, named):
        assert (one.low, one.high, one.parser) == (1.0, 10.0, "integer")


def test_the_engine_gets_the_settings_of_the_config() -> None:
    config = LengthPenaltyConfig(
        api_key=KEY,
        model_name="my-judge",
        api_endpoint=OURS,
        max_concurrent_requests=7,
        batch_timeout_s=12.0,
        judge={"placement": "thread", "max_attempts": 3},
    ).judge_config()
    assert (config.endpoints[0].url, config.model, config.concurrency) == (OURS, "my-judge", 7)
    assert (config.batch_deadline_s, config.placement, config.max_attempts) == (12.0, "thread", 3)
    assert config.api_key is not None and config.api_key.reveal() == KEY


# -- forms ------------------------------------------------------------------------------------------------------------

TEXT = f"""
penalty_scale: 0.5
use_async_io: true
judge_gate: off
api_endpoint: {OURS}
on_failure:
  fallback: -1
judge:
  placement: thread
"""
PLAIN = yaml.safe_load(TEXT)


@pytest.mark.parametrize("form", ["dict", "dataclass", "omegaconf", "yaml text", "yaml file", "yaml path"])
def test_every_form_gives_the_same_config(tmp_path: Path, form: str) -> None:
    path = tmp_path / "reward.yaml"
    path.write_text(TEXT)
    given: Any = {
        "dict": PLAIN,
        "dataclass": LengthPenaltyConfig(**PLAIN),
        "omegaconf": OmegaConf.create(PLAIN),
        "yaml text": TEXT,
        "yaml file": str(path),
        "yaml path": path,
    }[form]
    config = LengthPenaltyRewardManager(Characters(), 0, length_penalty_config=given).config
    assert config == LengthPenaltyConfig(**PLAIN)
    assert config.judge_gate == "off" and config.failure_policy == OnFailure("fallback", -1.0)
    assert config is not given


def test_a_node_of_a_larger_omegaconf_file_is_taken_with_its_references_resolved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    whole = OmegaConf.create(
        {"url": OURS, "reward": {"api_endpoint": "${url}", "api_key": "${oc.env:MY_KEY}", "judge": {"reasks": 0}}}
    )
    config = as_config(whole.reward)
    assert config.api_endpoint == OURS and config.judge_config().reasks == 0
    assert config.key is not None and config.key.reveal() == KEY


def test_a_config_is_copied_and_checked_again_when_it_is_given() -> None:
    given = LengthPenaltyConfig(penalty_scale=0.5)
    copied = as_config(given)
    given.penalty_scale, given.outer_ratio = 9.0, 0.1
    assert copied.penalty_scale == 0.5
    with pytest.raises(ConfigError, match="outer_ratio"):
        as_config(given)


# -- refused values ---------------------------------------------------------------------------------------------------


NO_MAPPING = r"length_penalty_config = .<.*OmegaConf node, YAML"
NO_YAML = r"cannot be read as YAML: .* in line \d"
UNKNOWN = r"use_async = True: unknown key; known are .*use_async_io"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *((given, NO_MAPPING) for given in ([1, 2], 7, "- a\n- b", "just words")),
        (Path("nowhere.yaml"), r"nowhere\.yaml.*No such file"),
        *((text, NO_YAML) for text in (f'api_key: "{KEY}', f"api_key: {KEY}: [x", f"\t{KEY}: [")),
        (f"a: b\n  api_key: {KEY}", NO_YAML),
        *((form({"use_async": True}), UNKNOWN) for form in (dict, OmegaConf.create)),
        *(({"judge": {key: KEY}}, rf"judge\.{key}.*give it as") for key in ("endpoint", "model", "api_key")),
        *(({"judge": {key: 1}}, rf"judge\.{key}.*give it as") for key in ("concurrency", "batch_deadline_s")),
        ({"system_prompt": "Rate.", "judge": {"rubric": "integer"}}, "system_prompt.*not both"),
        ({"judge": {"rubrik": "x"}}, r"^judge\.rubrik = 'x': unknown key"),
        *((given, "unknown key") for given in ({"apikey": KEY}, {"api_keys": KEY}, {"judge": {"api_kee_key": KEY}})),
    ],
)
def test_unreadable_values_and_wrong_names_are_refused_without_showing_a_key(
    tmp_path: Path, given: Any, message: str
) -> None:
    forms = [given]
    if isinstance(given, str):
        forms.append(tmp_path / "bad.yaml")
        forms[1].write_text(given)
    for form in forms:
        with pytest.raises(ConfigError, match=message) as caught:
            as_config(form)
        assert KEY not in str(caught.value) and "very-secret" not in str(caught.value)
        assert caught.value.__context__ is None or caught.value.__suppress_context__, "it may quote the text"


def test_outer_ratio_must_be_more_than_peak_ratio_at_construction() -> None:
    for peak, outer in ((0.5, 0.5), (0.3, 0.2), (0.0, 0.0)):
        given = {"peak_ratio": peak, "outer_ratio": outer}
        with pytest.raises(ValueError, match=rf"^outer_ratio = {outer}.*peak_ratio"):
            LengthPenaltyConfig(**given)
        with pytest.raises(ValueError, match=rf"^outer_ratio = {outer}.*peak_ratio"):
            LengthPenaltyRewardManager(None, 0, None, "x", given)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("enable", ["yes", 1, None]),
        ("use_async_io", ["true"]),
        ("enable_openai_reward", ["no"]),
        ("penalty_scale", [-1.0]),
        ("max_penalty", [math.nan]),
        ("peak_ratio", ["0.3"]),
        ("outer_ratio", [math.inf]),
        ("reward_coefficient", [math.nan, True]),
        ("batch_timeout_s", [0, None]),
        ("judge_gate", ["sometimes", 1, None, ["on"]]),
        ("on_failure", ["ignore", "fallback", "fallback: much", None, 0.0]),
        ("on_failure", [{"fallback": math.nan}, {"fallback": True}]),
        ("judge", ["thread"]),
        ("max_concurrent_requests", [0, -1, 1.5, True, "many", "fixed:0"]),
        ("api_endpoint", ["qianfan", "ftp://x/v1", "http://user:pass@host/v1", "", 7]),
        ("api_key", [7, ["sk-x"], {"value": "sk-x"}, b"sk-x", "<key from the api_key argument>"]),
        ("api_key", ["sk-x\nmore", "sk-xключ", "sk-x\x00"]),
    ],
)
def test_an_impossible_value_is_refused_by_its_key_and_no_api_key_is_shown(key: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=f"^{key} = ") as caught:
            as_config({key: value})
        assert caught.value.key == key and "sk-x" not in str(caught.value)


def test_values_that_have_several_forms() -> None:
    for value in (1, 60, "auto", "fixed:8"):
        assert as_config({"max_concurrent_requests": value}).judge_config().concurrency == value
    for word, gate in {"on": "on", "off": "off", "format": "format", "true": "on", "'off'": "off"}.items():
        assert as_config(f"judge_gate: {word}").judge_gate == gate
    for given in ("fallback: -1.5", "fallback:-1.5", {"fallback": -1.5}, OnFailure("fallback", -1.5)):
        assert LengthPenaltyConfig(on_failure=given).failure_policy == OnFailure("fallback", -1.5)


# -- num_async_workers ------------------------------------------------------------------------------------------------


def test_num_async_workers_is_accepted_with_one_warning_that_names_its_replacement() -> None:
    for make in (lambda: LengthPenaltyConfig(num_async_workers=4), lambda: as_config({"num_async_workers": 4})):
        with pytest.warns(FutureWarning, match="max_concurrent_requests"):
            config = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert as_config(config).judge_config().concurrency == "auto"
        LengthPenaltyConfig()


@pytest.mark.parametrize("given", ["{'num_async_workers': 4}", "'num_async_workers: 4'"])
def test_a_user_sees_the_warning_under_the_default_filters(given: str) -> None:
    program = f"from freewheel.rewards.config import as_config; as_config(as_config({given}))"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=env)
    assert done.stderr.count("max_concurrent_requests") == 1


# -- the key ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "key", "judges"),
    [
        ({}, None, False),
        ({"use_async_io": True, "enable_openai_reward": True}, None, False),
        ({"api_key": " "}, None, False),
        ({"api_key": "sk-given"}, "sk-given", True),
        ({"api_key": "sk-given", "api_endpoint": OURS}, "sk-given", True),
        ({"api_key": "sk-given", "enable_openai_reward": False}, "sk-given", False),
        ({"api_endpoint": OURS}, KEY, True),
        ({"api_endpoint": QIANFAN}, KEY, True),  # the default endpoint too, if its owner names it
    ],
)
def test_the_judge_is_on_with_a_key_and_the_environments_key_is_for_a_named_endpoint(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], key: str | None, judges: bool
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    config = LengthPenaltyConfig(**settings)
    assert (config.key and config.key.reveal(), config.judges) == (key, judges)


def test_the_default_endpoint_stays_unnamed_however_a_config_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    ways: list[Callable[[LengthPenaltyConfig], LengthPenaltyConfig]] = [
        lambda config: dataclasses.replace(config, penalty_scale=0.5),
        lambda config: pickle.loads(pickle.dumps(config)),
        copy.copy,
        copy.deepcopy,
        as_config,
        lambda config: as_config(dataclasses.asdict(config)),
        lambda config: LengthPenaltyConfig(
            **{one.name: getattr(config, one.name) for one in dataclasses.fields(config)}
        ),
    ]
    for way in ways:
        assert way(LengthPenaltyConfig()).api_endpoint == QIANFAN and way(LengthPenaltyConfig()).key is None
        assert way(LengthPenaltyConfig(api_endpoint=OURS)).key is not None


def test_a_key_that_pickling_left_out_is_replaced_only_for_a_named_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    copied = pickle.loads(pickle.dumps(LengthPenaltyConfig(api_key="sk-mine")))
    assert copied.key is None
    named = pickle.loads(pickle.dumps(LengthPenaltyConfig(api_key="sk-mine", api_endpoint=OURS)))
    assert named.key is not None and named.key.reveal() == KEY


@pytest.mark.parametrize("given", [KEY, Secret(KEY), f"  {KEY}\n"], ids=["text", "secret", "with blanks"])
def test_the_key_is_in_no_print_and_no_pickle(given: Any) -> None:
    config = LengthPenaltyConfig(api_key=given, api_endpoint=OURS)
    assert config.key is not None and config.key.reveal() == KEY
    manager = LengthPenaltyRewardManager(Characters(), 0, length_penalty_config=config)
    shown = [repr(config), str(config), f"{config}", repr(dataclasses.asdict(config)), repr(vars(config))]
    shown += [repr(dataclasses.astuple(config)), repr(config.judge_config()), repr(config.judge_config().to_dict())]
    shown += [repr(manager), repr(vars(manager))]
    assert not [text for text in shown if KEY in text]
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert KEY.encode() not in pickle.dumps(config, protocol) + pickle.dumps(manager, protocol)


@pytest.mark.parametrize(("text", "cache"), [("false", False), ("0", False), ("true", True), ("", True), (None, True)])
def test_monitor_cache_turns_the_cache_off_unless_the_config_sets_it(
    monkeypatch: pytest.MonkeyPatch, text: str | None, cache: bool
) -> None:
    if text is not None:
        monkeypatch.setenv("MONITOR_CACHE", text)
    assert LengthPenaltyConfig().judge_config().cache is cache
    assert LengthPenaltyConfig(judge={"cache": not cache}).judge_config().cache is not cache
    monkeypatch.setenv("MONITOR_CACHE", "perhaps")
    with pytest.raises(ConfigError, match="MONITOR_CACHE = 'perhaps'"):
        LengthPenaltyConfig()
