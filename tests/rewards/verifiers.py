"""Verifiers as users write them, well and badly. By path: ``tests.rewards.verifiers:hangs``."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlinf_async.rewards import Answer, Reject, Retry, Scored, group_verifier

calls = 0


def length(answer: Answer) -> float:
    return len(answer.text)


def pid(answer: Answer) -> int:
    return os.getpid()


def counted(answer: Answer) -> int:
    """How often this process has called it."""
    global calls
    calls += 1
    return calls


async def asynchronous(answer: Answer) -> Scored:
    await asyncio.sleep(0)
    return Scored(reward=0.5, parts={"style": 1})


async def same_loop(answer: Answer) -> float:
    """Keeps something of its event loop from one call to the next."""
    loop = asyncio.get_running_loop()
    before = globals().setdefault("_loop", loop)
    return float(before is loop)


def chatty(answer: Answer) -> float:
    """Prints and reads, as code under test does."""
    print("a line that is no part of the protocol")
    os.write(1, b"\x00\x00\x00\x01x")
    return float(sys.stdin.read() == "")


def refuses(answer: Answer) -> float:
    raise Reject("the question has no answer")


def raises(answer: Answer) -> float:
    raise KeyError("score")


def exits(answer: Answer) -> float:
    sys.exit("done")


def ends_process(answer: Answer) -> float:
    os._exit(0)


def killed(answer: Answer) -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def closes_everything(answer: Answer) -> float:
    os.closerange(3, 1000)
    return 1.0


def forks(answer: Answer) -> float:
    """Comes back twice."""
    return float(os.fork() != 0)


def writes_into_every_pipe(answer: Answer) -> float:
    for number in range(3, 10):
        with contextlib.suppress(OSError):
            os.write(number, b"\x00\x00\x00\x02no")
    return 1.0


def eats_memory(answer: Answer) -> float:
    held = []
    while True:
        held.append(bytearray(50_000_000))


def hangs(answer: Answer) -> float:
    while True:
        time.sleep(1)


def hangs_in_c(answer: Answer) -> float:
    ctypes.PyDLL(None).pause()  # holds the interpreter lock: no Python signal handler would run
    return 1.0


async def hangs_asynchronously(answer: Answer) -> float:
    await asyncio.Event().wait()
    return 1.0


def starts_a_program_that_hangs(answer: Answer) -> float:
    """Writes the program's number into the file that the reference names."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]) as program:
        _say(program.pid, answer.reference)
        program.wait()
    return 1.0


def says_pid_and_hangs(answer: Answer) -> float:
    """Writes the number of its process into the file that the reference names."""
    _say(os.getpid(), answer.reference)
    hangs(answer)
    return 1.0


def _say(pid: int, file: str) -> None:
    """The file is there with the whole number in it, or is not there."""
    part = Path(file + ".part")
    part.write_text(str(pid))
    part.rename(file)


def says_pid_and_hangs_once(answer: Answer) -> float:
    if not Path(answer.reference).exists():
        says_pid_and_hangs(answer)
    return 1.0


def waits_for_file(answer: Answer) -> float:
    while not Path(answer.reference).exists():
        time.sleep(0.002)
    return 1.0


def returns_text(answer: Answer) -> Any:
    return "0.9"


def returns_nothing(answer: Answer) -> Any:
    pass


def returns_a_boolean(answer: Answer) -> Any:
    return True


def returns_nan(answer: Answer) -> Any:
    return float("nan")


def returns_infinity(answer: Answer) -> Any:
    return float("-inf")


def returns_a_huge_integer(answer: Answer) -> Any:
    return 10**400


def returns_scored_with_nan(answer: Answer) -> Any:
    return Scored(reward=1.0, parts={"style": float("nan")})


def returns_scored_with_text(answer: Answer) -> Any:
    return Scored(reward="high")  # type: ignore[arg-type]


class Unprintable:
    """Raises when it is shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


def returns_the_unprintable(answer: Answer) -> Any:
    return Unprintable()


def takes_two(response: str, reference: str) -> float:
    return 1.0


not_a_function = 3


def returns_too_much(answer: Answer) -> float:
    """Its square is beyond float32."""
    return 1e300


def what_is_inherited(answer: Answer) -> Scored:
    """Secrets that this process has, in the places where there could be some."""
    targets = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            targets.append(os.readlink(f"/proc/self/fd/{number}"))
    own = ("pipe:", "/dev/null", "/proc/")
    error = os.readlink("/proc/self/fd/2")
    others = [one for one in targets if not one.startswith(own) and one != error]
    with open("/proc/self/environ", "rb") as file:
        content = file.read()
    values = list(os.environ.values())
    parts = {
        "in os.environ": float(values.count("hunter2-secret")),
        "in /proc": float(content.count(b"hunter2-secret")),
        "PATH": float("PATH" in os.environ),
        "other files": float(len(others)),
    }
    return Scored(reward=0.0, parts=parts)


# ---- many calls in one process


def _touch(file: str) -> None:
    Path(file).touch()


def _first_to_say(file: str) -> int:
    """The process that called this first."""
    if not Path(file).exists():
        _say(os.getpid(), file)
    return int(Path(file).read_text())


open_calls = 0
most_open = 0


async def meets(answer: Answer) -> float:
    """Returns once so many calls as the reference says are open in this process: its number."""
    global open_calls
    met = globals().setdefault("_met", asyncio.Event())
    open_calls += 1
    if open_calls == int(answer.reference):
        open_calls = 0
        globals().pop("_met").set()
    await met.wait()
    return os.getpid()


async def counts_open(answer: Answer) -> float:
    """Returns how many calls were open in this process at most, up to now."""
    global open_calls, most_open
    open_calls += 1
    most_open = max(most_open, open_calls)
    for _ in range(5):
        await asyncio.sleep(0)
    open_calls -= 1
    return most_open


async def length_later(answer: Answer) -> float:
    await asyncio.sleep(0.001)
    return len(answer.text)


async def elsewhere(answer: Answer) -> float:
    """Never ends in the process that called it first, and at once in any other."""
    if _first_to_say(answer.reference) == os.getpid():
        await asyncio.Event().wait()
    return len(answer.text)


def _sleep() -> None:
    time.sleep(1)


async def blocks(answer: Answer) -> float:
    """Says its process, and lets nothing else happen in there."""
    _touch(answer.reference)
    while True:
        _sleep()


async def blocks_once(answer: Answer) -> float:
    if not os.path.exists(answer.reference):  # noqa: ASYNC240
        await blocks(answer)
    return 1.0


async def dies_beside(answer: Answer) -> float:
    os._exit(3)


async def says_when_it_is_cancelled(answer: Answer) -> float:
    _touch(answer.reference)
    try:
        await asyncio.Event().wait()
    finally:
        _touch(answer.reference + ".cancelled")
    return 1.0


async def keeps_going(answer: Answer) -> float:
    """Does not let itself be cancelled."""
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()


def runs_a_loop(answer: Answer) -> float:
    """A function that runs a loop of its own."""
    return asyncio.run(length_later(answer))


async def busy(answer: Answer) -> Scored:
    """Is busy for as many calls of this process as the reference says."""
    if counted(answer) <= int(answer.reference):
        raise Retry("429", after=0.0)
    return Scored(reward=float(calls), cost=0.25)


def connection_lost(answer: Answer) -> float:
    if counted(answer) <= int(answer.reference):
        raise ConnectionResetError("reset by peer")
    return float(calls)


async def costly(answer: Answer) -> Scored:
    """Costs a quarter, and says how often this process has called it."""
    await asyncio.sleep(0)
    return Scored(reward=float(counted(answer)), cost=0.25)


def returns_a_cost_below_0(answer: Answer) -> Any:
    return Scored(reward=1.0, cost=-1.0)


@group_verifier
def longest(answers: Sequence[Answer]) -> list[float]:
    """Right is the longest answer."""
    most = max(len(one.text) for one in answers)
    return [float(len(one.text) == most) for one in answers]


@group_verifier
class Longest:
    """The same as an object, which waits for somebody."""

    async def __call__(self, answers: Sequence[Answer]) -> np.ndarray[Any, Any]:
        await asyncio.sleep(0)
        return np.array(longest(answers), np.float32)


longest_later = Longest()


@group_verifier
def one_by_one(answers: Sequence[Answer]) -> Iterator[float]:
    yield from longest(answers)


@group_verifier
async def busy_at_first(answers: Sequence[Answer]) -> list[Scored]:
    """Its server is busy when it is asked for the first time; then each answer costs a quarter."""
    global calls
    calls += 1
    if calls == 1:
        raise Retry("busy")
    return [Scored(reward=len(one.text), cost=0.25) for one in answers]


@group_verifier
def gives(answers: Sequence[Answer]) -> Any:
    """What the reference says, as Python."""
    return eval(answers[0].reference, {"Reject": Reject, "Scored": Scored, "nan": float("nan")})


@group_verifier
def rejects_all(answers: Sequence[Answer]) -> list[float]:
    raise Reject("nothing to compare")


@group_verifier
def ends_its_process(answers: Sequence[Answer]) -> list[float]:
    os._exit(3)
