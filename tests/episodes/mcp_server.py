"""A small MCP server: over stdio, or, with a port as its argument, over HTTP."""

from __future__ import annotations

import asyncio
import os
import sys

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("tests")


@server.tool()
def add(a: int, b: int = 2) -> int:
    """Add two numbers."""
    return a + b


@server.tool(name="files.read")
def read(path: str) -> list[str]:
    """Read a file."""
    if path == "nowhere":
        raise ToolError(f"there is no file {path}")
    return [path, "two"]


@server.tool()
async def hang() -> str:
    """Never end."""
    await asyncio.Event().wait()
    return ""


@server.tool()
def die() -> str:
    """End the server."""
    print("I give up", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
def flood(size: int) -> str:
    """Say a lot."""
    return "x" * size


@server.tool()
def variables() -> list[str]:
    """Name the variables of the environment."""
    return sorted(os.environ)


if __name__ == "__main__":
    print("x" * int(os.environ.get("GRUMBLES", "0")), "too much", file=sys.stderr, flush=True)
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
