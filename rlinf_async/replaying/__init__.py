"""One worker of a recorded run, played again alone: the same items in the same order, without the
other workers, and a comparison with what it did then. See docs/replay.md.

::

    recording --history--> lives of one worker --script--> its host in this process
                                                     what it puts --report--> equal, or where not
"""

from rlinf_async.replaying.bundle import Bundle, bundle_run
from rlinf_async.replaying.compare import Difference
from rlinf_async.replaying.report import ReplayReport, Scores
from rlinf_async.replaying.run import replay
from rlinf_async.replaying.source import Source, opened

__all__ = [
    "Bundle",
    "Difference",
    "ReplayReport",
    "Scores",
    "Source",
    "bundle_run",
    "opened",
    "replay",
]
