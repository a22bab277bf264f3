"""What a virtual loop does with time, threads, asyncio's primitives, and runs that cannot end."""

import asyncio
import concurrent.futures
import contextvars
import itertools
import threading
import time

import pytest

from rlinf_async.deadlines import let_pass
from rlinf_async.testing import Deadlock, Livelock, Unhandled, VirtualLoop, explore, run, run_on

SEEDS = range(200)


def test_a_day_of_virtual_time_is_not_waited_for() -> None:
    async def main() -> float:
        for _ in range(24):
            await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    assert run(main()) == 24 * 3600


def test_timers_run_in_the_order_of_their_times() -> None:
    async def main() -> list[float]:
        ran: list[float] = []
        for delay in (3.0, 1.0, 2.0):
            asyncio.get_running_loop().call_later(delay, ran.append, delay)
        await asyncio.sleep(5)
        return ran

    assert all(ran == [1.0, 2.0, 3.0] for ran in explore(main, seeds=SEEDS))


def test_everything_ready_runs_before_the_clock_moves() -> None:
    async def main() -> float:
        async def spin() -> float:
            for _ in range(50):
                await asyncio.sleep(0)
            return asyncio.get_running_loop().time()

        spinning = asyncio.create_task(spin())
        await asyncio.sleep(0.001)
        return await spinning

    assert set(explore(main, seeds=SEEDS)) == {0.0}


def test_a_cancelled_timer_neither_runs_nor_moves_the_clock() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        for _ in range(1000):
            async with asyncio.timeout(3600):
                await asyncio.sleep(0.5)
        return loop.time()

    assert run(main()) == 500


def test_a_function_in_an_executor_runs_inline_and_answers_by_a_callback() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")

    def blocking() -> tuple[int, str]:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        return threading.get_ident(), variable.get()

    async def main() -> None:
        variable.set("seen")
        loop = asyncio.get_running_loop()
        assert await asyncio.to_thread(blocking) == (threading.get_ident(), "seen")
        assert await loop.run_in_executor(None, blocking) == (threading.get_ident(), "unset")
        with concurrent.futures.ThreadPoolExecutor(1) as executor:
            assert (await loop.run_in_executor(executor, blocking))[0] == threading.get_ident()

    explore(main, seeds=range(20))


def test_an_error_in_an_executor_reaches_whoever_awaits_it() -> None:
    async def main() -> None:
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(divmod, 1, 0)

    run(main())


def test_a_function_in_an_executor_may_be_cancelled_before_it_begins() -> None:
    async def main() -> int:
        ran: list[int] = []
        task = asyncio.create_task(asyncio.to_thread(ran.append, 1))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return len(ran)

    assert set(explore(main, seeds=SEEDS)) == {0, 1}


def test_waiting_for_the_loop_inside_an_executor_is_refused_not_hung() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()

        def pull() -> None:
            coroutine = asyncio.sleep(0)
            try:
                asyncio.run_coroutine_threadsafe(coroutine, loop).result()
            finally:
                coroutine.close()

        with pytest.raises(RuntimeError, match="runs the function inline and cannot answer"):
            await asyncio.to_thread(pull)

    run(main())


def test_a_call_from_another_thread_is_refused() -> None:
    errors: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def intrude() -> None:
            try:
                loop.call_soon_threadsafe(errors.append, "it ran")
            except RuntimeError as error:
                errors.append(str(error))

        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()

    run(main())
    assert len(errors) == 1
    assert errors[0].startswith("a virtual loop was called from another thread")


def test_a_closed_loop_takes_no_callbacks() -> None:
    loop = VirtualLoop(0)
    loop.close()
    with pytest.raises(RuntimeError, match="Event loop is closed"):
        loop.call_soon(print)


def test_tasks_are_named_after_their_coroutine_unless_named() -> None:
    async def child() -> str:
        task = asyncio.current_task()
        return task.get_name() if task else ""

    async def main() -> list[str]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(child()), group.create_task(child())]
            tasks.append(group.create_task(child(), name="mine"))
        return [task.result() for task in tasks]

    assert run(main()) == ["child-1", "child-2", "mine"]
    assert run(main()) == ["child-1", "child-2", "mine"]


def test_a_lock_excludes_on_every_seed() -> None:
    async def main() -> int:
        lock, inside, most = asyncio.Lock(), 0, 0

        async def enter() -> None:
            nonlocal inside, most
            async with lock:
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(0)
                inside -= 1

        await asyncio.gather(*(enter() for _ in range(6)))
        return most

    assert set(explore(main, seeds=SEEDS)) == {1}


def test_a_failing_child_cancels_its_task_group_on_every_seed() -> None:
    async def main() -> int:
        cancelled = 0

        async def wait() -> None:
            nonlocal cancelled
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled += 1
                raise

        async def fail() -> None:
            await asyncio.sleep(1)
            raise ValueError("child")

        async def fail_together() -> None:
            async with asyncio.TaskGroup() as group:
                for _ in range(3):
                    group.create_task(wait())
                group.create_task(fail())

        with pytest.raises(ExceptionGroup) as caught:
            await fail_together()
        assert [str(error) for error in caught.value.exceptions] == ["child"]
        return cancelled

    assert set(explore(main, seeds=SEEDS)) == {3}


def test_a_timeout_cancels_at_its_virtual_time_on_every_seed() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.5):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert set(explore(main, seeds=SEEDS)) == {2.5}


def test_every_item_passes_a_queue_once_on_every_seed() -> None:
    async def main() -> list[int]:
        queue: asyncio.Queue[int] = asyncio.Queue(2)
        got: list[int] = []

        async def take() -> None:
            while True:
                got.append(await queue.get())
                queue.task_done()

        takers = [asyncio.create_task(take()) for _ in range(3)]
        for item in range(10):
            await queue.put(item)
        await queue.join()
        for taker in takers:
            taker.cancel()
        return sorted(got)

    assert all(got == list(range(10)) for got in explore(main, seeds=range(500)))


def test_a_deadlock_names_every_task_and_what_it_waits_for() -> None:
    async def main() -> None:
        left, right = asyncio.Queue[int](), asyncio.Queue[int]()

        async def copy(source: asyncio.Queue[int], target: asyncio.Queue[int]) -> None:
            target.put_nowait(await source.get())

        async with asyncio.TaskGroup() as group:
            first = group.create_task(copy(left, right), name="first")
            group.create_task(copy(right, left), name="second")
            await first

    loop = VirtualLoop(0)
    loop.describe.append(lambda: "what the hook says")
    with pytest.raises(Deadlock) as caught:
        run_on(loop, main())
    report = str(caught.value).splitlines()
    assert report[0] == "no task can go on (virtual time 0.000 s, 3 steps, seed 0)"
    assert report[1] == "3 unfinished tasks:"
    assert report[2].startswith("  first stands in copy (tests/testing/test_virtual_loop.py:")
    assert report[2].endswith("): target.put_nowait(await source.get()) [in Queue.get]")
    assert report[3].startswith("  main-1 stands in main (")
    assert report[3].endswith("): await first [waits for task first]")
    assert report[4].startswith("  second stands in copy (")
    assert report[5] == "what the hook says"


def test_a_run_that_does_not_end_stops_at_the_step_limit_and_is_cancelled() -> None:
    async def main() -> None:
        for _ in itertools.count():
            await asyncio.sleep(0)

    with pytest.raises(Livelock, match=r"no end in 100 steps .*\n.*\n  main-1 stands in main"):
        run(main(), max_steps=100)


def test_an_error_in_a_callback_is_raised_not_logged() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_soon(divmod, 1, 0)
        await asyncio.sleep(1)

    with pytest.raises(Unhandled) as caught:
        run(main())
    assert isinstance(caught.value.exceptions[0], ZeroDivisionError)


def test_a_long_trace_keeps_its_end_and_says_what_it_left_out() -> None:
    async def main() -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    loop = VirtualLoop(0, trace_lines=4)
    run_on(loop, main())
    lines = loop.trace.decode().splitlines()
    assert lines[0] == f"({loop.steps - 4} earlier steps left out)"
    assert len(lines) == 5


def test_seconds_that_an_executor_lets_pass_go_by_on_the_loop() -> None:
    async def body() -> tuple[list[float], float]:
        loop = asyncio.get_running_loop()

        def work(seconds: float, fails: bool = False) -> None:
            let_pass(seconds)
            let_pass(seconds)
            if fails:
                raise RuntimeError("after its time")

        both = loop.run_in_executor(None, work, 100.0), loop.run_in_executor(None, work, 50.0)
        await both[1]
        at = [loop.time()]
        await both[0]
        at.append(loop.time())
        with pytest.raises(RuntimeError, match="after its time"):
            await loop.run_in_executor(None, work, 10.0, True)
        late = loop.run_in_executor(None, work, 1000.0)
        await asyncio.sleep(1.0)
        late.cancel()
        await asyncio.sleep(2000.0)
        return at, loop.time()

    began = time.perf_counter()
    assert run_on(VirtualLoop(seed=0), body()) == ([100.0, 200.0], 2221.0)
    assert time.perf_counter() - began < 20.0
