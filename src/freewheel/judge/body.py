"""The HTTP body of a request. All of it but the user message is the same each time, so it is encoded once."""

from __future__ import annotations

import msgspec

from freewheel.judge.config import JudgeConfig
from freewheel.judge.prompt import PromptBuilder
from freewheel.judge.request import JudgeRequest

_MARK = "\x00user\x00"


class BodyWriter:
    """Writes chat-completion requests for one model name."""

    def __init__(self, config: JudgeConfig, model: str, prompts: PromptBuilder) -> None:
        body: dict[str, object] = {
            "model": model,
            "messages": [{"role": "system", "content": prompts.system}, {"role": "user", "content": _MARK}],
        }
        if config.temperature is not None:
            body["temperature"] = config.temperature
        if config.max_tokens is not None:
            body["max_tokens"] = config.max_tokens
        response_format = config.loaded_rubric.response_format()
        if response_format is not None:
            body["response_format"] = response_format
        body.update(config.sampling)
        self._prompts = prompts
        self._before, _, self._after = msgspec.json.encode(body).partition(msgspec.json.encode(_MARK))

    def write(self, request: JudgeRequest, *, reask: bool) -> bytes:
        user = self._prompts.reask(request) if reask else self._prompts.user(request)
        return self._before + msgspec.json.encode(user) + self._after
