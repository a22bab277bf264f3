"""One environment from its configuration, and clear errors where it cannot be made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from rlinf_async.config import ConfigError, UsageError
from rlinf_async.messages.converting import ActionReader, ObservationWriter
from rlinf_async.messages.described import Spaces, described
from rlinf_async.messages.spaces import EnvSpec
from rlinf_async.workers.env.config import EnvConfig, EnvFailed, LabelError, not_made
from rlinf_async.workers.env.make_batched import (
    autoreset_of,
    closed_where_it_fails,
    loaded,
    made_by_gymnasium,
    make_async,
    make_batched,
    refuse_batched,
)
from rlinf_async.workers.env.probing import check_seed, probe_many, probe_one
from rlinf_async.workers.env.simulators import gymnasium_for
from rlinf_async.workers.env.stage import ForeignEnv
from rlinf_async.workers.foreign_calls import CLOSE, RENDER, RESET, STEP, making, place_for

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
    if config.control.hz:
        return _in_real_time(config, render_mode)
    env = _checked(config, render_mode)
    if config.action_chunk == 1:
        return env
    from rlinf_async.workers.env.chunks import ActionChunks

    try:
        return ActionChunks(env, config.action_chunk)
    except ValueError as error:
        env.close()
        raise ConfigError(f"env {config.name}: {error}", path=("action_chunk",)) from error


def _in_real_time(config: EnvConfig, render_mode: str | None) -> Env:
    from rlinf_async.workers.env.real_time import RealTimeEnv

    def make() -> Env:
        return _checked(config, render_mode)

    # What `make` raises has a path of its own; the loop's settings are a section of the env's.
    made: list[Env] = []

    def noted() -> Env:
        made.append(make())
        return made[0]

    try:
        return RealTimeEnv(noted, config.control, config.action_chunk)
    except ConfigError as error:
        if not made:
            raise
        raise ConfigError(error.problem, path=("control", *error.path)) from error


def _checked(config: EnvConfig, render_mode: str | None) -> Env:
    env = _make_one(config, render_mode)
    for space in ("observation_space", "action_space"):
        if getattr(env, space, None) is None:
            raise ConfigError(
                f"env {config.name}: a {type(env.unwrapped).__name__} without {space}, which every "
                "gymnasium.Env has to have",
                path=("entry_point" if config.entry_point else "id",),
            )
    return _labelled(env, config) if config.reward.labels else env


def _labelled(env: Env, config: EnvConfig) -> Env:
    """The environment, whose rewards are those of `env.reward`."""
    from rlinf_async.workers.env.labels import LabelledEnv

    with closed_where_it_fails(env):
        return LabelledEnv(env, config.reward, config.name)


def _make_one(config: EnvConfig, render_mode: str | None) -> Env:
    kwargs = dict(config.kwargs)
    if render_mode is not None:
        kwargs["render_mode"] = render_mode
    if config.entry_point:
        return _call(config, kwargs)
    with made_by_gymnasium(config, kwargs) as gym:
        made: Env = gym.make(config.id, disable_env_checker=True, **kwargs)
    refuse_batched(config, made)
    return made


def describe_env(config: EnvConfig, *, probe: bool = False) -> EnvSpec:
    """What a policy needs to know about an environment, read from one that is made and closed here.

    With ``probe`` it is reset and takes a step, and arrays that do not fit its spaces are found;
    else it does nothing but say its spaces. What it raises itself is for its worker to report.

    Raises: as `make_env`, and `EnvError` for spaces that are not supported.
    """
    with opened(config) as (env, spaces, noted):
        writer = ObservationWriter(getattr(env, spaces[0]), config.name)
        reader = ActionReader(getattr(env, spaces[1]), config.name, config.actions)
        mode = autoreset_of(config, env) if config.many_in_a_call else ""
        if not config.many_in_a_call:
            check_seed(env, config.name)
        if probe and config.simulator != "async":
            with _probing(config):
                if config.many_in_a_call:
                    shows_last = mode == "same_step" and not _is_gymnasiums(env)
                    probe_many(env, writer, config.name, noted, shows_last=shows_last)
                else:
                    probe_one(env, writer, config.name, noted)
        limit = getattr(getattr(env, "spec", None), "max_episode_steps", None)
        return EnvSpec(
            observation=writer.spec,
            action=reader.spec,
            max_episode_steps=limit,
            bounds=reader.bounds,
        )


@contextmanager
def _probing(config: EnvConfig) -> Iterator[None]:
    """Raise what a reward function says wrong; what an environment raises, its worker reports."""
    try:
        yield
    except EnvFailed as error:
        if config.reward.labels and isinstance(error.__cause__, LabelError):
            raise ConfigError(
                str(error.__cause__), path=("reward", config.reward.setting)
            ) from error


def describe_spaces(config: EnvConfig) -> Spaces:
    """Both spaces of an environment as plain data, which a policy takes along. Raises: as
    `describe_env`."""
    with opened(config) as (env, spaces, _):
        shown, taken = (getattr(env, name) for name in spaces)
        name = config.name
        return Spaces(described(shown, name, "observation"), described(taken, name, "action"))


@contextmanager
def opened(config: EnvConfig) -> Iterator[tuple[Any, tuple[str, str], ForeignEnv]]:
    """An environment, or the simulator of a stage, while the block lasts; where it has its spaces;
    and what notes its calls."""
    label = f"env {config.name}"
    noted = ForeignEnv(label, 0, place_for(label, config.limits))
    with making(noted.call):
        env, spaces = _made(config)
    try:
        yield env, spaces, noted
    except BaseException:
        with suppress(EnvFailed), noted.during(CLOSE):
            env.close()
        raise
    with noted.during(CLOSE):
        env.close()


def _made(config: EnvConfig) -> tuple[Any, tuple[str, str]]:
    """The environment, or the simulator of a stage, and where it has its spaces."""
    if not config.many_in_a_call:
        return make_env(config), ("observation_space", "action_space")
    make = make_async if config.simulator == "async" else make_batched
    spaces = ("single_observation_space", "single_action_space")
    return make(config, config.envs_per_stage, 0), spaces


def _is_gymnasiums(env: object) -> bool:
    """Whether the simulator is one of Gymnasium's own, which show last observations."""
    return type(getattr(env, "unwrapped", env)).__module__.startswith("gymnasium.")


def _call(config: EnvConfig, kwargs: dict[str, Any]) -> Env:
    function = loaded(config)
    try:
        env = function(**kwargs)
    except UsageError:  # of an adapter: says what is wrong with the configuration
        raise
    except BaseException as error:
        raise not_made(f"env {config.name}: {config.entry_point!r} with {kwargs}", error) from error
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


class NamedEnv(ForeignEnv):
    """A Gymnasium environment for who plays and films it by hand: see `Slot` for training.

    Every call raises `EnvFailed` for what the environment raises.
    """

    def __init__(self, config: EnvConfig, *, render_mode: str | None = None) -> None:
        """Make it; raises as `make_env`."""
        label = f"env {config.name}"
        super().__init__(label, 0, place_for(label, config.limits), length=0)
        self._options = config.options or None
        with making(self.call):
            self.env = make_env(config, render_mode=render_mode)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Metadata of the environment."""
        return self.env.metadata

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        self.seed, self.length = self.seed if seed is None else seed, 0
        with self.during(RESET):
            return self.env.reset(seed=seed, options=self._options)

    def step(self, action: Any, /) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take a step."""
        self.steps += 1
        self.length += 1
        with self.during(STEP):
            return self.env.step(action)

    def render(self) -> Any:
        """A picture."""
        with self.during(RENDER):
            return self.env.render()

    def close(self) -> None:
        """Close it."""
        with self.during(CLOSE):
            self.env.close()
