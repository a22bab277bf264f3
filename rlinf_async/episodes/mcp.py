"""Tools of an MCP server, which a model calls like any other.

::

    async def run(episode: Episode) -> float:
        async with mcp_tools(command=["python", "server.py"]) as tools:      # or url="http://..."
            chat = episode.chat(tools=tools)

A server over stdio is a process of the episode's own, which ends with the block; over HTTP it may
be shared. One that is not there, or does not answer, is `ToolBroken` when the block begins; one
that dies or hangs later fails the calls, which is told and counted as of any tool (kinds ``died``
and ``timeout``). What a server says is wrong with a call is told to the model (kind ``error``).

Command and url often hold a key: errors name the program or the host alone. What is told to the
model it is trained with; why a server has ended, and its last words, are in the log of the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from rlinf_async.config.registry import needed, raised
from rlinf_async.deadlines import timeout
from rlinf_async.episodes.tools import (
    OUTPUT,
    SECONDS,
    OnFailure,
    Tool,
    ToolBroken,
    ToolError,
    by_name,
)

PAGES: Final = 100
"""pages of a server's list of tools, after which it is taken to have no end"""
END_SECONDS: Final = 10.0
"""time that a server has to end, after which it is left to itself"""
_SHOWN: Final = 500

logger = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def mcp_tools(
    *,
    command: Sequence[str] = (),
    url: str = "",
    environment: Mapping[str, str] | None = None,
    prefix: str = "",
    only: Sequence[str] = (),
    seconds: float = SECONDS,
    seconds_to_start: float = SECONDS,
    output: int = OUTPUT,
    concurrent: int | None = None,
    on_failure: OnFailure | None = None,
) -> AsyncIterator[list[Tool]]:
    """Connect to an MCP server, and give its tools.

    Args:
        command: starts a server that speaks over stdio.
        url: address of a server that speaks over streamable HTTP.
        environment: variables of the server that is started, beside ``PATH``, ``HOME`` and a few
            others: it does not get the worker's.
        prefix: begins the names of its tools, where two servers have the same.
        only: names of the tools to take, as the server has them; empty: all.
        seconds, output, concurrent, on_failure: of each tool, as in `Tool`.
        seconds_to_start: limit of the connection and the list of tools.

    Raises:
        MissingExtra: the package mcp is not installed.
        ToolBroken: the server is not there, ends, or does not answer; it has none of the tools.
        ValueError: neither command nor url are given, or both; the url is no address; two tools
            have one name.
    """
    if bool(command) == bool(url):
        raise ValueError("an MCP server is either a command or a url")
    where = command[0] if command else urlsplit(url).netloc.rpartition("@")[2]
    if not where:
        raise ValueError("the url of an MCP server must be an address, http://host:8000/mcp")
    needed("mcp", extra="agents", needed_for="an MCP server")
    limits = {
        "seconds": seconds,
        "output": output,
        "concurrent": concurrent,
        "on_failure": on_failure,
    }
    server = _Server(where, command, url, dict(environment or {}))
    try:
        listed = await server.begin(seconds_to_start)
        known = {one.name: one for one in listed}
        for name in only:
            if name not in known:
                there = ", ".join(known) or "none"
                raise ToolBroken(f"{server.where} has no tool {name!r} (it has: {there})")
        taken = [known[name] for name in only] if only else listed
        tools = [_tool(server, one, prefix, limits) for one in taken]
        by_name(tools)
        yield tools
    finally:
        await server.end()


class _Server:
    """A connection to a server, in a task of its own: where it breaks, it cancels that one."""

    def __init__(
        self, where: str, command: Sequence[str], url: str, environment: dict[str, str]
    ) -> None:
        self.where = f"the MCP server {where}"
        self._command = command
        self._url = url
        self._environment = environment
        self._told = False
        self._words: _Words
        self._stop = asyncio.Event()
        self._ready: asyncio.Future[tuple[Any, list[Any]]]
        self._task: asyncio.Task[None]

    async def begin(self, seconds: float) -> list[Any]:
        """Connect; return the tools. Raises `ToolBroken`."""
        self._ready = asyncio.get_running_loop().create_future()
        self._words = _Words()
        self._task = asyncio.create_task(self._hold())
        either: set[asyncio.Future[Any]] = {self._ready, self._task}
        with contextlib.suppress(TimeoutError):
            async with timeout(seconds):
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._ready.done():
            return self._ready.result()[1]
        if not self._task.done():
            raise ToolBroken(
                f"{self.where} has not answered for {seconds:g} s{self._words.last()}", "timeout"
            )
        raise ToolBroken(f"{self.where} cannot be used: {self._why()}{self._words.last()}")

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Return the result of a call. Raises `ToolBroken`, `ToolError`."""
        mcp = needed("mcp", extra="agents", needed_for="an MCP server")
        types = needed("mcp_types", extra="agents", needed_for="an MCP server")
        client, _ = self._ready.result()
        asked = asyncio.ensure_future(client.call_tool(name, arguments))
        try:
            await asyncio.wait({asked, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise self._ended(self._why())
            return asked.result()
        except mcp.MCPError as error:
            if error.code == types.CONNECTION_CLOSED:
                raise self._ended(self._without_keys(raised(error))) from error
            raise ToolError(self._without_keys(str(error))) from error
        except ToolBroken:
            raise
        except Exception as error:  # of the connection
            raise self._ended(self._without_keys(raised(error))) from error
        finally:
            asked.cancel()

    async def end(self) -> None:
        """End the connection, and a server that was started."""
        self._stop.set()
        if not self._ready.done():
            self._task.cancel()
        try:
            # What goes wrong with a server that has died is no news.
            with contextlib.suppress(TimeoutError):
                async with timeout(END_SECONDS):
                    await asyncio.wait({self._task})
        finally:
            self._task.cancel()
            if self._task.done() and not self._task.cancelled():
                self._task.exception()
            self._words.close()

    async def _hold(self) -> None:
        mcp = needed("mcp", extra="agents", needed_for="an MCP server")
        server: Any = self._url
        if self._command:
            parameters = mcp.StdioServerParameters(
                command=self._command[0],
                args=list(self._command[1:]),
                env=self._environment,
                encoding_error_handler="replace",
            )
            server = mcp.stdio_client(parameters, errlog=self._words)
        async with mcp.Client(server) as client:
            self._ready.set_result((client, await _listed(client)))
            await self._stop.wait()

    def _ended(self, why: str) -> ToolBroken:
        """Log once why the server has ended; return what the model is told."""
        if not self._told:
            self._told = True
            logger.warning("%s has ended: %s%s", self.where, why, self._words.last())
        return ToolBroken(f"{self.where} has ended")

    def _without_keys(self, text: str) -> str:
        """Leave out of an error of the connection what a url may have beside its host."""
        split = urlsplit(self._url)
        for part in (self._url, split.path, split.query, split.netloc.rpartition("@")[0]):
            if len(part) > 1:
                text = text.replace(part, "...")
        return text

    def _why(self) -> str:
        """Return what has failed: of a group of errors, the first."""
        if self._task.cancelled():
            return "the connection has ended"
        error = self._task.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        return self._without_keys("the connection has ended" if error is None else raised(error))


class _Words:
    """A pipe for what a server writes to standard error, of which the last is kept."""

    def __init__(self) -> None:
        self._read, self._written = os.pipe()
        os.set_blocking(self._read, False)
        self._kept = b""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._read, self._more)

    def fileno(self) -> int:
        """Return the descriptor that the server gets."""
        return self._written

    def close(self) -> None:
        """Let nothing more be written."""
        self._loop.remove_reader(self._read)
        os.close(self._read)
        os.close(self._written)

    def _more(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while found := os.read(self._read, 65_536):
                self._kept = (self._kept + found)[-_SHOWN:]

    def last(self) -> str:
        """Return what it wrote last, for an error."""
        self._more()
        shown = self._kept.decode(errors="replace").strip()
        return f"; its last words: {shown}" if shown else ""


async def _listed(client: Any) -> list[Any]:
    found: list[Any] = []
    cursor: str | None = None
    for _ in range(PAGES):
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return found
    raise ToolBroken(f"its list of tools has no end: {PAGES} pages, and more")


def _tool(server: _Server, one: Any, prefix: str, limits: dict[str, Any]) -> Tool:
    async def call(**arguments: Any) -> str:
        result = await server.call(one.name, arguments)
        text = _as_text(result)
        if result.is_error:
            raise ToolError(text or "the tool failed, and does not say why")
        return text

    return Tool(
        call,
        name=prefix + re.sub(r"[^a-zA-Z0-9_-]", "_", one.name),
        description=one.description or one.title or one.name,
        parameters=one.input_schema,
        **limits,
    )


def _as_text(result: Any) -> str:
    """Return what a model can read of a result; pictures and sounds are named."""
    parts = []
    for one in result.content:
        inner = getattr(one, "resource", one)
        text = getattr(inner, "text", None)
        parts.append(text if isinstance(text, str) else f"[{one.type}: cannot be shown]")
    if not parts and result.structured_content is not None:
        return msgspec.json.encode(result.structured_content).decode()
    return "\n".join(parts)
