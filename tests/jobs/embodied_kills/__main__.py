"""``python -m tests.jobs.embodied_kills --count 5 --hangs 4``: 20 kills and 20 hangs.

Each seed is a run of PPO or of soft actor-critic, in which a person acts now and then, with four
kills, of the driver, an actor, a person, a rollout or replay worker and an env worker in turn, and
as many hangs, in which an environment's step does not return or a process is stopped. After what
ends a run a start with ``--resume`` follows; a driver that is stopped is woken, or killed, by who
looks after it, here. Prints for each run what became of it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import msgspec

from tests.jobs.embodied_kills.accounts import Accounts, accounts
from tests.jobs.embodied_kills.plan import KILLS, Kill, Plan, plan
from tests.jobs.processes import Driver, processes

PATIENCE: Final = 900.0
"""seconds for a run between two of its starts"""
STOPPED: Final = 15.0
"""seconds for which a driver that is stopped stays so: longer than its workers wait for it"""
HEADER: Final = (
    f"{'seed':>4}  {'job':<3}  {'settings':<32}  {'killed, hung at iteration':<100}"
    "  iterations  doubled  lost  left out  failed   return  target  seconds  verdict"
)


def perform(made: Plan, folder: Path) -> tuple[list[Kill], Accounts | None, str]:
    """Carry a plan out; return the kills, what the run did, and what else was wrong."""
    file, out, done = folder / "run.toml", folder / "run", folder / "done.jsonl"
    request = folder / "request"
    file.write_text(made.text(request), encoding="utf-8")
    done.touch()
    for start in range(len(made.kills) + 1):
        before = carried_out(done)
        rest = [kill for kill in made.kills if kill not in before]
        kills = folder / f"kills_{start}.json"
        kills.write_bytes(msgspec.json.encode(rest))
        temporary = folder / f"tmp{start}"
        temporary.mkdir()
        arguments = ("train", file, "--out", out, *made.arguments, "--resume")
        driver = Driver(
            temporary,
            *arguments,
            module=("tests.jobs.embodied_kills.driven", kills, done, request),
        )
        try:
            code = looked_after(driver, wakes=bool(made.seed % 4 < 2))
        finally:
            driver.end()
        request.unlink(missing_ok=True)
        killed = carried_out(done)
        ended = code == -9 or (code == 1 and outcome_of(out) == "failed")
        if ended and any(kill.ends_the_run for kill in killed[len(before) :]):
            continue
        if code not in (0, 1) or not (out / "summary.json").exists():
            return killed, None, f"exit code {code}: {last_line(driver)}"
        summary = json.loads((out / "summary.json").read_bytes())
        if summary["outcome"] not in ("succeeded", "fell short"):
            return killed, None, f"{summary['outcome']}: {last_line(driver)}"
        return killed, accounts(made, out), ""
    return carried_out(done), None, "the driver was killed again and again"


def looked_after(driver: Driver, *, wakes: bool) -> int:
    """Wait for a driver; one that is stopped is woken after a while, or killed. Its exit code."""
    end = time.monotonic() + PATIENCE
    while driver.is_running and time.monotonic() < end:
        if driver.pid in (one.pid for one in processes() if one.state == "T"):
            time.sleep(STOPPED)
            os.kill(driver.pid, signal.SIGCONT if wakes else signal.SIGKILL)
        time.sleep(0.1)
    return driver.wait(PATIENCE)


def outcome_of(out: Path) -> str:
    """What a run says has become of it; empty where it says nothing."""
    path = out / "summary.json"
    return str(json.loads(path.read_bytes())["outcome"]) if path.exists() else ""


def carried_out(done: Path) -> list[Kill]:
    """The kills so far."""
    return [msgspec.json.decode(line, type=Kill) for line in done.read_bytes().splitlines()]


def last_line(driver: Driver) -> str:
    return (driver.said.splitlines() or ["nothing was said"])[-1]


def shown(made: Plan) -> str:
    """The settings that differ between runs, in short."""
    found = {name.rpartition(".")[2]: value for name, value in made.settings.items()}
    short = [
        f"{found['stages']} stages",
        f"{found['actors']} actors",
        f"{found['rollout_workers']} rollout",
    ]
    if made.kind == "ppo":
        short.append(f"{made.epochs} epochs")
    else:
        short += [str(found["sampling"])[:3], f"n={found['n_step']}"]
    return ", ".join(short)


def report(made: Plan, folder: Path) -> bool:
    """Perform a run and print its line; whether it was right."""
    began = time.monotonic()
    killed, did, wrong = perform(made, folder)
    seconds = time.monotonic() - began
    kills = ", ".join(map(str, killed))
    head = f"{made.seed:>4}  {made.kind:<3}  {shown(made):<32}  {kills:<100}"
    if did is None:
        print(f"{head}  {wrong}", flush=True)
        return False
    good = did.doubled == did.lost == 0 and did.reached and len(killed) == len(made.kills)
    good = good and did.failed <= sum(kill.may_fail for kill in killed)
    result = "-" if did.result is None else f"{did.result:.1f}"
    print(
        f"{head}  {did.iterations:>10}  {did.doubled:>7}  {did.lost:>4}  {did.left_out:>8}"
        f"  {did.failed:>6}  {result:>7}  {'reached' if did.reached else 'missed':<7}"
        f" {seconds:>7.0f}  {'ok' if good else 'WRONG'}",
        flush=True,
    )
    return good


def main(seeds: range, kills: int, hangs: int, *, keep: bool) -> int:
    """All runs, one after the other; the number of those in which something was wrong."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(HEADER, flush=True)
    bad = 0
    for seed in seeds:
        made = plan(seed, kills, hangs)
        folder = Path(tempfile.mkdtemp(prefix="ra-", dir="/tmp"))
        bad += not report(made, folder)
        if not keep:
            shutil.rmtree(folder)
    print(f"{len(seeds)} runs, {bad} wrong")
    return bad


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=KILLS, help="in each run")
    parser.add_argument("--hangs", type=int, default=0, help="the same")
    parser.add_argument("--keep", action="store_true", help="keep the run folders")
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.count)
    sys.exit(bool(main(seeds, options.kills, options.hangs, keep=options.keep)))
