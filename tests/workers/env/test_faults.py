"""Environments that fail, as a table: simulator x place x fault -> what is said, and by whom.

Each cell is a process of its own, as that of an env worker: it makes a stage, resets it, steps it
and closes it. All faults of a simulator and a place happen at the same time.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pytest

from rlinf_async.workers import foreign_calls
from rlinf_async.workers.env import EnvConfig
from rlinf_async.workers.env.worker import Environments
from rlinf_async.workers.foreign_calls import LastWords, last_words

HERE: Final = "tests.workers.env.failing"
LIMIT: Final = 1.0
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
FAULTS: Final = (*SAID, "hangs", "exits", "crashes", "prints")


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
        step_seconds=LIMIT,
    )


def use(config: EnvConfig) -> None:
    """Make the environments of a stage, and use them."""
    environments = Environments(config, 0, 0)
    environments.look()
    stage = environments.stage(0)
    stage.reset()
    for _ in range(4):
        stage.step(np.zeros(1, np.int64), None if stage.rows is None else np.arange(1))
    stage.close()
    environments.close()


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
    if fault == "prints":
        assert (came.status, came.said) == (0, ""), came
    elif fault in SAID:
        assert came.status == 1, came
        assert SAID[fault] in came.said
        if place != "make":
            assert "Failing[" in came.said
            assert where in came.said
            assert "seed " in came.said
    elif fault == "hangs":
        assert came.status == -signal.SIGKILL, came
        assert came.last.reason.startswith(named), came
        assert where in came.last.reason
        assert "has not returned for env." in came.last.reason
        assert came.last.waited >= LIMIT
    else:
        how = "exit code 7" if fault == "exits" else "killed by SIGSEGV"
        if simulator == "pool" and place != "make":  # one is made in the worker itself
            assert came.status == -signal.SIGKILL, came
            assert how in came.last.reason
            assert where in came.last.reason
        else:
            assert came.status == (7 if fault == "exits" else -signal.SIGSEGV), came
            assert came.last.where[0].startswith(named), came
            assert where in came.last.where[0]


CELLS: Final = [
    (simulator, place)
    for simulator in ENTRIES
    for place in ("make", "reset", "step", "close")
    if (simulator, place) != ("pool", "close")  # nobody waits for what its processes say then
]


@pytest.mark.parametrize(("simulator", "place"), CELLS)
def test_a_fault_is_named_with_its_environment_seed_and_step(
    tmp_path: Path, simulator: str, place: str
) -> None:
    running = {
        fault: start(tmp_path, config_of(simulator, place, fault), fault) for fault in FAULTS
    }
    came: dict[str, Any] = {fault: end(tmp_path, fault, one) for fault, one in running.items()}
    for fault in FAULTS:
        check(simulator, place, fault, came[fault])
