"""Predicts what a run would give on other numbers of accelerators, by simulation.

    a run directory, or a model and a table ─ `clusters` ─▶ `Scene` ─ `simulation` ─▶ `Outcome`
                                                  ▲                                       │
                                       `planner` ─┴─ splits, scaling ◀────────────────────┘─▶ `report`: tables, SVG

The simulation runs the classes that decide in a real run (`StalenessPolicy`, `Lookahead`, least-loaded tickets) under a
virtual clock. Imports neither torch nor Ray.
"""
