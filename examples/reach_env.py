"""A disc on a table reaches the one of three coloured targets that an instruction names.

Everything is seen in an image of 32 x 32 pixels, which numpy draws: no renderer is needed. The
environment shows the image, the position of the disc, and the instruction as text, as robots do
that a vision-language-action policy drives (``vla_reach.toml``); with ``pixels_only`` the image
alone, and one target; with ``numbers_only`` the positions of the disc and of that target alone.

`expert` is the scripted policy that demonstrations are recorded from::

    rlinf-async demonstrations examples/vla_reach.toml --policy examples/reach_env.py:expert \
        --episodes 200 --out demonstrations/reach
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

COLORS = {"red": (230, 60, 50), "green": (60, 190, 90), "blue": (70, 110, 240)}
BACKGROUND, DISC = (24, 26, 32), (245, 245, 240)
STEP = 0.12  # largest movement along an axis in one step; the table is [-1, 1] x [-1, 1]
RADIUS = 0.2  # of targets and disc, in the picture
PLACES = [(x, y) for x in (-0.7, 0.0, 0.7) for y in (-0.7, 0.0, 0.7)]  # of targets
NEAR = 0.25  # distance at which a target is reached
LIMIT = 32  # steps of an episode
Point = NDArray[np.float64]


class ReachTargets(gymnasium.Env[Any, Any]):
    """Observations are a Dict of ``image``, ``state`` and ``instruction``, or the image alone, or
    numbers alone."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 Gymnasium's name

    def __init__(
        self,
        pixels_only: bool = False,
        size: int = 32,
        numbers_only: bool = False,
        render_mode: str | None = None,
    ) -> None:
        self.render_mode = render_mode
        self._size, self._pixels_only, self._numbers_only = size, pixels_only, numbers_only
        image = spaces.Box(0, 255, (size, size, 3), np.uint8)
        words = spaces.Text(max_length=11, charset="abcdefghijklmnopqrstuvwxyz ")
        state = spaces.Box(-1.0, 1.0, (2,), np.float32)
        both = spaces.Dict({"image": image, "instruction": words, "state": state})
        self.observation_space = image if pixels_only else both
        if numbers_only:
            self.observation_space = spaces.Box(-1.0, 1.0, (4,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        names = ["red"] if self._pixels_only or self._numbers_only else list(COLORS)
        self._colors = [COLORS[name] for name in names]
        self._wanted = int(self.np_random.integers(len(names)))
        self._instruction = f"reach {names[self._wanted]}"
        self._places = self._scattered(len(names))
        self._steps = 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        before = self._distance
        moved = self._places[0] + STEP * np.clip(np.asarray(action, np.float64), -1.0, 1.0)
        self._places[0] = np.clip(moved, -1.0, 1.0)
        self._steps += 1
        reached = bool(self._distance < NEAR)
        reward = before - self._distance + float(reached)
        return (
            self._observation(),
            reward,
            reached,
            not reached and self._steps >= LIMIT,
            {"is_success": reached},
        )

    def render(self) -> Any:
        """The same picture, large."""
        return self._picture(256)

    @property
    def direction(self) -> Point:
        """The way from the disc to the target; for the scripted policy alone."""
        way: Point = self._places[1 + self._wanted] - self._places[0]
        return way

    @property
    def _distance(self) -> float:
        return float(np.hypot(*self.direction))

    def _scattered(self, targets: int) -> Point:
        """The disc anywhere, the targets at different places of the grid."""
        chosen = self.np_random.choice(len(PLACES), targets, replace=False)
        start = self.np_random.uniform(-0.9, 0.9, (1, 2))
        return np.vstack([start, np.array(PLACES)[chosen]])

    def _observation(self) -> Any:
        if self._numbers_only:
            return self._places.reshape(-1).astype(np.float32)
        image = self._picture(self._size)
        if self._pixels_only:
            return image
        state = self._places[0].astype(np.float32)
        return {"image": image, "instruction": self._instruction, "state": state}

    def _picture(self, size: int) -> NDArray[np.uint8]:
        image = np.empty((size, size, 3), np.uint8)
        image[:] = BACKGROUND
        axis = (np.arange(size) + 0.5) * (2.0 / size) - 1.0
        shapes = [*zip(self._places[1:], self._colors, strict=True), (self._places[0], DISC)]
        for (x, y), color in shapes:
            image[(axis[None, :] - x) ** 2 + (axis[:, None] - y) ** 2 < RADIUS**2] = color
        return image


def expert(env: gymnasium.Env[Any, Any], seed: int) -> Callable[[Any], NDArray[np.float32]]:
    """A scripted policy: straight to the target, with an unsteady hand."""
    table = env.unwrapped
    if not isinstance(table, ReachTargets):
        raise TypeError(f"the scripted policy is for ReachTargets, not {type(table).__name__}")
    generator = np.random.default_rng(seed)

    def act(observation: Any) -> NDArray[np.float32]:
        aimed = table.direction / STEP + generator.normal(0.0, 0.3, 2)
        return np.clip(aimed, -1.0, 1.0).astype(np.float32)

    return act


def explorer(env: gymnasium.Env[Any, Any], seed: int) -> Callable[[Any], NDArray[np.float32]]:
    """A script from which a world model can learn (``world_reach.toml``): it goes somewhere for a
    few steps, sometimes to the target, and then somewhere else."""
    table = env.unwrapped
    if not isinstance(table, ReachTargets):
        raise TypeError(f"the scripted policy is for ReachTargets, not {type(table).__name__}")
    generator = np.random.default_rng(seed)
    left, way = 0, np.zeros(2)

    def act(observation: Any) -> NDArray[np.float32]:
        nonlocal left, way
        if not left:
            left = int(generator.integers(1, 9))
            towards = generator.random() < 0.25
            way = table.direction / STEP if towards else generator.uniform(-1.5, 1.5, 2)
        left -= 1
        return np.clip(way + generator.normal(0.0, 0.3, 2), -1.0, 1.0).astype(np.float32)

    return act
