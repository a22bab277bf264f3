"""Tools: their schema, their limits, and what is told of a call that fails."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import msgspec
import pytest

from rlinf_async.episodes.parsing import ToolCall
from rlinf_async.episodes.tools import Tool, ToolError, run_all, tool
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
            ("arguments", "error: the call is no JSON"),
            ("raised", "error: there is no such place"),
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
        assert found[0].text == "near: 20 C\n[37 more characters were cut]"
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


def test_what_has_no_schema_is_refused_when_it_is_made() -> None:
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

    with pytest.raises(TypeError, match="'unknown': argument 'a' has no annotation"):
        Tool(unknown)
    with pytest.raises(TypeError, match=r"'many': \*a has no schema"):
        Tool(many)
    with pytest.raises(ValueError, match="'silent' has no docstring"):
        Tool(silent)
    with pytest.raises(TypeError, match="'odd': JSON cannot hold its arguments"):
        Tool(odd)
