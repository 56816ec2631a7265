"""`LengthPenaltyConfig`: its defaults by name, each form it is given in, what it refuses, and where a key may go."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
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
    "api_key": None,
    "model_name": "deepseek-v3",
    "api_endpoint": QIANFAN,
    "use_async_io": False,
    "max_concurrent_requests": "auto",
    "reward_coefficient": 1.0,
    "judge_gate": "on",
    "num_async_workers": None,
}


def test_it_is_a_dataclass_with_the_promised_keys_and_defaults() -> None:
    config = LengthPenaltyConfig()
    assert {key: getattr(config, key) for key in DEFAULTS} == DEFAULTS
    assert dataclasses.is_dataclass(LengthPenaltyConfig)
    names = {one.name for one in dataclasses.fields(LengthPenaltyConfig)}
    assert names >= {*DEFAULTS, "enable_openai_reward", "system_prompt"}


def test_the_judge_is_on_where_a_key_is_given_and_off_without_one() -> None:
    assert not LengthPenaltyConfig().judges
    assert LengthPenaltyConfig(api_key=KEY).judges
    assert not LengthPenaltyConfig(api_key=KEY, enable_openai_reward=False).judges
    assert not LengthPenaltyConfig(enable_openai_reward=True).judges


@pytest.mark.parametrize("blank", ["", "   ", None])
def test_a_blank_key_is_no_key(blank: str | None) -> None:
    assert LengthPenaltyConfig(api_key=blank).key is None


def test_the_default_rubric_asks_for_one_integer_from_1_to_10_and_nothing_else() -> None:
    rubric = LengthPenaltyConfig().judge_config().loaded_rubric
    assert rubric is BUILTIN["integer"] or rubric == BUILTIN["integer"]
    assert (rubric.low, rubric.high, rubric.parser) == (1.0, 10.0, "integer")
    assert "integer" in rubric.system and "1" in rubric.system and "10" in rubric.system


def test_a_system_prompt_replaces_the_rubrics_words_and_keeps_its_scale() -> None:
    rubric = LengthPenaltyConfig(system_prompt="Be strict.").judge_config().loaded_rubric
    assert rubric.system == "Be strict."
    assert (rubric.low, rubric.high, rubric.parser) == (1.0, 10.0, "integer")


def test_what_the_engine_gets_is_what_the_config_says() -> None:
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
    assert LengthPenaltyConfig().judge_config().batch_deadline_s == 300.0


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
PLAIN = {
    "penalty_scale": 0.5,
    "use_async_io": True,
    "judge_gate": "off",
    "api_endpoint": OURS,
    "on_failure": {"fallback": -1},
    "judge": {"placement": "thread"},
}


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
    assert config.gate == "off" and config.failure_policy == OnFailure("fallback", -1.0)
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


def test_the_managers_config_is_a_copy_that_later_changes_do_not_reach() -> None:
    given = LengthPenaltyConfig(penalty_scale=0.5)
    manager = LengthPenaltyRewardManager(Characters(), 0, length_penalty_config=given)
    given.penalty_scale = 9.0
    assert manager.config.penalty_scale == 0.5


def test_a_config_that_was_changed_into_nonsense_is_refused_when_it_is_given() -> None:
    given = LengthPenaltyConfig()
    given.outer_ratio = 0.1
    with pytest.raises(ConfigError, match="outer_ratio"):
        as_config(given)


@pytest.mark.parametrize("given", [[1, 2], 7, "- a\n- b", "just words"])
def test_what_is_no_mapping_is_refused_with_the_forms_that_are_taken(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"length_penalty_config = .<.*OmegaConf node, YAML"):
        as_config(given)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
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


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [dict, OmegaConf.create])
def test_an_unknown_key_is_named_with_its_value_and_those_that_are_known(form: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        as_config(form({"use_async": True}))
    message = str(caught.value)
    assert "use_async" in message and "True" in message and "unknown key" in message and "use_async_io" in message


def test_a_misspelt_key_does_not_show_the_key() -> None:
    for wrong in ({"apikey": KEY}, {"api_keys": KEY}, {"judge": {"api_kee_key": KEY}}, {"judge": {"api_key": KEY}}):
        with pytest.raises(ConfigError) as caught:
            as_config(wrong)
        assert KEY not in str(caught.value)


@pytest.mark.parametrize(("peak", "outer"), [(0.5, 0.5), (0.3, 0.2), (0.0, 0.0)])
def test_outer_ratio_must_be_more_than_peak_ratio_said_at_construction(peak: float, outer: float) -> None:
    given = {"peak_ratio": peak, "outer_ratio": outer}
    for make in (lambda: LengthPenaltyConfig(**given), lambda: LengthPenaltyRewardManager(None, 0, None, "x", given)):
        with pytest.raises(ValueError, match=rf"^outer_ratio = {outer}.*peak_ratio"):
            make()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("enable", "yes"),
        ("enable", 1),
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
    ],
)
def test_a_value_that_cannot_work_is_refused_by_its_key(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        as_config({key: value})
    assert caught.value.key.endswith(key)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "many", "fixed:0"])
def test_a_concurrency_that_cannot_work_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^max_concurrent_requests = "):
        as_config({"max_concurrent_requests": value})


@pytest.mark.parametrize("value", [1, 60, "auto", "fixed:8"])
def test_a_concurrency_is_auto_a_bound_or_fixed(value: Any) -> None:
    assert as_config({"max_concurrent_requests": value}).judge_config().concurrency == value


@pytest.mark.parametrize("url", ["qianfan", "ftp://x/v1", "http://user:pass@host/v1", "", 7])
def test_an_endpoint_that_is_no_url_is_refused_at_construction(url: Any) -> None:
    with pytest.raises(ConfigError, match="endpoint"):
        as_config({"api_endpoint": url})


@pytest.mark.parametrize("key", ["endpoint", "model", "api_key", "concurrency", "batch_deadline_s"])
def test_what_has_a_key_of_its_own_is_not_given_under_judge(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"judge\.{key}.*give it as"):
        as_config({"judge": {key: "x"}})


def test_a_system_prompt_and_a_rubric_are_not_given_together() -> None:
    with pytest.raises(ConfigError, match=r"system_prompt.*not both"):
        as_config({"system_prompt": "Rate.", "judge": {"rubric": "integer"}})


@pytest.mark.parametrize("key", [f"{KEY}\nmore", "sk-ключ", "sk-\x00", "<key from the api_key argument>"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        as_config({"api_key": key})
    assert caught.value.key == "api_key" and KEY not in str(caught.value) and "ключ" not in str(caught.value)


@pytest.mark.parametrize("key", [7, ["sk-x"], {"value": "sk-x"}, b"sk-x"])
def test_a_key_that_is_no_text_is_refused_and_not_shown(key: Any) -> None:
    with pytest.raises(ConfigError, match=r"^api_key") as caught:
        as_config({"api_key": key})
    assert "sk-x" not in str(caught.value)


def test_on_and_off_may_be_what_yaml_makes_of_them() -> None:
    assert [as_config(f"judge_gate: {word}").gate for word in ("on", "off", "format", "true", "'off'")] == [
        "on",
        "off",
        "format",
        "on",
        "off",
    ]


@pytest.mark.parametrize("given", ["fallback: -1.5", "fallback:-1.5", {"fallback": -1.5}, OnFailure("fallback", -1.5)])
def test_a_fallback_may_be_text_or_a_mapping(given: Any) -> None:
    assert LengthPenaltyConfig(on_failure=given).failure_policy == OnFailure("fallback", -1.5)


# -- num_async_workers ------------------------------------------------------------------------------------------------


def test_num_async_workers_loads_warns_and_says_what_replaced_it() -> None:
    for make in (lambda: LengthPenaltyConfig(num_async_workers=4), lambda: as_config({"num_async_workers": 4})):
        with pytest.warns(DeprecationWarning, match="max_concurrent_requests"):
            assert make().judge_config().concurrency == "auto"


def test_the_warning_comes_once_for_a_config_and_never_without_the_key() -> None:
    with pytest.warns(DeprecationWarning):
        config = LengthPenaltyConfig(num_async_workers=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LengthPenaltyRewardManager(Characters(), 0, length_penalty_config=config)
        LengthPenaltyConfig()


# -- the key ----------------------------------------------------------------------------------------------------------


def test_the_environments_key_is_read_only_where_the_endpoint_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert LengthPenaltyConfig().key is None and not LengthPenaltyConfig().judges
    assert LengthPenaltyConfig(model_name="x", use_async_io=True).key is None
    named = LengthPenaltyConfig(api_endpoint=OURS)
    assert named.key is not None and named.key.reveal() == KEY and named.judges
    naming_the_default = LengthPenaltyConfig(api_endpoint=QIANFAN)
    assert naming_the_default.key is not None, "its owner named it"


def test_a_key_that_is_given_comes_before_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-environment")
    config = LengthPenaltyConfig(api_key=KEY, api_endpoint=OURS)
    assert config.key is not None and config.key.reveal() == KEY


def roundabout(config: LengthPenaltyConfig) -> list[LengthPenaltyConfig]:
    """The ways in which a config is copied."""
    return [
        dataclasses.replace(config, penalty_scale=0.5),
        pickle.loads(pickle.dumps(config)),
        copy.copy(config),
        copy.deepcopy(config),
        as_config(config),
        as_config(dataclasses.asdict(config)),
        LengthPenaltyConfig(**{one.name: getattr(config, one.name) for one in dataclasses.fields(config)}),
    ]


def test_the_default_endpoint_stays_unnamed_however_a_config_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    for copied in roundabout(LengthPenaltyConfig()):
        assert copied.api_endpoint == QIANFAN and copied.key is None
    for copied in roundabout(LengthPenaltyConfig(api_endpoint=OURS)):
        assert copied.key is not None


def test_a_key_that_pickling_left_out_is_not_replaced_by_the_environments_for_the_default_endpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_a_monitor_cache_that_is_neither_true_nor_false_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONITOR_CACHE", "perhaps")
    with pytest.raises(ConfigError, match="MONITOR_CACHE = 'perhaps'"):
        LengthPenaltyConfig()


def test_an_error_of_the_engine_is_told_under_the_name_that_the_user_wrote() -> None:
    with pytest.raises(ConfigError, match=r"^judge\.rubrik = 'x': unknown key"):
        as_config({"judge": {"rubrik": "x"}})
    with pytest.raises(ConfigError, match=r"^api_endpoint = 'ftp://x'"):
        as_config({"api_endpoint": "ftp://x"})


def test_a_config_error_survives_a_pickle() -> None:
    with pytest.raises(ConfigError) as caught:
        as_config({"penalty_scale": -1})
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (type(copied), str(copied), copied.key) == (ConfigError, str(caught.value), "penalty_scale")
