"""`freewheel doctor`: what stands in a run's way on this machine, each with the command that mends it.

    software  Python, freewheel's extras, torch, vLLM, Ray     ┐
    gpu       memory, driver, who else is there                 │
    storage   shared memory, disks                              ├─▶ Finding: ok | warning | problem, detail, remedy
    host      open files, processes, memory, CPUs, clock        │
    judge     one call to each endpoint                         │
    a_run     the configuration, what stands against it here   ┘     (`settings` reads it to its end)

Each module looks (thin, bounded in time) and judges what it saw (pure). Works without torch and Ray, and says so. The
findings that concern one run are also part of `freewheel train --dry-run`.
"""
