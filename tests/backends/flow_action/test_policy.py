"""The flow policy: what acts is what is trained, and it is what the papers say."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from rlinf_async.backends.base import LoraConfig
from rlinf_async.backends.building import building
from rlinf_async.backends.fsdp.embodied import EmbodiedTrainer, _loss
from rlinf_async.backends.fsdp.ppo import choose_gradient
from rlinf_async.backends.fsdp.rollout_batch import flat_batch
from rlinf_async.backends.policies.base import to_tensors
from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.backends.policies.flow_action.config import FlowConfig
from rlinf_async.backends.policies.flow_action.policy import FlowActionPolicy
from rlinf_async.backends.policies.serving import PolicyServer
from rlinf_async.messages.spaces import choices
from tests.backends.flow_action import reference
from tests.backends.flow_action.kit import (
    EXECUTED,
    LOSS,
    NOISES,
    SIZE,
    STEPS,
    TRUNKS,
    config,
    observations,
    trainer_config,
    trajectory,
)

CPU = torch.device("cpu")
STEP_OF: dict[str, Any] = {
    "network": (reference.reinflow, 0.1, 0.4),
    "sde": (reference.flow_grpo, 0.6),
}


def build(noise: str = "network", trunk: str = "numbers", **fields: Any) -> FlowActionPolicy:
    """A policy whose networks say something: the first weights are almost 0."""
    with building(0):
        policy = FlowActionPolicy(config(noise, trunk, **fields))
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
    return policy


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def backward(loss: Any) -> None:
    loss.backward()


def leaves(policy: FlowActionPolicy) -> dict[str, Tensor]:
    return {name: one.detach().clone().requires_grad_() for name, one in policy.named_parameters()}


def assert_same_gradients(policy: FlowActionPolicy, weights: dict[str, Tensor]) -> None:
    for name, parameter in policy.named_parameters():
        found, wanted = parameter.grad, weights[name].grad
        zero = torch.zeros_like(parameter)
        torch.testing.assert_close(
            zero if found is None else found, zero if wanted is None else wanted, atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("noise", NOISES)
def test_log_probs_and_gradients_of_ppo_equal_an_independent_script(noise: str) -> None:
    trainer = EmbodiedTrainer(
        trainer_config(noise, ppo={"loss": LOSS, "fused": False, "normalize_advantage": "none"}),
        1,
        0,
    )
    policy: Any = trainer._policy
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=seeded()))
    one = trajectory(trainer.config.fsdp.policy, 0, cut=False)
    assert one.chain is not None
    batch = flat_batch(trainer.manager, policy, [one], trainer.config)
    weights, (step, *settings) = leaves(policy), STEP_OF[noise]
    seen = batch.vectors
    chain = torch.from_numpy(one.chain).view(len(seen), STEPS + 1, SIZE)
    log_prob, entropy = reference.chains(weights, seen, chain, step, *settings)
    evaluation = policy(seen, batch.action)
    torch.testing.assert_close(evaluation.log_prob, log_prob, atol=1e-5, rtol=0)
    torch.testing.assert_close(evaluation.entropy, entropy, atol=1e-5, rtol=0)
    ratio = (log_prob - batch.log_prob).exp()
    assert ((ratio - 1).abs() > 0.2).any()
    assert ((ratio - 1).abs() < 0.2).any()
    loss = reference.ppo(
        weights,
        *(seen, chain, batch.log_prob, batch.advantage, batch.returns, 0.01),
        *(step, *settings),
    )
    backward(loss)
    choose_gradient(trainer.manager, trainer.config.ppo, masked=True)(batch, 1.0)
    assert_same_gradients(policy, weights)


def test_loss_and_gradients_of_flow_matching_equal_an_independent_script() -> None:
    policy = build()
    action = torch.randn(7, SIZE, generator=seeded())
    seen = torch.randn(7, 5, generator=seeded(1))
    shown, point = policy.demonstrated(action, np.random.default_rng(0))
    assert torch.equal(shown, action)
    evaluation = policy(seen, shown, point)
    loss = _loss(evaluation.log_prob, torch.ones(7, EXECUTED, dtype=torch.bool), 7.0 * EXECUTED)
    backward(loss)
    weights = leaves(policy)
    wanted = reference.matching(weights, seen, action, point[:, :-1], point[:, -1])
    backward(wanted)
    torch.testing.assert_close(loss, wanted, atol=1e-5, rtol=0)
    assert_same_gradients(policy, weights)


@pytest.mark.parametrize("trunk", TRUNKS)
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("token_values", [False, True])
def test_log_probs_of_rollout_and_actor_agree(noise: str, trunk: str, token_values: bool) -> None:
    policy = build(noise, trunk, token_values=token_values)
    seen: Any = to_tensors(observations(TRUNKS[trunk], 9), CPU)
    step = policy.act(seen, seeded())
    assert step.chain is not None
    evaluation = policy.evaluate(seen, step.chain)
    assert step.action.shape == step.log_prob.shape == evaluation.entropy.shape == (9, SIZE)
    assert step.value.shape == (9, SIZE if token_values else EXECUTED)
    assert torch.equal(step.chain[:, -SIZE:], step.action)
    torch.testing.assert_close(step.log_prob, evaluation.log_prob, atol=1e-5, rtol=0)
    torch.testing.assert_close(step.value, evaluation.value, atol=1e-5, rtol=0)
    torch.testing.assert_close(step.value, policy.value(seen), atol=1e-5, rtol=0)
    again = policy.act(seen, seeded()).action
    assert torch.equal(again, step.action)
    alone = {key: one[2:3] for key, one in seen.items()} if isinstance(seen, dict) else seen[2:3]
    single = policy.evaluate(alone, step.chain[2:3]).log_prob
    torch.testing.assert_close(step.log_prob[2:3], single, atol=1e-5, rtol=0)


@pytest.mark.parametrize("noise", NOISES)
def test_the_likeliest_action_is_integrated_without_noise(noise: str) -> None:
    policy = build(noise)
    seen = torch.randn(4, 5, generator=seeded())
    weights, x = leaves(policy), torch.zeros(4, SIZE)
    for k in range(STEPS):
        inputs = reference.inputs(seen, x, k / STEPS)
        x = x + reference.network(weights, "velocity", inputs).detach() / STEPS
    torch.testing.assert_close(policy.mode(seen), x, atol=1e-6, rtol=0)
    assert torch.equal(policy.mode(seen), policy.mode(seen))


class Exact(FlowActionPolicy):
    """The flow to actions of which each number is drawn from N(0.3, 0.5^2)."""

    def _velocity(self, features: Tensor, x: Tensor, time: Tensor) -> Tensor:
        variance = (1 - time) ** 2 + (0.5 * time) ** 2
        return 0.3 + (0.25 * time - (1 - time)) / variance * (x - 0.3 * time)


@pytest.mark.parametrize("level", [0.3, 1.2])
def test_the_stochastic_equation_has_the_marginals_of_the_flow(level: float) -> None:
    flow = FlowConfig(steps=100, noise="sde", noise_level=level)
    policy = Exact(config("sde", flow=flow))
    seen = torch.zeros(2000, 5)
    chain = policy.act(seen, seeded()).chain
    assert chain is not None
    for time in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = chain.view(2000, 101, SIZE)[:, round(100 * time)]
        deviation = ((1 - time) ** 2 + (0.5 * time) ** 2) ** 0.5
        assert float(x.mean()) == pytest.approx(0.3 * time, abs=0.03)
        assert float(x.std()) == pytest.approx(deviation, rel=0.04)
    without = policy.draw(seen, torch.randn(2000, SIZE, generator=seeded()))
    assert float(without.mean()) == pytest.approx(0.3, abs=0.03)
    assert float(without.std()) == pytest.approx(0.5, rel=0.04)


def test_the_network_says_deviations_between_its_bounds_and_their_entropy_is_learnt() -> None:
    policy = build()
    assert policy.deviation is not None
    seen = torch.randn(5, 5, generator=seeded())
    chain = policy.act(seen, seeded()).chain
    assert chain is not None
    for shift, deviation in ((-99.0, 0.1), (99.0, 0.4)):
        last: Any = policy.deviation[-1]
        torch.nn.init.constant_(last.bias, shift)
        entropy = policy.evaluate(seen, chain).entropy
        wanted = STEPS * (0.5 * np.log(2 * np.pi * np.e) + np.log(deviation))
        torch.testing.assert_close(entropy, torch.full_like(entropy, wanted), atol=1e-4, rtol=0)


@pytest.mark.parametrize("field", ["image", "instruction", "state"])
def test_every_part_of_the_observation_matters(field: str) -> None:
    policy, spec = build(trunk="text"), TRUNKS["text"]
    seen, other = observations(spec, 3), observations(spec, 3, seed=1)
    changed = seen.copy()
    changed[field] = other[field]
    before = policy.mode(to_tensors(seen, CPU))
    after = policy.mode(to_tensors(changed, CPU))
    assert ((before - after).abs().amax(1) > 1e-6).all()


def test_adapters_are_all_that_is_trained_of_the_language_model() -> None:
    pytest.importorskip("peft")
    own = msgspec.structs.replace(config(trunk="text").vision_language, lora=LoraConfig(rank=2))
    policy = build(trunk="text", vision_language=own)
    trained = {name for name, one in policy.named_parameters() if one.requires_grad}
    inside = {name for name in trained if name.startswith("trunk.backbone.")}
    assert inside
    assert all("lora_" in name for name in inside)
    assert {"trunk.slot", "trunk.state.weight", "velocity.0.weight"} <= trained


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_policy_is_trained_on_its_chains_and_published(noise: str, precision: Any) -> None:
    made = trainer_config(noise, ppo={"epochs": 1})
    fsdp = msgspec.structs.replace(made.fsdp, precision=precision)
    trainer = EmbodiedTrainer(msgspec.structs.replace(made, fsdp=fsdp), 1, 0)
    server = PolicyServer(fsdp.policy, seed=0)
    server.load(trainer.publish())
    batch = [of_server(server, stage) for stage in range(2)]
    metrics = trainer.train(batch)
    assert metrics["skipped_updates"] == 0.0
    assert metrics["grad_norm"] > 0.0
    # One update of everything: the log-probs are those of the policy that acted.
    assert metrics["approx_kl"] < (1e-8 if precision == "float32" else 1e-3)
    server.load(trainer.publish())
    answer = server.act(observations(TRUNKS["numbers"], 6))
    assert answer.chain is not None
    assert answer.chain.shape == (6, (STEPS + 1) * SIZE)


def of_server(server: PolicyServer, stage: int) -> Any:
    one = trajectory(config(), stage)
    answers = [server.act(rows) for rows in one.observation]
    return msgspec.structs.replace(
        one,
        action=np.stack([answer.action for answer in answers]),
        log_prob=np.stack([answer.log_prob for answer in answers]),
        chain=np.stack([answer.chain for answer in answers if answer.chain is not None]),
    )


@pytest.mark.parametrize(
    ("level", "advantage"),
    [
        ("chunk", "chunk"),
        ("action", "chunk"),
        ("token", "chunk"),
        ("action", "action"),
        ("token", "action"),
        ("token", "token"),
    ],
)
def test_every_level_can_be_trained(level: str, advantage: str) -> None:
    made = trainer_config(ppo={"log_prob_level": level}, advantage={"level": advantage})
    policy = msgspec.structs.replace(made.fsdp.policy, token_values=advantage == "token")
    fsdp = msgspec.structs.replace(made.fsdp, policy=policy)
    trainer = EmbodiedTrainer(msgspec.structs.replace(made, fsdp=fsdp), 1, 0)
    metrics = trainer.train([trajectory(policy, 0), trajectory(policy, 1)])
    assert metrics["skipped_updates"] == 0.0
    assert metrics["grad_norm"] > 0.0


def test_layers_that_stand_for_an_action_are_named_for_a_run_with_other_actions() -> None:
    policy = build(hidden_sizes=(8, 8))
    layers = {name.rsplit(".", 1)[0] for name in policy.action_parameter_names()}
    assert layers == {"velocity.0", "velocity.4", "deviation.0", "deviation.4"}
    assert build("sde").action_parameter_names() == {
        f"velocity.{layer}.{part}" for layer in (0, 2) for part in ("weight", "bias")
    }


def misfit(made: PolicyConfig, **fields: Any) -> str:
    return FlowActionPolicy.misfit(msgspec.structs.replace(made, **fields))


def test_what_does_not_fit_is_said() -> None:
    assert misfit(config(), action=choices(3)).startswith("it integrates the numbers of a Box, but")
    images = TRUNKS["images"].parts
    stacked = type(images[1])(name="view", kind="image", shape=(4, 8, 8, 3))
    assert "put stacked frames side by side" in misfit(
        config(trunk="images"), observation=type(TRUNKS["images"])((stacked,))
    )
    words = type(TRUNKS["text"])(tuple(one for one in TRUNKS["text"].parts if one.name != "image"))
    assert "it needs at least one image" in misfit(config(trunk="text"), observation=words)
    assert [misfit(config(trunk=trunk)) for trunk in TRUNKS] == ["", "", ""]
