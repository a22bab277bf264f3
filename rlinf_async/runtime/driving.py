"""A run from Python: `train` starts it, and follows it through its folder.

::

    run = await train("sums.toml")             a process of its own: rlinf-async train
    async for row in run: ...                  <-- metrics.csv
    run.samples(best=5)                        <-- samples/
    summary = await run                        <-- summary.json; or the error that ended it
    await run.stop()                           SIGTERM: it ends in order, with a checkpoint

The run is a process, not a task of the caller's loop: a notebook's cell that computes, a loop of
another kind, a caller that is killed cannot hold it up or leave it half done. It ends with its
caller, in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import io
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

import msgspec

from rlinf_async.config import ConfigError, Document, UsageError, to_toml
from rlinf_async.config.load import path_of
from rlinf_async.config.registry import imported_now, names_for_workers
from rlinf_async.observe.run_folder import MARKER, RUNS, STATUS
from rlinf_async.observe.summary import EmbodiedSummary, LanguageSummary, Summary, read_summary
from rlinf_async.processes import how_it_ended

ORDER: Final = "order.json"
FAILURE: Final = "failure.json"
MODULE: Final = "rlinf_async.cli.driven"
LOOK_EVERY: Final = 0.1
"""seconds between two looks at a run"""
OUTPUT_LINES: Final = 30
"""last lines of a run's output that the error of one that failed has"""


class Order(msgspec.Struct, kw_only=True):
    """caller -> run: what to do."""

    arguments: list[str]
    """of the command line"""
    caller: int
    """process that has started it: it ends with that"""
    sys_path: list[str]
    """where the caller finds modules"""


class Failure(msgspec.Struct, kw_only=True):
    """run -> caller: the error that has ended it."""

    kind: Literal["config", "usage", "other"]
    problem: str
    path: tuple[str, ...] = ()
    origin: str = ""


class RunFailed(RuntimeError):
    """A run did not come to its end; says what its first cause was."""


async def train(
    config: msgspec.Struct | str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    overrides: Mapping[str, object] | None = None,
    progress: bool | None = None,
) -> TrainingRun:
    """Start a run, as ``rlinf-async train`` does, and return it once its folder is made.

    Args:
        config: a configuration, such as a `rlinf_async.language.LanguageConfig`, or its file.
        out: the run folder; a new one below ``runs/`` when left out.
        resume: go on with the run in ``out``.
        overrides: settings by their path: ``{"training.iterations": 20}``.
        progress: whether to show a bar; None: in a notebook.

    Raises:
        ConfigError: a setting is wrong; ``path`` names it.
        UsageError: the run cannot be started as asked: the folder holds another one.
        RunFailed: its process has ended otherwise.
    """
    if resume and out is None:
        raise UsageError("resume needs out, the folder of the run that is to go on")
    if not isinstance(config, (msgspec.Struct, str, os.PathLike)):
        raise UsageError(
            f"config is {type(config).__name__}: give a file, or a Struct such as "
            "rlinf_async.language.LanguageConfig"
        )
    if imported_now:  # each run would start another one
        raise UsageError(
            f"{imported_now[-1]!r} starts a run when it is imported, and a run imports it: put "
            "what starts it under 'if __name__ == \"__main__\":'"
        )
    folder = Path(tempfile.mkdtemp(prefix="rlinf-async-"))
    try:
        file = _written(config, folder)
        path = _new_folder(file) if out is None else _expanded(out)
        arguments = ["train", str(file), "--out", str(path), *(["--resume"] if resume else [])]
        arguments += [_option(name, value) for name, value in (overrides or {}).items()]
        run = TrainingRun(path.absolute(), folder, arguments, of_file=file.parent != folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    try:
        await run.begun()
    except BaseException:
        run.terminate()
        raise
    if in_notebook() if progress is None else progress:
        run.show_progress()
    return run


def _written(config: msgspec.Struct | str | os.PathLike[str], folder: Path) -> Path:
    """The file of a configuration."""
    if not isinstance(config, msgspec.Struct):
        return _expanded(config)
    if not getattr(config, "job", ""):
        raise UsageError(
            f"{type(config).__name__} has no field 'job' that says which job it is for: write it "
            'to a file that begins with job = "...", and give that'
        )
    file = folder / "config.toml"
    try:
        file.write_text(to_toml(config), encoding="utf-8")
    except TypeError as error:
        raise ConfigError(str(error)) from error
    return file


def _expanded(path: str | os.PathLike[str]) -> Path:
    return Path(path).expanduser()


def _new_folder(file: Path) -> Path:
    """A folder of its own for the run of a file."""
    tables = Document.read(file).tables
    name = tables.get("name") or tables.get("job") or "run"
    path = RUNS / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    others = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(one for one in itertools.chain([path], others) if not one.exists())


def _option(name: str, value: object) -> str:
    """A setting as the command line has it."""
    if not isinstance(name, str):
        raise UsageError(f"overrides: {name!r} is no setting: name it as 'training.iterations'")
    path_of(name)
    if value is None:
        text = "none"
    elif isinstance(value, str):
        text = value
    else:
        try:
            text = msgspec.json.encode(value).decode()
        except TypeError as error:
            raise ConfigError(f"overrides: {error}", path=tuple(name.split("."))) from error
    return f"--{name}={text}"


class TrainingRun:
    """A run that `train` has started.

    Iterate it for the rows of its metrics, wait for it for its summary; leave it as a context
    manager, and it is stopped if it still goes on.
    """

    def __init__(
        self, folder: Path, order: Path, arguments: Sequence[str], *, of_file: bool
    ) -> None:
        self.folder = folder
        """the run folder"""
        self.output = ""
        """what the run has printed, once it has ended"""
        self._order = order
        self._of_file = of_file
        self._starts = _starts(folder)
        self._old_metrics = _inode(folder / "metrics.csv")
        """metrics of an earlier start, which are about to be written anew"""
        self._stopped = False
        self._failure: Failure | None = None
        self._code: int | None = None
        self._shown: asyncio.Task[None] | None = None
        told = Order(arguments=[*arguments], caller=os.getpid(), sys_path=sys.path)
        (order / ORDER).write_bytes(msgspec.json.encode(told))
        with (order / "output").open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(order)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is the caller's
                env={**os.environ, **names_for_workers()},
            )

    # ---- what it is doing

    @property
    def running(self) -> bool:
        """Whether it goes on."""
        return not self._ended()

    def rows(self) -> list[dict[str, float]]:
        """The rows of its metrics so far: numbers by name, those that were measured."""
        return _Rows(self.folder / "metrics.csv", self._old_metrics).read()

    async def __aiter__(self) -> AsyncIterator[dict[str, float]]:
        """Every row of the metrics, the first one first, as they come, until the run has ended.

        Raises as `finished`.
        """
        rows, given = _Rows(self.folder / "metrics.csv", self._old_metrics), 0
        over = False
        while not over:
            over = self._ended()
            found = rows.read()
            for row in found[given:]:
                yield row
            given = len(found)
            if not over:
                await asyncio.sleep(LOOK_EVERY)
        self._result()

    def samples(
        self,
        *,
        iteration: int | None = None,
        name: str | None = None,
        failed: bool = False,
        best: int | None = None,
        worst: int | None = None,
        kind: Literal["training", "evaluation"] | None = None,
    ) -> list[dict[str, Any]]:
        """The samples that it has kept so far: see `rlinf_async.observe.samples.read_samples`."""
        from rlinf_async.observe.samples import read_samples

        return read_samples(
            self.folder,
            iteration=iteration,
            name=name,
            failed=failed,
            best=best,
            worst=worst,
            kind=kind,
        )

    # ---- its end

    async def finished(self) -> Summary:
        """Wait for the end of the run, and return its summary; ``await run`` is the same.

        Also of one that fell short of its target, or was stopped: see ``outcome``.

        Raises:
            ConfigError: what a setting names cannot be used.
            UsageError: the run cannot be carried out as asked.
            RunFailed: anything else has ended it.
        """
        await self._over()
        if self._shown is not None:
            await asyncio.wait([self._shown])
        return self._result()

    def __await__(self) -> Generator[Any, None, Summary]:
        return self.finished().__await__()

    async def stop(self) -> Summary | None:
        """End the run in order, with a checkpoint, and wait for that; None where it had not begun.

        Raises as `finished`, where it had failed already.
        """
        self.terminate()
        await self._over()
        if not (self.folder / MARKER).exists() and self._failure is None:
            return None
        return await self.finished()

    def terminate(self) -> None:
        """Let the run end in order, and do not wait for it."""
        if not self._ended() and not self._stopped:  # a second SIGTERM would kill it
            self._stopped = True
            self._process.send_signal(signal.SIGTERM)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.terminate()
        await self._over()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the run, and wait for its end, in this thread."""
        self.terminate()
        self._process.wait()
        self._ended()

    # ---- inside

    async def begun(self) -> None:
        """Wait until its folder is made; raises as `finished` where it ends before."""
        while not self._ended():
            if _starts(self.folder) > self._starts:
                return
            await asyncio.sleep(LOOK_EVERY)
        self._result()

    async def _over(self) -> None:
        """Wait until its process is over."""
        # No thread waits for it: one would keep the caller from ending, and the run ends after it.
        while True:
            if self._ended():
                return
            await asyncio.sleep(LOOK_EVERY)

    def _ended(self) -> bool:
        """Whether its process is over; takes what that has left for this one."""
        if self._code is not None:
            return True
        code = self._process.poll()
        if code is None:
            return False
        with contextlib.suppress(OSError):
            self.output = (self._order / "output").read_text(errors="replace")
        with contextlib.suppress(OSError, msgspec.DecodeError):
            content = (self._order / FAILURE).read_bytes()
            self._failure = msgspec.json.decode(content, type=Failure)
        shutil.rmtree(self._order, ignore_errors=True)
        self._code = code
        return True

    def _result(self) -> Summary:
        """The summary of a run that has ended."""
        told, code = self._failure, self._code
        assert code is not None
        if told is not None and told.kind == "config":
            origin = told.origin if self._of_file else ""
            raise ConfigError(told.problem, path=told.path, origin=origin)
        if told is not None and told.kind == "usage":
            raise UsageError(told.problem)
        left = self.folder / "summary.json"
        if left.is_file() and code >= 0:
            found = _summary(left)
            if found.outcome != "failed":
                return found
        if told is not None and code >= 0 and not self._stopped:
            raise RunFailed(f"the run in {self.folder} failed: {told.problem}{self._last_lines()}")
        if self._stopped and code >= 0:
            raise RunFailed(f"the run in {self.folder} was stopped before it had begun")
        raise RunFailed(
            f"the run in {self.folder} has ended ({how_it_ended(code)}): go on with it by "
            f"resume=True{self._last_lines()}"
        )

    def _last_lines(self) -> str:
        lines = self.output.splitlines()[-OUTPUT_LINES:]
        return "\n".join(["; its output:", *lines]) if lines else ""

    # ---- progress

    def show_progress(self) -> None:
        """Show a bar in the notebook, from now on to its end."""
        if self._shown is None:
            from rlinf_async.observe.notebook import ProgressBar

            self._shown = asyncio.create_task(self._show(ProgressBar(str(self.folder))))

    async def _show(self, bar: Any) -> None:
        from rlinf_async.observe.status import Status

        while not self._ended():
            with contextlib.suppress(OSError, msgspec.DecodeError):  # not there yet, or no longer
                content = (self.folder / STATUS).read_bytes()
                bar.update(msgspec.json.decode(content, type=Status).shown)
            await asyncio.sleep(LOOK_EVERY)
        try:
            found = self._result()
            bar.end(f"{found.outcome}: {', '.join(found.figures())}")
        except (RunFailed, UsageError) as error:
            bar.end(str(error))


class _Rows:
    """Reads the metrics of a run that goes on, of which the file is replaced when it gets further
    columns.

    Args:
        path: the file.
        old: inode of a file that is about to be replaced; None: there is none.
    """

    def __init__(self, path: Path, old: int | None) -> None:
        self._path = path
        self._old = old
        self._seen: tuple[int, int] | None = None
        self._rows: list[dict[str, float]] = []

    def read(self) -> list[dict[str, float]]:
        """All rows that are there."""
        try:
            with self._path.open("rb") as file:
                told = os.fstat(file.fileno())
                if told.st_ino == self._old or (told.st_ino, told.st_size) == self._seen:
                    return self._rows
                content = file.read()
        except OSError:
            return self._rows
        self._seen = told.st_ino, told.st_size
        whole, _, _ = content.decode(errors="replace").rpartition("\n")
        header, *rows = csv.reader(io.StringIO(whole, newline="")) if whole else [[]]
        self._rows = [
            {name: float(cell) for name, cell in zip(header, row, strict=True) if cell}
            for row in rows
            if len(row) == len(header)
        ]
        return self._rows


def _summary(path: Path) -> Summary:
    """The summary, as the kind of job has it."""
    fields = msgspec.json.decode(path.read_bytes())
    kinds: tuple[type[Summary], ...] = (EmbodiedSummary, LanguageSummary)
    for kind in kinds:
        if {one.encode_name for one in msgspec.structs.fields(kind)} <= fields.keys():
            return read_summary(path, kind)
    return read_summary(path, Summary)


def _starts(folder: Path) -> int:
    """How often the run in a folder was started."""
    try:
        marker = msgspec.json.decode((folder / MARKER).read_bytes())
        return len(marker["starts"])
    except (OSError, msgspec.DecodeError, KeyError, TypeError):
        return 0


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


def in_notebook() -> bool:
    """Whether this is a kernel that shows what is displayed."""
    shell = sys.modules.get("IPython")
    found = None if shell is None else shell.get_ipython()
    return found is not None and type(found).__name__ == "ZMQInteractiveShell"
