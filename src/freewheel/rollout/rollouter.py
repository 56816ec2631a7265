"""`Rollouter`: generates without end, scores, and puts whole groups into the queue.

    admit ─▶ ticket ─▶ prompt ─▶ engine ─▶ response, response, … ─▶ reward stage ─▶ group ─▶ outbox ─▶ put
      │ waits for: room                        each scored as it ends   │ waits for: rewards      │ until it is stored
      ▼                                                                 ▼
    capacity: responses in generation       a response in scoring holds no generation capacity

New weights arrive in mid-flight (`load_weights`); each token carries the version that made it. A failed attempt is
reported with its kind, and the queue decides whether the prompt is tried again. A ticket is held (`tickets`) until the
queue has answered for its end, so that a queue's successor can be told of it. Runs on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from typing import Any

from freewheel.data.group import Array, EncodedGroup, Prompt, PromptGroup, Response, Ticket
from freewheel.observe import trace
from freewheel.observe.spans import Spans
from freewheel.queue.client import Admission, QueueClient
from freewheel.queue.ledger import Failure, data_failure, infra_failure
from freewheel.rollout.engine import (
    Engine,
    EngineDied,
    EngineError,
    GenerationRequest,
    GenerationTimeout,
    PromptRefused,
    SamplingParams,
)
from freewheel.rollout.hook import generate_by_hook
from freewheel.rollout.lookahead import Lookahead
from freewheel.rollout.outbox import Outbox, wait
from freewheel.rollout.recording import note_generated, offer_sample
from freewheel.rollout.reward_stage import FatalRewardFailure, GroupScoring, RewardStage, ScoringFailed
from freewheel.rollout.seeds import sample_seed
from freewheel.sync.weights import AnyWeights
from freewheel.trainer.advantages import has_no_variance

log = logging.getLogger("freewheel.rollout")

ADMIT_WAIT_S = 5.0
"""A wait for room is asked for anew this often, so that a queue that went away is noticed."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a group is sampled."""

    n: int
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    """The run's."""

    def params(self, ordinal: int) -> tuple[SamplingParams, ...]:
        return tuple(
            SamplingParams(
                max_new_tokens=self.max_new_tokens,
                seed=sample_seed(self.seed, ordinal, index),
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                stop_token_ids=self.stop_token_ids,
            )
            for index in range(self.n)
        )


class Rollouter:
    """Keeps its engine busy while there is room, and brings every ticket to exactly one end.

    Subclass it and override `_custom_generation_logic` to generate in a way of your own (tools, several turns).
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
        pad_token_id: int = 0,
        wall_clock: Callable[[], float] = time.time,
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
        self._pad_token_id = pad_token_id
        self._wall_clock = wall_clock
        self._lookahead = Lookahead(capacity=capacity, n=sampling.n)
        self._generating = 0
        self._making: dict[asyncio.Task[None], Ticket] = {}
        self._room = asyncio.Event()
        self._quiet = asyncio.Event()  # nothing is being made
        self._quiet.set()
        self._outbox = Outbox(put=queue.put, quiet=self._quiet)
        self._over = asyncio.Event()
        self._winding_up = False
        self._fatal: BaseException | None = None
        self._doing = ""
        self._span = ExitStack()

    # -- life ---------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until the queue says that no ticket will come any more. Raises what ends a run, and `EngineDied`."""
        posting = asyncio.create_task(self._outbox.run())
        posting.add_done_callback(self._look_at)
        self._note()
        try:
            while not self._over.is_set() and await self._admit():
                pass
        finally:
            await self._wind_up(posting)
        if self._fatal is not None:
            raise self._fatal

    async def _wind_up(self, posting: asyncio.Task[None]) -> None:
        self._winding_up = True
        for task in self._making:
            task.cancel()
        await asyncio.gather(*self._making, return_exceptions=True)
        posting.cancel()
        await asyncio.gather(posting, return_exceptions=True)

    async def stop(self) -> None:
        self._over.set()
        self._room.set()

    async def close(self) -> None:
        try:
            await self.engine.close()
        finally:
            await self.rewards.close()

    def _look_at(self, task: asyncio.Task[None]) -> None:
        """What a task of ours raises (the queue is gone, say) ends `run`: nobody else would hear of it."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._fatal = self._fatal or error
        self._over.set()
        self._room.set()

    async def _admit(self) -> bool:
        """One look for tickets. False: none will come any more."""
        if not self._lookahead.want:
            self._room.clear()
            await wait(self._room, ADMIT_WAIT_S)  # set when responses leave the engine
            return True
        admission = await self._asked()
        if admission is None:
            return False
        self._generating += len(admission.tickets)
        self._lookahead.admit(len(admission.tickets))
        for ticket in admission.tickets:
            task = asyncio.create_task(self._make(ticket))
            self._making[task] = ticket
            self._quiet.clear()
            task.add_done_callback(self._made)
        self._note()
        if admission.tickets and self._interval_s:
            self._room.clear()
            if not self._lookahead.has_room:  # else there is no time to lose
                await wait(self._room, self._interval_s)
        return not admission.closed

    async def _asked(self) -> Admission | None:
        """The queue's answer; None where `run` is over before it comes."""
        holding = [ticket.sequence for ticket in self.tickets()]
        want, load = self._lookahead.want, self._lookahead.load
        asking = asyncio.ensure_future(
            self._queue.admit(self.name, want=want, load=load, wait_s=ADMIT_WAIT_S, holding=holding)
        )
        ending = asyncio.ensure_future(self._over.wait())
        try:
            await asyncio.wait([asking, ending], return_when=asyncio.FIRST_COMPLETED)
            return asking.result() if asking.done() else None
        finally:
            asking.cancel()
            ending.cancel()

    def _made(self, task: asyncio.Task[None]) -> None:
        del self._making[task]
        if not self._making:
            self._quiet.set()
        self._look_at(task)
        self._note()

    def _note(self) -> None:
        """What this rollouter does now, for the accounts of who waits for whom."""
        now = "generate" if self._generating else "wait_reward" if self._making else "wait_room"
        if now != self._doing:
            self._doing = now
            self._span.close()
            self._span.enter_context(self.spans(now))

    # -- one group ----------------------------------------------------------------------------------------------------

    async def _make(self, ticket: Ticket) -> None:
        """From a ticket to its one end: put, abandoned or failed."""
        try:
            group = await self._group(ticket)
            encoded = EncodedGroup.of(group)  # a row that cannot travel is its prompt's failure
        except EngineDied as error:  # with all that it made: the queue hears it from who starts another
            self._fail(error)
        except PromptRefused as error:
            await self._failed(ticket, data_failure("prompt", error))
        except GenerationTimeout as error:
            await self._failed(ticket, infra_failure("timeout", error))
        except EngineError as error:
            await self._failed(ticket, infra_failure("engine", error))
        except ScoringFailed as error:
            await self._failed(ticket, (infra_failure if error.is_infra else data_failure)("reward", error))
        except asyncio.CancelledError:
            if self._winding_up:
                raise
            await self._failed(ticket, infra_failure("lost", "something that it awaited was cancelled"))
        except Exception as error:  # a user's task, hook or reward stage may raise anything; the run goes on
            log.exception("Prompt %d failed", ticket.ordinal, extra=self._about(ticket))
            if isinstance(error, FatalRewardFailure):
                self._fail(error)
            await self._failed(ticket, data_failure("hook", f"{type(error).__name__}: {error}"))
        else:
            offer_sample(group, replica=self.name, decode=self._decode)
            if self._drop_zero_variance and has_no_variance(group):
                self.dropped_zero_variance += len(group)
                await self._queue.abandon(ticket, "zero_variance")
            else:
                self._outbox.add(encoded)

    async def _failed(self, ticket: Ticket, failure: Failure) -> None:
        self.generation_errors += 1
        told = (ticket.ordinal, ticket.attempt, failure.reason, failure.detail)
        log.warning("Prompt %d, attempt %d failed (%s): %s", *told, extra=self._about(ticket))
        await self._queue.fail(ticket, failure)

    def _about(self, ticket: Ticket) -> dict[str, int]:
        """For the log."""
        return {"ordinal": ticket.ordinal, "version": self.engine.version}

    async def _group(self, ticket: Ticket) -> PromptGroup:
        created_s, began_s = self._wall_clock(), trace.now()
        scoring: GroupScoring | None = None
        try:
            prompt = self._render(ticket)
            scoring = self.rewards.group(ticket, prompt, self.sampling.n)
            responses = await self._responses(ticket, prompt, scoring, began_s)
        except BaseException:
            if scoring is not None:
                scoring.cancel()  # no judge is paid for what nobody will use
            raise
        finally:
            self._generating -= 1
            self._note()
            self._leave(scoring.missing if scoring is not None else self.sampling.n)
        note_generated(ticket, responses, began_s)
        return PromptGroup.of(ticket, prompt, await scoring.result(), created_s)

    def _render(self, ticket: Ticket) -> Prompt:
        try:
            return self._prompt(ticket.ordinal)
        except Exception as error:
            raise PromptRefused(f"the task could not render it: {type(error).__name__}: {error}") from error

    async def _responses(self, ticket: Ticket, prompt: Prompt, scoring: GroupScoring, began_s: float) -> list[Response]:
        if type(self)._custom_generation_logic is not Rollouter._custom_generation_logic:
            responses = await generate_by_hook(
                self._custom_generation_logic,
                ticket,
                prompt,
                n=self.sampling.n,
                version=self.engine.version,
                generation_timeout_s=self.generation_timeout_s,
                pad_token_id=self._pad_token_id,
                stop_token_ids=self.sampling.stop_token_ids,
            )
            for index, response in enumerate(responses):
                self._score(scoring, index, response, began_s)
            return responses
        found: dict[int, Response] = {}
        async with aclosing(self._generate(ticket, prompt)) as generated:
            async for index, response in generated:
                found[index] = response
                self._score(scoring, index, response, began_s)
        return [found[index] for index in range(self.sampling.n)]

    async def _generate(self, ticket: Ticket, prompt: Prompt) -> AsyncGenerator[tuple[int, Response], None]:
        request = GenerationRequest(
            id=f"{ticket.sequence}",
            prompt=prompt.tokens,
            samples=self.sampling.params(ticket.ordinal),
            timeout_s=self.generation_timeout_s,
        )
        async for index, response in self.engine.generate(request):
            yield index, response

    def _score(self, scoring: GroupScoring, index: int, response: Response, began_s: float) -> None:
        self.total_generated_samples += 1
        trace.phase("response", scoring.ordinal, began_s, index=index, tokens=len(response.tokens))
        scoring.add(index, self._decode(response.tokens), response)
        self._leave(1)

    def _leave(self, responses: int) -> None:
        self._lookahead.made(responses)
        if self._lookahead.has_room:
            self._room.set()

    def _custom_generation_logic(self, batch: Any) -> Any:
        """Hook. `batch`: a DataProto with the prompt, repeated n times. Gives (or awaits to) a DataProto of n rows with
        `responses`, `response_mask` and `rollout_log_probs`; `self.engine` generates. One that is not `async` is called
        in threads, for several groups at a time. Not called unless overridden."""
        raise NotImplementedError

    # -- weights ------------------------------------------------------------------------------------------------------

    async def load_weights(self, version: int, weights: AnyWeights, *, verify: bool) -> int | None:
        """Takes over a version in mid-flight; gives the content sum of what the engine then holds, where `verify`."""
        self.param_sync_requests += 1
        if version < self.engine.version:  # an attempt that was given up, and arrives after its successors
            raise ValueError(f"version {version} comes late: the engine holds {self.engine.version}")
        with self.spans("load_weights", version=version):
            return await self.engine.update_weights(version, weights, verify=verify)

    # -- what it knows ------------------------------------------------------------------------------------------------

    def tickets(self) -> list[Ticket]:
        """All that it works on: in generation, in scoring, or not yet stored by the queue."""
        held = [*self._making.values(), *self._outbox.tickets]
        return list({ticket.sequence: ticket for ticket in held}.values())

    def stats(self) -> dict[str, Any]:
        engine = self.engine.stats()
        return {
            "total_generated_samples": self.total_generated_samples,
            "generation_errors": self.generation_errors,
            "param_sync_requests": self.param_sync_requests,
            "dropped_zero_variance": self.dropped_zero_variance,
            "generating_groups": self._generating,
            "scoring_groups": len(self._making) - self._generating,
            "unstored_groups": len(self._outbox),
            "version": engine.version,
            "running": engine.running,
            "waiting": engine.waiting,
            "slots": engine.slots,
            "generated_tokens": engine.generated_tokens,
            "prompt_tokens": engine.prompt_tokens,
            "engine_busy_s": engine.busy_s,
            "rewards": self.rewards.stats(),
            "spans": self.spans.snapshot(),
        }
