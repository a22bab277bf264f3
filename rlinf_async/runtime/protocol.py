"""What this process and its workers' processes say to one another, beside the channels.

::

    worker.start     -> worker   build it and run its setup
    worker.call      -> worker   run a method; the body holds the arguments, the reply's body the
    result worker.activity  -> worker   could you go on by yourself?
    worker.spans     -> worker   your spans since the last time
    worker.stop      -> worker   cancel your calls, run teardown, and go
"""

from __future__ import annotations

import msgspec

from rlinf_async.workers.errors import Failure


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A method and the names of the arguments that the body holds."""

    method: str
    names: list[str]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How it went; a result is in the body."""

    failure: Failure | None = None
