"""The judge's settings as flags: `freewheel score` and `freewheel serve` take the same ones, in the same words."""

from pathlib import Path
from typing import Annotated

import typer

PANEL = "Judge"

EndpointFlag = Annotated[
    list[str] | None,
    typer.Option(
        help="Base URL of an OpenAI-compatible judge; give it again for further ones.",
        metavar="URL",
        rich_help_panel=PANEL,
    ),
]
ModelFlag = Annotated[str | None, typer.Option(help="The model's name there.", rich_help_panel=PANEL)]
RubricFlag = Annotated[
    str | None,
    typer.Option(
        help="A built-in rubric (integer, number, yes_no, json, criteria) or a .toml or .json file.",
        metavar="NAME|FILE",
        rich_help_panel=PANEL,
    ),
]
KeyVariableFlag = Annotated[
    str | None,
    typer.Option(
        help="The environment variable that holds the judge's key. A key is never a flag: flags show in ps.",
        metavar="NAME",
        rich_help_panel=PANEL,
    ),
]
ConcurrencyFlag = Annotated[
    str | None,
    typer.Option(help="auto finds the judge's limit; N bounds it; fixed:N holds it.", rich_help_panel=PANEL),
]
TemperatureFlag = Annotated[
    str | None,
    typer.Option(
        help="Sampling temperature; none leaves it out, as reasoning models want.",
        metavar="NUMBER|none",
        rich_help_panel=PANEL,
    ),
]
MaxTokensFlag = Annotated[int | None, typer.Option(help="Longest reply.", rich_help_panel=PANEL)]
SamplingFlag = Annotated[
    list[str] | None,
    typer.Option(
        help="A further field of the request, as in reasoning_effort=low; give it again for further ones.",
        metavar="KEY=VALUE",
        rich_help_panel=PANEL,
    ),
]
PriceInFlag = Annotated[float | None, typer.Option(help="Price per million prompt tokens.", rich_help_panel=PANEL)]
PriceOutFlag = Annotated[float | None, typer.Option(help="Price per million reply tokens.", rich_help_panel=PANEL)]
MaxCostFlag = Annotated[
    float | None, typer.Option(help="Stop before this run costs more; needs prices.", rich_help_panel=PANEL)
]
CacheDirFlag = Annotated[str | None, typer.Option(help="Where the cache lies.", metavar="DIR", rich_help_panel=PANEL)]
NoCacheFlag = Annotated[
    bool,
    typer.Option("--no-cache", help="Keep no replies: what is asked again is paid for again.", rich_help_panel=PANEL),
]
ConfigFlag = Annotated[
    Path | None,
    typer.Option(
        help="Any of the judge's settings, as TOML or .json; flags come before it.",
        metavar="FILE",
        rich_help_panel=PANEL,
    ),
]
