"""A simulator that steps many environments in one call, from its configuration.

envpool is imported here when it is asked for. Clear errors where the configuration asks for one
kind of environment, and another is there.
"""

from __future__ import annotations

import difflib
import importlib
import warnings
from typing import Any, cast

from rlinf_async.config import ConfigError, MissingExtra
from rlinf_async.config.entry_point import load_entry_point
from rlinf_async.workers.env.batched import BatchedEnv
from rlinf_async.workers.env.config import Autoreset, EnvConfig
from rlinf_async.workers.env.errors import EnvError
from rlinf_async.workers.env.known import known_gymnasium

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
    if not all(hasattr(made, name) for name in ("num_envs", "single_observation_space")):
        problem = SINGLE.format(given=config.simulator)
        raise ConfigError(f"{config.name}: a {type(made).__name__} {problem}", path=("simulator",))
    if made.num_envs != count:
        raise ConfigError(
            f"{config.name} was asked for {count} environments (envs / stages), and made "
            f"{made.num_envs}: its function has to use num_envs",
            path=("envs",),
        )
    return cast(BatchedEnv, made)


def autoreset_of(config: EnvConfig, env: BatchedEnv) -> Autoreset:
    """How the simulator follows an episode that ended by the next.

    Raises:
        ConfigError: neither the configuration nor its metadata say.
    """
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
    kwargs = dict(config.kwargs)
    if config.entry_point:
        function = load_entry_point(config.entry_point, path=("entry_point",))
        try:
            return function(num_envs=count, **kwargs)
        except Exception as error:
            raise EnvError(
                f"env {config.name}: {config.entry_point!r} with num_envs = {count} and {kwargs} "
                f"raised {type(error).__name__}: {error}"
            ) from error
    gym = known_gymnasium(config)
    try:
        return gym.make_vec(config.id, num_envs=count, **kwargs)
    except (gym.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        missing = getattr(error, "name", None) or str(error)
        raise MissingExtra(missing, extra="embodied", needed_for=f"env {config.id}") from error
    except (gym.error.Error, TypeError) as error:
        raise ConfigError(f"env {config.id!r} with {kwargs}: {error}", path=("id",)) from error


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
        self.close = pool.close

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin all episodes; it was seeded when it was made."""
        begun: tuple[Any, dict[str, Any]] = self.reset_all()
        return begun


def _envpool(config: EnvConfig, count: int, seed: int) -> Any:
    try:
        envpool = importlib.import_module("envpool")
    except ModuleNotFoundError as error:
        if error.name != "envpool":
            raise
        needed_for = "env.simulator = 'envpool'"
        raise MissingExtra("envpool", extra="envpool", needed_for=needed_for) from None
    known = envpool.list_all_envs()
    if config.id not in known:
        close = difflib.get_close_matches(config.id, known, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(repr(one) for one in close)}?" if close else ""
        raise ConfigError(f"EnvPool has no env {config.id!r}{hint}", path=("id",))
    options = {"env_type": "gymnasium", "num_envs": count, "seed": seed % 2**31, **config.kwargs}
    try:
        with warnings.catch_warnings():  # of gymnasium, about bounds that become float32
            warnings.simplefilter("ignore", UserWarning)
            return _EnvPool(envpool.make(config.id, **options))
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"EnvPool's env {config.id!r} with {config.kwargs}: {error}", path=("kwargs",)
        ) from error
