"""Tools to test concurrent code: virtual time, many orders of events, checks of invariants."""

from rlinf_async.deadlines import LoopWatch
from rlinf_async.testing.explore import SEED_VARIABLE, explore, replay_command, run, run_on
from rlinf_async.testing.invariants import (
    Bounds,
    ExactlyOnce,
    OrderPerKey,
    no_tasks_left,
    nothing_left_waiting,
)
from rlinf_async.testing.sequencer import Sequencer, forbid_blocking, wait_all_blocked
from rlinf_async.testing.virtual_loop import (
    Deadlock,
    InvariantBroken,
    Livelock,
    LoopBlocked,
    SequenceBroken,
    Unhandled,
    VirtualLoop,
)

__all__ = [
    "SEED_VARIABLE",
    "Bounds",
    "Deadlock",
    "ExactlyOnce",
    "InvariantBroken",
    "Livelock",
    "LoopBlocked",
    "LoopWatch",
    "OrderPerKey",
    "SequenceBroken",
    "Sequencer",
    "Unhandled",
    "VirtualLoop",
    "explore",
    "forbid_blocking",
    "no_tasks_left",
    "nothing_left_waiting",
    "replay_command",
    "run",
    "run_on",
    "wait_all_blocked",
]
