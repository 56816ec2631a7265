"""Predicts what a run would give on other numbers of accelerators, by simulation.

    a run directory ─▶ `calibration` ─┐
    a model, a table ─▶ `hardware` ───┴▶ `Scene` ─▶ `simulation` ─▶ `Outcome` ─▶ `planner`: splits, scaling
                                                                                    └▶ `report`: tables, JSON, SVG

The simulation runs the classes that decide in a real run (`StalenessPolicy`, `Limiter`, `Pacer`, least-loaded tickets)
under a virtual clock. Imports neither torch nor Ray.
"""
