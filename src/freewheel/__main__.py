"""`python -m freewheel`: the `freewheel` command."""

from freewheel.cli import main

main()
