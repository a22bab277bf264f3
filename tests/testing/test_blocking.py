"""A blocked event loop is found on asyncio and uvloop, and an idle or busy one is not."""

import asyncio
import threading
import time
from pathlib import Path

import pytest

from rlinf_async.deadlines import LoopWatch
from rlinf_async.testing import LoopBlocked, VirtualLoop, forbid_blocking, run_on
from rlinf_async.testing.pytest_plugin import RunOnLoop

LIMIT = 0.1
PATIENCE = 60.0
"""seconds, for the watching thread on a busy machine"""


def block_for_long() -> None:
    time.sleep(3.5 * LIMIT)


def work_a_little() -> None:
    time.sleep(LIMIT / 10)


def block_until_found(watch: LoopWatch | None) -> None:
    assert watch is not None
    end = time.monotonic() + PATIENCE
    while not watch.findings:
        assert time.monotonic() < end, "it was not found"
        time.sleep(LIMIT / 10)


def block_and_fail() -> None:
    block_for_long()
    raise KeyError


async def blocking_main() -> None:
    block_for_long()


async def blocking_until_found(watch: LoopWatch | None) -> None:
    block_until_found(watch)


def test_whoever_blocks_the_loop_is_named(run_on_loop: RunOnLoop) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with (
            pytest.raises(LoopBlocked, match="in block_until_found"),
            forbid_blocking(loop, limit=LIMIT) as watch,
        ):
            await blocking_until_found(watch)

    run_on_loop(main())


def test_a_loop_that_waits_or_works_in_small_steps_is_not_blocked(run_on_loop: RunOnLoop) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with forbid_blocking(loop, limit=LIMIT) as watch:
            await asyncio.sleep(2 * LIMIT)
            for _ in range(3):
                work_a_little()  # and answer in between
                await asyncio.sleep(0)
            await asyncio.to_thread(block_for_long)
        assert watch is not None
        assert watch.findings == []

    run_on_loop(main())


def test_time_in_which_others_had_the_cores_is_not_held_against_the_loop(
    run_on_loop: RunOnLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoopWatch, "_times", lambda watch: (0.0, time.monotonic()))

    async def main() -> None:
        with forbid_blocking(asyncio.get_running_loop(), limit=LIMIT) as watch:
            await blocking_main()
        assert watch is not None
        assert watch.findings == []

    run_on_loop(main())


def test_a_call_that_holds_the_interpreter_lock_is_found_by_what_it_has_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The watching thread then wakes once, when the call is over."""
    loop = asyncio.new_event_loop()
    watch = LoopWatch(loop, limit=LIMIT)
    loop.close()
    times = iter([(7.0, 0.0), (7.0 + 0.9 * LIMIT, 0.0), (7.0 + 1.1 * LIMIT, 0.0)])
    monkeypatch.setattr(LoopWatch, "_times", lambda watch: next(times))
    assert not watch._wait_for_answer()
    assert next(times, None) is None


@pytest.mark.parametrize(("state", "counts"), [("R", True), ("S", False)])
def test_a_wait_for_a_core_counts_before_it_is_over(
    tmp_path: Path, state: str, counts: bool
) -> None:
    loop = asyncio.new_event_loop()
    watch = LoopWatch(loop, limit=LIMIT)
    loop.close()
    watch._folder = str(tmp_path)
    (tmp_path / "schedstat").write_text("5000000000 2000000000 7\n")
    (tmp_path / "stat").write_text(f"1 (a name) with) {state} 0 0\n")
    assert watch._times() == pytest.approx((5.0, 2.0))
    time.sleep(0.02)
    assert (watch._times()[1] >= 2.02) is counts
    (tmp_path / "schedstat").write_text("5000100000 2020000000 8\n")
    assert watch._times()[1] == pytest.approx(2.02)


def test_a_loop_that_does_not_run_is_not_blocked() -> None:
    loop = asyncio.new_event_loop()
    with forbid_blocking(loop, limit=LIMIT) as watch:
        block_for_long()
    loop.close()
    assert watch is not None
    assert watch.findings == []


def test_an_error_of_the_block_is_raised_as_it_is(run_on_loop: RunOnLoop) -> None:
    async def main() -> None:
        with pytest.raises(KeyError), forbid_blocking(asyncio.get_running_loop(), limit=LIMIT):
            block_and_fail()

    run_on_loop(main())


def test_no_thread_is_left(run_on_loop: RunOnLoop) -> None:
    async def main() -> set[str]:
        with forbid_blocking(asyncio.get_running_loop(), limit=LIMIT):
            await asyncio.sleep(0)
        return {thread.name for thread in threading.enumerate()}

    before = sum(thread.name == "loop-watch" for thread in threading.enumerate())
    run_on_loop(main())
    assert sum(thread.name == "loop-watch" for thread in threading.enumerate()) == before


def test_a_virtual_loop_is_not_watched() -> None:
    loop = VirtualLoop(0)
    with forbid_blocking(loop, limit=LIMIT) as watch:
        run_on(loop, blocking_main())
    assert watch is None
