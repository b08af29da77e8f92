"""Frameworks save and resume in their own way: the ledger is never below what was released."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("frameworks_run.py")
KILLS = 10


@pytest.mark.parametrize("framework", ["transformers", "lightning", "accelerate"])
def test_killed_at_ten_random_points_it_counts_every_release(tmp_path, framework):
    """SIGKILL: what was written down as released is a lower bound of what was."""
    done = subprocess.run(  # noqa: PLW1510 - checked below, with what it printed
        [sys.executable, SCRIPT, framework, tmp_path, str(KILLS)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split() for line in (tmp_path / "counted").read_text().splitlines()]
    counted = [(int(ledger), int(released)) for ledger, released in rows]
    assert len(counted) == KILLS + 1
    assert counted[0] == (0, 0)
    for life, (ledger, released) in enumerate(counted):
        # Each crash may add one step that was entered but not released, and no more.
        assert released <= ledger <= released + life
    assert counted[-1][1] >= 4 * KILLS
