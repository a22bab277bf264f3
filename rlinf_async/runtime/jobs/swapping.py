"""Workers of a run that goes on are exchanged for others: ``rlinf-async swap RUN ROLE``.

The command and the process of the run meet in the run's folder::

    command                           RUN/swap/                the run, about every `PERIOD` seconds
    checks the configuration
    writes what is asked  ----------> ID.request
                                      ID.taken  <------------  takes it, by renaming it
                                                               replaces the workers of the role
                                      swaps.json, inputs.json  notes what holds now
    prints the answer    <----------  ID.answer  <-----------  answers
    removes what is left

``config.toml`` stays what the run was started with; ``swaps.json`` says what was swapped, when, and
the digests of the user's code that was loaded. What was swapped holds after ``--resume`` too,
unless the configuration of the resume has another value than the run began with.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

import msgspec

from rlinf_async.config import ConfigError, UsageError
from rlinf_async.config.convert import convert
from rlinf_async.config.registry import forget_changed_files, raised
from rlinf_async.observe.files import RunFolderError, atomic_write, explaining
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.observe.run_lock import look_at_lock
from rlinf_async.runtime.jobs.config import differences, note_code
from rlinf_async.runtime.wakers import internal
from rlinf_async.workers.base import BuildError, WorkerError

log = logging.getLogger(__name__)

PERIOD: Final = 0.25
"""seconds between two looks of a run for what is asked of it, and of the command for the answer"""
FILE: Final = "swaps.json"
FOLDER: Final = "swap"
_CODE = re.compile(r"(?P<file>[^:]+\.py):(?P<name>[\w.]+)")
C = TypeVar("C", bound=msgspec.Struct)


class RoleSwap(msgspec.Struct, frozen=True):
    """Whether the workers of a role can be swapped."""

    settings: tuple[str, ...] = ()
    """settings, or whole sections, that a swap of this role may change"""
    refused: str = ""
    """why they cannot be, and what to do instead; empty: they can"""


@runtime_checkable
class SwappingJob(Protocol):
    """A job whose workers can be swapped while it runs."""

    @property
    def swaps(self) -> Mapping[str, RoleSwap]:
        """What can be swapped, by role."""
        ...

    def check_swap(self, config: Any, role: str) -> None:
        """Raise `UsageError` where workers of this role could not be started under this
        configuration. Called in another process than the run's."""
        ...


@runtime_checkable
class SwappableRun(Protocol):
    """A run whose workers can be swapped."""

    @property
    def can_swap(self) -> bool:
        """Whether its workers have started, and run."""
        ...

    @property
    def iteration(self) -> int:
        """Number of iterations that were trained."""
        ...

    @property
    def code(self) -> Iterable[str]:
        """Further code of the user's, beside what the configuration names."""
        ...

    async def swap(self, role: str, settings: Mapping[str, Any]) -> str:
        """Replace the workers of a role by some under these settings; say in a few words which.

        Raises:
            BuildError: it cannot be done now, and nothing was changed.
            WorkerError: a new worker could not be started; the old ones go on.
        """
        ...


class Change(msgspec.Struct, frozen=True):
    """A setting that was swapped."""

    before: Any
    now: Any


class Swapped(msgspec.Struct, kw_only=True, frozen=True):
    """One entry of ``swaps.json``."""

    time: float
    """seconds since 1970, UTC"""
    iteration: int
    """number of iterations trained by then"""
    role: str
    settings: dict[str, Change]
    code: dict[str, str] = {}
    """digests of the user's code, by the name of the file, as it was loaded"""


class Asked(msgspec.Struct, kw_only=True, frozen=True):
    """What the command asks of the run."""

    role: str
    settings: dict[str, Any]
    """new values, by path"""


class Answer(msgspec.Struct, kw_only=True, frozen=True):
    """What the run says to it."""

    outcome: str
    """``swapped``; ``refused``: nothing was tried; ``failed``: the old workers go on"""
    text: str


# ---- settings


def changed(config: C, settings: Mapping[str, Any]) -> C:
    """The configuration with other values of settings, by their paths.

    Raises:
        ConfigError: one is not there, or not valid.
    """
    tables: Any = msgspec.to_builtins(config)
    for path, value in settings.items():
        *sections, name = path.split(".")
        table = tables
        for section in sections:
            table = table[section] if isinstance(table, dict) and section in table else None
        if not isinstance(table, dict):
            raise ConfigError("there is no such setting", path=tuple(path.split(".")))
        table[name] = value
    found: C = convert(tables, type(config), ())
    return found


def changes(before: msgspec.Struct, now: msgspec.Struct) -> dict[str, Change]:
    """The settings that differ, as plain data."""
    plain = msgspec.to_builtins
    return {path: Change(plain(old), plain(new)) for path, old, new in differences(before, now)}


def check_settings(role: str, given: Iterable[str], job: SwappingJob) -> None:
    """Raise `UsageError` for a role that cannot be swapped, or settings of others."""
    known = job.swaps.get(role)
    able = [name for name, one in job.swaps.items() if not one.refused]
    if known is None:
        raise UsageError(f"there is no role {role!r} in this job: it has {', '.join(job.swaps)}")
    if known.refused:
        raise UsageError(
            f"workers of the role {role!r} cannot be swapped: {known.refused}. Those of "
            f"{' and '.join(able)} can"
        )
    for path in given:
        if not any(path == one or path.startswith(f"{one}.") for one in known.settings):
            own = ", ".join(known.settings) or "no setting, only its code"
            raise UsageError(f"--{path} does not concern {role}: a swap of it may change {own}")


def absolute(text: str | None) -> str | None:
    """The import path of a file of this folder, for a process in another one."""
    found = None if text is None else _CODE.fullmatch(text)
    if found is None or not Path(found["file"]).is_file():
        return text
    return f"{Path(found['file']).resolve()}:{found['name']}"


# ---- what was swapped


def read_swaps(folder: Path) -> list[Swapped]:
    """What was swapped in a run, the oldest first; empty where nothing was.

    Raises:
        RunFolderError: the file cannot be read.
    """
    path = folder / FILE
    with explaining("read", path):
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return []
    try:
        return msgspec.json.decode(content, type=list[Swapped])
    except msgspec.DecodeError as error:
        raise RunFolderError(f"{path} cannot be read: {error}; remove it to do without") from error


def with_swaps(config: C, folder: Path | None) -> tuple[C, list[str]]:
    """The configuration of a run that goes on, with what was swapped in it; and a sentence for each
    setting that was, which says what holds.

    A setting that the configuration has otherwise than the run had it before the swap keeps its
    value: the user has changed it since.
    """
    first: dict[str, Change] = {}
    for swap in read_swaps(folder) if folder is not None else []:
        for path, change in swap.settings.items():
            before = first[path].before if path in first else change.before
            first[path] = Change(before, change.now)
    tables = msgspec.to_builtins(config)
    holds: dict[str, Any] = {}
    notes: list[str] = []
    for path, change in first.items():
        given = _value(tables, path)
        if given == change.before:
            holds[path] = change.now
            notes.append(f"{path} is {change.now!r}, as swapped in the run (before: {given!r})")
        elif given != change.now:
            notes.append(f"{path} is {given!r}, as given now, not {change.now!r}, as swapped")
    return changed(config, holds) if holds else config, notes


def _value(tables: Any, path: str) -> Any:
    for name in path.split("."):
        tables = tables.get(name) if isinstance(tables, dict) else None
    return tables


# ---- the command


def ask(folder: Path, asked: Asked) -> Answer | None:
    """Ask the run in a folder for a swap and wait for its answer; None where it has ended without
    one."""
    place = folder / FOLDER
    with explaining("write", place):
        place.mkdir(exist_ok=True)
    name = f"{time.time_ns()}-{os.getpid()}"
    request, answer = place / f"{name}.request", place / f"{name}.answer"
    atomic_write(request, msgspec.json.encode(asked), durable=False)
    try:
        while True:
            held = look_at_lock(folder).held  # before the answer, which is written while it is
            if answer.exists():
                return msgspec.json.decode(answer.read_bytes(), type=Answer)
            if not held:
                return None
            time.sleep(PERIOD)
    finally:
        request.unlink(missing_ok=True)
        answer.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            place.rmdir()


# ---- the run


class Swaps:
    """Carries out what is asked of a run, one swap after the other."""

    def __init__(
        self, folder: RunFolder, config: msgspec.Struct, run: SwappableRun, job: SwappingJob
    ) -> None:
        self._folder = folder
        self._place = folder.path / FOLDER
        self._config = config
        self._run = run
        self._job = job

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look for requests while the block runs."""
        for left in itertools.chain(self._place.glob("*.taken"), self._place.glob("*.answer")):
            left.unlink(missing_ok=True)  # of a start that was killed
        watching = internal(asyncio.create_task(self._watch(), name="swaps"))
        try:
            yield
        finally:
            watching.cancel()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(PERIOD)
            if not self._run.can_swap:
                continue
            with contextlib.suppress(OSError):
                for request in sorted(self._place.glob("*.request")):
                    await self._carry_out(request)

    async def _carry_out(self, request: Path) -> None:
        taken = request.with_suffix(".taken")
        os.replace(request, taken)
        answer = Answer(outcome="failed", text="the run ends")
        try:
            answer = await self._answered(taken.read_bytes())
        except Exception as error:  # of the swap, not of the run: whoever asked for it is told
            log.exception("a swap failed")
            answer = Answer(outcome="failed", text=raised(error))
        finally:
            with contextlib.suppress(RunFolderError):
                atomic_write(request.with_suffix(".answer"), msgspec.json.encode(answer))
            taken.unlink(missing_ok=True)

    async def _answered(self, content: bytes) -> Answer:
        try:
            asked = msgspec.json.decode(content, type=Asked)
            check_settings(asked.role, asked.settings, self._job)
            config = changed(self._config, asked.settings)
            return await self._swap(asked, config)
        except (msgspec.DecodeError, UsageError, BuildError) as error:
            return Answer(outcome="refused", text=str(error))
        except WorkerError as error:
            return Answer(outcome="failed", text=f"the old workers go on: {error.summary}")

    async def _swap(self, asked: Asked, config: msgspec.Struct) -> Answer:
        began = time.monotonic()
        forget_changed_files()
        made = await self._run.swap(asked.role, asked.settings)
        settings = changes(self._config, config)
        self._config = config
        text = f"{asked.role}: {made} in {time.monotonic() - began:.1f} s"
        try:
            self._note(asked.role, settings)
        except RunFolderError as error:
            return Answer(outcome="failed", text=f"{text}, but it could not be noted: {error}")
        return Answer(outcome="swapped", text=text)

    def _note(self, role: str, settings: dict[str, Change]) -> None:
        code = note_code(self._folder, self._config, self._run.code)
        entry = Swapped(
            time=time.time(),
            iteration=self._run.iteration,
            role=role,
            settings=settings,
            code=code,
        )
        every = [*read_swaps(self._folder.path), entry]
        atomic_write(self._folder.path / FILE, msgspec.json.format(msgspec.json.encode(every)))
