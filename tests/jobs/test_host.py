"""The settings of the host that every run has."""

from __future__ import annotations

from rlinf_async.runtime.jobs.config import HostConfig


def test_threads_that_wait_leave_their_core_to_the_other_workers() -> None:
    assert HostConfig(threads=2).environment == {
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "passive",
    }


def test_one_thread_waits_for_no_other() -> None:
    assert HostConfig().environment == {"OMP_NUM_THREADS": "1"}
