"""Many calls of asynchronous verifiers in one process, calls that are repeated, known answers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from pathlib import Path

import pytest

from rlinf_async.messages.language import Failed, JudgeUse, Outcome, Scored
from rlinf_async.rewards import Answer, Retry, repeating, scorer
from rlinf_async.rewards.judging import is_asynchronous, pause_before_retry
from rlinf_async.rewards.pool import ScoringPool
from rlinf_async.rewards.repeating import LONGEST_PAUSE, Judges, longest_pauses, pause
from rlinf_async.testing import wait_all_blocked
from tests.rewards import verifiers
from tests.rewards.test_pool import LIMIT, appears, error_of, judged, lives, pool


async def test_256_calls_are_open_in_one_process_at_a_time() -> None:
    async with pool() as made:
        outcomes = await asyncio.gather(*(judged(made, "meets", 256) for _ in range(256)))
        [pid] = made.pids()
        assert outcomes == [Scored(reward=pid)] * 256


async def test_no_more_calls_are_open_than_the_setting_says() -> None:
    made = ScoringPool(processes=1, time_limit=LIMIT, calls=3)
    async with made:
        await made.load(["tests.rewards.verifiers:counts_open"])
        assert "tests.rewards.verifiers:counts_open" in made.asynchronous
        outcomes = await asyncio.gather(*(judged(made, "counts_open") for _ in range(30)))
        assert max(one.reward for one in outcomes if isinstance(one, Scored)) <= 3
        assert (
            await asyncio.gather(*(judged(made, "meets", 3) for _ in range(6)))
            == [Scored(reward=made.pids()[0])] * 6
        )


async def test_calls_beside_others_fill_one_process_and_leave_the_other_for_those_alone() -> None:
    async with pool(size=2) as made:
        await made.load([f"tests.rewards.verifiers:{one}" for one in ("meets", "pid")])
        assert "tests.rewards.verifiers:pid" not in made.asynchronous
        meeting = [asyncio.create_task(judged(made, "meets", 10)) for _ in range(9)]
        alone = [await judged(made, "pid") for _ in range(5)]
        last = await judged(made, "meets", 10)
        assert await asyncio.gather(*meeting) == [last] * 9
        assert alone == [alone[0]] * 5
        assert alone[0] != last


async def test_functions_and_asynchronous_verifiers_share_a_process_in_turn() -> None:
    async with pool() as made:
        names = ["length_later", "length", "runs_a_loop"] * 10
        outcomes = await asyncio.gather(
            *(judged(made, name, text="x" * at) for at, name in enumerate(names))
        )
        assert outcomes == [Scored(reward=at) for at in range(30)]
        assert len(made.pids()) == 1


async def test_a_call_at_its_time_limit_is_cancelled_and_others_in_there_go_on(
    tmp_path: Path,
) -> None:
    async with pool() as made:
        names = ("meets", "says_when_it_is_cancelled")
        await made.load([f"tests.rewards.verifiers:{one}" for one in names])
        others = [asyncio.create_task(judged(made, "meets", 5)) for _ in range(4)]
        await wait_all_blocked()
        made._time_limit = 0.2
        said = tmp_path / "said"
        error = await error_of(made, "says_when_it_is_cancelled", said)
        assert "took longer than the time limit of 0.2 s, and was cancelled" in error
        await appears(tmp_path / "said.cancelled")
        made._time_limit = LIMIT
        last = await judged(made, "meets", 5)
        assert await asyncio.gather(*others) == [last] * 4


async def test_a_cancelled_call_ends_and_others_in_there_go_on(tmp_path: Path) -> None:
    async with pool() as made:
        names = ("meets", "says_when_it_is_cancelled")
        await made.load([f"tests.rewards.verifiers:{one}" for one in names])
        others = [asyncio.create_task(judged(made, "meets", 5)) for _ in range(4)]
        said = tmp_path / "said"
        judging = asyncio.create_task(judged(made, "says_when_it_is_cancelled", said))
        await appears(said)
        judging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await judging
        last = await judged(made, "meets", 5)
        assert await asyncio.gather(*others) == [last] * 4
        await appears(tmp_path / "said.cancelled")
        assert [one.calls for one in made._all] == [0]


async def test_who_blocks_the_others_is_killed_with_its_process_and_they_are_judged_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scorer, "CANCEL_SECONDS", 0.2)
    first, blocked = tmp_path / "first", tmp_path / "blocked"
    async with pool() as made:
        names = ("elsewhere", "blocks_once", "length_later")
        await made.load([f"tests.rewards.verifiers:{one}" for one in names])
        others = [
            asyncio.create_task(judged(made, "elsewhere", first, "x" * at)) for at in range(5)
        ]
        pid = int(await appears(first))
        made._time_limit = 0.2
        blocking = asyncio.create_task(judged(made, "blocks_once", blocked))
        await appears(blocked)
        made._time_limit = LIMIT
        late = asyncio.create_task(judged(made, "length_later"))
        assert await asyncio.gather(*others) == [Scored(reward=at) for at in range(5)]
        assert await blocking == Scored(reward=1.0)
        assert await late == Scored(reward=2.0)
        assert not lives(pid)


@pytest.mark.parametrize("name", ["blocks", "keeps_going"])
async def test_who_blocks_alone_or_does_not_end_has_failed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scorer, "CANCEL_SECONDS", 0.2)
    async with pool(time_limit=0.2) as made:
        error = await error_of(made, name, tmp_path / "said")
        assert "took longer than the time limit of 0.2 s, and its process was killed" in error


async def test_who_ends_its_process_fails_alone_whatever_else_is_open_in_there(
    tmp_path: Path,
) -> None:
    first = tmp_path / "first"
    async with pool() as made:
        names = ("elsewhere", "dies_beside")
        await made.load([f"tests.rewards.verifiers:{one}" for one in names])
        others = [
            asyncio.create_task(judged(made, "elsewhere", first, "x" * at)) for at in range(20)
        ]
        await appears(first)
        assert "3 processes ended before it had judged, the last: exit code 3" in await error_of(
            made, "dies_beside"
        )
        assert await asyncio.gather(*others) == [Scored(reward=at) for at in range(20)]


@pytest.mark.parametrize("seed", [1, 2])
async def test_whatever_dies_or_is_cancelled_when_every_call_has_one_outcome(seed: int) -> None:
    """Processes die at any moment, callers go, and one verifier kills: its calls alone may fail,
    and those that lost three processes to the test."""
    choice = random.Random(seed)
    async with pool(size=2) as made:
        await made.load(["tests.rewards.verifiers:length_later"])
        asked = {
            at: asyncio.create_task(judged(made, "length_later", text="x" * at))
            for at in range(300)
        }
        deadly = [asyncio.create_task(judged(made, "dies_beside")) for _ in range(2)]
        gone = choice.sample(sorted(asked), 20)
        for kills in range(4):
            await asyncio.wait(asked.values(), timeout=choice.random() * 0.05)
            for at in gone[kills * 5 : kills * 5 + 5]:
                asked[at].cancel()
            if pids := made.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(choice.choice(pids), signal.SIGKILL)
        outcomes: list[Outcome | BaseException] = await asyncio.gather(
            *asked.values(), return_exceptions=True
        )
        for at, outcome in enumerate(outcomes):
            if isinstance(outcome, Failed):
                assert "3 processes ended" in outcome.error
            elif isinstance(outcome, asyncio.CancelledError):
                assert at in gone
            else:
                assert outcome == Scored(reward=at)
        assert all(isinstance(one, Failed) for one in await asyncio.gather(*deadly))
        assert [one.calls for one in made._all if one.calls] == []


# ---- again, or not at all


@pytest.fixture
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeating, "FIRST_PAUSE", 0.0)


async def judge(judges: Judges, name: str, reference: object = "", text: str = "") -> Outcome:
    return await judge_counted(judges, JudgeUse(), name, reference, text)


async def judge_counted(
    judges: Judges, use: JudgeUse, name: str, reference: object = "", text: str = ""
) -> Outcome:
    answer = Answer(prompt="", text=text, reference=str(reference))
    return await judges.judge(f"tests.rewards.verifiers:{name}", answer, use)


@pytest.mark.usefixtures("without_pauses")
@pytest.mark.parametrize(("name", "cost"), [("busy", 0.25), ("connection_lost", 0.0)])
async def test_who_may_do_better_is_called_again_and_no_more_often_than_that(
    name: str, cost: float
) -> None:
    async with pool() as made:
        judges, use = Judges(made, retries=2, cache=0), JudgeUse()
        assert await judge_counted(judges, use, name, 2) == Scored(reward=3.0, cost=cost)
        assert use == JudgeUse(calls=3, retries=2)
    async with pool() as made:
        judges, use = Judges(made, retries=1, cache=0), JudgeUse()
        failed = await judge_counted(judges, use, name, 2)
        assert isinstance(failed, Failed)
        assert "and so did the last of 2 calls" in failed.error
        assert use == JudgeUse(calls=2, retries=1)
        use = JudgeUse()
        failed = await judge_counted(judges, use, "raises")
        assert isinstance(failed, Failed)
        assert use == JudgeUse(calls=1)


class OfALibrary(Exception):
    """A transport error as httpx names it."""


OfALibrary.__module__, OfALibrary.__name__ = "httpx._exceptions", "TransportError"


class ReadError(OfALibrary):
    pass


@pytest.mark.parametrize(
    ("error", "after"),
    [
        (Retry("busy", after=7), 7.0),
        (Retry(), 0.0),
        (ConnectionRefusedError(), 0.0),
        (TimeoutError(), 0.0),
        (ReadError(), 0.0),
        (OSError(), None),
        (ValueError("429"), None),
        (asyncio.CancelledError(), None),
    ],
)
def test_which_errors_may_pass(error: BaseException, after: float | None) -> None:
    assert pause_before_retry(error) == after


@pytest.mark.parametrize("after", [-1.0, float("nan"), float("inf")])
def test_a_pause_that_cannot_be_is_an_error(after: float) -> None:
    with pytest.raises(ValueError, match="it must be a number of seconds"):
        Retry(after=after)


def test_pauses_grow_are_never_shorter_than_the_verifier_asks_and_end() -> None:
    for retry in range(20):
        whole = min(2.0**retry, LONGEST_PAUSE)
        assert all(whole / 2 <= pause(retry, 0.0) <= whole for _ in range(50))
        assert pause(retry, 30.0) >= 30.0
        assert pause(retry, 1e9) == LONGEST_PAUSE
    assert len({pause(3, 0.0) for _ in range(50)}) > 25
    assert longest_pauses(2) == 2 * LONGEST_PAUSE


async def test_the_same_answer_is_judged_once_however_many_ask_at_a_time() -> None:
    async with pool() as made:
        judges = Judges(made, retries=0, cache=2)
        uses = [JudgeUse() for _ in range(20)]
        outcomes = await asyncio.gather(*(judge_counted(judges, use, "costly") for use in uses))
        assert [one for one in outcomes if one == Scored(reward=1.0, cost=0.25)] == outcomes[:1]
        assert outcomes[1:] == [Scored(reward=1.0)] * 19
        assert sum(use.calls for use in uses) == 1
        assert sum(use.cache_hits for use in uses) == 19


async def test_the_answers_that_were_asked_for_last_are_remembered() -> None:
    async with pool() as made:
        judges = Judges(made, retries=0, cache=2)
        texts = ["a", "b", "a", "c", "a", "b"]
        outcomes = [await judge(judges, "costly", text=text) for text in texts]
        rewards = [one.reward for one in outcomes if isinstance(one, Scored)]
        assert rewards == [1.0, 2.0, 1.0, 3.0, 1.0, 4.0]
        assert len(judges._known) == 2


async def test_a_failure_is_not_remembered_and_who_waited_for_it_asks_itself() -> None:
    async with pool() as made:
        judges = Judges(made, retries=0, cache=10)
        uses = [JudgeUse() for _ in range(3)]
        outcomes = await asyncio.gather(*(judge_counted(judges, use, "busy", 2) for use in uses))
        assert [type(one) for one in outcomes] == [Failed, Failed, Scored]
        assert [use.calls for use in uses] == [1, 1, 1]
        assert await judge(judges, "busy", 2) == Scored(reward=3.0)


async def test_a_cancelled_call_leaves_nobody_who_waits_for_the_same_answer(
    tmp_path: Path,
) -> None:
    said = tmp_path / "said"
    async with pool() as made:
        judges = Judges(made, retries=0, cache=10)
        first = asyncio.create_task(judge(judges, "says_pid_and_hangs_once", said))
        second = asyncio.create_task(judge(judges, "says_pid_and_hangs_once", said))
        await appears(said)
        first.cancel()
        assert await second == Scored(reward=1.0)
        assert judges._judging == {}


async def test_a_cost_below_0_is_no_outcome() -> None:
    async with pool() as made:
        assert "Scored with cost = -1.0, below 0" in await error_of(made, "returns_a_cost_below_0")


def test_which_verifiers_are_asynchronous() -> None:
    class Judge:
        async def __call__(self, answer: Answer) -> float:
            return 1.0

    assert is_asynchronous(verifiers.meets)
    assert is_asynchronous(Judge())
    assert not is_asynchronous(verifiers.length)
