"""``python -m tests.workers.episode --episodes 10000 --seed 0``

Runs random episodes in virtual time, 50 for each seed, and prints the seeds of which something does
not hold; each is replayed by ``--seed N --episodes 50``.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time

from rlinf_async.testing import run
from tests.workers.episode.wandering import wander

EPISODES = 50
"""of a seed"""


def main() -> int:
    """Run them; 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.workers.episode")
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    logging.disable()
    began, bad = time.monotonic(), []
    seeds = range(asked.seed, asked.seed + -(-asked.episodes // EPISODES))
    for seed in seeds:
        try:
            run(wander(seed, EPISODES), max_steps=100_000_000)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            bad.append(seed)
            print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
            print(f"  again: python -m tests.workers.episode --seed {seed} --episodes {EPISODES}")
    seconds = time.monotonic() - began
    print(f"{EPISODES * len(seeds)} episodes, {len(bad)} seeds broken; {seconds:.0f} s")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
