"""Games of TextArena::

    [episode]
    run = "textarena"

    [episode.environment]
    id = "TicTacToe-v0"
    opponent = "players.py:plays"      # plays(observation, draws): what it is told -> its move

The model has one seat, and the outcome is the game's reward for it. It is told what the game and
other players say, once: what it has said itself it has in its conversation.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from rlinf_async.config.counts import check_bounds
from rlinf_async.config.registry import (
    ConfigError,
    Path,
    check_arguments,
    load_entry_point,
    nearest,
    needed,
)
from rlinf_async.episodes.environments import (
    Asked,
    Calls,
    EnvironmentFailed,
    Going,
    PlayedConfig,
    PlayedPart,
    Step,
    at_fault,
    number,
)

T = TypeVar("T")
Opponent = Callable[[str, random.Random], str]

MOVES: Final = 1000
"""moves of opponents in a row, after which a game counts as one that never ends"""
YOUR_TURN: Final = "It is your turn."
"""what the model is told where the game says nothing"""


class TextarenaConfig(PlayedConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which game, and who plays."""

    id: str
    """name of the game, as in ``"Wordle-v0"``"""
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    """arguments of the game, which take the place of those that its name stands for"""
    players: int = 1
    """number of players"""
    seat: int | None = None
    """the model's seat, from 0; left out: drawn by the task's number"""
    opponent: str = ""
    """function that plays all other seats: ``"file.py:name"`` or ``"module:name"``, called in a
    thread with what that player is told and the random numbers of this game's opponents"""

    def __post_init__(self) -> None:
        check_bounds(self, "players", least=1)
        if self.seat is not None and not 0 <= self.seat < self.players:
            raise ValueError(
                f"seat is {self.seat}, but with players = {self.players} seats are 0 to "
                f"{self.players - 1}"
            )
        if (self.players > 1) != bool(self.opponent):
            raise ValueError(
                f"players is {self.players}: give opponent, a function that plays the other seats"
                if self.players > 1
                else "there is nobody for opponent to play: set players, or leave it out"
            )

    @property
    def name(self) -> str:
        """The game's name in errors."""
        return f"game {self.id!r}"


class TextarenaPart(PlayedPart):
    Config = TextarenaConfig
    library, extra = "textarena", "textarena"

    def check(self, settings: TextarenaConfig, path: Path, asked: Asked) -> None:
        """Look the game up, make it, and let it begin."""
        known = _library().envs.registration.ENV_REGISTRY
        if settings.id not in known:
            raise ConfigError(
                f"TextArena has no game {settings.id!r}{nearest(settings.id, known)}",
                path=(*path, "id"),
            )
        _opponent(settings, path)
        given = f"{settings.players} player(s) and options = {settings.options}"
        with at_fault(f"{settings.name} cannot begin with {given}", path):
            _Game(settings, 0)

    def worlds(self, settings: TextarenaConfig, /) -> Callable[[], _World]:
        """Return what makes the game of one episode."""
        return partial(_World, settings, _opponent(settings, ()), Going())


def _library() -> Any:
    return needed("textarena", extra="textarena", needed_for='episode.run = "textarena"')


def _opponent(settings: TextarenaConfig, path: Path) -> Opponent | None:
    if not settings.opponent:
        return None
    where = (*path, "opponent")
    found = load_entry_point(settings.opponent, where)
    check_arguments(found, settings.opponent, "opponent", ("observation", "draws"), where)
    return found


_random: Final = threading.Lock()
"""who holds it has Python's and numpy's global random numbers, of which all games draw"""


class _Game:
    """A game with random numbers of its own, whatever other games draw meanwhile."""

    def __init__(self, settings: TextarenaConfig, seed: int) -> None:
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(seed % 2**32).get_state()
        self.call(self._begin, settings, seed)

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function that draws of this game's random numbers."""
        with _random:
            python, of_numpy = random.getstate(), np.random.get_state()
            random.setstate(self._python)
            np.random.set_state(self._numpy)
            try:
                return function(*args)
            finally:
                self._python, self._numpy = random.getstate(), np.random.get_state()
                random.setstate(python)
                np.random.set_state(of_numpy)

    def _begin(self, settings: TextarenaConfig, seed: int) -> None:
        library = _library()
        self.env = self.bare = library.make(settings.id, **settings.options)
        # Wrappers of observations repeat the whole game each time; those of actions stay.
        while isinstance(self.bare, library.Wrapper):
            self.bare = self.bare.env
        self.env.reset(num_players=settings.players, seed=seed)
        own = library.ObservationType.PLAYER_ACTION
        self.own_action: Any = own


class _World:
    def __init__(self, settings: TextarenaConfig, opponent: Opponent | None, going: Going) -> None:
        self._settings = settings
        self._opponent = opponent
        self._call = Calls(settings.name, going)
        self._game: _Game | None = None
        self._seat = 0

    async def reset(self, seed: int) -> Step:
        """Begin a game, up to the model's first move."""
        return await self._call(self._reset, seed)

    async def step(self, action: str) -> Step:
        """Carry out the model's move, and those of others up to its next one."""
        return await self._call(self._step, action)

    async def aclose(self) -> None:
        """Nothing is held."""

    def _reset(self, seed: int) -> Step:
        settings = self._settings
        seat = random.Random(seed).randrange(settings.players)
        self._seat = seat if settings.seat is None else settings.seat
        self._game = _Game(settings, seed)
        self._draws = random.Random(f"opponents {seed}")
        return self._play(None)

    def _step(self, action: str) -> Step:
        if self._game is None:
            raise EnvironmentFailed(f"{self._settings.name} has not begun")
        return self._play(action)

    def _play(self, action: str | None) -> Step:
        """Carry out a move, then those of others, until it is the model's turn. The game computes
        by `_Game.call`, opponents beside other games: one that hangs holds up its own game."""
        assert self._game is not None
        game, name = self._game, self._settings.name
        done = False if action is None else self._moved(action)
        for _ in range(MOVES):
            if done:
                return self._ended()
            player, told = game.call(game.bare.get_observation)
            said = self._told(player, told)
            if player == self._seat:
                return Step(said if said.strip() else YOUR_TURN)
            if self._opponent is None:
                raise EnvironmentFailed(f"{name}: seat {player} is to move, and nobody has it")
            move = self._opponent(said, self._draws)
            if not isinstance(move, str):
                raise EnvironmentFailed(
                    f"opponent {self._settings.opponent!r} returned {move!r:.200}; a move is text"
                )
            done = self._moved(move)
        raise EnvironmentFailed(f"{name}: {MOVES} moves in a row were not the model's")

    def _moved(self, action: str) -> bool:
        assert self._game is not None
        game = self._game
        found = game.call(lambda: game.env.step(action=action))
        if not isinstance(found, tuple) or len(found) != 2:
            raise EnvironmentFailed(f"{self._settings.name}: step returned {found!r:.200}")
        return bool(found[0])

    def _told(self, player: int, told: object) -> str:
        """Return what the game and others have said to a player since its last move."""
        assert self._game is not None
        if isinstance(told, str):
            return told
        if not isinstance(told, list):
            raise EnvironmentFailed(f"{self._settings.name} observed {told!r:.200}")
        lines = []
        for sender, text, kind in told:
            if kind != self._game.own_action:
                lines.append(str(text))
            elif sender != player:
                lines.append(f"[Player {sender}] {text}")
        return "\n".join(lines)

    def _ended(self) -> Step:
        assert self._game is not None
        name = self._settings.name
        rewards, info = self._game.call(self._game.env.close)
        if not isinstance(rewards, Mapping) or self._seat not in rewards:
            raise EnvironmentFailed(f"{name} ended with the rewards {rewards!r:.200}")
        about = info.get(self._seat) if isinstance(info, Mapping) else None
        wrong = bool(about.get("invalid_move")) if isinstance(about, Mapping) else False
        return Step(
            "",
            number(name, "reward", rewards[self._seat]),
            done=True,
            metrics={"invalid_move": float(wrong)},
        )
