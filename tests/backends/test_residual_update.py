"""A policy that corrects a frozen one: its updates against a plain torch script, what it executes.

Sources: Silver et al. 2018, "Residual Policy Learning"; Haarnoja et al. 2018, "Soft Actor-Critic".
Here the policy's gradient is that of the critics before the step.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rlinf_async.backends.fsdp.sac import SacBatch, SacTrainer
from rlinf_async.backends.policies.base import find_policy, to_tensors
from rlinf_async.backends.policies.config import Corrected, PolicyConfig
from rlinf_async.backends.sac_config import (
    SacLossConfig,
    SacOptimizerConfig,
    SacShardingConfig,
    SacTrainerConfig,
)
from rlinf_async.messages.embodied import ReplayBatch
from rlinf_async.messages.spaces import ObservationSpec, continuous
from tests.backends.test_sac_images import IMAGES, image_batch
from tests.backends.test_sac_trainer import batch, parameters

SCALE, LR, VALUE_LR = 0.25, 3e-3, 1e-2
MIDDLE, HALF = (1.0, -0.5), (2.0, 0.25)
"""of an environment whose actions the base's are clipped to"""
BASE = PolicyConfig(
    name="mlp_gaussian", observation_size=3, action_size=2, hidden_sizes=(8,), action_chunk=1
)
POLICY = PolicyConfig(
    name="mlp_residual",
    observation_size=3,
    action_size=2,
    hidden_sizes=(8, 8),
    corrected=Corrected(base=BASE, scale=SCALE, middle=MIDDLE, half=HALF),
)


def trainer(**sac: Any) -> SacTrainer:
    optimizer = SacOptimizerConfig(lr=LR, value_lr=VALUE_LR)
    config = SacTrainerConfig(
        sac=SacLossConfig(tau=0.1, **sac), fsdp=SacShardingConfig(optimizer=optimizer)
    )
    one = SacTrainer(config, POLICY)
    move_base(one)
    return one


@torch.no_grad()
def move_base(one: SacTrainer) -> None:
    """Give the base's actions a range beyond the bounds, and its observations statistics."""
    model: Any = one.manager.model
    base = model.policy.base
    base.actor[-1].weight.mul_(100.0)
    base.actor[-1].bias.copy_(torch.tensor(MIDDLE))
    base.observation_normalizer.mean.copy_(torch.tensor([0.5, -1.0, 0.0]))
    base.observation_normalizer.variance.copy_(torch.tensor([4.0, 0.5, 1.0]))


# ---- the script, from here


def mlp(sizes: list[int]) -> Any:
    layers = [one for pair in pairwise(sizes) for one in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class Script:
    """A frozen base, two critics, their targets and a residual actor, as modules of their own."""

    def __init__(self, begun: dict[str, Tensor]) -> None:
        self.base = {k.removeprefix("policy.base."): v for k, v in begun.items() if "base." in k}
        self.actor = mlp([5, 8, 8, 4])
        self.critics, self.targets = ([mlp([7, 8, 8, 1]) for _ in range(2)] for _ in range(2))
        self.log_alpha = nn.Parameter(torch.zeros(1))
        with torch.no_grad():
            for name, value in self.state().items():
                value.copy_(begun[name])
        of_critics = [one for critic in self.critics for one in critic.parameters()]
        self.critic_optimizer = torch.optim.Adam(of_critics, VALUE_LR)
        self.optimizer = torch.optim.Adam([*self.actor.parameters(), self.log_alpha], LR)

    def state(self) -> dict[str, Any]:
        """Its parameters under the trainer's names; those of critics one by one."""
        found: dict[str, Any] = {"log_entropy_coefficient": self.log_alpha.data}
        for name, value in self.actor.named_parameters():
            layer, kind = name.split(".")
            found[f"policy.actor.{int(layer) // 2}.{kind}"] = value.data
        return found | {
            name: _Stacked([critic[2 * layer] for critic in critics], kind)
            for of, critics in (("critic", self.critics), ("target", self.targets))
            for layer in range(3)
            for kind, name in (
                ("weight", f"{of}.weights.{layer}"),
                ("bias", f"{of}.biases.{layer}"),
            )
        }

    def base_action(self, seen: Tensor) -> Tensor:
        base = self.base
        deviation = base["observation_normalizer.variance"].float().add(1e-8).sqrt()
        normal = ((seen - base["observation_normalizer.mean"].float()) / deviation).clamp(-10, 10)
        hidden = (normal @ base["actor.0.weight"].T + base["actor.0.bias"]).tanh()
        action = hidden @ base["actor.2.weight"].T + base["actor.2.bias"]
        return ((action - torch.tensor(MIDDLE)) / torch.tensor(HALF)).clamp(-1, 1)

    def act(self, seen: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """The features, the executed action, and the log-prob of the residual."""
        base = self.base_action(seen)
        mean, log_std = self.actor(torch.cat([seen, base], -1)).chunk(2, -1)
        normal: Any = torch.distributions.Normal(mean, log_std.clamp(-20, 2).exp())
        unsquashed = mean + normal.stddev * noise
        residual = unsquashed.tanh()
        log_prob = (normal.log_prob(unsquashed) - (1 - residual**2).log()).sum(-1)
        return (base + SCALE * residual).clamp(-1, 1), log_prob

    def q(self, critic: nn.Module, seen: Tensor, action: Tensor) -> Tensor:
        value: Tensor = critic(torch.cat([seen, self.base_action(seen), action], -1))
        return value.squeeze(-1)

    def update(self, drawn: SacBatch) -> tuple[float, float]:
        seen: Any = drawn.observation
        following: Any = drawn.next_observation
        with torch.no_grad():
            action, log_prob = self.act(following, drawn.next_noise)
            least = torch.minimum(*(self.q(one, following, action) for one in self.targets))
            target = drawn.reward + drawn.discount * (least - self.log_alpha.exp() * log_prob)
        values = [self.q(one, seen, drawn.action) for one in self.critics]
        critic_loss = torch.stack([0.5 * (value - target) ** 2 for value in values]).mean(1).sum()
        action, log_prob = self.act(seen, drawn.noise)
        least = torch.minimum(*(self.q(one, seen, action) for one in self.critics))
        actor_loss = (self.log_alpha.detach().exp() * log_prob - least).mean()
        alpha_loss = -(self.log_alpha * (log_prob.detach() - 2.0)).mean()  # entropy target: -2
        self.optimizer.zero_grad()
        torch.autograd.backward(actor_loss + alpha_loss, retain_graph=True)
        self.critic_optimizer.zero_grad()
        torch.autograd.backward(critic_loss)
        self.critic_optimizer.step()
        self.optimizer.step()
        for slow, fast in zip(self.targets, self.critics, strict=True):
            for one, new in zip(slow.parameters(), fast.parameters(), strict=True):
                one.data.lerp_(new.data, 0.1)
        return critic_loss.item(), actor_loss.item()


# ---- to here


class _Stacked:
    """A tensor of the trainer, which the script has in two layers."""

    def __init__(self, layers: list[Any], kind: str) -> None:
        self._each = [getattr(one, kind) for one in layers]

    def copy_(self, whole: Tensor) -> None:
        for one, value in zip(self._each, whole, strict=True):
            one.copy_(value.T.reshape(one.shape))

    def whole(self) -> Tensor:
        return torch.stack([one.data.T if one.ndim == 2 else one.data[None] for one in self._each])


def test_updates_are_those_of_a_script_written_from_the_papers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = trainer()
    script, begun = Script(parameters(one)), parameters(one)
    found = begun
    share, drawn = one._share, list[SacBatch]()

    def kept(given: ReplayBatch) -> SacBatch:
        drawn.append(share(given))
        return drawn[-1]

    monkeypatch.setattr(one, "_share", kept)
    for number in range(4):
        metrics = one.step(batch(number)).metrics
        critic_loss, actor_loss = script.update(drawn[-1])
        assert metrics["critic_loss"] == pytest.approx(critic_loss, rel=1e-5)
        assert metrics["policy_loss"] == pytest.approx(actor_loss, rel=1e-5, abs=1e-5)
        found = parameters(one)
        for name, value in script.state().items():
            wanted = value.whole() if isinstance(value, _Stacked) else value
            torch.testing.assert_close(found[name], wanted, atol=1e-5, rtol=1e-5, msg=name)
    left = found.keys() - script.state().keys() - {"policy.uniform"}
    of_base = {name for name in left if name.startswith("policy.base.")}
    assert len(of_base) > 10
    for name in of_base:
        torch.testing.assert_close(found[name], begun[name], rtol=0, atol=0)
    held = script.base_action(torch.from_numpy(batch().observation)).abs()
    assert 0.1 < float((held == 1.0).float().mean()) < 0.9  # some of the base's are held


def test_it_begins_as_its_base_and_never_leaves_it_by_more_than_the_scale() -> None:
    one = trainer()
    policy: Any = one.manager.model.policy
    policy.train()
    assert not policy.base.training
    seen = torch.from_numpy(np.random.default_rng(0).standard_normal((256, 3)).astype(np.float32))
    own = policy.base.mode(seen)
    own = ((own - torch.tensor(MIDDLE)) / torch.tensor(HALF)).clamp(-1.0, 1.0)
    torch.testing.assert_close(policy.mode(seen), own, atol=1e-5, rtol=1e-5)
    for uniform in (True, False):
        policy.uniform.fill_(uniform)
        away = (policy.act(seen).action - own).abs()
        assert float(away.max()) <= SCALE + 1e-5
        assert float(away.mean()) > 0.2 * SCALE
    for number in range(3):
        one.step(batch(number))
    assert float((policy.mode(seen) - own).abs().max()) > 1e-4


def test_what_was_executed_is_cloned_and_valued_by_its_residual() -> None:
    policy: Any = trainer().manager.model.policy
    policy.uniform.fill_(False)
    seen, noise = torch.randn(64, 3), 0.5 * torch.randn(64, 2)
    features = policy.features(seen)
    action, log_prob = policy.sample(features, noise)
    inside = (action.abs() < 1.0).all(1)
    assert inside.any()
    again = policy.log_prob(features, action)
    torch.testing.assert_close(again[inside], log_prob[inside], atol=1e-3, rtol=1e-3)
    far = policy.cloned(features, -action.sign())  # further than the scale reaches: the most it can
    assert bool(torch.isfinite(far).all())


def test_images_are_corrected_and_the_base_sees_them_with_an_encoder_of_its_own() -> None:
    size = IMAGES.action_size
    spec: ObservationSpec = IMAGES.observation
    base = msgspec.structs.replace(
        IMAGES, name="cnn", hidden_sizes=(8,), channels=(4,), action=continuous(size)
    )
    corrected = Corrected(base=base, scale=SCALE, middle=(0.0,) * size, half=(1.0,) * size)
    config = msgspec.structs.replace(
        IMAGES, name="cnn_residual", action=continuous(size), corrected=corrected
    )
    given = image_batch(0)
    seen = to_tensors(given.observation, torch.device("cpu"))
    policy: Any = find_policy("cnn_residual")(config)
    assert spec.parts
    torch.testing.assert_close(policy.mode(seen), policy.base.mode(seen).clamp(-1.0, 1.0))
    one = SacTrainer(SacTrainerConfig(sac=SacLossConfig(image_shift=1)), config)
    before = parameters(one)
    one.step(given)
    moved = {name for name, value in parameters(one).items() if not value.equal(before[name])}
    assert "policy.encoder.encoders.0.0.weight" in moved or any("policy.enc" in n for n in moved)
    assert not any(name.startswith("policy.base.") for name in moved)


def test_a_policy_that_corrects_none_is_refused() -> None:
    with pytest.raises(ValueError, match="take job = 'embodied_sac'"):
        find_policy("mlp_residual")(msgspec.structs.replace(POLICY, corrected=None))
