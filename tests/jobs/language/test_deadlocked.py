"""A run in which nobody can go on ends with a report of who waits for whom."""

from __future__ import annotations

import pytest

from rlinf_async.messages.language import ScoredSample
from rlinf_async.runtime import deadlock
from rlinf_async.runtime.jobs.language.samples import Collector, Ledger
from tests.jobs.language.kit import Job

LIMITED = ("--cluster.deadlock_after", 0.2)


@pytest.fixture(autouse=True)
def short_period(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look every 50 ms."""
    monkeypatch.setattr(deadlock, "PERIOD", 0.05)


@pytest.mark.parametrize("backend", ["local", "process"])
@pytest.mark.parametrize("pipelined", ["true", "false"])
def test_a_sample_that_the_ledger_loses_ends_the_run_with_a_deadlock(
    job: Job, monkeypatch: pytest.MonkeyPatch, pipelined: str, backend: str
) -> None:
    take, taken = Ledger.take, list[ScoredSample]()

    def losing(ledger: Ledger, scored: ScoredSample) -> list[ScoredSample] | None:
        taken.append(scored)
        return None if len(taken) == 3 else take(ledger, scored)

    monkeypatch.setattr(Ledger, "take", losing)
    ended = job.train(*LIMITED, "--actor.pipelined", pipelined, "--cluster.backend", backend)
    assert ended.code == 1
    assert len(taken) >= 3
    assert str(job.summary.error).startswith("Deadlock: every worker waits for another")
    method = "run_training_pipeline" if pipelined == "true" else "run_training"
    assert f"Actor[0].{method} has waited" in str(job.summary.error)


def test_an_answer_of_an_evaluation_that_is_lost_ends_the_run_with_a_deadlock(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Collector, "_answer", lambda *_: None)
    ended = job.train(*LIMITED)
    assert ended.code == 1
    assert str(job.summary.error).startswith("Deadlock: every worker waits for another")
