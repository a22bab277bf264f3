"""What SIGTERM and SIGUSR1 do to a script that saves, and to one that does not."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import rlinf_async as ra
from rlinf_async.runtime import signals
from rlinf_async.runtime.signals import RunSignals, Terminated, run_signals
from rlinf_async.runtime.wakers import free_task
from tests.runtime.kit import NewCluster, Parent, Waiter, kill, waiting
from tests.runtime.scripts import PATIENCE, ROOT, process_runs, running

SCRIPT = """
import asyncio, os, signal, time
import rlinf_async as ra
from rlinf_async.runtime import run_signals, signals as module
from tests.runtime.kit import Parent

class Actor(ra.Worker):
    async def train(self) -> None:
        await asyncio.sleep(0.001)

    async def forever(self) -> None:
        await asyncio.Event().wait()

    async def save(self) -> str:
        return "saved"

    async def teardown(self) -> None:
        print("torn down")

class NeverReady(ra.Worker):
    async def setup(self) -> None:
        await asyncio.Event().wait()

async def saves(actor: ra.WorkerRef[Actor]) -> None:
    signals, step = run_signals(), 0
    with signals.checked_each_step():
        while True:
            await actor.call(Actor.train)
            if signals.take_checkpoint_request():
                print(await actor.call(Actor.save), flush=True)
            step += 1
            print("step", flush=True)
            await signals.leave_if_terminating()

async def hangs(actor: ra.WorkerRef[Actor]) -> None:
    signals = run_signals()
    with signals.checked_each_step():
        hanging = actor.call(Actor.forever)
        print("step", flush=True)
        await signals.checkpoint_request()
        print("requested", flush=True)
        await hanging

async def blocks(actor: ra.WorkerRef[Actor]) -> None:
    with run_signals().checked_each_step():
        print("step", flush=True)
        while True:
            time.sleep(1)

async def waits(actor: ra.WorkerRef[Actor]) -> None:
    print("step", flush=True)
    await actor.call(Actor.forever)

async def never(actor: ra.WorkerRef[Actor]) -> None:
    raise AssertionError("a worker that is never ready is there")

async def main() -> None:
    run_signals().grace_seconds = GRACE
    async with ra.Cluster.process() as cluster:
        print("starting", flush=True)
        if BODY is never:
            await cluster.launch(NeverReady, count=2)
        await cluster.launch(Parent)
        actor = (await cluster.launch(Actor))[0]
        print(cluster.pid("Actor[0]"), flush=True)
        await BODY(actor)

if __name__ == "__main__":
    ra.run(main())
"""


def script(body: str, grace: float = 1000.0) -> str:
    """The script; ``body`` names the function that it runs once its worker has started."""
    return SCRIPT.replace("BODY", body).replace("GRACE", str(grace))


@pytest.fixture
def setting() -> tuple[str, str]:
    """Only where there are processes."""
    return "process", "uvloop"


def test_after_sigterm_a_step_is_finished_and_saved_and_the_script_leaves_with_143() -> None:
    with running(script("saves")) as run:
        run.wait_for("step")
        run.process.terminate()
        code, out, err = run.end()
        assert run.gone()
        assert run.left == []
    assert code == 143
    assert out.count("saved") == 1
    assert err == "Actor[0]: torn down\n"


def test_a_script_whose_terminal_is_closed_saves_as_after_sigterm(tmp_path: Path) -> None:
    """What it prints afterwards goes nowhere, and no longer fails."""
    ours, theirs = pty.openpty()
    source = (
        script("saves")
        .replace("        print(await", "        SAVED.write_text(await")
        .replace("save), flush=True)", "save)); print('it is', flush=True)")
        .replace('print("step"', 'step == 1 and print("step"')
        .replace(
            "    ra.run(main())",
            "    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup may have started the tests\n"
            "    fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n    ra.run(main())",
        )
        .replace("SAVED", f"pathlib.Path({str(tmp_path / 'saved')!r})")
    )
    (tmp_path / "script.py").write_text(f"import fcntl, pathlib, termios\n{source}")
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py")],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    ) as process:
        os.close(theirs)
        shown = b""
        while b"step" not in shown:
            shown += os.read(ours, 4096)
        os.close(ours)
        assert process.wait(PATIENCE) == 143
    assert (tmp_path / "saved").read_text() == "saved"


def test_after_sigusr1_a_checkpoint_is_saved_and_the_script_goes_on() -> None:
    with running(script("saves")) as run:
        run.wait_for("step")
        for _ in range(2):
            run.process.send_signal(signal.SIGUSR1)
            run.wait_for("saved")
            run.wait_for("step")
        run.process.send_signal(signal.SIGINT)
        code, out, _ = run.end()
    assert code == -signal.SIGINT
    assert out.count("saved") == 2


def test_a_worker_that_gets_the_signals_itself_goes_on_until_the_driver_has_saved() -> None:
    with running(script("saves")) as run:
        run.wait_for("starting")
        assert run.process.stdout is not None
        pid = int(run.process.stdout.readline())
        run.wait_for("step")
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            os.kill(pid, number)
        os.killpg(run.process.pid, signal.SIGTERM)
        code, out, err = run.end()
    assert (code, out.count("saved"), err) == (143, 1, "Actor[0]: torn down\n")


@pytest.mark.parametrize(("body", "seen"), [("waits", "step"), ("never", "starting")])
def test_sigterm_ends_a_script_at_once_where_no_step_is_finished_first(
    body: str, seen: str
) -> None:
    with running(script(body)) as run:
        run.wait_for(seen)
        os.killpg(run.process.pid, signal.SIGTERM)
        code, _, err = run.end()
        assert run.gone()
        assert run.left == []
    assert code == 143
    assert "Traceback" not in err


def test_a_step_that_goes_on_is_cancelled_before_the_grace_is_over() -> None:
    early = "module.CANCEL_AT, module.CANCEL_AGAIN_AT = 0.0, 1.0\n\nasync def main()"
    with running(script("hangs").replace("async def main()", early)) as run:
        run.wait_for("step")
        run.process.terminate()
        code, out, err = run.end()
        assert run.left == []
    assert (code, err) == (143, "Actor[0]: torn down\n")
    assert "requested" in out


def test_at_the_end_of_the_grace_everything_is_killed_even_if_the_loop_is_blocked() -> None:
    with running(script("blocks", grace=0.5)) as run:
        run.wait_for("step")
        run.process.terminate()
        code, _, err = run.end()
        assert run.gone()
        assert run.left == []
    assert code == 143
    assert "not done 0.5 s after SIGTERM: all processes of the run are killed\n" in err


def test_a_second_sigterm_kills_everything_at_once() -> None:
    with running(script("hangs")) as run:
        run.wait_for("step")
        run.process.terminate()
        run.wait_for("requested")
        run.terminate_until_ended()
        code, _, err = run.end()
        assert run.gone()
        assert run.left == []
    assert (code, err) == (143, "a second SIGTERM: all processes of the run are killed\n")


async def test_sigterm_ends_what_a_worker_has_forked(new_cluster: NewCluster) -> None:
    async with new_cluster() as cluster:
        parent = (await cluster.launch(Parent))[0]
        pid = await parent.call(Parent.started)
        os.kill(pid, signal.SIGTERM)
        while process_runs(pid):  # noqa: ASYNC110  # nobody reports the end of a stranger's child
            await asyncio.sleep(0.01)
        assert await parent.call(Parent.started) == pid


def test_sigterm_ends_a_forked_child_that_has_not_run_yet() -> None:
    """It is sent in the first hook that runs in the child, which is before our own."""
    code = """
import os, signal, sys
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
from rlinf_async.runtime.signals import RunSignals
with RunSignals().handled():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    child = os.fork()
    if child == 0:
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
print(os.waitstatus_to_exitcode(status))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{-signal.SIGTERM}\n", "")


def test_a_forked_child_keeps_a_handler_of_the_users_own() -> None:
    code = """
import os, signal
from rlinf_async.runtime.signals import RunSignals
signal.signal(signal.SIGTERM, lambda number, frame: os._exit(7))
with RunSignals().handled():
    child = os.fork()
    if child == 0:
        signal.raise_signal(signal.SIGTERM)
    _, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "7\n"


async def test_a_worker_survives_the_signals_of_its_driver(new_cluster: NewCluster) -> None:
    async with new_cluster() as cluster:
        await waiting(cluster)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT):
            kill(cluster, "Waiter[0]", number)
        numbers = cluster.channel(str, name="more")
        again = cluster.groups["Waiter"][0].call(Waiter.forever, numbers.sender)
        assert await numbers.receiver.get() == "Waiter[0]"
        again.cancel()


def test_run_raises_terminated_and_gives_the_handlers_back() -> None:
    async def terminated() -> None:
        signal.raise_signal(signal.SIGTERM)
        await asyncio.Event().wait()

    with pytest.raises(Terminated, match="SIGTERM") as caught:
        ra.run(terminated())
    assert caught.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_a_coroutine_that_finishes_all_the_same_is_terminated_all_the_same() -> None:
    async def finishes() -> None:
        signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Terminated):
        ra.run(finishes())


def test_an_error_on_the_way_out_is_not_taken_for_the_cause() -> None:
    async def fails_when_cancelled() -> None:
        signal.raise_signal(signal.SIGTERM)
        try:
            await asyncio.Event().wait()
        finally:
            raise RuntimeError("its channel has no receiver left")

    with pytest.raises(Terminated) as caught:
        ra.run(fails_when_cancelled())
    assert isinstance(caught.value.__cause__, RuntimeError)


class FailsAndIsTerminated(ra.Worker):
    async def work(self) -> None:
        raise ValueError("the real cause")

    async def teardown(self) -> None:
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(0)  # here the run is cancelled


def test_the_error_of_a_run_that_had_failed_before_it_was_terminated_is_raised() -> None:
    async def fails() -> None:
        async with ra.Cluster.local() as cluster:
            worker = (await cluster.launch(FailsAndIsTerminated))[0]
            await worker.call(FailsAndIsTerminated.work)

    with pytest.raises(ra.WorkerError, match="the real cause"):
        ra.run(fails())


def test_what_is_not_worth_the_grace_is_given_up() -> None:
    async def evaluates() -> str:
        signals = run_signals()
        with signals.checked_each_step():
            assert await signals.unless_terminating(_gives("done")) == "done"
            assert await signals.unless_terminating(_is_terminated()) is None
            assert await signals.unless_terminating(_gives("never done")) is None
            assert not signals.cancelled_by_sigterm
        return "not reached"

    with pytest.raises(Terminated):
        ra.run(evaluates())


async def _gives(what: str) -> str:
    return what


async def _is_terminated() -> str:
    signal.raise_signal(signal.SIGTERM)
    await asyncio.Event().wait()
    return "not cancelled"


async def test_what_is_not_worth_the_grace_is_cancelled_with_its_caller() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    caller = asyncio.create_task(RunSignals().unless_terminating(work()))
    await begun.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended.is_set()


def test_a_command_that_is_over_is_still_ended_when_the_grace_is() -> None:
    code = """
import signal, threading, time
from rlinf_async.runtime.signals import RunSignals, Terminated
try:
    with RunSignals(grace_seconds=0.1).handled(signal.SIG_IGN):
        signal.raise_signal(signal.SIGTERM)
except Terminated:
    threading.Thread(target=threading.Event().wait).start()
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 143


def test_an_error_before_the_run_is_cancelled_is_raised() -> None:
    async def fails() -> None:
        with run_signals().checked_each_step():
            signal.raise_signal(signal.SIGTERM)
            raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="the disk is full"):
        ra.run(fails())


def test_sigterm_raises_where_no_coroutine_runs_before_and_after_one() -> None:
    async def nothing() -> None:
        return None

    with RunSignals().handled():
        ra.run(nothing())
        with pytest.raises(Terminated):
            signal.raise_signal(signal.SIGTERM)


def test_a_coroutine_is_cancelled_that_begins_after_sigterm() -> None:
    with RunSignals().handled():
        with pytest.raises(Terminated):
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Terminated):
            ra.run(asyncio.sleep(1000.0))


def test_a_request_before_the_coroutine_begins_is_not_lost() -> None:
    async def requested() -> tuple[bool, bool]:
        await run_signals().checkpoint_request()
        return run_signals().take_checkpoint_request(), run_signals().take_checkpoint_request()

    with RunSignals().handled():
        signal.raise_signal(signal.SIGUSR1)
        assert ra.run(requested()) == (True, False)


def test_leaving_the_steps_of_a_job_ends_a_run_that_is_terminated() -> None:
    passed: list[str] = []

    async def trains_then_evaluates() -> None:
        with run_signals().checked_each_step():
            signal.raise_signal(signal.SIGTERM)
            await asyncio.sleep(0)
            passed.append("trained")
        await asyncio.sleep(0)
        passed.append("evaluated")

    with pytest.raises(Terminated):
        ra.run(trains_then_evaluates())
    assert passed == ["trained"]


def test_the_seconds_left_count_from_the_signal() -> None:
    async def left() -> None:
        seen = run_signals()
        seen.grace_seconds = 1000.0
        assert seen.seconds_left is None
        signal.raise_signal(signal.SIGTERM)
        assert seen.seconds_left is not None
        assert 0.0 <= seen.seconds_left <= 1000.0

    with pytest.raises(Terminated):
        ra.run(left())


def test_a_sigterm_that_is_sent_twice_at_once_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def terminated_twice() -> None:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        await asyncio.Event().wait()

    monkeypatch.setattr(signals, "REPEATED", 1000.0)
    with pytest.raises(Terminated):
        ra.run(terminated_twice())


def test_a_request_that_comes_after_the_look_is_taken_in_the_next_step() -> None:
    steps: list[bool] = []

    async def trains() -> None:
        seen = run_signals()
        with seen.checked_each_step():
            while True:
                steps.append(seen.take_checkpoint_request())
                if len(steps) == 1:
                    signal.raise_signal(signal.SIGTERM)
                await seen.leave_if_terminating()

    with pytest.raises(Terminated):
        ra.run(trains())
    assert steps == [False, True]


async def test_waiting_for_a_request_does_not_hide_a_deadlock() -> None:
    waiting = asyncio.create_task(run_signals().checkpoint_request())
    await asyncio.sleep(0)
    assert free_task([waiting]) == ""
    waiting.cancel()
    await asyncio.wait([waiting])


def test_a_handler_of_the_users_own_is_left_alone() -> None:
    def own(number: int, frame: object) -> None:
        return None

    async def handler() -> object:
        return signal.getsignal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, own)
    try:
        assert ra.run(handler()) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_outside_a_run_nothing_is_requested() -> None:
    seen = run_signals()
    assert not seen.take_checkpoint_request()
    assert not seen.terminating


def test_a_sigterm_after_the_command_is_over_does_not_change_its_exit_code() -> None:
    script = (
        "import atexit, os, signal, sys\n"
        "from rlinf_async.cli import main\n"
        "sys.argv = ['rlinf-async', '--version']\n"
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGTERM))\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_run_where_a_loop_runs_says_to_await() -> None:
    async def main() -> int:
        return 1

    async def cell() -> None:
        with pytest.raises(RuntimeError, match=r"write `await main\(\)` instead"):
            ra.run(main())

    asyncio.run(cell())
