"""Connects the caller to the engine: the messages, the frames on a socket, and the two ends that exchange them.

    RequestTracker ◀─▶ Link: a thread with an event loop ◀─▶ Service: the engine
                                                          on that loop, or in a child process behind a `Pipe`

    caller ── Configure, Submit, Cancel, AskStats, Close ──▶ engine
    caller ◀── Started, EngineFailure, Results, StatsReply, LogLine ── engine

A child process that dies is replaced. The next one gets every request that the dead one had not answered. The child
reads its config, including the key, from the socket, and exits when the socket closes. It also exits when its parent
ends, even if a fork of the parent still holds the socket open.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, cast

import msgspec

from freewheel.judge.config import JudgeConfig, Secret
from freewheel.judge.request import JudgeRequest
from freewheel.judge.stats import JudgeStats
from freewheel.judge.verdict import JudgeDied, JudgeError, Verdict
from freewheel.utils.processes import end_with, start_child
from freewheel.utils.waiting import wait_for_event, wait_in_slices

if TYPE_CHECKING:
    from freewheel.judge.tracker import RequestTracker

log = logging.getLogger("freewheel.judge")

_WRITE_AHEAD_BYTES = 1 << 18
"""Bytes buffered for the socket: enough to keep it busy, but not more, because the tracker holds the same requests."""
_RESTARTS_ALLOWED = 5
"""More deaths than this within `_RESTART_WINDOW_S` are a fault of ours or of the machine, and the judge gives up."""
_RESTART_WINDOW_S = 60.0
FIRST_PAUSE_S = 0.1
"""Pause before the first restart. It doubles with each further one."""
_PROGRAM = "from freewheel.judge.transport import main; main()"
"""The child's program. (With `-m`, the package would import this module a second time.)"""
_KILLED_AFTER_S = 1.0
"""How long `join` waits for the thread after it has killed the child."""
_COALESCE_S = 0.020
"""When all batches are answered, results are sent at once, but not sooner than this after the previous message."""
LINGER_S = 0.050
"""While more verdicts are expected, results wait this long to be sent together: each message interrupts a busy
caller."""
_GC_THRESHOLD = 50_000
"""Python's default, a collection every 700 objects, would be wasted work: thousands of requests are alive at a time,
and they hold no cycles."""

# -- messages ---------------------------------------------------------------------------------------------------------


class Configure(msgspec.Struct, tag=True, array_like=True):
    config: JudgeConfig
    parent_pid: int
    spent: float
    """Cost of this judge's earlier engines: `max_cost` holds across restarts."""


class Submit(msgspec.Struct, tag=True, array_like=True):
    batch: int
    indexes: list[int]
    requests: list[JudgeRequest]
    deadline_at: float | None
    """The deadline in `time.monotonic()` seconds, which all processes of a machine share."""


class Cancel(msgspec.Struct, tag=True, array_like=True):
    batch: int


class AskStats(msgspec.Struct, tag=True, array_like=True):
    pass


class Close(msgspec.Struct, tag=True, array_like=True):
    pass


class Started(msgspec.Struct, tag=True, array_like=True):
    """The engine is ready for messages."""


class EngineFailure(msgspec.Struct, tag=True, array_like=True):
    """The engine cannot start."""

    error: str


class Results(msgspec.Struct, tag=True, array_like=True):
    items: list[tuple[int, int, Verdict]]
    """(batch, index, verdict)."""
    spent: float


class StatsReply(msgspec.Struct, tag=True, array_like=True):
    stats: JudgeStats


class LogLine(msgspec.Struct, tag=True, array_like=True):
    level: int
    text: str


ToEngine = Configure | Submit | Cancel | AskStats | Close
ToCaller = Started | EngineFailure | Results | StatsReply | LogLine

# -- frames: each message is msgpack behind its length ----------------------------------------------------------------

_LENGTH = struct.Struct("!I")


def _encode_secret(value: Any) -> Any:
    if isinstance(value, Secret):
        return [value.reveal() if value else None, value.source]
    raise NotImplementedError(f"{type(value).__name__} cannot be sent")


def _decode_secret(kind: type, value: Any) -> Any:
    return Secret(value[0], source=value[1]) if kind is Secret else value


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_secret)
ENGINE_DECODER = msgspec.msgpack.Decoder(ToEngine, dec_hook=_decode_secret)
CALLER_DECODER = msgspec.msgpack.Decoder(ToCaller)


def pack(message: ToEngine | ToCaller) -> bytes:
    """Encode a message as one frame. Callers must replace lone surrogates first: no frame can hold them."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class Pipe(asyncio.Protocol):
    """One end of the socket between caller and engine: messages in, messages out."""

    def __init__(
        self,
        decoder: msgspec.msgpack.Decoder[Any],
        take: Callable[[Any], None],
        has_room_again: Callable[[], None] = lambda: None,
    ) -> None:
        self.ended = asyncio.Event()
        self.is_full = False
        """More than `_WRITE_AHEAD_BYTES` wait for the socket."""
        self._decoder = decoder
        self._take = take
        self._has_room_again = has_room_again
        self._buffer = bytearray()
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's class has this interface
        self._transport.set_write_buffer_limits(_WRITE_AHEAD_BYTES)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            with memoryview(buffer) as view:
                message = self._decoder.decode(view[start + _LENGTH.size : end])
            start = end
            self._take(message)
        del buffer[:start]

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False
        self._has_room_again()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.ended.set()

    def send(self, message: ToEngine | ToCaller) -> None:
        if self._transport is not None:
            self._transport.write(pack(message))

    def close(self) -> None:
        """Close the connection after everything that was sent has been written."""
        if self._transport is not None:
            self._transport.close()


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """`asyncio.run` on uvloop where it is installed."""
    factory = None
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main)


# -- the engine's side ------------------------------------------------------------------------------------------------


class Service:
    """Runs one engine until it receives `Close`. `send` receives the messages for the caller."""

    def __init__(self, config: JudgeConfig, spent: float, send: Callable[[ToCaller], None]) -> None:
        from freewheel.judge.engine import JudgeEngine  # imports aiohttp, which the caller's process does not need

        self._engine = JudgeEngine(config, deliver=self._collect, answered_all=self._flush_soon, spent=spent)
        self._send = send
        self._items: list[tuple[int, int, Verdict]] = []
        self._flush_is_due = False
        self._flushed_at = 0.0
        self._closed = asyncio.Event()

    async def run(self) -> None:
        """Run until `Close`. Sends `Started` when `take` may be called."""
        self._loop = asyncio.get_running_loop()
        try:
            await self._engine.start()
        except Exception as error:
            if not isinstance(error, JudgeError | OSError):
                log.exception("the judge's engine could not start")
            self._send(EngineFailure(f"{type(error).__name__}: {error}"))
            return
        self._send(Started())
        try:
            await self._closed.wait()
        finally:
            await self._engine.close()
            self._flush()
            stats = self._engine.stats()
            if stats.submitted:
                log.info(stats.line())
            self._send(StatsReply(stats))

    def take(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self._engine.submit(message.batch, message.indexes, message.requests, message.deadline_at)
        elif isinstance(message, Cancel):
            self._engine.cancel(message.batch)
        elif isinstance(message, AskStats):
            self._flush()
            self._send(StatsReply(self._engine.stats()))
        elif isinstance(message, Close):
            self._closed.set()

    def _collect(self, batch: int, index: int, verdict: Verdict) -> None:
        self._items.append((batch, index, verdict))
        if not self._flush_is_due:
            self._flush_is_due = True
            self._loop.call_later(LINGER_S, self._flush)

    def _flush_soon(self) -> None:
        """Every batch is answered: send what has been collected without waiting for more."""
        self._loop.call_later(max(0.0, self._flushed_at + _COALESCE_S - time.monotonic()), self._flush)

    def _flush(self) -> None:
        self._flush_is_due = False
        if self._items:
            items, self._items = self._items, []
            self._flushed_at = time.monotonic()
            self._send(Results(items, self._engine.spent))


class _ForwardingHandler(logging.Handler):
    """Sends the engine's log records to the caller's process, which logs them."""

    def __init__(self, send: Callable[[ToCaller], None]) -> None:
        super().__init__()
        self._forward = send

    def emit(self, record: logging.LogRecord) -> None:
        self._forward(LogLine(record.levelno, self.format(record)))


def tune_process() -> None:
    """Set the garbage collector and the limit of open files for a process that does nothing but call the judge."""
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # each call is a socket, and 1024 is a common limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))


def main() -> None:
    """The child's program. The first argument is the descriptor of its socket, which first brings the config."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they reach the whole process group, and the parent closes the engine
    sock = socket.socket(fileno=int(sys.argv[1]))
    head = sock.recv(_LENGTH.size, socket.MSG_WAITALL)
    if len(head) == _LENGTH.size:
        (length,) = _LENGTH.unpack(head)
        setup = ENGINE_DECODER.decode(sock.recv(length, socket.MSG_WAITALL))
        sock.setblocking(False)
        run_loop(_serve(sock, setup))


async def _serve(sock: socket.socket, setup: Configure) -> None:
    loop = asyncio.get_running_loop()
    pipe = Pipe(ENGINE_DECODER, lambda message: service.take(message))
    service = Service(setup.config, setup.spent, pipe.send)
    tune_process()  # after all imports
    logger = logging.getLogger("freewheel")
    logger.addHandler(_ForwardingHandler(pipe.send))
    logger.setLevel(logging.INFO)
    logger.propagate = False

    def close() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed
            loop.call_soon_threadsafe(service.take, Close())

    await loop.create_connection(lambda: pipe, sock=sock)
    ended = loop.create_task(pipe.ended.wait())
    ended.add_done_callback(lambda _: close())
    end_with(setup.parent_pid, on_end=close)
    await service.run()
    pipe.close()
    await ended


# -- the caller's side ------------------------------------------------------------------------------------------------

_spawning = threading.Lock()
"""Held while a child is started, and during a fork. A process forked while a child starts would hold both ends of the
child's socket, and neither side would notice the other's death. (`subprocess` itself does not run fork hooks.)"""
os.register_at_fork(before=_spawning.acquire, after_in_parent=_spawning.release, after_in_child=_spawning.release)


class Link:
    """A thread with an event loop that connects a tracker to its engine.

    `placement="process"`: the engine runs in a child process, which calls `main`.
    `placement="thread"`: the engine runs in this thread. This is cheaper, but the engine gets too little time if the
    process is busy running Python code.
    """

    def __init__(self, config: JudgeConfig, tracker: RequestTracker) -> None:
        self._config = config
        self._tracker = tracker
        self._thread = threading.Thread(target=self._run, name="freewheel-judge", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event
        self._send: Callable[[ToEngine], None] | None = None
        """Sends a message to the engine. None while it cannot take one."""
        self._ending = False
        self._timer: asyncio.TimerHandle | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._pipe: Pipe | None = None

    @property
    def child_pid(self) -> int | None:
        return self._child.pid if self._child is not None else None

    # -- from any thread ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._tracker.wake = self.wake
        self._thread.start()

    def wake(self) -> None:
        """Tell the thread that the tracker has something new. Never blocks."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed
                loop.call_soon_threadsafe(self._pump)

    def end(self) -> None:
        """End the engine, without waiting. The garbage collector calls this in any thread, so it takes no lock."""
        self._ending = True
        self.wake()

    def join(self, timeout_s: float) -> None:
        """End the engine and the thread. A child process that does not end within `timeout_s` is killed."""
        self.end()
        if self._thread.ident is None or wait_in_slices(self._has_ended_within, timeout_s):
            return
        log.warning("the judge's %s did not close within %.3g s", self._config.placement, timeout_s)
        if self._child is not None:
            self._child.kill()
            wait_in_slices(self._has_ended_within, _KILLED_AFTER_S)

    def forget(self) -> None:
        """Release the parent's descriptors in a forked process. The thread does not exist there."""
        if self._socket is not None:
            self._socket.close()
        if self._child is not None:
            self._child.returncode = 0  # only the parent may wait for it

    def _has_ended_within(self, slice_s: float) -> bool:
        self._thread.join(slice_s)
        return not self._thread.is_alive()

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        # Ctrl-C belongs to the main thread. A child process inherits the mask, so its imports are not interrupted.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            # uvloop duplicates the descriptor of a socket that it is given, and `forget` could not close it.
            (asyncio.run if self._config.placement == "process" else run_loop)(self._main())
        except Exception as error:  # noqa: BLE001  # logged there
            self._break_down(error)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._pump()
        try:
            if self._config.placement == "process":
                await self._run_children()
            elif not self._stop.is_set():
                service = Service(self._config, self._tracker.spent, lambda message: self._take(service.take, message))
                await service.run()
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _pump(self) -> None:
        """Send waiting messages to the engine, expire batches, and schedule the next call for the next deadline."""
        try:
            if self._ending:
                self._stop_engine()
                return
            while self._send is not None and not (self._pipe is not None and self._pipe.is_full):
                message = self._tracker.next()
                if message is None:
                    break
                self._send(message)
            self._tracker.expire(time.monotonic())
            if self._timer is not None:
                self._timer.cancel()
            deadline = self._tracker.next_deadline()
            if deadline < math.inf:
                left_s = max(0.0, deadline - time.monotonic())
                self._timer = asyncio.get_running_loop().call_later(left_s, self._pump)
        except Exception as error:  # noqa: BLE001  # logged there
            self._break_down(error)

    def _take(self, send: Callable[[ToEngine], None], message: ToCaller) -> None:
        """Handle a message from the engine. `send` sends messages to that engine."""
        if isinstance(message, Started):
            self._send = send
            if self._stop.is_set():
                send(Close())
        elif isinstance(message, EngineFailure):
            self._give_up(message.error)
        else:
            self._tracker.take(message)
        asyncio.get_running_loop().call_soon(self._pump)

    def _stop_engine(self) -> None:
        if self._stop.is_set():
            return
        self._stop.set()
        if self._send is not None:
            self._send(Close())
        elif self._child is not None:
            self._child.kill()  # it holds no request yet

    def _give_up(self, why: str) -> None:
        self._ending = True
        self._tracker.end(JudgeDied(why))

    def _break_down(self, error: Exception) -> None:
        log.exception("the judge's link broke")
        self._give_up(f"the judge's link broke: {type(error).__name__}: {error}")
        with contextlib.suppress(Exception):  # the loop has never started, or has ended
            self._stop_engine()

    async def _run_children(self) -> None:
        deaths: list[float] = []
        while not self._stop.is_set():
            try:
                code = await self._run_child()
            except OSError as error:
                self._give_up(f"the judge's process could not be started: {error}")
                return
            if self._ending:
                return
            now = time.monotonic()
            deaths = [at for at in deaths if at > now - _RESTART_WINDOW_S] + [now]
            if len(deaths) > _RESTARTS_ALLOWED:
                self._give_up(
                    f"the judge's process died {len(deaths)} times within {_RESTART_WINDOW_S:.0f} s, "
                    f"last with exit code {code}; its last output is on stderr"
                )
                return
            self._tracker.engine_lost()
            log.warning("the judge's process died (exit code %s); a new one takes over its open requests", code)
            await wait_for_event(self._stop, FIRST_PAUSE_S * 2 ** (len(deaths) - 1))

    async def _run_child(self) -> int | None:
        """Start a child and exchange messages with it until its socket ends. Returns its exit code."""
        with self._spawn() as self._socket:
            try:
                pipe = Pipe(CALLER_DECODER, lambda message: self._take(pipe.send, message), self._pump)
                await asyncio.get_running_loop().create_connection(lambda: pipe, sock=self._socket)
                pipe.send(Configure(self._config, os.getpid(), self._tracker.spent))
                self._pipe = pipe
                await pipe.ended.wait()
            finally:
                self._send, self._pipe, self._socket = None, None, None
                code = self._reap()
        return code

    def _spawn(self) -> socket.socket:
        with _spawning:
            ours, theirs = socket.socketpair()
            try:
                self._child = start_child(
                    "-c", _PROGRAM, str(theirs.fileno()), pass_fds=[theirs.fileno()], stdout=subprocess.DEVNULL
                )
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
        ours.setblocking(False)
        return ours

    def _reap(self) -> int | None:
        """Wait for a child that has closed its socket, or kill it. Returns its exit code."""
        child = self._child
        assert child is not None
        try:
            return child.wait(5.0 if self._ending else 0.5)
        except subprocess.TimeoutExpired:
            child.kill()
            return child.wait()
