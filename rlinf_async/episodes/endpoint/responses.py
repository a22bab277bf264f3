"""OpenAI's responses."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from rlinf_async.episodes.endpoint.ask import (
    Answer,
    Answers,
    Ask,
    Policy,
    Refused,
    Said,
    arguments_of,
    at_least_one,
    choice_of_tools,
    sampled,
    schema_of,
    text_of,
)
from rlinf_async.episodes.endpoint.chat_completions import ROLES, ChatCompletions, logprobs_of
from rlinf_async.episodes.template import as_call

HARMLESS: Final = frozenset(
    {
        *("user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "stream_options"),
    }
)
LOGPROBS: Final = "message.output_text.logprobs"
NEUTRAL: Final[Mapping[str, Sequence[Any]]] = {
    "background": (False,),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
}
INCLUDED: Final = frozenset({LOGPROBS, "reasoning.encrypted_content"})
ITEM: Final = frozenset({"id", "status", "summary", "encrypted_content", "phase", "namespace"})
"""fields of items that do not change what the model reads"""
PARTS: Final = ("input_text", "output_text", "text")


class Tool(msgspec.Struct):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Item(msgspec.Struct):
    """An item of the input, with the fields of all types that are understood."""

    type: str = "message"
    role: str = ""
    content: Any = None
    call_id: str = ""
    name: str = ""
    arguments: Any = ""
    output: Any = None


class Text(msgspec.Struct):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class Body(msgspec.Struct):
    """The fields that are understood."""

    model: str
    input: str | list[Item]
    instructions: str | None = None
    tools: list[Tool] | None = None
    tool_choice: Any = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    include: list[str] | None = None
    store: bool | None = None
    stream: bool | None = None
    parallel_tool_calls: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    reasoning: dict[str, Any] | None = None
    text: Text | None = None


class Responses:
    """OpenAI's responses, as `Api`."""

    refusal = ChatCompletions.refusal

    def read(self, body: Mapping[str, Any], policy: Policy) -> Ask:
        """Return what a request asks; raises `Refused`."""
        given = policy.fields(body, Body, harmless=HARMLESS, neutral=NEUTRAL)
        policy.parts(body["input"], Item, ITEM, "input[]")
        policy.parts(body.get("tools"), Tool, (), "tools[]")
        for one in given.tools or ():
            policy.sampled("tools[].strict", one.strict or None, None)
        policy.sampled("parallel_tool_calls", given.parallel_tool_calls, True)
        sampled(policy, temperature=given.temperature, top_p=given.top_p)
        for name, value in (given.reasoning or {}).items():
            policy.sampled(f"reasoning.{name}", value, None)
        if given.text is not None:
            policy.sampled("text.verbosity", given.text.verbosity, None)
            if given.text.format not in (None, {"type": "text"}):
                policy.unknown("text.format", "the model answers as it is, in no format")
        for name in given.include or ():
            if name not in INCLUDED:
                policy.unknown("include", f"{name!r} is not known here")
        return Ask(
            model=policy.model(given.model),
            messages=_messages(given),
            tools=[_tool(one, f"tools[{at}]") for at, one in enumerate(given.tools or ())],
            calls=choice_of_tools(given.tool_choice, policy) and bool(given.tools),
            max_tokens=at_least_one(given.max_output_tokens, "max_output_tokens"),
            logprobs=LOGPROBS in (given.include or ()),
            stream=bool(given.stream),
            previous=given.previous_response_id or "",
            kept=given.store is not False,
            instructions=bool(given.instructions),
        )

    def reply(self, ask: Ask, answers: Answers) -> Any:
        """Return the body of a response."""
        (answer,) = answers.choices
        response = _begun(ask, answers)
        given, drawn = answers.prompt_tokens, answers.drawn_tokens
        response["status"] = "incomplete" if answer.cut else "completed"
        response["incomplete_details"] = {"reason": "max_output_tokens"} if answer.cut else None
        response["output"] = list(_items(answer, answers.id, ask))
        response["usage"] = {
            "input_tokens": given,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": drawn,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": given + drawn,
        }
        return response

    def events(self, ask: Ask, answers: Answers) -> Iterator[tuple[str, Any]]:
        """Yield the events of a stream."""
        numbers = itertools.count()
        response = self.reply(ask, answers)
        begun = _begun(ask, answers)
        found: list[tuple[str, dict[str, Any]]] = [
            ("response.created", {"response": begun}),
            ("response.in_progress", {"response": begun}),
        ]
        for at, item in enumerate(response["output"]):
            found += _told(at, item)
        last = "response.incomplete" if answers.choices[0].cut else "response.completed"
        found.append((last, {"response": response}))
        for kind, fields in found:
            yield kind, {"type": kind, "sequence_number": next(numbers), **fields}


def _messages(given: Body) -> list[Mapping[str, Any]]:
    said = Said()
    if given.instructions:
        said.say("system", given.instructions)
    if isinstance(given.input, str):
        said.say("user", given.input)
        return said.messages
    for at, item in enumerate(given.input):
        where = f"input[{at}]"
        if item.type == "message":
            _message(said, item, where)
        elif item.type == "function_call":
            arguments = arguments_of(item.arguments, f"{where}.arguments")
            said.answer(calls=[as_call(item.call_id, item.name, arguments)])
        elif item.type == "function_call_output":
            content = text_of(item.output, f"{where}.output", PARTS)
            said.result(item.call_id, content)
        elif item.type == "reasoning":
            said.answer(thoughts=text_of(item.content, f"{where}.content", ("reasoning_text",)))
        else:
            raise Refused(
                f"{where}: an item of type {item.type!r} cannot be given to the model: message, "
                "function_call, function_call_output and reasoning can",
                field=where,
            )
    return said.messages


def _message(said: Said, item: Item, where: str) -> None:
    content = text_of(item.content, f"{where}.content", PARTS)
    if item.role == "assistant":
        said.answer(content)
    elif item.role in ROLES:
        said.say(ROLES[item.role], content)
    else:
        raise Refused(
            f"{where}.role is {item.role!r}: it must be system, developer, user or assistant",
            field=f"{where}.role",
        )


def _tool(given: Tool, where: str) -> Any:
    if given.type != "function":
        raise Refused(
            f"{where}: a tool of type {given.type!r} is one of the server's, and there are none "
            "here: only functions, which the agent carries out",
            field=where,
        )
    return schema_of(given.name, given.description, given.parameters)


def _begun(ask: Ask, answers: Answers) -> dict[str, Any]:
    """Return a response to which nothing was drawn yet."""
    return {
        "id": f"resp_{answers.id}",
        "object": "response",
        "created_at": answers.created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": ask.max_tokens,
        "metadata": {},
        "model": answers.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": ask.previous or None,
        "store": ask.kept,
        "temperature": answers.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": answers.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _items(answer: Answer, unique: str, ask: Ask) -> Iterator[dict[str, Any]]:
    if answer.thoughts:
        thought = {"type": "reasoning_text", "text": answer.thoughts}
        yield {"type": "reasoning", "id": f"rs_{unique}", "summary": [], "content": [thought]}
    if answer.text or not answer.calls:
        text = {
            "type": "output_text",
            "text": answer.text,
            "annotations": [],
            "logprobs": logprobs_of(answer) if ask.logprobs else [],
        }
        yield {
            "type": "message",
            "id": f"msg_{unique}",
            "role": "assistant",
            "status": "incomplete" if answer.cut else "completed",
            "content": [text],
        }
    for at, call in enumerate(answer.calls):
        function = call["function"]
        yield {
            "type": "function_call",
            "id": f"fc_{unique}{at}",
            "call_id": call["id"],
            "name": function["name"],
            "arguments": msgspec.json.encode(function["arguments"]).decode(),
            "status": "completed",
        }


def _told(at: int, item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events in which an item comes."""
    place = {"output_index": at, "item_id": item["id"]}
    empty: dict[str, Any] = (
        {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    )
    yield (
        "response.output_item.added",
        {"output_index": at, "item": {**item, **empty, "status": "in_progress"}},
    )
    if item["type"] == "function_call":
        written = item["arguments"]
        kind = "response.function_call_arguments"
        yield f"{kind}.delta", {**place, "delta": written}
        yield f"{kind}.done", {**place, "name": item["name"], "arguments": written}
    else:
        yield from _told_part({**place, "content_index": 0}, item["content"][0])
    yield "response.output_item.done", {"output_index": at, "item": item}


def _told_part(place: dict[str, Any], part: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    kind = f"response.{part['type']}"
    yield "response.content_part.added", {**place, "part": {**part, "text": ""}}
    beside = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    yield f"{kind}.delta", {**place, **beside, "delta": part["text"]}
    yield f"{kind}.done", {**place, **beside, "text": part["text"]}
    yield "response.content_part.done", {**place, "part": part}
