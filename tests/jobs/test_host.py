"""The settings of the host that every run has."""

from __future__ import annotations

import pytest

from rlinf_async.runtime.jobs.config import HostConfig
from rlinf_async.runtime.jobs.embodied.settings import EmbodiedClusterConfig


def test_threads_that_wait_leave_their_core_to_the_other_workers() -> None:
    assert HostConfig(threads=2).environment == {
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "passive",
    }


def test_one_thread_waits_for_no_other() -> None:
    assert HostConfig().environment == {"OMP_NUM_THREADS": "1"}


def test_simulators_have_large_pages_unless_the_user_has_settings_of_the_c_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    one = {"OMP_NUM_THREADS": "1"}
    large = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    assert EmbodiedClusterConfig().environment == one | large
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=1")
    assert EmbodiedClusterConfig().environment == one


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), 86401.0, 1e10, float("inf")])
def test_a_grace_time_that_no_thread_can_wait_for_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match=r"it must be above 0 and at most 86400 \(a day\)"):
        HostConfig(grace_seconds=seconds)
    assert HostConfig(grace_seconds=86400.0).grace_seconds == 86400.0
