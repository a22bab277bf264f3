"""Episodes: a language model that acts in several turns, calls tools, or is driven by an agent."""

from rlinf_async.episodes.episode import (
    Chat,
    Episode,
    EpisodeError,
    LimitReached,
    Limits,
    Task,
    ToolFailed,
    Turn,
)
from rlinf_async.episodes.mcp import mcp_tools
from rlinf_async.episodes.parsing import Parsed, ParserError, ToolCall
from rlinf_async.episodes.sandbox import program
from rlinf_async.episodes.template import Rewrites, TemplateError
from rlinf_async.episodes.tools import Tool, ToolBroken, ToolError, ToolResult, tool

__all__ = [
    "Chat",
    "Episode",
    "EpisodeError",
    "LimitReached",
    "Limits",
    "Parsed",
    "ParserError",
    "Rewrites",
    "Task",
    "TemplateError",
    "Tool",
    "ToolBroken",
    "ToolCall",
    "ToolError",
    "ToolFailed",
    "ToolResult",
    "Turn",
    "mcp_tools",
    "program",
    "tool",
]
