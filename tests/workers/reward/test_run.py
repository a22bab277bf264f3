"""Every sample comes out with its outcome: first done, first out, and none is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

import rlinf_async as ra
from rlinf_async.channels.queue import statistics_of
from rlinf_async.messages.language import Failed, Outcome, Rejected, Sample, Scored
from rlinf_async.rewards import Answer
from rlinf_async.rewards.judging import Attempt
from rlinf_async.rewards.scorer import OpenCall, Scorer
from rlinf_async.testing import explore, nothing_left_waiting, wait_all_blocked
from rlinf_async.workers.reward import RewardConfig, RewardWorker
from tests.jobs.processes import processes, until
from tests.workers.reward.kit import Channels, custom, sample


@pytest.fixture
def only_hanging_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not hang may still be slow, on a busy machine."""
    judge = Scorer.judge

    async def patient(
        scorer: Scorer, call: OpenCall, answers: Sequence[Answer], limit: float
    ) -> Attempt:
        hangs = call.verifier.endswith(":hangs")
        return await judge(scorer, call, answers, limit if hangs else 60.0)

    monkeypatch.setattr(Scorer, "judge", patient)


@pytest.mark.usefixtures("only_hanging_is_limited")
async def test_every_sample_comes_out_once_with_its_outcome() -> None:
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        rewards = await cluster.launch(RewardWorker, RewardConfig(time_limit=0.3))
        running = channels.start(rewards)
        names = ["length", "refuses", "raises", "returns_text", "hangs", "killed", "asynchronous"]
        await channels.put(sample(0), sample(1, text="5"), sample(2, "numeric", reference="four"))
        await channels.put(*(custom(3 + at, name) for at, name in enumerate(names)))
        await channels.put(sample(10, "exat"))
        channels.samples.close()
        [report] = await running
        outcomes: dict[int, Outcome] = {}
        seconds: list[float] = []
        async for scored in channels.scored.receiver:
            assert scored.sample.request.group not in outcomes
            outcomes[scored.sample.request.group] = scored.outcome
            seconds.append(scored.seconds)
        assert sum(seconds) == pytest.approx(report.seconds)
        assert max(seconds) == report.longest
        assert set(outcomes) == set(range(11))
        assert outcomes[0] == Scored(reward=1.0)
        assert outcomes[1] == Scored(reward=0.0)
        assert outcomes[2] == Rejected(
            reason="the reference 'four' holds no number, or an unclear one"
        )
        assert outcomes[3] == Scored(reward=1.0)
        assert outcomes[4] == Rejected(reason="the question has no answer")
        errors = [str(outcomes[at]) for at in (5, 6, 7, 8, 10)]
        for said, error in zip(
            ["KeyError: 'score'", "'0.9' (a str)", "time limit of 0.3 s", "SIGKILL", "'exact'"],
            errors,
            strict=True,
        ):
            assert error.startswith("Failed("), error
            assert said in error
        assert outcomes[9] == Scored(reward=0.5, parts={"style": 1.0})
        assert (report.scored, report.rejected, report.failed) == (4, 2, 5)
        assert report.samples == 11
        assert 0.3 < report.longest <= report.seconds
        assert isinstance(report.last_failure, str)
        assert report.last_failure


class Slow(RewardWorker):
    """Its verifiers take until the test ends."""

    async def score(self, sample: Sample) -> Outcome:
        await asyncio.Event().wait()
        return Scored(reward=1.0)


async def test_a_worker_that_scores_is_reported_as_scoring_though_it_waits_for_samples_too() -> (
    None
):
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        rewards = await cluster.launch(Slow, RewardConfig(processes=1))
        running = channels.start(rewards)
        await channels.put(sample(0))
        await wait_all_blocked()
        assert [wait.channel for wait in cluster.waits()] == ["samples"]
        [supervisor] = cluster.groups["Slow"].supervisors
        handle = supervisor.live
        assert handle is not None
        assert await handle.doing() == ("score",)
        running.cancel()
        await running.finished(within=9)
        assert await handle.doing() == ()


def test_a_verifier_sees_prompt_response_reference_and_how_it_ended() -> None:
    assert Answer.of(sample(3, text="5", reference="7")) == Answer(
        prompt="2+2=", text="5", reference="7", finish="stop", tokens=3
    )


async def test_slow_samples_hold_up_neither_fast_nor_inline_ones(tmp_path: Path) -> None:
    released = tmp_path / "released"
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        rewards = await cluster.launch(RewardWorker, RewardConfig(processes=3, time_limit=60.0))
        running = channels.start(rewards)
        await channels.put(*(custom(at, "waits_for_file", released) for at in (0, 1)))
        await channels.put(*(custom(at, "length") for at in range(2, 8)))
        await channels.put(*(sample(at) for at in range(8, 20)))
        first = {(await channels.next()).sample.request.group for _ in range(18)}
        assert first == set(range(2, 20))
        await asyncio.to_thread(released.touch)
        assert {(await channels.next()).sample.request.group for _ in range(2)} == {0, 1}
        channels.samples.close()
        await running


async def test_a_cancelled_run_gives_its_samples_back_and_ends_its_processes(
    tmp_path: Path,
) -> None:
    said = tmp_path / "pid"
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        rewards = await cluster.launch(RewardWorker, RewardConfig(processes=1, time_limit=60.0))
        running = channels.start(rewards)
        await channels.put(custom(0, "says_pid_and_hangs", said), custom(1, "hangs"))
        await asyncio.to_thread(until, said.exists, "the verifier runs")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        pid = int(await asyncio.to_thread(said.read_text))
        assert not [one for one in processes() if one.pid == pid]
        seen = statistics_of(channels.samples.queue)
        assert (seen.depth, seen.leases_out) == (2, 0)


async def test_waiting_for_a_slow_verifier_is_no_deadlock(tmp_path: Path) -> None:
    said = tmp_path / "pid"
    async with ra.Cluster.local(deadlock_after=0.1) as cluster:
        channels = Channels(cluster)
        rewards = await cluster.launch(RewardWorker, RewardConfig(processes=1, time_limit=1.5))
        running = channels.start(rewards)
        await channels.put(custom(0, "says_pid_and_hangs", said))
        scored = await channels.next()
        assert isinstance(scored.outcome, Failed)
        assert said.exists()
        channels.samples.close()
        await running


async def test_a_wrong_verifier_to_preload_is_an_error_before_the_first_sample() -> None:
    with pytest.raises(ra.WorkerError, match="no verifier is called 'maths'; did you mean 'math'"):
        async with ra.Cluster.local() as cluster:
            await cluster.launch(RewardWorker, RewardConfig(preload=("exact", "maths")))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"processes": 0}, "processes is 0"),
        ({"time_limit": 0.0}, "time_limit is 0.0"),
        ({"time_limit": float("inf")}, "time_limit is inf"),
        ({"memory_limit_mib": -1}, "memory_limit_mib is -1"),
        ({"calls": 0}, "calls is 0"),
        ({"retries": -1}, "retries is -1"),
        ({"retries": 21}, "retries is 21"),
        ({"cache": -1}, "cache is -1"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(wrong: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RewardConfig(**wrong)  # type: ignore[arg-type]


class Elsewhere(RewardWorker):
    """Scores take virtual time: longer for a lower group."""

    async def score(self, sample: Sample) -> Outcome:
        await asyncio.sleep(1 + sample.request.group % 3)
        return Scored(reward=1.0) if sample.request.group % 2 else Failed(error="odd ones only")


def test_in_whatever_order_samples_are_done_each_comes_out_once() -> None:
    async def main() -> None:
        async with ra.Cluster.local() as cluster:
            channels = Channels(cluster, capacity=3)
            rewards = await cluster.launch(Elsewhere, RewardConfig(processes=2), count=2)
            running = channels.start(rewards)
            groups = []

            async def feed() -> None:
                with channels.samples.sender as sender:
                    for group in range(20):
                        await sender.put(sample(group))

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(feed())
                async for scored in channels.scored.receiver:
                    groups.append(scored.sample.request.group)
                    if len(groups) == 20:
                        break
            reports = await running
            assert sorted(groups) == list(range(20))
            assert sum(report.samples for report in reports) == 20
            assert sum(report.failed for report in reports) == 10
            nothing_left_waiting(channels.samples)

    explore(main, seeds=range(50))
