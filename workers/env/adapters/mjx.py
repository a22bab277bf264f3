"""MuJoCo's physics in JAX, many environments in one call: ``env.simulator = "vector"``.

::

    [env]
    entry_point = "rlinf_async.workers.env.adapters.mjx:make"
    kwargs = {task = "examples/mjx_reacher.py:Reacher", horizon = 50}
    simulator = "vector"

A task is what MuJoCo does not know: what is shown and paid. Its functions are of one environment,
and are compiled for all of them, with the physics, into one function for JAX's device.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from rlinf_async.config import ConfigError, needed
from rlinf_async.config.registry import load_entry_point


class Task(Protocol):
    """A model, and what an environment of it shows and pays. Arrays are JAX's, of one environment;
    ``data`` is an ``mjx.Data``."""

    xml: str
    """the model, in MJCF"""
    steps: int
    """steps of physics in a step of the environment"""

    def begin(self, key: Any, qpos: Any, qvel: Any) -> tuple[Any, Any, Mapping[str, Any]]:
        """Return positions and velocities in which an episode begins, and numbers that hold for it,
        by name; ``key`` is JAX's, for random numbers."""
        ...

    def observe(self, data: Any, held: Mapping[str, Any]) -> Any:
        """Return what is shown, ``[D]``."""
        ...

    def pay(self, data: Any, action: Any, held: Mapping[str, Any]) -> tuple[Any, Any, Any]:
        """Return reward, whether the episode ends for good, and whether it has succeeded by now."""
        ...


class _State(NamedTuple):
    """Of all environments, on the device."""

    data: Any
    held: Any
    key: Any
    """``[E]`` keys of random numbers"""
    length: Any
    """``[E]``: steps of the episode"""


def make(*, num_envs: int, task: str, horizon: int) -> MjxEnvs:
    """Make ``num_envs`` environments.

    Args:
        num_envs: environments that step in one call.
        task: ``"file.py:name"`` or ``"module:name"``: called without arguments, returns a `Task`.
        horizon: steps after which an episode is cut.

    Raises:
        MissingExtra: mujoco-mjx is not installed.
        ConfigError: with the argument that is wrong.
    """
    mjx = needed("mujoco.mjx", extra="mjx", needed_for="the simulator MuJoCo MJX")
    if type(horizon) is not int or horizon < 1:
        raise ConfigError(f"{horizon!r}; it is a number of steps", path=("kwargs", "horizon"))
    made: Task = load_entry_point(task, ("kwargs", "task"))()
    return MjxEnvs(mjx, made, num_envs, horizon)


class MjxEnvs:
    """Many environments of a task, as `gymnasium.vector.VectorEnv` has them.

    An episode that ends is followed by another in the same step.
    """

    def __init__(self, mjx: Any, task: Task, num_envs: int, horizon: int) -> None:
        jax, mujoco = importlib.import_module("jax"), importlib.import_module("mujoco")
        from gymnasium import spaces
        from gymnasium.vector import AutoresetMode

        self._jax = jax
        model = mujoco.MjModel.from_xml_string(task.xml)
        begin, step = _functions(jax, mjx, mjx.put_model(model), task, horizon)
        self._begin, self._step = jax.jit(begin), jax.jit(step)
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        shown = jax.eval_shape(begin, self._keys(0))[1]
        self.single_observation_space = spaces.Box(-np.inf, np.inf, shown.shape[1:], np.float32)
        low, high = model.actuator_ctrlrange.T.astype(np.float32)
        free = ~model.actuator_ctrllimited.astype(bool)
        low[free], high[free] = -np.inf, np.inf
        self.single_action_space = spaces.Box(low, high, dtype=np.float32)
        self._state: Any = None

    def _keys(self, seed: int) -> Any:
        return self._jax.random.split(self._jax.random.key(seed % 2**31), self.num_envs)

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in every environment."""
        before = self._state if seed is None else None
        keys = self._keys(seed or 0) if before is None else before.key
        self._state, shown = self._begin(keys)
        return np.asarray(shown), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Take a step in every environment."""
        found = self._step(self._state, np.asarray(actions, np.float32))
        self._state = found[0]
        shown, last, reward, terminated, truncated, success = map(np.asarray, found[1:])
        info: dict[str, Any] = {}
        if (over := terminated | truncated).any():
            said = {"is_success": success, "_is_success": over}
            info = {"final_obs": last, "_final_obs": over, "final_info": said}
        return shown, reward.astype(np.float64), terminated, truncated, info

    def close(self) -> None:
        """Do nothing: what was compiled goes with the process."""


def _functions(
    jax: Any, mjx: Any, model: Any, task: Task, horizon: int
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """How all environments begin, and how they take a step."""
    numpy = jax.numpy
    plain = mjx.make_data(model)

    def begin_one(key: Any) -> tuple[_State, Any]:
        key, own = jax.random.split(key)
        qpos, qvel, held = task.begin(own, plain.qpos, plain.qvel)
        data = mjx.forward(model, plain.replace(qpos=qpos, qvel=qvel))
        return _State(data, held, key, numpy.zeros((), numpy.int32)), task.observe(data, held)

    def step_one(state: _State, action: Any) -> tuple[Any, ...]:
        def physics(data: Any, _: None) -> tuple[Any, None]:
            return mjx.step(model, data), None

        data, _ = jax.lax.scan(physics, state.data.replace(ctrl=action), None, task.steps)
        reward, terminated, success = task.pay(data, action, state.held)
        length = state.length + 1
        truncated = ~terminated & (length >= horizon)
        last = task.observe(data, state.held)
        went_on = _State(data, state.held, state.key, length)
        begun, first = begin_one(state.key)
        over = terminated | truncated
        following, shown = jax.tree.map(
            lambda new, old: numpy.where(over, new, old), (begun, first), (went_on, last)
        )
        return following, shown, last, reward, terminated, truncated, success

    return jax.vmap(begin_one), jax.vmap(step_one)
