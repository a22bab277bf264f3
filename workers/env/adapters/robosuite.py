"""Tasks of robosuite::

[env]
entry_point = "rlinf_async.workers.env.adapters.robosuite:make"
kwargs = {task = "Lift", robots = "Panda", horizon = 200, cameras = ["agentview"]}
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rlinf_async.config import needed
from rlinf_async.observe.video import choose_headless_renderer
from rlinf_async.workers.env.adapters.rendering import drawing, replacing_context

VIEW = "frontview"
"""The camera of pictures for people."""

Observation = dict[str, Any]


class RobosuiteTask(gymnasium.Env[Any, Any]):
    """Shows ``state``, an image for each camera, and the instruction where there is one; success as
    the task itself says.

    Episodes end at the horizon alone, which cuts them.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012 Gymnasium's name

    def __init__(
        self, task: Any, cameras: Sequence[str], instruction: str, render_mode: str | None
    ) -> None:
        self.render_mode = render_mode
        self._task, self._cameras = task, tuple(cameras)
        self._said = {"instruction": instruction} if instruction else {}
        low, high = task.action_spec
        self.action_space = spaces.Box(low.astype(np.float32), high.astype(np.float32))
        with replacing_context(task):
            shown = self._shown(task.reset())
        self.observation_space = spaces.Dict({name: _space(one) for name, one in shown.items()})

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:  # robosuite seeds a task only as it is made
            self._task.rng = np.random.default_rng(seed)
            initializer = getattr(self._task, "placement_initializer", None)
            for sampler in (initializer, *getattr(initializer, "samplers", {}).values()):
                if sampler is not None:
                    sampler.rng = self._task.rng
        with replacing_context(self._task):
            seen = self._task.reset()
        return self._shown(seen), {}

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        with drawing(self._task.sim):
            seen, reward, over, info = self._task.step(action)
        info = {**info, "is_success": bool(self._task._check_success())}
        return self._shown(seen), float(reward), False, bool(over), info

    def render(self) -> Any:
        """A picture ``[512, 512, 3]``."""
        with drawing(self._task.sim):
            return self._task.sim.render(width=512, height=512, camera_name=VIEW)[::-1]

    def close(self) -> None:
        with replacing_context(self._task):
            self._task.close()

    def _shown(self, seen: Observation) -> Observation:
        parts = [
            np.asarray(seen[name], np.float32)
            for name in seen
            if name.endswith(("proprio-state", "object-state"))
        ]
        # OpenGL's pictures begin with the lowest row.
        images = {name: np.ascontiguousarray(seen[f"{name}_image"][::-1]) for name in self._cameras}
        return {"state": np.concatenate(parts), **images, **self._said}


def make(
    task: str,
    *,
    robots: str | list[str] = "Panda",
    horizon: int = 200,
    cameras: Sequence[str] = (),
    image_size: int = 84,
    instruction: str = "",
    reward_shaping: bool = True,
    render_mode: str | None = None,
    **kwargs: Any,
) -> RobosuiteTask:
    """One environment of a task; ``cameras`` show images of ``image_size`` squared pixels.

    ``instruction`` says in words what is to be done, for a policy that reads: robosuite's tasks
    have none of their own. ``kwargs`` are further arguments of ``robosuite.make``.

    Raises:
        MissingExtra: robosuite is not installed.
    """
    choose_headless_renderer()  # before it is imported
    logging.getLogger("robosuite_logs").addFilter(_is_error)  # it tells of every file that it reads
    robosuite = needed("robosuite", extra="robosuite", needed_for="the simulator robosuite")
    made = robosuite.make(
        task,
        robots=robots,
        horizon=horizon,
        has_renderer=False,
        has_offscreen_renderer=bool(cameras) or render_mode is not None,
        use_camera_obs=bool(cameras),
        camera_names=list(cameras) or [VIEW],
        camera_heights=image_size,
        camera_widths=image_size,
        reward_shaping=reward_shaping,
        **kwargs,
    )
    return RobosuiteTask(made, cameras, instruction, render_mode)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _space(shown: Any) -> spaces.Space[Any]:
    if isinstance(shown, str):
        return spaces.Text(len(shown), charset="".join(sorted(set(shown))))
    if shown.dtype == np.uint8:
        return spaces.Box(0, 255, shown.shape, np.uint8)
    return spaces.Box(-np.inf, np.inf, shown.shape, np.float32)
