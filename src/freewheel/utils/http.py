"""Parts of HTTP servers and clients that the judge, the gateway and the dashboard share."""

from __future__ import annotations

import ipaddress
import logging

from aiohttp.http import HttpProcessingError


class _NoHttpNoise(logging.Filter):
    """aiohttp logs what it cannot parse with a traceback and parts of the bytes, which may hold a token. Whoever sent
    it has a 400, and anybody may send anything."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


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
