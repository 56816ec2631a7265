"""The settings that the integration reads from verl's configuration. A reward worker checks them when it starts.

reward.reward_kwargs:
  length_penalty_config: {…}     as freewheel.rewards.LengthPenaltyConfig; YAML text or a .yaml file also works
  group_deadline_s: 600
  extra_keys: [pred]
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import pickle
from dataclasses import dataclass
from typing import Any

from freewheel.errors import ConfigError
from freewheel.rewards.config import LengthPenaltyConfig, as_config

log = logging.getLogger("freewheel.integrations.verl")

GROUP_DEADLINE_S = 600.0
"""How long a group waits for its next row. Longer than the judge's batch timeout and most generations, because a group
that is given up gets no penalty. Finite, because verl does not report a row that died elsewhere."""
SETTLE_S = 30.0
"""If rows do not tell whether they belong to training or to validation, a group of the smaller size waits this long for
more rows: long enough for the siblings of a training row, short enough for a validation."""
ROWS_PER_WORKER = 1000
"""Ray's default for concurrent calls of an asynchronous actor, which verl does not change. A waiting row holds one."""

_OURS = ("length_penalty_config", "group_deadline_s", "extra_keys")
_VERLS = ("overlong_buffer_cfg", "max_resp_len")
"""Other keys of verl 0.9.1 under `reward_kwargs`."""
_TRAIN = "train"


@dataclass(frozen=True)
class Settings:
    """The settings of one run. Every reward worker reads the same configuration, so they are equal in all workers.

    Ray pickles them for the actor that the workers share. A `Secret` is pickled without its key.
    """

    length_penalty_config: LengthPenaltyConfig
    train_rows: int
    """Responses to a prompt in training: `rollout.n`."""
    validation_rows: int
    """Responses to a prompt in validation: `rollout.val_kwargs.n`."""
    workers: int
    group_deadline_s: float = GROUP_DEADLINE_S
    settle_s: float = SETTLE_S
    extra_keys: tuple[str, ...] = ()
    """Keys of the dict from `compute_score` that are reported for every row."""

    @classmethod
    def of(cls, config: Any) -> Settings:
        """Read verl's whole configuration (an OmegaConf node)."""
        from omegaconf import OmegaConf

        found = config.reward.get("reward_kwargs")
        kwargs: Any = OmegaConf.to_container(found, resolve=True) if found is not None else {}
        for key in kwargs:
            if key not in (*_OURS, *_VERLS):
                raise ConfigError(f"reward.reward_kwargs.{key}", "…", f"unknown key; known are {', '.join(_OURS)}")
        deadline_s = kwargs.get("group_deadline_s", GROUP_DEADLINE_S)
        if isinstance(deadline_s, bool) or not isinstance(deadline_s, int | float) or not deadline_s > 0:
            raise ConfigError("reward.reward_kwargs.group_deadline_s", deadline_s, "give seconds, more than 0")
        extra_keys = kwargs.get("extra_keys") or []
        if not isinstance(extra_keys, list) or not all(isinstance(key, str) for key in extra_keys):
            raise ConfigError("reward.reward_kwargs.extra_keys", extra_keys, "give a list of names")
        rewards = as_config(kwargs.get("length_penalty_config") or {})  # raises now, not at the first row
        workers = int(config.reward.num_workers)
        if workers > 1:
            _check_key_travels(rewards)
        rollout = config.actor_rollout_ref.rollout
        return cls(
            length_penalty_config=rewards,
            train_rows=int(rollout.n),
            validation_rows=int(rollout.val_kwargs.n),
            workers=workers,
            group_deadline_s=float(deadline_s),
            settle_s=min(SETTLE_S, float(deadline_s)),
            extra_keys=tuple(extra_keys),
        )

    @property
    def wants_judge(self) -> bool:
        """Whether the user wants a judge. Only the process of the scorer checks for a key: a worker on another node may
        have another environment, and its rows must still be judged."""
        config = self.length_penalty_config
        wanted = config.enable_openai_reward or config.api_key is not None or config.names_endpoint
        return bool(wanted) and config.enable_openai_reward is not False

    def without_judge(self) -> Settings:
        config = as_config(self.length_penalty_config)
        config.enable_openai_reward = False
        return dataclasses.replace(self, length_penalty_config=config)

    def identity(self) -> str:
        """Return a hash that is equal in all workers of a run and does not depend on the key."""
        values = {key: value for key, value in vars(self.length_penalty_config).items() if key != "api_key"}
        rest = (self.train_rows, self.validation_rows, self.group_deadline_s, self.extra_keys)
        return hashlib.sha256(repr((sorted(values.items()), rest)).encode()).hexdigest()[:12]

    def sizes(self, split: object) -> tuple[int, ...]:
        """Return the possible sizes of a row's group. verl does not tell whether a row belongs to training or to
        validation; its data preparation does, as `extra_info.split`."""
        if self.train_rows == self.validation_rows:
            return (self.train_rows,)
        if isinstance(split, str) and split:
            return (self.train_rows if split.startswith(_TRAIN) else self.validation_rows,)
        return (self.train_rows, self.validation_rows)

    def check_room(self, prompts: Any) -> None:
        """Warn if a step has more rows than the workers can hold at once: its groups would never be complete."""
        if not isinstance(prompts, int) or prompts * self.train_rows <= ROWS_PER_WORKER * self.workers:
            return
        rows = prompts * self.train_rows
        log.warning(
            "a step has %d rows, and %d reward workers hold %d at once: groups may wait for rows that cannot be "
            "accepted; set reward.num_workers=%d",
            rows,
            self.workers,
            ROWS_PER_WORKER * self.workers,
            -(-rows // ROWS_PER_WORKER),
        )


def _check_key_travels(config: LengthPenaltyConfig) -> None:
    """Raise if the judge of several workers would have no key: a key given as text does not reach its process."""
    if config.api_key is None or config.enable_openai_reward is False:
        return
    there = pickle.loads(pickle.dumps(config))
    if there.key is None:
        raise ConfigError(
            "reward.reward_kwargs.length_penalty_config.api_key",
            config.api_key,
            "a key given as text is not sent to the actor that the reward workers share: leave api_key out, name "
            f"api_endpoint, and set {config.key_variable} in the environment where Ray is started, on every node "
            "(or set reward.num_workers=1)",
        )
    if there.key != config.api_key:
        log.warning(
            "the key in %s is used, and not the other one in length_penalty_config.api_key: a key given as text is "
            "not sent to the actor that the reward workers share",
            config.key_variable,
        )
