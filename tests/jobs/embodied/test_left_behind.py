"""The trace is there however a run ends, and nobody waits long for it."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

import pytest

from rlinf_async.backends.fsdp.embodied import EmbodiedTrainer
from rlinf_async.observe.files import RunFolderError
from rlinf_async.observe.trace import Span
from rlinf_async.runtime.jobs import view
from rlinf_async.runtime.jobs.embodied import playing
from rlinf_async.runtime.local import LocalWorker
from tests.jobs.embodied.kit import Job


def interrupt(*args: object, **options: object) -> Any:
    raise KeyboardInterrupt


def explode(*args: object) -> Any:
    raise ArithmeticError("no")


@pytest.mark.parametrize("failing", [True, False])
def test_a_run_that_failed_leaves_trace_and_timeline(
    job: Job, monkeypatch: pytest.MonkeyPatch, failing: bool
) -> None:
    train = EmbodiedTrainer.train

    def third(trainer: EmbodiedTrainer, batch: Any) -> Any:
        return train(trainer, batch) if trainer.version < 2 else explode()

    if failing:
        monkeypatch.setattr(EmbodiedTrainer, "train", third)
    ended = job.train()
    assert ended.code == (1 if failing else 0)
    trained = [0, 1, 2] if failing else [*range(6)]
    assert job.trained_in_trace() == trained
    assert (job.out / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_an_interrupted_run_leaves_them_too(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlinf_async.runtime.jobs.embodied.run.write_evaluation", interrupt)
    assert job.train().code == 130
    assert job.summary.outcome == "stopped"
    assert job.trained_in_trace() == [*range(6)]
    for name in ("timeline.png", "learning_curve.png"):
        assert (job.out / name).exists()


def test_a_trace_that_cannot_be_written_is_said_and_costs_nothing_else(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **options: object) -> None:
        raise RunFolderError("cannot write trace.json: No space left on device")

    monkeypatch.setattr(view, "write_perfetto", full)
    ended = job.train()
    assert ended.code == 0
    assert "the trace was not written: cannot write trace.json" in ended.err
    assert job.summary.outcome == "finished"


def test_a_worker_that_keeps_its_spans_holds_up_nobody(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = LocalWorker.spans

    async def silent(worker: LocalWorker) -> list[Span]:
        if worker._host.info.group == "Env":
            await asyncio.Event().wait()
        return await spans(worker)

    monkeypatch.setattr(LocalWorker, "spans", silent)
    monkeypatch.setattr(view, "SPANS_LIMIT", 0.05)
    monkeypatch.setattr(view, "SPANS_EVERY", 0.05)
    job.succeed()
    assert job.trained_in_trace() == [*range(6)]


def test_spans_that_had_to_go_are_counted_in_the_trace(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view, "SPANS_KEPT", 10)
    job.succeed()
    trace = gzip.decompress((job.out / "trace.json.gz").read_bytes())
    assert b"spans left out of Actor[0]" in trace


def test_metrics_can_do_without_tensorboard(job: Job) -> None:
    job.succeed("--training.metrics", "[]", "--training.total_steps", 64)
    assert not any((job.out / "tensorboard").glob("*"))
    assert len(job.iterations) == 1


def test_an_interrupted_video_costs_the_video_and_nothing_else(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(playing, "record_video", interrupt)
    ended = job.train("--evaluation.video_episodes", 1)
    assert ended.code == 130
    assert job.summary.outcome == "finished"
    assert job.summary.extra == {"video": "not made: interrupted"}
    assert job.trained_in_trace() == [*range(6)]
    for name in ("timeline.png", "learning_curve.png"):
        assert (job.out / name).read_bytes().startswith(b"\x89PNG")


def test_a_video_that_cannot_be_made_costs_the_video_and_nothing_else(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no renderer")

    monkeypatch.setattr(playing, "record_video", broken)
    summary = job.succeed("--evaluation.video_episodes", 1)
    assert summary.outcome == "finished"
    assert summary.extra == {"video": "not made: RuntimeError: no renderer"}
    assert (job.out / "learning_curve.png").exists()
