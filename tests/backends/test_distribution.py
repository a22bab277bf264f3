"""Distributions of actions of several factors against torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlinf_async.backends.policies.base import ActionDistribution, policies
from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.backends.policies.mlp import MlpFactoredPolicy
from rlinf_async.messages.spaces import ActionSpec, Factor, choices, continuous

MIXED = ActionSpec((Factor("choice", 3), Factor("continuous", 2), Factor("choice", 2)))
distributions: Any = torch.distributions

LOG_STD = torch.tensor([-0.5, 0.3])


def outputs(count: int, size: int) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(1))


def test_log_probs_and_entropies_are_the_sums_over_the_factors() -> None:
    given = outputs(6, MIXED.outputs)
    ours = ActionDistribution(MIXED, given, LOG_STD)
    action, log_prob = ours.sample(torch.Generator().manual_seed(2))
    assert action.shape == (6, 4)
    first = distributions.Categorical(logits=given[:, :3])
    middle = distributions.Independent(distributions.Normal(given[:, 3:5], LOG_STD.exp()), 1)
    last = distributions.Categorical(logits=given[:, 5:])
    expected = (
        first.log_prob(action[:, 0]) + middle.log_prob(action[:, 1:3]) + last.log_prob(action[:, 3])
    )
    torch.testing.assert_close(log_prob, expected)
    torch.testing.assert_close(ours.log_prob(action), expected)
    entropy = first.entropy() + middle.entropy() + last.entropy()
    torch.testing.assert_close(ours.entropy(), entropy)
    likeliest = ours.mode()
    assert (likeliest[:, 0] == given[:, :3].argmax(-1)).all()
    assert (likeliest[:, 1:3] == given[:, 3:5]).all()


def test_samples_are_distributed_as_they_say() -> None:
    given = outputs(1, 5).expand(20_000, -1)
    drawn, _ = ActionDistribution(choices(2, 3), given, torch.empty(0)).sample(
        torch.Generator().manual_seed(3)
    )
    assert drawn.dtype == torch.int64
    for column, logits in enumerate(torch.split(given[0], [2, 3])):
        seen = torch.bincount(drawn[:, column], minlength=len(logits)) / len(drawn)
        torch.testing.assert_close(seen, logits.softmax(-1), atol=0.015, rtol=0)


@pytest.mark.parametrize(
    ("spec", "alone"), [(continuous(3), "mlp_gaussian"), (choices(3), "mlp_categorical")]
)
def test_with_one_factor_it_is_the_policy_of_that_factor(spec: ActionSpec, alone: str) -> None:
    def config(name: str) -> PolicyConfig:
        return PolicyConfig(
            name=name, observation_size=4, action_size=spec.outputs, action=spec, hidden_sizes=(8,)
        )

    policy, factored = policies[alone](config(alone)), MlpFactoredPolicy(config("mlp_factored"))
    factored.load_state_dict(policy.state_dict(), strict=False)
    seen = outputs(5, 4)
    step = policy.act(seen, torch.Generator().manual_seed(4))
    same = factored.act(seen, torch.Generator().manual_seed(4))
    for one, other in zip(step, same, strict=True):
        torch.testing.assert_close(one, other)
    for one, other in zip(
        policy.evaluate(seen, step.action), factored.evaluate(seen, step.action), strict=True
    ):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(policy.mode(seen), factored.mode(seen))
