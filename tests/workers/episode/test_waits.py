"""Which episodes are said to wait for what, and how many are open."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlinf_async.episodes import Episode
from rlinf_async.episodes.endpoint import Endpoint
from rlinf_async.messages.language import Failed, Scored
from rlinf_async.testing import run
from rlinf_async.workers.episode import EpisodeConfig
from tests.workers.episode.kit import Engine, flowing, task, wait


async def waits(episode: Episode) -> float:
    """One call of a tool."""
    chat = episode.chat(tools=[wait])
    await chat.answer(await chat.turn())
    return 1.0


def test_the_episodes_that_have_waited_longest_are_named_with_the_tool() -> None:
    async def body() -> None:
        engine = Engine(lambda _: "!wait 25", lambda request: float(request.group))
        async with flowing(waits, engine) as (flow, group):
            running = flow.run(group)
            await flow.put(*(task(number) for number in range(1, 6)))
            await asyncio.sleep(20.5)
            handle = group.supervisors[0].live
            assert handle is not None
            said = await handle.doing()
            assert said[:3] == (
                "episode 1/0 has waited 20 s for tool wait",
                "episode 2/0 has waited 18 s for tool wait",
                "episode 3/0 has waited 18 s for tool wait",
            )
            assert said[3:] == ("tool wait",) * 5
            flow.tasks.sender.close()
            await running
            assert await handle.doing() == ()

    run(body())


def test_an_agent_that_does_something_else_is_named_too_but_not_while_the_model_draws() -> None:
    async def thinks(episode: Episode) -> float:
        chat = episode.chat()
        await chat.turn()
        await asyncio.sleep(20)
        chat.say("and?")
        await chat.turn()
        return 1.0

    async def body() -> None:
        async with flowing(thinks, Engine(lambda _: "4", 10.0)) as (flow, group):
            running = flow.run(group)
            await flow.put(task(7))
            handle = group.supervisors[0].live
            assert handle is not None
            said = []
            for _ in range(9):
                await asyncio.sleep(4.9)
                said.append(await handle.doing())
            flow.tasks.sender.close()
            await running
        waits = [f"episode 7/0 has waited {seconds} s for its agent" for seconds in (5, 10, 14, 19)]
        assert said == [(), (), *((one,) for one in waits), (), (), ()]

    run(body())


def test_a_worker_has_no_more_episodes_open_than_it_may_and_two_share_the_tasks() -> None:
    open_now: list[str] = []
    most = 0

    async def counts(episode: Episode) -> float:
        nonlocal most
        open_now.append(str(episode.task.index))
        most = max(most, len(open_now))
        await episode.chat().turn()
        open_now.remove(str(episode.task.index))
        return 1.0

    async def body() -> None:
        config = EpisodeConfig(run="agent", concurrent=3)
        async with flowing(counts, Engine(lambda _: "4"), config, workers=2) as (flow, group):
            running = [flow.run(group, rank) for rank in range(2)]
            await flow.put(*(task(number) for number in range(20)))
            flow.tasks.sender.close()
            reports = [report for one in running for report in await one]
            found = [await flow.episodes.receiver.get() for _ in range(20)]
        assert [one.outcome for one in found] == 20 * [Scored(reward=1.0)]
        assert sum(one.episodes for one in reports) == 20
        assert min(one.episodes for one in reports) >= 6

    run(body())
    assert most == 6


def ignores_cancellations(over: asyncio.Event, *, ends_later: bool) -> Any:
    """An agent of task 0 that goes on when it is cancelled; others answer at once."""

    async def agent(episode: Episode) -> float:
        chat = episode.chat()
        await chat.turn()
        if episode.task.index:
            return 1.0
        while not over.is_set():
            try:
                await over.wait()
            except asyncio.CancelledError:
                if ends_later:
                    break
        return 0.5

    return agent


@pytest.mark.parametrize("ends_later", [False, True])
@pytest.mark.parametrize("on_timeout", ["fail", "score"])
def test_an_agent_that_ignores_the_end_of_its_time_is_left_alone_named_and_counted_as_cut(
    ends_later: bool, on_timeout: Any
) -> None:
    async def body() -> None:
        over = asyncio.Event()
        agent = ignores_cancellations(over, ends_later=ends_later)
        config = EpisodeConfig(run="agent", concurrent=1, seconds=20.0, on_timeout=on_timeout)
        async with flowing(agent, Engine(lambda _: "4"), config) as (flow, group):
            running = flow.run(group)
            await flow.put(task(0), task(1))
            flow.tasks.sender.close()
            first, second = [await flow.episodes.receiver.get() for _ in range(2)]
            await running
            handle = group.supervisors[0].live
            assert handle is not None
            said = await handle.doing()
            over.set()
            await asyncio.sleep(1.0)
            assert await handle.doing() == ()
        assert second.outcome == Scored(reward=1.0)
        assert first.episode is not None
        assert first.episode.cut == "seconds"
        if on_timeout == "score":
            assert first.outcome is None
        else:
            assert isinstance(first.outcome, Failed)
            assert "took longer than seconds = 20" in first.outcome.error
            assert ("let CancelledError through" in first.outcome.error) != ends_later
        expected = "episode 0/0 has waited 6 s for its agent, which was cancelled, to end"
        assert (expected in said) != ends_later

    run(body())


def test_a_worker_that_is_cancelled_does_not_wait_for_an_agent_that_ignores_it() -> None:
    async def body() -> None:
        over = asyncio.Event()
        agent = ignores_cancellations(over, ends_later=False)
        async with flowing(agent, Engine(lambda _: "4")) as (flow, group):
            running = flow.run(group)
            await flow.put(task(0))
            await asyncio.sleep(2.0)
            running.cancel()
            await running.finished(within=10)
            over.set()
            assert flow.left().keys() == {"tasks", "turns"}

    run(body())


def test_a_worker_that_is_cancelled_at_the_end_of_an_episode_leaves_no_turn_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def slow(self: Endpoint, episode: Episode) -> None:
        await asyncio.sleep(100.0)

    async def leaves_a_turn(episode: Episode) -> float:
        left = asyncio.create_task(episode.chat().turn())
        await asyncio.wait({left}, timeout=0.5)
        return 1.0

    def drawing() -> list[str]:
        names = [one.get_name() for one in asyncio.all_tasks()]
        return [name for name in names if name.startswith("turn ")]

    monkeypatch.setattr(Endpoint, "end", slow)

    async def body() -> None:
        async with flowing(leaves_a_turn, Engine(lambda _: "4")) as (flow, group):
            running = flow.run(group)
            await flow.put(task(0))
            await asyncio.sleep(0.7)
            assert drawing() == ["turn 0/0.1"]
            running.cancel()
            await running.finished(within=1)
            assert drawing() == []

    run(body())


@pytest.mark.parametrize("state", [b"", b"1"])
@pytest.mark.parametrize("same", [True, False])
def test_who_asks_the_same_again_gets_the_answer_that_was_given_up(
    same: bool, state: bytes
) -> None:
    async def impatient(episode: Episode) -> float:
        chat = episode.chat()
        episode.state = state
        tries = 0
        while True:
            tries += 1
            try:
                async with asyncio.timeout(3):
                    turn = await chat.turn()
                break
            except TimeoutError:
                await asyncio.sleep(1)  # the clock runs, whatever the engine still draws
                if not same:
                    chat.say("Well?")
        episode.metrics["tries"] = tries
        return float(turn.text == "4")

    async def body() -> None:
        engine = Engine(lambda _: "4", 10.0)
        config = EpisodeConfig(run="agent", max_turns=4, seconds=20)
        async with flowing(impatient, engine, config) as (flow, group):
            running = flow.run(group)
            await flow.put(task())
            flow.tasks.sender.close()
            (report,) = await running
            (found,) = [await flow.episodes.receiver.get()]
        assert found.episode is not None
        if same:
            assert found.outcome == Scored(reward=1.0)
            assert (len(engine.asked), report.turns, found.episode.turns) == (1, 1, 1)
            assert found.episode.metrics == {"tries": 3.0}
        else:  # each is a request of its own, and there are no more of them than turns
            assert isinstance(found.outcome, Failed)
            assert "without an answer of the model: max_turns is reached" in found.outcome.error
            assert (len(engine.asked), found.episode.turns) == (4, 0)

    run(body())
