"""How much of a machine is there: on a shared one a second core may do little, for minutes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence

SECONDS = 0.25
"""for which each count goes on"""

_COUNT = """
import os, sys, time
core, seconds = int(sys.argv[1]), float(sys.argv[2])
if core >= 0:
    os.sched_setaffinity(0, {core})
print("ready", flush=True)
sys.stdin.readline()
begin, counted = time.perf_counter(), 0
while (passed := time.perf_counter() - begin) < seconds:
    counted += 1
print(counted / passed)
"""


def cores_there(cores: int) -> float | None:
    """Return the work of ``cores`` processes, each on a core of its own, at the same time, as a
    multiple of what one does alone: 2.0 where two cores are as good as that, 1.0 where the second
    adds nothing; None where it cannot be counted."""
    places = _places(cores)
    try:
        alone, together = _rate(places[-1:]), _rate(places)
    except (OSError, ValueError):
        return None
    return together / alone if alone else None


def _places(cores: int) -> list[int]:
    """The cores that a case is pinned to (`run.pinned`); -1: wherever there is room."""
    if not hasattr(os, "sched_getaffinity"):
        return [-1] * cores
    return sorted(os.sched_getaffinity(0))[-cores:]


def _rate(places: Sequence[int]) -> float:
    """Counts a second of a process on each of these cores, all together."""
    with contextlib.ExitStack() as ended:  # all of them, where one fails
        counting = [ended.enter_context(_counter(place)) for place in places]
        for one in counting:  # none counts while another still starts
            assert one.stdout
            one.stdout.readline()
        for one in counting:
            assert one.stdin
            one.stdin.write("\n")
            one.stdin.flush()
        return sum(float(one.communicate()[0]) for one in counting)


def _counter(place: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _COUNT, str(place), str(SECONDS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
