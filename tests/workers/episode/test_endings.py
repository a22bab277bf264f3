"""What an episode comes to: everything that a coroutine may return, raise, or leave undone."""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from rlinf_async.episodes import Episode, EpisodeError, LimitReached, Parsed
from rlinf_async.messages.language import Failed, Outcome, Rejected, Sample, Scored
from rlinf_async.rewards.judging import Reject
from rlinf_async.testing import run
from tests.workers.episode.kit import (
    Engine,
    flowing,
    language,
    parse,
    played,
    replaced,
    task,
    wait,
)


def one(agent: Any, script: Any = lambda _: "4", **config: Any) -> Sample:
    """The episode of an agent, in virtual time."""
    [sample], report = run(played(agent, script, **config))
    assert report.episodes == 1
    assert report.failed == isinstance(sample.outcome, Failed)
    return sample


async def answered(episode: Episode) -> str:
    return (await episode.chat().turn()).text


async def returns_a_number(episode: Episode) -> float:
    return float(await answered(episode) == episode.task.reference)


async def returns_a_whole_number(episode: Episode) -> int:
    return len(await answered(episode))


async def returns_parts(episode: Episode) -> Scored:
    await answered(episode)
    return Scored(reward=2.0, parts={"short": 1.0})


async def returns_nothing(episode: Episode) -> None:
    await answered(episode)


async def rejects(episode: Episode) -> None:
    await answered(episode)
    raise Reject("no reference")


async def rejects_in_tasks(episode: Episode) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(rejects(episode))


SCORED: dict[Any, Outcome | None] = {
    returns_a_number: Scored(reward=1.0),
    returns_a_whole_number: Scored(reward=1.0),
    returns_parts: Scored(reward=2.0, parts={"short": 1.0}),
    returns_nothing: None,
    rejects: Rejected(reason="no reference"),
    rejects_in_tasks: Rejected(reason="no reference"),
}


@pytest.mark.parametrize("agent", SCORED, ids=lambda agent: agent.__name__)
def test_what_a_coroutine_returns_is_its_outcome(agent: Any) -> None:
    sample = one(agent)
    assert sample.outcome == SCORED[agent]
    assert sample.text == "4"
    assert sample.rollout_rank == 3
    assert sample.generated.drawn is None
    assert sample.episode is not None
    assert (sample.episode.turns, sample.episode.cut) == (1, "")


async def returns_text(episode: Episode) -> str:
    return await answered(episode)


async def returns_a_truth(episode: Episode) -> bool:
    return await answered(episode) == "4"


async def returns_no_number(episode: Episode) -> float:
    await answered(episode)
    return float("nan")


async def raises(episode: Episode) -> None:
    await answered(episode)
    raise LookupError("the shop is closed")


async def raises_in_a_task(episode: Episode) -> None:
    await answered(episode)
    async with asyncio.TaskGroup() as group:
        group.create_task(raises(episode))


async def exits(episode: Episode) -> None:
    await answered(episode)
    sys.exit(3)


class Panic(BaseException):
    """What libraries in Rust raise where they panic: no `Exception`."""


async def panics(episode: Episode) -> None:
    await answered(episode)
    raise Panic("index out of bounds")


async def panics_in_a_task(episode: Episode) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(panics(episode))


async def cancels_itself(episode: Episode) -> None:
    await answered(episode)
    raise asyncio.CancelledError


async def cancels_its_task(episode: Episode) -> None:
    await answered(episode)
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


async def cancels_its_task_and_waits(episode: Episode) -> None:
    await cancels_its_task(episode)
    await asyncio.sleep(1.0)


async def gives_up_waiting(episode: Episode) -> None:
    await answered(episode)
    async with asyncio.timeout(1.0):
        await asyncio.sleep(2.0)


async def answers_twice(episode: Episode) -> None:
    chat = episode.chat()
    await chat.turn()
    await chat.turn()


async def asks_twice_at_once(episode: Episode) -> None:
    chat = episode.chat()
    await asyncio.gather(chat.turn(), chat.turn())


async def never_ends(episode: Episode) -> None:
    await answered(episode)
    await asyncio.Event().wait()


async def draws_nothing(episode: Episode) -> float:
    episode.chat()
    return 1.0


FAILS = {
    returns_text: "returned '4' (a str), not a number",
    returns_a_truth: "returned True (a bool), not a number: return 1.0 or 0.0",
    returns_no_number: "returned nan (a float), not a finite number",
    raises: "raised LookupError: the shop is closed",
    raises_in_a_task: "raised ExceptionGroup",
    exits: "raised SystemExit: 3",
    panics: "raised Panic: index out of bounds",
    panics_in_a_task: "raised BaseExceptionGroup",
    cancels_itself: "raised CancelledError",
    cancels_its_task: "has cancelled its own task",
    cancels_its_task_and_waits: "raised CancelledError",
    gives_up_waiting: "raised TimeoutError",
    answers_twice: "raised EpisodeError: the model spoke last",
    asks_twice_at_once: "raised EpisodeError: the model is answering in this branch already",
    never_ends: "took longer than seconds = 120",
    draws_nothing: "ended without an answer of the model",
}


@pytest.mark.parametrize("agent", FAILS, ids=lambda agent: agent.__name__)
def test_what_is_no_reward_fails_and_never_becomes_one(agent: Any) -> None:
    sample = one(agent)
    assert isinstance(sample.outcome, Failed)
    assert FAILS[agent] in sample.outcome.error
    assert "'agent'" in sample.outcome.error


def test_an_error_says_where_it_was_raised() -> None:
    sample = one(raises)
    assert isinstance(sample.outcome, Failed)
    assert f"{__file__}:" in sample.outcome.error


async def goes_on(episode: Episode) -> float:
    chat = episode.chat()
    while True:
        await chat.turn()
        chat.say("and?")


async def goes_on_in_tasks(episode: Episode) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(goes_on(episode))
        group.create_task(goes_on(episode))


def test_a_limit_that_several_tasks_run_into_is_one() -> None:
    sample = one(goes_on_in_tasks, max_turns=4)
    assert sample.outcome is None
    assert sample.episode is not None
    assert (sample.episode.turns, sample.episode.cut) == (4, "turns")


def test_an_episode_of_too_many_turns_is_judged_as_it_stands() -> None:
    sample = one(goes_on, max_turns=4)
    assert sample.outcome is None
    assert sample.episode is not None
    assert (sample.episode.turns, sample.episode.cut) == (4, "turns")
    assert len(sample.turns) == 4
    assert sample.generated.drawn_tokens == 4 * 2  # a digit and its end


def test_an_episode_of_too_many_tokens_is_cut_at_the_last_of_them() -> None:
    begin = len(task().prompt.token_ids)
    sample = one(goes_on, lambda _: "123456789", max_turns=99, max_tokens=begin + 37)
    assert sample.outcome is None
    assert sample.episode is not None
    assert sample.episode.cut == "tokens"
    assert sample.generated.finish == "length"
    assert len(sample.request.prompt.token_ids) + len(sample.generated.token_ids) == begin + 37


def test_a_task_that_leaves_no_room_for_an_answer_fails() -> None:
    sample = one(goes_on, max_tokens=len(task().prompt.token_ids))
    assert isinstance(sample.outcome, Failed)
    assert sample.outcome.error == (
        "episode 'agent' ended without an answer of the model: max_tokens is reached before"
    )
    assert sample.generated.token_ids.shape == (0,)
    np.testing.assert_array_equal(sample.request.prompt.token_ids, task().prompt.token_ids)


def test_an_episode_that_takes_too_long_may_be_judged_as_it_stands() -> None:
    sample = one(never_ends, seconds=5.0, on_timeout="score")
    assert sample.outcome is None
    assert sample.text == "4"
    assert sample.episode is not None
    assert sample.episode.cut == "seconds"


async def waits(episode: Episode) -> float:
    chat = episode.chat(tools=[wait])
    while (turn := await chat.turn()).tool_calls:
        await chat.answer(turn)
    return float(len(chat.turns))


def saying(*answers: str) -> Any:
    """A script that says these, one after the other, whatever it reads."""
    left = list(answers)
    return lambda _: left.pop(0)


def test_the_time_of_the_model_is_not_counted_and_that_of_tools_is() -> None:
    quick, slow = ["!wait 1"] * 3, ["!wait 1", "!wait 3"]
    assert one(waits, saying(*quick, "4"), seconds=3.5).outcome == Scored(reward=4.0)
    failed = one(waits, saying(*slow, "4"), seconds=3.5).outcome
    assert isinstance(failed, Failed)
    assert "took longer than seconds = 3.5" in failed.error


TOOL_FAILURES = {
    "!wait no": ("wait/arguments", "Expected `float`"),
    "!buy 3": ("unknown/unknown", "there is no tool 'buy'"),
    "!wait 40": ("wait/timeout", "took longer than 30 s"),
}


@pytest.mark.parametrize("call", TOOL_FAILURES)
@pytest.mark.parametrize("on_tool_failure", ["tell", "fail"])
def test_a_tool_that_fails_is_told_or_fails_the_episode_and_is_counted(
    call: str, on_tool_failure: str
) -> None:
    kind, text = TOOL_FAILURES[call]
    sample = one(waits, saying(call, "4"), on_tool_failure=on_tool_failure)
    assert sample.episode is not None
    assert sample.episode.tool_failures == {kind: 1}
    assert sample.episode.tool_calls == {kind.partition("/")[0]: 1}
    read = language().decode(sample.generated.token_ids)
    own = kind.endswith(("unknown", "arguments"))  # the model's own: it is always told
    if on_tool_failure == "tell" or own:
        assert sample.outcome == Scored(reward=2.0)
        assert text in read
    else:
        assert isinstance(sample.outcome, Failed)
        assert text in sample.outcome.error
        assert read == call


async def leaves_tasks(episode: Episode) -> float:
    tasks = [asyncio.create_task(goes_on(episode)) for _ in range(3)]
    await asyncio.sleep(2.5)
    episode.metrics["tasks"] = len(tasks)
    return 1.0


def test_what_a_coroutine_leaves_running_draws_nothing_any_more() -> None:
    async def body() -> None:
        [sample], _ = await played(leaves_tasks, lambda _: "4", max_turns=99)
        assert sample.outcome == Scored(reward=1.0)
        assert len(sample.branches) == 2
        assert sample.episode is not None
        assert sample.episode.metrics == {"tasks": 3.0}
        left = [one for one in asyncio.all_tasks() if one.get_coro().__name__ == "goes_on"]  # type: ignore[union-attr]
        results = await asyncio.gather(*left, return_exceptions=True)
        assert all(isinstance(one, EpisodeError | asyncio.CancelledError) for one in results)

    run(body())


NUMBERS = {
    "True": (True, "True (a bool)"),
    "nothing": (None, "None (a NoneType)"),
    "text": ("1", "'1' (a str)"),
    "NaN": (float("nan"), "nan (a float)"),
    "infinity": (-math.inf, "-inf (a float)"),
    "numpy truth": (np.bool_(True), "np.True_ (a bool"),
    "too large": (10**400, "1000000000"),
    "beyond rewards": (1e19, "1e+19 (a float)"),
    "an object": (Episode, "<class"),
    "an array": (np.zeros(2), "array([0., 0.])"),
}
"""Values that are no numbers to train or to average, and how they are shown"""


def counts_what(value: Any) -> Any:
    async def agent(episode: Episode) -> float:
        await answered(episode)
        episode.metrics["depth"] = value
        return 1.0

    return agent


def rewards_turn_with(value: Any) -> Any:
    async def agent(episode: Episode) -> float:
        turn = await episode.chat().turn()
        turn.reward = value
        return 1.0

    return agent


def saves_what(value: Any) -> Any:
    async def agent(episode: Episode) -> float:
        episode.state = value
        return float(len(await answered(episode)))

    return agent


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize(
    ("agent", "what"),
    [
        (counts_what, "episode.metrics['depth'] is "),
        (rewards_turn_with, "the reward of a turn is "),
    ],
)
def test_what_is_no_number_fails_the_episode_alone(name: str, agent: Any, what: str) -> None:
    value, shown = NUMBERS[name]
    outcome = one(agent(value)).outcome
    if value is None and agent is rewards_turn_with:  # it was given none
        assert outcome == Scored(reward=1.0)
        return
    assert isinstance(outcome, Failed)
    assert what + shown in outcome.error
    assert "not a finite number" in outcome.error


@pytest.mark.parametrize("value", [0, -3, 0.5, np.float32(0.5), np.int64(2), np.float64(1e18)])
def test_numbers_of_any_type_are_taken(value: Any) -> None:
    counted, rewarded = one(counts_what(value)), one(rewards_turn_with(value))
    assert counted.episode is not None
    assert counted.episode.metrics == {"depth": float(value)}
    assert [turn.reward for turn in rewarded.turns] == [float(value)]


@pytest.mark.parametrize("value", ["text", None, 3, bytearray(b"1"), [b"1"]])
def test_a_state_that_is_not_bytes_is_refused_where_it_is_set(value: Any) -> None:
    outcome = one(saves_what(value)).outcome
    assert isinstance(outcome, Failed)
    assert "episode.state is " in outcome.error
    assert "not bytes" in outcome.error
    assert "test_endings.py" in outcome.error


def asks_with(**arguments: Any) -> Any:
    async def agent(episode: Episode) -> float:
        return float((await episode.chat().turn(**arguments)).text)

    return agent


@pytest.mark.parametrize(("name", "value", "error"), [
    ("max_tokens", 512.0, "max_tokens is 512.0 (a float), not a whole number"),
    ("max_tokens", True, "max_tokens is True (a bool), not a whole number"),
    ("max_tokens", "9", "max_tokens is '9' (a str), not a whole number"),
    ("max_tokens", 0, "max_tokens is 0: an answer has at least 1 token"),
    ("max_tokens", np.int64(-1), "max_tokens is -1: an answer has at least 1 token"),
    ("seed", 0.5, "seed is 0.5 (a float), not a whole number"),
    ("seed", "a", "seed is 'a' (a str), not a whole number"),
    ("stop", "", "stop: '' is no text that could end an answer"),
    ("stop", ("", "4"), "stop: '' is no text that could end an answer"),
    ("stop", ("4", None), "stop: None is no text that could end an answer"),
    ("stop", b"4", "stop: 52 is no text that could end an answer"),
])  # fmt: skip
def test_a_turn_that_is_asked_for_wrongly_fails_its_episode_alone(
    name: str, value: Any, error: str
) -> None:
    sample = one(asks_with(**{name: value}))
    assert isinstance(sample.outcome, Failed)
    assert error in sample.outcome.error
    assert sample.episode is not None
    assert sample.episode.turns == 0


@pytest.mark.parametrize(("arguments", "reward"), [
    ({"max_tokens": np.int64(2)}, 12.0),
    ({"max_tokens": 10**30}, 1234.0),
    ({"seed": np.int64(-3)}, 1234.0),
    ({"seed": 2**70}, 1234.0),
    ({"stop": "34"}, 12.0),
    ({"stop": "24"}, 1234.0),  # one text, not two
    ({"stop": ["4", "23"]}, 1.0),
])  # fmt: skip
def test_how_a_turn_is_asked_for(arguments: Any, reward: float) -> None:
    assert one(asks_with(**arguments), lambda _: "1234").outcome == Scored(reward=reward)


async def forgets_its_metrics(episode: Episode) -> float:
    await answered(episode)
    episode.metrics = None  # type: ignore[assignment]
    return 1.0


async def says_what_nobody_can_keep(episode: Episode) -> float:
    chat = await episode.resume()
    chat.say("look", image=object())
    episode.state = b"1"
    return float(len((await chat.turn()).text))


def reads_nothing(text: str) -> Parsed:
    raise LookupError("no such answer")


def reads_a_number(text: str) -> Parsed:
    return Parsed(text=4)  # type: ignore[arg-type]


def reads_half_a_character(text: str) -> Parsed:
    return Parsed(text="\ud800")


async def gives_up_reading(episode: Episode) -> float:
    chat = episode.chat()
    await chat.turn()
    chat.say("once more")
    with suppress(LookupError):
        await chat.turn()
    return float(len(chat.turns))


USER_CODE: dict[str, tuple[Any, Any, str]] = {
    "metrics": (forgets_its_metrics, parse, "cannot be sent on: 'NoneType'"),
    "messages": (says_what_nobody_can_keep, parse, "cannot be kept for a resume: "),
    "parser raises": (returns_nothing, reads_nothing, "raised LookupError: no such answer"),
    "parser, no text": (returns_nothing, reads_a_number, "cannot be sent on: channel 'episodes'"),
    "parser, no rule": (returns_nothing, reads_half_a_character, ""),
}


@pytest.mark.parametrize("case", USER_CODE)
def test_whatever_the_users_code_does_fails_that_episode_alone(case: str) -> None:
    agent, parser, error = USER_CODE[case]

    async def body() -> None:
        tasks = [task(number) for number in range(3)]
        found, report = await played(agent, lambda _: "4", *tasks, parser=parser)
        assert report.episodes == 3
        for sample in found:
            if error:
                assert isinstance(sample.outcome, Failed)
                assert error in sample.outcome.error
                assert "'agent'" in sample.outcome.error

    run(body())


def test_an_answer_that_the_users_parser_cannot_read_is_not_in_the_conversation() -> None:
    def second_is_odd(text: str) -> Parsed:
        if text == "odd":
            raise LookupError("no such answer")
        return Parsed(text=text)

    async def body() -> None:
        said = saying("4", "odd")
        [sample], _ = await played(gives_up_reading, said, parser=second_is_odd)
        assert sample.outcome == Scored(reward=1.0)
        assert language().decode(sample.generated.token_ids) == "4"
        assert len(sample.turns) == 1

    run(body())


def cut_and_whole(*cut: bool, fork: bool) -> Any:
    """Turns that are cut or not, the last of them in the branch that was made first."""

    async def agent(episode: Episode) -> None:
        chat = episode.chat()
        chats = [chat, chat.fork()] if fork else [chat, chat]
        for number, each in enumerate(cut):
            chosen = chats[(len(cut) - 1 - number) % 2]
            if chosen.turns:
                chosen.say("and")
            await chosen.turn(2 if each else 9)

    return agent


@pytest.mark.parametrize("fork", [False, True])
@pytest.mark.parametrize("cut", list(itertools.product([False, True], repeat=3)))
def test_text_and_reason_of_the_end_are_those_of_one_turn(
    cut: tuple[bool, ...], fork: bool
) -> None:
    sample = one(cut_and_whole(*cut, fork=fork), lambda _: "1234")
    assert len(sample.branches) == fork
    assert sample.generated.finish == ("length" if cut[-1] else "stop")
    assert sample.text == ("12" if cut[-1] else "1234")


async def one_is_slow(episode: Episode) -> None:
    chat = episode.chat()
    other = chat.fork()
    other.say("9")
    first = asyncio.create_task(chat.turn())
    await asyncio.sleep(0.1)
    await other.turn()
    await first


def test_of_two_turns_at_once_the_one_that_was_asked_for_last_is_judged() -> None:
    async def body(slow: float) -> None:
        seconds = lambda request: slow if request.turn == 1 else 1.0  # noqa: E731
        engine = Engine(lambda text: "2" if "9" in text else "1", seconds)
        async with flowing(one_is_slow, engine) as (flow, group):
            running = flow.run(group)
            await flow.put(task())
            assert (await flow.episodes.receiver.get()).text == "2"
            flow.tasks.sender.close()
            await running

    run(body(0.5))
    run(body(5.0))


async def gives_the_first_up(episode: Episode) -> None:
    """Three turns, of which the first one is given up and the second one is slow."""
    chat = episode.chat()
    other = chat.fork()
    other.say("9")
    first = asyncio.create_task(chat.turn())
    await asyncio.sleep(0.1)
    second = asyncio.create_task(other.turn())
    await asyncio.sleep(0.1)
    first.cancel()
    await asyncio.wait({first})
    chat.say("7")
    await chat.turn()
    await second


def test_a_turn_that_was_given_up_does_not_change_which_one_was_asked_for_last() -> None:
    async def body() -> None:
        engine = Engine(
            lambda text: "2" if "9" in text else "3" if "7" in text else "1",
            lambda request: 5.0 if request.turn == 2 else 1.0,
        )
        async with flowing(gives_the_first_up, engine) as (flow, group):
            running = flow.run(group)
            await flow.put(task())
            sample = await flow.episodes.receiver.get()
            flow.tasks.sender.close()
            await running
        assert sample.text == "3"
        assert sample.episode is not None
        assert sample.episode.turns == 2

    run(body())


def told_of_a_limit(*, answered_since: bool, error: BaseException | None) -> Any:
    """An agent that was told of a limit over HTTP."""

    async def agent(episode: Episode) -> None:
        chat = episode.chat()
        await chat.turn()
        episode.reached = LimitReached("tokens", 5)
        if answered_since:
            await episode.chat().turn()
        if error is not None:
            raise error

    return agent


@pytest.mark.parametrize("answered_since", [False, True])
@pytest.mark.parametrize("error", [None, LookupError("a bug")])
def test_only_an_error_after_a_limit_without_an_answer_since_is_made_of_it(
    answered_since: bool, error: BaseException | None
) -> None:
    sample = one(told_of_a_limit(answered_since=answered_since, error=error))
    assert sample.episode is not None
    if error is None:
        assert (sample.outcome, sample.episode.cut) == (None, "")
    elif answered_since:
        assert isinstance(sample.outcome, Failed)
        assert "a bug" in sample.outcome.error
    else:
        assert (sample.outcome, sample.episode.cut) == (None, "tokens")


async def writes_into_its_task(episode: Episode) -> float:
    episode.task.messages[0]["content"] += "!"
    chat = episode.chat()
    await chat.turn()
    return float(str(chat.messages[0]["content"]).count("!"))


def test_what_an_agent_writes_into_its_task_is_its_own() -> None:
    async def body() -> None:
        first = task(0)
        tasks = [replaced(first, index=index) for index in range(4)]  # as those of one group
        found, _ = await played(writes_into_its_task, lambda _: "4", *tasks)
        assert [sample.outcome for sample in found] == 4 * [Scored(reward=1.0)]
        assert first.prompt.messages == ({"role": "user", "content": "2+2="},)

    run(body())


def test_an_agent_that_asks_again_and_again_lets_others_run() -> None:
    async def insists(episode: Episode) -> float:
        chat = episode.chat()
        while True:
            with suppress(Exception):
                if chat.turns:
                    chat.say("more")
                await chat.turn()

    async def agent(episode: Episode) -> float:
        return await (insists if episode.task.index else waits)(episode)

    async def body() -> None:
        tasks = [task(0), task(1)]
        found, _ = await played(agent, lambda _: "4", *tasks, max_turns=3, seconds=5.0)
        assert found[0].outcome == Scored(reward=1.0)
        assert isinstance(found[1].outcome, Failed)
        assert "took longer than seconds = 5" in found[1].outcome.error

    run(body())
