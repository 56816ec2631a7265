"""Parts of HTTP servers and clients that the judge, the gateway and the dashboard share.

Where the page is served: a socket that takes connections at once, and the address to open. Light to import.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket

from freewheel.errors import ConfigError


class _NoHttpNoise(logging.Filter):
    """aiohttp logs what it cannot parse with a traceback and parts of the bytes, which may hold a token. Whoever sent
    it has a 400, and anybody may send anything."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.exc_info:
            return True
        from aiohttp.http import HttpProcessingError  # here: whoever only listens should not pay for aiohttp

        return not isinstance(record.exc_info[1], HttpProcessingError)


_NO_NOISE = _NoHttpNoise()


def server_log(name: str) -> logging.Logger:
    """For aiohttp's `logger`: faults of ours, and nothing of what clients get wrong."""
    log = logging.getLogger(name)
    log.addFilter(_NO_NOISE)
    return log


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


HOST = "127.0.0.1"
BACKLOG = 64
ANYWHERE = ("0.0.0.0", "::")
OF_THE_PORT = (errno.EADDRINUSE, errno.EACCES)
"""Of a socket that cannot be had: what another port would mend. The rest is of the host."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections already, though nobody answers yet. `OSError` where it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(BACKLOG)
    except (OSError, OverflowError):
        found.close()
        raise
    return found


def listen_or_say(host: str, port: int) -> socket.socket:
    """The same for people: `ConfigError` where it cannot be had."""
    try:
        return listen(host, port)
    except (OSError, OverflowError) as error:
        if isinstance(error, OverflowError) or error.errno in OF_THE_PORT:
            remedy = f"it cannot listen there: {error}; choose another, or leave it out for any that is free"
            raise ConfigError("--port", port, remedy) from None
        remedy = f"it cannot listen there: {error}; give an address of this machine, or leave it out for {HOST}"
        raise ConfigError("--host", host, remedy) from None


def address(listening: socket.socket, token: str) -> str:
    host, port = listening.getsockname()[:2]
    if host in ANYWHERE:
        host = socket.gethostname()
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/?token={token}"
