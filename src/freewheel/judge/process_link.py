"""`placement="process"`: the engine in a child process, and a thread here that talks to it.

    desk ◀─▶ this thread ◀─ socket pair ─▶ `python -m freewheel.judge.child`

The thread sleeps in select; it is woken by the child (20 times a second), by a submit, and by deadlines.
A child that dies is replaced and gets what the dead one had not answered.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time

from freewheel.judge.config import JudgeConfig
from freewheel.judge.desk import Desk
from freewheel.judge.request import JudgeRequest
from freewheel.judge.wire import Close, Configure, FrameReader, Started, Stopped, Submit, ToEngine, pack

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
                    [sys.executable, "-P", "-m", "freewheel.judge.child", str(theirs.fileno())],
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
