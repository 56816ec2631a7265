"""The gateway: one process that owns limiter, cache and budget for all workers of a machine or a cluster.

    workers ──HTTP──▶ Connections ──▶ Gateway ──▶ shapes ──▶ InlineJudge ──HTTP──▶ the judge
                      (limits)        (routes,     (pure)      (one engine,
                                       token)                   one limit)

`freewheel serve` runs it. Eight workers with their own limits are eight times too fast for the judge; behind one
gateway they share one limit, and equal content is paid for once. `server.Gateway` runs on your own loop. This package
imports nothing, so that `freewheel --help` stays fast.
"""
