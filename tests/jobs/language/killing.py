"""Kills workers of runs of this process at moments that the run itself names."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from rlinf_async.channels import Channel
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.jobs.language.ledger import Ledger
from rlinf_async.runtime.jobs.language.run import LanguageRun


class Killer:
    """Kills workers as soon as a certain iteration is trained."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.victims: dict[int, str] = {}
        """iteration -> worker"""
        self.clusters: list[Cluster] = []
        make: Callable[[LanguageRun], Cluster] = LanguageRun._cluster
        trained = Ledger.trained

        def making(run: LanguageRun) -> Cluster:
            self.clusters.append(make(run))
            return self.clusters[-1]

        def noted(ledger: Ledger, iteration: int) -> None:
            trained(ledger, iteration)
            self._kill(self.victims.pop(iteration, None))

        monkeypatch.setattr(LanguageRun, "_cluster", making)
        monkeypatch.setattr(Ledger, "trained", noted)

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
