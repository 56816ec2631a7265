"""The web page of a run: reads what is recorded, also during the run, and shows it in a browser.

    RUN/metrics.jsonl ┐  Tail ─▶ RecordedMetrics ─┐
    RUN/trace/*.jsonl ┤       ─▶ Timeline ────────┤
    RUN/samples/*.jsonl       ─▶ Samples ─────────┼─▶ RunView ─▶ views (JSON) ─▶ server ─▶ static/ (the page)
    RUN/journal.sqlite ──────▶ audit ─────────────┘

`freewheel dashboard` serves any runs until it is stopped; `serve_next_to_run` starts a server for the run of
`freewheel train`. The server writes no file and imports neither torch nor Ray.
"""
