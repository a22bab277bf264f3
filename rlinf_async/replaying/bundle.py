"""`bundle_run`: the part of a recording that one worker needs around a crash, in one file.

::

    bundle.json   which worker, from which event on, what ended it, the versions
    README.md     how to play it
    config.toml   of the run
    recording/1/  the events of this worker, and the items that it was given
    checkpoints/  the checkpoint that it begins from, if any
    code/         files of code that the worker, its configuration or its messages name
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import shutil
import site
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import zstandard

from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.wire.codec import Decoder
from rlinf_async.config import UsageError
from rlinf_async.recording import segments
from rlinf_async.recording.events import (
    Called,
    ChannelEnded,
    Declared,
    Delivered,
    Event,
    Launched,
    Published,
    Put,
    Replaced,
    Returned,
    Seen,
    Settled,
    TypePath,
    Withdrawn,
)
from rlinf_async.recording.values import paths_in
from rlinf_async.replaying.history import DEATHS, Life, is_of, iterations_of, lives_of
from rlinf_async.replaying.playing import ENDED_FROM_OUTSIDE, Stage
from rlinf_async.replaying.run import CHECKPOINTS, Plan
from rlinf_async.replaying.source import CODE, FOLDER, MANIFEST, Manifest, Source, opened
from rlinf_async.runtime.jobs.config import imported_beside, packages

DEFAULT_ITERATIONS: Final = 2
CRASH: Final = "crash"
SUFFIX: Final = ".tar.zst"
_NAMED: Final = re.compile(r"(?P<where>[\w./ -]+):(?P<name>[A-Za-z_][\w.]*)")
FRAME_BYTES: Final = 1 << 20


class Bundle(msgspec.Struct, frozen=True):
    """A bundle that was written."""

    path: Path
    manifest: Manifest
    events: int
    nbytes: int


def bundle_run(
    run: Path,
    *,
    only: str | None = None,
    around: str = CRASH,
    iterations: int = DEFAULT_ITERATIONS,
    start: int | None = None,
    out: Path | None = None,
) -> Bundle:
    """Write the smallest part of a recording with which one worker can be played around a crash.

    Args:
        run: the run's folder.
        only: the worker; None: the one that failed first.
        around: ``"crash"``, or the iteration with which the part ends.
        iterations: how many before that are compared.
        start: start of the run; None: the last one.
        out: a file that ends with ``.tar.zst``, or a folder; None: beside the run.

    Raises:
        UsageError: nothing was recorded, or nothing failed; ``out`` is there already.
    """
    with opened(run) as source:
        number = max(source.starts) if start is None else start
        crash = _crash(source, number) if number in source.starts else None
        if only is None:
            if crash is None:
                raise UsageError(
                    f"{run}: no worker failed in start {number} of the recording: say which is "
                    "meant, --only ROLE --around ITERATION"
                )
            only = crash[0]
        number, worker = source.worker(only, number)
        target = out or run.resolve().parent / f"{run.resolve().name}-{_file_name(worker)}{SUFFIX}"
        if target.exists():
            raise UsageError(f"{target} is there already: name another file with --out")
        making = _Making(source, number, worker, around, iterations, crash)
        with tempfile.TemporaryDirectory(prefix="rlinf-bundle-") as folder:
            made = making.write(Path(folder))
            if target.suffix == ".zst":
                _pack(Path(folder), target)
                size = target.stat().st_size
            else:
                shutil.copytree(folder, target)
                size = sum(one.stat().st_size for one in target.rglob("*") if one.is_file())
        return Bundle(target, making.manifest, made, size)


def _file_name(worker: str) -> str:
    return worker.replace("[", "").replace("]", "").lower()


def _crash(source: Source, start: int) -> tuple[str, int, str] | None:
    """The worker that failed first, by itself: its name, the number of the event, the error. Where
    none has, the one that died, or whose process was gone with the run. What the run survived, so
    that the same was called again, counts only where nothing else has failed."""
    methods: dict[int, tuple[str, str]] = {}
    failed: dict[tuple[str, str], tuple[str, int, str]] = {}
    died: dict[tuple[str, str], tuple[str, int, str]] = {}
    survived: tuple[str, int, str] | None = None
    for event in source.events(start):
        if isinstance(event, Called):
            method = methods[event.call] = event.worker, event.method
            survived = failed.pop(method, None) or died.pop(method, None) or survived
        if not isinstance(event, Returned) or not event.error:
            continue
        kind = event.error.partition(":")[0]
        found = event.worker, event.number, event.error.partition("\n")[0]
        method = methods.get(event.call, (event.worker, ""))
        if kind not in ENDED_FROM_OUTSIDE:
            failed[method] = found
        elif kind in DEATHS:
            died[method] = found
    return next(iter((*failed.values(), *died.values())), survived)


class _Making:
    """One bundle."""

    def __init__(
        self,
        source: Source,
        start: int,
        worker: str,
        around: str,
        iterations: int,
        crash: tuple[str, int, str] | None,
    ) -> None:
        self._source = source
        self._start = start
        self._worker = worker
        self._around = around
        self._iterations = iterations
        mine = crash if crash is not None and crash[0] == worker else None
        self._end = 2**63 if mine is None or around != CRASH else mine[1]
        """number of the last event that belongs to it"""
        self.manifest = Manifest(
            worker=worker,
            start=start,
            first=1,
            around=around,
            error="" if mine is None else mine[2],
            versions=_versions(),
        )

    def write(self, folder: Path) -> int:
        """Write the files of the bundle into a folder; the number of events."""
        source, start = self._source, self._start
        source.check_whole(start)
        decode = source.decoder(start)
        lives = lives_of(self._worker, lambda: source.events(start), decode)
        lives = [one for one in lives if one.launched.number <= self._end]
        stage = Stage(lambda name: source.channel(start, name), source.folder, source.code)
        try:
            cls = stage.class_of(lives[0].launched)
            plan = self._plan(lives, cls, stage)
        finally:
            stage.close()
        needs = _Needs(self._worker, plan, self._end)
        events = list(needs.of(source.events(start)))
        self._copy_checkpoint(plan, folder)
        absent = self._copy_files(plan, folder)
        self.manifest.first = plan.from_number
        self.manifest.missing = [*absent, *_copy_code(events, self._config(), folder / CODE)]
        _write_events(folder / FOLDER / "1", events)
        config = source.folder / "config.toml"
        if config.is_file():
            shutil.copy(config, folder / "config.toml")
        (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(self.manifest)))
        (folder / "README.md").write_text(_readme(self.manifest), encoding="utf-8")
        return len(events)

    def _plan(self, lives: list[Life], cls: type[Any], stage: Stage) -> Plan:
        first = self._first(lives)
        cut = self._source.cut_before(self._start)
        return Plan.of(lives, cls, first, stage, cut, smallest=True)

    def _first(self, lives: list[Life]) -> int | None:
        """The iteration with which the part begins; None where there are no iterations."""
        given = [one for life in lives for one in life.inputs if one.number <= self._end]
        known = sorted({number for one in given for number in iterations_of(one)})
        if not known:
            return None
        if self._around == CRASH:
            last = known[-1]
        elif self._around.isdigit() and known[0] <= int(self._around) <= known[-1]:
            last = int(self._around)
            later = (one.number for one in given if min(iterations_of(one), default=0) > last)
            self._end = min(self._end, min(later, default=self._end))
        else:
            raise UsageError(
                f"--around {self._around}: the recording of {self._worker} has iterations "
                f"{known[0]} to {known[-1]}; or crash"
            )
        return max(known[0], last - self._iterations + 1)

    def _config(self) -> str:
        config = self._source.folder / "config.toml"
        return config.read_text(encoding="utf-8") if config.is_file() else ""

    def _copy_checkpoint(self, plan: Plan, folder: Path) -> None:
        resume = plan.overrides.get("resume")
        if resume is not None:
            inside = Path(resume).resolve().relative_to(self._source.folder.resolve())
            shutil.copytree(resume, folder / inside)

    def _copy_files(self, plan: Plan, folder: Path) -> list[str]:
        """Copy the files of the run that launches name, such as the model, or the checkpoint that
        the worker was started from; those that lie elsewhere, and are not in the bundle."""
        absent: list[str] = []
        for index, life in enumerate(plan.lives):
            begins = index > 0 or "resume" not in plan.overrides
            absent += self._copy_named(life.launched, folder, checkpoint=begins)
        return list(dict.fromkeys(absent))

    def _copy_named(self, launched: Launched, folder: Path, *, checkpoint: bool) -> list[str]:
        absent: list[str] = []
        old = str(launched.details.get("folder", ""))
        for text in sorted(set(_strings(Decoder(Any).decode(launched.body())))):
            if not text.startswith("/") or not Path(text).is_absolute():
                continue
            inside = text.removeprefix(f"{old}/") if text.startswith(f"{old}/") else ""
            here = self._source.folder / inside if inside else Path(text)
            if inside == CHECKPOINTS or not here.exists():
                continue
            if inside.startswith(f"{CHECKPOINTS}/") and not checkpoint:
                continue
            if not inside:
                absent.append(f"{text}, which the launch names")
            elif here.is_dir():
                shutil.copytree(here, folder / inside, dirs_exist_ok=True)
            else:
                (folder / inside).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(here, folder / inside)
        return absent


class _Needs:
    """Which events, and which of their items, a plan needs.

    Args:
        worker: its name.
        plan: what is to be played.
        end: number of the last event.
    """

    def __init__(self, worker: str, plan: Plan, end: int) -> None:
        self._worker = worker
        self._end = end
        lives = plan.lives
        self._lives = {life.launched.number for life in lives}
        self._calls = {call.begun.call for life in lives for call in life.calls} | plan.also
        self._given = {one.number for life in lives for one in life.inputs if one.number <= end}
        self._items = {
            place
            for life in lives
            for one in life.inputs
            if one.number <= end
            for place in one.places
        }
        self._put = {one.number for life in lives for one in life.outputs}
        self._channels = {
            channel for life in lives for call in life.calls for channel, _ in call.begun.ends
        }

    def of(self, events: Iterable[Event]) -> Iterator[Event]:
        """The events that are needed, in order, with the items that are needed."""
        for event in events:
            late = event.number > self._end and not isinstance(event, Returned)
            kept = None if late else self._kept(event)
            if kept is not None:
                yield kept

    def _kept(self, event: Event) -> Event | None:
        match event:
            case Declared():
                return event if event.channel in self._channels else None
            case Launched():
                return event if event.number in self._lives else None
            case Called() | Returned():
                mine = event.worker == self._worker and event.call in self._calls
                return event if mine and event.number <= self._end else None
            case Put():
                return self._put_of(event)
            case Published():
                needed = (event.channel, event.version) in self._items
                own = is_of(event.sender, self._worker) and event.number in self._put
                return event if needed or own else None
            case Delivered() | Settled():
                return self._some(event)
            case Replaced() | Withdrawn():
                return event if (event.channel, event.sequence) in self._items else None
            case Seen():
                return event if event.number in self._given else None
            case ChannelEnded():
                return event if event.channel in self._channels else None
        return None

    def _put_of(self, event: Put) -> Put | None:
        """A put with the items that are needed alone; the others are empty, in their places."""
        own = is_of(event.sender, self._worker) and event.number in self._put
        count = len(event.bodies)
        needed = [own or (event.channel, event.sequence + at) in self._items for at in range(count)]
        if not any(needed):
            return None
        event.bodies = [
            body if wanted else Encoded(b"")
            for body, wanted in zip(event.bodies, needed, strict=True)
        ]
        return event

    def _some(self, event: Delivered | Settled) -> Event | None:
        kept = [one for one in event.sequences if (event.channel, one) in self._items]
        if not kept:
            return None
        event.sequences = kept
        return event


def _write_events(folder: Path, events: list[Event]) -> None:
    folder.mkdir(parents=True)
    first = events[0].number if events else 1
    header = segments.Header(
        project=importlib.metadata.version("rlinf-async") if _installed() else "0",
        run=folder.parent.parent.name,
        start=1,
        segment=1,
        wall=events[0].wall if events else 0.0,
        monotonic=events[0].monotonic if events else 0.0,
        first=first,
        channels=[one for one in events if isinstance(one, Declared)],
    )
    path = folder / "000001.rec"
    parts = segments.opening(header)
    waiting: list[Event] = []
    size = 0
    with path.open("wb") as file:
        file.write(b"".join(parts))
        for event in events:
            waiting.append(event)
            size += sum(body.nbytes for body in event.bodies or ())
            if size >= FRAME_BYTES:
                file.write(b"".join(segments.frame_of(waiting)))
                waiting, size = [], 0
        if waiting:
            file.write(b"".join(segments.frame_of(waiting)))


# ---- code


def _copy_code(events: Iterable[Event], config: str, folder: Path) -> list[str]:
    """Copy the files of code that the events and the configuration name; what is not here, or has
    no place in a bundle."""
    missing: list[str] = []
    files: dict[Path, Path] = {}
    for name in sorted(_names(events) | {found[0] for found in _NAMED.finditer(config)}):
        where = name.rpartition(":")[0].strip()
        if where.endswith(".py"):
            path = Path(where)
            if path.is_file():
                files[path.resolve()] = Path(path.name if path.is_absolute() else where)
            else:
                missing.append(f"{where}: there is no such file here")
        else:
            _add_module(where, files, missing)
    for path in imported_beside(list(files)):
        if _is_own(path):
            files.setdefault(path.resolve(), _inside(path))
    for path, inside in files.items():
        target = folder / inside
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return missing


def _names(events: Iterable[Event]) -> set[str]:
    """Import paths in arguments of launches and calls, and of the types of channels."""
    found = set[str]()
    for event in events:
        if isinstance(event, Declared):
            found |= set(_types(event.type))
        elif isinstance(event, (Launched, Called)):
            data = Decoder(Any).decode(event.body())
            found |= paths_in(data) | set(_texts(data))
            found |= set(_texts(event.details.get("environment", {})))
            if isinstance(event, Launched):
                found.add(event.cls)
    return found


def _types(path: TypePath) -> Iterator[str]:
    if isinstance(path, str):
        yield path
        return
    for one in path:
        yield from _types(one)


def _texts(data: Any) -> Iterator[str]:
    """Texts that name code, ``"file.py:name"`` or ``"module:name"``."""
    for text in _strings(data):
        yield from (found[0] for found in _NAMED.finditer(text))


def _strings(data: Any) -> Iterator[str]:
    if isinstance(data, str):
        yield data
    elif isinstance(data, Mapping):
        for one in data.values():
            yield from _strings(one)
    elif isinstance(data, (list, tuple)):
        for one in data:
            yield from _strings(one)


def _add_module(name: str, files: dict[Path, Path], missing: list[str]) -> None:
    if not re.fullmatch(r"[A-Za-z_][\w.]*", name) or name.startswith("rlinf_async"):
        return
    if name in ("__main__", "__mp_main__", "builtins"):
        return
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return
    path = Path(spec.origin)
    if _is_own(path):
        parts = name.split(".")
        for at in range(1, len(parts)):
            above = path.parents[len(parts) - 1 - at] / "__init__.py"
            if above.is_file():
                files.setdefault(above.resolve(), Path(*parts[:at], "__init__.py"))
        inside = Path(*parts, "__init__.py") if path.name == "__init__.py" else Path(*parts)
        files[path.resolve()] = inside if inside.suffix else inside.with_suffix(".py")


def _is_own(path: Path) -> bool:
    """Whether a file is neither of an installed package nor of this project."""
    known = [*site.getsitepackages(), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")]
    folders = [Path(one).resolve() for one in known]
    folders.append(Path(segments.__file__).resolve().parents[1])
    return not any(path.resolve().is_relative_to(one) for one in folders)


def _inside(path: Path) -> Path:
    """The place of a file below the folder of the code: as seen from where it is imported."""
    for folder in (Path.cwd(), *map(Path, filter(None, sys.path))):
        if path.resolve().is_relative_to(folder.resolve()):
            return path.resolve().relative_to(folder.resolve())
    return Path(path.name)


# ---- around it


def _installed() -> bool:
    try:
        importlib.metadata.version("rlinf-async")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _versions() -> dict[str, str]:
    return {"platform": platform.platform(), **packages()}


def _readme(manifest: Manifest) -> str:
    ended = f"It ended with:\n\n    {manifest.error}\n\n" if manifest.error else ""
    versions = "\n".join(f"- {name} {one}" for name, one in manifest.versions.items())
    missing = "".join(f"- {one}\n" for one in manifest.missing)
    absent = f"\nNot in this bundle:\n\n{missing}" if missing else ""
    return (
        f"# {manifest.worker}, alone\n\n"
        f"A part of the recording of a run: what {manifest.worker} was given, and what it did.\n\n"
        f"{ended}"
        "Play it again, on any machine with the same versions:\n\n"
        "    rlinf-async replay .\n\n"
        "Under a debugger, from the folder of this file:\n\n"
        f"    python -m pdb -m rlinf_async replay . --only '{manifest.worker}'\n\n"
        f"Made with:\n\n{versions}\n{absent}"
    )


def _pack(folder: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    name = target.name.removesuffix(SUFFIX)
    with (
        target.open("xb") as file,
        zstandard.ZstdCompressor(level=10).stream_writer(file) as packed,
        tarfile.open(fileobj=packed, mode="w|") as tar,
    ):
        tar.add(folder, arcname=name)
