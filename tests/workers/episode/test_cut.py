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


async def two_at_once(episode: Episode) -> float:
    """The second finds no turn left, before the first is answered."""
    chats = [episode.chat() for _ in range(2)]
    await asyncio.gather(*(one.turn() for one in chats), return_exceptions=True)
    return 0.5


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
        (has_enough, {"max_turns": 1}, ""),
    ],
)
def test_an_episode_that_a_limit_has_ended_is_cut(
    agent: Any, limits: dict[str, Any], cut: str
) -> None:
    played = run(play(agent, lambda _: "well", messages="q", config=EpisodeConfig(**limits)))
    assert played.outcome == Scored(reward=0.5)
    assert played.record.cut == cut
