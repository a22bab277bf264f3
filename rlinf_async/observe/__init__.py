"""What a run shows while it goes on, and the files that it leaves.

::

    run_folder      where all of it is kept             files           written whole or not at all
    run_lock        which process keeps it              status          the same seen by another one
    metrics         rows of numbers: CSV and sinks      trace           spans of workers, in a file
    progress        the live view                       pictures        timeline, learning curve
    summary         the result of the run               video           the policy in its env

Light names are here; what draws is imported from its own module, because workers trace and never
draw: ``from rlinf_async.observe.pictures import draw_timeline``.
"""

from rlinf_async.observe.files import MetricsError, ObserveError, RunFolderError, VideoError
from rlinf_async.observe.metrics import MetricsSink, MetricsWriter
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.observe.summary import (
    EmbodiedSummary,
    LanguageSummary,
    Staleness,
    Summary,
    last_line,
    read_summary,
    write_summary,
)
from rlinf_async.observe.trace import (
    WAIT,
    Span,
    SpanRecorder,
    is_waiting,
    read_perfetto,
    write_perfetto,
)

__all__ = [
    "WAIT",
    "EmbodiedSummary",
    "LanguageSummary",
    "MetricsError",
    "MetricsSink",
    "MetricsWriter",
    "ObserveError",
    "RunFolder",
    "RunFolderError",
    "Span",
    "SpanRecorder",
    "Staleness",
    "Summary",
    "VideoError",
    "is_waiting",
    "last_line",
    "read_perfetto",
    "read_summary",
    "write_perfetto",
    "write_summary",
]
