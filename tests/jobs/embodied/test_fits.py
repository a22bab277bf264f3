"""Every policy with every space is either what its name says, or refused by ``check``."""

from __future__ import annotations

import importlib.util
import itertools
from typing import Any

import gymnasium
import msgspec
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlinf_async.backends.fsdp.config import EmbodiedTrainerConfig, FSDPConfig
from rlinf_async.backends.parts import policy_backends
from rlinf_async.backends.policies.base import find_policy, to_tensors
from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.backends.policies.mlp import MlpGaussianPolicy
from rlinf_async.config import ConfigError
from rlinf_async.messages.converting import Bounds
from rlinf_async.runtime.jobs.embodied import EmbodiedConfig, EmbodiedPPO, EmbodiedTrainingConfig
from rlinf_async.runtime.jobs.embodied.settings import EmbodiedClusterConfig, described, fitted
from rlinf_async.runtime.jobs.embodied_sac.config import SacConfig, SacTrainingConfig
from rlinf_async.runtime.jobs.embodied_sac.job import EmbodiedSAC
from rlinf_async.workers.env import EnvConfig
from rlinf_async.workers.env.make import make_env
from rlinf_async.workers.env.worker import Environments
from rlinf_async.workers.replay.worker import ReplayConfig
from tests.jobs.embodied.kit import Job

HERE = EmbodiedClusterConfig(backend="local", rollout_workers=1)
"""environments are asked in this process"""

IMAGE = spaces.Box(0, 255, (16, 16, 3), np.uint8)
SEEN: dict[str, spaces.Space[Any]] = {
    "vector": spaces.Box(-np.inf, np.inf, (3,), np.float64),
    "scalar": spaces.Box(-1, 1, (), np.float32),
    "choice": spaces.Discrete(3, start=-1),
    "image": IMAGE,
    "image and state": spaces.Dict({"camera": IMAGE, "arm": spaces.Box(-1, 1, (2,))}),
    "image and text": spaces.Dict({"camera": IMAGE, "task": spaces.Text(4, min_length=1)}),
    "text": spaces.Dict({"task": spaces.Text(4, min_length=1), "arm": spaces.Box(-1, 1, (2,))}),
}
FLAT = ("vector", "scalar", "choice")
PICTURES = ("image", "image and state")

BOXES: dict[str, spaces.Space[Any]] = {
    "box": spaces.Box(-1, 1, (2,)),
    "float64": spaces.Box(-0.1, 0.1, (2,), np.float64),
    "integers": spaces.Box(0, 255, (3,), np.uint8),
    "large integers": spaces.Box(0, 2**31 - 1, (1,), np.int32),
    "no dimension": spaces.Box(-1, 1, ()),
    "matrix": spaces.Box(-1, 1, (2, 2)),
    "each its own": spaces.Box(np.array([0, -2], np.float32), np.array([1, 5], np.float32)),
    "tuple of a box": spaces.Tuple([spaces.Box(-1, 1, (2,))]),
}
OPEN: dict[str, spaces.Space[Any]] = {
    "unbounded": spaces.Box(-np.inf, np.inf, (2,)),
    "half bounded": spaces.Box(0, np.inf, (2,)),
}
CHOICE: dict[str, spaces.Space[Any]] = {
    "discrete": spaces.Discrete(3),
    "discrete from 5": spaces.Discrete(3, start=5),
    "dict of a discrete": spaces.Dict({"turn": spaces.Discrete(2)}),
}
CHOICES: dict[str, spaces.Space[Any]] = {
    "multidiscrete": spaces.MultiDiscrete([2, 3], start=[1, -1]),
    "multibinary": spaces.MultiBinary(2),
    "tuple of choices": spaces.Tuple([spaces.Discrete(2), spaces.MultiBinary(1)]),
}
MIXED: dict[str, spaces.Space[Any]] = {
    "dict": spaces.Dict({"push": spaces.Box(-1, 1, (2,)), "grip": spaces.Discrete(2, start=1)}),
    "two boxes": spaces.Tuple([spaces.Box(-1, 1, (1,)), spaces.Box(0, 9, (1,), np.int8)]),
}
TAKEN = BOXES | OPEN | CHOICE | CHOICES | MIXED

POLICIES = (
    *("auto", "mlp_gaussian", "mlp_categorical", "mlp_factored", "cnn", "gru"),
    *("mlp_squashed_gaussian", "cnn_squashed_gaussian", "vision_language_action"),
    *("mlp_soft_categorical", "cnn_soft_categorical", "flow_action"),
)


class Spaces(gymnasium.Env[Any, Any]):
    """Shows samples of one space, and takes actions of another alone."""

    def __init__(self, seen: str, taken: str) -> None:
        self.observation_space, self.action_space = SEEN[seen], TAKEN[taken]
        self.observation_space.seed(0)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        return self.observation_space.sample(), 0.0, False, False, {}


def right(policy: str, seen: str, taken: str, mode: Bounds) -> bool:
    """Whether the combination has a meaning, by hand."""
    if mode == "rescale" and (taken in CHOICE | CHOICES | OPEN):
        return False
    if policy == "auto":
        return seen in (*FLAT, *PICTURES)
    if policy == "cnn":
        return seen in PICTURES
    if policy == "vision_language_action":
        sees = seen in (*PICTURES, "image and text")
        there = importlib.util.find_spec("transformers") is not None
        return sees and taken in BOXES and mode == "rescale" and there
    if policy == "flow_action":
        return seen not in ("text",) and taken in BOXES and mode == "rescale"
    acts: dict[str, dict[str, spaces.Space[Any]]] = {
        "mlp_gaussian": BOXES | OPEN,
        "mlp_categorical": CHOICE,
        "mlp_factored": TAKEN,
        "gru": TAKEN,
    }
    return seen in FLAT and taken in acts.get(policy, {})


def configured(policy: PolicyConfig, seen: str, taken: str, mode: Bounds) -> EmbodiedConfig:
    return EmbodiedConfig(
        env=EnvConfig(
            entry_point=f"{__name__}:Spaces",
            kwargs={"seen": seen, "taken": taken},
            actions=mode,
            envs=4,
            stages=1,
        ),
        training=EmbodiedTrainingConfig(total_steps=64, steps_per_iteration=16),
        cluster=HERE,
        actor=EmbodiedTrainerConfig(
            fsdp=FSDPConfig(policy=policy),
            ppo=msgspec.structs.replace(EmbodiedTrainerConfig().ppo, minibatch_size=16),
        ),
    )


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_acts_in_its_spaces_as_its_name_says_or_is_refused(policy: str, seen: str) -> None:
    wrong: list[str] = []
    for taken in TAKEN:
        for mode in ("clip", "rescale"):
            config = configured(PolicyConfig(name=policy), seen, taken, mode)
            try:
                EmbodiedPPO().check(config)
            except ConfigError:
                accepted = False
            else:
                accepted = True
                _act(config)
            if accepted != right(policy, seen, taken, mode):
                wrong.append(f"{policy}, {seen}, {taken}, {mode}: accepted is {accepted}")
    assert not wrong


@pytest.mark.parametrize("seen", SEEN)
def test_soft_actor_critic_takes_bounded_boxes_and_choices_and_reads_no_text(seen: str) -> None:
    wrong: list[str] = []
    modes: tuple[Bounds, ...] = ("clip", "rescale")
    for taken, mode in itertools.product(TAKEN, modes):
        config = SacConfig(
            env=configured(PolicyConfig(), seen, taken, mode).env,
            training=SacTrainingConfig(total_steps=640, steps_per_iteration=16),
            replay=ReplayConfig(capacity=1000),
            cluster=HERE,
        )
        try:
            EmbodiedSAC().check(config)
        except ConfigError:
            accepted = False
        else:
            accepted = True
        acts = taken in ((*BOXES, "two boxes") if mode == "rescale" else CHOICE)
        if accepted != (seen in (*FLAT, *PICTURES) and acts):
            wrong.append(f"{seen}, {taken}, {mode}: accepted is {accepted}")
    assert not wrong


def _act(config: EmbodiedConfig) -> None:
    """Act for two steps; the policy's own log-probs of its actions are those that it acted with."""
    full = fitted(config, described(config))
    policy = full.acting_policy
    if config.actor.fsdp.policy.name != "auto":
        assert policy.name == config.actor.fsdp.policy.name
    if policy.name == "vision_language_action":  # tests/backends/vision_language builds it
        return
    backend: Any = policy_backends.load("torch").make(policy, 0, "cpu")
    stage = Environments(full.env, rank=0, incarnation=0).stage(0)
    stage.reset()
    for _ in range(2):
        answer = backend.act(stage.observation)
        if policy.name != "gru":  # which is evaluated over whole sequences
            drawn = answer.action if answer.chain is None else answer.chain
            again = backend._policy.evaluate(
                to_tensors(stage.observation, torch.device("cpu")), torch.from_numpy(drawn)
            )
            np.testing.assert_allclose(again.log_prob.detach(), answer.log_prob, atol=1e-4)
        stage.step(answer.action)
    stage.close()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            ("--actor.fsdp.policy.name", "mlp_gaussian"),
            "name: 'mlp_gaussian' draws a vector of numbers, but the environment takes 2 choices",
        ),
        (("--env.actions", "rescale"), "CartPole-v1 takes 2 choices: leave it out"),
        (
            ("--env.id", "Pendulum-v1", "--actor.fsdp.policy.name", "mlp_categorical"),
            "'mlp_categorical' draws one choice, but the environment takes 1 number: leave",
        ),
        (
            ("--actor.normalize_observation", "false", "--actor.fsdp.policy.observation_clip", "5"),
            "5.0 is the bound of normalised observations",
        ),
        (("--actor.fsdp.policy.initial_log_std", "-1"), "would ignore it for actions of 2 choices"),
        (
            ("--actor.fsdp.policy.name", "mlp_squashed_gaussian", "--env.id", "Pendulum-v1"),
            "it is for job = 'embodied_sac'",
        ),
    ],
)
def test_check_says_what_would_be_right(job: Job, settings: tuple[str, ...], said: str) -> None:
    ended = job.command("check", job.file, *settings)
    assert ended.code == 2
    assert said in ended.err
    assert len(ended.err.splitlines()) == 1


def test_a_policy_that_is_derived_is_refused_as_its_base_is() -> None:
    config = configured(PolicyConfig(name=f"{__name__}:Derived"), "vector", "discrete", "clip")
    with pytest.raises(ConfigError, match="'mlp_gaussian' draws a vector of numbers"):
        EmbodiedPPO().check(config)
    assert find_policy(config.actor.fsdp.policy.name) is Derived


@pytest.mark.parametrize(
    ("policy", "seen"),
    [*((name, "vector") for name in ("mlp_gaussian", "mlp_factored", "gru")), ("cnn", PICTURES[1])],
)
@pytest.mark.parametrize("normalize", [True, False])
def test_only_normalised_observations_are_held_within_a_bound(
    policy: str, seen: str, normalize: bool
) -> None:
    config = configured(PolicyConfig(name=policy), seen, "box", "clip")
    actor = msgspec.structs.replace(config.actor, normalize_observation=normalize)
    full = fitted(msgspec.structs.replace(config, actor=actor), described(config))
    backend: Any = policy_backends.load("torch").make(full.acting_policy, 0, "cpu")
    size = full.acting_policy.observation_size
    counts = np.array([[123_456.0, -98_765.25, 3.5][:size]], np.float32)
    shown = torch.from_numpy(counts)
    if policy == "cnn":
        image = torch.zeros((1, 16, 16, 3), dtype=torch.uint8)
        got = backend._policy.normalized({"camera": image, "state": shown})["state"]
    else:
        got = backend._policy.normalized(shown)
    wanted = np.clip(counts, -10, 10) if normalize else counts
    np.testing.assert_array_equal(got.numpy(), wanted)
    # The same where arrays are computed with.
    as_array = backend._policy.observation_normalizer.of_array(counts)
    np.testing.assert_array_equal(as_array, wanted)


class Derived(MlpGaussianPolicy):
    """Somebody's own."""


def test_a_chunk_is_a_vector_of_numbers_too() -> None:
    config = configured(PolicyConfig(name="mlp_gaussian"), "vector", "float64", "clip")
    chunked = msgspec.structs.replace(config.env, action_chunk=4)
    _act(msgspec.structs.replace(config, env=chunked))
    assert make_env(chunked).action_space.dtype == np.float64
