"""The scheduler is a guest: who trains and who generates does not know it."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from tests.architecture.sources import ROOT, Import, imports
from tests.jobs.language.kit import TOY, Job
from tests.jobs.language.test_scheduled import SCHEDULED

SCHEDULER = "rlinf_async.workers.scheduler"
RUN = f"""
import sys
from rlinf_async.cli import main
rc = main(["train", sys.argv[1]])
loaded = sorted(name for name in sys.modules if name.startswith({SCHEDULER!r}))
print("trained" if rc == 0 else "failed")
sys.exit(f"loaded: {{loaded}}" if loaded else 0)
"""


def _of(one: Import) -> bool:
    return one.where.startswith(("rlinf_async.workers.actor", "rlinf_async.workers.rollout"))


def test_actors_and_rollout_workers_import_nothing_of_the_scheduler() -> None:
    here = [one for one in imports() if _of(one)]
    assert len(here) > 50
    assert not [one for one in here if one.what.startswith(SCHEDULER)]


@pytest.mark.parametrize("text", [TOY, SCHEDULED], ids=["without", "with"])
def test_a_run_loads_the_scheduler_only_where_it_has_one(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    job = Job(tmp_path, capsys, text.replace('"process"', '"local"'))
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(job.file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    scheduled = "[scheduler]" in text  # what comes of such a run is held elsewhere
    assert scheduled or "trained" in done.stdout, done.stderr
    assert ("loaded: " in done.stderr) == scheduled, done.stderr
