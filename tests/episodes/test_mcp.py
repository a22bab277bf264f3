"""Tools of a real MCP server, over stdio and over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlinf_async.config import MissingExtra
from rlinf_async.episodes import ToolBroken, ToolResult, mcp_tools
from rlinf_async.episodes.parsing import ToolCall
from rlinf_async.episodes.tools import Tool

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("mcp") is None, reason="mcp is not installed"),
    pytest.mark.usefixtures("each_loop"),
]
LOG = "rlinf_async.episodes.mcp"
SERVER = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@contextlib.contextmanager
def over_http() -> Iterator[tuple[dict[str, Any], subprocess.Popen[bytes]]]:
    """A server over HTTP, which answers."""
    port = free_port()
    server = subprocess.Popen([*SERVER, str(port)], stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until and server.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.05)
        yield {"url": f"http://127.0.0.1:{port}/mcp"}, server
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def http() -> Iterator[dict[str, Any]]:
    with over_http() as (where, _):
        yield where


@pytest.fixture(params=["stdio", "http"])
def where(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "stdio":
        return {"command": SERVER}
    found: dict[str, Any] = request.getfixturevalue("http")
    return found


@contextlib.asynccontextmanager
async def tools_by_name(**options: Any) -> AsyncIterator[dict[str, Tool]]:
    async with mcp_tools(seconds_to_start=60, **options) as tools:
        yield {one.name: one for one in tools}


async def called(tool: Tool, **arguments: Any) -> ToolResult:
    return await tool.run(ToolCall(name=tool.name, arguments=arguments))


def test_tools_have_the_servers_schemas_and_do_what_it_does(where: dict[str, Any]) -> None:
    async def main() -> None:
        async with tools_by_name(**where, output=100, seconds=60) as tools:
            assert set(tools) == {"add", "files_read", "hang", "die", "flood", "variables"}
            function = tools["add"].schema["function"]
            assert function["description"] == "Add two numbers."
            assert function["parameters"]["required"] == ["a"]
            assert function["parameters"]["properties"]["b"]["default"] == 2
            found = await asyncio.gather(
                called(tools["add"], a=1),
                called(tools["add"], a=1, b=5),
                called(tools["add"], a="many"),
                called(tools["files_read"], path="here"),
                called(tools["files_read"], path="nowhere"),
                called(tools["flood"], size=500_000),
            )
            assert [one.failure for one in found] == ["", "", "error", "", "error", "output"]
            assert [one.text for one in found[:2]] == ["3", "6"]
            assert "valid integer" in found[2].text
            assert found[3].text == "here\ntwo"
            assert "there is no file nowhere" in found[4].text
            assert found[5].text == "x" * 100 + "\n[cut: a result has at most 100 characters]"

    asyncio.run(main())


def test_a_call_that_hangs_is_given_up_and_the_server_goes_on(where: dict[str, Any]) -> None:
    async def main() -> None:
        async with tools_by_name(**where, seconds=0.3) as tools:
            hanging, other = await asyncio.gather(called(tools["hang"]), called(tools["add"], a=1))
            assert (hanging.failure, other.text) == ("timeout", "3")
            assert (await called(tools["add"], a=2)).text == "4"

    asyncio.run(main())


def test_a_server_that_grumbles_is_not_stopped_and_fills_no_file(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def opened() -> dict[str, str]:
        listed = [f"/proc/self/fd/{one}" for one in os.listdir("/proc/self/fd")]
        return {one: os.readlink(one) for one in listed if os.path.exists(one)}

    async def main() -> None:
        before = opened()
        grumbles = {"GRUMBLES": "5000000"}
        async with tools_by_name(command=SERVER, environment=grumbles) as tools:
            assert (await called(tools["add"], a=1)).text == "3"
            new = {one: what for one, what in opened().items() if before.get(one) != what}
            assert not [what for what in new.values() if what.endswith("(deleted)")]
            assert (await called(tools["die"])).failure == "died"
            [logged] = [one.getMessage() for one in caplog.records if one.name == LOG]
            assert logged.endswith("x too much\nI give up")
            assert len(logged) < 1000

    asyncio.run(main())


def test_a_server_that_dies_fails_its_calls(caplog: pytest.LogCaptureFixture) -> None:
    """The model is told no more than that; the rest is logged once, without what may be a key."""

    async def main(**where: Any) -> list[ToolResult]:
        async with tools_by_name(**where, seconds=20) as tools:
            waiting = asyncio.create_task(called(tools["hang"]))
            first = await called(tools["die"])
            return [first, await waiting, await called(tools["add"], a=1)]

    for one in asyncio.run(main(command=["env", "KEY=sk-secret", *SERVER])):
        assert one.failure == "died", one
        assert one.text == "error: the MCP server env has ended"
    [logged] = [one.getMessage() for one in caplog.records if one.name == LOG]
    assert "I give up" in logged
    with over_http() as (where, server):
        for one in asyncio.run(main(url=where["url"] + "?key=sk-secret")):
            assert one.failure == "died", one
            assert re.fullmatch(r"error: the MCP server 127\.0\.0\.1:\d+ has ended", one.text)
        assert server.wait(10) == 3
    assert "sk-secret" not in "".join(one.getMessage() for one in caplog.records if one.name == LOG)


def test_what_is_raised_in_the_block_comes_out_as_it_is(where: dict[str, Any]) -> None:
    async def main(error: BaseException) -> None:
        async with tools_by_name(**where):
            raise error

    for error in (KeyError("mine"), ToolBroken("mine")):
        with pytest.raises(type(error), match="mine") as found:
            asyncio.run(main(error))
        assert found.value is error


def test_a_block_that_is_cancelled_ends_the_server() -> None:
    async def main() -> None:
        began = asyncio.Event()

        async def hold() -> None:
            async with tools_by_name(command=SERVER):
                began.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(hold())
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not task.cancelling() - 1

    before = children()
    asyncio.run(main())
    assert children() == before


def children() -> set[str]:
    """Processes that this one has started."""
    me = os.getpid()
    return set(Path(f"/proc/{me}/task/{me}/children").read_text().split())


def test_a_server_has_no_variable_of_the_worker_that_was_not_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "secret")

    async def main() -> None:
        async with tools_by_name(command=SERVER, environment={"MINE": "1"}) as tools:
            names = (await called(tools["variables"])).text.split()
            assert "MINE" in names
            assert "PATH" in names
            assert "SOME_API_KEY" not in names

    asyncio.run(main())


NOT_THERE: list[tuple[dict[str, Any], str]] = [
    ({"command": ["/no/such/server"]}, "cannot be used: FileNotFoundError"),
    ({"command": [sys.executable, "-c", "raise SystemExit('no licence')"]}, "words: no licence"),
    ({"command": ["sleep", "60"], "seconds_to_start": 0.3}, "not answered for 0.3 s"),
    ({"url": "http://me:sk-secret@127.0.0.1:9/mcp"}, "server 127.0.0.1:9 cannot be used"),
    ({"url": "http://127.0.0.1:9/mcp?key=sk-secret"}, "server 127.0.0.1:9 cannot be used"),
    ({"command": SERVER, "only": ["sub"]}, r"has no tool 'sub' \(it has: add, files.read"),
]


@pytest.mark.parametrize(("options", "problem"), NOT_THERE)
def test_a_server_that_is_not_there_is_named(options: dict[str, Any], problem: str) -> None:
    async def main() -> None:
        async with mcp_tools(**{"seconds_to_start": 60, **options}):
            pytest.fail("there is no server")

    before = children()
    with pytest.raises(ToolBroken, match=problem) as found:
        asyncio.run(main())
    assert "sk-secret" not in str(found.value)
    assert children() == before


def test_only_some_tools_with_a_prefix(where: dict[str, Any]) -> None:
    async def main() -> None:
        async with tools_by_name(**where, only=["add"], prefix="math_") as tools:
            assert set(tools) == {"math_add"}
            assert (await called(tools["math_add"], a=1)).text == "3"

    asyncio.run(main())


@pytest.mark.parametrize("options", [{}, {"command": ["a"], "url": "b"}, {"url": "b"}])
def test_a_server_is_a_command_or_a_url(options: dict[str, Any]) -> None:
    async def main() -> None:
        async with mcp_tools(**options):
            pytest.fail("neither")

    with pytest.raises(ValueError, match=r"either a command or a url|must be an address"):
        asyncio.run(main())


def test_the_package_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)

    async def main() -> None:
        async with mcp_tools(url="http://127.0.0.1:9/mcp"):
            pytest.fail("there is none")

    with pytest.raises(MissingExtra, match=r"pip install 'rlinf-async\[agents\]'"):
        asyncio.run(main())
