"""An arm of two joints in MuJoCo that moves on wall time, whether anybody commands it or not.

It stands for a robot: a command is the velocity of each joint (rad/s) and holds until the next one,
and `Arm.observe` shows where the arm is now. Its tip is to reach a target, and stay there. Here
a script commands it, in the place of a policy::

    python examples/real_time_arm.py [--seconds 4] [--slow 0.03]
"""

from __future__ import annotations

import argparse
import importlib
import os
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from rlinf_async.realtime import RealTimeLoop, SafetyConfig

if "DISPLAY" not in os.environ:
    os.environ.setdefault("MUJOCO_GL", "egl")  # read when it is imported
mujoco: Any = importlib.import_module("mujoco")  # it has no types

MODEL = """
<mujoco>
  <compiler angle="radian"/>
  <option timestep="0.002" integrator="implicitfast" gravity="0 0 0"/>
  <visual><global offwidth="320" offheight="320"/></visual>
  <default>
    <joint type="hinge" axis="0 0 1" damping="0.2" armature="0.02"/>
    <geom type="capsule" size="0.03" mass="0.3" contype="0" conaffinity="0"/>
    <velocity kv="2" ctrlrange="-3 3"/>
  </default>
  <worldbody>
    <light pos="0 0 3"/>
    <camera name="above" pos="0 0 2.6"/>
    <body>
      <joint name="shoulder" range="-2.6 2.6" limited="true"/>
      <geom fromto="0 0 0 0.5 0 0" rgba="0.9 0.5 0.2 1"/>
      <body pos="0.5 0 0">
        <joint name="elbow" range="-2.6 2.6" limited="true"/>
        <geom fromto="0 0 0 0.5 0 0" rgba="0.3 0.5 0.9 1"/>
        <site name="tip" pos="0.5 0 0" size="0.04"/>
      </body>
    </body>
    <body name="target" mocap="true">
      <geom type="sphere" size="0.05" rgba="0.2 0.8 0.3 1"/>
    </body>
  </worldbody>
  <actuator>
    <velocity joint="shoulder"/>
    <velocity joint="elbow"/>
  </actuator>
</mujoco>
"""
NEAR = 0.1  # meters from the target at which it is reached
MOST_SECONDS = 1.0  # of physics between two looks: an arm that nobody commands has come to rest


class Arm(gymnasium.Env[Any, Any]):
    """Shows angles, velocities, the target and the way to it (8 numbers); an episode lasts
    ``seconds``."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 50}  # noqa: RUF012 Gymnasium's name

    def __init__(
        self,
        seconds: float = 2.0,
        render_mode: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (8,))
        self.action_space = gymnasium.spaces.Box(-3.0, 3.0, (2,))
        self.render_mode = render_mode
        self._model = mujoco.MjModel.from_xml_string(MODEL)
        self._data = mujoco.MjData(self._model)
        self._seconds, self._clock = seconds, clock
        self._renderer: Any = None
        self._seen_at: float | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        mujoco.mj_resetData(self._model, self._data)
        self._data.qpos[:] = self.np_random.uniform([-0.5, 0.8], [0.5, 1.6])
        reach, angle = self.np_random.uniform(0.5, 0.9), self.np_random.uniform(-1.5, 1.5)
        self._target = reach * np.array([np.cos(angle), np.sin(angle)])
        self._data.mocap_pos[0, :2] = self._target
        mujoco.mj_forward(self._model, self._data)
        self._seen_at = None  # time begins with the first command
        return self._shown(), {"command": np.zeros(2)}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._let_move()
        self._data.ctrl[:] = action
        distance = float(np.linalg.norm(self._away))
        over = bool(self._data.time >= self._seconds)
        info = {"is_success": distance < NEAR} if over else {}
        return self._shown(), -distance, False, over, info

    def observe(self) -> Any:
        """Look at the arm now."""
        self._let_move()
        return self._shown()

    def render(self) -> Any:
        if self._renderer is None:
            self._renderer = mujoco.Renderer(self._model, 320, 320)
        self._renderer.update_scene(self._data, camera="above")
        return self._renderer.render()

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()

    def _let_move(self) -> None:
        """Let the arm move until now."""
        now = self._clock()
        passed = 0.0 if self._seen_at is None else min(now - self._seen_at, MOST_SECONDS)
        steps = int(passed / self._model.opt.timestep)
        if steps:
            mujoco.mj_step(self._model, self._data, steps)
        if self._seen_at is None or passed == MOST_SECONDS:
            self._seen_at = now
        else:
            self._seen_at += steps * self._model.opt.timestep

    @property
    def _away(self) -> NDArray[np.float64]:
        away: NDArray[np.float64] = self._target - self._data.site_xpos[0, :2]
        return away

    def _shown(self) -> NDArray[np.float32]:
        parts = [self._data.qpos, self._data.qvel, self._target, self._away]
        shown: NDArray[np.float32] = np.concatenate(parts).astype(np.float32)
        return shown


def towards(shown: Any, chunk: int = 8, hz: float = 50.0) -> NDArray[np.float64]:
    """The next commands ``[chunk, 2]`` of a script: the tip goes straight to the target (damped
    least squares), and slows down there."""
    angles, away = np.array(shown[:2], np.float64), np.array(shown[6:8], np.float64)
    commands = []
    for _ in range(chunk):
        first, both = angles[0], angles.sum()
        x, y = 0.5 * np.cos([first, both]), 0.5 * np.sin([first, both])
        jacobian = np.array([[-y.sum(), -y[1]], [x.sum(), x[1]]])
        speed = jacobian.T @ np.linalg.solve(jacobian @ jacobian.T + 0.01 * np.eye(2), 3.0 * away)
        speed = np.clip(speed, -3.0, 3.0)
        commands.append(speed)
        angles += speed / hz
        away -= jacobian @ speed / hz
    return np.array(commands)


def main() -> None:
    """Play one episode, and say how it went."""
    parser = argparse.ArgumentParser(description="An arm at 50 Hz, whose script thinks slowly.")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of the episode")
    parser.add_argument("--slow", type=float, default=0.03, help="seconds that an answer takes")
    given = parser.parse_args()

    def act(shown: Any) -> NDArray[np.float64]:
        time.sleep(given.slow)
        return towards(shown)

    arm = Arm(given.seconds)
    safety = SafetyConfig(max_step=[0.5], rest=[0.0])
    with RealTimeLoop.of(arm, act, hz=50, chunk=8, safety=safety) as loop:
        counts = loop.run(seed=0)
    away = float(np.linalg.norm(arm.observe()[6:8]))
    print(f"{away:.3f} m from the target after {counts.steps} steps")
    print(f"{counts.missed} missed their deadline, {counts.clipped} commands were clipped")


if __name__ == "__main__":
    main()
