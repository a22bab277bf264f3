"""Episodes that are run again: after a death between any two steps, and after a resume."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from rlinf_async.episodes import Episode
from rlinf_async.messages.language import EngineUse, Failed, Request, Sample, Scored
from rlinf_async.testing import explore, run
from tests.workers.episode.kit import (
    Engine,
    Flow,
    Script,
    answer,
    encoded,
    flowing,
    language,
    played,
    replaced,
    revived,
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
    spans = tuple((one.start, one.stop, one.reward) for one in sample.turns)
    assert sample.episode is not None
    seconds = {name: round(one, 6) for name, one in sample.episode.tool_seconds.items()}
    record = msgspec.structs.replace(sample.episode, tool_seconds=seconds, engines=EngineUse())
    tokens = tuple(made.token_ids.tolist()), tuple(made.log_prob.tolist())
    versions = tuple(made.version.tolist())
    return sample.request.name, tokens, versions, starts, spans, sample.outcome, record


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
                running[dying] = await flow.again(group, running[dying], dying)
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
        sample = await revived(agent, Engine(letters), seconds)
        assert as_told(sample) == expected["0/0"]
        done = int(seconds)
        again = [done] if done else []  # the answer to the last turn is looked at again
        assert agent.steps == [*range(1, done + 1), *again, *range(done + 1, 5)]

    run(body())


class Case(NamedTuple):
    """What an agent makes use of."""

    fork: bool
    stop: bool
    reward: bool
    resume: bool
    state: bool


def digits(text: str) -> str:
    """Some digits that depend on all that was read, each fourth time a call."""
    seen = sum((at + 1) * one for at, one in enumerate(text.encode()))
    return f"!wait {seen % 2 + 1}" if seen % 4 == 0 else str(seen**5 % 10**8)


def acts(case: Case) -> Any:
    """An agent whose environment adds up what it was told: four turns, and one in a fork."""
    stop = ["7"] if case.stop else []

    async def agent(episode: Episode) -> float:
        chat = await episode.resume([wait]) if case.resume else episode.chat([wait])
        total = int(episode.state or b"0") if case.resume else 0
        turn = chat.turns[-1] if chat.turns else None
        while True:
            if turn is None:
                if case.state:
                    episode.state = str(total).encode()
                turn = await chat.turn(stop=stop)
            total = total * 3 + len(turn.text)
            turn.reward = total / 8 if case.reward else None
            episode.metrics["total"] = episode.metrics.get("total", 0.0) + total
            if len(chat.turns) == 4:
                break
            await chat.answer(turn)
            chat.say(f"so far {total}")
            turn = None
        if case.fork:
            other = chat.fork(chat.turns[1])
            other.say("or")
            (await other.turn(stop=stop)).reward = 1.0 if case.reward else None
        return float(total)

    return agent


@pytest.mark.parametrize(
    "case",
    [Case(*used) for used in itertools.product([False, True], repeat=5)],
    ids=lambda case: "-".join(name for name, used in case._asdict().items() if used) or "plain",
)
def test_an_episode_comes_to_the_same_however_often_its_worker_dies(case: Case) -> None:
    async def body(deaths: Sequence[float], expected: tuple[Any, ...]) -> None:
        found = await revived(acts(case), Engine(digits), *deaths)
        assert as_told(found) == expected

    expected = run(told(acts(case), task(), script=digits))["0/0"]
    for seconds in range(8):
        run(body([seconds + 0.5], expected))
    run(body([1.5, 1.5, 0.5, 2.5], expected))


class Remembers:
    """An agent that is restored, and keeps what it found."""

    def __init__(self, *tools: Any) -> None:
        self._tools = list(tools)
        """tools in each of its lives"""
        self.found: list[tuple[bytes, list[str]]] = []
        """state and earlier answers in each of its lives"""

    async def __call__(self, episode: Episode) -> float:
        """Three turns, the first of them asked for twice."""
        chat = await episode.resume(self._tools.pop(0) if self._tools else ())
        self.found.append((episode.state, [turn.text for turn in chat.turns]))
        while len(chat.turns) < 3:
            if chat.turns:
                chat.say("more")
            episode.state = f"after {len(chat.turns)}".encode()
            with suppress(TimeoutError):
                async with asyncio.timeout(None if chat.turns or episode.given_up else 0.5):
                    await chat.turn(seed=episode.given_up)  # another question than that before
        return float("".join(turn.text for turn in chat.turns))


def numbers() -> Script:
    """Says 1, 2, 3, ... whatever it reads."""
    count = itertools.count(1)
    return lambda _: str(next(count))


def first_answer(flow: Flow) -> None:
    """Lose the first answer that the agent has had: turn 1 was given up."""
    flow.turns.receiver.get_nowait(key="0/0.2")


def state_of_its_time(flow: Flow) -> None:
    """Have the newest answer carry a state that nobody can read."""
    newest = flow.turns.receiver.get_nowait(key="0/0.3")
    newest.request = replaced(newest.request, state=b"of another version")
    flow.turns.sender.put_nowait(newest, key="0/0.3")


@pytest.mark.parametrize(("lose", "tools", "found", "reward"), [
    (None, ((), ()), (b"after 1", ["2", "3"]), 234.0),
    (first_answer, ((), ()), (b"", []), 156.0),
    (state_of_its_time, ((), ()), (b"", []), 156.0),
    (None, ((), [wait]), (b"", []), 678.0),
])  # fmt: skip
def test_a_conversation_is_restored_as_it_was_or_not_at_all(
    lose: Callable[[Flow], None] | None, tools: Any, found: tuple[bytes, list[str]], reward: float
) -> None:
    async def body() -> None:
        agent = Remembers(*tools)
        sample = await revived(agent, Engine(numbers()), 2.7, lose=lose)
        assert agent.found == [(b"", []), found]
        assert sample.outcome == Scored(reward=reward)

    run(body())


def test_a_turn_that_was_given_up_is_not_taken_up_with_another_state() -> None:
    found: list[bytes] = []

    async def thinks_again(episode: Episode) -> float:
        """Give the first answer up, and ask the same with another state."""
        chat = await episode.resume()
        found.append(episode.state)
        if not chat.turns:
            episode.state = b"first"
            with suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await chat.turn()
            episode.state = b"second"
            await chat.turn()
        await asyncio.sleep(5.0)
        return float(chat.turns[-1].text)

    async def body() -> None:
        sample = await revived(thinks_again, Engine(numbers()), 3.0)
        assert found == [b"", b"second"]
        assert sample.outcome == Scored(reward=2.0)

    run(body())


def test_the_state_is_read_after_resume() -> None:
    async def reads_it_first(episode: Episode) -> float:
        return float(episode.state or b"0")

    async def body() -> None:
        [sample], _ = await played(reads_it_first, digits)
        assert isinstance(sample.outcome, Failed)
        assert "await episode.resume()" in sample.outcome.error

    run(body())


async def seeded(episode: Episode) -> float:
    """Turns, forks and choices with one seed."""
    chat = episode.chat()
    choices = [chat, chat.fork(), chat.fork()]
    for one in choices:
        await one.turn(seed=7)
    chat.say("more")
    await chat.turn(seed=7)
    chat.say("more")
    await chat.turn(seed=8)
    chat.say("more")
    await chat.turn()
    return 1.0


def test_no_two_turns_draw_on_one_seed_and_an_episode_that_is_run_again_draws_the_same() -> None:
    async def body() -> list[int]:
        engine = Engine(digits)
        async with flowing(seeded, engine) as (flow, group):
            running = flow.run(group)
            await flow.put(task(1), task(2))
            for _ in range(2):
                await flow.episodes.receiver.get()
            flow.tasks.sender.close()
            await running
        return [one.seed for one in sorted(engine.asked, key=lambda one: (one.group, one.turn))]

    first = run(body())
    assert len(set(first)) == 12
    assert run(body()) == first


def test_an_answer_that_was_cut_is_none_to_a_turn_that_may_be_longer() -> None:
    lives = 0

    async def asks_for_more(episode: Episode) -> float:
        """Give a short answer up in the first life, and ask for a longer one."""
        nonlocal lives
        lives += 1
        chat = episode.chat()
        if lives == 1:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await chat.turn(2)
        turn = await chat.turn(6)
        await asyncio.sleep(5.0)
        return float(turn.text)

    async def body() -> None:
        sample = await revived(asks_for_more, Engine(lambda _: "12345"), 3.0)
        assert sample.outcome == Scored(reward=12345.0)
        assert sample.generated.finish == "stop"

    run(body())
