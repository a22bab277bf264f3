"""A run in its folder, of whatever job: opened, carried out, drawn, and what is left of one that
did not come to its end.

::

    folder --build--> Run --main--> summary --draw--> pictures --> one line of results
                       |
                       +--failure--> summary, trace and pictures of what there is; the error raised

A job supplies a `Run`: its dataflow, its summary, its pictures. All else is here: the cluster, the
live view, the trace.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from rlinf_async.config import UsageError, to_toml
from rlinf_async.observe.bottleneck import analyse
from rlinf_async.observe.files import ObserveError
from rlinf_async.observe.model_card import write_card
from rlinf_async.observe.pictures import draw_timeline
from rlinf_async.observe.progress import ProgressView
from rlinf_async.observe.run_folder import RUNS, RunFolder
from rlinf_async.observe.sinks.config import ObserveConfig
from rlinf_async.observe.sinks.opened import OUTCOMES, OpenSinks
from rlinf_async.observe.sinks.part import SinkRun, plain_tables
from rlinf_async.observe.summary import Detail, Summary, last_line, write_summary
from rlinf_async.observe.trace import read_perfetto
from rlinf_async.observe.waits import Facts
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.jobs.checkpoints import Stopped, abort_on_lost_items
from rlinf_async.runtime.jobs.config import HostConfig, Reads, check_inputs, check_resumed
from rlinf_async.runtime.jobs.swapping import (
    SwappableRun,
    SwappingJob,
    Swaps,
    with_swaps,
)
from rlinf_async.runtime.jobs.view import Headline, LiveView
from rlinf_async.runtime.jobs.waits import TellsFacts
from rlinf_async.runtime.recording import NoSuchChannel, RecordingConfig, summary_of
from rlinf_async.runtime.signals import Terminated, run, run_signals

if TYPE_CHECKING:
    from rlinf_async.recording.recorder import Recorder

S = TypeVar("S", bound=Summary)
S_co = TypeVar("S_co", bound=Summary, covariant=True)

Draw = Callable[[], object]


class TrainingClock:
    """Seconds of training, those before a resume included; they count from `start` on."""

    def __init__(self, before: float) -> None:
        self._time = asyncio.get_running_loop().time
        self._before = before
        self.start()

    def start(self) -> None:
        """Begin to count, again."""
        self._start = self._time() - self._before

    def __call__(self) -> float:
        return self._time() - self._start


class Run(Protocol[S_co]):
    """One run of a job. Called in this order; `summary` in any case."""

    @property
    def title(self) -> str:
        """Title of its pictures."""
        ...

    @property
    def host(self) -> HostConfig:
        """Settings of the host, or hosts, on which the workers run."""
        ...

    def headline(self) -> Headline:
        """The top line of the live view, now."""
        ...

    async def main(self, cluster: Cluster, view: LiveView) -> None:
        """Launch the workers, train, evaluate, and wait for the workers to end."""
        ...

    def summary(self, stopped: Stopped | None) -> S_co:
        """Return the summary of the run; ``stopped`` says how it ended where it did not come to its
        end."""
        ...

    def drawings(self, *, ended: bool) -> dict[str, Draw]:
        """Return the run's pictures by name, in the order in which they are drawn; ``ended``: the
        run came to its end."""
        ...


def run_in_folder(
    config: Any,
    out: Path | None,
    *,
    resume: bool,
    may_differ: Sequence[str],
    build: Callable[[RunFolder], Run[S]],
    reads: Callable[[Any], Reads] = lambda _: Reads(),
    swaps: SwappingJob | None = None,
) -> S:
    """Carry out a run, and leave everything in its folder.

    Args:
        config: a Struct, as the user gave it: its ``name`` names the folder where ``out`` is left
            out, and a copy of it lies in the folder.
        out: the run folder.
        resume: go on with the run in ``out``.
        may_differ: settings that a resumed run may change, see `check_resumed`.
        build: makes the run; raises where its input is wrong.
        reads: which files the run reads: a resumed one has to read the same. See `check_inputs`.
        swaps: the job, where workers of its runs can be swapped while they go on.

    Raises:
        UsageError: the folder cannot be used, or what is to be resumed cannot be.
    """
    path = out or RUNS / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    notes: list[str] = []

    def amended(config: Any) -> Any:
        return with_swaps(config, path)[0]

    if resume and (changed := check_resumed(config, path / "config.toml", may_differ, amended)):
        notes = [f"the run goes on with other settings than before: {'; '.join(changed)}"]
    try:
        folder = RunFolder.create(path, config_text=to_toml(config), resume=resume)
    except ObserveError as error:
        raise UsageError(str(error)) from error
    with folder:
        built, inputs = _build(build, folder, lambda run: check_inputs(folder, config, reads(run)))
        for note in (*folder.notes, *notes, *inputs):
            print(note, file=sys.stderr)
        swapping = None
        if swaps is not None and isinstance(built, SwappableRun):
            swapping = Swaps(folder, config, built, swaps)
        recording = getattr(config, "recording", RecordingConfig())
        with _sinks(config, folder) as sinks:
            return _Execution(built, folder, recording, swapping, sinks).carry_out()


@contextmanager
def _sinks(config: Any, folder: RunFolder) -> Iterator[OpenSinks | None]:
    """Open the sinks of a run, and tell them how it has ended; they do not hold its loop up."""
    observe = getattr(config, "observe", None)
    if not isinstance(observe, ObserveConfig):  # a job of the user's own
        yield None
        return
    about = SinkRun(folder=str(folder.path), name=folder.path.name, config=plain_tables(config))
    try:
        sinks = OpenSinks(observe, about)
    except ObserveError as error:
        raise UsageError(str(error)) from error
    try:
        yield sinks
    except BaseException as error:
        sinks.close(OUTCOMES[Stopped.by(error).outcome])
        raise
    sinks.close("finished")


def _build(
    build: Callable[[RunFolder], Run[S]],
    folder: RunFolder,
    check: Callable[[Run[S]], list[str]],
) -> tuple[Run[S], list[str]]:
    """The run, and what a check of it has found; one that is refused leaves nothing that stands in
    the way of the next try."""
    try:
        built = build(folder)
        return built, check(built)
    except ObserveError as error:  # what is to be resumed cannot be
        folder.discard()
        raise UsageError(str(error)) from error
    except (UsageError, KeyboardInterrupt, Terminated):
        folder.discard()
        raise


class _Execution(Generic[S]):
    """A run from the first worker to the last picture."""

    def __init__(
        self,
        one: Run[S],
        folder: RunFolder,
        recording: RecordingConfig,
        swaps: Swaps | None,
        sinks: OpenSinks | None,
    ) -> None:
        self._run = one
        self._sinks = sinks
        self._folder = folder
        self._recording = recording
        self._recorder: Recorder | None = None
        self._swaps = nullcontext if swaps is None else swaps.watched
        self._replaced: Mapping[str, int] = {}
        """number of times that each worker was replaced, of those that were"""
        self._restarts = folder.restarts_before
        """restarts of each worker that had some, in earlier starts, too"""
        self._spans_left_out: Mapping[str, int] = {}
        """spans that the trace does not have, by worker"""

    def carry_out(self) -> S:
        """The whole run. A picture that cannot be made does not undo the training."""
        folder = self._folder
        run_signals().grace_seconds = self._run.host.grace_seconds
        try:
            run(self._main())
        except NoSuchChannel:  # nothing was started: the next try may have the folder
            shutil.rmtree(folder.recording, ignore_errors=True)
            folder.discard()
            raise
        except BaseException as error:
            self._report_unfinished(error)
            raise
        summary = self._summary(None)
        write_summary(folder.summary, summary)  # now: the pictures take seconds
        self._write_card(summary.extra)
        interrupt: KeyboardInterrupt | None = None
        try:
            self._draw(self._timeline | self._run.drawings(ended=True), summary.extra)
        except KeyboardInterrupt as error:
            interrupt = error
        if summary.extra:
            write_summary(folder.summary, summary)
        print(last_line(folder, summary), flush=True)
        if interrupt is not None:
            raise interrupt
        return summary

    def _write_card(self, problems: dict[str, Detail]) -> None:
        """Write the card of a model that was exported; one that cannot be made is noted."""
        if not self._folder.trained.is_dir():
            return
        try:
            write_card(self._folder.path, self._folder.trained)
        except ObserveError as error:
            problems["card"] = str(error)
            print(f"the model's card was not written: {error}", file=sys.stderr)

    async def _main(self) -> None:
        with ProgressView() as progress:
            async with self._run.host.make_cluster(self._folder.workers_log) as cluster:
                if self._recording.channels:
                    channels, limit = self._recording.channels, self._recording.nbytes
                    cluster.record_into(self._folder.recording, channels, limit)
                self._recorder = cluster.recorder
                facts = self._run.facts if isinstance(self._run, TellsFacts) else Facts
                headline = self._run.headline
                view = LiveView(self._folder, cluster, progress, headline, facts, self._sinks)
                self._spans_left_out = view.left_out
                with view, abort_on_lost_items(cluster), self._swaps():
                    failed: BaseException | None = None
                    try:
                        await self._run.main(cluster, view)
                    except BaseException as error:
                        failed = error
                        raise
                    finally:
                        self._restarts = _restarts(cluster, self._folder.restarts_before)
                        self._replaced = _replaced(cluster)
                        await _written(view, failed)

    def _summary(self, stopped: Stopped | None) -> S:
        summary = self._run.summary(stopped)
        summary.restarts = self._restarts
        if self._recorder is not None:
            summary.extra["recording"] = summary_of(self._recorder.state)
        summary.replaced = dict(self._replaced)
        with contextlib.suppress(ObserveError):  # it has trained no iteration
            summary.bottleneck = analyse(self._folder.path).text
        return summary

    def _report_unfinished(self, cause: BaseException) -> None:
        """Write the summary and draw the pictures of a run that did not come to its end; on a full
        disk the error that ended it is still the one raised."""
        try:
            write_summary(self._folder.summary, self._summary(Stopped.by(cause)))
        except ObserveError as error:
            print(f"the summary was not written: {error}", file=sys.stderr)
        timeline = self._timeline if self._folder.trace.exists() else {}
        self._draw(timeline | self._run.drawings(ended=False), {})

    def _draw(self, drawings: Mapping[str, Draw], problems: dict[str, Detail]) -> None:
        """Draw pictures; what cannot be drawn is printed, and noted in ``problems``.

        A Ctrl-C costs the picture that is being drawn and those after it.
        """
        for name, draw in drawings.items():
            try:
                draw()
            except (ObserveError, UsageError) as error:
                problems[name] = f"not made: {error}"
            except Exception as error:  # whatever it is, the training is done
                problems[name] = f"not made: {type(error).__name__}: {error}"
            except KeyboardInterrupt:
                problems[name] = "not made: interrupted"
                raise
            finally:
                if name in problems:
                    print(f"the {name} was {problems[name]}", file=sys.stderr)

    @property
    def _timeline(self) -> dict[str, Draw]:
        return {"timeline": self._draw_timeline}

    def _draw_timeline(self) -> None:
        """Draw who was busy when, from the trace."""
        draw_timeline(
            read_perfetto(self._folder.trace),
            self._folder.timeline,
            title=self._run.title,
            left_out=self._spans_left_out,
        )


async def _written(view: LiveView, failed: BaseException | None) -> None:
    """Write the trace. Workers whose channels are closed since the run failed may fail meanwhile,
    which cancels this: the first failure is the one to be raised."""
    try:
        await view.write_trace()
    except asyncio.CancelledError:
        if failed is None:
            raise
        raise failed from failed.__cause__


def _restarts(cluster: Cluster, before: Mapping[str, int]) -> dict[str, int]:
    """Restarts of each worker that had some, in this start of the run and in those before."""
    total = Counter(before)
    for group in cluster.groups.values():
        total.update({one.name: one.restarts for one in group.supervisors})
    return {name: count for name, count in total.items() if count}


def _replaced(cluster: Cluster) -> dict[str, int]:
    """Number of times that each worker was replaced, in this start of the run."""
    every = (one for group in cluster.groups.values() for one in group.supervisors)
    return {one.name: one.replaced for one in every if one.replaced}
