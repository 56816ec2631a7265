"""Uses a `vllm serve` server instead of an `AsyncLLM`: the calls of `Llm` over HTTP.

    VllmEngine ─▶ RemoteLlm ─▶ /v1/completions: tokens in, a stream of tokens out
                           └─▶ /pause, /start_weight_update, /update_weights, /finish_weight_update, /resume

The server runs on this machine, because weights travel through shared memory. A response during which the version
changes keeps its first version for all tokens: a stream does not say which weights made a token, and no token may be
labelled newer than it is. A server that cannot be reached counts as dead.
"""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import aiohttp

from freewheel.errors import ConfigError
from freewheel.rollout.engine import EngineDied, EngineError, SamplingParams
from freewheel.rollout.vllm.api import SampleOutput, TokenVersions

KEY = "rollout.urls"
LOOK_S = 10.0
"""Time for a server to describe itself."""
KEPT_S = 2.0
"""Idle time of a connection. vLLM closes one after 5 s, and a call that meets the close would count as the server's
death."""
EVENT = b"data: "
END = b"[DONE]"
DETAIL_CHARS = 300
DTYPE = "freewheel_dtype"
"""The worker's method that returns the dtype it computes in."""
START = (
    "start it with VLLM_SERVER_DEV_MODE=1, --worker-extension-cls freewheel.rollout.vllm.worker.WorkerExtension and "
    '--weight-transfer-config \'{"backend": "freewheel_shm"}\''
)


@dataclass(frozen=True)
class RemoteServer:
    """A server's description of itself."""

    url: str
    model: str
    """The model's name on the server."""


def find_server(url: str, max_model_len: int, dtype: str) -> RemoteServer:
    """Return the server. Raises if it cannot be reached, its context is too short, it cannot load weights, or it
    computes in another dtype than the run."""
    url = url.rstrip("/")
    status, answer = _ask(f"{url}/v1/models")
    if status != 200:
        raise ConfigError(KEY, url, f"there is no vLLM server ({answer}): start one, or correct the address")
    served = answer["data"][0]
    if int(served["max_model_len"]) < max_model_len:
        remedy = f"it takes {served['max_model_len']} tokens, and {max_model_len} are needed: start it with"
        raise ConfigError(KEY, url, f"{remedy} --max-model-len {max_model_len}")
    if _ask(f"{url}/is_paused")[0] != 200:
        raise ConfigError(KEY, url, f"it cannot be given new weights: {START}")
    status, answer = _ask(f"{url}/collective_rpc", {"method": DTYPE})
    if status != 200:
        raise ConfigError(KEY, url, f"its workers do not know freewheel ({answer}): {START}")
    served_as = answer["results"][0]
    if served_as != dtype:
        remedy = f"start it with --dtype {dtype}, or give model.dtype={served_as}"
        raise ConfigError(KEY, url, f"it serves {served_as}, and the run has {dtype}: {remedy}")
    return RemoteServer(url, served["id"])


def _ask(url: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    """Return the status and the answer, or 0 and the reason why there is none."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=LOOK_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, str(error)
    except (OSError, ValueError) as error:
        return 0, str(error)


class RemoteLlm:
    """One server. Called from one event loop."""

    def __init__(self, server: RemoteServer, *, version: int, on_death: Callable[[], None]) -> None:
        self.versions = TokenVersions(version)
        self._server = server
        self._on_death = on_death
        self._made: dict[str, int] = {}
        self._session: aiohttp.ClientSession | None = None
        self.is_dead = False

    # -- requests -----------------------------------------------------------------------------------------------------

    async def output(self, name: str, prompt: list[int], sample: SamplingParams, *, salt: str) -> SampleOutput:
        """Return a whole sample. Cancelling the call ends the request: the server sees the connection close."""
        self._made[name] = 0
        tokens: list[int] = []
        logprobs: list[float] = []
        finish = None
        try:
            async with aclosing(self._events(self._body(prompt, sample, salt))) as events:
                async for made in events:
                    tokens += made.tokens
                    logprobs += made.logprobs
                    finish = made.finish
                    self._made[name] = len(tokens)
            return SampleOutput(tokens, logprobs, finish)
        finally:
            del self._made[name]

    def _body(self, prompt: list[int], sample: SamplingParams, salt: str) -> dict[str, Any]:
        return {
            "model": self._server.model,
            "prompt": prompt,
            "max_tokens": sample.max_new_tokens,
            "temperature": sample.temperature,
            "top_p": sample.top_p,
            "top_k": sample.top_k,
            "stop_token_ids": list(sample.stop_token_ids),
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "cache_salt": salt,
            "stream": True,
        }

    async def _events(self, body: dict[str, Any]) -> AsyncGenerator[SampleOutput, None]:
        ended = False
        try:
            async with self._open().post(f"{self._server.url}/v1/completions", json=body) as answer:
                await self._check(answer, "/v1/completions")
                async for line in answer.content:
                    if line.startswith(EVENT) and not line.startswith(EVENT + END):
                        event = json.loads(line[len(EVENT) :])
                        if "error" in event:
                            raise EngineError(f"vLLM failed: {str(event['error'])[:DETAIL_CHARS]}")
                        for choice in event["choices"]:
                            ended = choice["finish_reason"] is not None
                            scores = (choice.get("logprobs") or {}).get("token_logprobs") or ()
                            yield SampleOutput(choice.get("token_ids") or (), scores, choice["finish_reason"])
                        await asyncio.sleep(0)  # a response that has arrived whole must not delay others
        except aiohttp.ClientError as error:
            raise self._died(error) from error
        if not ended:
            raise EngineError("vLLM ended a response without saying why")

    async def abort(self, name: str) -> None:
        """Closing its stream has ended it."""

    def tokens(self) -> dict[str, int]:
        return dict(self._made)

    # -- weights ------------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        await self._post("/pause?mode=keep&clear_cache=false")

    async def resume(self) -> None:
        await self._post("/resume")

    async def start_update(self) -> None:
        await self._post("/start_weight_update", {"is_checkpoint_format": False})

    async def update(self, info: dict[str, Any]) -> None:
        await self._post("/update_weights", {"update_info": info})

    async def finish_update(self, version: int) -> None:
        await self._post("/finish_weight_update", {"weight_version": str(version)})
        self.versions.batch(version, {})

    async def everywhere(self, method: str) -> Sequence[Any]:
        answer = await self._post("/collective_rpc", {"method": method})
        return list(answer["results"])

    async def _post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            async with self._open().post(f"{self._server.url}{path}", json=body or {}) as answer:
                await self._check(answer, path)
                return await answer.json()
        except aiohttp.ClientError as error:
            raise self._died(error) from error

    @staticmethod
    async def _check(answer: aiohttp.ClientResponse, path: str) -> None:
        if answer.status != 200:
            detail = (await answer.text())[:DETAIL_CHARS]
            raise EngineError(f"vLLM answered {answer.status} to {path}: {detail}")

    # -- life ---------------------------------------------------------------------------------------------------------

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            # No time limit here: the engine watches tokens itself.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S)
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        return self._session

    def _died(self, error: Exception) -> EngineDied:
        if not self.is_dead:
            self.is_dead = True
            self._on_death()
        return EngineDied(f"the vLLM server {self._server.url} cannot be reached: {error}")

    async def shutdown(self) -> None:
        """End our requests. The server continues."""
        self.is_dead = True
        if self._session is not None:
            await self._session.close()
            await asyncio.sleep(0)  # let its connections close
