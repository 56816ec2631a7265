"""Scoring a file: rows in, the same rows with verdicts out, continued where a killed run was.

No terminal in here: progress and malformed lines go to callbacks. The command is `freewheel.cli.score`.
"""

from freewheel.judge.scoring.accounts import Calls, Tally
from freewheel.judge.scoring.job import Progress, ScoringJob, Stopped, Summary
from freewheel.judge.scoring.open import open_job
from freewheel.judge.scoring.rows import Fields

__all__ = ["Calls", "Fields", "Progress", "ScoringJob", "Stopped", "Summary", "Tally", "open_job"]
