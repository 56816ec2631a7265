"""The gateway: one process that owns limiter, cache, budget and accounts for all workers of a machine or a cluster.

    workers ──HTTP──▶ Connections ──▶ Gateway ──▶ shapes ──▶ InlineJudge ──HTTP──▶ the judge
                      (limits)        (routes,     (pure)      (one engine,
                                       token)                   one limit)

`freewheel serve` runs it. Eight workers with a limit of their own each are eight times too fast for the judge; behind
one gateway they share one limit, and what one of them asked no other pays for.

`server.Gateway` is the same on a loop of yours. Nothing is imported here: `freewheel --help` need not load it.
"""
