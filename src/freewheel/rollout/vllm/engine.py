"""`rollout.engine=vllm`: `VllmEngine` is the engine protocol over vLLM's `AsyncLLM`; `VllmFactory` makes it for a run.

    event loop                                              vLLM's engine core, a separate process
    generate ─ one request per sample ─▶ Llm.submit ──────▶ scheduler ─▶ step, step, …
    InFlightGeneration.get ◀─ responses, with versions ◀─ Llm.versions ◀── batches of new tokens
    update_weights ─▶ pause ─▶ start, buckets, finish ─▶ resume ─▶ (verify)      requests are kept, with their KV

A sample waits for its output; its end, a caller that leaves, the watch or the core's death unblock it. An update
waits for the previous update and the core's answers; an answer or the core's death unblocks it.

An update that fails before the first bucket leaves the old version serving. One that fails later has overwritten some
weights: nothing is generated until another update succeeds. If the next one fails too, the engine counts as dead.

    EngineSettings, the model's own config ─▶ engine_arguments ─▶ AsyncEngineArgs(**…) ─▶ VllmEngine
    rollout.vllm: any argument by vLLM's own name ──▲  except those that freewheel must set (`SET_BY_FREEWHEEL`)

With `rollout.urls` the engine is a user's server. `engine_arguments` is pure. The checks run in a child process before
a run starts (`freewheel.runtime.preflight`).
"""

from __future__ import annotations

import asyncio
import difflib
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, AsyncExitStack
from functools import partial
from typing import Any

import numpy as np

from freewheel.data.group import Finish, Response
from freewheel.errors import ConfigError
from freewheel.rollout.engine import (
    EngineDied,
    EngineError,
    EngineStats,
    GenerationAborted,
    GenerationRequest,
    GenerationTracker,
    InFlightGeneration,
    generated_response,
)
from freewheel.rollout.engine_factories import (
    NUMBER_BYTES,
    EngineFactory,
    EngineSettings,
    GpuShare,
    LoadedEngine,
    RolloutOptions,
    count_parameters,
    load_causal_lm,
    load_model_config,
)
from freewheel.rollout.vllm import api
from freewheel.rollout.vllm.api import SampleOutput
from freewheel.rollout.vllm.remote import RemoteLlm, RemoteServer, find_server
from freewheel.rollout.vllm.transfer import BACKENDS, ROLLOUTER, WORKER_EXTENSION, ship, whole_sum
from freewheel.sync.weights import AnyWeights, Weights, pack
from freewheel.utils.waiting import Stopwatch

log = logging.getLogger("freewheel.rollout")

Connect = Callable[..., Any]
"""`Llm` or `RemoteLlm`, without `version` and `on_death`."""
Ship = Callable[[AnyWeights], AbstractContextManager[list[dict[str, Any]]]]
"""Turns weights into arguments of vLLM's `update_weights`, one per bucket."""

MOST_FAILED_UPDATES = 2
"""Consecutive failed updates of an engine with mixed weights: the second update may repair the first, and there is no
third."""
CONTENT_SUM = "freewheel_content_sum"
"""The worker's method that returns the checksum of its weights."""
FINISHES: dict[str | None, Finish] = {"stop": "stop", "length": "length"}
SET_BY_FREEWHEEL: Mapping[str, str] = {
    "model": "model.path sets it",
    "dtype": "model.dtype sets it: training and generation must have the same",
    "tokenizer": "prompts come as tokens, and it has none",
    "skip_tokenizer_init": "prompts come as tokens, and it has no tokenizer",
    "max_num_seqs": "rollout.slots sets it",
    "gpu_memory_utilization": "rollout.gpu_memory_share sets it",
    "tensor_parallel_size": "rollout.tensor_parallel_size sets it",
    "pipeline_parallel_size": "rollout.pipeline_parallel_size sets it",
    "data_parallel_size": "rollout.replicas sets it",
    "generation_config": "rollout sets how responses are sampled",
    "logprobs_mode": "training needs log-probabilities at the sampling temperature",
    "weight_transfer_config": "async_training.weight_transport sets how weights get there",
    "worker_extension_cls": "freewheel's own takes over new weights",
}
"""Arguments that `rollout.vllm` must not contain, and why."""
LOGPROBS = "processed_logprobs"
"""At the sampling temperature. If top_p or top_k cut the distribution: of what is left."""
BLOCK_TOKENS = 128
"""A block of vLLM's KV cache on a CPU, by default. Blocks on a GPU are smaller."""
WORKSPACE_BYTES = 2 << 30
"""What an engine takes on a GPU besides weights and KV cache: activations, CUDA graphs, CUDA itself."""
GIB = 2**30
KV_SPARE = 1.25
"""Size of the KV cache, if we set it, relative to what all slots need. The rest keeps prefixes for later prompts."""
LARGEST_SEED = 2**32
"""vLLM seeds numpy's generators too, which take 32 bits."""


class VllmEngine:
    """Continuous batching by vLLM. Called from one event loop.

    On a CPU a sample's draws follow from its seed; the batch may still change the last bit of a logit.
    """

    def __init__(
        self,
        connect: Connect,
        *,
        ship: Ship,
        slots: int,
        max_prompt_tokens: int,
        max_new_tokens: int,
        vocabulary: int,
        version: int = 0,
        initial: Callable[[], AnyWeights] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`connect` returns a vLLM that belongs to this engine from now on. `initial`: the weights of `version`, if
        that vLLM may hold others; they are loaded before anything is generated."""
        self._llm = connect(version=version, on_death=self._core_died)
        self._initial = initial
        self._ship = ship
        self.version = version
        # Not the version: a server's cache outlives this engine, and a version number may return with other weights.
        self._salt = secrets.token_hex(8)
        self._requests = GenerationTracker(
            slots=slots,
            max_prompt_tokens=max_prompt_tokens,
            max_new_tokens=max_new_tokens,
            vocabulary=vocabulary,
            idle_s=self._idle_s,
        )
        self._samples: dict[InFlightGeneration, list[asyncio.Task[None]]] = {}
        self._live: set[str] = set()
        """Samples that are not done."""
        self._tasks: set[asyncio.Future[Any]] = set()
        """Background tasks that nobody awaits."""
        self._busy = Stopwatch(clock)
        """Time during which tokens may be expected."""
        self._progress: tuple[int | None, float] = 0, 0.0
        """Tokens made when a new one was last seen (None: not counted), and the busy time then."""
        self._is_paused = False
        self._free = asyncio.Event()
        """Set while no update runs: a request that starts now starts with the current version."""
        if initial is None:
            self._free.set()
        self._updating = asyncio.Lock()
        self._failed_updates = 0
        """Consecutive failures. Above 0 the weights are mixed."""
        self._prompt_tokens = 0
        self._ended_tokens = 0
        self._over: EngineError | None = None
        self._closing: asyncio.Future[None] | None = None
        self._priming: asyncio.Future[Any] | None = None
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="freewheel-vllm-aside")

    # -- the protocol -------------------------------------------------------------------------------------------------

    def generate(self, request: GenerationRequest) -> AsyncIterator[tuple[int, Response]]:
        return self._requests.serve(request, self._start, self._stop)

    def _start(self, entry: InFlightGeneration) -> None:
        self._check_open()
        if self._initial is not None and self._priming is None:
            self._priming = self._run_task(self._prime())
        prompt = entry.request.prompt.tolist()
        self._prompt_tokens += len(prompt)
        self._samples[entry] = [
            asyncio.create_task(self._sample(entry, index, prompt)) for index in range(len(entry.request.samples))
        ]

    def _stop(self, entry: InFlightGeneration) -> None:
        for sample in self._samples.pop(entry, ()):
            sample.cancel()

    async def update_weights(self, version: int, weights: AnyWeights, *, verify: bool) -> int | None:
        # A separate task: a cancelled caller must not leave half an update behind.
        return await asyncio.shield(self._run_task(self._take_over(version, weights, verify)))

    def stats(self) -> EngineStats:
        live, slots = len(self._live), self._requests.slots
        return EngineStats(
            version=self.version,
            running=min(live, slots),
            waiting=max(0, live - slots),
            slots=slots,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._count_tokens(),
            busy_s=self._busy.elapsed_s,
        )

    async def close(self) -> None:
        self._end(GenerationAborted("the engine was closed"))
        if self._closing is None:  # its end also ends pending requests and updates
            self._closing = asyncio.ensure_future(self._llm.shutdown())
        await asyncio.shield(self._closing)
        self._aside.shutdown(wait=False)

    # -- one sample ---------------------------------------------------------------------------------------------------

    async def _sample(self, entry: InFlightGeneration, index: int, prompt: list[int]) -> None:
        """Put the response, or the error that ended it, into the request's inbox."""
        name = f"{entry.request.id}/{index}"
        self._live.add(name)
        self._busy.run(not self._is_paused)
        try:
            await self._free.wait()
            self._check_open()
            self._llm.versions.begin(name)
            output = await self._llm.output(name, prompt, entry.request.samples[index], salt=self._salt)
            response = self._response(name, output)
            self._forget(name, len(response.tokens))  # before `put`, so that the receiver finds it counted
            entry.put((index, response))
        except EngineError as error:
            entry.put(error)
        except Exception as error:  # noqa: BLE001  # whatever vLLM raises, the caller must get it
            entry.put(EngineError(f"vLLM failed: {type(error).__name__}: {error}"))
        finally:
            if name in self._live:
                self._forget(name, self._llm.tokens().get(name, 0))
                if self._over is None:
                    self._run_task(self._llm.abort(name))

    def _forget(self, name: str, tokens: int) -> None:
        self._live.discard(name)
        self._ended_tokens += tokens
        self._llm.versions.end(name)
        self._progress = None, self._busy.elapsed_s  # an end is progress too
        self._busy.run(bool(self._live) and not self._is_paused)

    def _response(self, name: str, output: SampleOutput) -> Response:
        tokens = np.asarray(output.tokens, np.int32)
        logprobs = np.asarray(output.logprobs, np.float32)
        finish = FINISHES.get(output.finish)
        if finish is None:
            raise EngineError(f"vLLM ended {name!r} with {output.finish!r}")
        if len(logprobs) != len(tokens) or not np.isfinite(logprobs).all():
            raise EngineError(f"vLLM gave {name!r} log-probabilities that are missing or not finite")
        return generated_response(tokens, logprobs, self._llm.versions.of(name, len(tokens)), finish)

    def _count_tokens(self) -> int:
        return self._ended_tokens + sum(int(count) for count in self._llm.tokens().values())

    def _idle_s(self) -> float:
        tokens, now_s = self._count_tokens(), self._busy.elapsed_s
        if tokens != self._progress[0]:
            self._progress = tokens, now_s
        return now_s - self._progress[1]

    # -- weights ------------------------------------------------------------------------------------------------------

    async def _pause(self) -> None:
        """Return when no token is being made."""
        if not self._is_paused:
            await self._llm.pause()
        self._is_paused = True
        self._busy.run(False)

    async def _resume(self) -> None:
        self._is_paused = False
        await self._llm.resume()
        self._busy.run(bool(self._live))

    async def _take_over(self, version: int, weights: AnyWeights, verify: bool) -> int | None:
        async with self._updating:
            self._check_open()
            await self._replace(version, weights)
            # Runs while decoding continues: both only read the weights.
            return whole_sum(await self._llm.everywhere(CONTENT_SUM)) if verify else None

    async def _replace(self, version: int, weights: AnyWeights) -> None:
        def aside(what: Callable[..., Any], *args: Any) -> Awaitable[Any]:
            return asyncio.get_running_loop().run_in_executor(self._aside, what, *args)

        async with AsyncExitStack() as stack:
            shipment = self._ship(weights)
            buckets = await aside(shipment.__enter__)  # copies while generation continues
            stack.push_async_exit(lambda *error: aside(shipment.__exit__, *error))
            self._free.clear()
            try:
                await self._pause()
                await self._load(version, buckets)
            finally:
                if not self._failed_updates and self._over is None:
                    await self._resume()
                    if self._initial is None:
                        self._free.set()

    async def _prime(self) -> None:
        """Load the weights of the initial version, unless a later one came first."""
        initial = self._initial
        if initial is None:
            return
        try:
            weights = await asyncio.get_running_loop().run_in_executor(self._aside, initial)
            async with self._updating:
                if self._initial is not None:
                    self._check_open()
                    await self._replace(self.version, weights)
        except Exception as error:  # noqa: BLE001  # whatever it was, nothing can be generated
            self._end(EngineDied(f"vLLM could not load its first weights: {error}"))

    async def _load(self, version: int, buckets: list[dict[str, Any]]) -> None:
        overwritten = self._failed_updates > 0
        try:
            await self._llm.start_update()
            for bucket in buckets:
                overwritten = True
                await self._llm.update(bucket)
            await self._llm.finish_update(version)
        except EngineDied:
            raise
        except Exception as error:
            what = f"vLLM did not take version {version}: {error}"
            if not overwritten:
                raise EngineError(f"{what}; version {self.version} continues to serve") from error
            self._failed_updates += 1
            if self._failed_updates >= MOST_FAILED_UPDATES:
                raise self._end(EngineDied(f"{what}; its weights are of several versions")) from error
            raise EngineError(f"{what}; nothing is generated until an update succeeds") from error
        self._failed_updates = 0
        self.version = version
        self._salt = secrets.token_hex(8)
        self._initial = None

    # -- life ---------------------------------------------------------------------------------------------------------

    def _run_task(self, work: Any) -> asyncio.Future[Any]:
        task: asyncio.Future[Any] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget_task)
        return task

    def _forget_task(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieve it: its awaiter gets it too, and a failed abort concerns nobody

    def _check_open(self) -> None:
        if self._over is None and self._llm.is_dead:
            self._core_died()
        if isinstance(self._over, EngineDied):
            raise EngineDied(str(self._over))
        if self._over is not None:
            raise EngineError("the engine is closed")

    def _core_died(self) -> None:
        self._end(EngineDied(api.DEATH))

    def _end(self, reason: EngineError) -> EngineError:
        """End all waits. The first reason stays."""
        self._over = self._over or reason
        for entry in self._requests:
            entry.put(reason)
        self._free.set()
        return reason


# -- from a configuration to an engine ---------------------------------------------------------------------------------


class VllmFactory(EngineFactory):
    """vLLM in separate processes, on any number of GPUs or on a CPU."""

    transports = ("object_store", "ipc", "nccl")
    has_check = True

    def check_options(self, options: RolloutOptions) -> None:
        if options.urls is None:
            check_arguments(options.vllm, None)  # vLLM itself knows which other names exist
        elif options.replicas not in ("auto", len(options.urls)):
            remedy = f"rollout.urls names {len(options.urls)} servers: give auto"
            raise ConfigError("rollout.replicas", options.replicas, remedy)

    def packages(self, options: RolloutOptions) -> tuple[str, ...]:
        return ("vllm",) if options.urls is None else ()

    def require(self, options: RolloutOptions) -> None:
        if options.urls is None:
            api.require()

    def check(self, settings: EngineSettings) -> None:
        model_config, _ = load_model_config(settings.model_path, trust_remote_code=settings.trust_remote_code)
        urls = settings.options.urls
        if urls is None:
            api.engine_config(_check_arguments(settings, model_config), settings.options.vllm)
        for url in urls or ():
            _check_server(settings, model_config, url)

    def load(self, settings: EngineSettings) -> LoadedEngine:
        options, path = settings.options, settings.model_path
        model_config, generation_config = load_model_config(path, trust_remote_code=settings.trust_remote_code)
        connect: Callable[..., Any]
        if options.urls is None:
            arguments = _check_arguments(settings, model_config)
            log.info("vLLM loads and compiles %s now: a minute or more without output", path)
            connect = partial(api.Llm, api.start(arguments, options.vllm), seeded=settings.device == "cpu")
        else:
            connect = partial(RemoteLlm, _check_server(settings, model_config, options.urls[settings.replica]))
        engine = VllmEngine(
            connect,
            ship=partial(ship, replica=settings.replica, workers=_workers(options)),
            slots=settings.slots,
            max_prompt_tokens=settings.prompt_limit(model_config),
            max_new_tokens=settings.max_new_tokens,
            vocabulary=int(model_config.get_text_config(decoder=True).vocab_size),
            version=settings.version,
            initial=None if options.urls is None else partial(_read_weights, settings),
        )
        return LoadedEngine(engine=engine, generation_config=generation_config)

    # -- for the plan -------------------------------------------------------------------------------------------------

    def describe(self, options: RolloutOptions, slots: int) -> str:
        if options.urls is None:
            return super().describe(options, slots)
        many = len(options.urls) > 1
        servers = f"the vLLM server{'s' * many} {', '.join(options.urls)}"
        return f"asks {servers} for responses, {slots} at a time{' each' * many}"

    def start_note(self, options: RolloutOptions) -> str | None:
        if options.urls is not None:
            return None
        return "vLLM loads and compiles the model first: a minute or more without output"

    def estimate_memory(
        self, options: RolloutOptions, needed: Mapping[str, int], gpu: GpuShare | None
    ) -> dict[str, int]:
        """A vLLM that is alone on its GPU takes its whole share, whatever its slots need."""
        if options.urls is not None:
            return {"weights": needed["weights"]}  # sent once at the start; keys and values are the server's
        if gpu is None:
            return dict(needed)
        weights = needed["weights"] // (options.tensor_parallel_size * options.pipeline_parallel_size)
        if gpu.engines == 1:
            return {"weights": weights, "KV cache": max(0, int(gpu.share * gpu.gpu_bytes) - weights)}
        room = max(0, kv_room(gpu.share, gpu.gpu_bytes, weights))
        cache = min(room, int(needed["KV cache"] * KV_SPARE))
        return {"weights": weights, "KV cache": cache, "workspace": WORKSPACE_BYTES}


# -- vLLM's arguments -------------------------------------------------------------------------------------------------


def set_environment(device: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that vLLM reads when it is imported. Variables that the user has set stay."""
    environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # standard output is for programs to read
    environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # no telemetry
    environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # a process with threads must not fork
    if device == "cpu":  # `rollout.threads` belongs to this process; others share cores
        environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    environ[ROLLOUTER] = str(os.getpid())  # vLLM's processes end with this one


def check_arguments(given: Mapping[str, Any], known: Collection[str] | None) -> None:
    """Raise ConfigError for an argument in `rollout.vllm` that freewheel sets, or that this vLLM does not have.
    `known`: None before vLLM can be asked."""
    for key, value in given.items():
        if key in SET_BY_FREEWHEEL:
            raise ConfigError(f"rollout.vllm.{key}", value, f"{SET_BY_FREEWHEEL[key]}: leave it out")
        if known is not None and key not in known:
            near = difflib.get_close_matches(key, known, n=3)
            remedy = f"did you mean {' or '.join(near)}?" if near else "see AsyncEngineArgs of vLLM for their names"
            raise ConfigError(f"rollout.vllm.{key}", value, f"this vLLM has no such argument: {remedy}")


def engine_arguments(
    settings: EngineSettings,
    model_config: Any,
    *,
    max_model_len: int,
    known: Collection[str],
    parameters: int,
    gpu_bytes: int = 0,
) -> dict[str, Any]:
    """`model_config`: the model's, as transformers reads it. `parameters`: the model's number of them. `gpu_bytes`: the
    memory of the GPU that the engine will be on."""
    options = settings.options
    given: dict[str, Any] = options.vllm
    check_arguments(given, known)
    if given.get("max_model_len", max_model_len) < max_model_len:
        raise ConfigError(
            "rollout.vllm.max_model_len",
            given["max_model_len"],
            f"the longest prompt and a response are {max_model_len} tokens: give that or more, or leave it out",
        )
    arguments: dict[str, Any] = {
        "model": settings.model_path,
        "dtype": settings.dtype,
        "trust_remote_code": settings.trust_remote_code,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "seed": settings.seed % LARGEST_SEED,
        "max_model_len": max_model_len,
        "max_num_seqs": settings.slots,
        "tensor_parallel_size": options.tensor_parallel_size,
        "pipeline_parallel_size": options.pipeline_parallel_size,
        "logprobs_mode": LOGPROBS,
        "disable_log_stats": True,
        "weight_transfer_config": {"backend": BACKENDS[settings.transport]},
        "worker_extension_cls": WORKER_EXTENSION,
    }
    if _workers(options) > 1:
        # A replica's GPUs are in one bundle of Ray's. vLLM would by default ask Ray for a bundle per GPU.
        arguments["distributed_executor_backend"] = "mp"
    longest = given.get("max_model_len", max_model_len)
    needed = partial(kv_bytes, model_config, settings.dtype, max_model_len=longest)
    if settings.device == "cuda":
        arguments["gpu_memory_utilization"] = settings.gpu_memory_share
        if settings.engines_on_a_gpu > 1 and "kv_cache_memory_bytes" not in given:
            # vLLM measures free memory while it starts. Other engines that start at the same time would confuse it.
            weights = parameters * NUMBER_BYTES[settings.dtype]
            room = kv_room(settings.gpu_memory_share, gpu_bytes, weights)
            if room < needed(1):
                share = settings.gpu_memory_share * gpu_bytes / GIB
                fixed = (weights + WORKSPACE_BYTES) / GIB
                raise ConfigError(
                    "rollout.replicas",
                    options.replicas,
                    f"{settings.engines_on_a_gpu} engines are on a GPU, {share:.1f} GiB for each; weights and "
                    f"workspace take {fixed:.1f}, one sequence at its longest {needed(1) / GIB:.1f}: give fewer, raise "
                    "rollout.gpu_memory_share, or lower rollout.max_new_tokens or data.max_prompt_tokens",
                )
            arguments["kv_cache_memory_bytes"] = min(room, needed(settings.slots))
    else:  # by default vLLM takes nine tenths of the memory
        arguments["kv_cache_memory_bytes"] = needed(settings.slots)
    return arguments | given


def kv_room(share: float, gpu_bytes: int, weights: int) -> int:
    """What an engine's share of a GPU leaves for keys and values. Negative if not even the rest fits."""
    return int(share * gpu_bytes) - weights - WORKSPACE_BYTES


def kv_bytes(model_config: Any, dtype: str, slots: int, *, max_model_len: int) -> int:
    """KV cache for all slots at full length, in whole blocks."""
    text = model_config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    head = getattr(text, "head_dim", None) or text.hidden_size // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    token = text.num_hidden_layers * 2 * kv_heads * head * NUMBER_BYTES[dtype]
    blocks = slots * -(-max_model_len // BLOCK_TOKENS) + 1  # vLLM keeps one for itself
    return int(token * BLOCK_TOKENS * blocks * KV_SPARE)


def _workers(options: RolloutOptions) -> int:
    return int(options.tensor_parallel_size * options.pipeline_parallel_size)


# -- checks and loading -----------------------------------------------------------------------------------------------


def _check_arguments(settings: EngineSettings, model_config: Any) -> dict[str, Any]:
    """Return the arguments of vLLM's own engine. Raises what vLLM would refuse, if that is known without the model."""
    options = settings.options
    api.require()
    set_environment(settings.device)
    api.check_device(settings.device)
    api.check_sampling("rollout", temperature=options.temperature, top_p=options.top_p, top_k=options.top_k)
    api.check_sampling("eval", temperature=settings.eval_temperature)
    api.check_attention(settings.device, settings.model_path, model_config)
    return engine_arguments(
        settings,
        model_config,
        max_model_len=settings.prompt_limit(model_config) + settings.max_new_tokens,
        known=api.argument_names(),
        parameters=count_parameters(settings.model_path, model_config, trust_remote_code=settings.trust_remote_code),
        gpu_bytes=api.gpu_bytes() if settings.device == "cuda" else 0,
    )


def _check_server(settings: EngineSettings, model_config: Any, url: str) -> RemoteServer:
    return find_server(url, settings.prompt_limit(model_config) + settings.max_new_tokens, settings.dtype)


def _read_weights(settings: EngineSettings) -> Weights:
    """The weights that a server gets first: it may have been started with others, or hold those of an earlier run."""
    model = load_causal_lm(settings.model_path, settings.dtype, trust_remote_code=settings.trust_remote_code)
    return pack({name: parameter.detach() for name, parameter in model.named_parameters()})
