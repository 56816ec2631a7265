"""A fake vLLM server, with the calls that `RemoteLlm` makes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import torch
from aiohttp import web
from aiohttp.test_utils import TestServer

from freewheel.sync.weights import pack

WEIGHTS = pack({"w": torch.ones(3)})
"""The weights whose checksum it reports."""


class FakeServer:
    """Repeats the last token of the prompt, one at a time while it is not paused."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.fails: set[str] = set()
        self.going = asyncio.Event()
        self.going.set()
        self.sent = 0
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/is_paused", self._is_paused)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/{call}", self._call)
        self.server = TestServer(app)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "a model", "max_model_len": 64}]})

    async def _is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({}, status=404 if "is_paused" in self.fails else 200)

    async def _call(self, request: web.Request) -> web.Response:
        call = request.match_info["call"]
        self.calls.append(call)
        if call in self.fails:
            return web.json_response({"error": f"{call} failed"}, status=500)
        if call == "pause":
            assert dict(request.query) == {"mode": "keep", "clear_cache": "false"}
            self.going.clear()
        elif call == "resume":
            self.going.set()
        elif call == "collective_rpc":
            sums = [str(WEIGHTS.checksum - 5), "5"]
            asked = (await request.json())["method"]
            return web.json_response({"results": ["bfloat16"] * 2 if asked == "freewheel_dtype" else sums})
        return web.json_response({})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        answer = web.StreamResponse()
        await answer.prepare(request)
        token, wanted = body["prompt"][-1], body["max_tokens"]
        for made in range(wanted):
            await self.going.wait()
            finish = "stop" if token in body["stop_token_ids"] else "length" if made + 1 == wanted else None
            choice = {"token_ids": [token], "logprobs": {"token_logprobs": [-0.5]}, "finish_reason": finish}
            await answer.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
            self.sent += 1
            await asyncio.sleep(0)
            if finish == "stop":
                break
        await answer.write(b"data: [DONE]\n\n")
        return answer
