"""What this process and its workers' processes say to one another, beside the channels.

::

    to the worker      asks it to                                answer's body
    worker.start       build itself and run its setup
    worker.call        run a method; the body holds arguments    the result
    worker.ended       say when a call that was cancelled has ended
    worker.activity    say whether it could go on by itself
    worker.spans       give its spans since the last time        the spans
    worker.stop        cancel its calls, run teardown, and go
"""

from __future__ import annotations

from typing import Final

import msgspec

from rlinf_async.workers.errors import Failure

CALL: Final = "worker.call"
ENDED: Final = "worker.ended"


class Call(msgspec.Struct, array_like=True, frozen=True):
    """A method and the names of the arguments that the body holds."""

    method: str
    names: tuple[str, ...]


class Number(msgspec.Struct, array_like=True, frozen=True):
    """That of the request by which a call was made."""

    number: int


class Outcome(msgspec.Struct, array_like=True, frozen=True):
    """How it went; a result is in the body."""

    failure: Failure | None = None
