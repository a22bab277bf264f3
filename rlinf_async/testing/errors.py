"""Errors of the test kit.

    AssertionError
    ├── Deadlock          every task waits and nothing is left that could wake one
    ├── Livelock          the step limit was reached: tasks run, but the work does not end
    ├── LoopBlocked       something kept a real event loop from answering
    ├── SequenceBroken    a step of a `Sequencer` was repeated or given up
    └── InvariantBroken   items lost, doubled or reordered, a bound passed, something left behind
    ExceptionGroup
    └── Unhandled         errors that reached only the loop's exception handler

The first five are findings about the code under test, so a test runner shows them as failures.
"""

from __future__ import annotations

from rlinf_async.workers.errors import Deadlock as NobodyCanGoOn


class Deadlock(NobodyCanGoOn, AssertionError):
    """Every task waits, no timer is set, and the main task has not finished.

    Also what a cluster raises on a real loop, so that one ``except`` serves both.
    """


class Livelock(AssertionError):
    """The step limit was reached before the main task finished."""


class LoopBlocked(AssertionError):
    """Something kept the event loop from answering for longer than the limit."""


class SequenceBroken(AssertionError):
    """A step of a sequence was repeated, or given up while it waited for its turn."""


class InvariantBroken(AssertionError):
    """An invariant that was watched does not hold; the message names the items."""


class Unhandled(ExceptionGroup[Exception]):
    """Errors in callbacks and in forgotten tasks, which asyncio only logs."""
