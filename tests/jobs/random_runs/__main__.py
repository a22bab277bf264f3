"""``python -m tests.jobs.random_runs --kind language --count 20 --seed 0 [--kill]``

From the root of a checkout. Prints a line for each seed, the command of each run that broke, and
how many there were; the exit code is 1 if any did. ``--kill`` kills one worker of each run with
processes at a random moment: one that is restarted, so that the run has to end as if nothing had
happened.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import signal
import tempfile
import time
from collections import Counter
from random import Random
from subprocess import TimeoutExpired
from typing import NamedTuple

from tests.jobs.processes import Driver, told_of
from tests.jobs.random_runs.embodied import embodied_run
from tests.jobs.random_runs.language import language_run
from tests.jobs.random_runs.settings import RandomRun

KINDS = {"language": language_run, "embodied": embodied_run}
RESTARTED = ("Rollout", "Reward", "Inference", "Env")
"""beginnings of the names of workers that are started again"""
PATIENCE = 300.0
"""seconds of one run, on a busy machine"""


class Result(NamedTuple):
    """What came of one run."""

    kind: str
    """``trained``, ``refused`` or ``broken``"""
    told: str


def carry_out(drawn: RandomRun, folder: pathlib.Path, killing: Random | None) -> Result:
    """Check and train, with everything in this folder."""
    file, out = folder / "run.toml", folder / "run"
    file.write_text(drawn.text)
    checked = _command(folder / "check", "check", file, *drawn.arguments)
    if checked.code == 2 and checked.said.startswith("error: "):
        return Result("refused", checked.said.splitlines()[-1])
    if checked.code != 0:
        return Result("broken", f"check ended with {checked.code}\n{checked.said}")
    trained = _command(
        folder / "train", "train", file, "--out", out, *drawn.arguments, killing=killing
    )
    found = [] if trained.code == 0 else [f"train ended with {trained.code}"]
    found += drawn.problems(out)
    if found:
        return Result("broken", "; ".join(found) + "\n" + trained.said[-2000:])
    return Result("trained", trained.killed)


class Ended(NamedTuple):
    """How a command ended."""

    code: int | str
    said: str
    killed: str


def _command(temporary: pathlib.Path, *arguments: object, killing: Random | None = None) -> Ended:
    temporary.mkdir()
    driver, killed = Driver(temporary, *arguments), ""
    try:
        if killing is not None:
            killed = _kill_one(driver, killing)
        return Ended(driver.wait(PATIENCE), driver.said, killed)
    except TimeoutExpired:
        return Ended(f"no end after {PATIENCE:.0f} s", driver.said, killed)
    finally:
        driver.end()


def _kill_one(driver: Driver, random: Random) -> str:
    """Kill a worker that is restarted, some seconds after it is there; returns its name."""
    deadline = time.monotonic() + random.uniform(3.0, 20.0)
    while driver.is_running and time.monotonic() < deadline:
        time.sleep(0.05)
    names = {pid: told_of(pid, "comm").decode().strip() for pid in driver.running(b"")}
    if victims := sorted(pid for pid, name in names.items() if name.startswith(RESTARTED)):
        victim = random.choice(victims)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
            return names[victim]
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.jobs.random_runs")
    parser.add_argument("--kind", choices=KINDS, default="language")
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--kill", action="store_true", help="a worker of each run")
    given = parser.parse_args()
    totals: Counter[str] = Counter()
    for seed in range(given.seed, given.seed + given.count):
        began = time.monotonic()
        drawn = KINDS[given.kind](Random(seed))
        with tempfile.TemporaryDirectory(prefix="random-run-") as folder:
            killing = Random(-seed) if given.kill else None
            result = carry_out(drawn, pathlib.Path(folder), killing)
        totals[result.kind] += 1
        print(f"{seed}: {result.kind}, {time.monotonic() - began:.0f} s {result.told}", flush=True)
        if result.kind == "broken":
            print("   ", " ".join(drawn.arguments), flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in totals.most_common()))
    return 1 if totals["broken"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
