"""Drivers in processes of their own, and runs that must not get as far as a cluster."""

from __future__ import annotations

import os
import pathlib
import tempfile
from collections.abc import Iterator

import pytest

from rlinf_async.runtime.cluster import Cluster
from tests.jobs.processes import Driver, Start
from tests.preloaded import Preloaded, preloaded


@pytest.fixture
def temporary() -> Iterator[pathlib.Path]:
    """Where runs put their sockets: a short path."""
    with tempfile.TemporaryDirectory(prefix="ra-", dir="/tmp") as folder:
        path = pathlib.Path(folder) / "tmp"
        path.mkdir()
        yield path


@pytest.fixture(scope="session")
def driver_python() -> Iterator[Preloaded]:
    """What a driver imports. Those of tests/examples import it themselves."""
    modules = ("rlinf_async.cli.train", "rlinf_async.runtime.jobs.language.job")
    with preloaded(*modules, "transformers.models.qwen3.modeling_qwen3") as python:
        yield python


@pytest.fixture
def start_driver(temporary: pathlib.Path, driver_python: Preloaded) -> Iterator[Start]:
    """Starts ``rlinf-async`` with these arguments; nothing of it survives the test."""
    started: list[Driver] = []

    def starting(*arguments: object) -> Driver:
        started.append(Driver(temporary, *arguments, python=driver_python))
        return started[-1]

    yield starting
    for driver in started:
        driver.end()


@pytest.fixture
def full_disk() -> Iterator[pathlib.Path]:
    """A disk of 64 KiB."""
    with tempfile.TemporaryDirectory() as folder:
        command = f"mount -t tmpfs -o size=64k tmpfs {folder} 2>/dev/null"
        if os.geteuid() != 0 or os.system(command) != 0:
            pytest.skip("a small disk needs the right to mount one")
        try:
            yield pathlib.Path(folder)
        finally:
            os.system(f"umount {folder}")


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that takes this must not get as far as a cluster."""

    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("a cluster was made")

    monkeypatch.setattr(Cluster, "__init__", refuse)
