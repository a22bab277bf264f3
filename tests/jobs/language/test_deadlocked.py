"""A run in which nobody can go on ends with a report of who waits for whom."""

from __future__ import annotations

import pytest

from rlinf_async.messages.language import Request, ScoredSample
from rlinf_async.runtime import deadlock
from rlinf_async.runtime.jobs.language.samples import Collector, Ledger
from tests.jobs.language.kit import Job

LIMITED = ("--cluster.deadlock_after", 0.2)


@pytest.fixture(autouse=True)
def short_period(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look every 50 ms."""
    monkeypatch.setattr(deadlock, "PERIOD", 0.05)


PIPELINED = ("--actor.pipelined", "true")
COLLECTED = ("--actor.pipelined", "false")
COLLOCATED = ("--cluster.placement", "collocated")


@pytest.mark.parametrize("backend", ["local", "process"])
@pytest.mark.parametrize(
    ("options", "waits"),
    [
        (PIPELINED, "Actor[0].run_training_pipeline has waited"),
        (COLLECTED, "Actor[0].run_training has waited"),
        (COLLOCATED, "main has waited"),
    ],
    ids=["pipelined", "collected", "collocated"],
)
def test_a_sample_that_the_ledger_loses_ends_the_run_with_a_deadlock(
    job: Job, monkeypatch: pytest.MonkeyPatch, backend: str, options: tuple[str, str], waits: str
) -> None:
    take, taken = Ledger.take, list[ScoredSample]()

    def losing(ledger: Ledger, scored: ScoredSample) -> list[ScoredSample] | None:
        taken.append(scored)
        return None if len(taken) == 3 else take(ledger, scored)

    monkeypatch.setattr(Ledger, "take", losing)
    ended = job.train(*LIMITED, *options, "--cluster.backend", backend)
    assert ended.code == 1
    assert len(taken) >= 3
    assert str(job.summary.error).startswith("Deadlock: every worker waits for another")
    assert waits in str(job.summary.error)


@pytest.mark.parametrize("options", [(), COLLOCATED], ids=["beside", "collocated"])
@pytest.mark.parametrize("version", [0, 1])
def test_an_answer_of_an_evaluation_that_is_lost_ends_the_run_with_a_deadlock(
    job: Job, monkeypatch: pytest.MonkeyPatch, version: int, options: tuple[str, ...]
) -> None:
    answer = Collector._answer

    def losing(collector: Collector, request: Request, scored: ScoredSample) -> None:
        if request.iteration != version:
            answer(collector, request, scored)

    monkeypatch.setattr(Collector, "_answer", losing)
    ended = job.train(*LIMITED, *options, "--evaluation.every", 1)
    assert ended.code == 1
    assert str(job.summary.error).startswith("Deadlock: every worker waits for another")
