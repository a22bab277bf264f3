"""Episodes that a limit ends are counted as cut, whoever has noticed it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from rlinf_async.episodes import Episode, LimitReached
from rlinf_async.messages.language import Scored
from rlinf_async.testing import run
from rlinf_async.testing.episodes import play
from rlinf_async.workers.episode import EpisodeConfig


async def catches(episode: Episode) -> float:
    """Scores itself what a limit has ended."""
    chat = episode.chat()
    with suppress(LimitReached):
        while True:
            await chat.turn()
            chat.say("on")
    return 0.5


async def goes_on_shorter(episode: Episode) -> float:
    """Begins another conversation where one has become too long."""
    await catches(episode)
    await episode.chat(messages=[{"role": "user", "content": "?"}]).turn()
    return 0.5


async def two_at_once(episode: Episode, count: int = 2) -> float:
    """The last one may find no turn left, before the others are answered."""
    chats = [episode.chat() for _ in range(count)]
    await asyncio.gather(*(one.turn() for one in chats), return_exceptions=True)
    return 0.5


async def gives_up_before(episode: Episode) -> float:
    """Three at once, after a turn that was given up."""
    chat = episode.chat(messages=[{"role": "user", "content": "first"}])
    asking = asyncio.ensure_future(chat.turn())
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait([asking])
    return await two_at_once(episode, 3)


async def has_enough(episode: Episode) -> float:
    """Ends by itself."""
    await episode.chat().turn()
    return 0.5


@pytest.mark.parametrize(
    ("agent", "limits", "cut"),
    [
        (catches, {"max_turns": 2}, "turns"),
        (catches, {"max_tokens": 120}, "tokens"),
        (goes_on_shorter, {"max_tokens": 120, "max_turns": 20}, ""),
        (two_at_once, {"max_turns": 1}, "turns"),
        (two_at_once, {"max_turns": 2}, ""),
        (gives_up_before, {"max_turns": 2}, "turns"),
        (has_enough, {"max_turns": 1}, ""),
    ],
)
def test_an_episode_that_a_limit_has_ended_is_cut(
    agent: Any, limits: dict[str, Any], cut: str
) -> None:
    playing = play(agent, lambda _: "well", messages="q", config=EpisodeConfig(**limits))
    played = run(playing, seed=None)  # first come, first served
    assert played.outcome == Scored(reward=0.5)
    assert played.record.cut == cut
