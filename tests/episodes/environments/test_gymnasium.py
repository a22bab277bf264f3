"""Environments of Gymnasium whose observations and actions are text."""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest

from rlinf_async.config import ConfigError
from rlinf_async.episodes import Episode, LimitReached
from rlinf_async.episodes.agents import load_agent
from rlinf_async.episodes.environments import Calls, EnvironmentFailed, Going, environments
from rlinf_async.messages.language import Failed, Scored
from tests.episodes.environments import worlds
from tests.episodes.environments.kit import agent, attempt, ended, played, rewards, said

ID = f"{worlds.__name__}:Guess-v0"


@pytest.fixture(autouse=True)
def _worlds() -> Iterator[None]:
    worlds.RESETS.clear()
    while not worlds.CLOSED.empty():
        worlds.CLOSED.get()
    worlds.OPEN.clear()
    yield
    worlds.OPEN.set()


async def closed() -> str:
    """Wait until an environment was closed; the actions that it had seen."""
    return await asyncio.to_thread(worlds.CLOSED.get, timeout=30.0)


def right(number: int) -> str:
    return str(random.Random(number).randrange(10))


@pytest.mark.usefixtures("loop_kind")
async def test_the_model_plays_and_each_step_has_its_reward() -> None:
    wrong = "0" if right(5) != "0" else "1"
    ending, episode = await played(agent("gymnasium", id=ID), [wrong, right(5)], 5)
    assert ending.outcome == Scored(reward=1.0)
    assert rewards(episode) == [-0.25, None]
    hint = "larger" if wrong < right(5) else "smaller"
    assert said(episode) == ["Guess my number, 0 to 9.", wrong, hint, right(5)]
    assert worlds.RESETS == [5]
    assert await closed() == wrong + right(5)
    assert episode.metrics == {"unfinished": 0.0, "return": 0.75}


async def test_options_reach_the_environment_and_it_may_end_by_itself() -> None:
    wrong = "0" if right(1) != "0" else "1"
    ending, episode = await played(
        agent("gymnasium", id=ID, options={"odd": "no"}), [wrong] * 20, 1
    )
    assert ending.outcome == Scored(reward=-0.25)
    assert rewards(episode) == [-0.25] * 9 + [None]


async def test_calls_have_the_context_of_their_episode() -> None:
    given = ContextVar("given", default="nobody's")
    given.set("the episode's")
    call, seen = Calls("world", Going()), SimpleQueue[str]()
    assert await call(given.get) == "the episode's"
    call.last(lambda: seen.put(given.get()))
    assert await asyncio.to_thread(seen.get, timeout=30.0) == "the episode's"


async def test_an_episode_waits_for_its_environment_also_while_that_begins() -> None:
    worlds.OPEN.set()
    episode, _ = attempt([right(5)], 5)
    waits: list[tuple[str, int, int]] = []

    @contextmanager
    def watch(what: str) -> Iterator[None]:
        before = len(worlds.RESETS)
        yield
        waits.append((what, len(worlds.RESETS) - before, episode.turns))

    episode.watch = watch
    await ended(agent("gymnasium", id=ID), episode)
    assert waits == [("environment", 1, 0), ("environment", 0, 1)]


async def test_a_limit_leaves_what_was_earned() -> None:
    wrong = "0" if right(1) != "0" else "1"
    ending, episode = await played(agent("gymnasium", id=ID), [wrong] * 20, 1, turns=3)
    assert ending.outcome == Scored(reward=0.0)
    assert rewards(episode) == [-0.25] * 3
    assert episode.metrics == {"unfinished": 1.0, "return": -0.75}
    costly = agent("gymnasium", id=ID, unfinished=-1)
    ending, episode = await played(costly, [wrong] * 20, 1, turns=3)
    assert ending.outcome == Scored(reward=-1.0)
    assert episode.metrics == {"unfinished": 1.0, "return": -0.75}


async def test_one_that_is_still_being_made_at_the_end_of_its_episode_is_closed() -> None:
    worlds.OPEN.set()
    run = agent("gymnasium", id=ID, options={"odd": "made slowly"})
    await closed()  # that of the check
    worlds.OPEN.clear()
    episode, _ = attempt([])
    playing = asyncio.create_task(ended(run, episode))
    for _ in range(2):
        await asyncio.to_thread(worlds.MADE.acquire)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert worlds.CLOSED.empty()
    worlds.OPEN.set()
    assert await closed() == ""
    assert worlds.RESETS == [3]  # the thread has gone on


async def test_what_fails_after_a_limit_is_a_failure_not_the_verifiers_to_judge() -> None:
    async def run(episode: Episode) -> float:
        await episode.chat().turn()
        episode.reached = LimitReached("turns", 1)
        raise EnvironmentFailed("no score")

    ending, _ = await played(run, ["x"])
    assert isinstance(ending.outcome, Failed)
    assert "no score" in ending.outcome.error


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ("reset raises", "raised RuntimeError: no luck"),
        ("reset returns text", "reset returned 'guess', not 2 values"),
        ("raises", "raised KeyError: 'board'"),
        ("exits", "raised SystemExit: 3"),
        ("stops", "raised StopIteration"),
        ("reward is text", "the reward is '1'; it must be a finite number"),
        ("reward is true", "the reward is True; it must be a finite number"),
        ("reward is nan", "the reward is nan; it must be a finite number"),
        ("observes a number", "observed 7, of type int: a model reads text"),
        ("observes nothing", "observed nothing"),
        ("four values", "not 5 values"),
    ],
)
async def test_what_goes_wrong_fails_the_episode_by_name(odd: str, words: str) -> None:
    right_now = "x"  # never the number
    ending, _ = await played(agent("gymnasium", id=ID, options={"odd": odd}), [right_now] * 20)
    assert isinstance(ending.outcome, Failed)
    assert ID in ending.outcome.error
    assert words in ending.outcome.error


async def test_a_step_that_never_ends_fails_its_episode_alone() -> None:
    run = agent("gymnasium", id=ID, options={"odd": "hangs"})
    for _ in range(8):
        episode, _ = attempt(["x"])
        ending = await ended(run, episode, seconds=0.1)
        assert isinstance(ending.outcome, Failed)
        assert "took longer than seconds = 0.1" in ending.outcome.error
    episode, _ = attempt(["x"])
    ending = await ended(run, episode)
    assert isinstance(ending.outcome, Failed)
    assert "8 calls of it, of episodes that are over, have not ended" in ending.outcome.error
    worlds.OPEN.set()
    assert [await closed() for _ in range(8)] == 8 * ["x"]  # each once its step was over
    ending, _ = await played(run, [right(3)])
    assert ending.outcome == Scored(reward=1.0)


async def test_episodes_share_nothing() -> None:
    run = agent("gymnasium", id=ID)
    attempts = [attempt([str(one % 10) for one in range(at, at + 20)], at) for at in range(20)]
    endings = await asyncio.gather(*(ended(run, episode) for episode, _ in attempts))
    alone = [
        await played(run, [str(one % 10) for one in range(at, at + 20)], at) for at in range(20)
    ]
    assert [one.outcome for one in endings] == [ending.outcome for ending, _ in alone]
    assert [said(episode) for episode, _ in attempts] == [said(episode) for _, episode in alone]
    assert sorted(worlds.RESETS) == sorted([*range(20), *range(20)])


@pytest.mark.parametrize("reference", ["", "x", "-1", "1.5", "٣"])
async def test_a_task_that_is_no_number_is_named(reference: str) -> None:
    ending, _ = await played(agent("gymnasium", id=ID), [], reference)
    assert isinstance(ending.outcome, Failed)
    assert "data.environment_tasks" in ending.outcome.error


@pytest.mark.parametrize(
    ("settings", "where", "words"),
    [
        ({}, ("episode", "environment", "id"), "id"),
        ({"id": ID, "level": 2}, ("episode", "environment", "level"), "level"),
        (
            {"id": ID, "unfinished": math.inf},
            ("episode", "environment", "unfinished"),
            "it must be a finite number",
        ),
        ({"id": "Gues-v0"}, ("episode", "environment", "id"), "cannot be made"),
        ({"id": "no.module:Guess-v0"}, ("episode", "environment", "id"), "cannot be made"),
        ({"id": ID, "options": {"size": 3}}, ("episode", "environment", "id"), "cannot be made"),
        (
            {"id": f"{worlds.__name__}:Numbers-v0"},
            ("episode", "environment", "id"),
            "observation_space Discrete(10): a model reads and writes text",
        ),
        ({"id": "FrozenLake-v1"}, ("episode", "environment", "id"), "observation_space Discrete"),
    ],
)
def test_settings_that_cannot_be_are_named(
    settings: dict[str, object], where: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        agent("gymnasium", **settings)
    assert caught.value.path == where


def test_only_check_makes_an_environment_to_look_at_it() -> None:
    worlds.OPEN.set()
    odd = {"id": ID, "options": {"odd": "made slowly"}}
    load_agent("gymnasium", ("episode", "run"), odd)
    assert worlds.CLOSED.empty()
    agent("gymnasium", **odd)
    assert worlds.CLOSED.get_nowait() == ""
    assert worlds.MADE.acquire(blocking=False)


def test_settings_without_an_environment_are_refused() -> None:
    with pytest.raises(ConfigError, match="'command: true' is no environment") as caught:
        agent("command: true", id=ID)
    assert caught.value.path == ("episode", "environment")


class Echoes:
    """An environment of one's own kind."""

    class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        times: int = 1

    def __new__(cls, settings: Any) -> Any:
        """The coroutine function."""

        async def run(episode: Episode) -> float:
            chat = episode.chat()
            for _ in range(settings.times):
                chat.say((await chat.turn()).text)
            return float(settings.times)

        return run


def silent(settings: None) -> Any:
    """One without settings."""

    async def run(episode: Episode) -> float:
        return 0.0

    return run


async def test_an_environment_of_one_s_own_kind_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {"echoes": f"{__name__}:Echoes", "silent": f"{__name__}:silent"}
    monkeypatch.setattr(environments, "paths", {**environments.paths, **named})
    ending, episode = await played(agent("echoes", times=2), ["a", "b"])
    assert ending.outcome == Scored(reward=2.0)
    assert said(episode)[1:] == ["a", "a", "b", "b"]
    with pytest.raises(ConfigError, match="time"):
        agent("echoes", time=2)
    assert agent("silent") is not None
    with pytest.raises(ConfigError, match="environment 'silent' has no settings"):
        agent("silent", time=2)
