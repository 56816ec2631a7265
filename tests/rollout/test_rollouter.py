"""Every ticket ends exactly once, whatever engines, tasks, hooks and reward functions do, and engines stay busy."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freewheel.data.data_proto import DataProto
from freewheel.data.group import EncodedGroups, Prompt, PromptGroup, Ticket
from freewheel.queue.client import Admission, Taken
from freewheel.queue.message_queue import MessageQueue
from freewheel.queue.staleness import Bounds
from freewheel.rollout.engine import (
    EngineDied,
    EngineError,
    GenerationRequest,
    GenerationTimeout,
    PromptRefused,
    generate_all,
)
from freewheel.rollout.generation import Sampling
from freewheel.rollout.reward_functions import load_reward
from freewheel.rollout.reward_stage import FatalRewardFailure, RewardStage
from freewheel.rollout.rollouter import LOOKAHEAD, Lookahead, Rollouter
from freewheel.sync.weights import pack

from .fake_engine import Behave, FakeEngine
from .helpers import WAIT_S, until

SOON_S = 3.0
"""Well under what a wait for room takes, and long for a thing that is to happen at once."""
N = 3


def by_index(response: str, row: Any) -> float:
    """The text is the tokens: the prompt's number, then the sample's."""
    return float(response.split()[-1])


def as_numbers(tokens: Any) -> str:
    return " ".join(map(str, tokens.tolist()))


def prompt_of(ordinal: int) -> Prompt:
    return Prompt(tokens=np.array([ordinal, 1], np.int32), row={"data_source": "test", "index": ordinal})


def bounds_of(**changes: Any) -> Bounds:
    usual = {"groups_per_step": 4, "threshold": 1, "window": 100, "max_alive": 100, "max_lag_allowed": 100}
    return Bounds(**{**usual, **changes})


def data_proto(batch: DataProto, rows: Sequence[Sequence[int]], mask: Sequence[int]) -> DataProto:
    return DataProto.from_dict(
        {
            "responses": torch.tensor(rows),
            "response_mask": torch.tensor([mask] * len(rows)),
            "attention_mask": torch.ones(len(rows), batch.batch["prompts"].shape[1] + len(rows[0]), dtype=torch.long),
            "rollout_log_probs": torch.full((len(rows), len(rows[0])), -0.25),
        }
    )


def two_tokens(batch: DataProto) -> DataProto:
    """Each response: 7, then its index."""
    return data_proto(batch, [[7, index] for index in range(N)], [1, 1])


class Scene:
    """A rollouter with its queue, running."""

    def __init__(self, rollouter: Rollouter, engine: FakeEngine, queue: MessageQueue) -> None:
        self.rollouter = rollouter
        self.engine = engine
        self.queue = queue
        self.running = asyncio.create_task(rollouter.run())

    async def taken(self, step: int = 1) -> list[PromptGroup]:
        """The groups of a step, which must come while the rollouter runs."""
        asked = asyncio.ensure_future(self.queue.take(step, wait_s=WAIT_S))
        await asyncio.wait([asked, self.running], return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            asked.cancel()
            self.running.result()
        found = await asked
        assert isinstance(found, Taken), found
        return found.groups.decode()

    async def ordinals(self, step: int = 1) -> list[int]:
        return sorted(group.ordinal for group in await self.taken(step))

    def held(self) -> list[int]:
        """The ordinals of the tickets that the rollouter holds."""
        return sorted(ticket.ordinal for ticket in self.rollouter.tickets())


Build = Callable[..., Awaitable[Scene]]


@pytest.fixture
async def scene(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Build]:
    """`await scene(behave, reward=…)`: all closed with the test, after which no task of theirs may be left."""
    monkeypatch.setattr("freewheel.rollout.rollouter.PUT_RETRY_S", 0.01)
    made: list[Scene] = []

    async def build(
        behave: Behave | FakeEngine | None = None,
        *,
        kind: type[Rollouter] = Rollouter,
        reward: Any = by_index,
        bounds: Bounds | None = None,
        total: int | None = None,
        queue: Any = None,
        rewards: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Scene:
        engine = behave if isinstance(behave, FakeEngine) else FakeEngine(behave)
        usual = {"judge": None, "concurrency": 64, "timeout_s": WAIT_S, "workers": 2, "executor": "thread"}
        stage = RewardStage(
            score=load_reward(reward), **{**usual, "retries": 0, "on_failure": "mask", **(rewards or {})}
        )
        rollouter = kind(
            name="rollouter-0",
            engine=engine,
            rewards=stage,
            queue=queue or MessageQueue(bounds=bounds or bounds_of(), total_prompts=total, retry_delay_s=0.0),
            sampling=Sampling(n=N, max_new_tokens=4, seed=3, stop_token_ids=(0,)),
            **{
                "capacity": 2,
                "prompt": prompt_of,
                "interval_s": 0.0,
                "decode": as_numbers,
                "generation_timeout_s": WAIT_S,
                **settings,
            },
        )
        made.append(Scene(rollouter, engine, rollouter._queue))
        return made[-1]

    yield build
    for one in made:
        one.running.cancel()
        await asyncio.gather(one.running, return_exceptions=True)
        await asyncio.wait_for(one.rollouter.close(), WAIT_S)
        assert one.engine.closed
        assert one.engine.running == 0
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


# -- without failures ------------------------------------------------------------------------------------------------


async def test_groups_arrive_whole_with_tokens_versions_and_rewards_in_the_order_of_samples(scene: Build) -> None:
    one = await scene()
    groups = await one.taken()
    assert sorted(group.ordinal for group in groups) == [0, 1, 2, 3]
    for group in groups:
        assert group.tokens.tolist() == [token for index in range(N) for token in (group.ordinal, index)]
        assert group.rewards.tolist() == [0.0, 1.0, 2.0]
        assert group.mask.all()
        assert set(group.versions.tolist()) == {0}
        assert group.row["index"] == group.ordinal
    assert one.rollouter.total_generated_samples >= 4 * N


async def test_the_end_of_the_prompts_ends_the_loop(scene: Build) -> None:
    one = await scene(total=6, bounds=bounds_of(total_groups=6))
    for step in (1, 2):
        await one.taken(step)
        await one.queue.commit(step, wait_s=WAIT_S)
        await one.queue.confirm_published(step)
    await asyncio.wait_for(one.running, WAIT_S)
    assert one.queue.ledger.trained == 6 and one.held() == []


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "reason", "times"),
    [
        (EngineError("a kernel broke"), "engine", 2),
        (GenerationTimeout("no token for 30 s"), "timeout", 1),
        (asyncio.CancelledError(), "lost", 1),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_a_failure_of_the_engine_costs_an_attempt_and_the_prompt_is_issued_again(
    scene: Build, caplog: pytest.LogCaptureFixture, error: BaseException, reason: str, times: int
) -> None:
    def fails(request: GenerationRequest, before: int) -> None:
        if before < times and request.prompt[0] == 2:
            raise error

    one = await scene(fails)
    one.engine.version = 5
    groups = await one.taken()
    groups += [] if 2 in {group.ordinal for group in groups} else await one.taken(2)
    (again,) = [group for group in groups if group.ordinal == 2]
    assert again.ticket.attempt == times
    assert (await one.queue.stats())["failed_attempts"] == {reason: times}
    assert one.rollouter.generation_errors == times
    (record,) = [record for record in caplog.records if "attempt 0 failed" in record.getMessage()]
    assert (record.ordinal, record.version) == (2, 5)  # type: ignore[attr-defined]
    first, *others = [request.samples for request in one.engine.requests if request.prompt[0] == 2]
    assert others == [first] * times, "seeds follow from the prompt and not from the attempt"
    seeds = {params.seed for request in one.engine.requests for params in request.samples}
    assert len(seeds) == N * len({int(request.prompt[0]) for request in one.engine.requests})


def refuses(request: GenerationRequest, before: int) -> None:
    if request.prompt[0] == 0:
        raise PromptRefused("too long")


def cannot_be_rendered(ordinal: int) -> Prompt:
    return prompt_of(ordinal) if ordinal else 1 // ordinal  # type: ignore[return-value]


def cannot_travel(ordinal: int) -> Prompt:
    row = {"data_source": "test", "index": ordinal, "image": "none" if ordinal else object()}
    return Prompt(tokens=np.array([ordinal, 1], np.int32), row=row)


def cannot_be_decoded(tokens: Any) -> str:
    if tokens[0] == 0:
        raise UnicodeDecodeError("utf-8", b"", 0, 1, "no text")
    return as_numbers(tokens)


def cannot_be_scored(response: str, row: Any) -> float:
    return 1 / row["index"] + by_index(response, row)


def hook(of_first: Callable[[DataProto], Any]) -> type[Rollouter]:
    """A class whose hook does this for the first prompt."""

    class Hooked(Rollouter):
        async def _custom_generation_logic(self, batch: DataProto) -> Any:
            if int(batch.non_tensor_batch["index"][0]) == 0:
                found = of_first(batch)
                return await found if inspect.isawaitable(found) else found
            return two_tokens(batch)

    return Hooked


def tool_fails(batch: DataProto) -> None:
    raise RuntimeError("the sandbox is gone")


def tool_times_out(batch: DataProto) -> None:
    raise TimeoutError("the sandbox took too long")


@pytest.mark.parametrize(
    ("settings", "reason", "logged"),
    [
        ({"behave": refuses}, "prompt", "too long"),
        ({"prompt": cannot_be_rendered}, "prompt", "the task could not render it: ZeroDivisionError"),
        ({"prompt": cannot_travel}, "hook", "a prompt's row holds object"),
        ({"decode": cannot_be_decoded}, "hook", "no text"),
        ({"reward": cannot_be_scored}, "reward", "0 of 3 responses have a reward"),
        ({"kind": hook(tool_fails)}, "hook", "the sandbox is gone"),
        ({"kind": hook(tool_times_out)}, "hook", "the sandbox took too long"),
        ({"kind": hook(lambda batch: None)}, "hook", "NoneType"),
        ({"kind": hook(lambda batch: data_proto(batch, [[1, 1]], [1, 1]))}, "hook", f"give rollout.n = {N}"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
async def test_a_prompt_that_cannot_work_is_abandoned_after_two_attempts_and_costs_no_other(
    scene: Build, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], reason: str, logged: str
) -> None:
    one = await scene(**settings)
    assert 0 not in await one.ordinals()
    await until(lambda: bool(one.queue.ledger.abandoned))
    stats = await one.queue.stats()
    assert (stats["failed_attempts"], stats["abandoned"]) == ({reason: 2}, {reason: 1})
    assert logged in caplog.text
    assert one.engine.closed_early == 2 * ("decode" in settings or "behave" in settings)


async def test_on_failure_raise_ends_the_loop_at_once(scene: Build) -> None:
    def fails(response: str, row: Any) -> float:
        raise ValueError("the scoring service is gone")

    one = await scene(reward=fails, rewards={"on_failure": "raise"})
    with pytest.raises(FatalRewardFailure, match="the scoring service is gone"):
        await asyncio.wait_for(one.running, SOON_S)


async def test_nothing_more_is_scored_of_a_group_whose_generation_failed(scene: Build) -> None:
    """A judge is paid by the call."""
    calls: list[str] = []
    gate = asyncio.Event()

    async def judge(response: str, row: Any) -> float:
        calls.append(response)
        await gate.wait()
        return by_index(response, row)

    class Breaks(FakeEngine):
        async def generate(self, request: GenerationRequest) -> Any:
            async for index, response in super().generate(request):
                if index == N - 1 and request.prompt[0] == 0 and len(self.requests) < 3:
                    raise EngineError("broke at the last response")
                yield index, response

    one = await scene(Breaks(), reward=judge, rewards={"concurrency": 1}, capacity=1)
    await until(lambda: one.rollouter.generation_errors >= 1)
    gate.set()
    await one.taken()
    assert calls.count("0 0") == 2  # the first of each attempt
    assert calls.count("0 1") == 1  # its group broke while it waited for a permit: scored in the second attempt only


@pytest.mark.parametrize("engine_fails", [False, True])
async def test_a_lost_queue_ends_the_loop(scene: Build, engine_fails: bool) -> None:
    """Generating more would only lose work."""

    class Lost(MessageQueue):
        async def put(self, groups: EncodedGroups, *, wait_s: float) -> bool:
            raise ConnectionError("the queue died")

        async def fail(self, ticket: Ticket, failure: Any) -> None:
            raise ConnectionError("the queue died")

    def behave(request: GenerationRequest, before: int) -> None:
        if engine_fails:
            raise EngineError("broken")

    one = await scene(behave, queue=Lost(bounds=bounds_of()))
    with pytest.raises(ConnectionError, match="the queue died"):
        await asyncio.wait_for(one.running, SOON_S)


# -- capacity ---------------------------------------------------------------------------------------------------------


async def test_a_slow_reward_holds_no_generation_capacity(scene: Build) -> None:
    held = threading.Event()

    def slow(response: str, row: Any) -> float:
        held.wait(WAIT_S)
        return by_index(response, row)

    one = await scene(reward=slow, capacity=1, bounds=bounds_of(threshold=3))
    try:
        await until(lambda: len(one.engine.requests) == 16)  # all that may be alive, though none is scored
        await until(lambda: one.rollouter.stats()["generating_groups"] == 0)
        stats = one.rollouter.stats()
        assert stats["scoring_groups"] == 16
        assert stats["rewards"]["scored"] == 0
        await until(lambda: one.rollouter.stats()["spans"].get("wait_reward", 0) > 0)
    finally:
        held.set()
    assert len(await one.taken()) == 4
    await until(lambda: one.rollouter.stats()["spans"].get("wait_room", 0) > 0)
    assert one.rollouter.stats()["spans"]["generate"] > 0


async def test_the_pause_between_batches_is_left_out_while_the_engine_has_free_slots(scene: Build) -> None:
    class OneByOne(MessageQueue):
        async def admit(self, replica: str, *, want: int, **more: Any) -> Admission:
            return await super().admit(replica, want=1, **more)

    one = await scene(queue=OneByOne(bounds=bounds_of(threshold=9)), capacity=3, interval_s=WAIT_S)
    one.engine.gate.clear()
    await until(lambda: len(one.engine.requests) == 3)
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(one.engine.requests) == 3, "now it pauses, though it may request 6"
    one.engine.gate.set()
    await until(lambda: len(one.engine.requests) > 6)  # a free slot ends the pause


async def test_the_engine_gets_twice_the_groups_it_can_run_and_others_while_one_response_is_long(
    scene: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last response of each group waits. The engine has slots for all but those, and is asked to fill them."""
    monkeypatch.setattr("freewheel.rollout.rollouter.ADMIT_WAIT_S", 0.05)

    class LongLast(FakeEngine):
        async def generate(self, request: GenerationRequest) -> Any:
            async for index, response in super().generate(request):
                if index == N - 1:
                    await long.wait()
                yield index, response

    long = asyncio.Event()
    one = await scene(LongLast(), capacity=2, bounds=bounds_of(threshold=9))
    one.engine.gate.clear()
    await until(lambda: one.engine.running)
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(one.engine.requests) == 2 * 2
    one.engine.gate.set()
    await until(lambda: one.rollouter.stats()["generating_groups"] > 4)
    long.set()
    await until(lambda: one.rollouter.total_generated_samples == 40 * N)


async def test_groups_that_end_together_travel_together(scene: Build) -> None:
    sizes: list[int] = []

    class Counting(MessageQueue):
        async def put(self, groups: EncodedGroups, *, wait_s: float) -> bool:
            sizes.append(len(groups))
            return await super().put(groups, wait_s=wait_s)

    await scene(queue=Counting(bounds=bounds_of(threshold=3)), capacity=8)
    await until(lambda: sum(sizes) == 16)
    assert len(sizes) < 16


# -- until it is stored -----------------------------------------------------------------------------------------------


class Reluctant(MessageQueue):
    """Neither stores groups nor hears of failures before `ready` is set."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(retry_delay_s=0.0, **settings)
        self.ready = asyncio.Event()

    async def put(self, groups: EncodedGroups, *, wait_s: float) -> bool:
        return self.ready.is_set() and await super().put(groups, wait_s=wait_s)

    async def fail(self, ticket: Ticket, failure: Any) -> None:
        await self.ready.wait()
        await super().fail(ticket, failure)


async def test_a_group_is_put_until_the_queue_has_stored_it_and_the_engine_does_not_wait(scene: Build) -> None:
    queue = Reluctant(bounds=bounds_of(threshold=3))
    one = await scene(queue=queue, capacity=1)
    await until(lambda: one.rollouter.stats()["unstored_groups"] == 16)  # all that admission allows
    queue.ready.set()
    assert len(await one.taken()) == 4
    await until(lambda: one.rollouter.stats()["unstored_groups"] == 0)
    assert queue.total_produced == 16 and queue.dropped == {}


async def test_a_rollouter_holds_a_ticket_until_the_queue_has_confirmed_its_end(scene: Build) -> None:
    scored = asyncio.Event()

    async def slow(response: str, row: Any) -> float:
        if row["index"] >= 2:
            await scored.wait()
        return by_index(response, row)

    async def fails(request: GenerationRequest, before: int) -> None:
        await one.engine.gate.wait()
        if request.prompt[0] == 0 and before == 0:
            raise EngineError("a kernel broke")

    queue = Reluctant(bounds=bounds_of(threshold=0))
    one = await scene(fails, queue=queue, reward=slow)
    one.engine.gate.clear()
    await until(lambda: one.engine.running == 4)
    assert one.held() == [0, 1, 2, 3], "in generation"
    one.engine.gate.set()
    await until(lambda: one.rollouter.stats()["unstored_groups"] == 1 and one.rollouter.generation_errors == 1)
    assert one.held() == [0, 1, 2, 3], "one failed, one is not stored, two are in scoring"
    queue.ready.set()
    await until(lambda: one.held() == [2, 3])
    scored.set()
    assert await one.ordinals() == [0, 1, 2, 3]
    await until(lambda: not one.held())


# -- zero variance ----------------------------------------------------------------------------------------------------


async def test_a_group_without_differing_rewards_is_dropped_and_another_takes_its_place(scene: Build) -> None:
    def score(response: str, row: Any) -> float:
        if row["index"] == 2 and response.endswith(" 2"):
            raise ValueError("a failed reward is no difference")
        return 1.0 if row["index"] % 2 == 0 else by_index(response, row)

    one = await scene(reward=score, drop_zero_variance=True)
    assert await one.ordinals() == [1, 3, 5, 7]
    stats = await one.queue.stats()
    assert stats["abandoned"]["zero_variance"] >= 4
    assert one.rollouter.dropped_zero_variance == N * stats["abandoned"]["zero_variance"]
    assert stats["failed_attempts"] == {}


# -- weights ----------------------------------------------------------------------------------------------------------


async def test_weights_that_arrive_during_generation_label_the_tokens_after_them(scene: Build) -> None:
    one = await scene(bounds=bounds_of(threshold=0))
    one.engine.gate.clear()
    await until(lambda: one.engine.running == 4)
    await one.rollouter.load_weights(1, pack({"w": torch.ones(1)}), verify=False)
    one.engine.gate.set()
    for group in await one.taken():
        assert group.versions.tolist() == [0, 1, 1, 1, 1, 1]
        assert group.min_version == 0
    assert one.rollouter.param_sync_requests == 1
    assert one.rollouter.stats()["version"] == 1


async def test_an_older_version_that_arrives_later_is_refused(scene: Build) -> None:
    """A transfer that timed out may still arrive after the next one."""
    one = await scene()
    weights = pack({"w": torch.ones(1)})
    assert await one.rollouter.load_weights(2, weights, verify=False) is None
    with pytest.raises(ValueError, match="version 1 is late"):
        await one.rollouter.load_weights(1, weights, verify=False)
    assert await one.rollouter.load_weights(2, weights, verify=True) == weights.checksum  # tried again
    assert one.engine.loaded == [2, 2]


# -- hooks ------------------------------------------------------------------------------------------------------------


class TwoTurns(Rollouter):
    """Two turns of the engine, with two tokens of a tool between them."""

    async def _custom_generation_logic(self, batch: DataProto) -> DataProto:
        prompt = batch.batch["prompts"][0].numpy().astype(np.int32)
        turns: list[list[int]] = []
        for turn in range(2):
            request = GenerationRequest(
                id=f"{batch.non_tensor_batch['uid'][0]}/{turn}", prompt=prompt, samples=(None,), timeout_s=30.0
            )  # type: ignore[arg-type]
            (response,) = await generate_all(self.engine, request)
            turns.append(response.tokens.tolist())
        rows = [[turns[0][0], 90, 91, turns[1][0], index] for index in range(N)]
        return data_proto(batch, rows, [1, 0, 0, 1, 1])


async def test_an_async_hook_keeps_a_tools_tokens_and_does_not_train_on_them(scene: Build) -> None:
    one = await scene(kind=TwoTurns)
    for group in await one.taken():
        first = group.response(0)
        assert first.tokens.tolist() == [group.ordinal, 90, 91, group.ordinal, 0]
        assert first.mask.tolist() == [1, 0, 0, 1, 1]
        assert first.versions.tolist() == [0, -1, -1, 0, 0]
        assert first.logprobs.tolist() == [-0.25, 0.0, 0.0, -0.25, -0.25]
        assert group.min_version == 0


async def test_a_hook_that_hangs_is_given_up_after_its_time(
    scene: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("freewheel.rollout.rollouter.HOOK_TIMEOUTS", 2)

    one = await scene(kind=hook(lambda batch: asyncio.sleep(WAIT_S)), generation_timeout_s=0.05)
    assert 0 not in await one.ordinals()
    await until(lambda: one.rollouter.generation_errors >= 1)
    assert (await one.queue.stats())["dropped_by_reason"]["timeout"] >= 1
    assert "longer than 2 times async_training.generation_timeout = 0.05 s" in caplog.text


async def test_weights_arrive_while_a_plain_hook_computes(scene: Build) -> None:
    started, go_on = threading.Event(), threading.Event()

    class Computes(Rollouter):
        def _custom_generation_logic(self, batch: DataProto) -> DataProto:
            started.set()
            assert len(batch) == N and go_on.wait(WAIT_S)
            return two_tokens(batch)

    one = await scene(kind=Computes, bounds=bounds_of(threshold=0))
    try:
        await until(started.is_set)
        await one.rollouter.load_weights(1, pack({"w": torch.ones(1)}), verify=False)
    finally:
        go_on.set()
    for group in await one.taken():
        assert group.tokens.tolist() == [7, 0, 7, 1, 7, 2]
        assert group.mask.all() and group.min_version == 0
        assert group.rewards.tolist() == [0.0, 1.0, 2.0]
    assert one.engine.requests == []


# -- the end ----------------------------------------------------------------------------------------------------------


async def test_the_death_of_the_engine_ends_the_loop_and_costs_no_prompt_an_attempt(scene: Build) -> None:
    def dead(request: GenerationRequest, before: int) -> None:
        raise EngineDied("its process is gone")

    one = await scene(dead)
    with pytest.raises(EngineDied, match="its process is gone"):
        await asyncio.wait_for(one.running, SOON_S)
    assert (await one.queue.stats())["failed_attempts"] == {}
    assert one.rollouter.generation_errors == 0
    assert await one.queue.release_replica("rollouter-0") > 0  # by the supervisor; they are issued again


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("doing", ["waiting for room", "generating", "scoring"])
async def test_stop_and_cancellation_end_the_loop_promptly(scene: Build, doing: str, cancelled: bool) -> None:
    async def never(response: str, row: Any) -> float:
        await asyncio.sleep(WAIT_S)
        return 0.0

    one = await scene(reward=never if doing == "scoring" else by_index, bounds=bounds_of(threshold=0))
    if doing == "generating":
        one.engine.gate.clear()
        await until(lambda: one.engine.running == 4)
    elif doing == "scoring":
        await until(lambda: one.rollouter.stats()["scoring_groups"] == 4)
    else:
        await one.taken()
    if cancelled:
        one.running.cancel()
    else:
        await one.rollouter.stop()
    await asyncio.wait([one.running], timeout=SOON_S)
    assert one.running.done() and one.engine.running == 0
    assert one.engine.closed_early == 4 * (doing == "generating")


# -- how much is requested ---------------------------------------------------------------------------------------------


@given(capacity=st.integers(1, 20), n=st.integers(1, 16), moves=st.lists(st.integers(0, 40), max_size=60))
def test_a_lookahead_wants_no_more_than_it_may_and_something_whenever_there_is_room(
    capacity: int, n: int, moves: list[int]
) -> None:
    """Each move: admit what is wanted, then end this many responses."""
    lookahead = Lookahead(capacity=capacity, n=n)
    for ends in moves:
        assert (lookahead.load - 1) * n < lookahead.unfinished <= lookahead.load * n
        assert lookahead.load + lookahead.want == capacity * LOOKAHEAD
        assert lookahead.want or not lookahead.has_room
        lookahead.admit(lookahead.want)
        assert not lookahead.want and lookahead.unfinished > (capacity * LOOKAHEAD - 1) * n
        lookahead.release(min(ends, lookahead.unfinished))
        assert lookahead.has_room == (lookahead.unfinished <= (capacity - 1) * n)
