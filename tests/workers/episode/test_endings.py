"""What an episode comes to: everything that a coroutine may return, raise, or leave undone."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import numpy as np
import pytest

from rlinf_async.episodes import Episode, EpisodeError
from rlinf_async.messages.language import Failed, Outcome, Rejected, Sample, Scored
from rlinf_async.rewards.judging import Reject
from rlinf_async.testing import run
from tests.workers.episode.kit import language, played, task, wait


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


SCORED: dict[Any, Outcome | None] = {
    returns_a_number: Scored(reward=1.0),
    returns_a_whole_number: Scored(reward=1.0),
    returns_parts: Scored(reward=2.0, parts={"short": 1.0}),
    returns_nothing: None,
    rejects: Rejected(reason="no reference"),
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


async def cancels_itself(episode: Episode) -> None:
    await answered(episode)
    raise asyncio.CancelledError


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
    cancels_itself: "raised CancelledError",
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
