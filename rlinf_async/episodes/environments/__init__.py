"""Environments of others: ``run = "textarena"``, with settings in ``[episode.environment]``.

::

    task --number--> make(number) --opened--> observation --say--> the model --turn--> action
                                                   ^                                      |
                                                   +------- step: reward, done <----------+

A task is a number: the seed of a game, the row of a set of tasks. So all samples of a group play
the same game, and an episode that is run again after a death of its worker plays over the answers
that were recorded. A reward of a step is the reward of its turn; that of the last step is the
outcome, where training has it at the same place, and evaluation compares it.

Each kind is an `EnvironmentPart` in a module of its own, which imports nothing of its library.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import numbers
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple, Protocol, TypeVar

import msgspec

from rlinf_async.config.convert import convert
from rlinf_async.config.registry import (
    ConfigError,
    Part,
    Path,
    Registry,
    UsageError,
    raised,
)
from rlinf_async.episodes.episode import Episode, EpisodeError, LimitReached, RunEpisode
from rlinf_async.episodes.tools import LEFT_ALONE, THREAD_EACH, Ended

T = TypeVar("T")

WAIT: Final = "environment"
"""what an episode waits for while its task begins, or a step is taken"""
CONCURRENT: Final = 32
"""steps of a worker's environments that are computed at once"""


class EnvironmentFailed(EpisodeError):
    """An environment raised, or returned what it must not."""


class Asked(NamedTuple):
    """What a run asks of its environment."""

    tasks: int = 0
    """number of tasks that it makes itself; 0: those of data"""
    at_once: int = 1
    """most episodes that are open at a time, over all workers"""


class EnvironmentPart(Part):
    """Description of a kind of environment."""

    numbered: ClassVar[bool] = False
    """whether the reference of a task has to be a number, see `number_of`"""

    def check(self, settings: Any, path: Path, asked: Asked) -> None:
        """Raise `ConfigError` where there is no such environment, one that is not played in text,
        or less of it than is asked. Imports the library, which is there; ``path`` is that of the
        settings."""

    def make(self, settings: Any, /) -> RunEpisode:
        """Return the coroutine function of an episode."""
        raise NotImplementedError


@contextmanager
def at_fault(what: str, path: Path) -> Iterator[None]:
    """Raise `ConfigError` for what a library raises: ``what`` is not possible, and why. ``path`` is
    the setting at fault."""
    try:
        yield
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{what}: {raised(error)}", path=path) from error


environments: Registry[EnvironmentPart] = Registry(
    "environment of episodes",
    entries={
        name: f"rlinf_async.episodes.environments.{name}:{name.capitalize()}Part"
        for name in ("gymnasium", "openenv", "textarena", "verifiers")
    },
    group="rlinf_async.episode_environments",
    described_by=EnvironmentPart,
)


def load_environment(
    name: str, settings: Mapping[str, Any], path: Path, asked: Asked | None = None
) -> RunEpisode:
    """Return the coroutine function of an environment; ``path`` is the setting that names it,
    beside which its own stand, as ``environment``. With ``asked`` the environment is checked, which
    may make one; workers need not do that once more.

    Raises:
        MissingExtra: its package is not installed.
        ConfigError: a setting is wrong, or there is no such environment.
    """
    part = environments.check(name, path, apart=True)
    part.check_installed(f"episode.run = {name!r}")
    where = (*path[:-1], "environment")
    if part.Config is None and settings:
        raise ConfigError(f"environment {name!r} has no settings", path=where)
    found = None if part.Config is None else convert(dict(settings), part.Config, where)
    if asked is not None:
        part.check(found, where, asked)
    return part.make(found)


class PlayedConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of every environment that `play` plays."""

    unfinished: float = 0.0
    """outcome of an episode that reaches a limit before the end of its game"""


class Step(NamedTuple):
    """What an environment says to an action."""

    observation: str
    reward: float | None = None
    """of this step; None: none"""
    done: bool = False
    metrics: Mapping[str, float] = {}
    """at the end: numbers that the run averages"""


class World(Protocol):
    """An environment that one episode acts in."""

    async def reset(self, seed: int) -> Step:
        """Begin the task of this number."""
        ...

    async def step(self, action: str) -> Step:
        """Carry out what the model said."""
        ...

    async def aclose(self) -> None:
        """Let go of it, in some seconds at most, also where a step goes on."""
        ...


def number_of(episode: Episode) -> int:
    """Return the number of the task: its reference.

    Raises:
        EnvironmentFailed: the reference is no whole number from 0.
    """
    reference = episode.task.reference
    if not is_number(reference):
        raise EnvironmentFailed(
            f"the reference of task {episode.task.index} is {reference[:80]!r}: an environment's "
            "task is a number from 0, its seed: set data.environment_tasks in place of data.path, "
            "or write it into the reference column"
        )
    return int(reference)


def is_number(reference: str) -> bool:
    """Whether a reference is the number of a task, from 0."""
    return reference.isascii() and reference.isdigit()


class PlayedPart(EnvironmentPart):
    """Description of a kind of environment that `play` plays; its Config is a `PlayedConfig`."""

    numbered = True

    def worlds(self, settings: Any, /) -> Callable[[], World]:
        """Return what makes the environment of one episode."""
        raise NotImplementedError

    def make(self, settings: Any, /) -> RunEpisode:
        """Return the coroutine function."""
        world = self.worlds(settings)

        async def run(episode: Episode) -> float:
            """Play one episode of the environment."""
            return await play(episode, world(), settings.unfinished)

        return run


async def play(episode: Episode, world: World, unfinished: float) -> float:
    """Have the model act in an environment to its end; return the outcome.

    An episode that reaches a limit before has what its steps have earned, and ``unfinished`` as
    outcome; it is counted in the metric of that name. ``return`` is the sum of the steps' rewards.

    Raises:
        EnvironmentFailed: the environment raised, or returned what it must not.
    """
    seed = number_of(episode)
    told = [one for one in episode.task.messages if one["role"] == "system"]
    try:
        with episode.watch(WAIT):
            now = await world.reset(seed)
        chat = episode.chat(messages=[*told, {"role": "user", "content": now.observation}])
        episode.metrics.update({"unfinished": 0.0, "return": 0.0})
        while not now.done:
            turn = await chat.turn()
            with episode.watch(WAIT):
                now = await world.step(turn.text)
            episode.metrics["return"] += now.reward or 0.0
            if not now.done:
                turn.reward = now.reward
                chat.say(now.observation)
    except LimitReached:
        episode.metrics["unfinished"] = 1.0
        return unfinished
    finally:
        await world.aclose()
    episode.metrics.update(now.metrics)
    return now.reward or 0.0


def text_of(name: str, observation: object) -> str:
    """Return an observation, which must be text that is not empty."""
    if not isinstance(observation, str):
        raise EnvironmentFailed(
            f"{name} observed {observation!r:.200}, of type {type(observation).__name__}: a model "
            "reads text"
        )
    if not observation.strip():
        raise EnvironmentFailed(f"{name} observed nothing: a model reads text")
    return observation


def number(name: str, what: str, value: Any) -> float:
    """Return a finite number, also one of numpy or in an array of one; truth values are none."""
    found = value.item() if getattr(value, "size", 0) == 1 else value
    real = isinstance(found, numbers.Real) and not isinstance(found, bool)
    if not real or not math.isfinite(found):
        raise EnvironmentFailed(f"{name}: the {what} is {value!r:.200}; it must be a finite number")
    return float(found)


class Going:
    """Calls of all environments of a worker."""

    def __init__(self) -> None:
        self.turns = asyncio.Semaphore(CONCURRENT)
        self.left_alone = 0
        """calls that go on after the end of their episode"""


class Calls:
    """Calls of one episode's environment, one after the other, each in a thread.

    Nobody can end a thread: where an episode ends in the middle of a call, that goes on, and the
    environment is closed after it.

    Args:
        name: name of the environment, for errors.
        going: shared by the environments of a worker.
    """

    def __init__(self, name: str, going: Going) -> None:
        self._name = name
        self._going = going
        self._call: asyncio.Future[Ended] | None = None

    async def __call__(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function.

        Raises:
            EnvironmentFailed: it raised; or `LEFT_ALONE` calls of earlier episodes have not ended.
        """
        going = self._going
        if going.left_alone >= LEFT_ALONE:
            raise EnvironmentFailed(
                f"{self._name} is not called: {going.left_alone} calls of it, of episodes that "
                "are over, have not ended"
            )
        async with going.turns:
            self._call = call = self._begin(partial(function, *args, **kwargs))
            try:
                await asyncio.wait([call])
            except asyncio.CancelledError:
                going.left_alone += 1
                call.add_done_callback(self._back)
                raise
        ended = call.result()
        if isinstance(ended.error, EpisodeError):
            raise ended.error
        if ended.error is not None:  # also SystemExit, which must not end the worker
            raise EnvironmentFailed(f"{self._name} raised {raised(ended.error)}") from ended.error
        found: T = ended.value
        return found

    def last(self, function: Callable[[], Any]) -> None:
        """Have a function called that lets go of the environment, once no other call is under way.
        Nobody waits for it, and what it raises is of no use."""
        if self._call is None or self._call.done():
            self._begin(function)
        else:
            self._call.add_done_callback(lambda _: self._begin(function))

    def _back(self, call: asyncio.Future[Ended]) -> None:
        self._going.left_alone -= 1

    def _begin(self, function: Callable[[], Any]) -> asyncio.Future[Ended]:
        here, loop = contextvars.copy_context(), asyncio.get_running_loop()
        return loop.run_in_executor(THREAD_EACH, lambda: here.run(Ended.of, function))
