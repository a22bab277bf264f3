"""Kills workers of language runs of this process."""

from __future__ import annotations

import pytest

from rlinf_async.runtime.jobs.language.samples import Ledger
from tests.jobs import killing


class Killer(killing.Killer):
    """Kills workers as soon as a certain iteration is trained."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        trained = Ledger.trained

        def noted(ledger: Ledger, iteration: int) -> None:
            trained(ledger, iteration)
            self._kill(self.victims.pop(iteration, None))

        monkeypatch.setattr(Ledger, "trained", noted)
