"""A simulator that steps many environments in one call, from its configuration.

envpool is imported here when it is asked for. Clear errors where the configuration asks for one
kind of environment, and another is there.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from rlinf_async.config import ConfigError, MissingExtra, UsageError, needed
from rlinf_async.workers.env.config import Autoreset, EnvConfig, environments, not_made
from rlinf_async.workers.env.many import AsyncEnv, BatchedEnv
from rlinf_async.workers.env.simulators import known_gymnasium

SINGLE = (
    "is a single environment, but env.simulator = {given!r} needs one that steps many in a call "
    "(num_envs, single_observation_space, single_action_space): set env.simulator = 'single'"
)


def make_batched(config: EnvConfig, count: int, seed: int) -> BatchedEnv:
    """Make a simulator of ``count`` environments.

    Raises:
        MissingExtra: a package is not installed.
        ConfigError: unknown id, wrong kwargs, or what was made is not such a simulator.
        EnvError: the entry point raised.
    """
    made = (
        _envpool(config, count, seed) if config.simulator == "envpool" else _vector(config, count)
    )
    _check_count(config, made, count)
    missing = [name for name in ("reset", "step") if not hasattr(made, name)]
    if missing:
        raise ConfigError(
            f"{config.name}: a {type(made).__name__} without {missing[0]}(), but env.simulator = "
            f"{config.simulator!r} needs reset() and step(actions); one with send() and recv() is "
            "'async'",
            path=("simulator",),
        )
    simulator = cast(BatchedEnv, made)
    return _labelled(simulator, config) if config.reward.labels else simulator


def _labelled(env: BatchedEnv, config: EnvConfig) -> BatchedEnv:
    """The simulator, whose rewards are those of `env.reward`."""
    from rlinf_async.workers.env.labels import LabelledSimulator

    with closed_where_it_fails(env):
        return LabelledSimulator(env, config.reward, config.name, autoreset_of(config, env))


@contextmanager
def closed_where_it_fails(env: Any) -> Iterator[None]:
    """Close an environment where the block raises, which wraps it."""
    try:
        yield
    except BaseException:
        env.close()
        raise


def make_async(config: EnvConfig, count: int, seed: int) -> AsyncEnv:
    """Make a simulator of ``count`` environments that gives those that are ready.

    Raises: as `make_batched`.
    """
    if config.simulator == "envpool":
        # Of a larger batch the last steps of an iteration would never come: it waits for
        # environments that have taken theirs.
        return cast(AsyncEnv, _envpool(config, count, seed, batch_size=1))
    made = _called(config, loaded(config), num_envs=count, seed=seed)
    missing = [name for name in ("async_reset", "send", "recv") if not hasattr(made, name)]
    if missing:
        raise ConfigError(
            f"{config.entry_point!r} returned a {type(made).__name__} without {missing[0]}(), but "
            "env.simulator = 'async' needs async_reset(), send(actions, env_id) and recv(); of one "
            "with step() it is 'vector', of a single environment 'single' or 'pool'",
            path=("simulator",),
        )
    _check_count(config, made, count)
    return cast(AsyncEnv, made)


def loaded(config: EnvConfig) -> Any:
    """The function of the entry point; raises `EnvError` where the import of its module raises."""
    try:
        return environments.load(config.entry_point, ("entry_point",))
    except UsageError:
        raise
    except BaseException as error:
        raise not_made(f"env {config.name}: the import of {config.entry_point!r}", error) from error


def _check_count(config: EnvConfig, made: Any, count: int) -> None:
    if not all(hasattr(made, name) for name in ("num_envs", "single_observation_space")):
        problem = SINGLE.format(given=config.simulator)
        raise ConfigError(f"{config.name}: a {type(made).__name__} {problem}", path=("simulator",))
    if made.num_envs != count:
        raise ConfigError(
            f"{config.name} was asked for {count} environments (envs / stages), and made "
            f"{made.num_envs}: its function has to use num_envs",
            path=("envs",),
        )


def autoreset_of(config: EnvConfig, env: BatchedEnv | AsyncEnv) -> Autoreset:
    """How the simulator follows an episode that ended by the next.

    Raises:
        ConfigError: neither the configuration nor its metadata say, or nobody begins them.
    """
    found = _said_autoreset(config, env)
    if found == "disabled" and config.asynchronous:
        raise ConfigError(
            f"{config.name} does not begin episodes by itself ('disabled'), which environments "
            "that are answered as they get ready have to do: it has to be 'same_step' or "
            "'next_step'",
            path=("autoreset",),
        )
    return found


def _said_autoreset(config: EnvConfig, env: BatchedEnv | AsyncEnv) -> Autoreset:
    if config.autoreset != "auto":
        return config.autoreset
    mode = (getattr(env, "metadata", None) or {}).get("autoreset_mode")
    known: dict[str, Autoreset] = {
        "SAME_STEP": "same_step",
        "NEXT_STEP": "next_step",
        "DISABLED": "disabled",
    }
    found = known.get(getattr(mode, "name", ""))
    if found is None:
        raise ConfigError(
            f"{config.name} does not say in metadata['autoreset_mode'] how it begins episodes: set "
            f"env.autoreset to one of {', '.join(known.values())}",
            path=("autoreset",),
        )
    return found


def refuse_batched(config: EnvConfig, env: Any) -> None:
    """Raise `ConfigError` where a single environment is due, and one that steps many is there."""
    count = getattr(env, "num_envs", None)
    if count is None:
        inner = getattr(getattr(env, "unwrapped", None), "num_envs", None)
        count = None if inner == 1 else inner  # a wrapper may give the only one as a single one
    if count is not None:
        raise ConfigError(
            f"{config.name}: {type(env).__name__} steps {count} environments in one call, but "
            "env.simulator = 'single' takes one environment at a time: set env.simulator = "
            "'vector', or let it make one environment",
            path=("simulator",),
        )


def _vector(config: EnvConfig, count: int) -> Any:
    if config.entry_point:
        return _called(config, loaded(config), num_envs=count)
    with made_by_gymnasium(config, config.kwargs) as gym:
        return gym.make_vec(config.id, num_envs=count, **config.kwargs)


@contextmanager
def made_by_gymnasium(config: EnvConfig, kwargs: dict[str, Any]) -> Iterator[Any]:
    """Give gymnasium, and say what is wrong where it cannot make the environment of this id."""
    gym = known_gymnasium(config)
    try:
        yield gym
    except (gym.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        missing = getattr(error, "name", None) or str(error)
        raise MissingExtra(missing, extra="embodied", needed_for=f"env {config.id}") from error
    except (gym.error.Error, TypeError) as error:
        setting = "kwargs" if config.kwargs and isinstance(error, TypeError) else "id"
        raise ConfigError(f"env {config.id!r} with {kwargs}: {error}", path=(setting,)) from error
    except BaseException as error:
        raise not_made(f"env {config.id!r} with {kwargs}", error) from error


def _called(config: EnvConfig, function: Any, **given: int) -> Any:
    try:
        return function(**given, **config.kwargs)
    except UsageError:  # of an adapter: says what is wrong with the configuration
        raise
    except BaseException as error:
        said = ", ".join(f"{name} = {value}" for name, value in given.items())
        hint = ""
        if isinstance(error, TypeError):
            hint = (
                f"; with env.simulator = {config.simulator!r} it takes {' and '.join(given)}, and "
                "returns one simulator of so many environments: for a single one set env.simulator "
                "= 'single'"
            )
        what = f"env {config.name}: {config.entry_point!r} with {said} and {config.kwargs}"
        raise not_made(what, error, hint) from error


class _EnvPool:
    """EnvPool's Gymnasium interface calls the spaces of one environment by other names."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.num_envs = len(pool)
        self.single_observation_space = pool.observation_space
        self.single_action_space = pool.action_space
        self.metadata = pool.metadata
        self.reset_all = pool.reset
        self.step = pool.step
        self.async_reset = pool.async_reset
        self.recv = pool.recv
        self.close = pool.close

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin all episodes; it was seeded when it was made."""
        begun: tuple[Any, dict[str, Any]] = self.reset_all()
        return begun

    def send(self, actions: Any, env_id: Any) -> None:
        """Begin a step in these environments."""
        self._pool.send(actions, env_id.astype("int32"))


def _envpool(config: EnvConfig, count: int, seed: int, **more: int) -> Any:
    envpool = needed("envpool", extra="envpool", needed_for="env.simulator = 'envpool'")
    known = envpool.list_all_envs()
    if config.id not in known:
        close = difflib.get_close_matches(config.id, known, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(repr(one) for one in close)}?" if close else ""
        raise ConfigError(f"EnvPool has no env {config.id!r}{hint}", path=("id",))
    for name, setting in (("num_envs", "envs"), ("batch_size", "ready"), ("seed", "seed")):
        if name in config.kwargs:
            raise ConfigError(
                f"{name} was given: leave it out, and set env.{setting}", path=("kwargs", name)
            )
    own = {"env_type": "gymnasium", "num_envs": count, "seed": seed % 2**31, **more}
    options = own | config.kwargs
    try:
        with warnings.catch_warnings():  # of gymnasium, about bounds that become float32
            warnings.simplefilter("ignore", UserWarning)
            return _EnvPool(envpool.make(config.id, **options))
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"EnvPool's env {config.id!r} with {config.kwargs}: {error}", path=("kwargs",)
        ) from error
