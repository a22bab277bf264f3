"""Anthropic's messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from rlinf_async.episodes.endpoint.ask import (
    PART,
    Answer,
    Answers,
    Ask,
    Kind,
    Part,
    Policy,
    Refused,
    Said,
    arguments_of,
    at_least_one,
    choice_of_tools,
    converted,
    sampled,
    schema_of,
    stops,
    text_of,
)
from rlinf_async.episodes.template import as_call

HARMLESS: Final = frozenset({"metadata", "service_tier", "cache_control"})
NEUTRAL: Final[Mapping[str, Sequence[Any]]] = {"mcp_servers": ([],), "betas": ([],)}
PARTS: Final = ("text",)
FAILED: Final = "error:"
"""what the text of a tool that failed begins with, as that of a tool of ours does"""
TOOL: Final = frozenset({"cache_control", "eager_input_streaming"})
"""fields of tools that do not change what the model reads"""
KINDS: Final[Mapping[Kind, str]] = {
    "invalid": "invalid_request_error",
    "context": "invalid_request_error",
    "key": "authentication_error",
    "turns": "permission_error",
    "missing": "not_found_error",
    "method": "invalid_request_error",
    "too large": "request_too_large",
    "failed": "api_error",
}
"""type of each kind of error, in Anthropic's words"""


class Spoken(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]]


class Tool(msgspec.Struct):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class Thinking(msgspec.Struct):
    type: str
    budget_tokens: int | None = None


class Body(msgspec.Struct):
    """The fields that are understood."""

    model: str
    messages: list[Spoken]
    system: Any = None
    tools: list[Tool] | None = None
    tool_choice: Any = None
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    thinking: Thinking | None = None
    output_config: dict[str, Any] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


class AnthropicMessages:
    """Anthropic's messages, as `Api`."""

    def read(self, body: Mapping[str, Any], policy: Policy) -> Ask:
        """Return what a request asks; raises `Refused`."""
        given = policy.fields(body, Body, harmless=HARMLESS, neutral=NEUTRAL)
        policy.parts(body["messages"], Spoken, (), "messages[]")
        policy.parts(body.get("system"), Part, PART, "system[]")
        policy.parts(body.get("tools"), Tool, TOOL, "tools[]")
        sampled(policy, temperature=given.temperature, top_p=given.top_p, top_k=given.top_k)
        for name, value in (given.output_config or {}).items():
            if name == "effort":
                policy.sampled("output_config.effort", value, None)
            elif value is not None:
                policy.unknown(f"output_config.{name}", "the model answers as it is, in no format")
        for one in given.tools or ():
            policy.sampled("tools[].strict", one.strict or None, None)
        if isinstance(given.tool_choice, dict):
            alone = given.tool_choice.get("disable_parallel_tool_use")
            policy.sampled("tool_choice.disable_parallel_tool_use", alone or None, None)
        thinking = given.thinking is not None and given.thinking.type != "disabled"
        if given.thinking is not None:
            policy.sampled("thinking.budget_tokens", given.thinking.budget_tokens, None)
        return Ask(
            model=policy.model(given.model),
            messages=_messages(given),
            tools=[_tool(one, f"tools[{at}]") for at, one in enumerate(given.tools or ())],
            calls=choice_of_tools(given.tool_choice, policy) and bool(given.tools),
            max_tokens=at_least_one(given.max_tokens, "max_tokens"),
            stop=stops(given.stop_sequences, "stop_sequences"),
            stream=bool(given.stream),
            thoughts=thinking,
        )

    def reply(self, ask: Ask, answers: Answers) -> Any:
        """Return the body of a response."""
        (answer,) = answers.choices
        return {
            **_head(answers),
            "content": list(_blocks(answer, ask)),
            "stop_reason": _reason(answer),
            "stop_sequence": answer.stopped or None,
            "usage": _usage(answers, answers.drawn_tokens),
        }

    def events(self, ask: Ask, answers: Answers) -> Iterator[tuple[str, Any]]:
        """Yield the events of a stream."""
        (answer,) = answers.choices
        begun = {**_head(answers), "content": [], "stop_reason": None, "stop_sequence": None}
        yield _event("message_start", message={**begun, "usage": _usage(answers, 0)})
        for at, block in enumerate(_blocks(answer, ask)):
            empty, deltas = _opened(block)
            yield _event("content_block_start", index=at, content_block=empty)
            for delta in deltas:
                yield _event("content_block_delta", index=at, delta=delta)
            yield _event("content_block_stop", index=at)
        end = {"stop_reason": _reason(answer), "stop_sequence": answer.stopped or None}
        yield _event("message_delta", delta=end, usage={"output_tokens": answers.drawn_tokens})
        yield _event("message_stop")

    def refusal(self, refused: Refused) -> Any:
        """Return the body of an error."""
        return {"type": "error", "error": {"type": KINDS[refused.kind], "message": str(refused)}}


def _messages(given: Body) -> list[Mapping[str, Any]]:
    said = Said()
    system = text_of(given.system, "system", PARTS)
    if system:
        said.say("system", system)
    for at, one in enumerate(given.messages):
        where = f"messages[{at}]"
        blocks = (
            [{"type": "text", "text": one.content}] if isinstance(one.content, str) else one.content
        )
        if one.role == "assistant":
            _answered(said, blocks, f"{where}.content")
        elif one.role == "user":
            _said(said, blocks, f"{where}.content")
        elif one.role == "system":
            said.say("system", text_of(one.content, f"{where}.content", PARTS))
        else:
            raise Refused(
                f"{where}.role is {one.role!r}: it must be user or assistant", field=f"{where}.role"
            )
    return said.messages


def _answered(said: Said, blocks: Sequence[Mapping[str, Any]], where: str) -> None:
    for at, given in enumerate(blocks):
        block = converted(given, Part, f"{where}[{at}]")
        if block.type == "tool_use":
            arguments = arguments_of(block.input or {}, f"{where}[{at}].input")
            said.answer(calls=[as_call(block.id, block.name, arguments)])
        elif block.type == "thinking":
            said.answer(thoughts=block.thinking)
        else:
            said.answer(text_of([given], where, PARTS))


def _said(said: Said, blocks: Sequence[Mapping[str, Any]], where: str) -> None:
    """Append a message of the user: results of tools, and texts between them."""
    texts: list[Any] = []

    def say() -> None:
        if texts:
            said.say("user", text_of(texts, where, PARTS))
            texts.clear()

    for at, given in enumerate(blocks):
        if given.get("type") != "tool_result":
            texts.append(given)
            continue
        say()
        block = converted(given, Part, f"{where}[{at}]")
        content = text_of(block.content, f"{where}[{at}].content", PARTS)
        if block.is_error and not content.startswith(FAILED):  # no template knows of it
            content = f"{FAILED} {content}"
        said.result(block.tool_use_id, content)
    say()


def _tool(given: Tool, where: str) -> Any:
    if given.type not in (None, "custom"):
        raise Refused(
            f"{where}: a tool of type {given.type!r} is one of the server's, and there are none "
            "here: only tools with an input_schema, which the agent carries out",
            field=where,
        )
    return schema_of(given.name, given.description, given.input_schema)


def _head(answers: Answers) -> dict[str, Any]:
    return {
        "id": f"msg_{answers.id}",
        "type": "message",
        "role": "assistant",
        "model": answers.model,
    }


def _blocks(answer: Answer, ask: Ask) -> Iterator[dict[str, Any]]:
    if answer.thoughts and ask.thoughts:
        yield {"type": "thinking", "thinking": answer.thoughts, "signature": ""}
    if answer.text or not answer.calls:
        yield {"type": "text", "text": answer.text}
    for call in answer.calls:
        function = call["function"]
        yield {
            "type": "tool_use",
            "id": call["id"],
            "name": function["name"],
            "input": function["arguments"],
        }


def _opened(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a block as it begins, and what is added to it."""
    if block["type"] == "tool_use":
        written = msgspec.json.encode(block["input"]).decode()
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": written}]
    if block["type"] == "thinking":
        told = {"type": "thinking_delta", "thinking": block["thinking"]}
        return {**block, "thinking": ""}, [told]
    return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]


def _reason(answer: Answer) -> str:
    if answer.calls:
        return "tool_use"
    if answer.stopped:
        return "stop_sequence"
    return "max_tokens" if answer.cut else "end_turn"


def _usage(answers: Answers, drawn: int) -> dict[str, int]:
    return {"input_tokens": answers.prompt_tokens, "output_tokens": drawn}


def _event(kind: str, **fields: Any) -> tuple[str, Any]:
    return kind, {"type": kind, **fields}
