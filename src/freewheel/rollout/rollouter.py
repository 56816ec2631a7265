"""`Rollouter`: generates continuously, scores responses, and puts whole groups into the queue.

    admit ─▶ ticket ─▶ prompt ─▶ engine ─▶ response, response, … ─▶ reward stage ─▶ group ─▶ outbox ─▶ put
      │ waits for: room                        each scored as it ends   │ waits for: rewards      │ until it is stored
      ▼                                                                 ▼
    capacity: responses in generation       a response in scoring holds no generation capacity

New weights arrive in the middle of generation (`load_weights`); each token carries the version that made it. A failed
attempt is reported with its kind, and the queue decides whether the prompt is attempted again. The rollouter keeps each
ticket in `tickets` until the queue confirms its end. If the queue restarts, its successor reads that list. Runs on one
event loop.

The planner simulates a rollouter with the same `Lookahead` and `PUT_LINGER_S`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

from freewheel.data.group import Array, EncodedGroup, EncodedGroups, Prompt, PromptGroup, Response, Ticket
from freewheel.errors import DataError
from freewheel.observe import samples, trace
from freewheel.observe.spans import Spans
from freewheel.queue.client import QueueClient
from freewheel.queue.ledger import Failure, data_failure, infra_failure
from freewheel.rollout.engine import Engine, EngineDied, EngineError, GenerationTimeout, PromptRefused
from freewheel.rollout.generation import Sampling, generate_and_score
from freewheel.rollout.reward_stage import FatalRewardFailure, GroupScoring, RewardStage, ScoringFailed
from freewheel.sync.weights import AnyWeights
from freewheel.trainer.advantages import has_no_variance
from freewheel.utils.waiting import unless_stopped, wait_for_event

log = logging.getLogger("freewheel.rollout")

ADMIT_WAIT_S = 5.0
"""How long one request for tickets waits. It is then repeated, to notice a dead queue."""
HOOK_TIMEOUTS = 20
"""A hook may take up to this many times `async_training.generation_timeout` per group (with 30 s: ten minutes). That
key limits the time without a new token, but a hook may run several turns with tools between them."""
LOOKAHEAD = 2.0
"""How many groups to hold admitted, as a multiple of what the engine runs at a time. The engine must not run dry
between two admissions."""
PUT_LINGER_S = 0.05
"""Groups that finish within this time share a message: a message costs more than a group."""
PUT_WAIT_S = 5.0
"""A put is repeated this often, with the groups finished since, so that the loss of the queue is noticed."""
PUT_RETRY_S = 0.5
"""Pause before a put is repeated that the queue could not store."""


class Rollouter:
    """Keeps its engine busy while there is room, and ends every ticket exactly once.

    Subclass it and override `_custom_generation_logic` to generate in another way (tools, several turns).
    """

    def __init__(
        self,
        *,
        name: str,
        engine: Engine,
        prompt: Callable[[int], Prompt],
        rewards: RewardStage,
        queue: QueueClient,
        sampling: Sampling,
        decode: Callable[[Array], str],
        capacity: int,
        generation_timeout_s: float,
        interval_s: float,
        drop_zero_variance: bool = False,
    ) -> None:
        self.name = name
        self.engine = engine
        self.rewards = rewards
        self.sampling = sampling
        self.spans = Spans(on_close=trace.span)
        self.total_generated_samples = 0
        self.generation_errors = 0
        self.param_sync_requests = 0
        self.dropped_zero_variance = 0
        self._prompt = prompt
        self._queue = queue
        self._decode = decode
        self.generation_timeout_s = generation_timeout_s
        self._interval_s = interval_s
        self._drop_zero_variance = drop_zero_variance
        self._lookahead = Lookahead(capacity=capacity, n=sampling.n)
        self._generating = 0
        self._tasks: dict[asyncio.Task[None], Ticket] = {}
        self._room = asyncio.Event()
        self._idle = asyncio.Event()  # no group is in generation or scoring
        self._idle.set()
        self._outbox = Outbox(put=queue.put, idle=self._idle)
        self._updating = asyncio.Lock()
        self._over = asyncio.Event()
        self._is_closing = False
        self._fatal: BaseException | None = None
        self._activity = ""
        self._span = ExitStack()

    # -- life ---------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run until the queue issues no more tickets. Raises errors that end a run, and `EngineDied`."""
        posting = asyncio.create_task(self._outbox.run())
        posting.add_done_callback(self._check_task)
        self._update_activity()
        try:
            while not self._over.is_set() and await self._admit():
                pass
        finally:
            self._is_closing = True
            for tasks in (list(self._tasks), [posting]):
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        if self._fatal is not None:
            raise self._fatal

    async def stop(self) -> None:
        self._end_with(None)

    async def close(self) -> None:
        self._span.close()  # the last activity belongs in this run's trace
        try:
            await self.engine.close()
        finally:
            await self.rewards.close()

    def _check_task(self, task: asyncio.Task[None]) -> None:
        """End `run` with the exception of a background task (such as a lost queue): nobody else would see it."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._end_with(error)

    def _end_with(self, error: BaseException | None) -> None:
        self._fatal = self._fatal or error
        self._over.set()
        self._room.set()

    async def _admit(self) -> bool:
        """Request tickets once. Returns False if no more will be issued."""
        if not self._lookahead.want:
            self._room.clear()
            await wait_for_event(self._room, ADMIT_WAIT_S)  # set when responses leave the engine
            return True
        holding = [ticket.sequence for ticket in self.tickets()]
        want, load = self._lookahead.want, self._lookahead.load
        request = self._queue.admit(self.name, want=want, load=load, wait_s=ADMIT_WAIT_S, holding=holding)
        admission = await unless_stopped(request, self._over)
        if admission is None:
            return False
        self._generating += len(admission.tickets)
        self._lookahead.admit(len(admission.tickets))
        for ticket in admission.tickets:
            task = asyncio.create_task(self._process(ticket))
            self._tasks[task] = ticket
            self._idle.clear()
            task.add_done_callback(self._finish_task)
        self._update_activity()
        if admission.tickets and self._interval_s:
            self._room.clear()
            if not self._lookahead.has_room:  # otherwise the engine has free slots, so don't pause
                await wait_for_event(self._room, self._interval_s)
        return not admission.closed

    def _finish_task(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not self._tasks:
            self._idle.set()
        self._check_task(task)
        self._update_activity()

    def _update_activity(self) -> None:
        """Record what this rollouter does or waits for now, for the report of the bottleneck."""
        activity = "generate" if self._generating else "wait_reward" if self._tasks else "wait_room"
        if activity != self._activity:
            self._activity = activity
            self._span.close()
            self._span.enter_context(self.spans(activity))

    # -- one group ----------------------------------------------------------------------------------------------------

    async def _process(self, ticket: Ticket) -> None:
        """Process a ticket until its group is put, abandoned or failed, exactly once."""
        try:
            group = await self._make_group(ticket)
            encoded = EncodedGroup.of(group)  # a row that cannot be encoded is the prompt's failure
        except EngineDied as error:  # the supervisor reports the lost groups when it replaces this rollouter
            self._end_with(error)
        except asyncio.CancelledError:
            if self._is_closing:
                raise
            await self._report(ticket, infra_failure("lost", "something that it awaited was cancelled"))
        except Exception as error:  # a user's task, hook or reward may raise anything; the run continues
            failure = _failure_of(error)
            if failure.reason == "hook":
                log.exception("Prompt %d failed", ticket.ordinal, extra=self._log_fields(ticket))
            if isinstance(error, FatalRewardFailure):
                self._end_with(error)
            await self._report(ticket, failure)
        else:
            samples.offer(lambda: sample_of(group, replica=self.name, decode=self._decode, wall_s=time.time()))
            if self._drop_zero_variance and has_no_variance(group):
                self.dropped_zero_variance += len(group)
                await self._queue.abandon(ticket, "zero_variance")
            else:
                self._outbox.add(encoded)

    async def _report(self, ticket: Ticket, failure: Failure) -> None:
        self.generation_errors += 1
        about = (ticket.ordinal, ticket.attempt, failure.reason, failure.detail)
        log.warning("Prompt %d, attempt %d failed (%s): %s", *about, extra=self._log_fields(ticket))
        await self._queue.fail(ticket, failure)

    def _log_fields(self, ticket: Ticket) -> dict[str, int]:
        return {"ordinal": ticket.ordinal, "version": self.engine.version}

    async def _make_group(self, ticket: Ticket) -> PromptGroup:
        created_s, start_s = time.time(), trace.now()
        n, scoring = self.sampling.n, None
        try:
            prompt = self._render(ticket)
            scoring = self.rewards.group(ticket, prompt, n)
            responses = await generate_and_score(
                self._generate(ticket, prompt), n, partial(self._score, scoring, start_s)
            )
        except BaseException:
            if scoring is not None:
                scoring.cancel()  # no judge is paid for responses that nobody will use
            raise
        finally:
            self._generating -= 1
            self._update_activity()
            self._release(scoring.missing if scoring is not None else n)
        tokens = sum(len(response.tokens) for response in responses)
        trace.phase("generate", ticket.ordinal, start_s, attempt=ticket.attempt, responses=n, tokens=tokens)
        return PromptGroup.of(ticket, prompt, await scoring.result(), created_s)

    def _render(self, ticket: Ticket) -> Prompt:
        try:
            return self._prompt(ticket.ordinal)
        except Exception as error:
            raise PromptRefused(f"the task could not render it: {type(error).__name__}: {error}") from error

    def _generate(self, ticket: Ticket, prompt: Prompt) -> AsyncIterator[tuple[int, Response]]:
        timeout_s = self.generation_timeout_s
        if type(self)._custom_generation_logic is Rollouter._custom_generation_logic:
            request = self.sampling.request(f"{ticket.sequence}", ticket.ordinal, prompt, timeout_s=timeout_s)
            return self.engine.generate(request)
        return self._generate_by_hook(ticket, prompt)

    async def _generate_by_hook(self, ticket: Ticket, prompt: Prompt) -> AsyncGenerator[tuple[int, Response], None]:
        """Yield the responses of the user's `_custom_generation_logic`."""
        from freewheel.data.padded import from_data_proto, prompt_to_data_proto  # imports torch

        n, version = self.sampling.n, self.engine.version
        limit = asyncio.timeout(HOOK_TIMEOUTS * self.generation_timeout_s)
        try:
            async with limit:
                result = await self._call_hook(prompt_to_data_proto(prompt, n, ticket.ordinal))
        except TimeoutError as error:
            if not limit.expired():  # raised by the hook, perhaps by one of its tools
                raise
            raise GenerationTimeout(
                f"_custom_generation_logic took longer than {HOOK_TIMEOUTS} times async_training.generation_timeout = "
                f"{self.generation_timeout_s:g} s"
            ) from error
        stop_token_ids = self.sampling.stop_token_ids
        responses = from_data_proto(result, ticket, prompt, version, stop_token_ids=stop_token_ids)
        if len(responses) != n:
            raise DataError(f"_custom_generation_logic gave {len(responses)} rows: give rollout.n = {n}")
        for index, response in enumerate(responses):
            yield index, response

    async def _call_hook(self, batch: Any) -> Any:
        """Call a plain function in a thread, so that weights can arrive and other groups can continue while it
        computes."""
        hook = self._custom_generation_logic
        result = hook(batch) if inspect.iscoroutinefunction(hook) else await asyncio.to_thread(hook, batch)
        return await result if inspect.isawaitable(result) else result

    def _score(self, scoring: GroupScoring, start_s: float, index: int, response: Response) -> None:
        self.total_generated_samples += 1
        trace.phase("response", scoring.ordinal, start_s, index=index, tokens=len(response.tokens))
        scoring.add(index, self._decode(response.tokens), response)
        self._release(1)

    def _release(self, responses: int) -> None:
        """These responses have left the engine, or will never enter it."""
        self._lookahead.release(responses)
        if self._lookahead.has_room:
            self._room.set()

    def _custom_generation_logic(self, batch: Any) -> Any:
        """Hook, called only if it is overridden. `batch`: a DataProto with the prompt, repeated n times.

        Returns a DataProto of n rows, or an awaitable of one with `responses`, `response_mask` and `rollout_log_probs`.
        `self.engine` generates. A hook that is not `async` runs in threads, for several groups at a time.
        """
        raise NotImplementedError

    # -- weights ------------------------------------------------------------------------------------------------------

    async def load_weights(self, version: int, weights: AnyWeights, *, verify: bool) -> int | None:
        """Switch the engine to `version` while it generates. Returns the checksum of the loaded weights if `verify`."""
        self.param_sync_requests += 1
        async with self._updating:
            if version < self.engine.version:  # a sync that was given up arrives after a later one
                raise ValueError(f"version {version} is late: the engine holds {self.engine.version}")
            with self.spans("load_weights", version=version):
                return await self.engine.update_weights(version, weights, verify=verify)

    # -- state --------------------------------------------------------------------------------------------------------

    def tickets(self) -> list[Ticket]:
        """Return the tickets of all groups in generation, in scoring, or not stored by the queue yet."""
        held = [*self._tasks.values(), *self._outbox.tickets]
        return list({ticket.sequence: ticket for ticket in held}.values())

    def stats(self) -> dict[str, Any]:
        engine = asdict(self.engine.stats())
        return {
            "total_generated_samples": self.total_generated_samples,
            "generation_errors": self.generation_errors,
            "param_sync_requests": self.param_sync_requests,
            "dropped_zero_variance": self.dropped_zero_variance,
            "generating_groups": self._generating,
            "scoring_groups": len(self._tasks) - self._generating,
            "unstored_groups": len(self._outbox),
            "engine_busy_s": engine.pop("busy_s"),
            **engine,
            "rewards": self.rewards.stats(),
            "spans": self.spans.snapshot(),
        }


class Lookahead:
    """How many groups a rollouter requests.

    It counts responses and not groups: a group with one long response leaves the slots of the others free.
    """

    __slots__ = ("_most", "_n", "capacity", "unfinished")

    def __init__(self, *, capacity: int, n: int) -> None:
        self.capacity = capacity
        """Groups whose responses the engine generates at a time."""
        self.unfinished = 0
        """Responses that were admitted and have not ended."""
        self._most = int(capacity * LOOKAHEAD)
        self._n = n

    def admit(self, groups: int) -> None:
        self.unfinished += groups * self._n

    def release(self, responses: int) -> None:
        """These responses have left the engine, or will never enter it."""
        self.unfinished -= responses

    @property
    def load(self) -> int:
        """Unfinished responses, in groups."""
        return -(-self.unfinished // self._n)

    @property
    def want(self) -> int:
        """Groups to request; 0: none now."""
        return max(0, self._most - self.load)

    @property
    def has_room(self) -> bool:
        """Whether fewer groups are unfinished than the engine runs at a time."""
        return self.load < self.capacity


def _failure_of(error: Exception) -> Failure:
    match error:
        case PromptRefused():
            return data_failure("prompt", error)
        case GenerationTimeout():
            return infra_failure("timeout", error)
        case EngineError():
            return infra_failure("engine", error)
        case ScoringFailed():
            return (infra_failure if error.is_infra else data_failure)("reward", error)
    return data_failure("hook", f"{type(error).__name__}: {error}")


class Outbox:
    """Finished groups on their way into the queue, kept until they are stored there.

        add ─▶ waiting ─▶ put all waiting groups in one message ─▶ True: stored, forgotten here
                  ▲                                                False: not yet (a full disk, a restarted queue)
                  └───────────── put again ◀───────────────────────┘

    Admission bounds how many groups can wait here.
    """

    def __init__(self, *, put: Callable[..., Awaitable[bool]], idle: asyncio.Event) -> None:
        """`idle`: set while no other group is about to be added."""
        self._put = put
        self._idle = idle
        self._groups: dict[int, tuple[EncodedGroup, float]] = {}
        """Groups by sequence, with the time at which each was added."""
        self._has_groups = asyncio.Event()

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def tickets(self) -> list[Ticket]:
        return [group.ticket for group, _ in self._groups.values()]

    def add(self, group: EncodedGroup) -> None:
        self._groups[group.ticket.sequence] = group, trace.now()
        self._has_groups.set()

    async def run(self) -> None:
        """Run until cancelled. Raises what `put` raises."""
        while True:
            await self._has_groups.wait()
            await wait_for_event(self._idle, PUT_LINGER_S)
            self._has_groups.clear()
            groups = EncodedGroups(group for group, _ in self._groups.values())
            if await self._put(groups, wait_s=PUT_WAIT_S):
                for ticket, _, _ in groups:
                    _, added_s = self._groups.pop(ticket.sequence)
                    trace.phase("store", ticket.ordinal, added_s)
            else:
                self._has_groups.set()
                await asyncio.sleep(PUT_RETRY_S)


def sample_of(group: PromptGroup, *, replica: str, decode: Callable[[Array], str], wall_s: float) -> dict[str, Any]:
    """Return a group as text for `freewheel.observe.samples`. docs/dashboard.md describes the format."""
    responses = []
    for response in map(group.response, range(len(group))):
        verdict = response.verdict
        assert verdict is not None
        responses.append(
            {
                "segments": samples.segments(decode, response.tokens, response.versions.tolist()),
                "tokens": len(response.tokens),
                "finish": response.finish,
                "value": response.reward,
                "raw": response.raw_reward,
                "status": verdict.status,
                "reason": verdict.summary,
                "parts": dict(verdict.parts),
            }
        )
    return {
        "time": round(wall_s, 3),
        "ordinal": group.ticket.ordinal,
        "sequence": group.ticket.sequence,
        "attempt": group.ticket.attempt,
        "replica": replica,
        "prompt": decode(group.prompt),
        "row": dict(group.row),
        "responses": responses,
    }
