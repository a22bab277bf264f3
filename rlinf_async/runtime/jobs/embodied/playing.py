"""Policies at work without a run: a trained one is evaluated and filmed, a scripted one recorded as
demonstrations.

::

    checkpoint --make_trainer--> weights --> policy --evaluated--> episodes
                                                |
                                                +-----film-------> a video, or a strip of pictures
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeVar, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlinf_async.backends.base import (
    OffPolicyTrainer,
    PolicyBackend,
    RecurrentPolicyBackend,
    TrainerBackend,
)
from rlinf_async.config import ConfigError, UsageError
from rlinf_async.config.registry import check_arguments, load_entry_point, raised
from rlinf_async.data.demonstrations import (
    DemonstratedEpisode,
    DemonstrationsInfo,
    Outcome,
    outside,
    write_episode,
    write_info,
)
from rlinf_async.messages.converting import ActionReader, ObservationWriter, answer_for, ends_of
from rlinf_async.messages.embodied import Floats, Ints, success_of
from rlinf_async.messages.spaces import ObservationArray
from rlinf_async.observe.files import VideoError
from rlinf_async.observe.video import VideoReport, record_video
from rlinf_async.runtime.apart import apart
from rlinf_async.runtime.jobs import Job
from rlinf_async.runtime.jobs.embodied.settings import (
    DemonstrationsConfig,
    EnvironmentSettings,
    ended_in,
    env_process,
    in_own_process,
)
from rlinf_async.workers.base import WorkerDied
from rlinf_async.workers.env import EnvConfig, EnvError, EnvFailed, EvaluatedEpisode
from rlinf_async.workers.env.config import episode_seed, is_interrupt
from rlinf_async.workers.env.make import NamedEnv, opened
from rlinf_async.workers.env.worker import Environments

MOST_STEPS = 100_000
"""most steps of an episode, for an environment that does not end"""

SILENT: Final = 20
"""episodes after which an environment that has not said of any whether it succeeded never will"""


def load_scripted_policy(
    name: str, path: tuple[str, ...] = ()
) -> Callable[[Any, int], Callable[[Any], Any]]:
    """The function of this name, which makes a scripted policy of an environment and a seed.

    ``path`` leads to the setting in the configuration. Raises `ConfigError` where there is no such
    function, or it takes other arguments.
    """
    function = load_entry_point(name, path)
    check_arguments(function, name, "scripted policy", ("environment", "seed"), path)
    return function


def check_scripted_policy(config: EnvironmentSettings, name: str) -> None:
    """Load the scripted policy ``demonstrations.policy`` where the environment is made, too: its
    file is often that of the environment.

    Raises:
        ConfigError: as `load_scripted_policy`; or its import ends the process.
    """
    path = ("demonstrations", "policy")
    if not config.cluster.processes:
        load_scripted_policy(name, path)
        return
    try:
        in_own_process(_load, config.env, name, path, returns=None, **env_process(config))
    except EnvError as error:
        raise ConfigError(f"{name!r}: {error}", path=path) from error


def _load(env: EnvConfig, name: str, path: tuple[str, ...]) -> None:
    load_scripted_policy(name, path)


def record_apart(
    config: EnvironmentSettings,
    wanted: DemonstrationsConfig,
    out: Path,
    *,
    keep_failures: bool = False,
) -> DemonstrationsInfo:
    """`record_demonstrations` in a process of its own, unless the run is to be in one process.

    Raises: as that, and `EnvFailed` where the process of the environment has ended, or hung.
    """
    args = (config, wanted, out, keep_failures)
    return call_in_env_process(config, record_demonstrations, DemonstrationsInfo, *args)


def record_for_run(config: EnvironmentSettings, wanted: DemonstrationsConfig, run: Path) -> Path:
    """Record demonstrations into the folder of a run that begins; return their folder.

    Raises: as `record_apart`.
    """
    folder = recorded_in(run)
    shutil.rmtree(folder, ignore_errors=True)  # of a start that came to no checkpoint
    record_apart(config, wanted, folder)
    return folder


def recorded_in(run: Path) -> Path:
    """The folder of the demonstrations that a run has recorded for itself."""
    return run / "demonstrations"


def record_demonstrations(
    config: EnvironmentSettings,
    wanted: DemonstrationsConfig,
    out: Path,
    keep_failures: bool = False,
) -> DemonstrationsInfo:
    """Record episodes of a scripted policy into the folder ``out``.

    Args:
        config: whose environment is played; chunks and rescaling do not matter.
        wanted: the policy, called with the environment and a seed, which returns a function from
            an observation to an action; how many episodes; the seed of the first.
        out: a folder without files.
        keep_failures: keep failures too: episodes of which the environment reports no success,
            where it reports that of others.

    Raises:
        UsageError: ``out`` holds files already, or the policy cannot be loaded, or too few of its
            episodes succeed.
        EnvError: the environment's spaces are not supported.
        EnvFailed: the environment raised.
    """
    new_folder(out)
    make_policy = load_scripted_policy(wanted.policy)
    replace = msgspec.structs.replace
    control = replace(config.env.control, every=0)
    single = replace(config.env_at_last, action_chunk=1, group_size=1, control=control)
    env = NamedEnv(single)
    try:
        writer = ObservationWriter(env.env.observation_space, single.name)
        reader = ActionReader(env.env.action_space, single.name, single.actions)
        act = _called(f"{wanted.policy!r}", lambda: make_policy(env.env, wanted.seed))
        rescaled = single.actions == "rescale"
        script = _Script(wanted.policy, act, env.env.action_space, reader, rescaled=rescaled)
        out.mkdir(parents=True, exist_ok=True)
        played = (
            _record_episode(env, writer, script, wanted.seed + attempt)
            for attempt in range(max(10 * wanted.episodes, SILENT))
        )
        successes = _keep(played, wanted, out, keep_failures=keep_failures)
    finally:
        env.close()
    info = DemonstrationsInfo(
        env=single.name,
        observation=writer.spec,
        action_size=reader.spec.columns,
        discrete=reader.spec.discrete,
        episodes=wanted.episodes,
        successes=successes,
        bounds=reader.bounds,
        transitions=True,
        rewards=single.reward.said_by,
    )
    write_info(out, info)
    return info


def new_folder(out: Path) -> None:
    """Raise `UsageError` for a folder that holds files already."""
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"--out {out}: is not empty; name a new folder")


def _keep(
    played: Iterable[tuple[DemonstratedEpisode, bool | None]],
    wanted: DemonstrationsConfig,
    out: Path,
    *,
    keep_failures: bool,
) -> int | None:
    """Write as many of these episodes as are wanted; return how many of them succeeded, None where
    the environment says nothing of any.

    Raises:
        UsageError: there are too few.
    """
    kept, succeeded, known, attempts = 0, 0, False, 0
    for attempts, (episode, success) in enumerate(played, 1):
        if success is not None and not known:
            known = True
            if not keep_failures:
                kept = 0  # those before, of which nothing was said, are failures too
        if known and not success and not keep_failures:
            continue
        if kept < wanted.episodes:
            write_episode(out, kept, episode)
            kept, succeeded = kept + 1, succeeded + bool(success)
        if kept == wanted.episodes and (known or keep_failures or attempts >= SILENT):
            return succeeded if known else None
    raise UsageError(
        f"only {kept} of {attempts} episodes of {wanted.policy!r} succeeded: look at the policy, "
        "or keep failures too with --keep-failures"
    )


class _Script:
    """The scripted policy, whose actions reach the environment as those of a policy do.

    What the environment executes is what a policy would have to answer, and that is recorded:
    actions outside of the bounds are clipped to them.
    """

    def __init__(
        self,
        name: str,
        act: Callable[[Any], Any],
        space: Any,
        reader: ActionReader,
        *,
        rescaled: bool,
    ) -> None:
        """Raises `ConfigError` where such actions cannot be demonstrated, `UsageError` where
        ``act`` is no function."""
        if not callable(act):
            raise UsageError(
                f"{name!r} returned a {type(act).__name__}; a scripted policy returns a function "
                "from an observation to an action"
            )
        self._name, self._act, self._reader = name, act, reader
        self._space: Any = box_or_choice(space)
        self._rescaled = rescaled
        self._clipped = False

    def act(self, observation: Any, seed: int, step: int) -> tuple[Any, Any]:
        """Return an action for the environment, and the answer of a policy that does the same.

        Raises:
            UsageError: the script raised, or returned what is no action.
        """
        where = f"{self._name!r}, in the episode with seed {seed}, at step {step}"
        value = _called(f"{where},", lambda: np.asarray(self._act(observation)))
        discrete = self._reader.spec.discrete
        problem = (_no_choice if discrete else _no_numbers)(value, self._space)
        if problem:
            raise UsageError(f"{where}, returned {problem}: {value.tolist()}")
        if not discrete:
            self._warn(value, where)
        answer = answer_for(self._space, value, self._reader.bounds, rescaled=self._rescaled)
        return self._reader.read(answer, 1)[0], answer[0]

    def _warn(self, value: NDArray[Any], where: str) -> None:
        """Say once that an action is clipped."""
        if self._clipped or not outside(value.reshape(-1), ends_of(self._space)).any():
            return
        self._clipped = True
        print(
            f"{where}: the action {value.tolist()} lies outside of {self._space}; such are clipped "
            "to its bounds, for the environment and in the demonstrations",
            file=sys.stderr,
        )


def box_or_choice(space: Any) -> Any:
    """Return the space of actions; raises `ConfigError` unless such can be demonstrated."""
    from gymnasium import spaces

    if not isinstance(space, (spaces.Box, spaces.Discrete)):
        raise ConfigError(
            f"actions of {space} cannot be demonstrated; those of one Box or of one Discrete can"
        )
    return space


def _called(where: str, function: Callable[[], Any]) -> Any:
    """What a user's function returns; what it raises, but for a Ctrl-C, is a `UsageError`."""
    try:
        return function()
    except BaseException as error:
        if is_interrupt(error):
            raise
        raise UsageError(f"{where} raised {raised(error)}") from error


def _no_choice(value: NDArray[Any], space: Any) -> str:
    """Why this is no action of a Discrete space; empty if it is one."""
    if value.size != 1 or value.dtype.kind not in "iu" or not space.contains(value.item()):
        return f"no choice of {space}"
    return ""


def _no_numbers(value: NDArray[Any], space: Any) -> str:
    """Why this is no action of a Box, bounds apart; empty if it is one."""
    if value.shape != space.shape or value.dtype.kind not in "biuf":
        return f"{value.dtype} of shape {list(value.shape)}, which is no action of {space}"
    return "" if np.isfinite(value).all() else "an action with NaN or infinity"


def _record_episode(
    env: NamedEnv, writer: ObservationWriter, script: _Script, seed: int
) -> tuple[DemonstratedEpisode, bool | None]:
    """One episode, and whether it succeeded, where the environment says so."""
    observation, info = env.reset(seed=seed)
    seen: list[Any] = []
    actions: list[Any] = []
    rewards: list[float] = []
    terminated = False
    for step in range(MOST_STEPS):
        seen.append(_row(writer, observation))
        action, answer = script.act(observation, seed, step)
        actions.append(answer)
        observation, reward, terminated, truncated, info = env.step(action)
        rewards.append(float(reward))
        if terminated or truncated:
            break
    outcome = Outcome(np.array(rewards, np.float32), _row(writer, observation), bool(terminated))
    success = success_of(info)
    episode = DemonstratedEpisode(np.concatenate(seen), np.array(actions), outcome, success)
    return episode, success


def _row(writer: ObservationWriter, observation: Any) -> ObservationArray:
    """An observation as an array ``[1, ...]``."""
    row = writer.spec.empty(1)
    writer.write(observation, row[0])
    return row


T = TypeVar("T")


TrainerMaker = Callable[[], TrainerBackend | OffPolicyTrainer]
"""makes what reads a checkpoint, in this process"""


class TrainedPolicy(NamedTuple):
    """A configuration that is fitted to its environment, and what reads its checkpoints; it is sent
    to another process, as ``functools.partial`` of a function can be, and a lambda cannot."""

    config: EnvironmentSettings
    make_trainer: TrainerMaker


@runtime_checkable
class PlayingJob(Job, Protocol):
    """A job that trains a policy which acts in environments."""

    def trained(self, config: Any) -> TrainedPolicy:
        """Return what lets a policy act that was trained with this configuration.

        Raises:
            UsageError: its environment cannot be had, or is another one now.
        """
        ...


class Played(msgspec.Struct, frozen=True):
    """Result of letting a policy act."""

    episodes: list[EvaluatedEpisode]
    """episodes in their order"""
    films: list[VideoReport]
    """videos of the episode ``shown``"""
    shown: int = 0


def play(
    trained: TrainedPolicy,
    checkpoint: Path,
    *,
    episodes: int,
    seed: int,
    films: Sequence[Path] = (),
) -> Played:
    """Let the policy of a checkpoint play the episodes that an evaluation with this seed has, and
    film one of them; in a process of its own, unless the run was to be in one process.

    Raises:
        EnvFailed: the environment raised, or returned NaN or infinity, or its process has ended.
        VideoError: as `film`.
    """
    args = (trained, checkpoint, episodes, seed, list(films))
    return call_in_env_process(trained.config, _play, Played, *args, imports=_policy_imports())


def film_run(trained: TrainedPolicy, checkpoint: Path, path: Path) -> VideoReport:
    """Film the episodes that the configuration asks for, as `play` plays them.

    Raises:
        VideoError: as `film`; or the process of the environment has ended.
    """
    try:
        args = (trained, checkpoint, path)
        return call_in_env_process(
            trained.config, _film_run, VideoReport, *args, imports=_policy_imports()
        )
    except EnvError as error:
        raise VideoError(f"no video: {error}") from error


def call_in_env_process(
    config: EnvironmentSettings,
    function: Callable[..., T],
    returns: type[T],
    *args: Any,
    imports: Sequence[str] = (),
) -> T:
    """Call a function of the environment in a process of its own, unless the run is to be in one
    process.

    Args:
        config: says how such a process is started.
        function: function at the top level of a module.
        returns: type of its result, plain data.
        args: its arguments, which are pickled.
        imports: modules that it needs, see `Worker.slow_imports`.

    Raises: as the function, and `EnvFailed` where the process has ended, or hung.
    """
    if not config.cluster.processes:
        return function(*args)
    try:
        return apart(
            function,
            *args,
            returns=returns,
            name="Env",
            raises=(EnvError, VideoError),
            **env_process(config),
            imports=imports,
        )
    except WorkerDied as death:
        raise EnvFailed(ended_in(config.judging_env, death)) from death


def _policy_imports() -> Sequence[str]:
    """What a process that plays a trained policy imports."""
    from rlinf_async.backends.parts import DEFAULT_POLICY_BACKEND, policy_backends

    return policy_backends.load(DEFAULT_POLICY_BACKEND).slow_imports


def _play(
    trained: TrainedPolicy, checkpoint: Path, episodes: int, seed: int, films: Sequence[Path]
) -> Played:
    env, policy = trained.config.judging_env, trained_policy(*trained, checkpoint)
    done = sorted(evaluated(env, policy, episodes=episodes, seed=seed), key=lambda one: one.episode)
    shown = worth_showing(done)
    made = [film_of(env, policy, path, shown, seed=seed) for path in films]
    return Played(done, made, shown.episode)


def _film_run(trained: TrainedPolicy, checkpoint: Path, path: Path) -> VideoReport:
    wanted, policy = trained.config.evaluation, trained_policy(*trained, checkpoint)
    return film(
        trained.config.judging_env,
        policy,
        path,
        episodes=wanted.video_episodes,
        seed=wanted.seed,
        time_limit=wanted.video_seconds,
    )


def trained_policy(
    config: EnvironmentSettings,
    make_trainer: TrainerMaker,
    checkpoint: Path,
) -> PolicyBackend:
    """The policy of a checkpoint, which is a folder."""
    from rlinf_async.backends.parts import DEFAULT_POLICY_BACKEND, policy_backends

    trainer = make_trainer()
    trainer.load_checkpoint(checkpoint)
    policy = policy_backends.load(DEFAULT_POLICY_BACKEND).make(config.acting_policy, 0, "cpu")
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
    """Return settings that make the same environment one by one, for pictures.

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
        max_steps=-(-episode.length // env.steps_per_answer),
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
    policy: PolicyBackend, seen: ObservationArray, memory: Floats | None
) -> tuple[Floats | Ints, Floats | None]:
    """Actions ``[N, A]``, and what a recurrent policy remembers after them; a memory of None is
    that of episodes which begin."""
    if not isinstance(policy, RecurrentPolicyBackend):
        return policy.mode(seen), None
    if memory is None:
        memory = np.zeros((len(seen), policy.memory_size), np.float32)
    return policy.mode_from(seen, memory)
