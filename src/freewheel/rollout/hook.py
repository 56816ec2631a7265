"""A user's `_custom_generation_logic`: called with a prompt, held to its time, and its answer made into responses.

    prompt ─▶ DataProto, repeated n times ─▶ hook (awaited, or in a thread) ─▶ DataProto of n rows ─▶ responses

Called by `Rollouter`, which goes on generating and posting whatever the hook does.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from freewheel.data.group import Prompt, Response, Ticket
from freewheel.errors import DataError
from freewheel.rollout.engine import GenerationTimeout

HOOK_TIMEOUTS = 20
"""A hook may take this many times `async_training.generation_timeout` (30 s: ten minutes) for one group. That is the
time without a new token, and a hook has several turns, with tools between them."""


async def generate_by_hook(
    hook: Callable[[Any], Any],
    ticket: Ticket,
    prompt: Prompt,
    *,
    n: int,
    version: int,
    generation_timeout_s: float,
    pad_token_id: int,
    stop_token_ids: tuple[int, ...],
) -> list[Response]:
    """`version`: the engine's as the hook begins, which its tokens are held to be of."""
    from freewheel.data.padded import from_data_proto, prompts_to_data_proto

    batch = prompts_to_data_proto([prompt], n, pad_token_id=pad_token_id, ordinals=[ticket.ordinal])
    limit = asyncio.timeout(HOOK_TIMEOUTS * generation_timeout_s)
    try:
        async with limit:
            made = await _called(hook, batch)
    except TimeoutError as error:
        if not limit.expired():  # the hook's own, of a tool perhaps
            raise
        raise GenerationTimeout(
            f"_custom_generation_logic took longer than {HOOK_TIMEOUTS} times async_training.generation_timeout = "
            f"{generation_timeout_s:g} s"
        ) from error
    responses = from_data_proto(made, ticket, prompt, version, stop_token_ids=stop_token_ids)
    if len(responses) != n:
        raise DataError(f"_custom_generation_logic gave {len(responses)} rows: give rollout.n = {n}")
    return list(responses)


async def _called(hook: Callable[[Any], Any], batch: Any) -> Any:
    """A plain function runs in a thread: while it computes, weights arrive and other groups go on."""
    made = hook(batch) if inspect.iscoroutinefunction(hook) else await asyncio.to_thread(hook, batch)
    return await made if inspect.isawaitable(made) else made
