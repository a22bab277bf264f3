from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, Normal

from rlinf_async.backends.base import PolicyOutputError
from rlinf_async.backends.policies.base import Policy, policies
from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.backends.policies.mlp import MlpCategoricalPolicy, MlpGaussianPolicy, run_mlp
from rlinf_async.config.registry import UnknownName

NAMES = ["mlp_gaussian", "mlp_categorical"]


def build(name: str, hidden: tuple[int, ...] = (8, 8)) -> Policy[torch.Tensor]:
    torch.manual_seed(0)
    config = PolicyConfig(
        name=name, observation_size=5, action_size=3, hidden_sizes=hidden, initial_log_std=-0.5
    )
    policy = policies[name](config)
    policy.observation_normalizer.update(3.0 + 2.0 * torch.randn(50, 5))
    return policy


def observations(count: int = 16) -> Tensor:
    return 3.0 + torch.randn(count, 5, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("hidden", [(), (8,), (8, 6, 4)])
def test_acting_and_evaluating_agree(name: str, hidden: tuple[int, ...]) -> None:
    policy, observation = build(name, hidden), observations()
    step = policy.act(observation)
    evaluation = policy.evaluate(observation, step.action)
    assert torch.allclose(step.log_prob, evaluation.log_prob, atol=1e-5)
    assert torch.allclose(step.value, evaluation.value, atol=1e-6)
    assert torch.equal(step.value, policy.value(observation))
    assert evaluation.entropy.shape == (16,)


def test_the_gaussian_log_prob_and_entropy_equal_those_of_torch() -> None:
    policy, observation = build("mlp_gaussian"), observations()
    assert isinstance(policy, MlpGaussianPolicy)
    action = torch.randn(16, 3)
    normal: Any = Normal(policy.mode(observation), policy.log_std.detach().exp())
    evaluation = policy.evaluate(observation, action)
    assert torch.allclose(evaluation.log_prob, normal.log_prob(action).sum(-1), atol=1e-5)
    assert torch.allclose(evaluation.entropy, normal.entropy().sum(-1), atol=1e-6)


def test_the_categorical_log_prob_and_entropy_equal_those_of_torch() -> None:
    policy, observation = build("mlp_categorical"), observations()
    assert isinstance(policy, MlpCategoricalPolicy)
    with torch.no_grad():
        policy.get_parameter("actor.4.weight").mul_(100.0)
    action = torch.arange(16) % 3
    logits = run_mlp(policy.actor, policy.observation_normalizer(observation))
    distribution: Any = Categorical(logits=logits)
    evaluation = policy.evaluate(observation, action)
    assert torch.allclose(evaluation.log_prob, distribution.log_prob(action), atol=1e-5)
    assert torch.allclose(evaluation.entropy, distribution.entropy(), atol=1e-5)
    assert torch.equal(policy.mode(observation), distribution.probs.argmax(-1))


@pytest.mark.parametrize("name", NAMES)
def test_the_same_generator_gives_the_same_actions(name: str) -> None:
    policy = build(name)
    first, second = (
        policy.act(observations(), torch.Generator().manual_seed(7)).action for _ in range(2)
    )
    assert torch.equal(first, second)


def test_gaussian_samples_have_the_deviation_of_log_std() -> None:
    policy = build("mlp_gaussian")
    observation = observations(1).expand(20_000, 5)
    action = policy.act(observation, torch.Generator().manual_seed(3)).action
    assert action.std(0).tolist() == pytest.approx([math.exp(-0.5)] * 3, rel=0.03)
    assert torch.allclose(action.mean(0), policy.mode(observation[:1])[0], atol=0.03)


def test_categorical_samples_follow_the_probabilities() -> None:
    policy = build("mlp_categorical")
    observation = observations(1).expand(20_000, 5)
    action = policy.act(observation, torch.Generator().manual_seed(3)).action
    expected = torch.stack(
        [policy.evaluate(observation[:1], torch.tensor([k])).log_prob.detach() for k in range(3)]
    ).exp()
    counted = torch.bincount(action, minlength=3) / len(action)
    assert torch.allclose(counted, expected.flatten(), atol=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_an_output_that_is_nan_names_the_version_and_the_tensor(name: str) -> None:
    policy = build(name)
    policy.version = 12
    with torch.no_grad():
        policy.get_parameter("critic.0.bias").fill_(float("nan"))
    with pytest.raises(PolicyOutputError, match=r"version 12: 16 of 16 elements of 'value'"):
        policy.act(observations())
    with pytest.raises(PolicyOutputError, match="'value'"):
        policy.value(observations())
    with torch.no_grad():
        policy.get_parameter("actor.0.bias").fill_(float("nan"))
    with pytest.raises(PolicyOutputError, match="version 12"):
        policy.mode(observations())


def test_the_hidden_layers_start_orthogonal_and_the_action_head_small() -> None:
    policy = build("mlp_gaussian")
    hidden = policy.get_parameter("actor.2.weight").detach()
    head = policy.get_parameter("actor.4.weight").detach()
    assert torch.allclose(hidden @ hidden.t(), 2.0 * torch.eye(8), atol=1e-5)
    assert torch.allclose(head @ head.t(), 1e-4 * torch.eye(3), atol=1e-7)


def test_the_critic_alone_is_the_value_group() -> None:
    assert build("mlp_gaussian", ()).value_parameter_names() == {"critic.0.weight", "critic.0.bias"}


def test_a_policy_without_the_environments_sizes_is_refused() -> None:
    with pytest.raises(ValueError, match="fill in the environment's sizes first"):
        policies["mlp_gaussian"](PolicyConfig())


def test_an_unknown_policy_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'mlp_gaussian'"):
        policies["mlp_gausian"]


@pytest.mark.parametrize(
    ("field", "number", "message"),
    [
        ("observation_size", -1, "observation_size is -1"),
        ("hidden_sizes", (64, 0), r"hidden_sizes is \(64, 0\)"),
        ("initial_log_std", 9.0, "initial_log_std is 9.0"),
        ("observation_clip", 0.0, "observation_clip is 0.0"),
    ],
)
def test_a_size_that_makes_no_sense_is_refused(field: str, number: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyConfig(**{field: number})  # type: ignore[arg-type]
