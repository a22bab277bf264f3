"""Runs whose observations have images and texts, and whose actions have several factors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import torch
from torch import Tensor, nn

from rlinf_async.backends.policies.base import (
    ActionDistribution,
    Evaluation,
    Policy,
    Step,
    register_policy,
)
from rlinf_async.backends.policies.config import PolicyConfig
from tests.jobs.embodied.envs import Walk
from tests.jobs.embodied.kit import ENTRY, Job


@register_policy("test_kitchen")
class KitchenPolicy(Policy[Mapping[str, Tensor]]):
    """Linear in the mean of the pixels, the length of the instruction and the arm."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self.spec = config.acts
        self.actor = nn.Linear(2 + config.observation_size, self.spec.outputs)
        self.critic = nn.Linear(2 + config.observation_size, 1)
        self.log_std = nn.Parameter(torch.zeros(2))

    @classmethod
    def misfit(cls, config: PolicyConfig) -> str:
        images = config.sees.of_kind("image")
        return "" if images else f"it needs an image, the environment shows {config.sees}"

    def act(
        self, observation: Mapping[str, Tensor], generator: torch.Generator | None = None
    ) -> Step:
        features = self._features(self.normalized(observation))
        distribution = ActionDistribution(self.spec, self.actor(features), self.log_std)
        with torch.no_grad():
            return Step(*distribution.sample(generator), self.critic(features)[:, 0].detach())

    @torch.no_grad()
    def mode(self, observation: Mapping[str, Tensor]) -> Tensor:
        outputs = self.actor(self._features(self.normalized(observation)))
        return ActionDistribution(self.spec, outputs, self.log_std).mode()

    @torch.no_grad()
    def value(self, observation: Mapping[str, Tensor]) -> Tensor:
        values: Tensor = self.critic(self._features(self.normalized(observation)))[:, 0]
        return values

    def forward(self, normalized: Mapping[str, Tensor], action: Tensor) -> Evaluation:
        features = self._features(normalized)
        distribution = ActionDistribution(self.spec, self.actor(features), self.log_std)
        value = self.critic(features).sum(-1)
        return Evaluation(distribution.log_prob(action), distribution.entropy(), value)

    def _features(self, observation: Mapping[str, Tensor]) -> Tensor:
        pixels, text = observation["camera"], observation["instruction"]
        assert pixels.dtype == torch.uint8
        mean = pixels.float().mean((1, 2, 3)) / 255.0
        length = (text > 0).sum(1) / text.shape[1]
        return torch.cat([torch.stack([mean, length], 1), observation["state"]], 1)


def test_a_policy_sees_images_and_texts_from_the_environment_to_the_trainer(job: Job) -> None:
    summary = job.succeed(
        *("--env.id", "Kitchen", "--env.entry_point", f"{ENTRY}:Kitchen"),
        *("--actor.fsdp.policy.name", "test_kitchen"),
    )
    assert summary.env_steps == 384
    assert all(float(row["skipped_updates"]) == 0.0 for row in job.iterations)


def test_an_mlp_says_that_it_cannot_see_pixels(job: Job) -> None:
    kitchen = ("--env.id", "Kitchen", "--env.entry_point", f"{ENTRY}:Kitchen")
    ended = job.train(*kitchen, "--actor.fsdp.policy.name", "mlp_gaussian")
    assert ended.code == 2
    assert "actor.fsdp.policy.name: an MLP takes one vector of numbers" in ended.err
    assert "image 'camera' [6, 6, 3], text 'instruction' [16]" in ended.err


def test_a_cnn_is_chosen_for_pixels_and_says_that_it_reads_no_text(job: Job) -> None:
    ended = job.train("--env.id", "Kitchen", "--env.entry_point", f"{ENTRY}:Kitchen")
    assert ended.code == 2
    assert "actor.fsdp.policy.name: policy 'cnn': a CNN reads no text" in ended.err


def test_a_policy_that_does_not_fit_says_why_before_anything_starts(job: Job) -> None:
    ended = job.train("--actor.fsdp.policy.name", "test_kitchen")
    assert ended.code == 2
    assert "policy 'test_kitchen': it needs an image, the environment shows state" in ended.err


class Levers(Walk):
    """Two choices and two switches pay for the right ones."""

    action_space = gymnasium.spaces.Tuple(  # type: ignore[assignment]
        [gymnasium.spaces.MultiDiscrete([3, 2]), gymnasium.spaces.MultiBinary(2)]
    )

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        shown, _, terminated, truncated, info = super().step([0.0])
        right = [a == b for a, b in zip((*action[0], *action[1]), (2, 0, 1, 0), strict=True)]
        info["is_success"] = all(right)
        return shown, float(sum(right)), terminated, truncated, info


def test_a_built_in_policy_learns_actions_of_several_factors(job: Job) -> None:
    summary = job.succeed(
        *("--env.id", "Levers", "--env.entry_point", "tests.jobs.embodied.test_spaces:Levers"),
        *("--training.total_steps", 1536, "--actor.fsdp.optimizer.lr", 0.01),
        *("--actor.ppo.epochs", 8, "--actor.advantage.gamma", 0.0),
    )
    assert summary.success_rate == 1.0
