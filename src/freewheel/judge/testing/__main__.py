"""`python -m freewheel.judge.testing`: the mock judge as a child process; writes one JSON line when it listens."""

from __future__ import annotations

import argparse
import io
import json
import sys
from urllib.parse import urlsplit

import msgspec

from freewheel.judge.testing.mock import DEFAULT_HOST, DEFAULT_PORT, serve
from freewheel.judge.testing.profile import JudgeProfile


def main() -> None:
    """Read the flags and serve."""
    parser = argparse.ArgumentParser(prog="python -m freewheel.judge.testing", description="An LLM judge to test with.")
    parser.add_argument("--profile", default="{}", help="JudgeProfile as JSON, or - to read it as a line from stdin")
    parser.add_argument("--host", default=DEFAULT_HOST, help="address to listen on")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="port to listen on; 0 takes a free one")
    parser.add_argument("--until-eof", action="store_true", help="stop when stdin ends, as well as on SIGINT, SIGTERM")
    arguments = parser.parse_args()
    # Unbuffered: what follows the first line is left for the loop to see.
    stdin = io.FileIO(sys.stdin.fileno(), closefd=False)
    text = stdin.readline() if arguments.profile == "-" else arguments.profile
    try:
        profile = msgspec.json.decode(text, type=JudgeProfile)
    except (msgspec.DecodeError, ValueError) as problem:  # ConfigError is a ValueError
        parser.error(f"--profile: {problem}")

    def announce(url: str) -> None:
        sys.stdout.write(json.dumps({"url": url, "port": urlsplit(url).port}) + "\n")
        sys.stdout.flush()

    serve(profile, arguments.host, arguments.port, announce, until_eof=stdin.fileno() if arguments.until_eof else None)


if __name__ == "__main__":
    main()
