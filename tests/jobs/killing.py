"""Kills workers of runs of this process at moments that the run itself names."""

from __future__ import annotations

import os
import pathlib
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rlinf_async.channels import Channel
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.jobs.config import HostConfig
from tests.jobs.processes import children


class Killer:
    """Kills workers as soon as a certain iteration is over, which a subclass passes to `_kill`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.victims: dict[int, str] = {}
        """iteration -> worker"""
        self.clusters: list[Cluster] = []
        make = HostConfig.make_cluster

        def making(host: HostConfig, log: pathlib.Path | None = None) -> Cluster:
            self.clusters.append(make(host, log))
            return self.clusters[-1]

        monkeypatch.setattr(HostConfig, "make_cluster", making)

    def _kill(self, name: str | None) -> None:
        if name is not None:
            pid = self.clusters[-1].pid(name)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)

    @property
    def dead_letters(self) -> list[Any]:
        channels = self.clusters[-1].channels.values()
        return [
            letter for one in channels if isinstance(one, Channel) for letter in one.dead_letters
        ]


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Fails if the runs inside leave a process or a socket."""
    before = children()
    with (
        tempfile.TemporaryDirectory(prefix="ra-", dir="/tmp") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(tempfile, "tempdir", folder)
        yield
        assert list(pathlib.Path(folder).glob("rlinf-async-*")) == []
    assert children() <= before
