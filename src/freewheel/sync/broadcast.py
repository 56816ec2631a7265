"""Broadcasts weights from one sender to all members of a group: a header, then buckets, all or nothing.

    sender                                       receivers
    header: version, layout, checksum ─────────▶ refuse an outdated or unfitting version
       ◀──────────────── agreed? ──────────────▶
    bucket 0, bucket 1, … ─────────────────────▶ into the receiver's memory, or directly into an engine
       ◀──────────────── agreed? ──────────────▶ complete, and the checksum is right ─▶ used

No member uses a version that another did not receive completely, unless its `Receiver` takes buckets directly: an
engine without room for a second model holds a mixture if the sender dies between two buckets, and reports it.

The trainer's `WeightServer` sends on request: weights are pickled as `SentWeights`, which know whom to ask.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import secrets
import socket
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from freewheel.sync.device import DevicePacker, DeviceWeights, separate_stream
from freewheel.sync.weights import BUCKET_BYTES, AnyWeights, Entry, Packer, WeightsGone, bucket_sizes, by_bucket, pack

if TYPE_CHECKING:
    import torch

log = logging.getLogger("freewheel.sync")

GroupKind = Literal["gloo", "nccl"]
SENDER = 0
GROUP_S = 60.0
"""Time for members to meet, and for each broadcast: a bucket takes ten seconds on a slow network."""
LAST_WORD_S = 2.0
"""Time for the sender to report what went wrong if an engine could not take what it sent."""
LINE_BYTES = 1 << 16
TOKEN_BYTES = 16
PROCESS = secrets.token_hex(TOKEN_BYTES)
"""Identifies this process: a successor has its own workers."""
_OUT_OF_STEP = threading.Event()
"""Set after a failure: the group must not be used again."""


class VersionRefused(RuntimeError):
    """A member refuses this version: it has a later one, or cannot hold it. Nothing was sent."""


class VersionSpoiled(RuntimeError):
    """A member received something other than what was sent. Nobody uses it."""


class GroupBroken(RuntimeError):
    """A member died or did not arrive in time. The group cannot be used any more."""


class Header(msgspec.Struct, frozen=True):
    """Sent before the buckets: which version follows, and how it is laid out."""

    version: int
    checksum: int
    entries: dict[str, Entry]


def send(
    group: TorchGroup, version: int, checksum: int, entries: Mapping[str, Entry], buffers: Sequence[torch.Tensor]
) -> None:
    """Send to all members, which call `receive` meanwhile. Blocks as long as the slowest; run it in a thread."""
    import torch

    header = msgspec.json.encode(Header(version, checksum, dict(entries)))
    group.broadcast(torch.tensor([len(header)], device=group.device))
    group.broadcast(torch.frombuffer(bytearray(header), dtype=torch.uint8).to(group.device))
    if not group.agree(True):
        raise VersionRefused(f"version {version} is not wanted: a receiver has a later one, or no room for it")
    for buffer in buffers:
        group.broadcast(buffer)
    if not group.agree(True):
        raise VersionSpoiled(f"version {version} did not arrive as it was sent, and nobody took it")


class Receiver(Protocol):
    """Where a version goes."""

    def wants(self, header: Header) -> bool: ...

    def buffer(self, size: int) -> torch.Tensor:
        """Return memory for the next bucket."""

    def bucket(self, entries: Mapping[str, Entry], buffer: torch.Tensor) -> None:
        """Take a bucket that has arrived."""

    def whole(self, header: Header) -> bool:
        """Check the complete version. False: something is wrong."""

    def take(self, header: Header) -> None:
        """Use the version: every member has it."""


def receive(group: TorchGroup, receiver: Receiver) -> int:
    """Receive the sender's next version and return its number. Raises `VersionRefused`, `VersionSpoiled`, and what the
    group raises if the sender died; then nothing was used."""
    import torch

    size = torch.zeros(1, dtype=torch.int64, device=group.device)
    group.broadcast(size)
    encoded = torch.empty(int(size.item()), dtype=torch.uint8, device=group.device)
    group.broadcast(encoded)
    header = msgspec.json.decode(encoded.cpu().numpy().tobytes(), type=Header)
    if not group.agree(receiver.wants(header)):
        raise VersionRefused(f"version {header.version} is not wanted by all")
    for part, n_bytes in zip(by_bucket(header.entries), bucket_sizes(header.entries), strict=True):
        buffer = receiver.buffer(n_bytes)
        group.broadcast(buffer)
        receiver.bucket(part, buffer)
    if not group.agree(receiver.whole(header)):
        raise VersionSpoiled(f"version {header.version} did not arrive as it was sent")
    receiver.take(header)
    return header.version


# -- groups -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _waits_with_a_limit() -> Iterator[None]:
    """Make NCCL's `wait` time out and raise. By default a watchdog would end the whole process: the trainer's, because
    an engine died."""
    name = "TORCH_NCCL_BLOCKING_WAIT"  # read when a group is created
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class TorchGroup:
    """One member's view of a group, separate from torch's default group. Tensors that are sent are on `device`."""

    def __init__(
        self,
        kind: GroupKind,
        *,
        address: str,
        port: int,
        rank: int,
        size: int,
        timeout_s: float,
        listening: socket.socket | None = None,
    ) -> None:
        """Return when all members are there. `address`, `port`: where the sender listens from now on, or already does
        (`listening`). Raises `GroupBroken`."""
        import torch
        import torch.distributed as dist
        from torch._C._distributed_c10d import TCPStore

        within = timedelta(seconds=timeout_s)
        self.device = torch.device("cpu" if kind == "gloo" else f"cuda:{torch.cuda.current_device()}")
        self._group: Any
        try:
            opened = None if listening is None else listening.detach()
            self._store = TCPStore(address, port, size, rank == SENDER, within, master_listen_fd=opened)
            if kind == "gloo":
                self._group = dist.ProcessGroupGloo(self._store, rank, size, within)
            else:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = within
                with _waits_with_a_limit():
                    self._group = dist.ProcessGroupNCCL(self._store, rank, size, options)
        except RuntimeError as error:
            raise GroupBroken(f"no group of {size} at {address}:{port} within {timeout_s:g} s: {error}") from error

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send the sender's content to all. Returns when it has arrived."""
        self._wait(self._group.broadcast, tensor, SENDER)

    def agree(self, yes: bool) -> bool:
        """Return whether every member said yes."""
        import torch
        import torch.distributed as dist

        said = torch.tensor([int(yes)], dtype=torch.int32, device=self.device)
        self._wait(self._group.allreduce, said, dist.ReduceOp.MIN)
        return bool(said.item())

    def _wait(self, collective: Any, tensor: torch.Tensor, argument: Any) -> None:
        import torch

        try:
            collective(tensor, argument).wait()
            if tensor.is_cuda:  # NCCL's wait only orders the stream after it
                torch.cuda.current_stream(tensor.device).synchronize()
        except RuntimeError as error:
            raise GroupBroken(f"the group broke: {error}") from error

    def close(self) -> None:
        abort = getattr(self._group, "abort", None)  # NCCL: end waits for a dead member
        if abort is not None and self.device.type == "cuda":
            abort()


# -- weights on request -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Address:
    """Where a `WeightServer` listens, with the token that it requires."""

    host: str
    port: int
    token: str


@dataclass(eq=False)
class SentWeights(AnyWeights):
    """Weights of another process, sent on request. `DeviceWeights` are pickled as this."""

    entries: dict[str, Entry]
    checksum: int
    key: int
    server: Address

    @contextlib.contextmanager
    def sending(self, receiver: str, workers: int) -> Iterator[dict[str, Any]]:
        """Yield where the workers of replica `receiver` meet the sender, which sends from now on. Ends when it has
        sent everything. Raises the sender's error, or `WeightsGone` if nobody answers."""
        request = {
            "token": self.server.token,
            "receiver": receiver,
            "process": PROCESS,
            "size": 1 + workers,
            "key": self.key,
            "new_group": _OUT_OF_STEP.is_set(),
        }
        try:
            with socket.create_connection((self.server.host, self.server.port), timeout=GROUP_S) as connection:
                connection.settimeout(2 * GROUP_S)
                _write_line(connection, request)
                meeting = _read_answer(connection)
                _OUT_OF_STEP.set()  # until it has succeeded
                try:
                    yield meeting
                except Exception:  # not the engine's failure if the sender died: then the connection ends
                    connection.settimeout(LAST_WORD_S)
                    with contextlib.suppress(TimeoutError, RuntimeError):  # it is alive and reports its own errors
                        _read_answer(connection)
                    raise
                _read_answer(connection)
                _OUT_OF_STEP.clear()
        except OSError as error:
            raise WeightsGone(f"the trainer does not answer any more: {error}") from error


def _write_line(connection: socket.socket, values: Mapping[str, Any]) -> None:
    connection.sendall(json.dumps(values).encode() + b"\n")


def _read_line(connection: socket.socket) -> Any:
    line = connection.makefile("rb", buffering=0).readline(LINE_BYTES)  # a buffer would take the next line too
    if not line.endswith(b"\n"):
        raise ConnectionError("the connection was closed")
    return json.loads(line)


def _read_answer(connection: socket.socket) -> dict[str, Any]:
    answer: dict[str, Any] = _read_line(connection)
    if answer.get("gone"):
        raise WeightsGone(answer["gone"])
    if answer.get("error"):
        raise RuntimeError(f"the trainer could not send: {answer['error']}")
    return answer


class WeightServer:
    """Answers engines that ask for weights, in the trainer's process."""

    def __init__(self, *, host: str) -> None:
        self._socket = socket.create_server((host, 0))
        self.address = Address(host, self._socket.getsockname()[1], secrets.token_hex(TOKEN_BYTES))
        self._offered: weakref.WeakValueDictionary[int, DeviceWeights] = weakref.WeakValueDictionary()
        self._keys = itertools.count(1)
        self._groups: dict[str, tuple[str, TorchGroup]] = {}
        """The process and the group of each replica."""
        self._locks: dict[str, threading.Lock] = {}
        threading.Thread(target=self._run, name="freewheel-sending", daemon=True).start()

    def offer(self, weights: DeviceWeights) -> SentWeights:
        """Return what is pickled instead of `weights`, which must be held here as long as they may be requested."""
        key = next(self._keys)
        self._offered[key] = weights
        return SentWeights(weights.entries, weights.checksum, key, self.address)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for a connection
        self._socket.close()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(connection,), name="freewheel-sending", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                connection.settimeout(GROUP_S)
                request = _read_line(connection)
                if not secrets.compare_digest(str(request["token"]), self.address.token):
                    return
                weights = self._offered.get(request["key"])
                if weights is None:
                    _write_line(connection, {"gone": "these weights are not held any more"})
                    return
                receiver = request["receiver"]
                with self._locks.setdefault(receiver, threading.Lock()):
                    process, _ = self._groups.get(receiver, (None, None))
                    if request["new_group"] or process != request["process"]:
                        self._leave(receiver)
                    self._send(connection, request, weights)
            except (OSError, ValueError, KeyError, TypeError) as error:
                log.warning("Parameter sync: a request for weights failed: %s", error)

    def _send(self, connection: socket.socket, request: Mapping[str, Any], weights: DeviceWeights) -> None:
        assert weights.buffers is not None, "these weights are another process's"
        failure = None
        try:
            with separate_stream(weights.buffers[0].device):
                group = self._group(connection, request, "nccl" if weights.buffers[0].is_cuda else "gloo")
                send(group, request["key"], weights.checksum, weights.entries, weights.buffers)
        except Exception as error:  # noqa: BLE001  # the engine receives it; whatever it is, this group is out of step
            self._leave(request["receiver"])
            failure = f"{type(error).__name__}: {error}"
        _write_line(connection, {"error": failure})

    def _group(self, connection: socket.socket, request: Mapping[str, Any], kind: GroupKind) -> TorchGroup:
        """Return the group of an engine. If there is none yet, tell the engine where to meet (`port`)."""
        receiver, host, size = request["receiver"], self.address.host, int(request["size"])
        meeting = {"key": request["key"], "kind": kind, "address": host, "port": 0, "size": size}
        if receiver in self._groups:
            _write_line(connection, meeting)
            return self._groups[receiver][1]
        listening = socket.create_server((host, 0))
        port = listening.getsockname()[1]
        _write_line(connection, meeting | {"port": port})
        group = TorchGroup(
            kind, address=host, port=port, rank=SENDER, size=size, timeout_s=GROUP_S, listening=listening
        )
        self._groups[receiver] = request["process"], group
        return group

    def _leave(self, receiver: str) -> None:
        _, left = self._groups.pop(receiver, (None, None))
        if left is not None:
            left.close()


def own_address() -> str:
    """Return this machine's address on the interface towards other machines. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            one.connect(("10.255.255.255", 1))
            return str(one.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def packer_for(transport: str) -> Packer:
    """Return how weights are copied for a transport."""
    if transport == "object_store":
        return pack
    travels_as = None if transport == "ipc" else WeightServer(host=own_address()).offer
    return DevicePacker(bucket_bytes=BUCKET_BYTES, travels_as=travels_as)
