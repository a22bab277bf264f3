"""Episodes that are run again: after a death between any two steps, and after a resume."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

import msgspec
import numpy as np
import pytest

from rlinf_async.episodes import Episode
from rlinf_async.messages.language import Request, Sample, Scored
from rlinf_async.testing import explore, run
from tests.workers.episode.kit import (
    Engine,
    Script,
    answer,
    encoded,
    flowing,
    language,
    replaced,
    task,
    wait,
)


def counts(text: str) -> str:
    """A number of digits that depends on everything that was read; a wait in each third answer."""
    seen = sum(text.encode()) % 1000
    return "!wait 2" if len(text) % 3 == 0 else str(seen)


def letters(text: str) -> str:
    """A number that depends on what was read, and no call."""
    return str(sum(text.encode()) % 1000)


async def talks(episode: Episode) -> float:
    """Five turns in two branches, the last two at once; tools in between."""
    chat = episode.chat(tools=[wait])
    for _ in range(3):
        turn = await chat.turn()
        episode.state = str(len(chat.turns)).encode()
        if turn.tool_calls:
            await chat.answer(turn)
        else:
            chat.say(f"not {turn.text}")
    other = chat.fork()
    other.say("or")
    await asyncio.gather(chat.turn(), other.turn())
    return float(sum(len(one.text) for chat in episode.chats for one in chat.turns))


def as_told(sample: Sample) -> tuple[Any, ...]:
    """All of an episode that must be the same, however often it was run."""
    made = sample.generated
    starts = tuple((one.start, tuple(one.prompt_ids.tolist())) for one in sample.branches)
    spans = tuple((one.start, one.stop) for one in sample.turns)
    tokens = tuple(made.token_ids.tolist()), tuple(made.log_prob.tolist())
    return sample.request.name, tokens, tuple(made.version.tolist()), starts, spans, sample.outcome


async def told(agent: Any, *tasks: Request, script: Script = counts) -> dict[str, tuple[Any, ...]]:
    """What episodes come to where nobody dies."""
    async with flowing(agent, Engine(script)) as (flow, group):
        running = flow.run(group)
        await flow.put(*tasks)
        found = [await flow.episodes.receiver.get() for _ in tasks]
        flow.tasks.sender.close()
        await running
    return {one.request.name: as_told(one) for one in found}


TASKS = [task(group, f"{group}+{group}=", index=index) for group in range(3) for index in range(2)]


def test_workers_that_die_at_any_time_lose_nothing_and_draw_no_turn_twice() -> None:
    expected = run(told(talks, *TASKS))
    seeds = itertools.count()

    async def body() -> None:
        chance = random.Random(next(seeds))
        seconds = {0: 1.0, 1: chance.uniform(0.1, 5.0), 2: chance.uniform(0.0, 0.2)}
        engine = Engine(counts, lambda request: seconds[request.group])
        async with flowing(talks, engine, workers=2) as (flow, group):
            running = [flow.run(group, rank) for rank in range(2)]
            await flow.put(*TASKS)
            deaths = chance.randrange(1, 6)
            for _ in range(deaths):
                await asyncio.sleep(chance.uniform(0.0, 6.0))
                dying = chance.randrange(2)
                running[dying].cancel()
                await running[dying].finished(within=1)
                running[dying] = flow.run(group, dying)
            found: dict[str, Sample] = {}
            while len(found) < len(TASKS):
                sample = await flow.episodes.receiver.get()
                # Put, but not yet acknowledged: it may come twice, and is the same.
                assert as_told(sample) == as_told(found.setdefault(sample.request.name, sample))
            flow.tasks.sender.close()
            for one in running:
                await one
            assert {name: as_told(one) for name, one in found.items()} == expected
            # A turn is asked for a second time only where its answer was under way: of an episode
            # that is open no more than two are.
            turns = 5 * len(TASKS)
            assert len(engine.asked) <= turns + 2 * deaths * len(TASKS)

    explore(body, seeds=range(25))


async def asks_twice(episode: Episode) -> float:
    chat = episode.chat()
    first = await chat.turn()
    chat.say("sure?")
    second = await chat.turn()
    return float(first.text + second.text)


def recorded(one: Request, number: int, context: Any, text: str) -> Sample:
    """The answer to a turn that an earlier life had asked for."""
    prompt = replaced(one.prompt, token_ids=np.asarray(context, np.int32), messages=())  # type: ignore[arg-type]
    return answer(replaced(one, turn=number, prompt=prompt), encoded(text))


@pytest.mark.parametrize("replay", [False, True])
def test_answers_of_an_earlier_life_are_taken_up_where_there_may_be_some(replay: bool) -> None:
    async def body() -> None:
        engine = Engine(lambda _: "5")
        one = task(replay=replay)
        async with flowing(asks_twice, engine) as (flow, group):
            first = recorded(one, 1, one.prompt.token_ids, "7")
            await flow.turns.sender.put(first, key="0/0.1")
            running = flow.run(group)
            await flow.put(one)
            sample = await flow.episodes.receiver.get()
            flow.tasks.sender.close()
            [report] = await running
        assert sample.outcome == Scored(reward=75.0)
        assert not sample.request.replay
        # One that is new does not look, but takes what answers the same context all the same.
        assert [one.name for one in engine.asked] == (["0/0.2"] if replay else ["0/0.1", "0/0.2"])
        assert (report.turns, report.replayed) == ((1, 1) if replay else (2, 0))

    run(body())


def test_an_answer_to_what_the_agent_does_not_ask_now_is_dropped_and_asked_anew() -> None:
    async def body() -> None:
        engine = Engine(lambda _: "5")
        one = task(replay=True)
        async with flowing(asks_twice, engine) as (flow, group):
            other = language().template.opening([{"role": "user", "content": "3+3="}])
            await flow.turns.sender.put(recorded(one, 1, other, "6"), key="0/0.1")
            await flow.turns.sender.put(recorded(one, 2, other, "6"), key="0/0.2")
            running = flow.run(group)
            await flow.put(one)
            sample = await flow.episodes.receiver.get()
            flow.tasks.sender.close()
            [report] = await running
            assert not flow.left()
        assert sample.outcome == Scored(reward=55.0)
        assert (report.turns, report.replayed, report.dropped) == (2, 0, 2)

    run(body())


def test_each_turn_is_asked_with_the_state_of_its_time_and_draws_on_its_own_seed() -> None:
    async def body() -> None:
        engine = Engine(counts)
        async with flowing(talks, engine) as (flow, group):
            running = flow.run(group)
            await flow.put(task(5, iteration=3, min_version=2, priority=3))
            sample = await flow.episodes.receiver.get()
            flow.tasks.sender.close()
            await running
        states = [
            msgspec.msgpack.decode(one.state)[0] if one.state else b"" for one in engine.asked
        ]
        assert states == [b"", b"1", b"2", b"", b""]  # two branches: nothing to be restored
        assert sorted(one.name for one in engine.asked) == [f"5/0.{turn}" for turn in range(1, 6)]
        assert len({one.seed for one in engine.asked}) == 5
        assert {(one.iteration, one.min_version, one.priority) for one in engine.asked} == {
            (3, 2, 3)
        }
        assert sample.request.turn == 0
        assert sample.request.name == "5/0"

    run(body())


def test_the_tokens_of_an_episode_are_those_that_were_drawn_and_given_in_their_order() -> None:
    async def body() -> None:
        engine = Engine(counts)
        async with flowing(talks, engine) as (flow, group):
            running = flow.run(group)
            await flow.put(task(1))
            sample = await flow.episodes.receiver.get()
            flow.tasks.sender.close()
            await running
        made, starts = sample.generated, [0, *(one.start for one in sample.branches)]
        prompts = [sample.request.prompt.token_ids, *(one.prompt_ids for one in sample.branches)]
        assert made.drawn is not None
        spans = [(one.start, one.stop) for one in sample.turns]
        drawn = np.zeros(len(made.token_ids), np.bool_)
        asked = [one.prompt.token_ids.tolist() for one in engine.asked]
        for start, stop in spans:
            branch = sum(start >= one for one in starts) - 1
            read = np.concatenate([prompts[branch], made.token_ids[starts[branch] : start]])
            asked.remove(read.tolist())
            said = encoded(counts(language().decode(read)))
            np.testing.assert_array_equal(made.token_ids[start:stop], said)
            np.testing.assert_array_equal(made.version[start:stop], len(read) % 5)
            drawn[start:stop] = True
        assert asked == []
        np.testing.assert_array_equal(made.drawn, drawn)
        assert set(made.version[~drawn]) == {-1}
        assert not made.log_prob[~drawn].any()
        assert len(starts) == 2

    run(body())


class Plays:
    """An agent with an environment that can be restored: it counts what it was told."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        """turns that its environment has seen, over all lives"""

    async def __call__(self, episode: Episode) -> float:
        """Four turns."""
        chat = await episode.resume(tools=[wait])
        total = int(episode.state or b"0")
        turn = chat.turns[-1] if chat.turns else None
        while True:
            if turn is None:
                episode.state = str(total).encode()
                turn = await chat.turn()
            self.steps.append(len(chat.turns))
            total = total * 3 + len(turn.text)
            if len(chat.turns) == 4:
                return float(total)
            await chat.answer(turn)
            chat.say(f"so far {total}")
            turn = None


@pytest.mark.parametrize("seconds", [0.5, 1.5, 2.5, 3.5])
def test_an_environment_that_can_be_restored_goes_on_after_the_last_complete_turn(
    seconds: float,
) -> None:
    async def body() -> None:
        whole, agent = Plays(), Plays()
        expected = await told(whole, task(), script=letters)
        assert whole.steps == [1, 2, 3, 4]
        async with flowing(agent, Engine(letters)) as (flow, group):
            running = flow.run(group)
            await flow.put(task())
            await asyncio.sleep(seconds)
            running.cancel()
            await running.finished(within=1)
            running = flow.run(group)
            sample = await flow.episodes.receiver.get()
            flow.tasks.sender.close()
            await running
        assert as_told(sample) == expected["0/0"]
        done = int(seconds)
        again = [done] if done else []  # the answer to the last turn is looked at again
        assert agent.steps == [*range(1, done + 1), *again, *range(done + 1, 5)]

    run(body())
