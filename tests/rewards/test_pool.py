"""Answers that are judged in processes: limits, deaths, and what is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rlinf_async.config import ConfigError
from rlinf_async.messages.language import Failed, Outcome, Rejected, Scored
from rlinf_async.rewards import Answer, register_verifier
from rlinf_async.rewards.judging import verifiers
from rlinf_async.rewards.pool import ScoringPool
from rlinf_async.rewards.scorer import OpenCall, Scorer
from rlinf_async.testing import wait_all_blocked
from tests.jobs.processes import processes, until
from tests.rewards.verifiers import length

LIMIT = 60.0
"""seconds: in tests in which nothing should reach it"""


@asynccontextmanager
async def pool(
    size: int = 1, time_limit: float = LIMIT, memory_limit_mib: int = 0
) -> AsyncIterator[ScoringPool]:
    made = ScoringPool(processes=size, time_limit=time_limit, memory_limit_mib=memory_limit_mib)
    try:
        yield made
    finally:
        pids = made.pids()
        await made.close()
        assert not [one for one in processes() if one.pid in pids]


async def judged(made: ScoringPool, name: str, reference: object = "", text: str = "ok") -> Outcome:
    answer = Answer(prompt="", text=text, reference=str(reference))
    return await made.judge(f"tests.rewards.verifiers:{name}", answer)


async def error_of(made: ScoringPool, name: str, reference: object = "") -> str:
    failed = await judged(made, name, reference)
    assert isinstance(failed, Failed), failed
    assert name in failed.error
    return failed.error


def lives(pid: int) -> bool:
    return any(one.pid == pid for one in processes())


async def appears(file: Path) -> str:
    """Wait for what a verifier writes."""
    await asyncio.to_thread(until, file.exists, f"{file} is there")
    return await asyncio.to_thread(file.read_text)


async def test_answers_are_judged_by_sync_and_async_functions() -> None:
    async with pool() as made:
        assert await judged(made, "length", text="four") == Scored(reward=4.0)
        assert await judged(made, "asynchronous") == Scored(reward=0.5, parts={"style": 1.0})
        assert await judged(made, "refuses") == Rejected(reason="the question has no answer")


async def test_an_asynchronous_verifier_keeps_its_event_loop() -> None:
    async with pool() as made:
        assert await judged(made, "same_loop") == Scored(reward=1.0)
        assert await judged(made, "same_loop") == Scored(reward=1.0)


async def test_a_process_is_used_again_and_only_as_many_start_as_are_needed() -> None:
    async with pool(size=4) as made:
        assert made.pids() == []
        for count in (1, 2, 3):
            assert await judged(made, "counted") == Scored(reward=count)
        assert len(made.pids()) == 1


async def test_what_a_verifier_prints_or_reads_does_not_disturb_the_answers() -> None:
    async with pool() as made:
        assert await judged(made, "chatty") == Scored(reward=1.0)
        assert await judged(made, "length") == Scored(reward=2.0)


async def test_a_verifier_that_forks_is_heard_once() -> None:
    async with pool() as made:
        assert await judged(made, "forks") == Scored(reward=1.0)
        for length in range(5):
            assert await judged(made, "length", text="x" * length) == Scored(reward=length)


@pytest.mark.parametrize("name", ["hangs", "hangs_in_c", "hangs_asynchronously"])
async def test_a_verifier_that_hangs_is_ended_at_the_time_limit(name: str) -> None:
    async with pool(time_limit=0.2) as made:
        error = await error_of(made, name)
        assert "took longer than the time limit of 0.2 s" in error
        assert len(made.pids()) == (name == "hangs_asynchronously")  # else it is killed
        made._time_limit = LIMIT  # who does not hang may still be slow
        assert await judged(made, "length") == Scored(reward=2.0)


IMPORTED_SLOWLY = """
import pathlib, time
folder = pathlib.Path(__file__).parent
(folder / "begun").touch()
while not (folder / "released").exists():
    time.sleep(0.002)

def score(answer):
    return 1.0
"""


async def test_importing_a_verifier_does_not_count_against_the_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "slow.py"
    file.write_text(IMPORTED_SLOWLY)
    loop = asyncio.get_running_loop()
    clock = loop.time
    async with pool() as made:
        answer = Answer(prompt="", text="", reference="")
        judging = asyncio.create_task(made.judge(f"{file}:score", answer))
        await appears(tmp_path / "begun")
        monkeypatch.setattr(loop, "time", lambda: clock() + LIMIT + 1)
        await wait_all_blocked()
        assert not judging.done()
        (tmp_path / "released").touch()
        assert await judging == Scored(reward=1.0)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("ends_process", "ended its process: exit code 0"),
        ("killed", "ended its process: killed by SIGKILL"),
        ("closes_everything", "ended its process: "),
        ("writes_into_every_pipe", "something other than an answer into the pipe"),
    ],
)
async def test_a_verifier_that_ends_its_process_fails_its_own_answer_only(
    name: str, how: str
) -> None:
    async with pool(size=2) as made:
        failing = asyncio.create_task(error_of(made, name))
        others = await asyncio.gather(*(judged(made, "length") for _ in range(8)))
        assert how in await failing
        assert others == [Scored(reward=2.0)] * 8


async def test_a_verifier_that_eats_memory_fails_at_the_memory_limit() -> None:
    async with pool(memory_limit_mib=400) as made:
        assert "ran out of memory" in await error_of(made, "eats_memory")
        assert await judged(made, "length") == Scored(reward=2.0)


async def test_the_death_of_an_idle_process_costs_no_answer() -> None:
    async with pool() as made:
        first = await judged(made, "pid")
        [pid] = made.pids()
        os.kill(pid, signal.SIGKILL)
        second = await judged(made, "pid")
        assert isinstance(first, Scored)
        assert isinstance(second, Scored)
        assert first.reward == pid != second.reward


@pytest.mark.slow
async def test_whatever_is_killed_when_every_answer_gets_one_outcome() -> None:
    """Processes die at any moment, also while they start; only theirs may fail, and say so."""
    choice = random.Random(0)
    async with pool(size=3) as made:
        asked = {
            at: asyncio.create_task(judged(made, "length", text="x" * at)) for at in range(150)
        }
        kills = 0
        while not all(one.done() for one in asked.values()):
            pids = made.pids()
            if pids and kills < 25:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(choice.choice(pids), signal.SIGKILL)
                kills += 1
            await asyncio.wait(asked.values(), timeout=choice.random() * 0.3)
        failed = 0
        for at, task in asked.items():
            outcome = task.result()
            if isinstance(outcome, Failed):
                assert "SIGKILL" in outcome.error
                failed += 1
            else:
                assert outcome == Scored(reward=at)
        assert failed <= kills


async def test_a_module_that_ends_the_process_when_it_is_imported_fails_its_answers(
    tmp_path: Path,
) -> None:
    file = tmp_path / "deadly.py"
    file.write_text("import os\nos._exit(7)\n")
    async with pool() as made:
        answer = Answer(prompt="", text="", reference="")
        failed = await made.judge(f"{file}:score", answer)
        assert isinstance(failed, Failed)
        assert "3 processes ended before it had judged, the last: exit code 7" in failed.error


async def test_a_slow_answer_holds_up_no_other(tmp_path: Path) -> None:
    released = tmp_path / "released"
    async with pool(size=2) as made:
        slow = asyncio.create_task(judged(made, "waits_for_file", released))
        for _ in range(5):
            assert await judged(made, "length") == Scored(reward=2.0)
        assert not slow.done()
        released.touch()
        assert await slow == Scored(reward=1.0)


async def test_a_cancelled_answer_leaves_no_process_that_works_on_it(tmp_path: Path) -> None:
    async with pool() as made:
        said = tmp_path / "pid"
        judging = asyncio.create_task(judged(made, "says_pid_and_hangs", said))
        pid = int(await appears(said))
        judging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await judging
        assert not lives(pid)
        assert await judged(made, "length") == Scored(reward=2.0)


async def test_programs_that_a_verifier_started_are_ended_with_it(tmp_path: Path) -> None:
    async with pool() as made:
        said = tmp_path / "pid"
        judging = asyncio.create_task(judged(made, "starts_a_program_that_hangs", said))
        pid = int(await appears(said))
        judging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await judging
        # It was sent SIGKILL; nobody here is its parent, who would be told when it has died.
        await asyncio.to_thread(until, lambda: not lives(pid), "the program is gone")


async def test_closing_ends_processes_that_work(tmp_path: Path) -> None:
    said = tmp_path / "pid"
    async with pool() as made:
        judging = asyncio.create_task(judged(made, "says_pid_and_hangs", said))
        pid = int(await appears(said))
        await made.close()
        assert not lives(pid)
        assert isinstance(await judging, Failed)


async def test_verifiers_can_be_loaded_before_the_first_answer() -> None:
    async with pool(size=2) as made:
        await made.load(["exact", "tests.rewards.verifiers:length"])
        assert len(made.pids()) == 2


async def test_one_that_has_loaded_takes_no_place_of_one_that_has_yet_to_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, load, loaded = Scorer.start, Scorer.load, asyncio.Event()

    async def later(*given: Any) -> Scorer:
        if made.pids():
            await loaded.wait()
        return await start(*given)

    async def noted(scorer: Scorer, call: OpenCall, verifiers: list[str]) -> str:
        try:
            return await load(scorer, call, verifiers)
        finally:
            loaded.set()

    monkeypatch.setattr(Scorer, "start", later)
    monkeypatch.setattr(Scorer, "load", noted)
    async with pool(size=3) as made:
        await made.load(["tests.rewards.verifiers:length"])
        assert len(made.pids()) == 3


async def test_a_verifier_that_cannot_be_loaded_is_an_error_when_it_is_loaded(
    tmp_path: Path,
) -> None:
    file = tmp_path / "broken.py"
    file.write_text("import sys\nsys.exit('not today')\n")
    async with pool() as made:
        with pytest.raises(ConfigError, match="no verifier is called 'maths'; did you mean 'math'"):
            await made.load(["maths"])
        with pytest.raises(
            ConfigError, match=r"raised when it was imported: SystemExit: not today"
        ):
            await made.load([f"{file}:score"])


OWNER = """
import asyncio, sys
from rlinf_async.rewards import Answer
from rlinf_async.rewards.pool import ScoringPool
from rlinf_async.testing import wait_all_blocked

async def main():
    pool = ScoringPool(processes=1, time_limit=600.0)
    answer = Answer(prompt="", text="", reference=sys.argv[1])
    await pool.judge("tests.rewards.verifiers:says_pid_and_hangs", answer)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends it with its owner")
def test_a_process_that_hangs_goes_when_its_owner_is_killed(tmp_path: Path) -> None:
    said = tmp_path / "pid"
    with subprocess.Popen([sys.executable, "-c", OWNER, str(said)]) as owner:
        until(said.exists, "the verifier runs")
        pid = int(said.read_text())
        assert lives(pid)
        owner.kill()
    until(lambda: not lives(pid), "the scoring process is gone")


async def test_a_verifier_that_this_process_has_registered_is_found() -> None:
    register_verifier("lengthy")(length)
    try:
        async with pool() as made:
            answer = Answer(prompt="", text="four", reference="")
            assert await made.judge("lengthy", answer) == Scored(reward=4.0)
    finally:
        verifiers._entries.pop("lengthy")
