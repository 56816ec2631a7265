"""Flags that several commands of this package share, each with one name and one help text."""

from __future__ import annotations

from typing import Annotated

import typer

CONFIG_PANEL = "Configuration"

ConfigPathFlag = Annotated[
    str | None,
    typer.Option(
        help="The folder with your YAML files. Without it: those that come with freewheel.",
        metavar="DIR",
        rich_help_panel=CONFIG_PANEL,
    ),
]
ConfigNameFlag = Annotated[
    str | None, typer.Option(help="Which file of it (default).", metavar="NAME", rich_help_panel=CONFIG_PANEL)
]
