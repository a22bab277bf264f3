"""How much of a machine is there: on a shared one a second core may do little, for minutes."""

from __future__ import annotations

import os
import subprocess
import sys
import time

SECONDS = 0.25
"""for which each count goes on"""

_COUNT = """
import os, sys, time
core, begin, seconds = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
if core >= 0:
    os.sched_setaffinity(0, {core})
while time.time() < begin:
    pass
end, counted = begin + seconds, 0
while time.time() < end:
    counted += 1
print(counted)
"""
_STARTING = 0.2
"""seconds in which an interpreter starts"""


def cores_there(cores: int) -> float:
    """Return the work of ``cores`` processes, each on a core of its own, at the same time, as a
    multiple of what one does alone: 2.0 where two cores are as good as that, 1.0 where the second
    adds nothing."""
    places = _places(cores)
    alone = _counted(places[-1:])
    return _counted(places) / alone


def _places(cores: int) -> list[int]:
    """The cores that a case is pinned to (`run.pinned`); -1: wherever there is room."""
    if not hasattr(os, "sched_getaffinity"):
        return [-1] * cores
    return sorted(os.sched_getaffinity(0))[-cores:]


def _counted(places: list[int]) -> int:
    begin = time.time() + _STARTING
    counting = [
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _COUNT, str(place), str(begin), str(SECONDS)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for place in places
    ]
    return sum(int(one.communicate()[0]) for one in counting)
