"""Environments that fail, as a table: simulator x place x fault -> what is said, and by whom.

Each cell is a process of its own, as that of an env worker: it makes a stage, resets it, steps it
and closes it. All faults of a simulator and a place happen at the same time.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pytest

from rlinf_async.workers import foreign_calls
from rlinf_async.workers.env import EnvConfig
from rlinf_async.workers.env.pool import EnvPool
from rlinf_async.workers.env.stage import EnvStage
from rlinf_async.workers.env.worker import Environments
from rlinf_async.workers.foreign_calls import (
    FailedEpisode,
    LastWords,
    last_words,
    resident_mb,
)

HERE: Final = "tests.workers.env.failing"
LIMIT: Final = 1.0
ROOM: Final = 200
"""megabytes that a process may have beside those of this one: the processes here are its copies"""
ENTRIES: Final = {
    "single": f"{HERE}:Failing",
    "pool": f"{HERE}:Failing",
    "vector": f"{HERE}:FailingMany",
    "async": f"{HERE}:FailingInTurn",
}
SAID: Final = {
    "raises": "raised ArithmeticError: the simulator exploded",
    "leaves": "raised SystemExit: 3",
    "interrupts": "raised KeyboardInterrupt",
}
"""What an error says of something that was raised."""
ENDS: Final = {
    "exits": ("exit code 7", 7),
    "crashes": ("killed by SIGSEGV", -signal.SIGSEGV),
    "killed": ("killed by SIGKILL", -signal.SIGKILL),
}
"""How a process ends, in words and as a status."""
SHOWN: Final = ("invalid", "misshapen")
FAULTS: Final = (*SAID, *ENDS, *SHOWN, "hangs", "deaf", "blocks", "prints", "is slow")


class Came(NamedTuple):
    """What came of a process."""

    status: int
    """exit code; of a signal its number, negative"""
    said: str
    """the error that was raised"""
    last: LastWords


def config_of(simulator: str, place: str, fault: str) -> EnvConfig:
    return EnvConfig(
        id="Failing",
        entry_point=ENTRIES[simulator],
        kwargs={"where": place, "fault": fault},
        simulator=simulator,  # type: ignore[arg-type]
        envs=1,
        stages=1,
        make_seconds=LIMIT,
        reset_seconds=LIMIT,
        # It may take any time to take so much.
        step_seconds=None if fault == "leaks" else LIMIT,
        max_memory_mb=resident_mb(os.getpid()) + ROOM if fault == "leaks" else None,
    )


def use(config: EnvConfig) -> None:
    """Make the environments of a stage, and use them."""
    environments = Environments(config, 0, 0)
    environments.look()
    stage = environments.stage(0)
    stage.reset()
    if config.kwargs["where"] == "idle":
        kill_env_process(stage)
    for _ in range(4):
        stage.step(np.zeros(1, np.int64), None if stage.rows is None else np.arange(1))
    stage.close()
    environments.close()


def kill_env_process(stage: EnvStage) -> None:
    """Kill the process of the only environment of a pool, which waits for its next action."""
    pool: EnvPool = stage._envs  # type: ignore[attr-defined]
    parent = pool._process.pid
    child = int(Path(f"/proc/{parent}/task/{parent}/children").read_text())
    os.kill(child, signal.SIGKILL)
    with contextlib.suppress(OSError), contextlib.closing(os.fdopen(os.pidfd_open(child))) as ended:
        select.select([ended], [], [])


def start(folder: Path, config: EnvConfig, name: str) -> int:
    """Use these environments in a process that leads a group of its own."""
    process = os.fork()
    if process:
        return process
    code = 9
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        output = os.open(folder / f"{name}.out", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = sys.stderr = os.fdopen(os.dup(1), "w")
        faulthandler.enable()
        foreign_calls.note_in(folder / name)
        use(config)
        code = 0
    except BaseException as error:
        (folder / f"{name}.error").write_text(f"{type(error).__name__}: {error}")
        code = 1
    finally:
        os._exit(code)


def end(folder: Path, name: str, process: int) -> Came:
    """Wait for it, and kill what it has left, as who has started a worker does."""
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    error = folder / f"{name}.error"
    return Came(status, error.read_text() if error.exists() else "", last_words(folder / name))


def check(simulator: str, place: str, fault: str, came: Came) -> None:
    """Compare with the table of the documentation."""
    many = simulator in ("vector", "async")
    named = "simulator Failing[" if many else "env Failing["
    doing = "recv" if simulator == "async" and place in ("reset", "step") else place
    where = "while it was made" if place == "make" else f"in {doing}() at step "
    if fault in ("prints", "is slow"):
        assert (came.status, came.said) == (0, ""), came
    elif fault in SAID:
        assert came.status == 1, came
        assert SAID[fault] in came.said
        if place != "make":
            assert "Failing[" in came.said
            assert where in came.said
            assert "seed " in came.said
    elif fault in SHOWN:
        assert came.status == 1, came
        assert named in came.said
        assert ("NaN or infin" if fault == "invalid" else "shape") in came.said
        assert "seed " in came.said
    else:
        check_end(simulator, place, fault, came, (named, where))


def check_end(simulator: str, place: str, fault: str, came: Came, said: tuple[str, str]) -> None:
    """Compare the end of a process: why it was killed, or in which call it ended by itself."""
    named, where = said
    in_pool = simulator == "pool" and place != "make"  # one is made in the worker itself
    reason = came.last.reason
    if fault in ENDS:
        how, status = ENDS[fault]
        assert came.status == (-signal.SIGKILL if in_pool else status), came
        assert (how in reason) is in_pool
        last = reason if in_pool else came.last.where[0]
    else:
        assert came.status == -signal.SIGKILL, came
        assert came.last.waited >= LIMIT
        assert "has not returned for env." in reason
        last = reason
    assert last.startswith(named), came
    assert where in last
    failed = came.last.failed
    if place in ("reset", "step"):
        assert failed is not None
        assert f"seed {failed.seed}, " in last
    else:
        assert failed is None


CELLS: Final = [
    (simulator, place)
    for simulator in ENTRIES
    for place in ("make", "reset", "step", "close")
    if (simulator, place) != ("pool", "close")  # nobody waits for what its processes say then
]


def faults_of(simulator: str, place: str) -> list[str]:
    """The faults that there are; a process that keeps its interpreter's lock is seen from outside:
    by the env worker of a pool, and else by the heartbeats of the driver."""
    left_out = set[str]()
    if simulator != "pool" or place == "make":
        left_out.add("blocks")
    if place not in ("reset", "step"):
        left_out |= {*SHOWN}
    return [fault for fault in FAULTS if fault not in left_out]


@pytest.mark.parametrize(("simulator", "place"), CELLS)
def test_a_fault_is_named_with_its_environment_seed_and_step(
    tmp_path: Path, simulator: str, place: str
) -> None:
    faults = faults_of(simulator, place)
    running = {
        fault: start(tmp_path, config_of(simulator, place, fault), fault) for fault in faults
    }
    came: dict[str, Any] = {fault: end(tmp_path, fault, one) for fault, one in running.items()}
    for fault in faults:
        check(simulator, place, fault, came[fault])


@pytest.mark.parametrize("simulator", ENTRIES)
def test_a_process_that_takes_too_much_memory_is_killed_with_its_environment_named(
    tmp_path: Path, simulator: str
) -> None:
    config = config_of(simulator, "step", "leaks")
    process = start(tmp_path, config, "leaks")
    came = end(tmp_path, "leaks", process)
    assert came.status == -signal.SIGKILL
    assert "Failing[0], seed " in came.last.reason
    assert (
        f"MB in memory, more than env.max_memory_mb = {config.max_memory_mb:g}" in came.last.reason
    )
    assert came.last.failed == FailedEpisode()  # whichever episode it was is not to blame


def test_the_end_of_an_idle_process_of_a_pool_fails_its_episode(tmp_path: Path) -> None:
    process = start(tmp_path, config_of("pool", "idle", ""), "idle")
    came = end(tmp_path, "idle", process)
    assert came.status == -signal.SIGKILL
    assert came.last.reason == (
        "env Failing[0], its process has ended: killed by SIGKILL, in its pool"
    )
    assert came.last.failed == FailedEpisode()
