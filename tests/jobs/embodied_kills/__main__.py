"""``python -m tests.jobs.embodied_kills --count 20 --seed 0``: workers and drivers die at random.

Each seed is a run of PPO or of soft actor-critic with four kills, of which one is the driver's: a
start with ``--resume`` follows. Prints for each run what became of it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import msgspec

from tests.jobs.embodied_kills.accounts import Accounts, accounts
from tests.jobs.embodied_kills.plan import DRIVER, Kill, Plan, plan
from tests.jobs.processes import Driver

PATIENCE: Final = 900.0
"""seconds for a run between two of its starts"""
HEADER: Final = (
    f"{'seed':>4}  {'job':<3}  {'settings':<32}  {'killed at iteration':<52}  {'iterations':>10}"
    "  doubled  lost  left out   return  target  seconds  verdict"
)


def perform(made: Plan, folder: Path) -> tuple[list[Kill], Accounts | None, str]:
    """Carry a plan out; return the kills, what the run did, and what else was wrong."""
    file, out, done = folder / "run.toml", folder / "run", folder / "done.jsonl"
    file.write_text(made.text, encoding="utf-8")
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
            temporary, *arguments, module=("tests.jobs.embodied_kills.driven", kills, done)
        )
        try:
            code = driver.wait(PATIENCE)
        finally:
            driver.end()
        killed = carried_out(done)
        if code == -9 and any(kill.name == DRIVER for kill in killed[len(before) :]):
            continue
        if code not in (0, 1) or not (out / "summary.json").exists():
            return killed, None, f"exit code {code}: {last_line(driver)}"
        summary = json.loads((out / "summary.json").read_bytes())
        if summary["outcome"] not in ("succeeded", "fell short"):
            return killed, None, f"{summary['outcome']}: {last_line(driver)}"
        return killed, accounts(made, out), ""
    return carried_out(done), None, "the driver was killed again and again"


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
    head = f"{made.seed:>4}  {made.kind:<3}  {shown(made):<32}  {kills:<52}"
    if did is None:
        print(f"{head}  {wrong}", flush=True)
        return False
    good = did.doubled == did.lost == 0 and did.reached
    result = "-" if did.result is None else f"{did.result:.1f}"
    print(
        f"{head}  {did.iterations:>10}  {did.doubled:>7}  {did.lost:>4}  {did.left_out:>8}"
        f"  {result:>7}  {'reached' if did.reached else 'missed':<7} {seconds:>7.0f}"
        f"  {'ok' if good else 'WRONG'}",
        flush=True,
    )
    return good


def main(seeds: range, *, keep: bool) -> int:
    """All runs, one after the other; the number of those in which something was wrong."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(HEADER, flush=True)
    bad = 0
    for seed in seeds:
        made = plan(seed)
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
    parser.add_argument("--keep", action="store_true", help="keep the run folders")
    options = parser.parse_args()
    sys.exit(bool(main(range(options.seed, options.seed + options.count), keep=options.keep)))
