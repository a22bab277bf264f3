"""Tools that a model may call: functions with typed arguments, and what becomes of a call.

::

    @tool(seconds=5)
    async def calculate(expression: str) -> str:
        \"\"\"Evaluate an arithmetic expression.\"\"\"

    call --arguments fit--> runs --returns--> its text
      |                      |--raises------> "error: ..."     told to the model, and counted;
      |                      `--too long----> "error: ..."     or the episode fails, as configured
      `--do not fit, no such tool-----------> "error: ..."
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, get_type_hints, overload

import msgspec

from rlinf_async.episodes.parsing import ToolCall

SECONDS: Final = 30.0
OUTPUT: Final = 16_384


class ToolError(Exception):
    """A tool could not do what it was asked; the text is told to the model."""


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a call of a tool came to."""

    call: ToolCall
    text: str
    """what the model is told"""
    failure: Literal["", "unknown", "arguments", "raised", "timeout", "output"] = ""
    """kind of the failure; empty: none"""
    seconds: float = 0.0
    """duration of the call, including the wait for its turn"""


class Tool:
    """A function that a model may call.

    Args:
        function: its parameters and their annotations are the arguments; its docstring tells the
            model what it is for.
        seconds: limit of one call.
        output: most characters of a result; more is cut, and counted as a failure.
        concurrent: calls that may run at once in one worker; None: any number.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str = "",
        seconds: float = SECONDS,
        output: int = OUTPUT,
        concurrent: int | None = None,
    ) -> None:
        self.function = function
        self.name = name or function.__name__
        self.seconds = seconds
        self.output = output
        self._turn = asyncio.Semaphore(concurrent) if concurrent else None
        self._arguments = _arguments_of(function, self.name)
        self.description = inspect.cleandoc(function.__doc__ or "")
        if not self.description:
            raise ValueError(f"tool {self.name!r} has no docstring: the model reads what it is for")

    @property
    def schema(self) -> dict[str, Any]:
        """The tool as OpenAI's chat completions describe it."""
        parameters = msgspec.json.schema(self._arguments)
        reference = parameters.pop("$ref", "").rpartition("/")[2]
        definitions = parameters.pop("$defs", {})
        parameters = definitions.pop(reference, parameters)
        parameters.pop("title", None)
        if definitions:
            parameters["$defs"] = definitions
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": parameters,
        }
        return {"type": "function", "function": function}

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself, without limits."""
        found = self.function(*args, **kwargs)
        return await found if inspect.isawaitable(found) else found

    async def run(self, call: ToolCall) -> ToolResult:
        """Carry out a call of the model; raises nothing but a cancellation."""
        clock = asyncio.get_running_loop().time
        began = clock()
        failure, text = await self._outcome(call)
        return ToolResult(call=call, text=text, failure=failure, seconds=clock() - began)

    async def _outcome(self, call: ToolCall) -> tuple[Any, str]:
        try:
            given = msgspec.convert(call.arguments, self._arguments, strict=False)
        except msgspec.ValidationError as error:
            return "arguments", f"error: {error}"
        arguments = {name: getattr(given, name) for name in given.__struct_fields__}
        try:
            found = await self._called(arguments)
        except TimeoutError:
            return "timeout", f"error: {self.name} took longer than {self.seconds:g} s"
        except ToolError as error:
            return "raised", f"error: {error}"
        except Exception as error:
            return "raised", f"error: {type(error).__name__}: {error}"
        text = found if isinstance(found, str) else msgspec.json.encode(found).decode()
        if len(text) > self.output:
            cut = len(text) - self.output
            return "output", f"{text[: self.output]}\n[{cut} more characters were cut]"
        return "", text

    async def _called(self, arguments: Mapping[str, Any]) -> Any:
        async with self._turn or contextlib.nullcontext(), asyncio.timeout(self.seconds):
            if inspect.iscoroutinefunction(self.function):
                return await self.function(**arguments)
            return await asyncio.to_thread(self.function, **arguments)  # it may block


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *, name: str = "", seconds: float = SECONDS, output: int = OUTPUT, concurrent: int | None = None
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    function: Callable[..., Any] | None = None, /, **limits: Any
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a tool of a function: ``@tool``, or ``@tool(seconds=5, output=2000, concurrent=8)``.

    Raises:
        TypeError: a parameter has no annotation, or one that JSON cannot hold.
        ValueError: it has no docstring.
    """
    if function is not None:
        return Tool(function)
    return lambda one: Tool(one, **limits)


async def run_all(calls: Sequence[ToolCall], tools: Mapping[str, Tool]) -> list[ToolResult]:
    """Carry out the calls of one answer, all at once; their results in order."""
    return list(await asyncio.gather(*(_run(call, tools) for call in calls)))


async def _run(call: ToolCall, tools: Mapping[str, Tool]) -> ToolResult:
    found = tools.get(call.name)
    if call.problem:
        return ToolResult(call=call, text=f"error: {call.problem}", failure="arguments")
    if found is None:
        known = ", ".join(sorted(tools)) or "none"
        text = f"error: there is no tool {call.name!r} (there are: {known})"
        return ToolResult(call=call, text=text, failure="unknown")
    return await found.run(call)


def _arguments_of(function: Callable[..., Any], name: str) -> type[msgspec.Struct]:
    """Return a Struct with the parameters of a function.

    Raises:
        TypeError: see `tool`.
    """
    hints = get_type_hints(function)
    fields: list[Any] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(f"tool {name!r}: *{parameter.name} has no schema; name each argument")
        if parameter.name not in hints:
            raise TypeError(
                f"tool {name!r}: argument {parameter.name!r} has no annotation, so the model "
                "cannot be told its type"
            )
        default = () if parameter.default is parameter.empty else (parameter.default,)
        fields.append((parameter.name, hints[parameter.name], *default))
    made = msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)
    try:
        msgspec.json.schema(made)
    except TypeError as error:
        raise TypeError(f"tool {name!r}: JSON cannot hold its arguments: {error}") from error
    return made
