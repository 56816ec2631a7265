"""A default stands in the schema; where the help or the docs name it too, they name the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.main import get_command

from freewheel.cli import app
from freewheel.gateway.limits import Limits
from freewheel.gateway.server import DEFAULT_HOST, DEFAULT_PORT

PAGE = (Path(__file__).parents[2] / "docs/gateway.md").read_text()
LIMITS = Limits()


@pytest.mark.parametrize(
    ("flag", "default"),
    [
        ("host", DEFAULT_HOST),
        ("port", str(DEFAULT_PORT)),
        ("drain_s", f"{LIMITS.drain_s:g}"),
        ("max_body_bytes", f"{LIMITS.max_body_bytes >> 20} MiB"),
        ("max_connections", str(LIMITS.max_connections)),
        ("max_waiting", str(LIMITS.max_waiting)),
    ],
)
def test_the_help_names_the_default_that_holds(flag: str, default: str):
    serve = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    [option] = [param for param in serve.params if param.name == flag]
    assert f"({default})" in option.help


@pytest.mark.parametrize(
    "line",
    [
        f"http://{DEFAULT_HOST}:{DEFAULT_PORT}/v1",
        f"| {LIMITS.max_body_bytes >> 20} MiB a body",
        f"| {LIMITS.max_connections:,} connections |",
        f"| {LIMITS.max_waiting:,} open judgements |",
        f"| {LIMITS.max_waiting_bytes >> 20} MiB of bodies waiting |",
        f"| {LIMITS.header_timeout_s:g} s for the first headers, {LIMITS.body_timeout_s:g} s for a body |",
        f"| {LIMITS.write_timeout_s:g} s without reading the reply |",
        f"`--drain-s` ({LIMITS.drain_s:g} s)",
    ],
)
def test_the_page_names_the_limits_that_hold(line: str):
    assert line in PAGE
