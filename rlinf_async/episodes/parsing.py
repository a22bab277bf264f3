"""What a model answered: text, thoughts, and calls of tools, by the name of their format.

::

    hermes    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>      Qwen, Hermes
    llama     {"name": "add", "parameters": {"a": 1}}, several with ";" between  Llama 3
    pythonic  [add(a=1), add(a=2)]                                               Llama 4, Olmo
    mistral   [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]              Mistral
    deepseek  <|tool▁call▁begin|>function<|tool▁sep|>add, JSON in a block        DeepSeek
    "file.py:parser"    a function of one's own: text of an answer -> `Parsed`

A call that cannot be read is a call all the same: its ``problem`` says why, and the model is told.
So is one that ends in the middle, where an answer was cut.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from rlinf_async.config.registry import Path, Registry, raised


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a tool, as the model wrote it."""

    name: str
    """name of the tool; empty where none can be read"""
    arguments: dict[str, Any] = {}
    """values that JSON can hold"""
    problem: str = ""
    """why it cannot be carried out; empty: it can be tried"""


class Parsed(msgspec.Struct, frozen=True, kw_only=True):
    """An answer, read."""

    text: str
    """what is neither thought nor call"""
    thoughts: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class ParserError(Exception):
    """A parser of the user's own raised, or returned something else than `Parsed`."""


Parser = Callable[[str], Parsed]
"""Reads the text of an answer, special tokens of the format included, those of its end not."""

parsers: Registry[Parser] = Registry(
    "format of tool calls", group="rlinf_async.tool_formats", called_with=("text",)
)


def parser_of(name: str, path: Path = ()) -> Parser:
    """Return the parser of a name, or a user's own (``"file.py:parser"``), which is not trusted to
    return what it should.

    Raises:
        ConfigError: there is none; ``path`` is the setting that names it.
    """
    parser = parsers.check(name, path)

    def checked(text: str) -> Parsed:
        try:
            found: object = parser(text)
        except Exception as error:  # a user's own code may raise anything
            raise ParserError(
                f"parser {name!r} raised {raised(error)} for the answer {text[:_SHOWN]!r}"
            ) from error
        if not isinstance(found, Parsed):
            raise ParserError(f"parser {name!r} returned {found!r:.100}, not Parsed")
        try:  # looks at each field, and at what is in them
            return msgspec.convert(msgspec.to_builtins(found), Parsed)
        except Exception as error:  # arguments may be anything
            raise ParserError(
                f"parser {name!r} returned what is no answer: {raised(error)} (it read "
                f"{text[:_SHOWN]!r})"
            ) from error

    return parser if parser in _BUILT_IN else checked


_SHOWN: Final = 200
_THOUGHTS: Final = re.compile(r"\s*(?:<think>)?(.*?)</think>", re.DOTALL)
_HERMES: Final = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_PYTHON_TAG: Final = "<|python_tag|>"
_MISTRAL: Final = "[TOOL_CALLS]"
_ONE_CALL: Final = re.compile(r"\s*([\w.-]+)\s*(?:\[ARGS\])?\s*(\{.*)", re.DOTALL)
_BAR: Final = "[|\uff5c]"  # DeepSeek writes the full-width one
_UNDER: Final = "[\u2581_ ]"
_CALLS_BEGIN: Final = re.compile(f"<{_BAR}tool{_UNDER}calls{_UNDER}begin{_BAR}>")
_CALL: Final = re.compile(
    f"<{_BAR}tool{_UNDER}call{_UNDER}begin{_BAR}>(.*?)"
    f"(?:<{_BAR}tool{_UNDER}call{_UNDER}end{_BAR}>|$)",
    re.DOTALL,
)
_SEPARATOR: Final = re.compile(f"<{_BAR}tool{_UNDER}sep{_BAR}>")


def thoughts_and_rest(text: str) -> tuple[str, str]:
    """Return what the model thought before its answer, and the answer."""
    found = _THOUGHTS.match(text) if "</think>" in text else None
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
    objects = tuple(_objects(written)) if written.startswith("{") else ()
    if not any('"name"' in one and _calls_something(one) for one in objects):
        return Parsed(text=answer.strip(), thoughts=thoughts)
    calls = tuple(_from_json(one, "parameters") for one in objects)
    return Parsed(text="", thoughts=thoughts, tool_calls=calls)


def pythonic(text: str) -> Parsed:
    """Read an answer that is a list of Python calls with keywords, as Llama 4 writes it."""
    thoughts, answer = thoughts_and_rest(text)
    written = answer.strip()
    if not re.match(r"\[\s*[A-Za-z_][\w.]*\s*\(", written):
        return Parsed(text=written, thoughts=thoughts)
    try:
        with warnings.catch_warnings():  # Python warns of odd escapes in what the model wrote
            warnings.simplefilter("ignore")
            tree = ast.parse(written, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        call = ToolCall(name="", problem=f"this is no list of calls: {error}")
        return Parsed(text="", thoughts=thoughts, tool_calls=(call,))
    listed = tree.elts if isinstance(tree, ast.List) else [tree]
    calls = tuple(_from_python(one) for one in listed)
    return Parsed(text="", thoughts=thoughts, tool_calls=calls)


def mistral(text: str) -> Parsed:
    """Read what follows ``[TOOL_CALLS]``: a list of calls, or name and arguments of each."""
    thoughts, answer = thoughts_and_rest(text)
    said, *written = answer.split(_MISTRAL)
    calls = tuple(call for one in written for call in _mistral_calls(one))
    return Parsed(text=said.strip(), thoughts=thoughts, tool_calls=calls)


def deepseek(text: str) -> Parsed:
    """Read calls between ``<|tool▁call▁begin|>`` and ``<|tool▁call▁end|>``."""
    thoughts, answer = thoughts_and_rest(text)
    begin = _CALLS_BEGIN.search(answer)
    if begin is None:
        return Parsed(text=answer.strip(), thoughts=thoughts)
    calls = tuple(_deepseek_call(found[1]) for found in _CALL.finditer(answer, begin.end()))
    if not calls:
        calls = (ToolCall(name="", problem="the calls begin, and there is none"),)
    return Parsed(text=answer[: begin.start()].strip(), thoughts=thoughts, tool_calls=calls)


_BUILT_IN: Final = (hermes, llama, pythonic, mistral, deepseek)
for _parser in _BUILT_IN:
    parsers.register(_parser.__name__)(_parser)


def _mistral_calls(written: str) -> list[ToolCall]:
    one = _ONE_CALL.fullmatch(written)
    if one is not None:  # newer models: [TOOL_CALLS]name{...}
        return [_from_arguments(one[1], one[2].strip(), "arguments")]
    try:
        found = json.loads(written)
    except (ValueError, RecursionError) as error:
        return [ToolCall(name="", problem=f"the calls are no JSON: {error}")]
    listed = found if isinstance(found, list) else [found]
    if not listed:
        return [ToolCall(name="", problem="the list of calls is empty")]
    return [_from_object(one, "arguments") for one in listed]


def _deepseek_call(written: str) -> ToolCall:
    # V3:   function<sep>name, then the arguments in a block; V3.1: name<sep>arguments
    head, _, rest = written.partition("\n")
    parts = _SEPARATOR.split(head, maxsplit=1)
    name, arguments = parts[-1], rest
    if len(parts) == 2 and "{" in parts[1]:
        name, arguments = parts[0], f"{parts[1]}\n{rest}"
    arguments = arguments.strip().removeprefix("```json").removesuffix("```").strip()
    if not name.strip():
        return ToolCall(name="", problem="the call has no name")
    return _from_arguments(name.strip(), arguments, "arguments")


def _calls_something(written: str) -> bool:
    """Return whether a JSON object is a call, or one that was cut, and not an answer in JSON."""
    try:
        found = json.loads(written)
    except (ValueError, RecursionError):
        return True
    return isinstance(found, dict) and ("parameters" in found or "arguments" in found)


def _from_json(written: str, arguments_key: str) -> ToolCall:
    try:
        found = json.loads(written)
    except (ValueError, RecursionError) as error:
        return ToolCall(name="", problem=f"the call is no JSON: {error}")
    return _from_object(found, arguments_key)


def _from_object(found: object, arguments_key: str) -> ToolCall:
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return ToolCall(name="", problem="the call has no name: write {'name': ..., ...}")
    name = found["name"]
    arguments = found.get(arguments_key, found.get("arguments", found.get("parameters", {})))
    if isinstance(arguments, str):  # JSON within JSON, as OpenAI's own format has it
        return _from_arguments(name, arguments, arguments_key)
    return _checked(name, arguments, arguments_key)


def _from_arguments(name: str, written: str, arguments_key: str) -> ToolCall:
    try:
        return _checked(name, json.loads(written), arguments_key)
    except (ValueError, RecursionError) as error:
        return ToolCall(name=name, problem=f"{arguments_key} are no JSON: {error}")


def _checked(name: str, arguments: object, arguments_key: str) -> ToolCall:
    if not isinstance(arguments, dict):
        return ToolCall(name=name, problem=f"{arguments_key} must be an object, by name")
    try:
        json.dumps([name, arguments], ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError):  # infinite, half a character, a set
        return ToolCall(name="", problem=f"{arguments_key} have a value that JSON has not")
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


_PLAIN: Final = {"true": True, "false": False, "null": None}


class _JsonNames(ast.NodeTransformer):
    """Models write ``true`` as well as ``True``."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_PLAIN[node.id]) if node.id in _PLAIN else node


def _from_python(call: ast.expr) -> ToolCall:
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name | ast.Attribute):
        return ToolCall(name="", problem="an entry of the list is no call of a tool")
    try:
        name = ast.unparse(call.func)
        if call.args or any(one.arg is None for one in call.keywords):
            return ToolCall(name=name, problem="arguments must be given by name: tool(name=value)")
        arguments = {
            str(one.arg): ast.literal_eval(_JsonNames().visit(one.value)) for one in call.keywords
        }
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return ToolCall(name="", problem="an argument is no plain value")
    return _checked(name, arguments, "arguments")
