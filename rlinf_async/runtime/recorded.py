"""What a recording holds of workers: each life of a rank as it was launched, each call as it began
and ended. See `rlinf_async.replaying`, which plays them again.

An argument that a recording cannot hold, such as an open file, is no error of the run: the event
says which, and why, and a replay of that worker is refused with this reason.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.wire.codec import encode
from rlinf_async.recording.events import Called, Event, Launched, Returned
from rlinf_async.recording.values import END_KINDS, NotPlain, path_of, plain

if TYPE_CHECKING:
    from rlinf_async.runtime.supervise import WorkerSpec


class Note(Protocol):
    """Appends an event and its bodies to a recording."""

    def __call__(self, event: Event, /, *bodies: Encoded) -> None: ...


MOST_BYTES: Final = 256 * 1024 * 1024
"""size from which on arguments, or a result, are left out of a recording"""
THREADS: Final = "OMP_NUM_THREADS"
KEPT_VARIABLES: Final = (
    THREADS, "CUBLAS_WORKSPACE_CONFIG", "MKL_NUM_THREADS", "NVIDIA_TF32_OVERRIDE", "PYTHONHASHSEED",
)  # fmt: skip
"""variables of the environment that change what is computed"""
SECRET: Final = re.compile("key|token|secret|password|credential", re.IGNORECASE)
"""a part of the names of variables that are not recorded"""
NOTHING: Final = Encoded(b"\xc0")


class CallsRecorder:
    """Records launches and calls of the workers of one cluster.

    Args:
        note: appends to the recording.
        folder: of the recording, ``RUN/recording/1``.
    """

    def __init__(self, note: Note, folder: Path) -> None:
        self._note = note
        self._folder = str(folder.absolute().parent.parent)
        """the run's folder, as workers know it"""
        self._numbers = count(1)

    def launched(self, spec: WorkerSpec) -> None:
        """A life of a rank begins."""
        info = spec.info
        details: dict[str, Any] = {
            "cwd": os.getcwd(),
            "folder": self._folder,
            "python": platform.python_version(),
            "devices": [str(one) for one in info.devices],
            "collective": info.collective or "",
            "threads": _threads(spec),
            "environment": _environment(spec),
        }
        try:
            cls = path_of(spec.cls)
        except NotPlain as error:
            cls, details["unrecorded"] = spec.cls.__qualname__, str(error)
        body = _body([spec.args, spec.kwargs], "its arguments", details)
        event = Launched(
            worker=info.name,
            cls=cls,
            group=info.group,
            rank=info.rank,
            world=info.world_size,
            incarnation=info.incarnation,
            details=details,
        )
        self._note(event, body)

    def called(self, spec: WorkerSpec, method: str, arguments: Mapping[str, Any]) -> int:
        """A method is called in this life; the number of the call, for `returned`."""
        number = next(self._numbers)
        details: dict[str, Any] = {}
        body = _body(dict(arguments), "the arguments", details)
        event = Called(
            worker=spec.info.name,
            method=method,
            call=number,
            incarnation=spec.info.incarnation,
            ends=_ends(arguments),
            details=details,
        )
        self._note(event, body)
        return number

    def returned(
        self, spec: WorkerSpec, call: int, value: Any, error: BaseException | None
    ) -> None:
        """A call has ended."""
        details: dict[str, Any] = {}
        body = NOTHING if error is not None else _body(value, "the result", details)
        text = "" if error is None else text_of_error(error)
        event = Returned(
            worker=spec.info.name,
            call=call,
            incarnation=spec.info.incarnation,
            error=text,
            details=details,
        )
        self._note(event, body)


def text_of_error(error: BaseException) -> str:
    """``Type: message`` and the traceback."""
    failure = getattr(error, "failure", None)
    if failure is None:
        return f"{type(error).__name__}: {error}"
    kind = type(error).__name__ if failure.error_type == "" else failure.error_type
    died = type(error).__name__ in ("WorkerDied", "WorkerUnresponsive")
    name = type(error).__name__ if died else kind
    return f"{name}: {failure.message}\n\n{failure.traceback}"


def _body(value: Any, what: str, details: dict[str, Any]) -> Encoded:
    try:
        found = encode(plain(value, what))
    except (NotPlain, TypeError, ValueError) as error:
        details["unrecorded"] = str(error)
        return NOTHING
    if found.nbytes > MOST_BYTES:
        details["unrecorded"] = f"{what} has {found.nbytes:,} bytes, more than {MOST_BYTES:,}"
        return NOTHING
    return found


def _ends(value: Any) -> list[tuple[str, str]]:
    """Channel and kind of every end among the arguments of a call."""
    if isinstance(value, tuple(END_KINDS.values())):
        kind = next(kind for kind, cls in END_KINDS.items() if isinstance(value, cls))
        end: Any = value
        return [(end.channel_name, kind)]
    if not isinstance(value, (list, tuple, Mapping)):
        return []
    parts = value.values() if isinstance(value, Mapping) else value
    return [end for part in parts for end in _ends(part)]


def _threads(spec: WorkerSpec) -> int:
    """Threads of torch in the rank's process."""
    given = spec.env_vars.get(THREADS) or os.environ.get(THREADS, "")
    if given.isdigit():
        return int(given)
    cores = {one.index for one in spec.info.devices if one.kind == "cpu"}
    return len(cores) or len(os.sched_getaffinity(0))


def _environment(spec: WorkerSpec) -> dict[str, str]:
    """Variables of the rank's process that change what is computed, and its own, but for those that
    look like secrets."""
    inherited = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    own = {name: value for name, value in spec.env_vars.items() if not SECRET.search(name)}
    return {**inherited, **own}
