"""Tools: their schema, their limits, and what is told of a call that fails."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import threading
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import pytest

from rlinf_async.episodes.parsing import ToolCall
from rlinf_async.episodes.tools import (
    CANCELLED_SECONDS,
    LEFT_ALONE,
    Tool,
    ToolBroken,
    ToolError,
    run_all,
    tool,
)
from rlinf_async.testing import run


class Place(msgspec.Struct):
    city: str
    zip: int | None = None


@tool
def add(a: int, b: int = 2) -> int:
    """Add two numbers."""
    return a + b


@tool(seconds=5, output=10, concurrent=1)
async def weather(place: Place, unit: Literal["C", "F"] = "C") -> str:
    """Say what the weather is."""
    if place.city == "nowhere":
        raise ToolError("there is no such place")
    await asyncio.sleep(3 if place.city == "near" else 60)
    return f"{place.city}: 20 {unit}, and more than anybody wants to know"


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


def test_a_schema_comes_from_the_annotations() -> None:
    assert add.schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "default": 2}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }
    parameters = weather.schema["function"]["parameters"]
    assert parameters["properties"]["place"] == {"$ref": "#/$defs/Place"}
    assert set(parameters["$defs"]) == {"Place"}
    assert parameters["properties"]["unit"]["enum"] == ["C", "F"]


def test_calls_run_at_once_and_their_results_come_in_order() -> None:
    async def main() -> None:
        calls = [
            call("add", a=1), call("add", a="2", b=3), call("add", a="x"), call("add", c=1),
            call("sum"), ToolCall(name="add", problem="the call is no JSON"),
            call("weather", place={"city": "nowhere"}),
        ]  # fmt: skip
        found = await run_all(calls, {"add": add, "weather": weather})
        assert [one.call for one in found] == calls
        assert [(one.failure, one.text) for one in found] == [
            ("", "3"),
            ("", "5"),
            ("arguments", "error: Expected `int`, got `str` - at `$.a`"),
            ("arguments", "error: Object contains unknown field `c`"),
            ("unknown", "error: there is no tool 'sum' (there are: add, weather)"),
            ("arguments", "error: the call cannot be read: the call is no JSON"),
            ("error", "error: there is no such place"),
        ]

    asyncio.run(main())


def test_limits_of_time_output_and_concurrency() -> None:
    async def main() -> None:
        near, far = {"city": "near"}, {"city": "far"}
        began = asyncio.get_running_loop().time()
        found = await run_all(
            [call("weather", place=near), call("weather", place=far)], {"weather": weather}
        )
        assert found[0].failure == "output"
        assert found[0].text == "near: 20 C\n[cut: a result has at most 10 characters]"
        assert found[1].failure == "timeout"
        assert found[1].text == "error: weather took longer than 5 s"
        assert asyncio.get_running_loop().time() - began == pytest.approx(8.0)
        assert {one.seconds for one in found} in ({3.0, 8.0}, {5.0, 8.0})

    run(main())


def test_what_a_tool_raises_is_told_and_a_cancellation_passes() -> None:
    @tool
    async def broken() -> str:
        """Break."""
        raise ValueError("no good")

    @tool
    async def endless() -> str:
        """Never end."""
        await asyncio.Event().wait()
        return ""

    async def main() -> None:
        [found] = await run_all([call("broken")], {"broken": broken})
        assert (found.failure, found.text) == ("raised", "error: ValueError: no good")
        task = asyncio.create_task(run_all([call("endless")], {"endless": endless}))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())


def refused(function: Any = None, **options: Any) -> Tool:
    def fine(a: int) -> str:
        """Be fine."""
        return str(a)

    return Tool(function or fine, **options)


def test_what_cannot_be_a_tool_is_refused_when_it_is_made() -> None:
    def unknown(a) -> str:  # type: ignore[no-untyped-def]
        """Take something."""
        return ""

    def many(*a: int) -> str:
        """Take many."""
        return ""

    def silent(a: int) -> str:
        return ""

    def odd(a: asyncio.Event) -> str:
        """Take what JSON cannot hold."""
        return ""

    def nameless(a: int, /) -> str:
        """Take what cannot be named."""
        return ""

    def absent(a: Absent) -> str:  # type: ignore[name-defined]  # noqa: F821
        """Take what is not there."""
        return ""

    def shared(a: list[int] = [1]) -> str:  # noqa: B006
        """Have a default that changes."""
        return ""

    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TypeError, "'unknown': argument 'a' has no annotation", {"function": unknown}),
        (TypeError, r"'many': \*a has no schema", {"function": many}),
        (ValueError, "'silent' has no docstring", {"function": silent}),
        (TypeError, "'odd': JSON cannot hold its arguments", {"function": odd}),
        (TypeError, "'nameless': argument 'a' has no name for its caller", {"function": nameless}),
        (TypeError, "'absent': its annotations cannot be read: NameError", {"function": absent}),
        (TypeError, "'shared': JSON cannot hold its arguments", {"function": shared}),
        (ValueError, "'': a name has at most 64", {"function": functools.partial(add.function)}),
        (ValueError, "'a.b': a name has at most 64", {"name": "a.b"}),
        (ValueError, "a name has at most 64", {"name": "x" * 65}),
        (ValueError, "seconds is 0", {"seconds": 0}),
        (ValueError, "seconds is inf", {"seconds": float("inf")}),
        (ValueError, "output 0", {"output": 0}),
        (ValueError, "concurrent is 0", {"concurrent": 0}),
    ]
    for kind, problem, options in cases:
        with pytest.raises(kind, match=problem):
            refused(**options)
    assert refused(name="fine-2").name == "fine-2"


def test_a_schema_takes_the_place_of_annotations() -> None:
    schema = {"type": "object", "properties": {"a b": {"type": "integer"}}}

    async def anything(**arguments: Any) -> Any:
        return arguments

    made = Tool(anything, name="anything", description="Take anything.", parameters=schema)
    assert made.schema["function"]["parameters"] == schema
    found = asyncio.run(made.run(ToolCall(name="anything", arguments={"a b": 1, "c": None})))
    assert (found.failure, found.text) == ("", '{"a b":1,"c":null}')


def deep() -> Any:
    found: Any = 0
    for _ in range(10**5):
        found = [found]
    return found


class Odd:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def raises(error: BaseException) -> Any:
    raise error


async def cancels_itself() -> None:
    raise asyncio.CancelledError


OUTCOMES: list[tuple[str, Any, str, str]] = [
    ("exit", lambda: raises(SystemExit(3)), "raised", "error: SystemExit: 3"),
    ("stop", lambda: raises(StopIteration(1)), "raised", "error: StopIteration: 1"),
    ("own time", lambda: raises(TimeoutError("upstream")), "raised", "TimeoutError: upstream"),
    ("error", lambda: raises(ToolError("no such place")), "error", "error: no such place"),
    ("broken", lambda: raises(ToolBroken("it is gone")), "died", "error: it is gone"),
    ("odd error", lambda: raises(Silent()), "raised", "Silent (its text cannot be made)"),
    ("long error", lambda: raises(ValueError("x" * 10**7)), "raised", "error: ValueError: xxx"),
    ("object", lambda: Odd(), "result", "returned what JSON cannot hold"),
    ("set of lists", lambda: {"a": object()}, "result", "returned what JSON cannot hold"),
    ("nothing", lambda: None, "", "null"),
    ("infinite", lambda: float("inf"), "", "inf"),
    ("half a character", lambda: "a\ud800b", "", "a?b"),
    ("flood", lambda: "é" * 10**7, "output", "[cut: a result has at most 1000 characters]"),
    ("deep", deep, "result", "JSON"),
    ("coroutine", lambda: cancels_itself(), "raised", "which nobody awaits"),
]


@pytest.mark.parametrize(("function", "failure", "text"), [one[1:] for one in OUTCOMES],
                         ids=[one[0] for one in OUTCOMES])  # fmt: skip
@pytest.mark.parametrize("is_async", [False, True])
def test_whatever_a_tool_does_is_told(
    function: Any, failure: str, text: str, *, is_async: bool
) -> None:
    async def in_loop() -> Any:
        return function()

    if is_async and "StopIteration" in text:  # Python makes another error of it
        text = "StopIteration"
    made = Tool(
        in_loop if is_async else function,
        name="it", description="Do it.", parameters={}, output=1000,
    )  # fmt: skip
    found = asyncio.run(made.run(ToolCall(name="it")))
    assert (found.failure, found.tool) == (failure, "it")
    assert text in found.text
    assert len(found.text) < 1200
    found.text.encode()


def test_a_tool_that_cancels_itself_has_failed() -> None:
    made = Tool(cancels_itself, name="it", description="Do it.")
    found = asyncio.run(made.run(ToolCall(name="it")))
    assert found.failure == "raised"


def test_calls_that_do_not_end_are_left_alone_and_then_refused() -> None:
    """A coroutine that ignores its cancellation, in virtual time."""
    release = asyncio.Event()

    async def deaf() -> str:
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await release.wait()
        return "late"

    made = Tool(deaf, description="Never end.", seconds=5)

    async def main() -> None:
        calls = [call("deaf")] * LEFT_ALONE
        found = await run_all(calls, {"deaf": made})
        assert {one.failure for one in found} == {"timeout"}
        assert {one.seconds for one in found} == {5 + CANCELLED_SECONDS}
        [refused] = await run_all([call("deaf")], {"deaf": made})
        assert (refused.failure, refused.seconds) == ("stuck", 0)
        assert refused.text == f"error: deaf cannot be called: {LEFT_ALONE} calls have not ended"
        release.set()
        await asyncio.sleep(1)
        [again] = await run_all([call("deaf")], {"deaf": made})
        assert (again.failure, again.text) == ("", "late")

    run(main())


class Desk:
    async def search(self) -> str:
        """Search."""
        await asyncio.sleep(1)
        return ""


def of_an_episode() -> Any:
    async def search() -> str:
        """Search."""
        await asyncio.sleep(1)
        return ""

    return search


def of_another() -> Any:
    async def search() -> str:
        """Search."""
        await asyncio.sleep(1)
        return ""

    return search


NAMED: dict[str, Any] = {"name": "search", "description": "Search.", "parameters": {}}
MADE: dict[str, tuple[list[Callable[[], Tool]], float]] = {
    "closures": ([lambda: Tool(of_an_episode(), concurrent=1)] * 3, 3.0),
    "methods": ([lambda: Tool(Desk().search, concurrent=1)] * 3, 3.0),
    "partial functions": (
        [lambda: Tool(functools.partial(Desk().search), concurrent=1, **NAMED)] * 3,
        3.0,
    ),
    "any number": ([lambda: Tool(of_an_episode())] * 3, 1.0),
    "several names": (
        [
            lambda: Tool(of_an_episode(), concurrent=1),
            lambda: tool(name="b", concurrent=1)(of_an_episode()),
        ],
        1.0,
    ),
    "several functions": (
        [lambda: Tool(of_an_episode(), concurrent=1), lambda: Tool(of_another(), concurrent=1)],
        1.0,
    ),
}


@pytest.mark.parametrize("what", sorted(MADE))
def test_a_limit_is_that_of_all_tools_that_are_one_made_again(what: str) -> None:
    makers, seconds = MADE[what]

    async def main() -> None:
        made = [one() for one in makers]
        found = await asyncio.gather(*(one.run(call(one.name)) for one in made))
        assert not any(one.failure for one in found)
        assert max(one.seconds for one in found) == seconds

    run(main())


def test_calls_that_do_not_end_are_counted_over_tools_that_are_one_made_again() -> None:
    release = threading.Event()

    def made() -> Tool:
        def hung() -> str:
            """Block a thread."""
            release.wait()
            return "late"

        return Tool(hung, seconds=0.05)

    async def main() -> None:
        for _ in range(LEFT_ALONE):  # tools are gone at once, what they left is not
            assert (await made().run(call("hung"))).failure == "timeout"
        gc.collect()
        assert (await made().run(call("hung"))).failure == "stuck"
        release.set()
        for thread in threading.enumerate():
            if thread.name == "tool":
                await asyncio.to_thread(thread.join)
        assert (await made().run(call("hung"))).text == "late"

    asyncio.run(main())


def test_a_thread_that_does_not_end_is_left_alone_and_blocks_nobody() -> None:
    release = threading.Event()

    def stuck() -> str:
        """Block a thread."""
        release.wait()
        return "late"

    made = Tool(stuck, seconds=0.05)
    known = {"stuck": made, "add": add}

    async def main() -> None:
        found = await run_all([call("stuck")] * LEFT_ALONE + [call("add", a=1)], known)
        assert [one.failure for one in found] == ["timeout"] * LEFT_ALONE + [""]
        [refused] = await run_all([call("stuck")], known)
        assert refused.failure == "stuck"
        release.set()
        for thread in threading.enumerate():
            if thread.name == "tool":
                await asyncio.to_thread(thread.join)
        assert (await made.run(call("stuck"))).text == "late"

    asyncio.run(main())


def test_a_function_that_is_not_async_runs_in_virtual_time() -> None:
    async def main() -> None:
        assert [one.text for one in await run_all([call("add", a=1)], {"add": add})] == ["3"]

    run(main())


def test_one_tool_serves_several_loops() -> None:
    for _ in range(2):
        calls = [call("weather", place={"city": "near"})] * 2
        found = run(run_all(calls, {"weather": weather}))
        assert {one.seconds for one in found} == {3.0, 6.0}
