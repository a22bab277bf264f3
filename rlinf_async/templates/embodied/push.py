"""The environment: a disc on a table is pushed towards a goal. Make it yours.

Any `gymnasium.Env` will do. The run makes it by its entry point, ``push.py:PushDisc`` in
train.toml, in the process of each env worker, with the arguments in ``env.kwargs``.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

EPISODE_STEPS = 40
EDGE = 1.5  # the table is [-EDGE, EDGE] in x and y
GREY, GREEN, WHITE = (40, 42, 50), (60, 190, 90), (245, 245, 240)


class PushDisc(gymnasium.Env[NDArray[np.float32], NDArray[np.float32]]):
    """Shows goal, position and speed (each x and y); an action is a push.

    Args:
        goal_radius: distance from the goal at which the disc is there.
        render_mode: ``"rgb_array"`` for pictures and videos.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012 Gymnasium's name

    def __init__(self, goal_radius: float = 0.1, render_mode: str | None = None) -> None:
        self.observation_space = spaces.Box(-EDGE, EDGE, (6,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.goal_radius = goal_radius
        self.render_mode = render_mode

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Begin an episode; ``seed`` makes it the same one again."""
        super().reset(seed=seed)
        self.goal, self.position = self.np_random.uniform(-1.0, 1.0, (2, 2))
        self.speed, self.steps = np.zeros(2), 0
        return self._shown(), {}

    def step(
        self, action: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Push once. The reward is higher the nearer the disc is."""
        self.speed = 0.8 * self.speed + 0.1 * np.clip(action, -1.0, 1.0)
        self.position = np.clip(self.position + self.speed, -EDGE, EDGE)
        self.steps += 1
        distance = float(np.linalg.norm(self.goal - self.position))
        info = {"is_success": distance < self.goal_radius}  # shown as the success rate
        # Truncated, not terminated: the value of the last observation counts for what would follow.
        return self._shown(), -distance, False, self.steps >= EPISODE_STEPS, info

    def render(self) -> Any:
        """A picture of 200 x 200 pixels: the goal is green, the disc white."""
        picture = np.full((200, 200, 3), GREY, np.uint8)
        axis = np.linspace(-EDGE, EDGE, 200)
        for (x, y), radius, color in (
            (self.goal, 1.5 * self.goal_radius, GREEN),
            (self.position, 0.08, WHITE),
        ):
            near = (axis[None, :] - x) ** 2 + (axis[:, None] - y) ** 2 < radius**2
            picture[near] = color
        return picture

    def _shown(self) -> NDArray[np.float32]:
        return np.concatenate([self.goal, self.position, self.speed], dtype=np.float32)
