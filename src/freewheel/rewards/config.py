"""`LengthPenaltyConfig`: the settings of a reward manager, with their defaults.

`as_config` accepts the dataclass itself, a mapping, an OmegaConf node, YAML text or a YAML file.
"""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from freewheel.errors import ConfigError
from freewheel.judge.config import JudgeConfig, Secret
from freewheel.judge.rubric import BUILTIN, Rubric
from freewheel.utils.checks import check_number, shown_value

KEY_VARIABLE = "OPENAI_API_KEY"
CACHE_VARIABLE = "MONITOR_CACHE"


class _Unnamed(str):
    """The default endpoint. The user did not name it, so no key from the environment may go there."""

    __slots__ = ()


DEFAULT_ENDPOINT = _Unnamed("https://qianfan.baidubce.com/v2/chat/completions")
DEFAULT_MODEL = "deepseek-v3"
BATCH_TIMEOUT_S = 300.0
"""After this time a batch is given up: a missing verdict is a failure."""

Gate = Literal["on", "format", "off"]
_GATES: dict[Any, Gate] = {"on": "on", True: "on", "format": "format", "off": "off", False: "off"}
"""YAML reads a plain `on` or `off` as a boolean."""


class OnFailure(NamedTuple):
    """The reward of a row whose verdict failed, in a trainer that cannot mask it."""

    kind: Literal["group_mean", "rule_only", "raise", "fallback"] = "group_mean"
    value: float = math.nan

    @classmethod
    def parse(cls, given: Any) -> OnFailure:
        """Read `group_mean`, `rule_only`, `raise`, or `fallback: -1.0` (as text or as a mapping)."""
        if isinstance(given, OnFailure):
            return given
        if given in ("group_mean", "rule_only", "raise"):
            return cls(given)
        number: Any = None
        if isinstance(given, Mapping) and set(given) == {"fallback"}:
            number = given["fallback"]
        elif isinstance(given, str) and given.partition(":")[0].strip() == "fallback":
            number = given.partition(":")[2].strip()
        try:
            value = float(number)
        except (TypeError, ValueError):
            value = math.nan
        if isinstance(number, bool) or not math.isfinite(value):
            raise ConfigError("on_failure", given, "choose group_mean, rule_only, raise, or 'fallback: <number>'")
        return cls("fallback", value)


@dataclass
class LengthPenaltyConfig:
    """Rule score, judge quality and length penalty of a reward manager. Every field is checked at construction."""

    enable: bool = True
    """Whether there is a length penalty."""
    penalty_scale: float = 1.0
    """The penalty is multiplied by it."""
    max_penalty: float = 1.0
    """Penalty at and beyond `outer_ratio`."""
    peak_ratio: float = 0.3
    """No penalty up to this distance from the group's median length, as a share of it."""
    outer_ratio: float = 0.5
    """From this distance on the penalty is `max_penalty`."""
    enable_openai_reward: bool | None = None
    """Whether the judge is on. None: on if a key is given."""
    api_key: Secret | None = None
    """The judge's key; text is accepted. None: `OPENAI_API_KEY`, but only where `api_endpoint` is given. For a server
    that needs no key, give `EMPTY`."""
    model_name: str = DEFAULT_MODEL
    """The judge's model name at its endpoint."""
    api_endpoint: str = DEFAULT_ENDPOINT
    """Any OpenAI-compatible chat-completions URL."""
    use_async_io: bool = False
    """Judge in the background while the caller works. Off: the caller waits."""
    max_concurrent_requests: int | str = "auto"
    """`auto` finds the judge's own limit; an integer is an upper bound for that; `fixed:N` holds N."""
    reward_coefficient: float = 1.0
    """The judge's score is multiplied by it."""
    system_prompt: str | None = None
    """The judge's instructions, which must ask for one integer from 1 to 10. None: the built-in rubric `integer`."""
    judge_gate: Gate | bool = "on"
    """`on`: a response with rule score 0 is not judged. `format`: one whose format is wrong. `off`: all are judged."""
    on_failure: OnFailure | str | Mapping[str, float] = "group_mean"
    """The reward of a row whose judging failed: `group_mean`, `rule_only`, `fallback: <number>`, or `raise`."""
    batch_timeout_s: float = BATCH_TIMEOUT_S
    """Time limit for judging a batch. A verdict that is missing by then is a failure."""
    judge: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of `JudgeConfig`, such as `rubric`, `placement`, `cache_dir`, `prices`, `max_cost`."""
    num_async_workers: int | None = None
    """Ignored. It exists so that old configs load: one engine adapts its own concurrency."""

    def __post_init__(self) -> None:
        for key in ("enable", "use_async_io", "enable_openai_reward"):
            value = getattr(self, key)
            if not isinstance(value, bool) and (value is not None or key != "enable_openai_reward"):
                raise ConfigError(key, value, "give true or false")
        for key in ("penalty_scale", "max_penalty", "peak_ratio", "outer_ratio"):
            check_number(key, getattr(self, key), low=0)
        if self.outer_ratio <= self.peak_ratio:
            remedy = f"the penalty rises from peak_ratio ({self.peak_ratio:g}) to outer_ratio: give more than that"
            raise ConfigError("outer_ratio", self.outer_ratio, remedy)
        check_number("reward_coefficient", self.reward_coefficient)
        check_number("batch_timeout_s", self.batch_timeout_s, above=0)
        if not isinstance(self.judge_gate, str | bool) or self.judge_gate not in _GATES:
            raise ConfigError("judge_gate", self.judge_gate, "choose on, format or off")
        self.judge_gate = _GATES[self.judge_gate]
        self.on_failure = OnFailure.parse(self.on_failure)
        # The engine makes a Secret of text and checks it.
        self.api_key = JudgeConfig(endpoint=DEFAULT_ENDPOINT, model=DEFAULT_MODEL, api_key=self.api_key).api_key
        if self.num_async_workers is not None:
            warnings.warn(
                "num_async_workers does nothing: one engine serves all requests and adapts its concurrency; "
                "bound it with max_concurrent_requests",
                FutureWarning,  # Python hides a DeprecationWarning of code outside of `__main__`
                stacklevel=3,
            )
        self.judge_config()  # raises now what the engine would raise later

    @property
    def key(self) -> Secret | None:
        """The judge's key or None. A key from the environment never goes to an endpoint that the user did not name."""
        if self.api_key:
            return self.api_key
        if not self.names_endpoint:
            return None
        return Secret.from_env(self.key_variable)

    @property
    def key_variable(self) -> str:
        """The environment variable that may hold the judge's key."""
        return str(self.judge.get("api_key_env", KEY_VARIABLE))

    @property
    def names_endpoint(self) -> bool:
        """False for the default endpoint."""
        return not isinstance(self.api_endpoint, _Unnamed)

    @property
    def judges(self) -> bool:
        return self.key is not None and self.enable_openai_reward is not False

    @property
    def lacks_key(self) -> str:
        """A message if a judge is wanted but off: what it lacks, and the remedy. Empty otherwise."""
        wanted = self.names_endpoint if self.enable_openai_reward is None else self.enable_openai_reward
        if self.judges or not wanted:
            return ""
        lack, remedy = f"API key: the judge at {self.api_endpoint}", "Set"
        if not self.names_endpoint:
            lack, remedy = "api_endpoint: the judge", "Name it, and set"
        return f"No {lack} is off, and rewards are rule score and length penalty only. {remedy} {self.key_variable}"

    @property
    def failure_policy(self) -> OnFailure:
        return OnFailure.parse(self.on_failure)

    def judge_config(self) -> JudgeConfig:
        """The engine's settings."""
        if not isinstance(self.judge, Mapping):
            raise ConfigError("judge", self.judge, "give a mapping of JudgeConfig's keys")
        for ours, theirs in _ENGINE_KEYS.items():
            if theirs in self.judge:
                raise ConfigError(f"judge.{theirs}", "…", f"give it as {ours}")
        if self.system_prompt is not None and "rubric" in self.judge:
            raise ConfigError("system_prompt", self.system_prompt, "give this or judge.rubric, not both")
        settings: dict[str, Any] = {theirs: getattr(self, ours) for ours, theirs in _ENGINE_KEYS.items()}
        settings["endpoint"] = str(self.api_endpoint)
        settings["api_key"] = self.key
        settings["cache"] = env_flag(CACHE_VARIABLE, default=True)
        if self.system_prompt is not None:
            # The scale and the parser of the built-in rubric, under other instructions.
            named = Rubric(name="system_prompt", system=self.system_prompt)
            settings["rubric"] = named if self.system_prompt else BUILTIN["integer"]
        settings |= self.judge
        if self.key is None:
            settings["api_key_env"] = None  # the engine must not read a key that we may not read
        try:
            return JudgeConfig.from_dict(settings)
        except ConfigError as error:
            name, *inner = error.key.split(".")
            ours = {theirs: ours for ours, theirs in _ENGINE_KEYS.items()}.get(name, f"judge.{name}")
            raise error.renamed(".".join([ours, *inner])) from None


_ENGINE_KEYS = {
    "api_endpoint": "endpoint",
    "model_name": "model",
    "api_key": "api_key",
    "max_concurrent_requests": "concurrency",
    "batch_timeout_s": "batch_deadline_s",
}
"""Our keys, and the engine's names for them."""


def as_config(given: Any) -> LengthPenaltyConfig:
    """Return a config made from any form; None gives the defaults. The result is a copy and is checked again."""
    if given is None:
        return LengthPenaltyConfig()
    if isinstance(given, LengthPenaltyConfig):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # it was given when the config was made
            return dataclasses.replace(given)
    plain = _plain(given)
    known = [one.name for one in dataclasses.fields(LengthPenaltyConfig)]
    unknown = sorted(str(key) for key in plain if key not in known)
    if unknown:
        shown = shown_value(unknown[0], plain[unknown[0]])
        raise ConfigError(f"length_penalty_config.{unknown[0]}", shown, f"unknown key; known are {', '.join(known)}")
    return LengthPenaltyConfig(**plain)


def _plain(given: Any) -> dict[str, Any]:
    found = given
    if type(given).__module__.startswith("omegaconf"):
        from omegaconf import OmegaConf

        found = OmegaConf.to_container(given, resolve=True)
    elif isinstance(given, str | Path):
        import yaml

        is_file = isinstance(given, Path) or ("\n" not in given and given.endswith((".yaml", ".yml")))
        try:
            found = yaml.safe_load(Path(given).read_text() if is_file else str(given))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            shown = str(given) if is_file else "<text>"  # the text may hold a key, so not YAML's message either
            mark = getattr(error, "problem_mark", None)
            why = getattr(error, "strerror", None) or type(error).__name__
            if mark is not None:
                why = f"{getattr(error, 'problem', '')} in line {mark.line + 1}"
            raise ConfigError("length_penalty_config", shown, f"it cannot be read as YAML: {why}") from None
    if not isinstance(found, Mapping):
        raise ConfigError(
            "length_penalty_config",
            f"<{type(found).__name__}>",  # it may hold a key
            "give a LengthPenaltyConfig, a mapping, an OmegaConf node, YAML text with a mapping, or a .yaml file",
        )
    return {str(key): value for key, value in found.items()}


def env_flag(name: str, *, default: bool) -> bool:
    """Return a switch in the environment."""
    text = os.environ.get(name, "").strip().lower()
    if text in ("", "true", "1", "yes", "on"):
        return default if not text else True
    if text in ("false", "0", "no", "off"):
        return False
    raise ConfigError(f"environment variable {name}", text, "use true or false")
