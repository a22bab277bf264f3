"""What the first, the second and the third Ctrl-C do to a script."""

from __future__ import annotations

import asyncio
import signal
import threading

import pytest

import rlinf_async as ra
from tests.runtime.scripts import running

SCRIPT = """
import asyncio, sys
import rlinf_async as ra

class Slow(ra.Worker):
    async def teardown(self) -> None:
        print("tearing down", flush=True)
        await asyncio.Event().wait()

async def patient() -> None:
    print("ready", flush=True)
    await asyncio.Event().wait()

async def stubborn() -> None:
    print("ready", flush=True)
    for word in ("no", "never"):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            print(word, flush=True)
    await asyncio.Event().wait()

async def main() -> None:
    async with ra.Cluster.process(grace=1000.0) as cluster:
        await cluster.launch(Slow)
        await BODY()

if __name__ == "__main__":
    LOOP
    ra.run(main())
"""
LOOPS = {"uvloop": "pass", "asyncio": "sys.modules['uvloop'] = None"}


@pytest.mark.parametrize("kind", LOOPS)
def test_a_second_ctrl_c_does_not_wait_for_workers_and_leaves_nothing(kind: str) -> None:
    with running(SCRIPT.replace("BODY", "patient").replace("LOOP", LOOPS[kind])) as script:
        script.wait_for("ready")
        script.process.send_signal(signal.SIGINT)
        script.wait_for_error("Slow[0]: tearing down")
        script.process.send_signal(signal.SIGINT)
        code, _, err = script.end()
        assert script.gone()
        assert script.left == []
    assert code == -signal.SIGINT
    assert "interrupted again: workers are killed" in err
    assert err.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.parametrize("kind", LOOPS)
def test_a_third_ctrl_c_ends_a_script_that_refuses(kind: str) -> None:
    with running(SCRIPT.replace("BODY", "stubborn").replace("LOOP", LOOPS[kind])) as script:
        for line in ("ready", "no", "never"):
            script.wait_for(line)
            script.process.send_signal(signal.SIGINT)
        code, _, err = script.end()
        assert script.gone()
        assert script.left == []
    assert (code, err) == (-signal.SIGINT, "")


def test_run_raises_keyboard_interrupt_and_gives_the_handler_back() -> None:
    async def interrupted() -> None:
        signal.raise_signal(signal.SIGINT)
        await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        ra.run(interrupted())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_coroutine_that_finishes_all_the_same_gives_its_result() -> None:
    async def finishes() -> str:
        signal.raise_signal(signal.SIGINT)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "finished"
        return "not cancelled"

    assert ra.run(finishes()) == "finished"


def test_an_error_on_the_way_out_is_not_taken_for_the_cause() -> None:
    async def fails_when_interrupted() -> None:
        signal.raise_signal(signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            raise RuntimeError("its channel has no receiver left")

    with pytest.raises(KeyboardInterrupt) as caught:
        ra.run(fails_when_interrupted())
    assert isinstance(caught.value.__cause__, RuntimeError)


async def _handler() -> object:
    return signal.getsignal(signal.SIGINT)


def test_a_handler_of_the_users_own_is_left_alone() -> None:
    def own(number: int, frame: object) -> None:
        raise AssertionError("nobody interrupts")

    before = signal.signal(signal.SIGINT, own)
    try:
        assert ra.run(_handler()) is own
    finally:
        signal.signal(signal.SIGINT, before)


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(ra.run(_handler())))
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]
