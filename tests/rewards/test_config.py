"""`LengthPenaltyConfig`: defaults, forms, refused values, and where a key may go."""

from __future__ import annotations

import copy
import dataclasses
import pickle
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


@pytest.mark.parametrize(
    ("settings", "judges"),
    [
        ({}, False),
        ({"api_key": KEY}, True),
        ({"api_key": KEY, "enable_openai_reward": False}, False),
        ({"enable_openai_reward": True}, False),
        ({"api_key": ""}, False),
        ({"api_key": "   "}, False),
    ],
)
def test_the_judge_is_on_if_a_key_is_given(settings: dict[str, Any], judges: bool) -> None:
    assert LengthPenaltyConfig(**settings).judges is judges


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


@pytest.mark.parametrize("given", [[1, 2], 7, "- a\n- b", "just words"])
def test_a_value_that_is_no_mapping_is_refused_with_the_forms_that_are_taken(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"length_penalty_config = .<.*OmegaConf node, YAML"):
        as_config(given)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml.*No such file"):
        as_config(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize("text", [f'api_key: "{KEY}', f"api_key: {KEY}: [x", f"a: b\n  api_key: {KEY}", f"\t{KEY}: ["])
def test_yaml_that_cannot_be_read_names_the_line_and_does_not_show_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    for given in (text, path):
        with pytest.raises(ConfigError, match=r"cannot be read as YAML: .* in line \d") as caught:
            as_config(given)
        assert KEY not in str(caught.value) and "very-secret" not in str(caught.value)
        assert caught.value.__cause__ is None and caught.value.__suppress_context__


# -- refused values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [dict, OmegaConf.create])
def test_an_unknown_key_is_named_with_its_value_and_the_known_keys(form: Any) -> None:
    with pytest.raises(ConfigError, match=r"use_async = True: unknown key; known are .*use_async_io"):
        as_config(form({"use_async": True}))


@pytest.mark.parametrize(("peak", "outer"), [(0.5, 0.5), (0.3, 0.2), (0.0, 0.0)])
def test_outer_ratio_must_be_more_than_peak_ratio_at_construction(peak: float, outer: float) -> None:
    given = {"peak_ratio": peak, "outer_ratio": outer}
    for make in (lambda: LengthPenaltyConfig(**given), lambda: LengthPenaltyRewardManager(None, 0, None, "x", given)):
        with pytest.raises(ValueError, match=rf"^outer_ratio = {outer}.*peak_ratio"):
            make()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("enable", "yes"),
        ("enable", 1),
        ("enable", None),
        ("use_async_io", "true"),
        ("enable_openai_reward", "no"),
        ("penalty_scale", -1.0),
        ("max_penalty", float("nan")),
        ("peak_ratio", "0.3"),
        ("outer_ratio", float("inf")),
        ("reward_coefficient", float("nan")),
        ("reward_coefficient", True),
        ("batch_timeout_s", 0),
        ("batch_timeout_s", None),
        ("judge_gate", "sometimes"),
        ("judge_gate", 1),
        ("judge_gate", None),
        ("judge_gate", ["on"]),
        ("on_failure", "ignore"),
        ("on_failure", "fallback"),
        ("on_failure", "fallback: much"),
        ("on_failure", {"fallback": float("nan")}),
        ("on_failure", {"fallback": True}),
        ("on_failure", None),
        ("on_failure", 0.0),
        ("judge", "thread"),
        *(("max_concurrent_requests", value) for value in (0, -1, 1.5, True, "many", "fixed:0")),
        *(("api_endpoint", url) for url in ("qianfan", "ftp://x/v1", "http://user:pass@host/v1", "", 7)),
        *(("api_key", key) for key in (7, ["sk-x"], {"value": "sk-x"}, b"sk-x", "<key from the api_key argument>")),
        *(("api_key", key) for key in ("sk-x\nmore", "sk-xключ", "sk-x\x00")),
    ],
)
def test_an_impossible_value_is_refused_by_its_key_and_no_api_key_is_shown(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{key} = ") as caught:
        as_config({key: value})
    assert caught.value.key == key and "sk-x" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        *(({"judge": {key: KEY}}, rf"judge\.{key}.*give it as") for key in ("endpoint", "model", "api_key")),
        *(({"judge": {key: 1}}, rf"judge\.{key}.*give it as") for key in ("concurrency", "batch_deadline_s")),
        ({"system_prompt": "Rate.", "judge": {"rubric": "integer"}}, "system_prompt.*not both"),
        ({"judge": {"rubrik": "x"}}, r"^judge\.rubrik = 'x': unknown key"),
        ({"apikey": KEY}, "unknown key"),
        ({"api_keys": KEY}, "unknown key"),
        ({"judge": {"api_kee_key": KEY}}, "unknown key"),
    ],
)
def test_a_setting_under_a_wrong_name_is_refused_without_showing_a_key(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        as_config(given)
    assert KEY not in str(caught.value)


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
        with pytest.warns(DeprecationWarning, match="max_concurrent_requests"):
            config = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert as_config(config).judge_config().concurrency == "auto"
        LengthPenaltyConfig()


# -- the key ----------------------------------------------------------------------------------------------------------


def test_the_key_of_the_environment_is_read_only_if_the_endpoint_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert LengthPenaltyConfig(model_name="x", use_async_io=True).key is None
    for endpoint in (OURS, QIANFAN):  # the default endpoint too, if its owner names it
        named = LengthPenaltyConfig(api_endpoint=endpoint)
        assert named.key is not None and named.key.reveal() == KEY and named.judges
    given = LengthPenaltyConfig(api_key="sk-given", api_endpoint=OURS)
    assert given.key is not None and given.key.reveal() == "sk-given"


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
def test_monitor_cache_turns_the_cache_off_unless_the_config_speaks(
    monkeypatch: pytest.MonkeyPatch, text: str | None, cache: bool
) -> None:
    if text is not None:
        monkeypatch.setenv("MONITOR_CACHE", text)
    assert LengthPenaltyConfig().judge_config().cache is cache
    assert LengthPenaltyConfig(judge={"cache": not cache}).judge_config().cache is not cache
    monkeypatch.setenv("MONITOR_CACHE", "perhaps")
    with pytest.raises(ConfigError, match="MONITOR_CACHE = 'perhaps'"):
        LengthPenaltyConfig()
