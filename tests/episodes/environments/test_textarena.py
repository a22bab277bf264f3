"""Games of TextArena, the package as it is on PyPI."""

from __future__ import annotations

import asyncio
import random
import re
from typing import Any

import pytest

from rlinf_async.config import ConfigError, MissingExtra
from rlinf_async.messages.language import Failed, Scored
from tests.episodes.environments import players
from tests.episodes.environments.kit import agent, attempt, ended, played, said

PLAYERS = players.__name__
NUMBER = {"id": "GuessTheNumber-v0"}
BOARD = {"id": "TicTacToe-v0", "players": 2, "opponent": f"{PLAYERS}:first_free"}
AT_RANDOM = {**BOARD, "opponent": f"{PLAYERS}:at_random"}


def test_without_the_package_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'rlinf-async\[textarena\]'"):
        agent("textarena", **NUMBER)


def bisects(text: str) -> str:
    """The next guess of whoever halves what is left."""
    low, high = 1, 20
    for guess, hint in re.findall(r"\[(\d+)\].*?is (higher|lower)", text, re.DOTALL):
        low, high = (int(guess) + 1, high) if hint == "higher" else (low, int(guess) - 1)
    return f"[{(low + high) // 2}]"


def free(text: str) -> str:
    """A cell that is free on the last board."""
    board = text[text.rfind("Current Board") :]
    return f"I take [{max(map(int, re.findall('[0-8]', board)))}]."


@pytest.mark.usefixtures("textarena", "loop_kind")
async def test_the_model_plays_alone_and_is_told_each_thing_once() -> None:
    ending, episode = await played(
        agent("textarena", **NUMBER), lambda text: bisects(last(text)), 4
    )
    assert ending.outcome == Scored(reward=1.0)
    first, *rest = said(episode)
    assert first.startswith("You are Player 0. You are playing Guess The Number.")
    assert set(rest[1::2]) <= {"The target number is higher.", "The target number is lower."}
    assert episode.metrics == {"unfinished": 0.0, "return": 1.0, "invalid_move": 0.0}


def last(text: str) -> str:
    """What follows the rules, which have an example of a guess."""
    return text[text.find("Enter your guess.") :]


@pytest.mark.usefixtures("textarena")
async def test_an_invalid_move_is_told_then_ends_the_game() -> None:
    ending, episode = await played(agent("textarena", **NUMBER), ["what?", "what??"])
    assert ending.outcome == Scored(reward=0.0)
    assert "You attempted an invalid move" in said(episode)[2]
    assert episode.metrics == {"unfinished": 0.0, "return": 0.0, "invalid_move": 1.0}


@pytest.mark.usefixtures("textarena")
@pytest.mark.parametrize("seat", [0, 1])
async def test_an_opponent_has_the_other_seats(seat: int) -> None:
    players.TOLD.clear()
    run = agent("textarena", **BOARD, seat=seat)
    ending, episode = await played(run, free)
    told = said(episode)
    assert told[0].startswith(f"You are Player {seat} in Tic Tac Toe.")
    assert players.TOLD[0].startswith(f"You are Player {1 - seat} in Tic Tac Toe.")
    assert f"[Player {1 - seat}] [0]" in told[2 if seat == 0 else 0]
    assert not any(f"[Player {seat}]" in one for one in told)  # its own moves it has said itself
    assert ending.outcome == Scored(reward=1.0 if seat == 0 else -1.0)  # who begins is faster


@pytest.mark.usefixtures("textarena")
async def test_a_game_is_a_function_of_its_number_and_of_nobody_else() -> None:
    run = agent("textarena", **AT_RANDOM)
    random.seed(5)
    before = random.getstate()
    alone = [said((await played(run, free, at))[1]) for at in range(12)]
    assert random.getstate() == before
    attempts = [attempt(free, at)[0] for at in range(12)]
    await asyncio.gather(*(ended(run, episode) for episode in attempts))
    assert [said(episode) for episode in attempts] == alone
    assert len({one[0].split(" in ")[0] for one in alone}) == 2  # seats are drawn, too
    assert len({"".join(one) for one in alone}) > 4


@pytest.mark.usefixtures("textarena")
async def test_an_opponent_that_hangs_holds_up_its_own_game_alone() -> None:
    players.OPEN.clear()
    hangs = agent("textarena", **{**BOARD, "opponent": f"{PLAYERS}:waits", "seat": 1})
    held = asyncio.create_task(played(hangs, free))
    try:
        await asyncio.to_thread(players.ASKED.acquire)
        other = agent("textarena", **NUMBER)
        ending, _ = await played(other, lambda text: bisects(last(text)), 4)
        assert ending.outcome == Scored(reward=1.0)
        assert not held.done()
    finally:
        players.OPEN.set()
    ending, _ = await held
    assert ending.outcome == Scored(reward=-1.0)


@pytest.mark.usefixtures("textarena")
async def test_an_opponent_that_says_nothing_fails_the_episode() -> None:
    run = agent("textarena", **{**BOARD, "opponent": f"{PLAYERS}:silent"})
    ending, _ = await played(run, free)
    assert isinstance(ending.outcome, Failed)
    assert "silent' returned None; a move is text" in ending.outcome.error


@pytest.mark.usefixtures("textarena")
@pytest.mark.parametrize(
    ("settings", "where", "words"),
    [
        ({"id": "GuessTheNumbr-v0"}, "id", "did you mean 'GuessTheNumber-v0"),
        ({**NUMBER, "players": 0}, "", "players"),
        ({**NUMBER, "seat": 1}, "", "with players = 1 seats are 0 to 0"),
        ({"id": "TicTacToe-v0", "players": 2}, "", "give opponent"),
        ({**NUMBER, "opponent": f"{PLAYERS}:first_free"}, "", "nobody for opponent to play"),
        ({"id": "TicTacToe-v0"}, "", "cannot begin with 1 player(s)"),
        ({**NUMBER, "options": {"colour": 1}}, "", "cannot begin"),
        ({**BOARD, "opponent": f"{PLAYERS}:nobody"}, "opponent", "has no function 'nobody'"),
        ({**BOARD, "opponent": f"{PLAYERS}:nothing"}, "opponent", "takes other arguments"),
    ],
)
def test_settings_that_cannot_be_are_named(
    settings: dict[str, Any], where: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        agent("textarena", **settings)
    assert caught.value.path[:2] == ("episode", "environment")
    assert not where or caught.value.path[-1] == where
