"""One environment from its configuration, and clear errors where it cannot be made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlinf_async.config import ConfigError, MissingExtra, UsageError
from rlinf_async.config.entry_point import load_entry_point
from rlinf_async.messages.spaces import EnvSpec
from rlinf_async.workers.env.actions import ActionReader
from rlinf_async.workers.env.config import EnvConfig
from rlinf_async.workers.env.errors import EnvError
from rlinf_async.workers.env.known import gymnasium_for, known_gymnasium
from rlinf_async.workers.env.make_batched import (
    autoreset_of,
    make_async,
    make_batched,
    refuse_batched,
)
from rlinf_async.workers.env.observations import ObservationWriter
from rlinf_async.workers.env.probing import probe, probe_many

if TYPE_CHECKING:
    import gymnasium

    Env = gymnasium.Env[Any, Any]


def make_env(config: EnvConfig, *, render_mode: str | None = None) -> Env:
    """Make one environment; with a ``render_mode``, use and close it in the calling thread only.

    Raises:
        MissingExtra: gymnasium, or what this environment needs, is not installed.
        ConfigError: unknown id, wrong kwargs, or an entry point that cannot be called.
        EnvError: the entry point raised.
    """
    gymnasium_for(config)  # an entry point needs it, too
    env = _make_one(config, render_mode)
    for space in ("observation_space", "action_space"):
        if getattr(env, space, None) is None:
            raise ConfigError(
                f"env {config.name}: a {type(env.unwrapped).__name__} without {space}, which every "
                "gymnasium.Env has to have",
                path=("entry_point" if config.entry_point else "id",),
            )
    if config.action_chunk == 1:
        return env
    from rlinf_async.workers.env.chunks import ActionChunks

    try:
        return ActionChunks(env, config.action_chunk)
    except ValueError as error:
        env.close()
        raise ConfigError(f"env {config.name}: {error}", path=("action_chunk",)) from error


def _make_one(config: EnvConfig, render_mode: str | None) -> Env:
    kwargs = dict(config.kwargs)
    if render_mode is not None:
        kwargs["render_mode"] = render_mode
    if config.entry_point:
        return _call(config, kwargs)
    gym = known_gymnasium(config)
    try:
        made: Env = gym.make(config.id, disable_env_checker=True, **kwargs)
    except (gym.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        raise MissingExtra(
            _missing(error), extra="embodied", needed_for=f"env {config.id}"
        ) from error
    except (gym.error.Error, TypeError) as error:
        raise ConfigError(f"env {config.id!r} with {kwargs}: {error}", path=("id",)) from error
    refuse_batched(config, made)
    return made


def describe_env(config: EnvConfig) -> EnvSpec:
    """What a policy needs to know about an environment, read from one that is made and closed here.

    With ``config.probe`` it is reset and takes a step, and arrays that do not fit its spaces are
    found. What it raises itself is for its worker to report.

    Raises: as `make_env`, and `EnvError` for spaces that are not supported.
    """
    if config.simulator == "async":
        return _describe_async(config)
    if config.many_in_a_call:
        return _describe_batched(config)
    env = make_env(config)
    try:
        writer = ObservationWriter(env.observation_space, config.name)
        reader = ActionReader(env.action_space, config.name, config.actions)
        if config.probe:
            probe(env, writer, config.name)
        return EnvSpec(
            observation=writer.spec,
            action=reader.spec,
            max_episode_steps=env.spec.max_episode_steps if env.spec is not None else None,
        )
    finally:
        env.close()


def _describe_batched(config: EnvConfig) -> EnvSpec:
    env = make_batched(config, config.envs_per_stage, 0)
    try:
        mode = autoreset_of(config, env)
        writer = ObservationWriter(env.single_observation_space, config.name)
        reader = ActionReader(env.single_action_space, config.name, config.actions)
        if config.probe:
            shows_last = mode == "same_step" and not _is_gymnasiums(env)
            probe_many(env, writer, config.name, shows_last=shows_last)
        limit = getattr(getattr(env, "spec", None), "max_episode_steps", None)
        return EnvSpec(observation=writer.spec, action=reader.spec, max_episode_steps=limit)
    finally:
        env.close()


def _describe_async(config: EnvConfig) -> EnvSpec:
    env = make_async(config, config.envs_per_stage, 0)
    try:
        autoreset_of(config, env)
        writer = ObservationWriter(env.single_observation_space, config.name)
        reader = ActionReader(env.single_action_space, config.name, config.actions)
        limit = getattr(getattr(env, "spec", None), "max_episode_steps", None)
        return EnvSpec(observation=writer.spec, action=reader.spec, max_episode_steps=limit)
    finally:
        env.close()


def _is_gymnasiums(env: object) -> bool:
    """Whether the simulator is one of Gymnasium's own, which show last observations."""
    return type(getattr(env, "unwrapped", env)).__module__.startswith("gymnasium.")


def _missing(error: Exception) -> str:
    return getattr(error, "name", None) or str(error)


def _call(config: EnvConfig, kwargs: dict[str, Any]) -> Env:
    function = load_entry_point(config.entry_point, path=("entry_point",))
    try:
        env = function(**kwargs)
    except UsageError:  # of an adapter: says what is wrong with the configuration
        raise
    except Exception as error:
        raise EnvError(
            f"env {config.name}: {config.entry_point!r} with {kwargs} raised "
            f"{type(error).__name__}: {error}"
        ) from error
    gym = gymnasium_for(config)
    if isinstance(env, gym.vector.VectorEnv):
        refuse_batched(config, env)
    if not isinstance(env, gym.Env):
        raise ConfigError(
            f"{config.entry_point!r} returned a {type(env).__name__}, not a gymnasium.Env",
            path=("entry_point",),
        )
    refuse_batched(config, env)
    made: Env = env
    return made
