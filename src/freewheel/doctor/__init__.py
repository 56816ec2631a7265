"""`freewheel doctor`: checks whether a run would work on this machine, and prints the command that fixes each problem.

    software  Python, freewheel's extras, torch, vLLM, Ray                   ┐
    machine   GPUs, shared memory, disks, open files, memory, CPUs           ├─▶ Finding: state, detail, remedy
    judge     one call to each endpoint                                      │
    run       the configuration, and what it needs of this machine           ┘

`run.list_checks` has the checks in order. Works without torch and Ray. The findings about one run are also part of
`freewheel train --dry-run`.
"""
