"""``python -m tests.faults.schedules --count 1000 --seed 0``: processes die, stop and are cut off.

Real processes put and take items while others are killed, stopped, and cut off at random points.
Prints what became of every item, and for each schedule that broke the command that runs it again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterable

from tests.faults.plan import plan
from tests.faults.stage import perform
from tests.faults.verdict import Verdict, judge


def run(seed: int) -> Verdict:
    """One schedule."""
    verdict = judge(perform(plan(seed)))
    verdict.broken = [f"seed {seed}: {what}" for what in verdict.broken]
    return verdict


def run_all(seeds: Iterable[int], jobs: int) -> Verdict:
    """Many, ``jobs`` at a time."""
    total = Verdict()
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for verdict in pool.imap_unordered(run, seeds):
            total.add(verdict)
            for what in verdict.broken:
                seed = what.partition(":")[0].removeprefix("seed ")
                print(
                    f"{what}\n  again: python -m tests.faults.schedules --seed {seed}", flush=True
                )
    return total


def describe(total: Verdict, seconds: float) -> str:
    """What became of every item."""
    faults = ", ".join(f"{count} {name}" for name, count in sorted(total.faults.items()))
    lines = (
        f"{total.schedules} schedules in {seconds:.0f} s; faults: {faults or 'none'}",
        f"{total.items} items: {total.put} put",
        f"  producer was told that it cannot know: {total.told}; died: {total.died_putting}",
        f"  delivered, and acknowledged where leased, exactly once: {total.once}",
        f"  seen again after plain gets, and counted as unconfirmed: {total.again}",
        f"  gone with a lease whose holder was told that it cannot know: {total.holder_told}",
        f"  gone with their channel's owner, everybody was told: {total.with_the_owner}",
        f"  gone with a producer that kept their arrays, counted: {total.with_their_producer}",
        f"  lost: {total.lost}; doubled without a report: {total.doubled}",
        f"schedules that hung: {total.hung}; broken: {len(total.broken)}",
    )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.schedules")
    parser.add_argument("--count", type=int, default=1, help="schedules")
    parser.add_argument("--seed", type=int, default=0, help="of the first")
    parser.add_argument("--repeat", type=int, default=1, help="how often each of them is run")
    parser.add_argument("--jobs", type=int, default=2, help="at a time")
    options = parser.parse_args(arguments)
    seeds = list(range(options.seed, options.seed + options.count)) * options.repeat
    started = time.monotonic()
    total = run_all(seeds, options.jobs)
    print(describe(total, time.monotonic() - started))
    return 1 if total.broken else 0


if __name__ == "__main__":
    sys.exit(main())
