"""Messages between a run and the process of a sink."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from rlinf_async.observe.sinks.part import Outcome, Row, SinkRun

CLOSE_SECONDS: Final = 30.0
"""seconds that a sink has when the run has ended"""
STOP_SECONDS: Final = 6.0
"""seconds that it has when the run was stopped: whoever did that waits"""
ORPHAN_SECONDS: Final = 8.0
"""seconds that it has when the process of the run is gone"""


class Opening(msgspec.Struct, tag=True):
    """The first message. Run -> process."""

    name: str
    factory: str
    """import path of what makes the `Client`"""
    kind: str
    """import path of the Struct of its settings; empty where it has none"""
    settings: Any
    run: SinkRun
    environment: dict[str, str]


class Resume(msgspec.Struct, tag=True):
    """Rows follow. Run -> process."""

    resume_at: int | None
    """last step that the run keeps of earlier starts"""


class End(msgspec.Struct, tag=True):
    """No more rows follow. Run -> process."""

    outcome: Outcome
    seconds: float
    """seconds after which the process ends, whatever its library does"""


class Opened(msgspec.Struct, tag=True):
    """The sink takes rows. Process -> run."""

    where: str
    """where they can be looked at"""


class Failed(msgspec.Struct, tag=True):
    """It did not open, or did not take rows. Process -> run, once until `Recovered`."""

    cause: str


class Recovered(msgspec.Struct, tag=True):
    """It takes rows again. Process -> run."""


class Ended(msgspec.Struct, tag=True):
    """The last message. Process -> run."""

    lost: int
    """rows that the sink did not take"""


ToChild = Opening | Resume | Row | End
ToRun = Opened | Failed | Recovered | Ended
