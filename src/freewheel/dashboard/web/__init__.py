"""The web page of a run: reads what was recorded, while it is being recorded, and shows it in a browser.

    RUN/metrics.jsonl ┐  tail ─▶ recorded ─┐
    RUN/trace/*.jsonl ┤       ─▶ timeline ─┤
    RUN/samples/*.jsonl       ─▶ samples ──┼─▶ RunView ─▶ pages (JSON) ─▶ server (HTTP, events) ─▶ static/ (the page)
    RUN/journal.sqlite ──────▶ ledger ─────┘

`freewheel dashboard` serves any runs until it is told to stop; `beside` starts a server next to `freewheel train`. A
run knows nothing of it: no file is written, and neither torch nor ray is imported.
"""
