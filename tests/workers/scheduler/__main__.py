"""``python -m tests.workers.scheduler --count 1000 --seed 0``

Runs the programs of as many seeds, and prints those of which something does not hold; each is
replayed by ``--seed N --count 1``.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time

from tests.workers.scheduler.explore import try_seed


def main() -> int:
    """Run them; 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.workers.scheduler")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    logging.disable()
    began, bad = time.monotonic(), []
    for seed in range(asked.seed, asked.seed + asked.count):
        try:
            try_seed(seed)
        except Exception as error:
            bad.append(seed)
            print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
            print(f"  again: python -m tests.workers.scheduler --seed {seed} --count 1")
    print(f"{asked.count} runs, {len(bad)} broken; {time.monotonic() - began:.0f} s")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
