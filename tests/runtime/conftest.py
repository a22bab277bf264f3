"""Runs one test body on both backends, and sees that a cluster of processes leaves nothing."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

import pytest

import rlinf_async as ra
from rlinf_async.channels.wire.slab import was_written
from rlinf_async.runtime.forked import close_servers
from rlinf_async.workers import Device
from tests.loops import FACTORIES, VIRTUAL
from tests.runtime.kit import NewCluster, left_behind, open_files

DEVICES = tuple(Device("cpu", core) for core in (0, 0, 0, 0))
"""Four devices wherever the tests run: all of them are its first core."""

LOCAL = [("local", loop) for loop in (*FACTORIES, VIRTUAL)]
PROCESS = [("process", "uvloop")]


@pytest.fixture(params=LOCAL + PROCESS, ids="-".join)
def setting(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A backend and a kind of loop, by name."""
    chosen: tuple[str, str] = request.param
    return chosen


@pytest.fixture
def loop_kind(setting: tuple[str, str]) -> str:
    """The kind of loop that the test runs on."""
    return setting[1]


@pytest.fixture
def new_cluster(setting: tuple[str, str], loop_kind: str) -> Iterator[NewCluster]:
    """Makes clusters of the setting's backend; afterwards nothing of theirs may be left.

    It takes ``loop_kind`` so that a test that does not still runs on that loop.
    """
    if setting[0] == "local":
        yield ra.Cluster.local
        return
    with own_temporary_folder(), nothing_left_behind():
        yield ra.Cluster.process


@contextmanager
def own_temporary_folder() -> Iterator[None]:
    """Others on this machine make folders too. Short, because it holds a socket."""
    with tempfile.TemporaryDirectory(prefix="t") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", folder)
        yield


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Fails if a process, a file, or an open file of ours stays."""
    resource_tracker.ensure_running()  # multiprocessing's own process, which stays
    FACTORIES["uvloop"]().close()  # opens pipes for signals, which stay
    was_written(0, 4096)  # opens the one file by which a process learns of its own pages
    files, before = open_files(), left_behind()
    yield
    close_servers()  # they would stay for the next cluster
    gc.collect()
    assert left_behind() - before == set()
    given_up = time.monotonic() + 10.0
    while open_files() > files and time.monotonic() < given_up:
        time.sleep(0.01)  # a thread that was given work may be about to close one
        gc.collect()
    assert open_files() <= files


@pytest.fixture(autouse=True)
def four_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with four devices."""
    for backend in ("local", "process"):
        monkeypatch.setattr(f"rlinf_async.runtime.{backend}.host_devices", lambda: DEVICES)
