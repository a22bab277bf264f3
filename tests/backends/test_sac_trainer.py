"""Soft actor-critic: what a gradient step changes, and what a checkpoint keeps."""

from __future__ import annotations

import math
import pathlib

import msgspec
import numpy as np
import pytest
import torch

from rlinf_async.algorithms.losses import squashed_log_prob
from rlinf_async.backends.fsdp.sac import SacModel, SacTrainer
from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.backends.policies.serving import PolicyServer
from rlinf_async.backends.policies.squashed import MlpSquashedGaussianPolicy
from rlinf_async.backends.sac_config import SacLossConfig, SacTrainerConfig
from rlinf_async.messages.embodied import ReplayBatch

POLICY = PolicyConfig(
    name="mlp_squashed_gaussian", observation_size=3, action_size=2, hidden_sizes=(8, 8)
)
SIZE = 16
DEFAULT = SacLossConfig()


def batch(number: int = 0, *, weight: float = 1.0) -> ReplayBatch:
    random = np.random.default_rng(number)

    def drawn(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return random.standard_normal((SIZE, *shape)).astype(np.float32)

    return ReplayBatch(
        iteration=0,
        number=number,
        index=np.arange(SIZE),
        weight=np.full(SIZE, weight, np.float32),
        observation=drawn(3),
        action=np.tanh(drawn(2)),
        reward=drawn(),
        next_observation=drawn(3),
        discount=np.full(SIZE, 0.9, np.float32),
        version=np.zeros(SIZE, np.int64),
    )


def trainer(sac: SacLossConfig = DEFAULT) -> SacTrainer:
    return SacTrainer(SacTrainerConfig(sac=sac), POLICY)


def parameters(one: SacTrainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in one.manager.model.state_dict().items()}


def test_a_step_moves_everything_and_targets_by_their_share() -> None:
    one = trainer(SacLossConfig(tau=0.25))
    before = parameters(one)
    done = one.step(batch())
    after = parameters(one)
    learnt = [name for name, _ in one.manager.model.named_parameters()]
    assert all(not torch.equal(before[name], after[name]) for name in learnt)
    for name, value in after.items():
        if name.startswith("target."):
            source = after[name.replace("target.", "critic.")]
            torch.testing.assert_close(value, before[name].lerp(source, 0.25))
    assert done.error.shape == (SIZE,)
    assert all(math.isfinite(number) for number in done.metrics.values())


def test_the_policys_loss_leaves_the_critics_alone_and_the_critics_loss_the_policy() -> None:
    one = trainer(SacLossConfig(entropy_coefficient=0.2))
    model = one.manager.model
    assert isinstance(model, SacModel)
    losses = model(one._share(batch(weight=0.0)))  # nothing is left of the critics' loss
    torch.autograd.backward(losses.total)
    gradients = {name: value.grad for name, value in model.named_parameters()}
    for name, gradient in gradients.items():
        moved = gradient is not None and bool(gradient.abs().sum() > 0)
        assert moved is name.startswith("policy."), name


def test_a_checkpoint_goes_on_with_the_same_numbers(tmp_path: pathlib.Path) -> None:
    one, other = trainer(), trainer()
    for number in range(3):
        one.step(batch(number))
    one.end_iteration()
    one.save_checkpoint(tmp_path / "checkpoint")
    other.load_checkpoint(tmp_path / "checkpoint")
    assert other.version == 1
    for each in (one, other):
        each.step(batch(3))
    for name, value in parameters(one).items():
        torch.testing.assert_close(parameters(other)[name], value, rtol=0, atol=0)


def test_the_published_policy_acts_uniformly_until_the_first_step_and_then_as_trained() -> None:
    one = trainer()
    served = PolicyServer(POLICY, seed=1)
    seen = np.zeros((4000, 3), np.float32)
    served.load(one.publish())
    drawn = served.act(seen)
    np.testing.assert_allclose(
        np.quantile(drawn.action, [0.25, 0.5, 0.75]), [-0.5, 0, 0.5], atol=0.05
    )
    np.testing.assert_allclose(drawn.log_prob, -2 * math.log(2.0), rtol=1e-6)
    one.step(batch())
    served.load(one.publish())
    trained = one.manager.model.policy
    assert isinstance(trained, MlpSquashedGaussianPolicy)
    np.testing.assert_allclose(
        served.mode(seen[:1]), trained.mode(torch.zeros(1, 3)).numpy(), rtol=1e-6
    )
    acted = served.act(seen)
    again = trained.evaluate(torch.zeros(4000, 3), torch.from_numpy(acted.action))
    np.testing.assert_allclose(acted.log_prob, again.log_prob.detach().numpy(), atol=1e-3)


def test_log_probs_of_samples_are_those_of_their_noise() -> None:
    policy = MlpSquashedGaussianPolicy(POLICY)
    seen = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
    noise = torch.randn((32, 2), generator=torch.Generator().manual_seed(1))
    action, log_prob = policy.sample(seen, noise)
    mean, log_std = policy._outputs(seen)
    unsquashed = mean + noise * log_std.exp()
    torch.testing.assert_close(action, unsquashed.tanh())
    torch.testing.assert_close(log_prob, squashed_log_prob(noise, log_std, unsquashed))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"tau": 0.0}, "tau is 0.0"),
        ({"gamma": 1.5}, "between 0 and 1"),
        ({"entropy_coefficient": -1.0}, "at least 0, or left out"),
        ({"initial_entropy_coefficient": 0.0}, "above 0"),
        ({"image_shift": -1}, "image_shift is -1; it must be at least 0"),
    ],
)
def test_numbers_that_cannot_be_are_named(wrong: dict[str, float], said: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=said):
        msgspec.convert(wrong, SacLossConfig)
