"""``python -m tests.jobs.on_hosts.kills --runs 20 --seed 0``: workers and hosts die at random.

Each seed is a run of one of the jobs on a Ray cluster of three hosts. Workers, and hosts with
rollout and env workers, are killed, and the run ends well; where the actor or its host is killed,
the run ends with an error that names it, and is resumed to its end without that host. Prints for
each run what became of its items, and the command that repeats it where something was wrong.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import Final, NamedTuple

from tests.jobs.on_hosts.hosts import HEAD, NAMES, Hosts, three_hosts
from tests.jobs.on_hosts.plan import ITERATIONS, Kill, Plan, plan, settings
from tests.jobs.on_hosts.runs import (
    ITEMS,
    NOTHING,
    Driver,
    Items,
    JobOnHosts,
    Left,
    Observer,
    what_is_left,
    what_it_is,
)

HEADER: Final = (
    f"{'seed':>4}  {'job':<9} {'actor on':<8} {'killed at iteration':<34} {'exit':<6}"
    f" {'restarts':>8} {'made':>5} {'taken':>5} {'second':>6} {'used':>5} {'again':>5}"
    "  left  seconds  verdict"
)


class Done(NamedTuple):
    """A run that is over."""

    plan: Plan
    codes: list[int]
    items: Items
    restarts: int
    left: Left
    seconds: float
    wrong: list[str]

    def __str__(self) -> str:
        made, items = self.plan, self.items
        killed = ", ".join(map(str, made.kills))
        codes = " ".join(map(str, self.codes))
        left_over = "none" if self.left == NOTHING else "some"
        return (
            f"{made.seed:>4}  {made.kind:<9} {made.trainer:<8} {killed:<34} {codes:<6}"
            f" {self.restarts:>8} {items.made:>5} {items.taken:>5} {items.second:>6}"
            f" {items.used:>5} {items.again:>5}  {left_over:<4}  {self.seconds:>7.1f}"
            f"  {'; '.join(self.wrong) or 'ok'}"
        )


def perform(made: Plan, hosts: Hosts, observer: Observer, folder: Path) -> Done:
    """Carry a plan out."""
    began = time.monotonic()
    run = JobOnHosts(hosts, made.kind, folder, ITERATIONS)
    codes: list[int] = []
    wrong: list[str] = []
    restarts = 0
    driver = run.start(*made.placement)
    try:
        driver.until(lambda: run.rows, "the first iteration")
        wrong += misplaced(made, hosts)
        for kill in made.kills:
            carry_out(kill, run, driver, hosts)
            if kill.name not in ("Actor[0]", made.trainer):
                continue
            codes.append(driver.wait())
            wrong += judge_failure(made, kill, codes[-1], driver)
            restarts += sum(run.summary.get("restarts", {}).values())
            actor = made.trainer if made.trainer in hosts else HEAD
            driver = run.start(*settings({"actor": f"{actor}:3"}), resume=True)
        codes.append(driver.wait())
        restarts += sum(run.summary.get("restarts", {}).values())
        if codes[-1] != 0:
            wrong.append(driver.last_line)
        wrong += run.check() + run.check_trace(time.monotonic() - began)
        items = run.items()
        if items.used != ITERATIONS * ITEMS[made.kind]:
            wrong.append(f"{items.used} items were used")
        if not made.fatal and not items.made >= items.taken == items.used + items.second:
            wrong.append("items were lost")
        found = what_is_left(hosts, observer)
        if found != NOTHING:
            wrong.append(f"left: {found}, {what_it_is(hosts)}")
    finally:
        driver.end()
    return Done(made, codes, items, restarts, found, time.monotonic() - began, wrong)


def carry_out(kill: Kill, run: JobOnHosts, driver: Driver, hosts: Hosts) -> None:
    """Wait for the moment, and kill."""
    driver.until(lambda: run.rows >= kill.after, f"{kill.after} iterations")
    time.sleep(kill.moment)
    if kill.what == "host":
        if kill.name in hosts:
            hosts.kill(kill.name)
        return
    driver.until(lambda: hosts.find_worker(kill.name), f"{kill.name} runs")
    pid = hosts.find_worker(kill.name)
    if pid is not None:
        os.kill(pid, signal.SIGKILL)


def misplaced(made: Plan, hosts: Hosts) -> list[str]:
    """Workers that are not where they were asked for."""
    found = {name: host for host, mine in hosts.workers().items() for name in mine}
    return [
        f"{name} is on {found.get(name)}, not on {host}"
        for name, host in made.expected().items()
        if found.get(name) != host
    ]


def judge_failure(made: Plan, kill: Kill, code: int, driver: Driver) -> list[str]:
    """What is wrong with the end of a run whose actor was killed."""
    errors = [line for line in driver.said.splitlines() if line.startswith("error:")]
    cause = "host was lost" if kill.what == "host" else "killed"
    wrong = []
    if code != 1:
        wrong.append(f"exit code {code}")
    if len(errors) != 1 or not all(
        part in errors[0] for part in ("Actor[0]", f"on {made.trainer}", cause)
    ):
        wrong.append(f"errors {errors}")
    if "Traceback" in driver.said:
        wrong.append("a traceback")
    return wrong


def perform_all(seeds: range, keep: Path | None) -> int:
    """All runs, one after the other; the number of those in which something was wrong."""
    bad = 0
    totals: list[Done] = []
    with three_hosts() as hosts, Observer(hosts) as observer:
        print(HEADER, flush=True)
        for seed in seeds:
            for name in NAMES:
                if name not in hosts:
                    hosts.start(name)
            observer.until_alive(*NAMES)
            done = perform(plan(seed), hosts, observer, (keep or hosts.folder) / f"seed-{seed}")
            totals.append(done)
            print(done, flush=True)
            if done.wrong:
                bad += 1
                print(f"  again: python -m tests.jobs.on_hosts.kills --runs 1 --seed {seed}")
    print(describe(totals), flush=True)
    return bad


def describe(runs: list[Done]) -> str:
    """All runs in two lines."""
    kills = [kill for done in runs for kill in done.plan.kills]
    hosts = sum(kill.what == "host" for kill in kills)
    items = [done.items for done in runs]
    fatal = sum(done.plan.fatal for done in runs)
    return (
        f"{len(runs)} runs in {sum(done.seconds for done in runs):.0f} s: {len(kills) - hosts} "
        f"workers and {hosts} hosts killed, {sum(done.restarts for done in runs)} restarts, "
        f"{fatal} runs resumed; {sum(not done.wrong for done in runs)} ok\n"
        f"items: {sum(one.made for one in items)} made, {sum(one.taken for one in items)} taken, "
        f"{sum(one.used for one in items)} different ones used, "
        f"{sum(one.again for one in items)} again after a resume, "
        f"{sum(one.second for one in items)} second ones left out"
    )


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, prog="python -m tests.jobs.on_hosts.kills"
    )
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for what the runs leave; not below /tmp")
    given = parser.parse_args()
    if given.keep:
        given.keep.mkdir(parents=True, exist_ok=True)
    return 1 if perform_all(range(given.seed, given.seed + given.runs), given.keep) else 0


if __name__ == "__main__":
    sys.exit(main())
