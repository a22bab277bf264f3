"""One environment from its configuration, and clear errors where it cannot be made.

gymnasium is imported here when the first environment is made, gymnasium_robotics only for an id
that gymnasium does not know.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rlinf_async.config import ConfigError, MissingExtra
from rlinf_async.config.entry_point import load_entry_point
from rlinf_async.messages.spaces import EnvSpec
from rlinf_async.workers.env.actions import ActionReader
from rlinf_async.workers.env.config import EnvConfig
from rlinf_async.workers.env.errors import EnvError
from rlinf_async.workers.env.observations import ObservationWriter

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
    gym = _gymnasium(config)
    env = _make_one(config, gym, render_mode)
    if config.action_chunk == 1:
        return env
    from rlinf_async.workers.env.chunks import ActionChunks

    try:
        return ActionChunks(env, config.action_chunk)
    except ValueError as error:
        env.close()
        raise ConfigError(f"env {config.name}: {error}", path=("action_chunk",)) from error


def _make_one(config: EnvConfig, gym: Any, render_mode: str | None) -> Env:
    kwargs = dict(config.kwargs)
    if render_mode is not None:
        kwargs["render_mode"] = render_mode
    if config.entry_point:
        return _call(config, kwargs)
    _register(config.id)
    try:
        made: Env = gym.make(config.id, disable_env_checker=True, **kwargs)
        return made
    except (gym.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        raise MissingExtra(
            _missing(error), extra="embodied", needed_for=f"env {config.id}"
        ) from error
    except (gym.error.Error, TypeError) as error:
        raise ConfigError(f"env {config.id!r} with {kwargs}: {error}", path=("id",)) from error


def describe_env(config: EnvConfig) -> EnvSpec:
    """What a policy needs to know about an environment, read from one that is made and closed here.

    Raises: as `make_env`, and `EnvError` for spaces that are not supported.
    """
    env = make_env(config)
    try:
        return EnvSpec(
            observation=ObservationWriter(env.observation_space, config.name).spec,
            action=ActionReader(env.action_space, config.name, config.actions).spec,
            max_episode_steps=env.spec.max_episode_steps if env.spec is not None else None,
        )
    finally:
        env.close()


def _gymnasium(config: EnvConfig) -> Any:
    try:
        return importlib.import_module("gymnasium")
    except ModuleNotFoundError as error:
        if error.name != "gymnasium":
            raise
        needed_for = f"env {config.name}"
        raise MissingExtra("gymnasium", extra="embodied", needed_for=needed_for) from None


def _register(name: str) -> None:
    """Register the id's package; raise `ConfigError` with the nearest ids for an unknown one."""
    gym = importlib.import_module("gymnasium")
    if ":" in name or name in gym.registry:  # "module:Id" is for gymnasium to import
        return
    has_robotics = importlib.util.find_spec("gymnasium_robotics") is not None
    if has_robotics:
        gym.register_envs(_robotics())
    try:
        gym.spec(name)  # also fills in a version that was left out
    except gym.error.Error:
        close = difflib.get_close_matches(name, gym.registry, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(repr(one) for one in close)}?" if close else ""
        extra = "" if has_robotics else " (pip install 'rlinf-async[embodied]' adds robot arms)"
        raise ConfigError(f"no env is called {name!r}{hint}{extra}", path=("id",)) from None


def _robotics() -> Any:
    with suppress(ModuleNotFoundError):
        # It would print a notice about three other environments, in every process.
        importlib.import_module("farama_notifications").notifications.pop(
            "gymnasium_robotics", None
        )
    return importlib.import_module("gymnasium_robotics")


def _missing(error: Exception) -> str:
    return getattr(error, "name", None) or str(error)


def _call(config: EnvConfig, kwargs: dict[str, Any]) -> Env:
    function = load_entry_point(config.entry_point, path=("entry_point",))
    try:
        env = function(**kwargs)
    except Exception as error:
        raise EnvError(
            f"env {config.name}: {config.entry_point!r} with {kwargs} raised "
            f"{type(error).__name__}: {error}"
        ) from error
    gym = _gymnasium(config)
    if not isinstance(env, gym.Env):
        raise ConfigError(
            f"{config.entry_point!r} returned a {type(env).__name__}, not a gymnasium.Env",
            path=("entry_point",),
        )
    made: Env = env
    return made
