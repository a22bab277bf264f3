"""Tools that a model may call: functions with typed arguments, and what becomes of a call.

::

    @tool(seconds=5)
    async def calculate(expression: str) -> str:
        \"\"\"Evaluate an arithmetic expression.\"\"\"

    call --arguments fit--> its turn --> runs --returns--> its text
      |                                   |
      |                                   |--ToolError-----------> "error: ..."  told to the model
      |                                   `--raises, hangs, ...--> "error: ..."  told, or the
      `--do not fit, no such tool--------> "error: ..."  told           episode fails: on_failure

Every failure is counted, by tool and kind; none is a reward. An ``async`` function runs in the
worker's event loop and must not block it; any other function has a thread for each call. Nobody can
end a thread, nor a coroutine that ignores that it is cancelled: a call that goes on after its time
is left alone, and where `LEFT_ALONE` of a tool do, further calls fail at once (kind ``stuck``).

Limits are a worker's, not those of one `Tool`: tools that are made anew for each episode, of one
piece of code and under one name, have them together.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import math
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeVar, get_type_hints, overload

import msgspec

from rlinf_async.config.registry import raised
from rlinf_async.episodes.parsing import ToolCall
from rlinf_async.threads import ThreadEach

SECONDS: Final = 30.0
OUTPUT: Final = 16_384
ERROR: Final = 1_000
"""most characters that are told of an error"""
THREADS: Final = 32
"""calls at once of a function that needs threads, unless it says otherwise"""
THREAD_EACH: Final = ThreadEach("tool")
"""calls each function in a thread of its own"""
LEFT_ALONE: Final = 8
"""calls of one tool, or of a worker's environments, that may go on after their time, or their
episode's end; with so many, others fail at once"""
CANCELLED_SECONDS: Final = 1.0
"""time that a call has to end once it is cancelled"""

Failure = Literal[
    "", "unknown", "arguments", "error", "raised", "timeout", "output", "result", "died", "stuck"
]
"""
- ``unknown``: there is no such tool;
- ``arguments``: they cannot be read, or do not fit;
- ``error``: the tool says that it cannot do this (`ToolError`);
- ``raised``, ``timeout``: it raised, it took too long;
- ``output``: its text was too long, and is cut;
- ``result``: it returned what JSON cannot hold;
- ``died``: the program or server behind it has ended;
- ``stuck``: earlier calls of it never ended.
"""
OnFailure = Literal["tell", "fail"]
"""What becomes of a failure: the model is told, or the episode fails."""
TOLD: Final = frozenset({"unknown", "arguments", "error"})
"""failures that are the model's own, which it is always told"""
UNKNOWN: Final = "unknown"
"""name under which calls of tools that do not exist are counted"""

T = TypeVar("T")

_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class ToolError(Exception):
    """A tool could not do what it was asked; the text is told to the model."""


class ToolBroken(Exception):
    """What stands behind a tool cannot be used: the text says why."""

    def __init__(self, text: str, failure: Failure = "died") -> None:
        super().__init__(text)
        self.failure: Failure = failure


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a call of a tool came to."""

    call: ToolCall
    tool: str
    """name of the tool, `UNKNOWN` where there is none"""
    text: str
    """what the model is told"""
    failure: Failure = ""
    """kind of the failure; empty: none"""
    seconds: float = 0.0
    """duration of the call, including the wait for its turn"""


class Ended(NamedTuple):
    """What a function returned or raised."""

    value: Any = None
    error: BaseException | None = None

    @classmethod
    def of(cls, function: Callable[[], Any]) -> Ended:
        """Call a function; whatever it raises, SystemExit too, is how it has ended."""
        try:
            return cls(function())
        except BaseException as error:
            return cls(error=error)


class _Going:
    """A call that may go on after its time."""

    def __init__(self, call: Callable[[], Any], shared: _Shared) -> None:
        self._call = call
        self._shared = shared
        self.ended = False

    async def in_loop(self) -> Ended:
        """Call an async function."""
        try:
            return Ended(await self._call())
        except (asyncio.CancelledError, KeyboardInterrupt):
            raise
        except BaseException as error:  # also SystemExit, which must not end the worker
            return Ended(error=error)
        finally:
            self._end()

    def in_thread(self) -> Ended:
        """Call any other function."""
        try:
            return Ended.of(self._call)
        finally:
            self._end()

    def _end(self) -> None:
        self.ended = True
        self._shared.left_alone.discard(self)


class _Shared:
    """What the limits of a tool are kept by, over all tools that are this one, made again.

    Args:
        concurrent: calls at once; None: any number.
    """

    def __init__(self, concurrent: int | None) -> None:
        self._concurrent = concurrent
        self._turns = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()
        self.left_alone: set[_Going] = set()
        """calls that go on after their time"""

    def turns(self) -> asyncio.Semaphore | None:
        """Return what has a call wait for its turn in this loop; None: nothing has."""
        if self._concurrent is None:
            return None
        loop = asyncio.get_running_loop()
        if loop not in self._turns:
            self._turns[loop] = asyncio.Semaphore(self._concurrent)
        return self._turns[loop]


# As long as there is a tool of this kind, or a call that has not ended.
_SHARED: Final = weakref.WeakValueDictionary[tuple[object, str, int | None], _Shared]()


class Tool:
    """A function that a model may call.

    Args:
        function: its parameters and their annotations are the arguments; its docstring tells the
            model what it is for.
        name: what the model calls it; by default the function's.
        description: takes the place of the docstring.
        parameters: JSON schema of the arguments, which takes the place of the annotations: the
            function gets the arguments as they are.
        seconds: limit of one call.
        output: most characters of a result; more is cut, and counted as a failure.
        concurrent: calls that may run at once in one worker, of all tools of this code and name;
            None: any number, of a function that needs threads `THREADS`.
        on_failure: what becomes of a failure; None: what the run says.

    Raises:
        TypeError: a parameter has no annotation, or one that JSON cannot hold.
        ValueError: it has no description, no name that OpenAI's interface allows, or a limit that
            nothing could keep.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str = "",
        description: str = "",
        parameters: Mapping[str, Any] | None = None,
        seconds: float = SECONDS,
        output: int = OUTPUT,
        concurrent: int | None = None,
        on_failure: OnFailure | None = None,
    ) -> None:
        self.function = function
        self.name = name or getattr(function, "__name__", "")
        self.description = description or inspect.cleandoc(function.__doc__ or "")
        self.seconds = seconds
        self.output = output
        self.on_failure = on_failure
        self._check()
        self._in_loop = inspect.iscoroutinefunction(function)
        if concurrent is None and not self._in_loop:
            concurrent = THREADS
        if concurrent is not None and concurrent < 1:
            raise ValueError(f"tool {self.name!r}: concurrent is {concurrent}; at least 1")
        same = (_code_of(function), self.name, concurrent)
        self._shared = _SHARED.setdefault(same, _Shared(concurrent))
        self._arguments = None if parameters is not None else arguments_of(function, self.name)
        own = _schema_of(self._arguments) if self._arguments is not None else dict(parameters or {})
        described = {"name": self.name, "description": self.description, "parameters": own}
        self.schema: dict[str, Any] = {"type": "function", "function": described}
        """the tool as OpenAI's chat completions describe it"""

    def _check(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"tool {self.name!r}: a name has at most 64 letters, digits, _ and -: give it one "
                "with name="
            )
        if not self.description:
            raise ValueError(f"tool {self.name!r} has no docstring: the model reads what it is for")
        if not (self.seconds > 0 and math.isfinite(self.seconds)) or self.output < 1:
            raise ValueError(
                f"tool {self.name!r}: seconds is {self.seconds} and output {self.output}; both "
                "must be above 0, and finite"
            )

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself, without limits."""
        found = self.function(*args, **kwargs)
        return await found if inspect.isawaitable(found) else found

    async def run(self, call: ToolCall) -> ToolResult:
        """Carry out a call of the model; raises nothing but a cancellation."""
        clock = asyncio.get_running_loop().time
        began = clock()
        failure, text = await self._outcome(call)
        return ToolResult(
            call=call, tool=self.name, text=text, failure=failure, seconds=clock() - began
        )

    async def _outcome(self, call: ToolCall) -> tuple[Failure, str]:
        try:
            arguments = self._converted(call)
        except (msgspec.ValidationError, RecursionError) as error:
            return "arguments", f"error: {error}"
        left_alone = len(self._shared.left_alone)
        if left_alone >= LEFT_ALONE:
            return "stuck", (
                f"error: {self.name} cannot be called: {left_alone} calls have not ended"
            )
        turns = self._shared.turns()
        if turns is None:
            ended = await self._called(arguments)
        else:
            async with turns:
                ended = await self._called(arguments)
        if ended is None:
            return "timeout", f"error: {self.name} took longer than {self.seconds:g} s"
        return self._told(ended)

    def _converted(self, call: ToolCall) -> dict[str, Any]:
        if self._arguments is None:
            return dict(call.arguments)
        given = msgspec.convert(call.arguments, self._arguments, strict=False)
        return {name: getattr(given, name) for name in given.__struct_fields__}

    async def _called(self, arguments: Mapping[str, Any]) -> Ended | None:
        """Return how the call has ended; None: it has not, in its time."""
        going = _Going(functools.partial(self.function, **arguments), self._shared)
        work: asyncio.Future[Ended]
        if self._in_loop:
            work = asyncio.ensure_future(going.in_loop())
        else:
            loop = asyncio.get_running_loop()
            here = contextvars.copy_context()
            work = loop.run_in_executor(THREAD_EACH, here.run, going.in_thread)
        try:
            done, _ = await asyncio.wait({work}, timeout=self.seconds)
        except asyncio.CancelledError:
            await self._stop(work, going)
            raise
        if not done:
            await self._stop(work, going)
            return None
        if work.cancelled():
            return Ended(error=asyncio.CancelledError("it cancelled itself"))
        ended = work.result()
        if inspect.iscoroutine(ended.value):
            ended.value.close()
            return Ended(error=TypeError("it returned a coroutine, which nobody awaits"))
        return ended

    async def _stop(self, work: asyncio.Future[Ended], going: _Going) -> None:
        work.cancel()
        if self._in_loop:
            await asyncio.wait({work}, timeout=CANCELLED_SECONDS)
        self._shared.left_alone.add(going)
        if going.ended:  # in the meantime
            self._shared.left_alone.discard(going)

    def _told(self, ended: Ended) -> tuple[Failure, str]:
        error = ended.error
        if error is None:
            return self._as_text(ended.value)
        if isinstance(error, ToolError):
            return "error", f"error: {_clean(str(error)[:ERROR])}"
        if isinstance(error, ToolBroken):
            return error.failure, f"error: {_clean(str(error)[:ERROR])}"
        return "raised", f"error: {_clean(raised(error)[:ERROR])}"

    def _as_text(self, value: object) -> tuple[Failure, str]:
        try:
            text = _text_of(value)
        except Exception as error:  # what is in a value may raise anything
            return "result", f"error: {self.name} returned what JSON cannot hold: {raised(error)}"
        if len(text) <= self.output:
            return "", _clean(text)
        shown = _clean(text[: self.output])
        return "output", f"{shown}\n[cut: a result has at most {self.output} characters]"


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *,
    name: str = "",
    description: str = "",
    seconds: float = SECONDS,
    output: int = OUTPUT,
    concurrent: int | None = None,
    on_failure: OnFailure | None = None,
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    function: Callable[..., Any] | None = None, /, **limits: Any
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a tool of a function: ``@tool``, or ``@tool(seconds=5, output=2000, concurrent=8)``.

    Raises what `Tool` raises.
    """
    if function is not None:
        return Tool(function)
    return lambda one: Tool(one, **limits)


def by_name(tools: Sequence[Tool]) -> dict[str, Tool]:
    """Return tools by their names.

    Raises:
        TypeError: one of them is no tool.
        ValueError: two have one name.
    """
    found: dict[str, Tool] = {}
    for one in tools:
        if not isinstance(one, Tool):
            raise TypeError(f"{one!r} is no tool: decorate it with @tool")
        if found.setdefault(one.name, one) is not one:
            raise ValueError(f"two tools are called {one.name!r}: give one of them name=")
    return found


async def run_all(calls: Sequence[ToolCall], tools: Mapping[str, Tool]) -> list[ToolResult]:
    """Carry out the calls of one answer, all at once; their results in order."""
    return list(await asyncio.gather(*(_run(call, tools) for call in calls)))


def ends_episode(result: ToolResult, tools: Mapping[str, Tool], on_failure: OnFailure) -> bool:
    """Return whether a call ends the episode; ``on_failure`` is what the run says."""
    if not result.failure or result.failure in TOLD:
        return False
    return (tools[result.tool].on_failure or on_failure) == "fail"


async def _run(call: ToolCall, tools: Mapping[str, Tool]) -> ToolResult:
    found = tools.get(call.name)
    name = UNKNOWN if found is None else call.name
    if call.problem:
        text = f"error: the call cannot be read: {call.problem}"
        return ToolResult(call=call, tool=name, text=text, failure="arguments")
    if found is None:
        known = ", ".join(sorted(tools)) or "none"
        text = f"error: there is no tool {call.name[:64]!r} (there are: {known})"
        return ToolResult(call=call, tool=name, text=text, failure="unknown")
    return await found.run(call)


def _code_of(function: Callable[..., Any]) -> object:
    """Return what functions, methods and partial ones have in common that one ``def`` has made."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__code__", type(function))


def _text_of(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return msgspec.json.encode(value).decode()


def _clean(text: str) -> str:
    """Return a text that can be written down: halves of characters become question marks."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def _schema_of(arguments: type[msgspec.Struct]) -> dict[str, Any]:
    parameters: dict[str, Any] = msgspec.json.schema(arguments)
    reference = parameters.pop("$ref", "").rpartition("/")[2]
    definitions = parameters.pop("$defs", {})
    parameters = definitions.pop(reference, parameters)
    parameters.pop("title", None)
    if definitions:
        parameters["$defs"] = definitions
    return parameters


def arguments_of(function: Callable[..., Any], name: str) -> type[msgspec.Struct]:
    """Return a Struct with the parameters of a function.

    Raises:
        TypeError: see `Tool`.
    """
    try:
        hints = get_type_hints(function, include_extras=True)
    except Exception as error:  # an annotation may be any expression
        raise TypeError(
            f"tool {name!r}: its annotations cannot be read: {raised(error)}"
        ) from error
    fields: list[Any] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(f"tool {name!r}: *{parameter.name} has no schema; name each argument")
        if parameter.kind == parameter.POSITIONAL_ONLY:
            raise TypeError(
                f"tool {name!r}: argument {parameter.name!r} has no name for its caller: take the "
                "/ away"
            )
        if parameter.name not in hints:
            raise TypeError(
                f"tool {name!r}: argument {parameter.name!r} has no annotation, so the model "
                "cannot be told its type"
            )
        default = () if parameter.default is parameter.empty else (parameter.default,)
        fields.append((parameter.name, hints[parameter.name], *default))
    try:
        made = msgspec.defstruct("Arguments", fields, kw_only=True, forbid_unknown_fields=True)
        msgspec.json.schema(made)
    except TypeError as error:
        raise TypeError(f"tool {name!r}: JSON cannot hold its arguments: {error}") from error
    return made
