"""Updates from data alone, against a plain torch script written from the papers, and on two ranks.

Sources: Kostrikov et al. 2021, equations 5 to 7; Nair et al. 2020 (AWAC), equations 5 and 8. Here
all losses are of the weights before the step.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from rlinf_async.backends.fsdp.offline import OfflineTrainer
from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.backends.sac_config import (
    OfflineLossConfig,
    OfflineTrainerConfig,
    SacOptimizerConfig,
    SacShardingConfig,
)
from rlinf_async.messages.embodied import ReplayBatch
from tests.backends.fsdp_helpers import in_processes, load_result, save_result
from tests.backends.test_sac_choices import POLICY as CHOOSING
from tests.backends.test_sac_choices import chosen
from tests.backends.test_sac_images import IMAGES, image_batch
from tests.backends.test_sac_ranks import share
from tests.backends.test_sac_trainer import POLICY, batch

BOUNDED = msgspec.structs.replace(POLICY, name="mlp_bounded_gaussian")
PICTURES = msgspec.structs.replace(IMAGES, name="cnn_bounded_gaussian")
LR, VALUE_LR = 3e-3, 1e-2
IQL = OfflineLossConfig(tau=0.1, expectile=0.8, inverse_temperature=2.0, largest_weight=3.0)
AWAC = OfflineLossConfig(tau=0.1, algorithm="awac", inverse_temperature=2.0, largest_weight=3.0)


def trainer(
    losses: OfflineLossConfig, policy: PolicyConfig = BOUNDED, world: int = 1, rank: int = 0
) -> OfflineTrainer:
    optimizer = SacOptimizerConfig(lr=LR, value_lr=VALUE_LR)
    config = OfflineTrainerConfig(offline=losses, fsdp=SacShardingConfig(optimizer=optimizer))
    return OfflineTrainer(config, policy, world, rank)


# ---- the script, from here


def mlp(sizes: list[int]) -> Any:
    layers = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class Script:
    """Two critics, their targets, a value and an actor, as modules of their own."""

    def __init__(self, losses: OfflineLossConfig) -> None:
        self.losses = losses
        self.critics, self.targets = ([mlp([5, 8, 8, 1]) for _ in range(2)] for _ in range(2))
        self.value, self.actor = mlp([3, 8, 8, 1]), mlp([3, 8, 8, 2])
        self.log_std = nn.Parameter(torch.zeros(2))
        valued = [one for module in (*self.critics, self.value) for one in module.parameters()]
        self.values_optimizer = torch.optim.Adam(valued, VALUE_LR)
        self.optimizer = torch.optim.Adam([*self.actor.parameters(), self.log_std], LR)

    @staticmethod
    def q(critics: list[Any], seen: Tensor, action: Tensor) -> Tensor:
        return torch.stack([one(torch.cat([seen, action], -1)).squeeze(-1) for one in critics])

    def drawn(self, seen: Tensor, noise: Tensor) -> Tensor:
        mean: Tensor = self.actor(seen).tanh()
        return (mean + self.log_std.exp() * noise).clamp(-1, 1)

    def update(self, given: Any) -> dict[str, float]:
        seen, following = given.observation, given.next_observation
        iql = self.losses.algorithm == "iql"
        with torch.no_grad():
            if iql:
                next_value = self.value(following).squeeze(-1)
            else:
                acted = self.drawn(following, given.next_noise)
                next_value = self.q(self.targets, following, acted).amin(0)
            target = given.reward + given.discount * next_value
        critic_loss = (0.5 * (self.q(self.critics, seen, given.action) - target) ** 2).mean(1).sum()
        value_loss = torch.zeros(())
        if iql:
            best = self.q(self.targets, seen, given.action).amin(0).detach()
            value = self.value(seen).squeeze(-1)
            over = best - value
            expectile = self.losses.expectile
            value_loss = ((expectile - (over < 0).float()).abs() * over**2).mean()
            advantage = over.detach()
        else:
            with torch.no_grad():
                own = self.q(self.critics, seen, self.drawn(seen, given.noise)).amin(0)
                advantage = self.q(self.critics, seen, given.action).amin(0) - own
        weight = (2.0 * advantage).exp().clamp(max=3.0)
        normal: Any = torch.distributions.Normal(self.actor(seen).tanh(), self.log_std.exp())
        actor_loss = -(weight * normal.log_prob(given.action).sum(-1)).mean()
        self.values_optimizer.zero_grad()
        self.optimizer.zero_grad()
        torch.autograd.backward(critic_loss + value_loss + actor_loss)
        self.values_optimizer.step()
        self.optimizer.step()
        for slow, fast in zip(self.targets, self.critics, strict=True):
            for kept, new in zip(slow.parameters(), fast.parameters(), strict=True):
                kept.data.lerp_(new.data, 0.1)
        return {
            "critic_loss": critic_loss.item(),
            "policy_loss": actor_loss.item(),
            "weight": weight.mean().item(),
            **({"value_loss": value_loss.item()} if iql else {}),
        }


# ---- to here


def state(script: Script) -> dict[str, Tensor]:
    """Its parameters under the trainer's names."""
    found: dict[str, Tensor] = {"policy.log_std": script.log_std}
    for number in range(3):
        layer = script.actor[2 * number]
        found[f"policy.actor.{number}.weight"] = layer.weight
        found[f"policy.actor.{number}.bias"] = layer.bias
        groups = [("critic", script.critics), ("target", script.targets)]
        groups += [("value", [script.value])] * (script.losses.algorithm == "iql")
        for name, modules in groups:
            linear = [one[2 * number] for one in modules]
            found[f"{name}.weights.{number}"] = torch.stack([one.weight.T for one in linear])
            found[f"{name}.biases.{number}"] = torch.stack([one.bias[None] for one in linear])
    return found


@torch.no_grad()
def same_start(one: OfflineTrainer) -> Script:
    script, begun = Script(one.losses), one.manager.model.state_dict()
    for number in range(3):
        layer = script.actor[2 * number]
        layer.weight.copy_(begun[f"policy.actor.{number}.weight"])
        layer.bias.copy_(begun[f"policy.actor.{number}.bias"])
        groups = [("critic", script.critics), ("target", script.targets)]
        groups += [("value", [script.value])] * (script.losses.algorithm == "iql")
        for name, modules in groups:
            for at, module in enumerate(modules):
                module[2 * number].weight.copy_(begun[f"{name}.weights.{number}"][at].T)
                module[2 * number].bias.copy_(begun[f"{name}.biases.{number}"][at, 0])
    return script


@pytest.mark.parametrize("losses", [IQL, AWAC], ids=["iql", "awac"])
def test_updates_are_those_of_a_script_written_from_the_papers(
    losses: OfflineLossConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trainer(losses)
    script = same_start(one)
    shared, drawn = one._share, list[Any]()

    def kept(given: ReplayBatch) -> Any:
        drawn.append(shared(given))
        return drawn[-1]

    monkeypatch.setattr(one, "_share", kept)
    columns = set[str]()
    for number in range(6):
        done = one.step(batch(number))
        columns |= set(done.metrics)
        wanted = script.update(drawn[-1])
        for name, value in wanted.items():
            assert done.metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
        found = one.manager.model.state_dict()
        for name, tensor in state(script).items():
            torch.testing.assert_close(found[name], tensor.detach(), atol=1e-5, rtol=1e-5, msg=name)
    assert {name for name, _ in one.manager.model.named_parameters()} <= state(script).keys()
    assert ("value_loss" in columns) is (losses.algorithm == "iql")


KINDS = {
    "iql": (IQL, BOUNDED, batch),
    "awac of choices": (AWAC, CHOOSING, chosen),
    "iql of choices": (IQL, CHOOSING, chosen),
    "images": (IQL, PICTURES, image_batch),
}


def learn(rank: int, world: int, folder: Path, kinds: list[str]) -> None:
    found = {}
    for kind in kinds:
        losses, policy, draw = KINDS[kind]
        one = trainer(losses, policy, world, rank)
        steps = [one.step(share(draw(number), world, rank)) for number in range(5)]
        found[kind] = {
            "metrics": [dict(step.metrics) for step in steps],
            "state": one.manager.get_model_state_dict(everywhere=True),
        }
    save_result(folder, rank, found)


def test_two_ranks_take_the_steps_of_one(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    learn(0, 1, tmp_path / "one", [*KINDS])
    alone = load_result(tmp_path / "one", 0)
    for rank in in_processes(learn, 2, tmp_path / "two", [*KINDS]):
        for kind, wanted in alone.items():
            for step, expected in zip(rank[kind]["metrics"], wanted["metrics"], strict=True):
                assert step == pytest.approx(expected, abs=1e-5, rel=1e-5), kind
            for name, value in rank[kind]["state"].items():
                torch.testing.assert_close(
                    value, wanted["state"][name], atol=1e-5, rtol=1e-5, msg=f"{kind}: {name}"
                )


def test_what_values_learn_the_policy_does_not_and_a_checkpoint_goes_on(tmp_path: Path) -> None:
    one, other = (trainer(IQL, PICTURES) for _ in range(2))
    losses = one.manager.model(one._share(image_batch(0)))
    torch.autograd.backward(losses.total)
    encoder = next(
        value for name, value in one.manager.model.named_parameters() if "encoder" in name
    )
    assert encoder.grad is not None
    one.manager.optimizer.zero_grad()
    for number in range(2):
        one.step(image_batch(number))
    one.save_checkpoint(tmp_path / "checkpoint")
    other.load_checkpoint(tmp_path / "checkpoint")
    for each in (one, other):
        each.step(image_batch(2))
    begun = one.manager.model.state_dict()
    for name, value in other.manager.model.state_dict().items():
        torch.testing.assert_close(value, begun[name], rtol=0, atol=0)


def test_actions_beyond_the_bounds_are_clipped_and_the_mean_never_is() -> None:
    policy: Any = trainer(IQL).manager.model.policy
    seen = torch.zeros(2000, 3)
    acted = policy.act(seen, torch.Generator().manual_seed(0)).action
    assert float(acted.abs().max()) == 1.0
    assert float(policy.mode(seen).abs().max()) < 1.0
    torch.testing.assert_close(policy.draw(seen, torch.zeros(2000, 2)), policy.mode(seen))
    again = policy.evaluate(seen, acted)
    normal: Any = torch.distributions.Normal(policy.mode(seen), policy.log_std.exp())
    torch.testing.assert_close(again.log_prob, normal.log_prob(acted).sum(-1))
    torch.testing.assert_close(again.entropy, normal.entropy().sum(-1))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"expectile": 1.0}, "expectile is 1.0; it must be"),
        ({"inverse_temperature": -1.0}, "inverse_temperature is -1.0; it must be"),
        ({"largest_weight": 0.5}, "largest_weight is 0.5; it must be"),
        ({"algorithm": "awac", "expectile": 0.9}, "the value of a state is that of the policy's"),
    ],
)
def test_numbers_that_cannot_be_are_named(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=said):
        msgspec.convert(wrong, OfflineLossConfig)
