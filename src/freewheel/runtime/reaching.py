"""Whether a Ray cluster is where a run looks for it, found out in seconds: Ray itself tries a dead address for minutes.

    ray.address ─▶ joined_at: host:port ─▶ a TCP connection ─▶ HTTP/2's first frames ─▶ nothing, or a `ConfigError`

Before `ray.init`, in `freewheel train`'s preflight and in `freewheel doctor`. Needs no Ray.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from freewheel.errors import ConfigError
from freewheel.utils.processes import within

KEY = "ray.address"
CONNECT_S = 5.0
"""For a host to take a connection. One that does not by then is down, or behind a wall that drops what it is sent."""
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""How a client of HTTP/2 begins (RFC 9113, 3.4), with empty settings: Ray speaks gRPC. A server of another kind would
keep Ray trying as long as a dead port does."""
FRAME_BYTES, KIND_AT, SETTINGS = 9, 3, 4
"""Of the head of a frame, its kind within it, and the kind that a server begins with."""
RESOLVE_S = 5.0
"""On top of it for the host's name: a resolver that is out of reach has no limit of its own."""
CLIENT = "ray://"
NEW = "local"
"""As an address: a cluster of the run's own."""
VARIABLE = "RAY_ADDRESS"
"""What `auto` means, where it is set; else what the last `ray start` on this machine wrote down."""
CURRENT = "ray/ray_current_cluster"
ENCRYPTED = "RAY_USE_TLS"
HEAD = "gcs_server"
"""The process without which there is no cluster."""
START = "ray start --head --port=6379"


def check_cluster(address: str | None, environ: Mapping[str, str] = os.environ) -> None:
    """Raises where nobody takes a connection at `address`. None: the run starts one itself."""
    if address is None or address == NEW:
        return
    place = joined_at(address, environ)
    if place is None:
        if not _has_head():
            raise ConfigError(KEY, address, f"no Ray cluster is known on this machine: start one with {START}")
        return
    said = f"{address} ({place})" if place != address else address
    host, port = _split(said, place)
    try:
        within(RESOLVE_S + 2 * CONNECT_S, lambda: _greet(host, port, secret=environ.get(ENCRYPTED) == "1"))
    except NotRay as error:
        raise ConfigError(KEY, said, f"{error}: give the address that `ray start --head` printed") from None
    except OSError as error:
        if address == "auto" and not environ.get(VARIABLE) and _has_head():
            return  # one that nobody wrote down: Ray looks for it among the processes
        why = error.strerror or str(error) or type(error).__name__
        remedy = f"nobody takes a connection there ({why}): start a cluster with {START}, correct it, or leave it out"
        raise ConfigError(KEY, said, remedy) from None


def joined_at(address: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """`host:port`; None where `auto` has nothing to go by."""
    if address == "auto":
        address = environ.get(VARIABLE, "") or _current(environ)
    return address.removeprefix(CLIENT).partition("/")[0] or None


def _current(environ: Mapping[str, str]) -> str:
    """The address that the last `ray start` on this machine left."""
    folder = Path(environ.get("RAY_TMPDIR") or environ.get("TMPDIR") or "/tmp")
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return (folder / CURRENT).read_text(encoding="utf-8").strip()
    return ""


def _split(said: str, place: str) -> tuple[str, int]:
    host, _, port = place.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(KEY, said, "give 'auto' or host:port, such as 10.0.0.5:6379")
    return host.strip("[]"), int(port)


class NotRay(Exception):
    """Somebody else listens there."""


def _greet(host: str, port: int, *, secret: bool) -> None:
    """`secret`: the cluster wants TLS, and its own client has the certificates."""
    with socket.create_connection((host, port), timeout=CONNECT_S) as connection:
        if secret:
            return
        answer = b""
        try:
            connection.sendall(GREETING)
            while len(answer) < FRAME_BYTES and (more := connection.recv(FRAME_BYTES - len(answer))):
                answer += more
        except OSError as error:
            raise NotRay(f"somebody takes connections there, and does not speak as Ray does ({error})") from None
    if len(answer) < FRAME_BYTES or answer[KIND_AT] != SETTINGS:
        raise NotRay("what answers there is no Ray cluster")


def _has_head() -> bool:
    """Whether a cluster's head runs on this machine."""
    for file in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):  # it has just ended
            if file.read_text(encoding="utf-8", errors="replace").strip() == HEAD:
                return True
    return False
