"""`serve`: a mock judge as a program of its own, until it is told to stop."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

from freewheel.judge.testing.profile import JudgeProfile
from freewheel.judge.testing.server import CHAT_PATH, JudgeServer

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8099
"""Where `serve` listens unless told otherwise: none of the ports that inference servers take by default."""

STDIN_READ_BYTES = 4096
"""What comes on stdin is thrown away; only its end matters."""


def new_loop() -> asyncio.AbstractEventLoop:
    """uvloop's loop where it is installed, else asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def serve(
    profile: JudgeProfile,
    host: str = DEFAULT_HOST,
    port: int = DEFAULT_PORT,
    ready: Callable[[str], None] | None = None,
    *,
    until_eof: int | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM, then close cleanly and return. To be called in the main thread.

    `ready` gets the address of chat completions once it is open. `until_eof` is a file descriptor whose end means
    "stop" too: a parent that dies closes its end of a pipe, whatever else it fails to do.
    """
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_serve(profile, host, port, ready, until_eof))


async def _serve(
    profile: JudgeProfile, host: str, port: int, ready: Callable[[str], None] | None, until_eof: int | None
) -> None:
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)

    def read() -> None:
        assert until_eof is not None
        if not os.read(until_eof, STDIN_READ_BYTES):
            loop.remove_reader(until_eof)
            stopped.set()

    if until_eof is not None:
        loop.add_reader(until_eof, read)
    server = JudgeServer(profile)
    bound = await server.start(host, port)
    try:
        if ready is not None:
            ready(f"http://{host}:{bound}/v1{CHAT_PATH}")
        await stopped.wait()
    finally:
        await server.stop()
