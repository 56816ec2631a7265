"""Parts of HTTP servers that the gateway, the mock judge and the dashboard share. Light to import."""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket

import msgspec

from freewheel.errors import ConfigError


class _NoHttpNoise(logging.Filter):
    """Drops aiohttp's tracebacks about requests that it cannot parse.

    Any client can send such requests. It gets a 400, and the traceback would show parts of the bytes, which may hold a
    token.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.exc_info:
            return True
        from aiohttp.http import HttpProcessingError  # imported here to keep this module light

        return not isinstance(record.exc_info[1], HttpProcessingError)


_NO_NOISE = _NoHttpNoise()


def server_log(name: str) -> logging.Logger:
    """Return a logger for aiohttp that reports our faults and not the clients' mistakes."""
    log = logging.getLogger(name)
    log.addFilter(_NO_NOISE)
    return log


def openai_error(
    message: str, kind: str = "invalid_request_error", code: str | None = None, param: str | None = None
) -> bytes:
    """Return the body of an error as the OpenAI API writes it."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


HOST = "127.0.0.1"
BACKLOG = 4096
"""Connections that may wait to be accepted: if a thousand clients start together, none may fail by chance."""
ANYWHERE = ("0.0.0.0", "::")
PORT_ERRORS = (errno.EADDRINUSE, errno.EACCES)
"""Errors of `bind` that another port would fix. The others are about the host."""


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that already accepts connections; they wait until a server answers. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except (OSError, OverflowError):
        listening.close()
        raise
    return listening


def listen_or_say(host: str, port: int) -> socket.socket:
    """`listen`, with a `ConfigError` that names the flag if it fails."""
    try:
        return listen(host, port)
    except (OSError, OverflowError) as error:
        if isinstance(error, OverflowError) or error.errno in PORT_ERRORS:
            remedy = f"it cannot listen there: {error}; choose another, or leave it out for any that is free"
            raise ConfigError("--port", port, remedy) from None
        remedy = f"it cannot listen there: {error}; give an address of this machine, or leave it out for {HOST}"
        raise ConfigError("--host", host, remedy) from None


def address(listening: socket.socket, token: str) -> str:
    """Return the URL to open in a browser."""
    host, port = listening.getsockname()[:2]
    if host in ANYWHERE:
        host = socket.gethostname()
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/?token={token}"
