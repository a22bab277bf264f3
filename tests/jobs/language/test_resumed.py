"""A run that is killed and resumed goes on as if nothing had happened."""

from __future__ import annotations

import asyncio
import math
import pathlib
import signal
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from rlinf_async.backends.toy.engine import ToyEngine
from rlinf_async.messages.language import Generated, Outcome, Request, Sample, ScoredSample
from rlinf_async.observe.metrics import read_columns
from rlinf_async.observe.samples import read_samples
from rlinf_async.runtime.jobs.checkpoints import Checkpointer
from rlinf_async.runtime.jobs.language.evaluation import evaluate
from rlinf_async.runtime.jobs.language.run import Flow, LanguageRun
from rlinf_async.runtime.jobs.language.samples import (
    InFlight,
    Ledger,
    Unfinished,
    in_flight,
    load_language_progress,
    load_unfinished,
)
from rlinf_async.workers.reward import RewardWorker
from tests.jobs.language.kit import LOSSES, TINY, Job


class Killed(BaseException):
    """What takes the place of SIGKILL inside this process."""


def die_after(monkeypatch: pytest.MonkeyPatch, iteration: int) -> None:
    """End the run in the middle of its work after this iteration, before its checkpoint.

    Checkpoints that were begun before are complete.
    """
    begin = Checkpointer.begin

    async def beginning(checkpointer: Checkpointer, *of_run: Any) -> None:
        await begin(checkpointer, *of_run)
        await checkpointer.finish()

    monkeypatch.setattr(Checkpointer, "begin", beginning)
    trained = Ledger.trained

    def dying(ledger: Ledger, done: int) -> None:
        if done == iteration:
            raise Killed
        trained(ledger, done)

    monkeypatch.setattr(Ledger, "trained", dying)


def whole_and_killed(
    folder: pathlib.Path, capsys: pytest.CaptureFixture[str], die_in: int, *settings: object
) -> tuple[Job, Job]:
    """The same run twice: to its end, and killed in an iteration."""
    runs = []
    for name in ("whole", "killed"):
        (folder / name).mkdir()
        runs.append(Job(folder / name, capsys, TINY))
    whole, killed = runs
    whole.succeed(*settings)
    with pytest.MonkeyPatch.context() as patch:
        die_after(patch, die_in)
        with pytest.raises(Killed):
            killed.train(*settings)
    return whole, killed


@pytest.mark.parametrize("die_in", [2, 3])
def test_losses_of_a_resumed_run_are_those_of_one_that_was_not_killed(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], die_in: int
) -> None:
    settings = (
        *("--training.iterations", 5, "--actor.pipelined", "false"),
        *("--data.verifier", "tests.jobs.language.verifiers:letters"),
    )
    whole, killed = whole_and_killed(tmp_path, capsys, die_in, *settings)
    progress = load_language_progress(killed.out / "checkpoints")
    assert progress is not None
    assert progress.version == 2
    killed.succeed(*settings, "--resume")
    assert [row["iteration"] for row in killed.iterations] == ["0", "1", "2", "3", "4"]
    for before, after in zip(whole.iterations, killed.iterations, strict=True):
        for name in LOSSES:
            assert float(after[name]) == pytest.approx(float(before[name]), abs=1e-6), name
    assert killed.summary.eval_accuracy == whole.summary.eval_accuracy


def test_sigterm_while_the_last_checkpoint_is_written_does_not_cost_it(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = Checkpointer.finish

    async def terminated(checkpointer: Checkpointer) -> None:
        signal.raise_signal(signal.SIGTERM)
        for _ in range(5):  # turns of the loop in which it would be cancelled
            await asyncio.sleep(0)
        await finish(checkpointer)

    monkeypatch.setattr(Checkpointer, "finish", terminated)
    ended = job.train("--training.iterations", 3, "--training.checkpoint_every", 0)
    assert ended.code == 143
    progress = load_language_progress(job.out / "checkpoints")
    assert progress is not None
    assert progress.version == 3


def test_sigterm_in_an_evaluation_saves_what_was_trained_before_it(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def terminated(*arguments: Any, version: int, **others: Any) -> Any:
        if version == 2:
            signal.raise_signal(signal.SIGTERM)
            await asyncio.Event().wait()
        return await evaluate(*arguments, version=version, **others)

    monkeypatch.setattr("rlinf_async.runtime.jobs.language.run.evaluate", terminated)
    never = ("--training.checkpoint_every", 0, "--cluster.grace_seconds", 600)
    ended = job.train("--training.iterations", 4, "--evaluation.every", 1, *never)
    assert ended.code == 143
    progress = load_language_progress(job.out / "checkpoints")
    assert progress is not None
    assert progress.version == 3  # trained beside
    assert [row["iteration"] for row in job.iterations] == ["0", "1", "2"]
    assert evaluated(job) == [0, 1]


def evaluated(job: Job) -> list[float]:
    """The versions that were evaluated, in the order of their rows."""
    columns = read_columns(job.out / "metrics.csv")
    assert columns["step"] == sorted(set(columns["step"]))
    return [one for one in columns["eval_version"] if not math.isnan(one)]


@pytest.mark.parametrize("group", [1, 2])
def test_an_evaluation_that_was_under_way_is_made_again(
    job: Job, monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    """The run dies in iteration 4, beside which version 4, that of its checkpoint, is evaluated; an
    iteration may have a single sample."""
    settings = (
        *("--evaluation.every", 2, "--training.iterations", 8, "--training.group_size", group),
        *("--data.verifier", "tests.jobs.language.verifiers:letters"),
        *("--training.prompts", 4 if group > 1 else 1),
    )
    with pytest.MonkeyPatch.context() as patch:
        die_after(patch, 4)
        with pytest.raises(Killed):
            job.train(*settings)
    found = load_language_progress(job.out / "checkpoints")
    assert found is not None
    assert found.version == 4
    assert job.train("--resume", *settings).code == 0
    assert evaluated(job) == [0, 2, 4, 6, 8]
    kept = [(one["iteration"], one["name"]) for one in read_samples(job.out, kind="evaluation")]
    assert len(kept) == len(set(kept))


def test_samples_that_were_under_way_are_kept_and_trained_once(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("--training.max_staleness", 2, "--training.iterations", 8)
    with pytest.MonkeyPatch.context() as patch:
        die_after(patch, 5)
        with pytest.raises(Killed):
            job.train(*settings)
    checkpoints = job.out / "checkpoints"
    progress = load_language_progress(checkpoints)
    assert progress is not None
    unfinished = load_unfinished(checkpoints, progress)
    kept_state = unfinished.ledger
    scored = {one.sample.request.name for one in unfinished.waiting.scored}
    kept = [one.sample.request for one in kept_state.finished] + kept_state.running
    assert {one.iteration for one in kept} <= {4, 5, 6}  # three iterations may be under way
    assert 5 in {one.iteration for one in kept}
    taken: list[ScoredSample] = []
    asked: list[Request] = []
    take, main = Ledger.take, LanguageRun.main

    def noted(ledger: Ledger, scored: ScoredSample) -> list[ScoredSample] | None:
        taken.append(scored)
        return take(ledger, scored)

    async def starting(run: LanguageRun, *of_run: Any) -> None:
        asked.extend(run._ledger.running)
        await main(run, *of_run)

    monkeypatch.setattr(Ledger, "take", noted)
    monkeypatch.setattr(LanguageRun, "main", starting)
    summary = job.succeed(*settings, "--resume")
    unscored = [one.name for one in kept_state.running if one.name not in scored]
    assert [one.name for one in asked] == unscored
    kept_done = {one.sample.request.name for one in kept_state.finished}
    assert not kept_done & {one.sample.request.name for one in taken}
    assert summary.samples == 8 * 8
    assert summary.dropped == {"second samples": 0}


LONG = (
    *("--training.max_staleness", 2, "--training.iterations", 8, "--evaluation.samples", 0),
    *(
        "--rollout.sampling.max_tokens",
        64,
        "--rollout.toy.mean_tokens",
        60,
        "--rollout.toy.tail",
        1,
    ),
    *("--rollout.toy.slots", 5),
)
"""Long answers, of which only a few are made at a time."""
UNSCORED = (
    *("--training.max_staleness", 2, "--training.iterations", 8, "--evaluation.samples", 0),
    *("--data.verifier", "tests.jobs.language.verifiers:slow", "--reward.processes", 1),
)
"""Answers that come faster than they are scored."""


def keep_once(patch: pytest.MonkeyPatch, there: Callable[[InFlight], object]) -> None:
    """Write the checkpoint of version 4 once this is there, and score nothing until it is written:
    which of the engine, the scoring and the training is fastest differs between machines."""
    checkpoint, score = LanguageRun._checkpoint, RewardWorker.score
    scoring = asyncio.Event()
    scoring.set()

    async def checkpointing(run: LanguageRun, flow: Flow) -> None:
        if run.progress.version == 4:
            scoring.clear()
            begun = await flow.roles.partial_requests()
            while not there(in_flight(flow.channels, begun, run._ledger.running)):
                await asyncio.sleep(0)
                begun = await flow.roles.partial_requests()

            async def seen() -> list[Request]:
                return begun  # and not what has become of it since

            patch.setattr(flow.roles, "partial_requests", seen)
        await checkpoint(run, flow)
        scoring.set()

    async def scored(worker: RewardWorker, sample: Sample) -> Outcome:
        await scoring.wait()
        return await score(worker, sample)

    patch.setattr(LanguageRun, "_checkpoint", checkpointing)
    patch.setattr(RewardWorker, "score", scored)


def killed(
    job: Job, settings: tuple[object, ...], there: Callable[[InFlight], object]
) -> Unfinished:
    """What the checkpoint of a run that was killed holds: this is there when it is written."""
    with pytest.MonkeyPatch.context() as patch:
        keep_once(patch, there)
        die_after(patch, 5)
        with pytest.raises(Killed):
            job.train(*settings)
    progress = load_language_progress(job.out / "checkpoints")
    assert progress is not None
    return load_unfinished(job.out / "checkpoints", progress)


class Asked:
    """What the engine of a run is asked for, and what came of it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, Generated] = {}
        generate = ToyEngine.generate

        async def noted(engine: ToyEngine, request: Request) -> Generated:
            self.requests[request.name] = request
            self.answers[request.name] = await generate(engine, request)
            return self.answers[request.name]

        patch.setattr(ToyEngine, "generate", noted)


def test_a_response_that_was_half_made_is_gone_on_with_under_its_own_versions(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_state = killed(job, LONG, lambda found: found.partial)
    partial = {one.name: one.partial for one in kept_state.waiting.partial}
    assert partial
    assert set(partial) <= {one.name for one in kept_state.ledger.running}
    asked = Asked(monkeypatch)
    summary = job.succeed(*LONG, "--resume")
    assert summary.samples == 8 * 8
    for name, part in partial.items():
        assert part is not None
        made, got = len(part.token_ids), asked.answers[name]
        assert asked.requests[name].partial is not None
        assert made > 0
        assert got.version[:made].tolist() == part.version.tolist()
        assert got.log_prob[:made].tolist() == part.log_prob.tolist()


def test_a_response_that_waited_for_its_score_is_not_made_again(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_state = killed(job, UNSCORED, lambda found: found.names)
    waited = kept_state.waiting.names
    assert waited
    assert waited <= {one.name for one in kept_state.ledger.running}
    asked = Asked(monkeypatch)
    summary = job.succeed(*UNSCORED, "--resume")
    assert waited.isdisjoint(asked.requests)
    assert summary.samples == 8 * 8
    assert summary.dropped == {"second samples": 0}


def test_a_response_that_waited_with_its_log_probs_keeps_them(
    tiny: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (*UNSCORED, "--cluster.inference_workers", 1)
    kept_state = killed(tiny, settings, lambda found: found.inferred)
    kept = {one.request.name: one for one in kept_state.waiting.inferred}
    assert kept
    taken: dict[str, ScoredSample] = {}
    take = Ledger.take

    def noted(ledger: Ledger, scored: ScoredSample) -> list[ScoredSample] | None:
        taken[scored.sample.request.name] = scored
        return take(ledger, scored)

    monkeypatch.setattr(Ledger, "take", noted)
    assert tiny.succeed(*settings, "--resume").samples == 8 * 8
    for name, sample in kept.items():
        found = taken[name].sample
        assert found.prev_log_prob is not None
        assert sample.prev_log_prob is not None
        assert found.prev_log_prob.tolist() == sample.prev_log_prob.tolist()


@pytest.mark.parametrize("damage", ["missing", "cut", "other"])
def test_a_damaged_checkpoint_is_named_and_nothing_is_lost(job: Job, damage: str) -> None:
    job.succeed()
    path = job.out / "checkpoints" / job.checkpoints[-1] / "run.msgpack"
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        path.write_bytes(msgspec.msgpack.encode({"data": b"\x01", "buffers": []}))
    ended = job.train("--resume", "--training.iterations", 6)
    assert ended.code == 2
    assert "run.msgpack" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("setting", "message"),
    [("group_size", "group_size (2 in the run"), ("prompts", "prompts (4 in the run")],
)
def test_samples_under_way_are_not_mixed_with_groups_or_iterations_of_another_size(
    job: Job, setting: str, message: str
) -> None:
    ahead = ("--training.max_staleness", 2, "--training.iterations", 8)
    with pytest.MonkeyPatch.context() as patch:
        die_after(patch, 5)
        with pytest.raises(Killed):
            job.train(*ahead)
    ended = job.train(*ahead, "--resume", f"--training.{setting}", 8)
    assert ended.code == 2
    assert f"training.{message}, 8 now)" in ended.err
    assert "Traceback" not in ended.err
    assert job.succeed(*ahead, "--resume").samples == 64
