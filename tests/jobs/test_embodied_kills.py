"""One short run with a kill and a hang; ``python -m tests.jobs.embodied_kills`` has many."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from tests.jobs.embodied_kills.__main__ import perform
from tests.jobs.embodied_kills.plan import plan


@pytest.mark.slow
def test_a_run_whose_driver_is_killed_and_whose_environment_hangs_counts_everything_once() -> None:
    made = plan(1, kills=1, hangs=1, short=True)
    folder = Path(tempfile.mkdtemp(prefix="ra-", dir="/tmp"))  # paths of sockets are short
    try:
        killed, did, wrong = perform(made, folder)
    finally:
        shutil.rmtree(folder)
    assert wrong == ""
    assert did is not None
    assert killed == list(made.kills)
    assert (did.iterations, did.doubled, did.lost) == (made.iterations, 0, 0)
    assert did.failed <= 1  # 0 where the driver was killed before it was in a checkpoint
