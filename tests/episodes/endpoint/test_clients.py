"""The clients of OpenAI and Anthropic, unchanged, against the endpoint: what they are told, and
that what is trained is what the engine drew."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from typing import Any

import anthropic
import openai
import pytest

from rlinf_async.episodes import Episode
from tests.episodes.endpoint.kit import ADD, ADD_PARAMETERS, CALL, Scripted, served

pytestmark = pytest.mark.usefixtures("loop_kind")

QUESTION: Any = [{"role": "user", "content": "What is 1 + 2?"}]
STRICT: Any = {"type": "function", "function": {**ADD["function"], "strict": True}}
"""the client reads streams of tools only where they are so"""
RESPONSES_ADD: Any = {"type": "function", "name": "add", "parameters": ADD_PARAMETERS}
ANTHROPIC_ADD: Any = {"name": "add", "description": "Add.", "input_schema": ADD_PARAMETERS}
THOUGHT = "<think>\none and two\n</think>\n\nthree"
RESULT = "3"


def openai_client(episode: Episode) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=episode.base_url, api_key=episode.key, max_retries=0)


def anthropic_client(episode: Episode) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=episode.base_url, api_key=episode.key, max_retries=0)


async def completion(client: openai.AsyncOpenAI, stream: bool, **options: Any) -> Any:
    """A chat completion, streamed or not: its choice."""
    create: Any = client.chat.completions.create
    if not stream:
        return (await create(model="gpt-9", **options)).choices[0]
    async with client.chat.completions.stream(model="gpt-9", **options) as events:
        async for _ in events:
            pass
        found: Any = await events.get_final_completion()
    return found.choices[0]


async def response(client: openai.AsyncOpenAI, stream: bool, **options: Any) -> Any:
    create: Any = client.responses.create
    if not stream:
        return await create(model="gpt-9", **options)
    found: Any = None
    async with client.responses.stream(model="gpt-9", **options) as events:
        async for event in events:  # `get_final_response` has none where it is incomplete
            found = event
    return found.response


async def message(client: anthropic.AsyncAnthropic, stream: bool, **options: Any) -> Any:
    create: Any = client.messages.create
    options = {"max_tokens": 500, **options}
    if not stream:
        return await create(model="claude-9", **options)
    async with client.messages.stream(model="claude-9", **options) as events:
        async for _ in events:
            pass
        return await events.get_final_message()


streamed = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@streamed
async def test_chat_completions_call_a_tool_and_go_on(stream: bool) -> None:
    async with (
        served([CALL, THOUGHT]) as (episode, model),
        openai_client(episode) as client,
    ):
        messages = list(QUESTION)
        first = await completion(client, stream, messages=messages, tools=[STRICT])
        assert first.finish_reason == "tool_calls"
        (call,) = first.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == (
            "add",
            {"a": 1, "b": 2},
        )
        messages += [
            first.message.to_dict(),
            {"role": "tool", "tool_call_id": call.id, "content": RESULT},
        ]
        second = await completion(client, stream, messages=messages, tools=[STRICT])
        assert (second.finish_reason, second.message.content) == ("stop", "three")
        assert second.message.reasoning_content == "one and two"
        (chat,) = episode.chats
        assert len(chat.turns) == 2
        assert f"<tool_response>\n{RESULT}" in model.tokenizer.decode(model.draws[1].context)


@streamed
async def test_responses_call_a_tool_and_go_on(stream: bool) -> None:
    async with (
        served([CALL, THOUGHT, "bye"]) as (episode, _),
        openai_client(episode) as client,
    ):
        items = list(QUESTION)
        options: Any = {"tools": [RESPONSES_ADD], "instructions": "Be brief."}
        first = await response(client, stream, input=items, **options)
        assert first.status == "completed"
        (call,) = first.output
        assert (call.type, call.name, json.loads(call.arguments)) == (
            "function_call", "add", {"a": 1, "b": 2},
        )  # fmt: skip
        result = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
        items += [call.to_dict(), result]
        second = await response(client, stream, input=items, **options)
        assert second.output_text == "three"
        assert second.output[0].content[0].text == "one and two"
        items += [one.to_dict() for one in second.output]
        items.append({"role": "user", "content": "thanks"})
        third = await response(client, stream, input=items, **options)
        assert third.output_text == "bye"
        (chat,) = episode.chats
        assert len(chat.turns) == 3


@streamed
async def test_responses_go_on_from_the_one_before(stream: bool) -> None:
    async with (
        served([CALL, "three", "four"]) as (episode, _),
        openai_client(episode) as client,
    ):
        options: Any = {"tools": [RESPONSES_ADD], "instructions": "Be brief."}
        first = await response(client, stream, input="What is 1 + 2?", **options)
        call_id = first.output[0].call_id
        result = [{"type": "function_call_output", "call_id": call_id, "output": RESULT}]
        second = await response(
            client, stream, input=result, previous_response_id=first.id, **options
        )
        third = await response(
            client, stream, input="on", previous_response_id=second.id, store=False, **options
        )
        assert third.output_text == "four"
        (chat,) = episode.chats
        assert len(chat.turns) == 3
        for unknown in ("resp_none", third.id):
            with pytest.raises(openai.BadRequestError, match="there is no response"):
                await client.responses.create(model="m", input="on", previous_response_id=unknown)


@streamed
async def test_messages_call_a_tool_and_go_on(stream: bool) -> None:
    async with (
        served([CALL, THOUGHT, "bye"]) as (episode, _),
        anthropic_client(episode) as client,
    ):
        messages = list(QUESTION)
        options: Any = {"tools": [ANTHROPIC_ADD], "system": "Be brief."}
        first = await message(client, stream, messages=messages, **options)
        assert first.stop_reason == "tool_use"
        (call,) = first.content
        assert (call.type, call.name, call.input) == ("tool_use", "add", {"a": 1, "b": 2})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": RESULT}
        messages += [
            {"role": "assistant", "content": [one.to_dict() for one in first.content]},
            {"role": "user", "content": [result, {"type": "text", "text": "well?"}]},
        ]
        thinking = {"type": "enabled", "budget_tokens": 1024}
        second = await message(client, stream, messages=messages, thinking=thinking, **options)
        assert second.stop_reason == "end_turn"
        thought, text = second.content
        assert (thought.thinking, text.text) == ("one and two", "three")
        messages += [
            {"role": "assistant", "content": [one.to_dict() for one in second.content]},
            {"role": "user", "content": "thanks"},
        ]
        third = await message(client, stream, messages=messages, **options)
        assert third.content[0].text == "bye"
        (chat,) = episode.chats
        assert len(chat.turns) == 3
        counted = await client.messages.count_tokens(
            model="claude-9", messages=QUESTION, tools=[ANTHROPIC_ADD], system="Be brief."
        )
        assert counted.input_tokens == first.usage.input_tokens


@streamed
async def test_one_conversation_over_all_interfaces_is_one_branch(stream: bool) -> None:
    async with (
        served(["one", "two", "three"]) as (episode, _),
        openai_client(episode) as client,
        anthropic_client(episode) as other,
    ):
        messages = list(QUESTION)
        first = await completion(client, stream, messages=messages)
        messages += [{"role": "assistant", "content": first.message.content}]
        messages += [{"role": "user", "content": "on"}]
        second = await message(other, stream, messages=messages)
        messages += [{"role": "assistant", "content": second.content[0].text}]
        messages += [{"role": "user", "content": "on"}]
        third = await response(client, stream, input=messages)
        assert third.output_text == "three"
        (chat,) = episode.chats
        assert len(chat.turns) == 3


@streamed
@pytest.mark.parametrize(
    ("answer", "options", "text", "reasons"),
    [
        ("one two", {}, "one two", ("stop", "completed", "end_turn")),
        ("one two", {"stop": ["two"]}, "one", ("stop", None, "stop_sequence")),
        ("one two", {"most": 3}, "one", ("length", "incomplete", "max_tokens")),
        ("", {}, "", ("stop", "completed", "end_turn")),
        ("Grüße, 世界 🙂", {}, "Grüße, 世界 🙂", ("stop", "completed", "end_turn")),
    ],
)
async def test_an_answer_ends_for_the_same_reason_in_all_interfaces(
    stream: bool, answer: str, options: dict[str, Any], text: str, reasons: tuple[Any, ...]
) -> None:
    stop, most = options.get("stop"), options.get("most")
    async with (
        served([answer] * 3) as (episode, _),
        openai_client(episode) as client,
        anthropic_client(episode) as other,
    ):
        own = {"stop": stop} if stop else {}
        own |= {"max_completion_tokens": most} if most else {}
        found = await completion(client, False, messages=QUESTION, **own)
        assert ((found.message.content or "").strip(), found.finish_reason) == (text, reasons[0])
        if reasons[1]:
            own = {"max_output_tokens": most} if most else {}
            responded = await response(client, stream, input=QUESTION, **own)
            assert (responded.output_text.strip(), responded.status) == (text, reasons[1])
        own = {"stop_sequences": stop} if stop else {}
        own |= {"max_tokens": most} if most else {}
        said = await message(other, stream, messages=QUESTION, **own)
        assert (said.content[0].text.strip(), said.stop_reason) == (text, reasons[2])
        assert said.stop_sequence == (stop[0] if stop else None)


async def test_raw_streams_of_chat_completions_have_what_was_asked_for() -> None:
    async with served([CALL, "b", "c"]) as (episode, model), openai_client(episode) as client:
        create: Any = client.chat.completions.create
        options = {"stream_options": {"include_usage": True}, "stream": True, "logprobs": True}
        chunks = [
            one async for one in await create(model="m", messages=QUESTION, tools=[ADD], **options)
        ]
        usage = chunks[-1].usage
        (draw,) = model.draws
        assert usage.completion_tokens == len(draw.generated.token_ids)
        assert usage.prompt_tokens == len(draw.context)
        (last,) = [one.choices[0] for one in chunks[:-1] if one.choices[0].finish_reason]
        assert [one.logprob for one in last.logprobs.content] == pytest.approx(
            draw.generated.log_prob.tolist()
        )
        chunks = [one async for one in await create(model="m", messages=QUESTION, n=2, stream=True)]
        texts = {0: "", 1: ""}
        for one in chunks:
            texts[one.choices[0].index] += one.choices[0].delta.content or ""
        assert texts == {0: "b", 1: "c"}


def assembled(chunks: list[Any]) -> list[dict[str, Any]]:
    """Choices that a stream of chat completions tells, as clients put them together."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for one in chunk.choices:
            made = found.setdefault(
                one.index, {"text": "", "thoughts": "", "calls": {}, "logprobs": [], "finish": None}
            )
            made["text"] += one.delta.content or ""
            made["thoughts"] += getattr(one.delta, "reasoning_content", None) or ""
            for call in one.delta.tool_calls or ():
                told = made["calls"].setdefault(call.index, ["", "", ""])
                told[0] += call.id or ""
                told[1] += call.function.name or ""
                told[2] += call.function.arguments or ""
            if one.logprobs is not None:
                made["logprobs"] += [part.logprob for part in one.logprobs.content]
            made["finish"] = one.finish_reason or made["finish"]
    return [{**found[at], "calls": list(found[at]["calls"].values())} for at in sorted(found)]


def whole(choices: list[Any]) -> list[dict[str, Any]]:
    """The same of an answer that comes as a whole."""
    return [
        {
            "text": one.message.content or "",
            "thoughts": getattr(one.message, "reasoning_content", None) or "",
            "calls": [
                [call.id, call.function.name, call.function.arguments]
                for call in one.message.tool_calls or ()
            ],
            "logprobs": [part.logprob for part in one.logprobs.content] if one.logprobs else [],
            "finish": one.finish_reason,
        }
        for one in choices
    ]


ANSWERS: dict[str, str] = {
    "text": "one two three",
    "a call": CALL,
    "thoughts, text and two calls": f"{THOUGHT} and\n{CALL}\n{CALL}",
    "a call that cannot be read": "<tool_call>{bad</tool_call>",
    "nothing": "",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "tools": {"tools": [ADD]},
    "choices": {"n": 3},
    "logprobs": {"logprobs": True},
    "stop": {"stop": ["two", "three"]},
    "a limit": {"max_completion_tokens": 40},
    "seed": {"seed": 7},
    "usage": {"stream_options": {"include_usage": True}},
}


SUBSETS = [*itertools.combinations(OPTIONS, 2), tuple(OPTIONS)]


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("answer", sorted(ANSWERS))
async def test_a_stream_tells_what_a_whole_answer_tells_whatever_is_asked_for(
    answer: str, stop: bool
) -> None:
    """Each pair of the options, and all of them."""
    async with (
        served(lambda _: ANSWERS[answer], turns=1000) as (episode, model),
        openai_client(episode) as client,
    ):
        for names in SUBSETS:
            if ("stop" in names) == stop:
                await _both(client, model, names)


async def _both(client: openai.AsyncOpenAI, model: Scripted, names: Sequence[str]) -> None:
    asked: dict[str, Any] = {"model": "m", "messages": QUESTION}
    for name in names:
        asked |= OPTIONS[name]
    count, before = asked.get("n", 1), len(model.draws)
    create: Any = client.chat.completions.create
    at_once = {name: one for name, one in asked.items() if name != "stream_options"}
    told = whole((await create(**at_once)).choices)
    chunks = [one async for one in await create(**asked, stream=True)]
    streamed = assembled(chunks)
    assert len(told) == len(streamed) == count, names
    for made, draw in zip([*told, *streamed], model.draws[before:], strict=True):
        log_probs = made.pop("logprobs")
        assert bool(log_probs) == ("logprobs" in names)
        expected = draw.generated.log_prob.tolist()[: len(log_probs)]
        assert log_probs == pytest.approx(expected)
        for call in made["calls"]:
            assert call.pop(0).startswith("call")
    assert told == streamed, names
    tells = [bool(one.usage) for one in chunks]
    assert tells == [False] * (len(chunks) - 1) + ["usage" in names]


async def test_choices_logprobs_and_seeds_are_honoured() -> None:
    async with served(["b", "c", "d"]) as (episode, model), openai_client(episode) as client:
        found = await client.chat.completions.create(
            model="m", messages=QUESTION, n=2, seed=5, logprobs=True
        )
        assert [one.message.content for one in found.choices] == ["b", "c"]
        assert [one.seed for one in model.draws] == [5, 5]
        for choice, draw in zip(found.choices, model.draws, strict=True):
            assert choice.logprobs is not None
            assert choice.logprobs.content is not None
            log_probs = [one.logprob for one in choice.logprobs.content]
            assert log_probs == pytest.approx(draw.generated.log_prob.tolist())
            assert "".join(one.token for one in choice.logprobs.content[:-1]) in "bc"
        said = await client.responses.create(
            model="m", input=QUESTION, include=["message.output_text.logprobs"]
        )
        part: Any = said.output[0]
        assert len(part.content[0].logprobs) == len(model.draws[2].generated.token_ids)


async def test_a_token_that_is_a_part_of_a_character_has_no_bytes() -> None:
    async with served(["a🙂"]) as (episode, model), openai_client(episode) as client:
        found = await client.chat.completions.create(model="m", messages=QUESTION, logprobs=True)
        logprobs: Any = found.choices[0].logprobs
        tokens = logprobs.content
        assert len(tokens) == len(model.draws[0].generated.token_ids) > 3
        assert (tokens[0].token, tokens[0].bytes) == ("a", [97])
        assert [one.bytes for one in tokens[1:-1]] == [None] * (len(tokens) - 2)


async def test_many_calls_at_once_are_branches() -> None:
    async with served(lambda _: "well") as (episode, model), openai_client(episode) as client:
        async with asyncio.TaskGroup() as group:
            for _ in range(20):
                group.create_task(completion(client, False, messages=QUESTION))
        assert len(episode.chats) == len(model.draws) == 20


async def test_models_are_listed() -> None:
    async with (
        served([], models=("small", "large")) as (episode, _),
        openai_client(episode) as client,
    ):
        assert [one.id async for one in client.models.list()] == ["small", "large"]
