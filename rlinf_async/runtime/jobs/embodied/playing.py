"""A trained policy at work, without a run: evaluated, and filmed.

::

    checkpoint --make_trainer--> weights --> policy --evaluated--> episodes
                                                |
                                                +-----film-------> a video, or a strip of pictures
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import msgspec
import numpy as np

from rlinf_async.backends.base import PolicyBackend, RecurrentPolicyBackend
from rlinf_async.config import ConfigError, UsageError
from rlinf_async.messages.embodied import Floats, Ints
from rlinf_async.messages.spaces import Seen
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.observe.errors import RunFolderError, VideoError
from rlinf_async.observe.video import VideoReport, record_video
from rlinf_async.runtime.apart import apart
from rlinf_async.runtime.jobs import Job
from rlinf_async.runtime.jobs.checkpoints import RunProgress, load_progress, named_checkpoint
from rlinf_async.runtime.jobs.embodied.settings import EnvironmentSettings, ended_in
from rlinf_async.workers.env import EnvConfig, EnvError, EnvFailed, EvaluatedEpisode
from rlinf_async.workers.env.actions import ActionReader
from rlinf_async.workers.env.environments import Environments
from rlinf_async.workers.env.make import opened
from rlinf_async.workers.env.named import NamedEnv
from rlinf_async.workers.env.observations import ObservationWriter
from rlinf_async.workers.env.seeds import episode_seed
from rlinf_async.workers.errors import WorkerDied

T = TypeVar("T")


class Checkpointed(Protocol):
    """A trainer, as far as it is needed to read a checkpoint."""

    def load_checkpoint(self, path: Path) -> object: ...
    def publish(self) -> WeightUpdate: ...


class Trained(NamedTuple):
    """A configuration that is fitted to its environment, and what reads its checkpoints; it is sent
    to another process, as ``functools.partial`` of a function can be, and a lambda cannot."""

    config: EnvironmentSettings
    make_trainer: Callable[[], Checkpointed]


@runtime_checkable
class PlayingJob(Job, Protocol):
    """A job that trains a policy which acts in environments."""

    def trained(self, config: Any) -> Trained:
        """What is needed to let a policy act that was trained with this configuration.

        Raises:
            UsageError: its environment cannot be had, or is another one now.
        """
        ...


class Played(msgspec.Struct, frozen=True):
    """What came of letting a policy act."""

    episodes: list[EvaluatedEpisode]
    """in their order"""
    films: list[VideoReport]
    """of the episode ``shown``"""
    shown: int = 0


def play(
    trained: Trained, checkpoint: Path, *, episodes: int, seed: int, films: Sequence[Path] = ()
) -> Played:
    """Let the policy of a checkpoint play the episodes that an evaluation with this seed has, and
    film one of them; in a process of its own, unless the run was to be in one process.

    Raises:
        EnvFailed: the environment raised, or returned NaN or infinity, or its process has ended.
        VideoError: as `film`.
    """
    return _where_the_run_was(
        trained.config, _play, Played, trained, checkpoint, episodes, seed, list(films)
    )


def film_run(trained: Trained, checkpoint: Path, path: Path) -> VideoReport:
    """Film the episodes that the configuration asks for, as `play` plays them.

    Raises:
        VideoError: as `film`; or the process of the environment has ended.
    """
    try:
        return _where_the_run_was(trained.config, _film_run, VideoReport, trained, checkpoint, path)
    except EnvError as error:
        raise VideoError(f"no video: {error}") from error


def _where_the_run_was(
    config: EnvironmentSettings, function: Callable[..., T], returns: type[T], *args: Any
) -> T:
    from rlinf_async.backends.registry import POLICIES, slow_imports

    if not config.cluster.processes:
        return function(*args)
    try:
        return apart(
            function,
            *args,
            returns=returns,
            name="Env",
            raises=(EnvError, VideoError),
            imports=slow_imports(POLICIES, "torch"),
        )
    except WorkerDied as death:
        raise EnvFailed(ended_in(config.env, death)) from death


def _play(
    trained: Trained, checkpoint: Path, episodes: int, seed: int, films: Sequence[Path]
) -> Played:
    env, policy = trained.config.env, trained_policy(*trained, checkpoint)
    done = sorted(evaluated(env, policy, episodes=episodes, seed=seed), key=lambda one: one.episode)
    shown = worth_showing(done)
    made = [film_of(env, policy, path, shown, seed=seed) for path in films]
    return Played(done, made, shown.episode)


def _film_run(trained: Trained, checkpoint: Path, path: Path) -> VideoReport:
    wanted, policy = trained.config.evaluation, trained_policy(*trained, checkpoint)
    return film(
        trained.config.env,
        policy,
        path,
        episodes=wanted.video_episodes,
        seed=wanted.seed,
        time_limit=wanted.video_seconds,
    )


def trained_policy(
    config: EnvironmentSettings, make_trainer: Callable[[], Checkpointed], checkpoint: Path
) -> PolicyBackend:
    """The policy of a checkpoint, which is a folder."""
    from rlinf_async.backends.registry import load_policy_backend

    trainer = make_trainer()
    trainer.load_checkpoint(checkpoint)
    policy = load_policy_backend("torch")(config.acting_policy, 0, "cpu")
    policy.load(trainer.publish())
    return policy


def evaluated(
    env: EnvConfig, policy: PolicyBackend, *, episodes: int, seed: int
) -> Iterator[EvaluatedEpisode]:
    """Play the episodes that an evaluation with this seed has; give each when it ends.

    Raises:
        EnvFailed: the environment raised, or returned NaN or infinity.
    """
    environments = Environments(env, rank=0, incarnation=0)
    run = environments.evaluation(range(episodes), seed)
    try:
        while run.begin():
            action, run.memory = _most_likely(policy, run.observation, run.memory)
            before = len(run.done)
            run.step(action, policy.version)
            yield from run.done[before:]
    finally:
        run.close()
        environments.close()


def film(
    env: EnvConfig,
    policy: PolicyBackend,
    path: Path,
    *,
    seed: int,
    episodes: int = 1,
    max_steps: int = 1000,
    time_limit: float | None = None,
    until_success: bool = False,
) -> VideoReport:
    """Write episodes of the deterministic policy as `record_video` does.

    Raises:
        VideoError: the environment does not render, or fails meanwhile; or it is a simulator of
            many environments.
        UsageError: the environment cannot be made.
    """
    try:
        act = _Acting(env, policy)
        return record_video(
            lambda: NamedEnv(env, render_mode="rgb_array"),
            act,
            path,
            episodes=episodes,
            seed=seed,
            max_steps=max_steps,
            time_limit=time_limit,
            until_success=until_success,
            on_episode=act.begin,
        )
    except EnvError as error:
        raise VideoError(str(error)) from error


def single_env(env: EnvConfig) -> EnvConfig:
    """The same environment, one by one: for pictures.

    Raises:
        ConfigError: only its simulator can make it, many at a time.
    """
    if not env.many_in_a_call:
        return env
    if env.simulator == "vector" and not env.entry_point:
        replace = msgspec.structs.replace
        return replace(env, simulator="single", autoreset="auto", ready="auto")
    raise ConfigError(
        f"{env.simulator!r} simulates many environments in a call, and {env.name} has no picture "
        "of one of them: leave pictures and video out",
        path=("env", "simulator"),
    )


def film_of(
    env: EnvConfig,
    policy: PolicyBackend,
    path: Path,
    episode: EvaluatedEpisode,
    *,
    seed: int,
) -> VideoReport:
    """Play an episode of an evaluation with this seed again, until it has succeeded, and film it.

    Raises: as `film`.
    """
    return film(
        env,
        policy,
        path,
        seed=episode_seed(seed, episode.episode),
        max_steps=-(-episode.length // env.action_chunk),
        until_success=True,
    )


def worth_showing(episodes: Sequence[EvaluatedEpisode]) -> EvaluatedEpisode:
    """The first that succeeded; else the one with the largest return."""
    for episode in episodes:
        if episode.success:
            return episode
    return max(episodes, key=lambda one: one.episode_return)


class _Acting:
    """Observation -> action of the deterministic policy, in one environment."""

    def __init__(self, config: EnvConfig, policy: PolicyBackend) -> None:
        self._policy = policy
        with opened(config) as (env, _, _):
            self._writer = ObservationWriter(env.observation_space, config.name)
            self._reader = ActionReader(env.action_space, config.name, config.actions)
        self._memory: Floats | None = None

    def begin(self) -> None:
        """Begin an episode."""
        self._memory = None

    def __call__(self, observation: Any) -> Any:
        row = self._writer.spec.empty(1)
        self._writer.write(observation, row[0])
        action, self._memory = _most_likely(self._policy, row, self._memory)
        return self._reader.read(action, 1)[0]


def _most_likely(
    policy: PolicyBackend, seen: Seen, memory: Floats | None
) -> tuple[Floats | Ints, Floats | None]:
    """Actions ``[N, A]``, and what a recurrent policy remembers after them; a memory of None is
    that of episodes which begin."""
    if not isinstance(policy, RecurrentPolicyBackend):
        return policy.mode(seen), None
    if memory is None:
        memory = np.zeros((len(seen), policy.memory_size), np.float32)
    return policy.mode_from(seen, memory)


def checkpoint_of(run: Path, name: str | None) -> Path:
    """The folder of a checkpoint of the run in this folder: of this name or number, or the newest.

    Raises:
        UsageError: there is none.
    """
    if name is not None:
        return named_checkpoint(run, name)
    try:
        progress = load_progress(run / "checkpoints", RunProgress)
    except RunFolderError as error:
        raise UsageError(str(error)) from error
    if progress is None:
        raise UsageError(f"{run}: there is no checkpoint yet, so there is no policy to evaluate")
    return run / "checkpoints" / progress.checkpoint
