"""OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from rlinf_async.episodes.endpoint.ask import (
    Answer,
    Answers,
    Ask,
    Kind,
    Policy,
    Refused,
    Said,
    arguments_of,
    at_least_one,
    choice_of_tools,
    sampled,
    schema_of,
    stops,
    text_of,
)
from rlinf_async.episodes.template import as_call

HARMLESS: Final = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention"),
    }
)
NEUTRAL: Final[Mapping[str, Sequence[Any]]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "functions": ([],),
}
SPOKEN: Final = frozenset({"name", "annotations", "refusal", "provider_specific_fields"})
"""fields of messages that do not change what the model reads"""
ROLES: Final = {"system": "system", "developer": "system", "user": "user"}
PARTS: Final = ("text",)

KINDS: Final[Mapping[Kind, tuple[str, str | None]]] = {
    "invalid": ("invalid_request_error", None),
    "context": ("invalid_request_error", "context_length_exceeded"),
    "key": ("authentication_error", "invalid_api_key"),
    "turns": ("permission_error", "turns_exhausted"),
    "missing": ("invalid_request_error", "not_found"),
    "method": ("invalid_request_error", "method_not_allowed"),
    "too large": ("invalid_request_error", "request_too_large"),
    "failed": ("server_error", None),
}
"""type and code of each kind of error, in OpenAI's words"""


class Function(msgspec.Struct):
    name: str
    arguments: Any = ""


class Call(msgspec.Struct):
    id: str
    function: Function
    type: Literal["function"] = "function"


class Spoken(msgspec.Struct):
    role: str
    content: Any = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Declared(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    type: str
    function: Declared | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class Body(msgspec.Struct):
    """The fields that are understood."""

    model: str
    messages: list[Spoken]
    tools: list[Tool] | None = None
    tool_choice: Any = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    logprobs: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop_token_ids: list[int] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None


class ChatCompletions:
    """OpenAI's chat completions, as `Api`."""

    def read(self, body: Mapping[str, Any], policy: Policy) -> Ask:
        """Return what a request asks; raises `Refused`."""
        given = policy.fields(body, Body, harmless=HARMLESS, neutral=NEUTRAL)
        policy.parts(body["messages"], Spoken, SPOKEN, "messages[]")
        policy.parts(body.get("tools"), Tool, (), "tools[]")
        declared = [one.get("function") for one in body.get("tools") or ()]
        policy.parts(declared, Declared, (), "tools[].function")
        for one in given.tools or ():
            policy.sampled(
                "tools[].function.strict", (one.function and one.function.strict) or None, None
            )
        policy.sampled("parallel_tool_calls", given.parallel_tool_calls, True)
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        sampled(policy, **{name: getattr(given, name) for name in names})
        biases = {str(token): bias for token, bias in policy.sampling.logit_bias}
        policy.own("logit_bias", given.logit_bias, biases)
        policy.own("stop_token_ids", given.stop_token_ids, [*policy.sampling.stop_token_ids])
        policy.sampled("reasoning_effort", given.reasoning_effort, None)
        policy.sampled("verbosity", given.verbosity, None)
        return Ask(
            model=policy.model(given.model),
            messages=_messages(given.messages),
            tools=[_tool(one, f"tools[{at}]") for at, one in enumerate(given.tools or ())],
            calls=choice_of_tools(given.tool_choice, policy) and bool(given.tools),
            n=at_least_one(given.n, "n") or 1,
            max_tokens=at_least_one(given.max_completion_tokens, "max_completion_tokens")
            or at_least_one(given.max_tokens, "max_tokens"),
            stop=stops(given.stop, "stop"),
            seed=given.seed,
            logprobs=bool(given.logprobs),
            stream=bool(given.stream),
            usage=given.stream_options is not None and bool(given.stream_options.include_usage),
        )

    def reply(self, ask: Ask, answers: Answers) -> Any:
        """Return the body of a response."""
        choices = [
            {
                "index": at,
                "message": {"role": "assistant", "content": one.text or None, **_rest(one)},
                "logprobs": _logprobs(one) if ask.logprobs else None,
                "finish_reason": _finish(one),
            }
            for at, one in enumerate(answers.choices)
        ]
        head = _head(answers, "chat.completion")
        return {**head, "choices": choices, "usage": _usage(answers)}

    def events(self, ask: Ask, answers: Answers) -> Iterator[tuple[str, Any]]:
        """Yield the events of a stream."""
        head = _head(answers, "chat.completion.chunk")
        for at, one in enumerate(answers.choices):
            for delta in _deltas(one):
                yield "", {**head, "choices": [_choice(at, delta)]}
            last = _choice(at, {}, _finish(one))
            if ask.logprobs:
                last["logprobs"] = _logprobs(one)
            yield "", {**head, "choices": [last]}
        if ask.usage:
            yield "", {**head, "choices": [], "usage": _usage(answers)}
        yield "", "[DONE]"

    def refusal(self, refused: Refused) -> Any:
        """Return the body of an error."""
        kind, code = KINDS[refused.kind]
        return {
            "error": {
                "message": str(refused),
                "type": kind,
                "param": refused.field or None,
                "code": code,
            }
        }


def _messages(given: Sequence[Spoken]) -> list[Mapping[str, Any]]:
    said = Said()
    for at, one in enumerate(given):
        where = f"messages[{at}]"
        content = text_of(one.content, f"{where}.content", PARTS)
        if one.role in ROLES:
            said.say(ROLES[one.role], content)
        elif one.role == "tool":
            said.result(one.tool_call_id or "", content)
        elif one.role == "assistant":
            calls = [
                as_call(call.id, call.function.name, arguments_of(call.function.arguments, where))
                for call in one.tool_calls or ()
            ]
            said.answer(content, one.reasoning_content or one.reasoning or "", calls)
        else:
            raise Refused(
                f"{where}.role is {one.role!r}: it must be system, developer, user, assistant or "
                "tool",
                field=f"{where}.role",
            )
    return said.messages


def _tool(given: Tool, where: str) -> Any:
    if given.type != "function" or given.function is None:
        raise Refused(
            f"{where}: a tool of type {given.type!r} cannot be called; only functions can",
            field=where,
        )
    return schema_of(given.function.name, given.function.description, given.function.parameters)


def _head(answers: Answers, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{answers.id}",
        "object": kind,
        "created": answers.created,
        "model": answers.model,
    }


def _rest(answer: Answer) -> dict[str, Any]:
    """Return the fields of a message beside its text."""
    found: dict[str, Any] = {"refusal": None}
    if answer.thoughts:
        found["reasoning_content"] = answer.thoughts
    if answer.calls:
        found["tool_calls"] = [_call(one) for one in answer.calls]
    return found


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    written = msgspec.json.encode(function["arguments"]).decode()
    return {
        "id": call["id"],
        "type": "function",
        "function": {"name": function["name"], "arguments": written},
    }


def _deltas(answer: Answer) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": ""}
    if answer.thoughts:
        yield {"reasoning_content": answer.thoughts}
    if answer.text:
        yield {"content": answer.text}
    for at, call in enumerate(answer.calls):
        yield {"tool_calls": [{"index": at, **_call(call)}]}


def _choice(at: int, delta: Any, finish: str | None = None) -> dict[str, Any]:
    return {"index": at, "delta": delta, "logprobs": None, "finish_reason": finish}


def _finish(answer: Answer) -> str:
    return "tool_calls" if answer.calls else "length" if answer.cut else "stop"


def _logprobs(answer: Answer) -> dict[str, Any]:
    return {"content": logprobs_of(answer), "refusal": None}


def logprobs_of(answer: Answer) -> list[dict[str, Any]]:
    """Return the log-probs of all tokens of an answer, thoughts and calls included."""
    pairs = zip(answer.tokens, answer.drawn.log_prob.tolist(), strict=True)
    return [
        {"token": text, "logprob": value, "bytes": _bytes(text), "top_logprobs": []}
        for text, value in pairs
    ]


def _bytes(text: str) -> list[int] | None:
    """Return the bytes of a token; None: it is a part of a character, which no text tells."""
    return None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())


def _usage(answers: Answers) -> dict[str, int]:
    given, drawn = answers.prompt_tokens, answers.drawn_tokens
    return {"prompt_tokens": given, "completion_tokens": drawn, "total_tokens": given + drawn}
