"""Calls of tools, as models of several families write them."""

from __future__ import annotations

import keyword
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlinf_async.config import ConfigError
from rlinf_async.episodes.parsing import Parsed, ToolCall, parser_of, parsers
from tests.episodes.kit import FAMILIES, Call

ADD = ToolCall(name="add", arguments={"a": 1, "b": 2})
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
    "llama": '{"name": "add", "parameters": {"a": 1, "b": 2}}',
    "pythonic": "[add(a=1, b=2)]",
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "call00000"}]',
    "deepseek": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"  # noqa: RUF001
        '{"a": 1, "b": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'  # noqa: RUF001
    ),
}
FORMATS = sorted(WRITTEN)

names = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,9}", fullmatch=True).filter(
    lambda name: name not in ("None", "True", "False", "true", "false", "null")
)
text = st.text(max_size=12).filter(lambda one: not any("\ud800" <= c <= "\udfff" for c in one))
# What ends a call within a string of it ends the call: as for the models themselves.
harmless = text.filter(lambda one: "<" not in one and "[" not in one and "`" not in one)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | harmless,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(harmless, inner, max_size=3),
    max_leaves=6,
)
keys = names.filter(lambda name: not keyword.iskeyword(name))
calls = st.lists(st.tuples(keys, st.dictionaries(keys, values, max_size=3)), min_size=1, max_size=3)
said = harmless.map(str.strip)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@settings(deadline=None)
@given(written=calls, text=said)
def test_what_a_family_writes_is_read_back(family: str, written: list[Call], text: str) -> None:
    one = FAMILIES[family]
    if not one.most_calls:
        written = []
    if not one.text_with_calls and written:
        text = ""
    found = parsers.load(one.parser)(one.write(text, written))
    assert found.text == text
    assert found.tool_calls == tuple(ToolCall(name=n, arguments=a) for n, a in written)


@pytest.mark.parametrize("parser", FORMATS)
def test_each_format_reads_a_call(parser: str) -> None:
    assert parsers.load(parser)(WRITTEN[parser]) == Parsed(text="", tool_calls=(ADD,))


@pytest.mark.parametrize("parser", FORMATS)
@pytest.mark.parametrize(
    "text",
    ["12", "", "I would [call] {something}", "a < b", '{"name": "Bob", "age": 3}', "[1, 2]", "[f]"],
)
def test_text_is_text(parser: str, text: str) -> None:
    assert parsers.load(parser)(text) == Parsed(text=text)


@pytest.mark.parametrize("parser", FORMATS)
def test_thoughts_are_no_text_and_call_nothing(parser: str) -> None:
    call = WRITTEN[parser]
    for thoughts in (f"<think>\nperhaps {call}?\n</think>\n\n", f"perhaps {call}?\n</think>"):
        assert parsers.load(parser)(f"{thoughts}12") == Parsed(
            text="12", thoughts=f"perhaps {call}?"
        )
        found = parsers.load(parser)(f"{thoughts}{call}")
        assert found == Parsed(text="", thoughts=f"perhaps {call}?", tool_calls=(ADD,))


@pytest.mark.parametrize("parser", FORMATS)
def test_an_answer_that_was_cut_is_a_call_with_a_problem_or_text_but_never_another_call(
    parser: str,
) -> None:
    whole = WRITTEN[parser]
    read = [parsers.load(parser)(whole[:end]) for end in range(len(whole))]
    problems = 0
    for found in read:
        for call in found.tool_calls:
            assert call == ADD or call.problem
            problems += bool(call.problem)
    assert problems > len(whole) / 4
    assert [bool(found.tool_calls) for found in read] == sorted(
        bool(found.tool_calls) for found in read
    )  # once a call has begun, it is no text again


OTHERS = [
    ("hermes", f"both:\n{WRITTEN['hermes']}\n{WRITTEN['hermes']}", "both:", (ADD, ADD)),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>',
     "", (ADD,)),
    ("llama", f'{WRITTEN["llama"]}; {{"name": "f", "parameters": {{}}}}', "",
     (ADD, ToolCall(name="f"))),
    ("llama", f"<|python_tag|>{WRITTEN['llama']}", "", (ADD,)),
    ("pythonic", "[add(a=1, b=2), tools.add(a=true, b=[null])]", "",
     (ADD, ToolCall(name="tools.add", arguments={"a": True, "b": [None]}))),
    ("mistral", 'now [TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]f{}', "now",
     (ADD, ToolCall(name="f"))),
    ("deepseek", '<|tool_calls_begin|><|tool_call_begin|>add<|tool_sep|>{"a": 1, "b": 2}', "",
     (ADD,)),
]  # fmt: skip


@pytest.mark.parametrize(("parser", "text", "rest", "found"), OTHERS)
def test_variants(parser: str, text: str, rest: str, found: tuple[ToolCall, ...]) -> None:
    assert parsers.load(parser)(text) == Parsed(text=rest, tool_calls=found)


UNREADABLE = [
    ("hermes", "<tool_call>{add}</tool_call>", "the call is no JSON"),
    ("hermes", '<tool_call>{"name": "add", "argu', "the call is no JSON"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "the call has no name"),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "must be an object"),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>', "JSON has not"),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"x": "\\ud800"}}</tool_call>',
     "JSON has not"),
    ("hermes", '<tool_call>{"name": "a", "arguments": ' + "[" * 9999 + "</tool_call>", "no JSON"),
    ("llama", '{"name": "add", "parameters": "1"}', "must be an object"),
    ("llama", '{"name": "add", "parameters": {"a": 1}', "the call is no JSON"),
    ("pythonic", "[add(1, 2)]", "by name"),
    ("pythonic", "[add(a=b)]", "no plain value"),
    ("pythonic", "[add(a={[]: 1})]", "no plain value"),
    ("pythonic", "[add(a={1, 2})]", "JSON has not"),
    ("pythonic", "[add(a=1]", "no list of calls"),
    ("pythonic", "[add(a=1), 2]", "an entry of the list is no call"),
    ("mistral", "[TOOL_CALLS] [", "the calls are no JSON"),
    ("mistral", "[TOOL_CALLS] []", "the list of calls is empty"),
    ("mistral", "[TOOL_CALLS]add{", "arguments are no JSON"),
    ("deepseek", "<|tool_calls_begin|>", "the calls begin, and there is none"),
    ("deepseek", "<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>add", "are no JSON"),
    ("deepseek", "<|tool_calls_begin|><|tool_call_begin|>\n{}", "the call has no name"),
]  # fmt: skip


@pytest.mark.parametrize(("parser", "text", "problem"), UNREADABLE)
def test_a_call_that_cannot_be_read_says_why(parser: str, text: str, problem: str) -> None:
    call = parsers.load(parser)(text).tool_calls[-1]
    assert problem in call.problem


@given(text=st.text(max_size=60))
@example(text="\\d")
@example(text="f()()")
def test_nothing_that_a_model_writes_raises(text: str) -> None:
    for parser in FORMATS:
        opening = WRITTEN[parser][: len(WRITTEN[parser]) // 2]
        for written in (text, opening + text, f"[add({text})]", f'{{"name": {text}'):
            parsers.load(parser)(written)


@pytest.mark.parametrize("parser", FORMATS)
def test_a_long_answer_is_read_at_once(parser: str) -> None:
    """No pattern takes more than time in proportion to the answer."""
    call = WRITTEN[parser]
    for piece in ("\n", " ", "<think>", "<tool_call>", "[TOOL_CALLS]", "{", "`", "add(", call):
        began = time.monotonic()
        parsers.load(parser)(piece * (200_000 // len(piece)))
        parsers.load(parser)(call[: len(call) // 2] + piece * (200_000 // len(piece)))
        assert time.monotonic() - began < 5, piece


def test_a_parser_of_the_users_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from rlinf_async.episodes import Parsed, ToolCall\n"
        "def parser(text):\n"
        "    return Parsed(text='', tool_calls=(ToolCall(name=text),))\n"
        "def other(text, more):\n"
        "    return Parsed(text=text)\n"
    )
    assert parser_of(f"{file}:parser")("add").tool_calls == (ToolCall(name="add"),)
    with pytest.raises(ConfigError, match=r"episode.tool_format: .*takes other arguments"):
        parser_of(f"{file}:other", ("episode", "tool_format"))
    with pytest.raises(ConfigError, match="did you mean 'hermes'"):
        parser_of("herms", ("episode", "tool_format"))


def test_what_is_built_in_is_not_wrapped() -> None:
    found: Any = parser_of("hermes")
    assert found is parsers.load("hermes")
