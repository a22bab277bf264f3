"""What a model answered: text, thoughts, and calls of tools, by the name of their format.

::

    hermes    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>      Qwen, Hermes
    llama     {"name": "add", "parameters": {"a": 1}}, several with ";" between  Llama 3
    pythonic  [add(a=1), add(a=2)]                                               Llama 4, Olmo

A call that cannot be read is a call all the same: its ``problem`` says why, and the model is told.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from rlinf_async.config.registry import Registry


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a tool, as the model wrote it."""

    name: str
    """name of the tool; empty where none can be read"""
    arguments: dict[str, Any] = {}
    problem: str = ""
    """why it cannot be carried out; empty: it can be tried"""


class Parsed(msgspec.Struct, frozen=True, kw_only=True):
    """An answer, read."""

    text: str
    """what is neither thought nor call"""
    thoughts: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


Parser = Callable[[str], Parsed]
"""Reads the text of an answer, special tokens of the format included, those of its end not."""

parsers: Registry[Parser] = Registry("format of tool calls", group="rlinf_async.tool_formats")

_THOUGHTS: Final = re.compile(r"\s*(?:<think>)?(.*?)</think>", re.DOTALL)
_HERMES: Final = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_PYTHON_TAG: Final = "<|python_tag|>"


def thoughts_and_rest(text: str) -> tuple[str, str]:
    """Return what the model thought before its answer, and the answer."""
    found = _THOUGHTS.match(text)
    if found is None:
        return "", text
    return found[1].strip(), text[found.end() :]


def hermes(text: str) -> Parsed:
    """Read JSON between ``<tool_call>`` and ``</tool_call>``, as Qwen and Hermes write it."""
    thoughts, answer = thoughts_and_rest(text)
    calls = tuple(_from_json(found[1], "arguments") for found in _HERMES.finditer(answer))
    return Parsed(text=_HERMES.sub("", answer).strip(), thoughts=thoughts, tool_calls=calls)


def llama(text: str) -> Parsed:
    """Read an answer that is JSON with ``name`` and ``parameters``, as Llama 3 writes it."""
    thoughts, answer = thoughts_and_rest(text)
    written = answer.strip().removeprefix(_PYTHON_TAG).strip()
    if not written.startswith("{") or '"name"' not in written:
        return Parsed(text=answer.strip(), thoughts=thoughts)
    calls = tuple(_from_json(one, "parameters") for one in _objects(written))
    return Parsed(text="", thoughts=thoughts, tool_calls=calls)


def pythonic(text: str) -> Parsed:
    """Read an answer that is a list of Python calls with keywords, as Llama 4 writes it."""
    thoughts, answer = thoughts_and_rest(text)
    written = answer.strip()
    if not re.match(r"\[\s*[A-Za-z_][\w.]*\s*\(", written):
        return Parsed(text=written, thoughts=thoughts)
    try:
        tree = ast.parse(written, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        call = ToolCall(name="", problem=f"this is no list of calls: {error}")
        return Parsed(text="", thoughts=thoughts, tool_calls=(call,))
    listed = tree.elts if isinstance(tree, ast.List) else [tree]
    calls = tuple(_from_python(one) for one in listed)
    return Parsed(text="", thoughts=thoughts, tool_calls=calls)


for _name, _parser in (("hermes", hermes), ("llama", llama), ("pythonic", pythonic)):
    parsers.register(_name)(_parser)


def _from_json(written: str, arguments_key: str) -> ToolCall:
    try:
        found = json.loads(written)
    except (ValueError, RecursionError) as error:
        return ToolCall(name="", problem=f"the call is no JSON: {error}")
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return ToolCall(name="", problem="the call has no name: write {'name': ..., ...}")
    name, arguments = found["name"], found.get(arguments_key, {})
    if isinstance(arguments, str):  # JSON within JSON, as OpenAI's own format has it
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return ToolCall(name=name, problem=f"{arguments_key} are no JSON: {error}")
    if not isinstance(arguments, dict):
        return ToolCall(name=name, problem=f"{arguments_key} must be an object, by name")
    return ToolCall(name=name, arguments=arguments)


def _objects(written: str) -> Iterator[str]:
    """Yield the JSON objects of a text, which may have ``;`` between them."""
    decoder = json.JSONDecoder()
    at = 0
    while at < len(written):
        try:
            _, end = decoder.raw_decode(written, at)
        except (ValueError, RecursionError):
            yield written[at:]
            return
        yield written[at:end]
        at = end
        while at < len(written) and written[at] in "; \n\t":
            at += 1


def _from_python(call: ast.expr) -> ToolCall:
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name | ast.Attribute):
        return ToolCall(name="", problem=f"{ast.unparse(call)} is no call of a tool")
    name = ast.unparse(call.func)
    if call.args or any(one.arg is None for one in call.keywords):
        return ToolCall(name=name, problem="arguments must be given by name: tool(name=value)")
    try:
        arguments = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
    except ValueError:
        return ToolCall(name=name, problem="an argument is no plain value")
    return ToolCall(name=name, arguments=arguments)
