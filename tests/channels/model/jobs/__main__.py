"""``python -m tests.channels.model.jobs --backend process --count 100 --seed 0 --beside 4``

Runs the programs of as many seeds, and prints what they had in them and what does not hold.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat

from tests.channels.model.jobs import RUNS, Program, features, generate, judge, reference


def judge_all(seeds: Sequence[int], backend: str, beside: int) -> Iterator[list[str]]:
    """Violations of each program, so many of which are run at a time, in processes of their own."""
    if beside == 1:
        yield from (judge(seed, backend) for seed in seeds)
        return
    with ProcessPoolExecutor(beside, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(judge, seeds, repeat(backend))


class Totals:
    """What came of all programs."""

    def __init__(self) -> None:
        self.programs = self.operations = self.items = 0
        self.had: Counter[str] = Counter()
        self.bad: list[int] = []

    def add(self, program: Program, found: list[str]) -> None:
        self.programs += 1
        self.operations += sum(map(len, program.workers))
        self.items += sum(
            not what.endswith("end") for seen in reference(program)[1] for what in seen
        )
        self.had.update(features(program))
        if found:
            self.bad.append(program.seed)
            print(f"seed {program.seed}: " + "\n  ".join(found), flush=True)

    def __str__(self) -> str:
        had = ", ".join(f"{count} {name}" for name, count in self.had.most_common())
        return (
            f"{self.programs} programs ({had}), {self.operations} operations, {self.items} items: "
            f"{len(self.bad)} broken"
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.channels.model.jobs")
    parser.add_argument("--backend", choices=RUNS, default="local")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--beside", type=int, default=1, help="programs that run at a time")
    given = parser.parse_args()
    totals, begun = Totals(), time.monotonic()
    seeds = range(given.seed, given.seed + given.count)
    for seed, found in zip(seeds, judge_all(seeds, given.backend, given.beside), strict=True):
        totals.add(generate(seed, processes=given.backend == "process"), found)
        if not totals.programs % 100:
            print(f"{totals}; {time.monotonic() - begun:.0f} s", flush=True)
    print(f"{totals}; {time.monotonic() - begun:.0f} s")
    print(f"broken: {' '.join(map(str, totals.bad)) or 'none'}")
    return 1 if totals.bad else 0


if __name__ == "__main__":
    sys.exit(main())
