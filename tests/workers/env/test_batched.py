"""Simulators that step many environments in one call give what single environments give."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rlinf_async.config import ConfigError, UsageError
from rlinf_async.messages.converting import ActionReader, ObservationWriter
from rlinf_async.workers.env import EnvConfig, EnvError, EnvFailed, describe_env
from rlinf_async.workers.env.adapters import isaaclab
from rlinf_async.workers.env.config import Autoreset
from rlinf_async.workers.env.evaluation import BatchedEvaluation
from rlinf_async.workers.env.make_batched import autoreset_of
from rlinf_async.workers.env.many import BatchedStage
from rlinf_async.workers.env.stage import Slot, Stage, StageOutcome
from tests.workers.env.toy import Counting, make

MODES: dict[Autoreset, AutoresetMode] = {
    "same_step": AutoresetMode.SAME_STEP,
    "next_step": AutoresetMode.NEXT_STEP,
    "disabled": AutoresetMode.DISABLED,
}
ACTIONS = np.array([[0.5], [-0.25]], np.float32)


def vector(num_envs: int, autoreset: Autoreset = "same_step", **kwargs: Any) -> SyncVectorEnv:
    """The toy as Gymnasium's own vector environment."""
    return SyncVectorEnv([lambda: make(**kwargs)] * num_envs, autoreset_mode=MODES[autoreset])


class OnTorch(SyncVectorEnv):
    """Shows tensors, as simulators on a GPU do."""

    def step(self, actions: Any) -> Any:
        *arrays, info = super().step(actions)
        return *(torch.from_numpy(np.asarray(array)) for array in arrays), info


def stage(env: Any, autoreset: Autoreset) -> BatchedStage:
    writer = ObservationWriter(env.single_observation_space, "Toy")
    reader = ActionReader(env.single_action_space, "Toy", "clip")
    return BatchedStage(env, writer, reader, autoreset, label="Toy[0]", seed=7)


def singles() -> Stage:
    env = make()
    writer = ObservationWriter(env.observation_space, "Toy")
    slots = [Slot(make(), writer.write, label=f"Toy[{index}]", seed=index) for index in range(2)]
    reader = ActionReader(env.action_space, "Toy", "clip")
    return Stage(slots, writer.spec.empty(2), reader)


def step(one: Stage | BatchedStage) -> tuple[np.ndarray[Any, Any], StageOutcome]:
    """The observations that the step began at, and its outcome."""
    if one.needs_reset:
        one.reset()
    before = one.observation
    return before, one.step(ACTIONS)


@pytest.mark.parametrize("autoreset", ["same_step", "disabled"])
@pytest.mark.parametrize("kind", [SyncVectorEnv, OnTorch])
def test_a_simulator_gives_what_single_environments_give(
    autoreset: Autoreset, kind: type[SyncVectorEnv]
) -> None:
    env = kind([make, make], autoreset_mode=MODES[autoreset])
    batched, expected = stage(env, autoreset), singles()
    for _ in range(12):
        (seen, got), (before, wanted) = step(batched), step(expected)
        np.testing.assert_array_equal(seen, before)
        for name in ("reward", "terminated", "truncated", "final_observation"):
            np.testing.assert_array_equal(getattr(got, name), getattr(wanted, name))
        assert got.episodes == wanted.episodes
        assert got.valid is None


def test_a_step_that_only_begins_an_episode_is_no_sample() -> None:
    batched, expected = stage(vector(2, "next_step"), "next_step"), singles()
    got = [step(batched) for _ in range(16)]
    wanted = [step(expected) for _ in range(12)]
    for env in range(2):
        samples = [
            (
                *seen[env],
                *[getattr(out, name)[env] for name in ("reward", "terminated", "truncated")],
            )
            for seen, out in got
            if out.valid is not None and out.valid[env]
        ]
        single = [
            (
                *seen[env],
                *[getattr(out, name)[env] for name in ("reward", "terminated", "truncated")],
            )
            for seen, out in wanted
        ]
        assert samples[:10] == single[:10]
    episodes = [episode for _, out in got for episode in out.episodes]
    assert episodes[:6] == [episode for _, out in wanted for episode in out.episodes][:6]
    finals = [out.final_observation for _, out in got if out.final_observation is not None]
    assert finals[0].tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_every_environment_plays_its_share_of_an_evaluation() -> None:
    run = BatchedEvaluation(stage(vector(2), "same_step"), range(1, 10, 2))
    steps = 0
    while run.begin():
        run.step(ACTIONS, version=steps)
        steps += 1
    assert sorted(one.episode for one in run.done) == [1, 3, 5, 7, 9]
    lengths = {one.episode: one.length for one in run.done}
    assert lengths == {1: 3, 3: 3, 5: 2, 7: 2, 9: 3}  # three of the first, two of the second
    assert {one.episode: one.version for one in run.done} == {1: 0, 3: 0, 5: 3, 7: 3, 9: 5}


def test_what_a_simulator_raises_names_it_its_seed_and_its_step() -> None:
    broken = stage(vector(2, fails_at=2), "same_step")
    step(broken)
    with pytest.raises(EnvFailed, match=r"Toy\[0\], seed 7, in step\(\) at step 2, raised ZeroD"):
        step(broken)


@pytest.mark.parametrize(
    ("entry", "settings", "said"),
    [
        ("three", {}, "steps 3 environments in one call.*set env.simulator = 'vector'"),
        ("three", {"simulator": "vector"}, "was asked for 2 environments .* and made 3"),
        (
            "single",
            {"simulator": "vector"},
            "a Counting is a single environment, but",
        ),
        ("silent", {"simulator": "vector"}, "set env.autoreset to one of same_step, next_step"),
    ],
)
def test_one_kind_of_environment_given_for_the_other_is_named(
    entry: str, settings: dict[str, Any], said: str
) -> None:
    entry_point = f"tests.workers.env.test_batched:{entry}"
    config = EnvConfig(entry_point=entry_point, envs=2, stages=1, **settings)
    with pytest.raises(ConfigError, match=said):
        describe_env(config, probe=True)


def three(num_envs: int = 3) -> SyncVectorEnv:
    return vector(3)


def single(num_envs: int) -> Counting:
    return make()


def silent(num_envs: int) -> SyncVectorEnv:
    env = vector(num_envs)
    env.metadata = {}
    return env


class Wrong(Counting):
    """Shows another shape than its space says."""

    def __init__(self, doing: str) -> None:
        super().__init__()
        self.doing = doing

    def reset(self, **options: Any) -> Any:
        seen, info = super().reset(**options)
        return (seen[None] if self.doing == "reset" else seen), info

    def step(self, action: Any) -> Any:
        seen, *rest = super().step(action)
        return (np.append(seen, 0.0) if self.doing == "step" else seen), *rest


@pytest.mark.parametrize("doing", ["reset", "step"])
def test_arrays_of_another_shape_are_found_before_anything_starts(doing: str) -> None:
    wrong = EnvConfig(entry_point="tests.workers.env.test_batched:Wrong", kwargs={"doing": doing})
    with pytest.raises(EnvError, match=rf"{doing}\(\) returned an observation of shape"):
        describe_env(wrong, probe=True)


class Grouped:
    """The toy as Isaac Lab has it: tensors, groups of observations, perhaps the last ones."""

    device = "cpu"

    def __init__(self, config: Any) -> None:
        self._env = OnTorch([make] * config.num_envs, autoreset_mode=MODES["same_step"])
        self.num_envs = config.num_envs
        self.single_observation_space = {"policy": self._env.single_observation_space}
        self.single_action_space = self._env.single_action_space
        self._tells = bool(getattr(config, "compute_final_obs", False))
        self._shown = torch.zeros(config.num_envs, 2)
        self.unwrapped = self

    def reset(self, **options: Any) -> Any:
        shown, info = self._env.reset(**options)
        self._shown.copy_(torch.from_numpy(shown))
        return {"policy": self._shown}, info

    def step(self, actions: Any) -> Any:
        assert isinstance(actions, torch.Tensor)
        shown, *told, info = self._env.step(actions.numpy())
        self._shown.copy_(shown)  # in place, as simulators on a device do
        extras: dict[str, Any] = {"log": {}}
        if self._tells and "final_obs" in info:
            last = [
                one if one is not None else shown[row].numpy()
                for row, one in enumerate(info["final_obs"])
            ]
            extras["final_obs"] = {"policy": torch.from_numpy(np.stack(last))}
        return {"policy": self._shown}, *told, extras

    def close(self) -> None:
        self._env.close()


@pytest.mark.parametrize("tells", [True, False])
def test_environments_of_isaac_lab_give_what_single_ones_give(
    monkeypatch: pytest.MonkeyPatch, tells: bool
) -> None:
    """The simulator itself is not there: what it calls and returns is taken from its sources."""
    launched: list[dict[str, Any]] = []
    config = SimpleNamespace(num_envs=0, **({"compute_final_obs": False} if tells else {}))

    def parsed(task: str, device: str, num_envs: int) -> Any:
        assert launched  # the simulator runs first
        config.num_envs = num_envs
        return config

    def launcher(**settings: Any) -> Any:
        launched.append(settings)
        return SimpleNamespace(app=object())

    monkeypatch.setitem(sys.modules, "isaaclab.app", SimpleNamespace(AppLauncher=launcher))
    monkeypatch.setitem(sys.modules, "isaaclab_tasks.utils", SimpleNamespace(parse_env_cfg=parsed))
    monkeypatch.setattr("gymnasium.make", lambda task, cfg: Grouped(cfg))
    env = isaaclab.make("Isaac-Toy-v0", num_envs=2, enable_cameras=True)
    assert launched == [{"headless": True, "device": "cuda:0", "enable_cameras": True}]
    config_of = EnvConfig(entry_point="toy:make", simulator="vector", envs=2, stages=1)
    batched, expected = stage(env, autoreset_of(config_of, env)), singles()
    for _ in range(12):
        (seen, got), (before, wanted) = step(batched), step(expected)
        np.testing.assert_array_equal(seen, before)
        for name in ("reward", "terminated", "truncated"):
            np.testing.assert_array_equal(getattr(got, name), getattr(wanted, name))
        unsaid = [msgspec.structs.replace(one, success=None) for one in wanted.episodes]
        assert got.episodes == unsaid
        assert (got.final_observation is None) == (wanted.final_observation is None)
        if got.final_observation is not None:
            last = wanted.final_observation if tells else before[got.truncated]
            np.testing.assert_array_equal(got.final_observation, last)
    env.close()


def test_isaac_lab_that_is_not_there_is_said() -> None:
    with pytest.raises(UsageError, match=r"Isaac Lab is not installed \(No module named"):
        isaaclab.make("Isaac-Toy-v0", num_envs=2)
