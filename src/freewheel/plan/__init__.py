"""What a run would give, before it is run; and what a run that goes on is held up by.

    waits and rates of a live run ─▶ `watching` ─▶ `verdict` ─┐ one sentence and a number
                                                              ├─ `model`: the steady state, in closed form
    a run directory ─▶ `measured` ─┐                          │
    a model, a table ─▶ `hardware` ┴▶ `Scene` ─▶ `simulation` ─▶ `Outcome` ─▶ `sweep`: splits, the best, its scaling

`planning` and `command` are the shell, and know a run's settings; all else sits below `runtime`.

The simulation is driven by the classes that decide in a run (`StalenessPolicy`, `Limiter`, `Pacer`, the pressure by
which tickets are dealt) under a virtual clock. Imports neither torch nor ray.
"""
