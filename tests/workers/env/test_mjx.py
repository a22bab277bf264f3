"""MuJoCo's physics in JAX, many environments in one call; skipped where it is not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlinf_async.config import ConfigError, MissingExtra
from rlinf_async.workers.env.adapters.mjx import make

TASK = f"{Path(__file__).parents[3] / 'examples' / 'mjx_reacher.py'}:Reacher"


@pytest.fixture(scope="module")
def envs() -> Any:
    """Three environments, whose episodes have four steps."""
    pytest.importorskip("mujoco.mjx")
    return make(num_envs=3, task=TASK, horizon=4)


def test_without_its_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "mujoco.mjx", None)
    with pytest.raises(MissingExtra, match=r"rlinf-async\[mjx\]"):
        make(num_envs=1, task=TASK, horizon=4)


def test_a_horizon_that_is_none_is_refused() -> None:
    pytest.importorskip("mujoco.mjx")
    with pytest.raises(ConfigError, match="it is a number of steps"):
        make(num_envs=1, task=TASK, horizon=0)


def test_an_episode_is_cut_and_the_next_begins_in_the_same_step(envs: Any) -> None:
    first, _ = envs.reset(seed=1)
    assert first.shape == (3, *envs.single_observation_space.shape)
    assert envs.single_action_space.low.tolist() == [-6.0, -6.0]
    steps = [envs.step(np.full((3, 2), 6.0)) for _ in range(4)]
    assert not any(step[3].any() or step[4] for step in steps[:3])
    shown, _, terminated, truncated, info = steps[3]
    assert truncated.all()
    assert not terminated.any()
    assert info["_final_obs"].all()
    # The old episode goes on to its last observation; the new one begins at rest.
    assert np.abs(info["final_obs"][:, 4:6]).min() > 0.05
    assert not shown[:, 4:6].any()
    targets = slice(6, 8)  # those of an episode are held
    assert np.array_equal(info["final_obs"][:, targets], first[:, targets])
    assert not np.array_equal(shown[:, targets], first[:, targets])


def test_the_same_seed_gives_the_same_episodes(envs: Any) -> None:
    def played(seed: int) -> list[float]:
        envs.reset(seed=seed)
        steps = [envs.step(np.full((3, 2), 1.0)) for _ in range(5)]
        return [value for step in steps for value in step[1].tolist()]

    assert played(3) == played(3)
    assert played(3) != played(4)


def test_physics_are_those_of_mujoco(envs: Any) -> None:
    from examples.mjx_reacher import XML

    mujoco = pytest.importorskip("mujoco")

    model = mujoco.MjModel.from_xml_string(XML)
    data = mujoco.MjData(model)
    shown, _ = envs.reset(seed=2)
    data.qpos[:] = np.arctan2(shown[0, 2:4], shown[0, 0:2])
    data.ctrl[:] = [2.0, -3.0]
    after = envs.step(np.tile([2.0, -3.0], (3, 1)))[0]
    mujoco.mj_step(model, data, 4)
    assert after[0, :2] == pytest.approx(np.cos(data.qpos), abs=1e-4)
    assert after[0, 4:6] == pytest.approx(0.1 * data.qvel, abs=1e-4)
