"""Push-T of Chi et al. 2023, "Diffusion Policy" (``pip install gym-pusht "pymunk<7"``), seen from
the block, and a scripted person who can do it.

A disc pushes a block, shaped like a T, onto its goal. It moves only while it is pushed, without
friction: at a point ``r`` from its centre of mass with the inward normal ``n``, a push turns it by
``cross(r, n) / GYRATION ** 2`` for each unit by which it moves it along ``n``. Which pose is wanted
in the block's frame, and where the disc is in it, is all that there is to know.

``examples/hg_dagger_push_t.toml`` learns from the person. What they reach by themselves::

    python examples/push_t.py --episodes 50
"""

from __future__ import annotations

import argparse
import math
from typing import Any, Final

import gymnasium
import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

GOAL: Final = (256.0, 256.0, math.pi / 4)
"""pose of the block's origin, the middle of the bar's outer face: x, y, angle"""
CENTRE: Final = np.array([0.0, 45.0])
"""centre of mass in the block's frame"""
GYRATION: Final = math.sqrt(3_000.0)
"""radius of gyration: a radian of turning counts as that many pixels"""
RADIUS: Final = 15.0
"""of the disc"""
REACH: Final = 110.0
"""pixels between the disc and its target for an action of 1"""
MOST: Final = 0.75
"""of an action: the expert's. A squashed policy gets to 1 with difficulty."""
POWER: Final = 2.0
"""with which the way to the target grows with an action: small ways matter as much as long ones"""
SCALE: Final = 100.0
"""pixels that a policy sees as 1"""

BOXES: Final = np.array([[-60.0, 0.0, 60.0, 30.0], [-15.0, 30.0, 15.0, 120.0]])
"""bar and stem: least and greatest x and y ``[2, 4]``, in the block's frame"""
FACES: Final = (
    ((-57.0, 0.0), (57.0, 0.0), (0.0, 1.0)),
    ((-60.0, 3.0), (-60.0, 27.0), (1.0, 0.0)),
    ((60.0, 3.0), (60.0, 27.0), (-1.0, 0.0)),
    ((-57.0, 30.0), (-33.0, 30.0), (0.0, -1.0)),
    ((33.0, 30.0), (57.0, 30.0), (0.0, -1.0)),
    ((-15.0, 48.0), (-15.0, 117.0), (1.0, 0.0)),
    ((15.0, 48.0), (15.0, 117.0), (-1.0, 0.0)),
    ((-12.0, 120.0), (12.0, 120.0), (0.0, -1.0)),
)
"""where the disc has room to touch: from, to, and the inward normal"""
AROUND: Final = np.array(
    [[-82.0, -22.0], [82.0, -22.0], [82.0, 52.0], [37.0, 142.0], [-37.0, 142.0], [-82.0, 52.0]]
)
"""corners of the ways around the block ``[K, 2]``"""
CLEARANCE: Final = 5.0
"""pixels between the block and a disc that is about to push"""
MARGIN: Final = 2.0
"""pixels that a way keeps from the block, at least"""


def free(starts: Numbers, ends: Numbers) -> NDArray[np.bool_]:
    """Return whether the disc gets from ``starts [..., 2]`` to ``ends [..., 2]`` straight past both
    boxes."""
    way = (ends - starts)[..., None, :]
    way = np.where(np.abs(way) < 1e-9, 1e-9, way)
    low = (BOXES[:, :2] - RADIUS - MARGIN - starts[..., None, :]) / way
    high = (BOXES[:, 2:] + RADIUS + MARGIN - starts[..., None, :]) / way
    enters = np.minimum(low, high).max(-1)
    leaves = np.maximum(low, high).min(-1)
    hits = (enters < leaves) & (enters < 1.0) & (leaves > 0.0)
    return np.asarray(~hits.any(-1))


def lengths(starts: Numbers, ends: Numbers) -> Numbers:
    """Return lengths of straight ways ``[S, E]``; infinite where the block is in between."""
    far: Numbers = np.linalg.norm(starts[:, None] - ends, axis=-1)
    return np.where(free(starts[:, None], ends[None]), far, np.inf)


class Contacts:
    """Points at which the disc can push, and the ways to them from the corners."""

    def __init__(self, spacing: float = 6.0) -> None:
        points, normals = [], []
        for first, last, normal in FACES:
            count = 1 + round(math.dist(first, last) / spacing)
            points.append(np.linspace(first, last, count))
            normals.append(np.tile(normal, (count, 1)))
        self.points = np.concatenate(points)
        """``[C, 2]``"""
        self.normals = np.concatenate(normals)
        """``[C, 2]``, inward"""
        arm = self.points - CENTRE
        self.torques = (arm[:, 0] * self.normals[:, 1] - arm[:, 1] * self.normals[:, 0]) / GYRATION
        """``[C]``, of a push of 1"""
        self.before = self.points - (RADIUS + CLEARANCE) * self.normals
        """where the disc is about to push ``[C, 2]``"""
        self._ways = lengths(AROUND, AROUND)
        self._last = lengths(AROUND, self.before)
        self.onward = self.onward_by(np.ones(len(AROUND), np.bool_))
        """lengths of the ways from the corners ``[K, C]``, far from walls"""

    def onward_by(self, within: NDArray[np.bool_]) -> Numbers:
        """Return lengths of the ways from the corners ``[K, C]`` by those that are ``within [K]``
        the walls."""
        ways = np.where(within[:, None] & within, self._ways, np.inf)
        for middle in range(len(AROUND)):
            ways = np.minimum(ways, ways[:, middle, None] + ways[middle])
        return np.asarray((ways[:, :, None] + self._last).min(1))


CONTACTS: Final = Contacts()
DETOUR: Final = 0.5
"""how much better a push has to be, as a cosine, that is far away"""
NEAR: Final = 100.0
"""pixels within which a push is near"""

WALL: Final = 2.0
"""pixels from the end of the table that the disc's target keeps"""


def outside(disc: Numbers) -> Numbers:
    """Return the nearest place at which a disc at ``disc [2]`` is clear of the block."""
    room = RADIUS + MARGIN + 0.5
    for _ in range(2):
        for box in BOXES:
            inside = np.array(
                [disc[0] - box[0], box[2] - disc[0], disc[1] - box[1], box[3] - disc[1]]
            )
            inside += room
            if inside.min() > 0.0:
                side = int(inside.argmin())
                disc = disc.copy()
                disc[side // 2] += inside[side] * (-1.0 if side % 2 == 0 else 1.0)
    return disc


def within_walls(places: Numbers, shift: Numbers, turn: float) -> NDArray[np.bool_]:
    """Return whether the disc may be at ``places [N, 2]``, in the frame of a block that has to move
    and turn this far: the goal stands still, so that says where the block is."""
    cos, sin = math.cos(GOAL[2] - turn), math.sin(GOAL[2] - turn)
    turned = (places - CENTRE - shift) @ np.array([[cos, sin], [-sin, cos]])
    world = turned + np.array(GOAL[:2]) + rotated(CENTRE, GOAL[2])
    return np.asarray(((world > WALL) & (world < 512.0 - WALL)).all(-1))


def expert(disc: Numbers, shift: Numbers, turn: float) -> Numbers:
    """Return where the disc should go, from where it is ``[2]``, in the block's frame.

    Of all pushes it takes the one that leads most straight to the goal, less what the way there
    costs: so it goes on with a push until another one is clearly better.

    Args:
        disc: where the disc is ``[2]``, in the block's frame.
        shift: by how much the centre of mass has to move ``[2]``, in the block's frame.
        turn: angle by which the block has to turn.
    """
    at = CONTACTS
    # How far the disc has to push at each contact, and how much of the error that takes away.
    gain = at.normals @ shift + at.torques * GYRATION * turn
    strength = np.sqrt(1.0 + at.torques**2)
    error = math.sqrt(float(shift @ shift) + (GYRATION * turn) ** 2) + 1e-6
    clear = outside(disc)
    places = np.concatenate([AROUND, at.before])
    first = lengths(clear[None], places)[0]
    within = within_walls(places, shift, turn)
    first[~within] = np.inf
    first, direct = np.split(first, [len(AROUND)])
    corners = within[: len(AROUND)]
    around = first[:, None] + (at.onward if corners.all() else at.onward_by(corners))
    around[:, ~within[len(AROUND) :]] = np.inf
    way = np.minimum(direct, around.min(0))
    score = gain / strength / error + DETOUR * np.exp(-way / NEAR)
    best = int((score - 2.0 * np.isinf(way)).argmax())
    normal, point = at.normals[best], at.points[best]
    depth = float(normal @ (point - disc)) - RADIUS
    along = np.array([-normal[1], normal[0]])
    aside = abs(float(along @ (point - disc)))
    touching = abs(depth) < CLEARANCE + 3.0 and aside < 16.0
    if touching:
        share = float(np.clip((16.0 - aside) / 10.0, 0.0, 1.0))
        deep = share * gain[best] - (1.0 - share) * CLEARANCE
        target = point + (deep - RADIUS) * normal
    elif direct[best] <= around[:, best].min():
        target = at.before[best]
    else:
        corner = int(around[:, best].argmin())
        target = AROUND[corner]
    return np.asarray(target - disc)


def rotated(vector: Numbers, angle: float) -> Numbers:
    """Return ``vector [2]``, turned by ``angle``."""
    cos, sin = math.cos(angle), math.sin(angle)
    return np.array([cos * vector[0] - sin * vector[1], sin * vector[0] + cos * vector[1]])


def seen_from_block(state: Numbers) -> tuple[Numbers, Numbers, float]:
    """Return what `expert` is asked about, of the environment's state ``[5]``."""
    disc, origin, angle = state[:2], state[2:4], float(state[4])
    turn = (GOAL[2] - angle + math.pi) % (2.0 * math.pi) - math.pi
    wanted = np.array(GOAL[:2]) + rotated(CENTRE, GOAL[2]) - origin
    return rotated(disc - origin, -angle), rotated(wanted, -angle) - CENTRE, turn


EDGES: Final = (
    np.array([-82.0, -60.0, -45.0, -30.0, -15.0, 15.0, 30.0, 45.0, 60.0, 82.0]),
    np.array([-22.0, -10.0, 0.0, 30.0, 45.0, 60.0, 120.0, 135.0]),
)
"""x and y, in the block's frame, at which what the disc should do changes"""


class SeenFromBlock(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Shows and moves in the block's frame, and pays what the best coverage of the goal grows by:
    the return of an episode is its best coverage.

    Observations ``[D]``: see `shown`. Actions ``[2]`` in [-1, 1]: by how much the disc's target is
    ahead of it, see `stretched`. A disc on the left is seen, and moved, in a mirror.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        size = len(shown(np.zeros(2), np.zeros(2), 0.0))
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (size,))
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self._state, info = self.env.reset(seed=seed, options=options)
        self._best = 0.0
        return self._shown(), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        ahead = rotated(stretched(np.asarray(action, np.float64)) * self._mirror, self._state[4])
        target = np.clip(self._state[:2] + ahead, 0.0, 512.0)
        self._state, _, terminated, truncated, info = self.env.step(target)
        best = max(self._best, float(info["coverage"]))
        reward, self._best = best - self._best, best
        return self._shown(), reward, bool(terminated), truncated, info

    def _shown(self) -> NDArray[np.float32]:
        disc, shift, turn = seen_from_block(self._state)
        side = -1.0 if disc[0] < 0.0 else 1.0
        self._mirror = np.array([side, 1.0])
        return shown(disc * self._mirror, shift * self._mirror, turn * side)


def shown(disc: Numbers, shift: Numbers, turn: float) -> NDArray[np.float32]:
    """Return an observation of what `expert` is asked about, whose first five numbers say it all.

    The others make it easier to learn from: the sine and cosine of the turn; the direction of the
    error (x, y, turn) and the logarithm of its size, because what has to be done depends little on
    how far the goal is; and on which side of the lines that matter (`EDGES`) the disc is.
    """
    error = np.append(shift, GYRATION * turn)
    size = float(np.linalg.norm(error)) + 1e-6
    where = [*(disc / SCALE), *(shift / SCALE), turn, math.sin(turn), math.cos(turn)]
    toward = [*(error / size), math.log(size / 10.0 + 0.1)]
    sides = [np.tanh((at - edges) / 10.0) for at, edges in zip(disc, EDGES, strict=True)]
    return np.asarray(np.concatenate([where, toward, *sides]), np.float32)


def stretched(action: Numbers) -> Numbers:
    """Return by how many pixels ``action [2]`` puts the target ahead of the disc, ``[2]``."""
    return np.asarray(REACH * action * float(np.abs(action).max()) ** (POWER - 1.0))


def as_action(ahead: Numbers) -> Numbers:
    """Return the action that `stretched` makes of ``ahead [2]``, at most `MOST` of one."""
    size = float(np.abs(ahead).max()) / REACH + 1e-9
    return np.asarray(ahead / (REACH * size) * min(MOST, size ** (1.0 / POWER)))


def make() -> gymnasium.Env[Any, Any]:
    """Return Push-T, seen from the block."""
    return SeenFromBlock(gymnasium.make("gym_pusht:gym_pusht/PushT-v0", obs_type="state"))


def acts(observation: Any) -> Numbers:
    """Return the expert's action ``[2]`` at an observation ``[D]``."""
    seen = np.asarray(observation, np.float64)
    return as_action(expert(SCALE * seen[:2], SCALE * seen[2:4], float(seen[4])))


TOLERANCE: Final = 0.3
"""of the expert's action: what a person lets pass. One that stands still does not pass."""


def steps_in(observation: Any, proposed: Any) -> NDArray[np.float32] | None:
    """A person who sees what the policy is about to do, and acts where that leads elsewhere: see
    ``examples/hg_dagger_push_t.toml``."""
    own = acts(observation)
    away = np.abs(own - proposed).max() > max(0.02, TOLERANCE * np.abs(own).max())
    return own.astype(np.float32) if away else None


def main() -> None:
    parser = argparse.ArgumentParser(description="What the scripted person reaches by themselves.")
    parser.add_argument("--episodes", type=int, default=50)
    episodes = parser.parse_args().episodes
    env, coverages = make(), []
    for seed in range(episodes):
        observation, _ = env.reset(seed=seed)
        coverage, over = 0.0, False
        while not over:
            observation, reward, terminated, truncated, _ = env.step(acts(observation))
            coverage, over = coverage + float(reward), terminated or truncated
        coverages.append(coverage)
    solved = np.mean(np.array(coverages) > 0.95)
    print(f"best coverage {np.mean(coverages):.3f}, solved {solved:.2f}, {episodes} episodes")


if __name__ == "__main__":
    main()
