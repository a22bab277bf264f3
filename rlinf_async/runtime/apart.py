"""`apart`: a function in a process of its own, which may hang, crash or exit there.

::

    this process                        a worker's process
    apart(function, ...)  ---pickle-->  function(...)
    its result, or what it raised  <--- as plain data, of the type that is asked for
    `WorkerDied`                   <-x- it has ended

It is a cluster of one worker: so the process and whatever it starts end with the call, what it
prints is read, and it is killed where it hangs in a call of an environment, see
`rlinf_async.workers.foreign_calls`.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from rlinf_async.config import ConfigError, UsageError
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.signals import run
from rlinf_async.workers.base import Worker, WorkerDied

T = TypeVar("T")
Function = Callable[..., Any]

LAST_LINES: Final = 6
"""last lines shown of what a dead process printed, or of its stack"""
_PREFIX: Final = re.compile(r"^[0-9:]+ [^:]*: ", re.MULTILINE)
"""time and worker, of a line in a file"""
_STACK: Final = re.compile(r"^(?:Current thread|Thread) 0x.*$", re.MULTILINE)
_IN_COMPUTE_THREAD: Final = "concurrent/futures/thread.py"


class Raised(msgspec.Struct, frozen=True):
    """Error that the function raised, of a class that its caller knows."""

    names: list[str]
    """names of the error's class and of its base classes"""
    text: str
    path: tuple[str, ...] = ()
    """path of a `ConfigError` in the configuration"""


class FunctionEnd(msgspec.Struct, frozen=True):
    """Result or error of the function."""

    result: bytes = b""
    """the function's result, as MessagePack"""
    raised: Raised | None = None


class Apart(Worker):
    """Calls one function."""

    def __init__(
        self,
        function: Function,
        args: tuple[Any, ...],
        known: Sequence[str],
        imports: Sequence[str] = (),
    ) -> None:
        self._function, self._args, self._known = function, args, known

    @classmethod
    def slow_imports(cls, arguments: Mapping[str, Any]) -> Sequence[str]:
        """Return the modules that the caller has named."""
        imports: Sequence[str] = arguments["imports"]
        return imports

    async def run(self) -> FunctionEnd:
        """Call it."""
        return await self.compute(self._call)

    def _call(self) -> FunctionEnd:
        try:
            return FunctionEnd(msgspec.msgpack.encode(self._function(*self._args)))
        except Exception as error:
            names = [one.__name__ for one in type(error).__mro__]
            if not set(names) & set(self._known):
                raise
            if isinstance(error, ConfigError):
                return FunctionEnd(raised=Raised(names, error.problem, error.path))
            return FunctionEnd(raised=Raised(names, str(error)))


def apart(
    function: Function,
    *args: Any,
    returns: type[T],
    name: str,
    raises: Sequence[type[Exception]] = (),
    imports: Sequence[str] = (),
    quiet: bool = False,
    python: str = "",
    env_vars: dict[str, str] | None = None,
) -> T:
    """Call a function in a process of its own, and wait for it.

    Args:
        function: function at the top level of a module.
        args: arguments of the function, which are pickled.
        returns: type of its result, plain data.
        name: name of the process.
        raises: errors that are raised here as they are, besides `UsageError`; each takes one text.
        imports: modules that it needs, see `Worker.slow_imports`.
        quiet: whether what it prints is left out, and shown only where the process dies.
        python: its interpreter; by default that of this process.
        env_vars: environment variables that it gets beside this process's.

    Raises:
        WorkerDied: the process has ended, or was killed because it hung.
        WorkerError: the function raised something else.
        BuildError: the arguments cannot be pickled.
    """
    known = [ConfigError, UsageError, *raises]
    arguments = (function, args, [one.__name__ for one in known], imports)
    runtime_env = {"py_executable": python} if python else None
    process = {"name": name, "runtime_env": runtime_env, "env_vars": env_vars}
    calling = partial(_called, arguments, process)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log") if quiet else None
        try:
            ended = _run(partial(calling, log))
        except WorkerDied as death:
            if log is not None and log.exists():
                death.add_note(_last_of(log.read_text(errors="replace")))
            raise
    if ended.raised is None:
        return msgspec.msgpack.decode(ended.result, type=returns)
    raise _error(ended.raised, known)


def _last_of(printed: str) -> str:
    """The stack that a process was in, where it printed that when it died; else its last lines."""
    text = _PREFIX.sub("", printed)
    stacks = [one for one in _STACK.split(text)[1:] if _IN_COMPUTE_THREAD in one]
    if not stacks:
        return "\n".join(["it printed last:", *text.splitlines()[-LAST_LINES:]])
    frames = [line for line in stacks[0].splitlines() if line.startswith("  File ")]
    return "\n".join(["it was in (most recent call first):", *frames[:LAST_LINES]])


def _error(raised: Raised, known: Sequence[type[Exception]]) -> Exception:
    by_name = {one.__name__: one for one in known}
    found = next(by_name[name] for name in raised.names if name in by_name)
    if found is ConfigError:
        return ConfigError(raised.text, path=raised.path)
    return found(raised.text)


def _run(main: Callable[[], Any]) -> FunctionEnd:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        ended: FunctionEnd = run(main())
        return ended
    with ThreadPoolExecutor(1) as thread:  # in a notebook
        return thread.submit(lambda: _run(main)).result()


async def _called(
    arguments: tuple[Any, ...], process: dict[str, Any], log: Path | None
) -> FunctionEnd:
    async with Cluster.process(deadlock_after=None, log=log) as cluster:
        one = await cluster.launch(Apart, *arguments, **process)
        return (await one.call(Apart.run))[0]
