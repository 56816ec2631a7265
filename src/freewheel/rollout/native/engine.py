"""`NativeEngine`: the engine protocol over a thread that decodes.

    event loop                                   thread
    generate ── InFlightRequest ──▶ commands ──▶ Scheduler.add
                                        admit ─▶ prefill ─▶ place ─▶ step ─▶ take     (one token a slot and turn)
    InFlightRequest.get ◀── one call a step ◀─── responses of the samples that ended
    pause / update_weights / abort ──▶ between two steps; the answer comes back as a future

The thread waits for: a command, while it is paused or idle. Unblocked by: any command, including `close`.
A caller waits for: its request. Unblocked by: a response, an error, the end of the thread, or the watch.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from transformers import PreTrainedModel

from freewheel.data.group import Response
from freewheel.rollout.engine import (
    EngineError,
    EngineStats,
    GenerationAborted,
    GenerationRequest,
    GenerationTimeout,
)
from freewheel.rollout.native.loop import DecodeLoop
from freewheel.rollout.native.runner import Runner, use_slot_attention
from freewheel.rollout.native.support import (
    UnsupportedModel,
    check_agreement,
    check_length,
    check_supported,
    load_weights,
    own_logprobs,
)
from freewheel.rollout.requests import InFlightRequest, RequestTracker, send
from freewheel.sync.weights import AnyWeights, content_sum

log = logging.getLogger(__name__)

WATCH_S = 0.5
"""How often requests are checked for a thread that hangs or died. Well below any useful timeout."""
CLOSE_PATIENCE_S = 30.0
"""Longer than a step. A step that hangs must not keep the program from ending."""

Command = tuple[Callable[[], Any], "Future[Any]"]


class NativeEngine:
    """Continuous batching over one model. Called from one event loop; the engine owns the model from now on.

    On a CPU, prompt, sampling parameters and weights determine tokens and log-probabilities bit for bit.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int,
        max_prompt_tokens: int,
        max_new_tokens: int,
        version: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, value in (
            ("slots", slots),
            ("max_prompt_tokens", max_prompt_tokens),
            ("max_new_tokens", max_new_tokens),
        ):
            if value < 1:
                raise ValueError(f"{name} = {value}: give at least 1")
        check_supported(model)
        check_length(model, max_prompt_tokens, max_new_tokens)
        probe = own_logprobs(model.train(False), max_prompt_tokens)
        use_slot_attention(model)
        self._model = model
        try:
            runner = Runner(
                model, slots=slots, max_prompt_tokens=max_prompt_tokens, max_new_tokens=max_new_tokens, version=version
            )
            check_agreement(runner, *probe)
        except NotImplementedError as error:  # a feature that only the model's own attention has
            raise UnsupportedModel(model, str(error)) from error
        self._loop = DecodeLoop(runner, slots=slots, clock=clock)
        self._requests = RequestTracker(
            max_prompt_tokens=max_prompt_tokens, max_new_tokens=max_new_tokens, vocabulary=runner.vocabulary
        )
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._open = True
        self._gate = threading.Lock()  # no command may be queued after the thread has answered the last one
        self._watch: asyncio.TimerHandle | None = None
        self._updating = asyncio.Lock()
        # A private pool: the event loop's may be full, and a new version must not wait for it.
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="freewheel-native-aside")
        self._thread = threading.Thread(target=self._run, name="freewheel-native-engine", daemon=True)
        self._thread.start()

    # -- the protocol -------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self._loop.version

    def generate(self, request: GenerationRequest) -> AsyncIterator[tuple[int, Response]]:
        return self._requests.serve(request, self._start, self._stop)

    def _start(self, entry: InFlightRequest) -> None:
        self._send(lambda: self._loop.add(entry))
        self._watch_over(entry.loop)

    def _stop(self, entry: InFlightRequest) -> None:
        if self._watch is not None and not len(self._requests):
            self._watch.cancel()
            self._watch = None
        if entry.missing and self._open:
            self._send(lambda: self._loop.forget(entry))

    async def pause(self) -> None:
        await self._ask(self._loop.pause)

    async def resume(self) -> None:
        await self._ask(self._loop.resume)

    async def update_weights(self, version: int, weights: AnyWeights, *, verify: bool) -> int | None:
        async with self._updating:
            given = weights.tensors()
            held = await self._ask(lambda: self._take_over(version, given))
            if not verify:
                return None
            # Runs while decoding continues: both only read the weights.
            return await asyncio.get_running_loop().run_in_executor(self._aside, content_sum, held.values())

    def _take_over(self, version: int, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """In the engine's thread, which runs one command after the other."""
        if version < self.version:  # a newer update overtook it
            raise ValueError(f"version {version} comes late: the engine holds {self.version}")
        return self._loop.update(version, lambda: load_weights(self._model, given))

    async def abort(self, request_id: str) -> None:
        self._requests.abort(request_id)

    def stats(self) -> EngineStats:
        return self._loop.stats()

    async def close(self) -> None:
        with self._gate:
            if self._open:
                self._open = False
                self._commands.put((self._loop.stop, Future()))
        if self._thread.is_alive():  # not at a second `close`
            await asyncio.get_running_loop().run_in_executor(self._aside, self._thread.join, CLOSE_PATIENCE_S)
        self._aside.shutdown()
        if self._thread.is_alive():
            log.error("the native engine's thread did not end within %g s: a step hangs", CLOSE_PATIENCE_S)

    # -- commands -----------------------------------------------------------------------------------------------------

    def _send(self, what: Callable[[], Any]) -> Future[Any]:
        answer: Future[Any] = Future()
        with self._gate:
            if not self._open:
                raise EngineError("the engine is closed")
            self._commands.put((what, answer))
        return answer

    async def _ask(self, what: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self._send(what))

    # -- the watch ----------------------------------------------------------------------------------------------------

    def _watch_over(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._watch is None and len(self._requests):
            self._watch = loop.call_later(WATCH_S, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """End requests without a new token in time. Runs in the event loop: a step that hangs cannot report itself."""
        self._watch = None
        dead = not self._thread.is_alive()
        idle_s = self._loop.idle_s()
        for entry in self._requests:
            if dead:
                entry.put(EngineError("the engine's thread has ended"))
            elif entry.holds_slot and idle_s > (limit_s := entry.request.timeout_s):
                said = f"request {entry.request.id!r}: no token for {idle_s:.3g} s, timeout_s = {limit_s:g}"
                entry.put(GenerationTimeout(said))
        self._watch_over(loop)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        reason: EngineError = GenerationAborted("the engine was closed")
        try:
            with torch.inference_mode():
                while not self._loop.stopped:
                    self._run_commands()
                    if not self._loop.stopped:
                        self._loop.turn()
        except BaseException as error:  # whatever it was, nobody may wait for this thread
            log.exception("the native engine's thread failed")
            reason = EngineError(f"the engine failed: {error!r}")
        with self._gate:
            self._open = False
        while not self._commands.empty():
            what, answer = self._commands.get()
            if what != self._loop.stop and answer.set_running_or_notify_cancel():
                answer.set_exception(EngineError("the engine is closed"))
        send([(entry, type(reason)(*reason.args)) for entry in self._requests])

    def _run_commands(self) -> None:
        """Run pending commands. Waits for one only while there is nothing to decode."""
        while not self._loop.stopped and (not self._loop.has_work or not self._commands.empty()):
            what, answer = self._commands.get()
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                answer.set_result(what())
            except Exception as error:  # noqa: BLE001  # raised where the command was sent
                answer.set_exception(error)
