"""An update of RLPD's critics and policy, against a plain torch script written from the paper.

Source: Ball et al. 2023, "Efficient Online Reinforcement Learning with Offline Data", algorithm 1
and appendix B: an ensemble with layer norm, a random subset of the targets, the mean of the
ensemble for the policy. Here the policy's gradient is that of the critics before the step.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rlinf_async.backends.fsdp.sac import SacBatch, SacTrainer
from rlinf_async.backends.sac_config import (
    SacLossConfig,
    SacOptimizerConfig,
    SacShardingConfig,
    SacTrainerConfig,
)
from rlinf_async.messages.embodied import ReplayBatch
from tests.backends.test_sac_trainer import POLICY, batch, parameters

RLPD = SacLossConfig(critics=5, target_critics=2, critic_layer_norm=True, tau=0.1)
LR, CRITIC_LR = 3e-3, 1e-2


def trainer(sac: SacLossConfig = RLPD) -> SacTrainer:
    optimizer = SacOptimizerConfig(lr=LR, value_lr=CRITIC_LR)
    return SacTrainer(
        SacTrainerConfig(sac=sac, fsdp=SacShardingConfig(optimizer=optimizer)), POLICY
    )


# ---- the script, from here


def mlp(sizes: list[int], norm: bool) -> Any:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [
            nn.Linear(inputs, outputs),
            *([nn.LayerNorm(outputs)] if norm else []),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers[: -2 if norm else -1])


class Script:
    """Five critics, their targets and an actor, as modules of their own."""

    def __init__(self) -> None:
        self.critics = [mlp([5, 8, 8, 1], norm=True) for _ in range(5)]
        self.targets = [mlp([5, 8, 8, 1], norm=True) for _ in range(5)]
        self.actor = mlp([3, 8, 8, 4], norm=False)
        self.log_alpha = nn.Parameter(torch.zeros(1))
        of_critics = [one for critic in self.critics for one in critic.parameters()]
        self.critic_optimizer = torch.optim.Adam(of_critics, CRITIC_LR)
        self.optimizer = torch.optim.Adam([*self.actor.parameters(), self.log_alpha], LR)

    def act(self, seen: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.actor(seen).chunk(2, -1)
        normal: Any = torch.distributions.Normal(mean, log_std.clamp(-20, 2).exp())
        unsquashed = mean + normal.stddev * noise
        action = unsquashed.tanh()
        return action, (normal.log_prob(unsquashed) - (1 - action**2).log()).sum(-1)

    @staticmethod
    def q(critic: nn.Module, seen: Tensor, action: Tensor) -> Tensor:
        value: Tensor = critic(torch.cat([seen, action], -1))
        return value.squeeze(-1)

    def update(self, drawn: SacBatch, policy: bool = True) -> tuple[float, float]:
        seen: Any = drawn.observation
        following: Any = drawn.next_observation
        assert drawn.target_critics is not None
        with torch.no_grad():
            action, log_prob = self.act(following, drawn.next_noise)
            subset = [self.targets[index] for index in drawn.target_critics.tolist()]
            least = torch.stack([self.q(one, following, action) for one in subset]).amin(0)
            target = drawn.reward + drawn.discount * (least - self.log_alpha.exp() * log_prob)
        values = [self.q(one, seen, drawn.action) for one in self.critics]
        critic_loss = torch.stack([0.5 * (value - target) ** 2 for value in values]).mean(1).sum()
        action, log_prob = self.act(seen, drawn.noise)
        mean = torch.stack([self.q(one, seen, action) for one in self.critics]).mean(0)
        actor_loss = (self.log_alpha.detach().exp() * log_prob - mean).mean()
        alpha_loss = -(self.log_alpha * (log_prob.detach() - 2.0)).mean()  # entropy target: -2
        self.optimizer.zero_grad()
        torch.autograd.backward(actor_loss + alpha_loss, retain_graph=True)
        self.critic_optimizer.zero_grad()
        torch.autograd.backward(critic_loss)
        self.critic_optimizer.step()
        if policy:
            self.optimizer.step()
        for target_critic, critic in zip(self.targets, self.critics, strict=True):
            for slow, fast in zip(target_critic.parameters(), critic.parameters(), strict=True):
                slow.data.lerp_(fast.data, 0.1)
        return critic_loss.item(), actor_loss.item()


# ---- to here


def state(script: Script) -> dict[str, Tensor]:
    """Its parameters under the trainer's names."""
    found: dict[str, Tensor] = {"log_entropy_coefficient": script.log_alpha}
    found |= {f"policy.actor.{n // 2}.{k}": v for n, layer in enumerate(script.actor)
              for k, v in layer.named_parameters()}  # fmt: skip
    for name, critics in (("critic", script.critics), ("target", script.targets)):
        for layer in range(3):
            linear = [one[3 * layer] for one in critics]
            found[f"{name}.weights.{layer}"] = torch.stack([one.weight.T for one in linear])
            found[f"{name}.biases.{layer}"] = torch.stack([one.bias[None] for one in linear])
            if layer < 2:
                norm = [one[3 * layer + 1] for one in critics]
                found[f"{name}.scales.{layer}"] = torch.stack([one.weight[None] for one in norm])
                found[f"{name}.shifts.{layer}"] = torch.stack([one.bias[None] for one in norm])
    return found


@torch.no_grad()
def same_start(one: SacTrainer) -> Script:
    """The script, with the trainer's weights: each of its tensors is a view of the script's."""
    script, begun = Script(), parameters(one)
    for number, layer in enumerate(script.actor):
        for name, value in layer.named_parameters():
            value.copy_(begun[f"policy.actor.{number // 2}.{name}"])
    for name, critics in (("critic", script.critics), ("target", script.targets)):
        for each, critic in enumerate(critics):
            for layer in range(3):
                critic[3 * layer].weight.copy_(begun[f"{name}.weights.{layer}"][each].T)
                critic[3 * layer].bias.copy_(begun[f"{name}.biases.{layer}"][each, 0])
    return script


@pytest.mark.parametrize("policy_every", [1, 2])
def test_updates_are_those_of_a_script_written_from_the_paper(
    policy_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trainer(msgspec.structs.replace(RLPD, policy_every=policy_every))
    script = same_start(one)
    share, drawn = one._share, list[SacBatch]()

    def kept(given: ReplayBatch) -> SacBatch:
        drawn.append(share(given))
        return drawn[-1]

    monkeypatch.setattr(one, "_share", kept)
    subsets = set()
    for number in range(4):
        done = one.step(batch(number))
        trains, subset = number % policy_every == 0, drawn[-1].target_critics
        critic_loss, actor_loss = script.update(drawn[-1], policy=trains)
        assert subset is not None
        subsets.add(tuple(subset.tolist()))
        assert done.metrics["critic_loss"] == pytest.approx(critic_loss, rel=1e-5)
        assert ("policy_loss" in done.metrics) is trains
        if trains:
            assert done.metrics["policy_loss"] == pytest.approx(actor_loss, rel=1e-5, abs=1e-5)
        found, wanted = parameters(one), state(script)
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value.detach(), atol=1e-5, rtol=1e-5, msg=name)
        assert {name for name, _ in one.manager.model.named_parameters()} <= wanted.keys()
    assert len(subsets) > 1
    assert all(len(set(subset)) == 2 for subset in subsets)


def test_each_half_is_measured() -> None:
    one = trainer()
    given = batch()
    demonstrated = given.demonstrated = np.arange(16) % 4 == 0
    model: Any = one.manager.model
    with torch.no_grad():
        values = model.critic(torch.from_numpy(given.observation), torch.from_numpy(given.action))
    done = one.step(given)
    mean, shown = values.mean(0), torch.from_numpy(demonstrated)
    metrics = done.metrics
    assert metrics["demonstrations_share"] == 0.25
    assert metrics["value_demonstrations"] == pytest.approx(float(mean[shown].mean()), abs=1e-6)
    assert metrics["value_own"] == pytest.approx(float(mean[~shown].mean()), abs=1e-6)
    assert metrics["error_own"] == pytest.approx(done.error[~demonstrated].mean())
    assert metrics["error_demonstrations"] == pytest.approx(done.error[::4].mean())


def test_the_critics_alone_are_trained_between_steps_of_the_policy(tmp_path: Path) -> None:
    sac = msgspec.structs.replace(RLPD, policy_every=3)
    one, moved = trainer(sac), []
    for number in range(5):
        before = parameters(one)
        one.step(batch(number))
        after = parameters(one)
        assert not torch.equal(before["critic.weights.0"], after["critic.weights.0"])
        moved.append(
            not torch.equal(before["policy.actor.0.weight"], after["policy.actor.0.weight"])
        )
        both = ("log_entropy_coefficient", "policy.actor.0.weight")
        assert len({torch.equal(before[name], after[name]) for name in both}) == 1
    assert moved == [True, False, False, True, False]
    one.save_checkpoint(tmp_path / "checkpoint")
    other = trainer(sac)
    other.load_checkpoint(tmp_path / "checkpoint")
    for each in (one, other):
        assert ["entropy" in each.step(batch(number)).metrics for number in (5, 6)] == [False, True]
    for name, value in parameters(one).items():
        torch.testing.assert_close(parameters(other)[name], value, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"critics": 0}, "critics is 0; it must be at least 1"),
        ({"target_critics": 0}, "target_critics is 0; it must be at least 1"),
        ({"target_critics": 3}, "target_critics is 3, but there are critics = 2: take at most"),
        ({"policy_every": 0}, "policy_every is 0; it must be at least 1"),
        ({"critics": 0, "cloning": 0.9}, "critics is 0; it must be at least 1: only a policy that"),
        ({"critics": 0, "cloning": 1.0, "policy_every": 2}, "policy_every is 2, but with critics"),
        ({"critics": 0, "cloning": 1.0, "target_critics": 1}, "target_critics is 1, but with crit"),
        ({"critics": 0, "cloning": 1.0, "tau": 0.1}, "tau is 0.1, but with critics = 0 nothing is"),
    ],
)
def test_numbers_that_cannot_be_are_named(wrong: dict[str, float], said: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=said):
        msgspec.convert(wrong, SacLossConfig)


def cloned(number: int) -> ReplayBatch:
    given = batch(number)
    shown = np.arange(16) % 4 == number % 4
    given.demonstrated, given.index = shown, np.where(shown, -1, given.index)
    given.action = given.action.clip(-0.9, 0.9)
    return given


def test_a_policy_that_clones_takes_the_steps_of_a_script_for_what_is_demonstrated() -> None:
    one = trainer(msgspec.structs.replace(RLPD, cloning=1.0))
    script, values = same_start(one), parameters(one)["critic.weights.0"]
    for number in range(3):
        given = cloned(number)
        rows = torch.from_numpy(given.demonstrated)
        mean, log_std = script.actor(torch.from_numpy(given.observation)[rows]).chunk(2, -1)
        squashed: Any = torch.distributions.TransformedDistribution(
            torch.distributions.Normal(mean, log_std.exp()),
            [torch.distributions.TanhTransform()],
        )
        loss = -squashed.log_prob(torch.from_numpy(given.action)[rows]).sum(-1).mean()
        script.optimizer.zero_grad()
        torch.autograd.backward(loss)
        script.optimizer.step()
        done = one.step(given)
        assert done.metrics["policy_loss"] == pytest.approx(loss.item(), rel=1e-4)
        for name, value in state(script).items():
            if name.startswith("policy."):
                torch.testing.assert_close(parameters(one)[name], value.detach(), atol=1e-5, rtol=0)
        assert done.metrics["entropy_coefficient"] == 1.0
    assert not torch.equal(parameters(one)["critic.weights.0"], values)


def test_without_critics_it_clones_as_it_does_beside_them_and_says_nothing_of_values() -> None:
    beside = trainer(msgspec.structs.replace(RLPD, cloning=1.0))
    alone = trainer(SacLossConfig(cloning=1.0, critics=0))
    assert all(name.startswith("policy.") for name in parameters(alone))
    for number in range(3):
        with_values, done = beside.step(cloned(number)), alone.step(cloned(number))
        assert done.metrics.keys() == {"policy_loss", "grad_norm", "demonstrations_share"}
        for name in ("policy_loss", "demonstrations_share"):
            assert done.metrics[name] == with_values.metrics[name]
    for name, value in parameters(alone).items():
        torch.testing.assert_close(value, parameters(beside)[name], rtol=0, atol=0)


def test_without_critics_a_batch_in_which_nobody_shows_anything_changes_nothing() -> None:
    alone = trainer(SacLossConfig(cloning=1.0, critics=0))
    before = parameters(alone)
    for unseen in (batch(), cloned(0)):
        if unseen.demonstrated is not None:  # a share of the whole batch that has none
            unseen.index = np.arange(len(unseen.index))
        assert alone.step(unseen).metrics["policy_loss"] == 0.0
    for name, value in parameters(alone).items():
        if name.startswith("policy.actor."):
            torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_a_share_of_cloning_is_a_share_of_the_loss_and_nothing_is_cloned_of_nobody() -> None:
    losses = []
    for share in (0.0, 0.25, 1.0):
        one = trainer(msgspec.structs.replace(RLPD, cloning=share))
        losses.append(one.step(cloned(0)).metrics["policy_loss"])
    assert losses[1] == pytest.approx(0.75 * losses[0] + 0.25 * losses[2], rel=1e-5)
    alone = trainer(msgspec.structs.replace(RLPD, cloning=1.0))
    before = parameters(alone)
    alone.step(batch())
    for name, value in parameters(alone).items():
        if name.startswith("policy.actor."):
            torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_what_is_always_done_the_same_way_does_not_outweigh_the_rest() -> None:
    model: Any = trainer().manager.model
    policy = model.policy
    with torch.no_grad():
        policy.actor[-1].bias[2:] = -10.0  # deviations
    seen, done = torch.randn(4, 3), torch.tensor([[1.0, 0.0]] * 4)
    found = policy.cloned(seen, done)
    mean = policy.outputs(policy.features(seen))[:, :2]
    unsquashed = torch.tensor([0.999, 0.0]).atanh()
    normal: Any = torch.distributions.Normal(mean, torch.full_like(mean, 0.1))
    wanted = normal.log_prob(unsquashed) - (1 - unsquashed.tanh() ** 2).log()
    torch.testing.assert_close(found, wanted.sum(-1), rtol=1e-4, atol=1e-4)
