"""A run inside its folder, whatever kind it is of: opened, carried out, drawn, or left behind.

::

    folder --build--> run --main--> summary --draw--> pictures, said in one line
                           |
                           +--failure--> the summary and the timeline of what there is; raised
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from rlinf_async.config import UsageError, to_toml
from rlinf_async.observe.errors import ObserveError
from rlinf_async.observe.perfetto import read_perfetto
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.observe.summary import Summary, last_line, write_summary
from rlinf_async.observe.timeline import draw_timeline
from rlinf_async.runtime.loop import run

S = TypeVar("S", bound=Summary)
S_co = TypeVar("S_co", bound=Summary, covariant=True)

Draw = Callable[[], object]


class Run(Protocol[S_co]):
    """One run, as far as its folder is concerned."""

    @property
    def title(self) -> str:
        """Of its pictures."""
        ...

    @property
    def left_out(self) -> Mapping[str, int]:
        """Spans that the trace does not have, by worker."""
        ...

    async def main(self) -> S_co:
        """The whole run, from the first worker to the last."""
        ...

    def failed_summary(self, error: BaseException) -> S_co:
        """What there is of a run that did not end by itself."""
        ...

    def drawings(self) -> dict[str, Draw]:
        """The pictures of a run that ended, beside the timeline, by name."""
        ...


def run_in_folder(
    name: str,
    config: msgspec.Struct,
    out: Path | None,
    *,
    resume: bool,
    build: Callable[[RunFolder], Run[S]],
) -> S:
    """Carry out a run, and leave everything in its folder.

    Args:
        name: of the run: the folder is called after it where ``out`` is left out.
        config: as the user gave it: a copy lies in the folder.
        out: the run folder.
        resume: go on with what is there.
        build: makes the run; what it raises is the user's to mend.

    Raises:
        UsageError: the folder cannot be used, or what is to be resumed cannot be.
    """
    path = out or Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        folder = RunFolder.create(path, config_text=to_toml(config), resume=resume)
    except ObserveError as error:
        raise UsageError(str(error)) from error
    with folder:
        for note in folder.notes:
            print(note, file=sys.stderr)
        training = _built(build, folder)
        summary = _carry_out(training, folder)
        write_summary(folder.summary, summary)  # now: the pictures take seconds
        if _draw(training, folder, summary):
            write_summary(folder.summary, summary)
        print(last_line(folder, summary), flush=True)
    return summary


def _built(build: Callable[[RunFolder], Run[S]], folder: RunFolder) -> Run[S]:
    """The run; one whose input is wrong leaves no folder that stands in the way of the next try."""
    try:
        return build(folder)
    except ObserveError as error:  # what is to be resumed cannot be
        raise UsageError(str(error)) from error
    except UsageError:
        folder.discard()
        raise


def _carry_out(training: Run[S], folder: RunFolder) -> S:
    try:
        return run(training.main())
    except BaseException as error:
        _leave_what_there_is(training, folder, error)
        raise


def _draw(training: Run[S], folder: RunFolder, summary: Summary) -> bool:
    """Draw all pictures; problems are printed and noted in the summary. Whether there were any.

    A picture that cannot be made does not undo the training.
    """
    drawings = training.drawings() | {"timeline": lambda: _draw_busy(training, folder)}
    for name, draw in drawings.items():
        try:
            draw()
        except (ObserveError, UsageError) as error:
            summary.extra[name] = f"not made: {error}"
            print(f"the {name} was not made: {error}", file=sys.stderr)
    return bool(summary.extra)


def _draw_busy(training: Run[S], folder: RunFolder) -> None:
    """Draw who was busy when, from the trace; also of a run that failed."""
    draw_timeline(
        read_perfetto(folder.trace),
        folder.timeline,
        title=training.title,
        left_out=training.left_out,
    )


def _leave_what_there_is(training: Run[S], folder: RunFolder, cause: BaseException) -> None:
    """Write summary and timeline of a run that failed; on a full disk its own error is still what
    is raised."""
    try:
        write_summary(folder.summary, training.failed_summary(cause))
    except ObserveError as error:
        print(f"the summary was not written: {error}", file=sys.stderr)
    try:
        if folder.trace.exists():
            _draw_busy(training, folder)
    except ObserveError as error:
        print(f"the timeline was not made: {error}", file=sys.stderr)
