"""What compressed images of a replay store take and cost: ``python -m benchmarks.replay``.

Images of 84 x 84 x 3 of two environments, by random actions: a drawn one (`examples/reach_env.py`)
and one that MuJoCo renders (FetchReach-v4). Both stores are on disk, and hold the same transitions;
a draw is a batch of 256, with its next observations. Times are those of one core's work.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from examples.reach_env import ReachTargets
from rlinf_async.messages.spaces import ObservationPart, ObservationSpec, continuous
from rlinf_async.workers.replay.columns import columns_of
from rlinf_async.workers.replay.store import ReplayStore

SIZE, BATCH = 84, 256
Frames = NDArray[np.uint8]


def drawn(steps: int) -> Frames:
    """Images of the disc that is to reach a target."""
    env = ReachTargets(pixels_only=True, size=SIZE)
    return _played(env, steps, lambda seen: seen)


def rendered(steps: int) -> Frames:
    """Images of the arm that is to reach a place."""
    env = gymnasium.make(
        "gymnasium_robotics:FetchReach-v4", render_mode="rgb_array", width=SIZE, height=SIZE
    )
    return _played(env, steps, lambda _: env.render())


def _played(env: gymnasium.Env[Any, Any], steps: int, shown: Callable[[Any], Any]) -> Frames:
    seen, _ = env.reset(seed=0)
    env.action_space.seed(0)
    frames = [np.asarray(shown(seen))]
    for _ in range(steps):
        seen, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            seen, _ = env.reset()
        frames.append(np.asarray(shown(seen)))
    return np.stack(frames)


def measured(frames: Frames, folder: Path, *, compressed: bool) -> tuple[float, float, float]:
    """Bytes of a transition, transitions written in a second, and batches drawn in one."""
    part = ObservationPart(name="image", kind="image", shape=frames.shape[1:])
    spec, count = ObservationSpec((part,)), len(frames) - 1
    seen = spec.empty(count + 1)
    seen["image"] = frames
    store = ReplayStore(
        columns_of(spec, continuous(4), compressed=compressed), count, folder=folder
    )
    rest = {name: np.zeros(count, np.float32) for name in ("reward", "discount", "version")}
    began = time.thread_time()
    for first in range(0, count, 50):
        here = slice(first, min(first + 50, count))
        rows = {name: array[here] for name, array in rest.items()}
        following = seen[1:][here]
        store.write({"observation": seen[:-1][here], "next_observation": following, **rows})
        store.count += len(following)
    written = count / (time.thread_time() - began)
    random, draws = np.random.default_rng(0), 50
    began = time.thread_time()
    for _ in range(draws):
        store.take(random.integers(0, count, BATCH))
    batches = draws / (time.thread_time() - began)
    size = sum(file.stat().st_size for file in folder.glob("*.bin"))
    return size / count, written, batches


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    steps = parser.parse_args().steps
    print(f"{'':10}{'images':12}{'bytes/transition':>18}{'written/s':>12}{'batches/s':>12}")
    for name, frames in (("drawn", drawn(steps)), ("rendered", rendered(steps))):
        found = {}
        for images in ("raw", "compressed"):
            with tempfile.TemporaryDirectory() as folder:
                found[images] = measured(frames, Path(folder), compressed=images == "compressed")
            size, written, batches = found[images]
            print(f"{name:10}{images:12}{size:18,.0f}{written:12,.0f}{batches:12.1f}")
        ratios = [one / other for one, other in zip(*found.values(), strict=True)]
        print(f"{name:10}{'raw : compr.':12}{ratios[0]:18.1f}{ratios[1]:12.1f}{ratios[2]:12.1f}")


if __name__ == "__main__":
    main()
