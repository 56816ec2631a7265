"""`freewheel dashboard`: runs in a browser, live or long over. Nothing heavy is imported before the command runs."""

from __future__ import annotations

from typing import Annotated

import typer

EPILOG = """
It serves until Ctrl-C. A run that is going on has a page of its own, whose address it says at its start.
"""


def dashboard(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Runs' folders, or folders with runs in them (runs/). Nothing is changed "
                       "in them."),
    ],
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes any that is free.", min=0, max=65535)] = 0,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Any other than loopback shows the runs, unencrypted, to who has "
                          "the token.")
    ] = "127.0.0.1",
    open_browser: Annotated[bool, typer.Option("--open", help="Open it in the browser of this machine.")] = False,
) -> None:  # fmt: skip
    """Look at runs in a browser: curves, waits, judge, weights, timeline, samples, ledger, and runs side by side."""
    import time
    import webbrowser

    from freewheel.cli.console import plain_errors, print_text, say
    from freewheel.dashboard.web.runs import Runs
    from freewheel.dashboard.web.server import make_token, serve
    from freewheel.utils.http import address, is_loopback, listen_or_say

    with plain_errors():
        found = Runs(runs, clock=time.monotonic)
        token = make_token()
        with listen_or_say(host, port) as listening:
            url = address(listening, token)
            if not is_loopback(host):
                say(
                    f"warning: {host} can be reached from other machines: who has the address sees prompts and "
                    "responses, and so does who listens on the way. An SSH tunnel to 127.0.0.1 is safer"
                )

            def ready() -> None:
                print_text(f"the page is at {url}")
                if open_browser:
                    webbrowser.open(url)

            serve(found, listening, token, ready)
