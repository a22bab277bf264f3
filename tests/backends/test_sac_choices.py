"""Soft actor-critic where an action is one choice, against a plain torch script written from the
paper.

Source: Christodoulou 2019, "Soft Actor-Critic for Discrete Action Settings", equations 10 to 12.
The policy's gradient is that of the critics before the step.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rlinf_async.backends.fsdp.sac import SacTrainer
from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.backends.policies.serving import serve_policy
from rlinf_async.backends.sac_config import (
    SacLossConfig,
    SacOptimizerConfig,
    SacShardingConfig,
    SacTrainerConfig,
)
from rlinf_async.messages.embodied import ReplayBatch
from rlinf_async.messages.spaces import choices
from tests.backends.test_sac_trainer import SIZE, batch, parameters

CHOICES = 4
POLICY = PolicyConfig(
    name="mlp_soft_categorical",
    observation_size=3,
    action_size=CHOICES,
    action=choices(CHOICES),
    hidden_sizes=(8, 8),
)
LR, TAU = 3e-3, 0.1


def chosen(number: int = 0) -> ReplayBatch:
    """A batch of choices."""
    one = batch(number)
    one.action = np.random.default_rng(number).integers(0, CHOICES, SIZE)
    return one


# ---- the script, from here


def mlp() -> Any:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise([3, 8, 8, CHOICES]):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Script:
    """Two critics, their targets and an actor, as modules of their own."""

    def __init__(self) -> None:
        self.critics, self.targets = [mlp(), mlp()], [mlp(), mlp()]
        self.actor = mlp()
        self.log_alpha = nn.Parameter(torch.zeros(1))
        of_critics = [one for critic in self.critics for one in critic.parameters()]
        learnt = [*of_critics, *self.actor.parameters(), self.log_alpha]
        self.optimizer = torch.optim.Adam(learnt, LR)

    def update(self, given: ReplayBatch) -> tuple[float, float, float]:
        seen = torch.from_numpy(given.observation)
        following = torch.from_numpy(given.next_observation)
        taken: Any = torch.from_numpy(given.action)
        alpha = self.log_alpha.detach().exp()
        with torch.no_grad():
            then: Any = torch.distributions.Categorical(logits=self.actor(following))
            least = torch.minimum(*(one(following) for one in self.targets))
            value = (then.probs * (least - alpha * then.logits)).sum(-1)
            target = torch.from_numpy(given.reward) + torch.from_numpy(given.discount) * value
        errors = [one(seen)[range(SIZE), taken] - target for one in self.critics]
        critic_loss = torch.stack([0.5 * (one**2).mean() for one in errors]).sum()
        odds: Any = torch.distributions.Categorical(logits=self.actor(seen))
        with torch.no_grad():
            least = torch.minimum(*(one(seen) for one in self.critics))
        actor_loss = (odds.probs * (alpha * odds.logits - least)).sum(-1).mean()
        entropy = odds.entropy().mean()
        aimed_at = 0.98 * math.log(CHOICES)
        alpha_loss = (self.log_alpha * (entropy.detach() - aimed_at)).mean()
        self.optimizer.zero_grad()
        torch.autograd.backward(critic_loss + actor_loss + alpha_loss)
        self.optimizer.step()
        for slow_critic, critic in zip(self.targets, self.critics, strict=True):
            for slow, fast in zip(slow_critic.parameters(), critic.parameters(), strict=True):
                slow.data.lerp_(fast.data, TAU)
        return critic_loss.item(), actor_loss.item(), entropy.item()


# ---- to here


def pairs(script: Script, state: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The script's parameters, each beside the trainer's."""
    found: list[tuple[Tensor, Tensor]] = []
    found.append((script.log_alpha, state["log_entropy_coefficient"]))
    for number, layer in enumerate(script.actor[::2]):
        found += [(v, state[f"policy.actor.{number}.{k}"]) for k, v in layer.named_parameters()]
    for name, critics in (("critic", script.critics), ("target", script.targets)):
        for each, critic in enumerate(critics):
            for number, layer in enumerate(critic[::2]):
                found.append((layer.weight, state[f"{name}.weights.{number}"][each].T))
                found.append((layer.bias, state[f"{name}.biases.{number}"][each, 0]))
    return found


def trainer() -> SacTrainer:
    optimizer = SacOptimizerConfig(lr=LR, value_lr=LR)
    fsdp = SacShardingConfig(optimizer=optimizer)
    return SacTrainer(SacTrainerConfig(sac=SacLossConfig(tau=TAU), fsdp=fsdp), POLICY)


def test_updates_are_those_of_a_script_written_from_the_paper() -> None:
    one, script = trainer(), Script()
    with torch.no_grad():
        for own, begun in pairs(script, parameters(one)):
            own.copy_(begun)
    for number in range(4):
        done = one.step(chosen(number)).metrics
        critic_loss, actor_loss, entropy = script.update(chosen(number))
        assert done["critic_loss"] == pytest.approx(critic_loss, rel=1e-5)
        assert done["policy_loss"] == pytest.approx(actor_loss, rel=1e-5, abs=1e-5)
        assert done["entropy"] == pytest.approx(entropy, rel=1e-5)
        for own, found in pairs(script, parameters(one)):
            torch.testing.assert_close(own.detach(), found, atol=1e-5, rtol=1e-5)


def test_it_learns_the_best_choice_of_each_state() -> None:
    """Whoever chooses the number of the largest of three values gets 1: a bandit."""
    sac = SacLossConfig(entropy_coefficient=0.01)
    fsdp = SacShardingConfig(optimizer=SacOptimizerConfig(lr=3e-3, value_lr=3e-3))
    one = SacTrainer(SacTrainerConfig(sac=sac, fsdp=fsdp), POLICY)
    for number in range(600):
        given = chosen(number)
        given.reward = (given.action == given.observation.argmax(1)).astype(np.float32)
        given.discount = np.zeros(SIZE, np.float32)
        one.step(given)
    server: Any = serve_policy(POLICY)
    server.load(one.publish())
    seen = np.random.default_rng(1).standard_normal((200, 3)).astype(np.float32)
    found = server.policy.mode(torch.from_numpy(seen)).numpy()
    assert (found == seen.argmax(1)).mean() > 0.8


def test_before_it_has_learnt_all_choices_are_alike() -> None:
    server: Any = serve_policy(POLICY)
    answer = server.act(np.random.default_rng(0).standard_normal((2000, 3)).astype(np.float32))
    assert answer.action.dtype == np.int64
    np.testing.assert_allclose(answer.log_prob, -math.log(CHOICES), atol=1e-6)
    shares = np.bincount(answer.action, minlength=CHOICES) / 2000
    np.testing.assert_allclose(shares, 1 / CHOICES, atol=0.05)


def test_a_policy_of_other_actions_is_refused() -> None:
    other = msgspec.structs.replace(POLICY, name="mlp_squashed_gaussian")
    with pytest.raises(ValueError, match="mlp_squashed_gaussian"):
        SacTrainer(SacTrainerConfig(), other)
