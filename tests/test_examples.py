"""The examples run as their docstrings say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_the_plain_torch_loop_learns_from_rule_and_judge():
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "torch_loop.py"), "--steps", "20"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    right = [int(share) for share in re.findall(r"(\d+)% right", done.stdout)]
    assert len(right) == 20
    assert right[0] < 30 < 60 < right[-1]
