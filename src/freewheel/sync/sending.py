"""Weights that a trainer on one GPU broadcasts to engines on others, when an engine asks for them.

    trainer                                              rollouter                       its engine's workers
    BroadcastPacker ─▶ SentWeights, pickled: who to ask ─▶ .sending(workers) ─ asks ─┐
    Desk, a thread an engine ◀───────────────────────────────────────────────────────┘
        group of the trainer and that engine's workers ◀──────── address, port ────────▶ join (once an engine)
        send(group, version, buckets) ─────────────────────────────────────────────────▶ receive(group, …)

An engine has a group of its own, so that one that hangs or dies holds up itself alone; a group that broke is left, and
the next time another is made. The training thread takes no part: buckets are copies (`DevicePacker`), and lie still
while somebody in the trainer holds them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import secrets
import socket
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from freewheel.sync.broadcast import send
from freewheel.sync.buckets import BUCKET_BYTES
from freewheel.sync.device import DevicePacker, DeviceWeights
from freewheel.sync.groups import SENDER, Group, Kind, TorchGroup
from freewheel.sync.weights import Entry, Packer, Weights, WeightsGone, pack

if TYPE_CHECKING:
    import torch

log = logging.getLogger("freewheel.sync")

GROUP_S = 60.0
"""For the members of a group to meet, and for each of their broadcasts: a bucket takes a slow network ten seconds."""
LAST_WORD_S = 2.0
"""For the sender to say what went wrong, where an engine could not take what it sent."""
LINE_BYTES = 1 << 16
TOKEN_BYTES = 16
HERE = secrets.token_hex(TOKEN_BYTES)
"""This process: one that is started in its place has workers of its own."""
_OUT_OF_STEP = threading.Event()
"""The last time went wrong, and the group is not to be used again."""


@dataclass(frozen=True)
class Address:
    """Where a `Desk` is asked, and what shows that one may."""

    host: str
    port: int
    token: str


class SentWeights:
    """Weights of another process, which sends them when it is asked. What `DeviceWeights` become on their way."""

    def __init__(self, entries: dict[str, Entry], checksum: int, key: int, desk: Address) -> None:
        self.entries = entries
        self.checksum = checksum
        self._key = key
        self._desk = desk

    @property
    def n_bytes(self) -> int:
        return sum(entry.n_bytes for entry in self.entries.values())

    def tensors(self) -> dict[str, torch.Tensor]:
        raise NotImplementedError("weights that are broadcast go to an engine's workers: use another transport")

    def on_host(self) -> Weights:
        raise NotImplementedError("weights that are broadcast go to an engine's workers: use another transport")

    @contextlib.contextmanager
    def sending(self, receiver: str, workers: int) -> Iterator[dict[str, Any]]:
        """Where the workers of replica `receiver` meet the sender, which sends from now on. Ends when it has; raises
        what went wrong there, or `WeightsGone` where nobody answers any more."""
        asked = {"token": self._desk.token, "receiver": receiver, "process": HERE, "size": 1 + workers}
        try:
            with _line(self._desk) as line:
                told = _ask(line, asked | {"key": self._key, "anew": _OUT_OF_STEP.is_set()})
                _OUT_OF_STEP.set()  # until it has gone well
                with _unless_gone(line):
                    yield told
                _ask(line, None)
                _OUT_OF_STEP.clear()
        except OSError as error:
            raise WeightsGone(f"the trainer does not answer any more: {error}") from error


@contextlib.contextmanager
def _unless_gone(line: socket.socket) -> Iterator[None]:
    """A sender that died breaks the group: what the workers say of that is not the engine's failure."""
    try:
        yield
    except Exception:
        line.settimeout(LAST_WORD_S)
        with contextlib.suppress(TimeoutError, RuntimeError):  # it lives, and will say or has said something
            _ask(line, None)
        raise


@contextlib.contextmanager
def _line(desk: Address) -> Iterator[socket.socket]:
    with socket.create_connection((desk.host, desk.port), timeout=GROUP_S) as line:
        line.settimeout(2 * GROUP_S)
        yield line


def _ask(line: socket.socket, asked: Mapping[str, Any] | None) -> dict[str, Any]:
    """One line each way; None: only the answer."""
    if asked is not None:
        line.sendall(json.dumps(asked).encode() + b"\n")
    found = b""
    while not found.endswith(b"\n"):
        part = line.recv(LINE_BYTES)
        if not part:
            raise ConnectionError("the line was closed")
        found += part
    told: dict[str, Any] = json.loads(found)
    if told.get("gone"):
        raise WeightsGone(str(told["error"]))
    if told.get("error"):
        raise RuntimeError(f"the trainer could not send: {told['error']}")
    return told


class Desk:
    """Where engines ask for weights, in the trainer's process."""

    def __init__(self, *, host: str) -> None:
        self._socket = socket.create_server((host, 0))
        self.address = Address(host, self._socket.getsockname()[1], secrets.token_hex(TOKEN_BYTES))
        self._offered: weakref.WeakValueDictionary[int, DeviceWeights] = weakref.WeakValueDictionary()
        self._keys = itertools.count(1)
        self._groups: dict[str, tuple[str, Group]] = {}
        """By replica: of which of its lives, and the group."""
        self._locks: dict[str, threading.Lock] = {}
        threading.Thread(target=self._run, name="freewheel-sending", daemon=True).start()

    def offer(self, weights: DeviceWeights) -> SentWeights:
        """What is pickled in the place of `weights`, which must be held here as long as they may be asked for."""
        key = next(self._keys)
        self._offered[key] = weights
        return SentWeights(weights.entries, weights.checksum, key, self.address)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # which wakes who waits for a call
        self._socket.close()

    def _run(self) -> None:
        while True:
            try:
                line, _ = self._socket.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(line,), name="freewheel-sending", daemon=True).start()

    def _serve(self, line: socket.socket) -> None:
        with line:
            try:
                line.settimeout(GROUP_S)
                asked = json.loads(line.makefile("rb").readline(LINE_BYTES))
                if not secrets.compare_digest(str(asked["token"]), self.address.token):
                    return
                weights = self._offered.get(asked["key"])
                if weights is None:
                    _tell(line, {"gone": True, "error": "these weights are not held any more"})
                    return
                with self._locks.setdefault(asked["receiver"], threading.Lock()):
                    life, _ = self._groups.get(asked["receiver"], (None, None))
                    if asked["anew"] or life != asked["process"]:
                        self._leave(asked["receiver"])
                    self._send(line, asked, weights)
            except (OSError, ValueError, KeyError, TypeError) as error:
                log.warning("Parameter sync: a request for weights came to nothing: %s", error)

    def _send(self, line: socket.socket, asked: Mapping[str, Any], weights: DeviceWeights) -> None:
        receiver, buffers = asked["receiver"], weights.buffers()
        try:
            with _on(buffers[0]):
                group = self._group(line, asked, "nccl" if buffers[0].is_cuda else "gloo")
                send(group, asked["key"], weights.checksum, weights.entries, buffers)
        except Exception as error:  # noqa: BLE001  # the engine's to hear; whatever it is, this group is out of step
            self._leave(receiver)
            _tell(line, {"error": f"{type(error).__name__}: {error}"})
            return
        _tell(line, {"error": None})

    def _group(self, line: socket.socket, asked: Mapping[str, Any], kind: Kind) -> Group:
        """That of an engine, which is told where it meets, if it has to be made."""
        receiver, host, size = asked["receiver"], self.address.host, int(asked["size"])
        told = {"key": asked["key"], "kind": kind, "address": host, "port": 0, "size": size}
        if receiver in self._groups:
            _tell(line, told)
            return self._groups[receiver][1]
        listening = socket.create_server((host, 0))
        port = listening.getsockname()[1]
        _tell(line, told | {"port": port})
        made = TorchGroup(kind, address=host, port=port, rank=SENDER, size=size, timeout_s=GROUP_S, listening=listening)
        self._groups[receiver] = asked["process"], made
        return made

    def _leave(self, receiver: str) -> None:
        _, left = self._groups.pop(receiver, (None, None))
        if left is not None:
            left.close()


def _tell(line: socket.socket, told: Mapping[str, Any]) -> None:
    line.sendall(json.dumps(told).encode() + b"\n")


@contextlib.contextmanager
def _on(buffer: torch.Tensor) -> Iterator[None]:
    """A stream of its own: nothing waits for the training thread's, nor that for this."""
    import torch

    if not buffer.is_cuda:
        yield
        return
    with torch.cuda.device(buffer.device), torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        yield


def own_address() -> str:
    """By which other machines reach this one: that of the interface towards them. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            one.connect(("10.255.255.255", 1))
            return str(one.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def packer_for(transport: str) -> Packer:
    """How weights are copied for a way to the engines."""
    if transport == "object_store":
        return pack
    packer = DevicePacker(bucket_bytes=BUCKET_BYTES)
    return packer if transport == "ipc" else BroadcastPacker(packer, Desk(host=own_address()))


class BroadcastPacker:
    """As `DevicePacker`, but what is pickled says whom to ask."""

    def __init__(self, packer: DevicePacker, desk: Desk) -> None:
        self._packer = packer
        self._desk = desk

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> DeviceWeights:
        weights = self._packer(tensors)
        weights.travels_as = self._desk.offer
        return weights
