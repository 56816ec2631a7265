"""`FreewheelRewardManager`: verl's reward loop with a judge, a length penalty, and rows that may fail.

    reward.reward_manager.source=importlib
    reward.reward_manager.module.path=pkg://freewheel.integrations.verl
    reward.reward_manager.name=FreewheelRewardManager

verl makes one in each reward worker and awaits `run_single` for each response as soon as it is generated.

    DataProto ─▶ decode ─▶ compute_score ─▶ DecodedRow ─▶ GroupScorer (here, or the run's actor) ─▶ reward, extra info
                 (threads)  (threads, or awaited)     waits for the judge, then for the group
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import uuid
from collections.abc import Mapping
from typing import Any

from verl.experimental.reward_loop.reward_manager.base import (  # type: ignore[import-not-found,unused-ignore]
    RewardManagerBase,
)
from verl.utils.reward_score import default_compute_score  # type: ignore[import-not-found,unused-ignore]

from freewheel.integrations.verl.group_scorer import (
    GroupScorer,
    RepeatedLog,
    ScorerLost,
    SharedGroupScorer,
    plain_rule,
)
from freewheel.integrations.verl.rows import DecodedRow, plain, question_of, response_length, score_info, truth_of
from freewheel.integrations.verl.settings import Settings
from freewheel.rewards.rules import rule_score
from freewheel.rewards.scoring import Sample, as_scored, judge_requests


class FreewheelRewardManager(RewardManagerBase):  # type: ignore[misc,unused-ignore]
    """Rule score + judge quality − length penalty, by group. No row can end verl's run, and no failure is a score."""

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        compute_score: Any,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> None:
        super().__init__(config, tokenizer, compute_score)
        self.settings = Settings.of(config)
        self.rewards = self.settings.length_penalty_config
        self.compute_score = compute_score or default_compute_score
        self._is_default = compute_score is None or _innermost(compute_score) is default_compute_score
        self._more_arguments: dict[str, Any] = {}
        if reward_router_address is not None:
            self._more_arguments["reward_router_address"] = reward_router_address
            self._more_arguments["reward_model_tokenizer"] = reward_model_tokenizer
        self.scorer: GroupScorer | SharedGroupScorer = (
            GroupScorer(self.settings) if self.settings.workers == 1 else SharedGroupScorer(self.settings)
        )
        self._log = RepeatedLog()
        data = config.get("data") or {}
        self.settings.check_room(data.get("train_batch_size"))

    async def run_single(self, data: Any) -> dict[str, Any]:
        """Return the reward of one response; of several sequences the last, like verl's own managers."""
        row = await self._row(data[-1:][0])
        try:
            return await self.scorer.reward(row)
        except ScorerLost as error:
            # The row becomes a separate group, which has failed.
            self._log.failed("the reward actor", error)
            sample = dataclasses.replace(row.sample, group=row.id)
            alone = dataclasses.replace(row, sample=sample, sizes=(1,), request=None, failure="the reward actor died")
            return await GroupScorer(self.settings.without_judge()).reward(alone)

    async def _row(self, item: Any) -> DecodedRow:
        columns = item.non_tensor_batch
        row_id = uuid.uuid4().hex
        uid = columns.get("uid")
        if uid is None:
            self._log.once("rows have no uid: each row is a separate group, without other rows for a median or a mean")
        response_ids = item.batch["responses"]
        length = response_length(item)
        info = score_info(columns)
        sizes = self.settings.sizes(info.get("split"))
        if uid is not None and len(sizes) > 1:
            self._log.once(
                f"rows do not say extra_info.split, and rollout.n={self.settings.train_rows} differs from "
                f"val_kwargs.n={self.settings.validation_rows}: a validation row waits "
                f"{self.settings.settle_s:g} s for more rows; put split ('train', 'test') into extra_info"
            )
        sample = Sample(
            response="",
            length=length,
            group=row_id if uid is None else str(uid),
            data_source=str(columns.get("data_source", "")),
            ground_truth=truth_of(columns),
            question=question_of(columns),
            extra_info=info,
        )
        row = DecodedRow(row_id, sample, (1,) if uid is None else sizes, rule=None, request=None)
        try:
            decode = self.tokenizer.decode
            text = await asyncio.to_thread(decode, response_ids[:length], skip_special_tokens=True)
            sample = dataclasses.replace(sample, response=text)
            found = await self._score(sample)
            rule = plain_rule(as_scored(found))
            extra = self._extra(found if isinstance(found, Mapping) else {})
        except Exception as error:  # noqa: BLE001  # a user's function may raise anything: the row has failed
            self._log.failed(f"compute_score: {type(error).__name__}", error)
            failure = f"{type(error).__name__}: {error}"
            return dataclasses.replace(row, sample=_light(sample), failure=failure, extra=self._extra({}))
        request = judge_requests([sample], [rule], self.rewards)[0] if self.settings.wants_judge else None
        return dataclasses.replace(row, sample=_light(sample), rule=rule, request=request, extra=extra)

    async def _score(self, sample: Sample) -> Any:
        """Call the user's function, or verl's default; for data sources that verl does not know, freewheel's rule."""
        arguments = {
            "data_source": sample.data_source,
            "solution_str": sample.response,
            "ground_truth": sample.ground_truth,
            "extra_info": sample.extra_info,
        }
        if inspect.iscoroutinefunction(self.compute_score):
            return await self.compute_score(**arguments, **self._more_arguments)
        try:
            found = await asyncio.to_thread(self.compute_score, **arguments, **self._more_arguments)
        except NotImplementedError:
            if not self._is_default:
                raise
            return await asyncio.to_thread(rule_score, **arguments)
        return await found if inspect.isawaitable(found) else found

    def _extra(self, found: Mapping[str, Any]) -> dict[str, Any]:
        more = [key for key in found if key not in ("score", "format", "acc", *self.settings.extra_keys)]
        if more:
            self._log.once(
                f"compute_score also returns {', '.join(map(str, more))}; to report them, name them in "
                "reward.reward_kwargs.extra_keys: verl needs the same keys in every row"
            )
        return {key: plain(found.get(key)) for key in self.settings.extra_keys}


def _light(sample: Sample) -> Sample:
    """Return the sample as it is sent to the scorer: the text is in the request, if there is one."""
    return dataclasses.replace(sample, response="", ground_truth=None, question="", extra_info={})


def _innermost(function: Any) -> Any:
    while hasattr(function, "func"):
        function = function.func
    return function
