"""The Gaussian MLP acts on arrays as it does on tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlinf_async.backends.base import PolicyOutputError
from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.backends.policies.mlp import ArrayGaussian, MlpGaussianPolicy
from rlinf_async.backends.policies.serving import PolicyServer
from rlinf_async.messages.embodied import Floats
from rlinf_async.weights.pack import pack

CPU = torch.device("cpu")


def config(hidden: tuple[int, ...] = (8, 6), clip: float = 10.0) -> PolicyConfig:
    return PolicyConfig(
        name="mlp_gaussian",
        observation_size=5,
        action_size=3,
        hidden_sizes=hidden,
        initial_log_std=-0.5,
        observation_clip=clip,
    )


def trained(
    hidden: tuple[int, ...] = (8, 6), clip: float = 10.0, seed: int = 1
) -> MlpGaussianPolicy:
    """A policy none of whose numbers are those of a new one."""
    generator = torch.Generator().manual_seed(seed)
    policy = MlpGaussianPolicy(config(hidden, clip))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.normal_(0.0, 0.5, generator=generator)
    policy.observation_normalizer.update(3.0 + 2.0 * torch.randn(50, 5, generator=generator))
    return policy


def seen(count: int = 16) -> Floats:
    numbers = np.random.default_rng(2).standard_normal((count, 5), np.float32)
    return 3.0 + numbers


@pytest.mark.parametrize("hidden", [(), (8,), (8, 6, 4)])
@pytest.mark.parametrize("clip", [10.0, 0.5])
def test_actions_log_probs_and_values_are_those_of_the_policy(
    hidden: tuple[int, ...], clip: float
) -> None:
    policy = trained(hidden, clip)
    arrays = ArrayGaussian.of(policy, CPU)
    assert arrays is not None
    answer = arrays.act(seen(), torch.Generator().manual_seed(7))
    step = policy.act(torch.from_numpy(seen()), torch.Generator().manual_seed(7))
    np.testing.assert_allclose(answer.action, step.action.numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(answer.log_prob, step.log_prob.numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(answer.value, step.value.numpy(), rtol=1e-5, atol=1e-6)


def test_the_log_prob_is_that_of_the_action_under_the_policy() -> None:
    policy = trained()
    arrays = ArrayGaussian.of(policy, CPU)
    assert arrays is not None
    answer = arrays.act(seen(), torch.Generator().manual_seed(7))
    evaluated = policy.evaluate(torch.from_numpy(seen()), torch.from_numpy(answer.action))
    np.testing.assert_allclose(answer.log_prob, evaluated.log_prob.detach().numpy(), atol=1e-5)


def test_a_server_acts_under_the_weights_that_were_loaded_last() -> None:
    server = PolicyServer(config(), seed=3)
    generator = torch.Generator().manual_seed(3)
    for version in (0, 1):
        policy = trained(seed=version)
        server.load(pack(policy.state_dict(), version, 1 << 20))
        action = server.act(seen()).action
        expected = policy.act(torch.from_numpy(seen()), generator).action
        np.testing.assert_allclose(action, expected.numpy(), rtol=1e-5, atol=1e-6)


def test_answers_are_float32_whatever_the_environment_shows() -> None:
    arrays = ArrayGaussian.of(trained(), CPU)
    assert arrays is not None
    answer = arrays.act(seen().astype(np.float64), torch.Generator().manual_seed(7))
    assert {one.dtype for one in (answer.action, answer.log_prob, answer.value)} == {
        np.dtype(np.float32)
    }


def test_the_observations_that_are_given_stay_as_they_are() -> None:
    given = seen()
    given.flags.writeable = False  # as arrays off the wire
    PolicyServer(config(), seed=3).act(given)
    np.testing.assert_array_equal(given, seen())


@pytest.mark.parametrize("broken", ["actor.0.bias", "critic.0.bias", "log_std"])
def test_weights_that_are_not_finite_are_named_with_their_version(broken: str) -> None:
    policy = trained()
    policy.version = 4
    arrays = ArrayGaussian.of(policy, CPU)
    assert arrays is not None
    with torch.no_grad():
        policy.get_parameter(broken).fill_(float("nan"))
    with pytest.raises(PolicyOutputError, match="weights version 4"):
        arrays.act(seen(), torch.Generator())


def test_a_policy_that_is_derived_acts_by_itself() -> None:
    class Greedy(MlpGaussianPolicy):
        pass

    assert ArrayGaussian.of(Greedy(config()), CPU) is None
    assert ArrayGaussian.of(trained(), torch.device("meta")) is None
