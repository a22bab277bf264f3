"""Calls of tools, as models of several families write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_async.episodes.parsing import Parsed, ToolCall, parsers
from tests.episodes.kit import FAMILIES

ADD = ToolCall(name="add", arguments={"a": 1, "b": 2})


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_each_family_writes_a_call_in_its_own_way(family: str) -> None:
    one = FAMILIES[family]
    assert parsers.load(one.parser)(one.call).tool_calls == (ADD,)


@pytest.mark.parametrize("parser", ["hermes", "llama", "pythonic"])
@pytest.mark.parametrize("text", ["12", "", "I would [call] {something}", "a < b"])
def test_text_is_text(parser: str, text: str) -> None:
    assert parsers.load(parser)(text) == Parsed(text=text)


@pytest.mark.parametrize("parser", ["hermes", "llama", "pythonic"])
def test_thoughts_are_no_text_and_call_nothing(parser: str) -> None:
    call = next(one.call for one in FAMILIES.values() if one.parser == parser)
    found = parsers.load(parser)(f"<think>\nperhaps {call}?\n</think>\n\n12")
    assert found == Parsed(text="12", thoughts=f"perhaps {call}?")


def test_several_calls() -> None:
    one = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
    found = parsers.load("hermes")(
        f"both:\n<tool_call>\n{one}\n</tool_call>\n<tool_call>{one}</tool_call>"
    )
    assert found == Parsed(text="both:", tool_calls=(ADD, ADD))
    two = '{"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": "f", "parameters": {}}'
    assert parsers.load("llama")(two).tool_calls == (ADD, ToolCall(name="f"))
    listed = parsers.load("pythonic")("[add(a=1, b=2), add(a=1, b=2)]")
    assert listed.tool_calls == (ADD, ADD)


@pytest.mark.parametrize(
    ("parser", "text", "problem"),
    [
        ("hermes", "<tool_call>{add}</tool_call>", "the call is no JSON"),
        ("hermes", '<tool_call>{"name": "add", "argu', "the call is no JSON"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "the call has no name"),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "must be an object"),
        ("llama", '{"name": "add", "parameters": "1"}', "must be an object"),
        ("pythonic", "[add(1, 2)]", "by name"),
        ("pythonic", "[add(a=b)]", "no plain value"),
        ("pythonic", "[add(a=1]", "no list of calls"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(parser: str, text: str, problem: str) -> None:
    [call] = parsers.load(parser)(text).tool_calls
    assert problem in call.problem


@given(text=st.text(max_size=60))
def test_nothing_that_a_model_writes_raises(text: str) -> None:
    for parser in ("hermes", "llama", "pythonic"):
        for written in (text, f"<tool_call>{text}", f'{{"name": {text}', f"[add({text})]"):
            parsers.load(parser)(written)
