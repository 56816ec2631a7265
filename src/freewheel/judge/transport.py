"""Between the caller and the engine: messages, frames, and the two ways to carry them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from freewheel.judge.config import JudgeConfig, Secret
from freewheel.judge.request import JudgeRequest
from freewheel.judge.stats import JudgeStats
from freewheel.judge.verdict import Failed, Reason, Verdict

if TYPE_CHECKING:
    from freewheel.judge.service import Service
    from freewheel.judge.tracker import Desk


class Configure(msgspec.Struct, tag=True, array_like=True):
    config: JudgeConfig
    parent_pid: int
    spent: float
    """What an earlier engine of this judge has spent already: `max_cost` holds over restarts."""


class Submit(msgspec.Struct, tag=True, array_like=True):
    batch: int
    indexes: list[int]
    requests: list[JudgeRequest]
    deadline_at: float | None
    """In `time.monotonic()` seconds, one clock for all processes of a machine."""


class Cancel(msgspec.Struct, tag=True, array_like=True):
    batch: int


class AskStats(msgspec.Struct, tag=True, array_like=True):
    ticket: int


class Close(msgspec.Struct, tag=True, array_like=True):
    pass


class Started(msgspec.Struct, tag=True, array_like=True):
    pass


class Results(msgspec.Struct, tag=True, array_like=True):
    items: list[tuple[int, int, Verdict]]
    """(batch, index, verdict)."""
    spent: float


class StatsReply(msgspec.Struct, tag=True, array_like=True):
    ticket: int
    stats: JudgeStats


class LogLine(msgspec.Struct, tag=True, array_like=True):
    level: int
    text: str


class Stopped(msgspec.Struct, tag=True, array_like=True):
    error: str = ""
    """Why the engine cannot go on (a config that only shows its fault at start); empty after a `Close`."""


ToEngine = Configure | Submit | Cancel | AskStats | Close
ToCaller = Started | Results | StatsReply | LogLine | Stopped

_LENGTH = struct.Struct("!I")


def _encode_secret(value: Any) -> Any:
    if isinstance(value, Secret):
        return [value.reveal() if value else None, value.source]
    raise NotImplementedError(f"{type(value).__name__} does not travel")


def _decode_secret(kind: type, value: Any) -> Any:
    return Secret(value[0], source=value[1]) if kind is Secret else value


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_secret)
_engine_decoder = msgspec.msgpack.Decoder(ToEngine, dec_hook=_decode_secret)
_caller_decoder = msgspec.msgpack.Decoder(ToCaller)


def pack(message: ToEngine | ToCaller) -> bytes:
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def pack_results(results: Results) -> bytes:
    """As `pack`; an item that cannot be encoded (a parser's own text may hold anything) fails alone."""
    try:
        return pack(results)
    except (OverflowError, TypeError, ValueError, msgspec.MsgspecError):
        return pack(Results([_encodable(item) for item in results.items], results.spent))


def _encodable(item: tuple[int, int, Verdict]) -> tuple[int, int, Verdict]:
    try:
        _encoder.encode(item)
    except (OverflowError, TypeError, ValueError, msgspec.MsgspecError) as error:
        return item[0], item[1], Failed(Reason.ENGINE.value, 0, f"the verdict cannot be sent: {error!r}"[:200])
    return item


class FrameReader:
    """Cuts a byte stream into messages. The same class serves both directions; the decoder differs."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    @classmethod
    def for_engine(cls) -> FrameReader:
        return cls(_engine_decoder)

    @classmethod
    def for_caller(cls) -> FrameReader:
        return cls(_caller_decoder)

    def feed(self, data: bytes) -> Iterator[Any]:
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
            yield message
        del buffer[:start]


log = logging.getLogger("freewheel.judge")

READ_BYTES = 1 << 16
"""Below the size from which the allocator would map and unmap fresh pages for each read."""
WRITE_AHEAD_BYTES = 1 << 18
"""Bytes packed ahead of the socket: enough to keep it full, little to hold twice."""
RESTARTS_ALLOWED = 5
"""Deaths within `RESTART_WINDOW_S` after which the fault is ours or the machine's, and the caller must know."""
RESTART_WINDOW_S = 60.0
FIRST_PAUSE_S = 0.1
"""Before the first restart; doubles with each."""
LONGEST_WAIT_S = 3600.0
"""For one sleep, which the system bounds at some weeks."""

_spawning = threading.Lock()
"""Held while a child is started, and by forks: a fork in between would hold both ends of the child's socket, and
neither side would see the other's death. (`subprocess` itself does not run fork's hooks.)"""
os.register_at_fork(before=_spawning.acquire, after_in_parent=_spawning.release, after_in_child=_spawning.release)


class ProcessLink:
    def __init__(self, config: JudgeConfig, desk: Desk) -> None:
        self._config = config
        self._desk = desk
        self._thread = threading.Thread(target=self._run, name="freewheel-judge-link", daemon=True)
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._ending = False
        self._abandoned = False
        self._deaths: list[float] = []
        self._child: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._close_sent = False

    @property
    def child_pid(self) -> int | None:
        return self._child.pid if self._child is not None else None

    def start(self) -> None:
        self._desk.attach(self.wake)
        try:
            self._thread.start()
        except BaseException:
            self._wake_in.close()
            self._wake_out.close()
            raise

    def wake(self) -> None:
        """From any thread, after the desk has something new. Never blocks, and keeps no state that an exception from a
        signal handler could tear."""
        with contextlib.suppress(OSError):  # full: the thread will wake anyway; closed: it has gone
            self._wake_out.send(b"w")

    def join(self, timeout_s: float) -> None:
        """After `Desk.close`: waits for the child to close, ends it if it does not."""
        self._ending = True
        self.wake()
        self._thread.join(timeout_s)
        if self._thread.is_alive() and self._child is not None:
            log.warning("the judge's process did not close within %.3g s; it is killed", timeout_s)
            self._child.kill()
            self._thread.join(1.0)

    def abandon(self) -> None:
        """Nobody holds the judge any more. Called by the garbage collector, in any thread: it takes no lock."""
        self._abandoned = True
        self.wake()

    def forget(self) -> None:
        """In a forked process: lets go of the parent's descriptors, so that its child sees the end of file."""
        self._wake_in.close()
        self._wake_out.close()
        if self._socket is not None:
            self._socket.close()
        if self._child is not None:
            self._child.returncode = 0  # not ours to wait for

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            # Ctrl-C is the main thread's affair. The child inherits the mask: not even its imports are interrupted.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            while self._live_with_one_child():
                pass
        except Exception as error:
            log.exception("the judge's link broke")
            self._desk.break_down(f"the judge's link broke: {type(error).__name__}: {error}")
        finally:
            self._reap()
            self._wake_in.close()
            self._wake_out.close()

    def _live_with_one_child(self) -> bool:
        """Starts a child and serves it until it closes or dies. True if another is to be started."""
        try:
            ours = self._spawn()
        except OSError as error:
            self._desk.break_down(f"the judge's process could not be started: {error}")
            return False
        try:
            with ours:
                self._talk(ours)
        finally:
            self._socket = None
            code = self._reap()
        if self._close_sent or self._ending:
            return False
        now = time.monotonic()
        self._deaths = [at for at in self._deaths if at > now - RESTART_WINDOW_S] + [now]
        if len(self._deaths) > RESTARTS_ALLOWED:
            self._desk.break_down(
                f"the judge's process died {len(self._deaths)} times within {RESTART_WINDOW_S:.0f} s, "
                f"last with exit code {code}; its last words are on stderr"
            )
            return False
        self._desk.engine_lost()
        log.warning("the judge's process died (exit code %s); a new one takes over its open requests", code)
        return self._pause(now + FIRST_PAUSE_S * 2 ** (len(self._deaths) - 1))

    def _pause(self, until: float) -> bool:
        """Waits without an engine; deadlines are kept meanwhile. False if the judge was closed."""
        poll = select.poll()
        poll.register(self._wake_in, select.POLLIN)
        while not (self._ending or self._abandoned) and (now := time.monotonic()) < until:
            if poll.poll(max(0.0, min(until, self._desk.next_deadline()) - now) * 1000):
                self._heard()
            self._desk.expire(time.monotonic())
        return not (self._ending or self._abandoned)

    def _heard(self) -> None:
        """Takes the wakes; the desk is looked at next."""
        with contextlib.suppress(BlockingIOError):
            self._wake_in.recv(4096)

    def _spawn(self) -> socket.socket:
        if not sys.executable:
            raise OSError("this Python does not know its own executable; use placement='thread'")
        with _spawning:
            return self._spawn_one()

    def _spawn_one(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            # The child looks for modules where this process does, so that a rubric's own parser is found.
            path = os.pathsep.join(entry or "." for entry in sys.path)
            try:
                self._child = subprocess.Popen(
                    [sys.executable, "-P", "-m", "freewheel.judge.service", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": path},
                )
            except BaseException:
                ours.close()
                raise
        ours.setblocking(False)
        self._socket = ours
        return ours

    def _talk(self, ours: socket.socket) -> None:
        """Until the socket ends. A round is kept short: it takes the interpreter from the caller's threads."""
        reader, started, writing = FrameReader.for_caller(), False, False
        pending = bytearray(pack(Configure(self._config, os.getpid(), self._desk.spent)))
        poll, woken_by = select.poll(), self._wake_in.fileno()
        poll.register(woken_by, select.POLLIN)
        poll.register(ours, select.POLLIN)
        while True:
            if self._abandoned:
                self._abandoned, self._ending = False, True
                self._desk.close("the judge was let go of")
            if started:
                self._fill(pending)
            try:
                if pending:
                    del pending[: ours.send(pending)]
            except BlockingIOError:
                pass
            except OSError:
                return
            if writing != bool(pending):
                writing = bool(pending)
                poll.modify(ours, select.POLLIN | select.POLLOUT if writing else select.POLLIN)
            deadline = self._desk.next_deadline()
            wait_s = min(deadline - time.monotonic(), LONGEST_WAIT_S)
            events = dict(poll.poll(max(0.0, wait_s) * 1000))
            if woken_by in events:
                self._heard()
            if (now := time.monotonic()) >= deadline:
                self._desk.expire(now)
            if not events.get(ours.fileno(), 0) & ~select.POLLOUT:
                continue
            try:
                data = ours.recv(READ_BYTES)
            except BlockingIOError:
                continue
            except OSError:
                return
            if not data:
                return
            for message in reader.feed(data):
                if isinstance(message, Started):
                    started = True
                elif isinstance(message, Stopped):
                    if message.error:
                        self._close_sent = True
                        self._desk.break_down(message.error)
                else:
                    self._desk.take(message)

    def _fill(self, pending: bytearray) -> None:
        while len(pending) < WRITE_AHEAD_BYTES and (message := self._desk.next()) is not None:
            if isinstance(message, Close):
                self._close_sent = True
            pending += _pack(message)

    def _reap(self) -> int | None:
        """The child's exit code; it has closed its socket, so it is about to go or is killed."""
        child = self._child
        if child is None or child.returncode is not None:
            return child.returncode if child is not None else None
        try:
            child.wait(5.0 if self._close_sent else 0.5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        return child.returncode


def _pack(message: ToEngine) -> bytes:
    try:
        return pack(message)
    except UnicodeEncodeError:
        assert isinstance(message, Submit)
        message.requests = [JudgeRequest.encodable(request) for request in message.requests]
        return pack(message)


class ThreadLink:
    def __init__(self, config: JudgeConfig, desk: Desk) -> None:
        self._config = config
        self._desk = desk
        self._thread = threading.Thread(target=self._run, name="freewheel-judge", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._service: Service | None = None
        self._abandoned = False
        self._expiry: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._desk.attach(self.wake)
        self._thread.start()

    def wake(self) -> None:
        """From any thread, after the desk has something new."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody is left to tell
                loop.call_soon_threadsafe(self._drain)

    def join(self, timeout_s: float) -> None:
        """After `Desk.close`."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("the judge's thread did not close within %.3g s", timeout_s)

    def abandon(self) -> None:
        """Nobody holds the judge any more. Called by the garbage collector, in any thread: it takes no lock of ours."""
        self._abandoned = True
        self.wake()

    def forget(self) -> None:
        """In a forked process: the thread is not here; there is nothing to close."""

    def _run(self) -> None:
        from freewheel.judge.service import run_loop  # brings the HTTP client into this process

        try:
            run_loop(self._main())
        except Exception as error:
            log.exception("the judge's thread broke")
            self._desk.break_down(f"the judge's thread broke: {type(error).__name__}: {error}")

    async def _main(self) -> None:
        from freewheel.judge.service import Service

        self._service = Service(self._config, self._desk.spent, self._incoming)
        await self._service.run(self._ready)
        if self._expiry is not None:
            self._expiry.cancel()

    def _ready(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._drain()

    def _drain(self) -> None:
        assert self._service is not None and self._loop is not None
        if self._abandoned:
            self._abandoned = False
            self._desk.close("the judge was let go of")
        while (message := self._desk.next()) is not None:
            self._service.take(message)
        if self._expiry is not None:
            self._expiry.cancel()
        deadline = self._desk.next_deadline()
        if deadline < float("inf"):
            left_s = max(0.0, deadline - time.monotonic())
            self._expiry = self._loop.call_later(left_s, self._expire)

    def _expire(self) -> None:
        self._desk.expire(time.monotonic())
        self._drain()

    def _incoming(self, message: ToCaller) -> None:
        if isinstance(message, Stopped):
            if message.error:
                self._desk.break_down(message.error)
            return
        self._desk.take(message)
        self.wake()
