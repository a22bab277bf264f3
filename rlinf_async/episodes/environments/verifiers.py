"""Tasksets and environments of verifiers::

    [episode]
    run = "verifiers"

    [episode.environment.env]          # what verifiers' own command reads as [env]
    taskset = { id = "my-tasks" }
    agent = { harness = { id = "null" }, runtime = { type = "subprocess" } }

Task ``i`` is row ``i`` of the taskset. Its harness speaks to the endpoint of the episode, by
verifiers' own client: what the engine draws is what is trained. The outcome is the mean of the
rewards of the agents that draw there; one that is not to be trained has to draw elsewhere.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec

from rlinf_async.config.registry import ConfigError, Path, needed, raised
from rlinf_async.episodes.environments import (
    Asked,
    EnvironmentFailed,
    EnvironmentPart,
    at_fault,
    number,
    number_of,
)
from rlinf_async.episodes.episode import Episode, RunEpisode

VARIABLE: Final = "RLINF_ASYNC_EPISODE_API_KEY_"
"""beginning of the names of variables with the keys of open episodes: verifiers' client reads its
key from one, and its runtimes withhold what is named API_KEY from programs"""
_numbers: Final = itertools.count()
"""of these variables: workers may share a process"""


class VerifiersConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which environment."""

    env: dict[str, Any]
    """configuration of the environment, as verifiers has it: ``taskset``, ``agent``, ``id``"""
    model: str = "policy"
    """name of the model, for harnesses that look at it"""

    @property
    def name(self) -> str:
        """The environment's name in errors."""
        taskset = self.env.get("taskset")
        ident = taskset.get("id") if isinstance(taskset, dict) else taskset
        return f"verifiers environment {self.env.get('id') or ident!r}"


class VerifiersPart(EnvironmentPart):
    Config = VerifiersConfig
    library, extra, numbered = "verifiers", "verifiers", True

    def check(self, settings: VerifiersConfig, path: Path, asked: Asked) -> None:
        """Load the environment, and count its tasks where a run asks for a number of them."""
        with at_fault(f"{settings.name} cannot be loaded", (*path, "env")):
            rows = iter(_loaded(settings).taskset)
            there = sum(1 for _ in itertools.islice(rows, asked.tasks))
        if there < asked.tasks:
            raise ConfigError(
                f"environment_tasks is {asked.tasks}, but {settings.name} has {there} tasks: set "
                "it to no more than these",
                path=("data", "environment_tasks"),
            )

    def make(self, settings: VerifiersConfig, /) -> RunEpisode:
        """Return the coroutine function."""
        world = _World(settings)

        async def run(episode: Episode) -> float:
            """Have the environment run one episode."""
            return await world.play(episode)

        return run


def _module(name: str, settings: VerifiersConfig) -> Any:
    return needed(f"verifiers.v1{name}", extra="verifiers", needed_for=settings.name)


def _loaded(settings: VerifiersConfig) -> Any:
    loaders = _module(".utils.loaders", settings)
    return loaders.load_environment(loaders.resolve_env_config(settings.env))


class _World:
    """An environment, which all episodes of a worker share, as verifiers means it."""

    def __init__(self, settings: VerifiersConfig) -> None:
        self._settings = settings
        with at_fault(f"{settings.name} cannot be loaded", ("env",)):
            self._env = _loaded(settings)
        self._rest: Iterator[Any] = iter(self._env.taskset)
        self._tasks: list[Any] = []
        """those that were read so far"""
        self._reading = asyncio.Lock()
        self._open = 0
        self._serving: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None
        self._over = asyncio.Event()

    async def play(self, episode: Episode) -> float:
        """Have the environment run an episode; return its reward.

        Raises:
            EnvironmentFailed: it has no such task, or its episode failed.
        """
        library, name = _module("", self._settings), self._settings.name
        task = await self._row(number_of(episode))
        variable = f"{VARIABLE}{next(_numbers)}"
        begun: list[Any] = []
        base_url, os.environ[variable] = f"{episode.base_url}/v1", episode.key
        try:
            client = library.EvalClientConfig(base_url=base_url, api_key_var=variable)
            context = library.ModelContext(model=self._settings.model, client=client)
            async with self._served():
                done = await self._env.run_episode(task, context, on_trace=begun.append)
        finally:
            del os.environ[variable]
        self._check_trained([one for one in begun if _draws(one, variable)])
        episode.metrics["unfinished"] = float(episode.reached is not None)
        if not done.ok and episode.reached is None:
            errors = [*done.errors, *(one for trace in done.traces for one in trace.errors)]
            said = f"{errors[-1].type}: {errors[-1].message}" if errors else "nothing says why"
            raise EnvironmentFailed(f"{name} failed: {said}")
        rewards = [
            number(name, "reward", trace.reward) for trace in done.traces if _draws(trace, variable)
        ]
        if not rewards:
            raise EnvironmentFailed(f"{name} ran no agent that draws with the policy")
        return sum(rewards) / len(rewards)

    def _check_trained(self, drawn: list[Any]) -> None:
        """Raise where an agent has drawn with the policy that verifiers says is not trained."""
        fixed = [trace.agent.name for trace in drawn if not trace.agent.trainable]
        if fixed:
            raise EnvironmentFailed(
                f"{self._settings.name} does not train its agent {fixed[0]!r}, but that draws with "
                "the policy, and all that is drawn is trained: give it a model of its own, in "
                f"episode.environment.env.{fixed[0]}.client and .model"
            )

    async def _row(self, at: int) -> Any:
        """Return the row of this number, read in a thread."""
        async with self._reading:
            reading = asyncio.ensure_future(asyncio.to_thread(self._task, at))
            try:
                return await asyncio.shield(reading)
            finally:  # nobody can end a thread, and two cannot read at once
                await asyncio.wait([reading])

    def _task(self, at: int) -> Any:
        missing = at + 1 - len(self._tasks)
        self._tasks += itertools.islice(self._rest, max(missing, 0))
        if at >= len(self._tasks):
            raise EnvironmentFailed(
                f"{self._settings.name} has {len(self._tasks)} tasks, and none of number {at}: "
                "set data.environment_tasks to no more than it has"
            )
        return self._tasks[at]

    @asynccontextmanager
    async def _served(self) -> AsyncIterator[None]:
        """Hold what the environment serves to its harnesses; the last episode lets go of it."""
        if self._serving is None:
            self._over = asyncio.Event()
            self._ready = asyncio.get_running_loop().create_future()
            # In a task of its own: it is left in the task that has entered it.
            self._serving = asyncio.create_task(self._serve(self._ready, self._over))
        serving, ready, over = self._serving, self._ready, self._over
        assert ready is not None
        self._open += 1
        try:
            await asyncio.shield(ready)
            yield
        finally:
            self._open -= 1
            if not self._open:
                self._serving = None
                over.set()
                await asyncio.wait([serving])

    async def _serve(self, ready: asyncio.Future[None], over: asyncio.Event) -> None:
        try:
            async with self._env.serving():
                ready.set_result(None)
                await over.wait()
        except Exception as error:
            failed = EnvironmentFailed(f"{self._settings.name} cannot be served: {raised(error)}")
            if ready.done():
                return
            ready.set_exception(failed)


def _draws(trace: Any, variable: str) -> bool:
    """Whether the agent of a trace has the run's client, whose key is in this variable."""
    return bool(getattr(trace.agent.config.client, "api_key_var", "") == variable)
