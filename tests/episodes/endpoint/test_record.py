"""Which of an agent's messages are answers that the model drew: branches, edits, calls at once."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rlinf_async.episodes import Episode
from rlinf_async.episodes.endpoint.ask import Answer, Ask, Policy, Refused
from rlinf_async.episodes.endpoint.record import Record
from rlinf_async.episodes.template import ChatTemplate
from rlinf_async.messages.language import Generated, Sampling
from rlinf_async.testing import run
from tests.episodes.endpoint.kit import (
    ADD,
    CALL,
    QUESTION,
    SAMPLING,
    Scripted,
    assert_exact,
    episode_of,
)

POLICY = Policy(SAMPLING, (), refuses=True, warned=set())


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def as_sent(answer: Answer) -> dict[str, Any]:
    """An answer as most agents send it back: without its thoughts."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    return message | ({"tool_calls": answer.calls} if answer.calls else {})


async def ask(
    record: Record, messages: Sequence[Mapping[str, Any]], **options: Any
) -> list[Answer]:
    question = Ask(model="m", messages=list(messages), **options)
    return (await record.answers(question)).choices


def shape(episode: Episode) -> list[int]:
    """Numbers of turns of the branches."""
    return [len(chat.turns) for chat in episode.chats if chat.turns]


def test_a_conversation_goes_on_in_its_branch() -> None:
    async def main() -> None:
        model = Scripted(["1", CALL, "3"])
        episode = episode_of(model)
        record = Record(episode, POLICY)
        messages: list[Mapping[str, Any]] = [user("q")]
        (first,) = await ask(record, messages, tools=[ADD])
        messages += [as_sent(first), user("again")]
        (second,) = await ask(record, messages, tools=[ADD])
        (call,) = second.calls
        assert call["function"] == {"name": "add", "arguments": {"a": 1, "b": 2}}
        result = {"role": "tool", "content": "3", "tool_call_id": call["id"]}
        messages += [as_sent(second), result]
        (third,) = await ask(record, messages, tools=[ADD])
        assert third.text == "3"
        assert shape(episode) == [3]
        assert_exact(episode, model)

    run(main())


def test_context_that_is_edited_or_compacted_is_a_branch_that_is_rendered_anew() -> None:
    async def main() -> None:
        model = Scripted(["1", "2", "3", "4", "5"])
        episode = episode_of(model)
        record = Record(episode, POLICY)
        begun: list[Mapping[str, Any]] = [user("q")]
        (first,) = await ask(record, begun)
        edited = {**as_sent(first), "content": "one"}
        await ask(record, [*begun, edited, user("again")])
        assert shape(episode) == [1, 1]
        text = model.tokenizer.decode(model.draws[1].context)
        assert "assistant\none<|im_end|>" in text
        await ask(record, [user("summary of it all"), user("go on")])
        assert shape(episode) == [1, 1, 1]
        await ask(record, [*begun, as_sent(first), user("again")])  # as it was: the first branch
        assert shape(episode) == [2, 1, 1]
        await ask(record, [*begun, as_sent(first), user("again")], tools=[ADD])  # another prompt
        assert shape(episode) == [2, 1, 1, 1]
        assert_exact(episode, model)

    run(main())


def test_going_back_is_a_branch_whose_prompt_are_the_tokens_as_they_were_drawn() -> None:
    async def main() -> None:
        model = Scripted(["1", "2", "3", "4"])
        episode = episode_of(model)
        record = Record(episode, POLICY)
        begun: list[Mapping[str, Any]] = [user("q")]
        (first,) = await ask(record, begun)
        await ask(record, [*begun, as_sent(first), user("a")])
        await ask(record, [*begun, as_sent(first), user("b")])
        assert shape(episode) == [2, 1]
        drawn = model.draws[0]
        shared = [*drawn.context, *drawn.generated.token_ids.tolist()]
        assert episode.chats[1].lines[0].conversation.prompt.tolist() == shared
        await ask(record, begun)  # asked again
        assert shape(episode) == [2, 1, 1]
        assert_exact(episode, model)

    run(main())


def test_calls_at_once_are_branches() -> None:
    async def main() -> None:
        model = Scripted(["0", "1", "2", "3"])
        episode = episode_of(model)
        record = Record(episode, POLICY)
        begun: list[Mapping[str, Any]] = [user("q")]
        (first,) = await ask(record, begun)
        on = [*begun, as_sent(first), user("a")]
        model.open.clear()
        asking = [asyncio.ensure_future(ask(record, on)) for _ in range(3)]
        for _ in range(4):
            await model.asked.acquire()
        model.open.set()
        answers = [one.text for (one,) in await asyncio.gather(*asking)]
        assert sorted(answers) == ["1", "2", "3"]
        assert sorted(shape(episode)) == [1, 1, 2]
        assert_exact(episode, model)

    run(main())


def test_choices_are_branches_and_each_can_go_on() -> None:
    async def main() -> None:
        model = Scripted(["a", "b", "c", "d", "e", "e"])
        episode = episode_of(model)
        record = Record(episode, POLICY)
        begun: list[Mapping[str, Any]] = [user("q")]
        choices = await ask(record, begun, n=3)
        assert sorted(one.text for one in choices) == ["a", "b", "c"]
        await ask(record, [*begun, as_sent(choices[1]), user("on")])
        assert sorted(shape(episode)) == [1, 1, 2]
        same = await ask(record, [user("other")], n=2)
        assert [one.text for one in same] == ["e", "e"]
        assert_exact(episode, model)

    run(main())


def test_an_answer_that_is_given_up_leaves_the_conversation_as_it_was() -> None:
    async def main() -> None:
        model = Scripted(["1", "2", "3"])
        episode = episode_of(model)
        record = Record(episode, POLICY)
        begun: list[Mapping[str, Any]] = [user("q")]
        (first,) = await ask(record, begun)
        on = [*begun, as_sent(first), user("a")]
        model.open.clear()
        asking = asyncio.ensure_future(ask(record, on))
        for _ in range(2):
            await model.asked.acquire()
        asking.cancel()
        await asyncio.wait([asking])
        assert model.given_up == 1
        model.open.set()
        assert [one.text for one in await ask(record, on)] == ["3"]
        assert shape(episode) == [2]
        assert (episode.turns, episode.given_up) == (2, 1)
        assert_exact(episode, model)

    run(main())


def test_thoughts_may_be_sent_back_or_not_but_not_changed() -> None:
    async def main() -> None:
        model = Scripted(["<think>\nwell\n</think>\n\n12", "1", "2", "3"])
        episode = episode_of(model)
        record = Record(episode, POLICY)
        begun: list[Mapping[str, Any]] = [user("q")]
        (first,) = await ask(record, begun)
        assert (first.thoughts, first.text) == ("well", "12")
        sent = as_sent(first)
        await ask(record, [*begun, sent, user("on")])
        await ask(record, [*begun, {**sent, "reasoning_content": "well"}, user("b")])
        assert shape(episode) == [2, 1]  # the second went back
        assert "well" in model.tokenizer.decode(model.draws[2].context)
        await ask(record, [*begun, {**sent, "reasoning_content": "no"}, user("c")])
        assert shape(episode) == [2, 1, 1]
        assert "well" not in model.tokenizer.decode(model.draws[3].context)
        assert_exact(episode, model)

    run(main())


def test_a_template_that_rewrites_is_refused_or_gives_branches_as_configured() -> None:
    async def main(branches: bool) -> None:
        model = Scripted(["<think>\nwell\n</think>\n\n12", "1"], "qwen3")
        episode = episode_of(model, branches=branches)
        record = Record(episode, POLICY)
        begun: list[Mapping[str, Any]] = [user("q")]
        (first,) = await ask(record, begun)
        on = [*begun, as_sent(first), user("on")]
        if branches:
            await ask(record, on)
            (chat,) = episode.chats
            assert len(chat.lines) == 2
            assert "well" not in model.tokenizer.decode(model.draws[1].context)
        else:
            with pytest.raises(Refused, match="leaves the thoughts of an answer out"):
                await ask(record, on)
        assert_exact(episode, model)

    for branches in (False, True):
        run(main(branches))


@pytest.mark.parametrize(
    ("answer", "tools", "text"),
    [
        ("<tool_call>{bad</tool_call>", [ADD], "<tool_call>{bad</tool_call>"),  # as it is written
        (CALL, [], CALL),  # an agent without tools
        (f"<think>\nwell\n</think>\n\n{CALL}", [], CALL),
    ],
)
def test_calls_that_cannot_be_told_are_text(answer: str, tools: list[Any], text: str) -> None:
    async def main() -> None:
        model = Scripted([answer, "2"])
        episode = episode_of(model)
        record = Record(episode, POLICY)
        begun: list[Mapping[str, Any]] = [user("q")]
        calls = bool(tools)
        (first,) = await ask(record, begun, tools=tools, calls=calls)
        assert (first.text, list(first.calls)) == (text, [])
        await ask(record, [*begun, as_sent(first), user("on")], tools=tools, calls=calls)
        assert shape(episode) == [2]
        assert_exact(episode, model)

    run(main())


@pytest.mark.parametrize(
    ("answer", "stop", "text", "kept"),
    [
        ("one two three", ("two",), "one ", "one two"),
        ("one two three", ("three", "two"), "one ", "one two"),
        ("one two three", ("four",), "one two three", "one two three<|im_end|>"),
        ("<think>\na b\n</think>\n\nb", ("b",), "<think>\na ", "<think>\na b"),
    ],
)
def test_a_stop_sequence_ends_an_answer_as_an_engine_would(
    answer: str, stop: tuple[str, ...], text: str, kept: str
) -> None:
    async def main() -> None:
        model = Scripted([answer, "2"])
        episode = episode_of(model)
        record = Record(episode, POLICY)
        begun: list[Mapping[str, Any]] = [user("q")]
        (first,) = await ask(record, begun, stop=stop)
        assert first.text == text.strip()
        assert model.tokenizer.decode(first.drawn.token_ids) == kept
        await ask(record, [*begun, as_sent(first), user("on")])
        assert shape(episode) == [2]
        assert_exact(episode, model)

    run(main())


def test_the_runs_own_stops_end_an_answer_beside_those_of_the_agent() -> None:
    async def main() -> None:
        model = Scripted(["one two three", "four five", "six five"])
        episode = episode_of(model)
        token = model.tokenizer("x six", add_special_tokens=False)["input_ids"][-1]
        episode.sampling = Sampling(max_tokens=64, stop=("two",), stop_token_ids=(token,))
        record = Record(episode, POLICY)
        (first,) = await ask(record, [user("q")], stop=("three",))
        assert (first.text, first.stopped) == ("one", "two")
        assert model.tokenizer.decode(first.drawn.token_ids) == "one two"
        (second,) = await ask(record, [user("r")], stop=("five",))
        assert (second.text, second.stopped) == ("four", "five")
        assert episode.written(second.drawn) == "four five"
        ended = replace(second.drawn, token_ids=np.array([*second.drawn.token_ids, token]))
        assert episode.written(ended) == "four five"

    run(main())


@pytest.mark.parametrize(
    ("limits", "options", "kind"),
    [
        ({"turns": 2}, {}, "turns"),
        ({"turns": 2}, {"n": 2}, "turns"),
        ({"tokens": 60}, {}, "context"),
    ],
)
def test_limits_are_refused_and_noted(
    limits: dict[str, Any], options: dict[str, Any], kind: str
) -> None:
    async def main() -> None:
        model = Scripted(lambda _: "well")
        episode = episode_of(model, **limits)
        record = Record(episode, POLICY)
        messages: list[Mapping[str, Any]] = [user("q")]

        async def talk() -> None:
            while True:
                (answer, *_) = await ask(record, messages, **options)
                messages.extend([as_sent(answer), user("on")])

        with pytest.raises(Refused) as refused:
            await talk()
        assert refused.value.kind == kind
        assert episode.reached is not None
        assert episode.reached.limit == ("turns" if kind == "turns" else "tokens")
        assert_exact(episode, model)

    run(main())


@settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 2**32), family=st.sampled_from(["qwen2.5", "hermes", "llama3", "qwen3"]))
def test_whatever_an_agent_does_each_answer_is_trained_once_as_it_was_drawn(
    seed: int, family: str
) -> None:
    """Several agents in one episode, each of which goes on, back, edits, asks twice, gives up."""

    async def main() -> None:
        draw = random.Random(seed)
        think = ["", "<think>\nwell\n</think>\n\n"]
        model = Scripted(lambda _: draw.choice(think) + draw.choice(["1", "yes", "true"]), family)
        model.seconds = draw.random
        episode = episode_of(model, turns=100, branches=True)
        record = Record(episode, POLICY)
        histories: list[list[Mapping[str, Any]]] = [[user("q")]]
        told: list[Generated] = []
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                own = random.Random(draw.random())
                group.create_task(_agent(record, histories, told, own))
        assert_exact(episode, model, told)
        assert sum(shape(episode)) == len(told)

    run(main())


async def _agent(
    record: Record,
    histories: list[list[Mapping[str, Any]]],
    told: list[Generated],
    draw: random.Random,
) -> None:
    for _ in range(8):
        messages = list(draw.choice(histories))
        if messages[-1]["role"] == "assistant":
            messages.append(user(draw.choice("ab")))
        if draw.random() < 0.15 and len(messages) > 2:
            del messages[1]  # compacted
        n = draw.choice([1, 1, 1, 2])
        asking = asyncio.ensure_future(ask(record, messages, n=n))
        if draw.random() < 0.2:
            await asyncio.sleep(draw.random())
            asking.cancel()
        await asyncio.wait([asking])
        if asking.cancelled():
            continue
        told.extend(answer.drawn for answer in asking.result())
        histories.extend([*messages, as_sent(answer)] for answer in asking.result())
        await asyncio.sleep(draw.random())


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("how", ["the client says so", "its answer was lost"])
def test_a_question_that_is_repeated_has_the_answer_that_there_is(how: str, n: int) -> None:
    async def main() -> None:
        model = Scripted(["1", "2", "3", "4", "5", "6"])
        episode = episode_of(model)
        record = Record(episode, POLICY)
        question = Ask(model="m", messages=[user("q")], n=n)
        first = await record.answers(question)
        if how == "its answer was lost":
            record.lost(first)
            assert await record.answers(question) is first
        else:
            for _ in range(3):
                assert await record.answers(question, again=True) is first
        assert (episode.turns, shape(episode)) == (n, [1] * n)
        assert (await record.answers(question)).id != first.id  # asked twice: branches
        assert (episode.turns, shape(episode)) == (2 * n, [1] * 2 * n)
        other = Ask(model="m", messages=[user("other")], n=n)
        assert (await record.answers(other, again=True)).id != first.id  # its answer never was
        assert episode.turns == 3 * n
        assert_exact(episode, model)

    run(main())


def test_answers_that_can_be_told_again_are_bounded() -> None:
    async def main() -> None:
        record = Record(episode_of(Scripted(lambda _: "1"), turns=1000), POLICY)
        for number in range(200):
            answers = await record.answers(Ask(model="m", messages=[user(str(number))]))
            record.lost(answers)
        assert len(record._answered) == len(record._undelivered) == 64

    run(main())


@pytest.mark.parametrize("begun", [False, True])
def test_of_choices_one_of_which_fails_none_is_trained(begun: bool) -> None:
    async def main() -> None:
        model = Scripted(["1", "2", "3"])
        episode = episode_of(model)
        record = Record(episode, POLICY)
        messages: list[Mapping[str, Any]] = [user("q")]
        told = []
        if begun:
            (first,) = await ask(record, messages)
            told = [first.drawn]
            messages += [as_sent(first), user("on")]
        drawn = len(model.draws)
        with pytest.raises(IndexError):  # the script is over before the last choice
            await ask(record, messages, n=4 - drawn)
        assert shape(episode) == [1] * drawn
        assert (episode.last is None) == (not begun)  # nor is one of them judged
        assert episode.last is None or episode.last.text == "1"
        assert len(model.draws) == 3
        assert_exact(episode, model, told)
        model._answers = 1
        (after,) = await ask(record, messages)  # as it was before
        assert shape(episode) == [1 + drawn]
        assert_exact(episode, model, [*told, after.drawn])

    run(main())


NO_END = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.tool_calls %}
        {{- '<tool_call>\\n' + message.tool_calls[0].function | tojson + '\\n</tool_call>' }}
    {%- else %}
        {{- message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
{{- tools | tojson if tools else '' }}"""


def test_a_template_that_does_not_let_a_conversation_go_on_is_warned_of_once_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        warned: set[str] = set()
        for _ in range(2):  # episodes of one worker
            model = Scripted([CALL, CALL, "3"])
            episode = episode_of(model)
            episode.template = ChatTemplate(model.tokenizer, NO_END)
            record = Record(episode, Policy(SAMPLING, (), refuses=True, warned=warned))
            messages: list[Mapping[str, Any]] = [user("q")]
            for _turn in range(3):
                (answer,) = await ask(record, messages, tools=[ADD])
                messages.append(as_sent(answer))
                messages += [
                    {"role": "tool", "content": "3", "tool_call_id": one["id"]}
                    for one in answer.calls
                ]
            assert shape(episode) == [1, 1, 1]
            assert episode.record().rendered_anew == 2
            assert_exact(episode, model)

    with caplog.at_level(logging.WARNING, "rlinf_async.episodes.endpoint"):
        run(main())
    assert caplog.text.count("the conversation cannot go on: the chat template") == 1


def test_thoughts_that_were_edited_are_rendered_anew_with_all_that_follows() -> None:
    async def main() -> None:
        model = Scripted(["<think>\nwell\n</think>\n\n12", "1", "2"])
        episode = episode_of(model)
        record = Record(episode, POLICY)
        messages: list[Mapping[str, Any]] = [user("q")]
        (first,) = await ask(record, messages)
        messages += [{**as_sent(first), "reasoning_content": "well"}, user("on")]
        (second,) = await ask(record, messages)
        messages += [as_sent(second), user("on")]
        messages[1] = {**messages[1], "reasoning_content": "no"}
        await ask(record, messages)
        assert shape(episode) == [2, 1]
        assert "well" not in model.tokenizer.decode(model.draws[2].context)
        assert_exact(episode, model)

    run(main())


def test_arguments_come_back_as_other_languages_write_their_numbers() -> None:
    async def main() -> None:
        call = '<tool_call>{"name": "add", "arguments": {"a": 1.0, "b": [2e3, 0.5]}}</tool_call>'
        model = Scripted([call, "3"])
        episode = episode_of(model)
        record = Record(episode, POLICY)
        (first,) = await ask(record, [user("q")], tools=[ADD])
        (one,) = first.calls
        function = {"name": "add", "arguments": {"b": [2000, 0.5], "a": 1}}
        sent = {**as_sent(first), "tool_calls": [{**one, "function": function}]}
        result = {"role": "tool", "content": "3", "tool_call_id": one["id"]}
        await ask(record, [user("q"), sent, result], tools=[ADD])
        assert shape(episode) == [2]
        assert_exact(episode, model)

    run(main())


def test_an_end_that_is_no_question_is_refused() -> None:
    async def main() -> None:
        record = Record(episode_of(Scripted(["1"])), POLICY)
        for messages, words in (
            ([], "nothing to answer"),
            ([QUESTION, {"role": "assistant", "content": "I"}], "how its answer begins"),
            ([QUESTION, {"role": "tool", "content": "3", "tool_call_id": "x"}], "the call 'x'"),
        ):
            with pytest.raises(Refused, match=words):
                await ask(record, messages)

    run(main())
