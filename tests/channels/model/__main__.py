"""``python -m tests.channels.model --transport unix --count 1000 --seed 0 [--shrink]``

Runs the programs of as many seeds, and prints what does not hold of any of them, with the command
that runs it again. ``--shrink`` prints the smallest program that fails in the same way, as a test.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator

from tests.channels.model.generate import generate
from tests.channels.model.processes import end_workers
from tests.channels.model.program import Program, as_test, operations
from tests.channels.model.runners import (
    PATIENCE,
    TRANSPORTS,
    Result,
    fails_so,
    kind_of,
    run,
)
from tests.channels.model.shrink import shrink

SHOWN = 3
"""Violations of one program."""
EVERY = 10.0
"""Seconds between two lines that say how far it is."""


class Totals:
    """What came of all of them."""

    def __init__(self) -> None:
        self.programs = self.operations = self.items = 0
        self.had: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.bad: list[int] = []
        self._begun = self._said = time.monotonic()

    def add(self, seed: int, program: Program, result: Result) -> None:
        self.programs += 1
        self.had.update(features(program))
        self.operations += result.operations
        self.items += result.items
        if result.violations:
            self.bad.append(seed)
            self.failed[kind_of(result.violations[0])] += 1
        if time.monotonic() - self._said > EVERY:
            self._said = time.monotonic()
            print(self, flush=True)

    def __str__(self) -> str:
        kinds = counted(self.failed)
        return (
            f"{self.programs} programs ({counted(self.had)}), "
            f"{self.operations} operations, {self.items} items: "
            f"{len(self.bad)} broken{f' ({kinds})' if kinds else ''}; "
            f"{time.monotonic() - self._begun:.0f} s"
        )


def features(program: Program) -> Iterator[str]:
    """What a program has that not every one has."""
    yield program.payload
    for name, has in {
        "killed": program.kills, "cut": program.cuts, "witness": program.witness,
        "max_weight": program.max_weight is not None,
        "cancels": any(
            op.cancel is not None or op.cancel_after is not None for _, op in operations(program)
        ),
    }.items():  # fmt: skip
        if has:
            yield name


def counted(found: Counter[str]) -> str:
    """Counts of these, the highest first."""
    return ", ".join(f"{count} {name}" for name, count in found.most_common())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.channels.model")
    parser.add_argument("--transport", choices=TRANSPORTS, default="local")
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--shrink", action="store_true", help="of each kind, the first that fails")
    parser.add_argument("--shrink-seconds", type=float, default=60.0)
    parser.add_argument("--patience", type=float, default=PATIENCE, help="seconds")
    given = parser.parse_args()
    totals, shrunk = Totals(), set[str]()
    for seed in range(given.seed, given.seed + given.count):
        program = generate(seed, given.transport)
        result = run(program, given.transport, patience=given.patience)
        totals.add(seed, program, result)
        if not result.violations:
            continue
        print(f"seed {seed}: " + "\n  ".join(result.violations[:SHOWN]))
        again = f"--transport {given.transport} --seed {seed}"
        print(f"  again: python -m tests.channels.model {again}", flush=True)
        kind = kind_of(result.violations[0])
        if given.shrink and kind not in shrunk:
            shrunk.add(kind)
            patience = min(given.patience, 0.5)
            fails = fails_so(given.transport, kind, patience=patience, tries=3)
            smallest = shrink(program, fails, seconds=given.shrink_seconds)
            said = run(smallest, given.transport, patience=patience).violations
            print(as_test(smallest, given.transport, "\n".join(said)), flush=True)
    end_workers()
    print(totals)
    print(f"broken: {' '.join(map(str, totals.bad)) or 'none'}")
    return 1 if totals.bad else 0


if __name__ == "__main__":
    sys.exit(main())
