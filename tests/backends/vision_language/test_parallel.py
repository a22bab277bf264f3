"""Slots that see each other, and actions as numbers: against a decoder written out in torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("transformers")

from rlinf_async.backends.policies.base import find_policy, to_tensors
from rlinf_async.backends.policies.vision_language.config import VisionLanguageConfig
from rlinf_async.backends.policies.vision_language.policy import decode
from tests.backends.vision_language.kit import EXECUTED, NUMBERS, SIZES, config, observations

COUNT, CHUNK = 4, 6
SIZE = EXECUTED * NUMBERS
CELLS = [("bins", "bidirectional"), ("continuous", "bidirectional"), ("continuous", "causal")]


def build(head: str, attention: str, **fields: Any) -> Any:
    sizes: dict[str, Any] = {"bins": 256} if head == "continuous" else {}
    torch.manual_seed(0)
    own = config(head=head, attention=attention, chunk=CHUNK, **sizes, **fields)
    return find_policy(own.name)(own)


def seen(count: int = COUNT) -> Any:
    return to_tensors(observations(count), torch.device("cpu"))


def hidden_by_hand(policy: Any, attention: str, slots: int) -> Tensor:
    """Hidden states at the slots: the layers of a Llama, one after the other."""
    read = policy._read(policy.normalized(seen()))
    x = torch.cat([read.embedded, policy.slots.expand(COUNT, -1, -1)[:, :slots]], 1)
    there = torch.cat([read.mask, read.mask.new_ones(COUNT, slots)], 1)
    size, heads = x.shape[1], SIZES["heads"]
    sees = torch.ones(size, size, dtype=torch.bool).tril()
    if attention == "bidirectional":
        sees[-slots:, -slots:] = True
    hidden_away = ~(sees & there.unsqueeze(1)).unsqueeze(1)
    width = x.shape[2] // heads
    power = torch.arange(width // 2) / (width // 2)
    angle = ((there.cumsum(1) - 1).clamp(min=0).unsqueeze(-1) / 10_000.0**power).unsqueeze(1)

    def turned(one: Tensor) -> Tensor:
        first, second = one.chunk(2, -1)
        sine, cosine = angle.sin(), angle.cos()
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)

    def split(one: Tensor) -> Tensor:
        return one.view(COUNT, size, heads, width).transpose(1, 2)

    def normed(one: Tensor, by: Any) -> Tensor:
        scale = (one.square().mean(-1, keepdim=True) + by.variance_epsilon).rsqrt()
        weighted: Tensor = by.weight * one * scale
        return weighted

    decoder = policy.backbone.model.get_decoder()
    for layer in decoder.layers:
        own, inner = layer.self_attn, normed(x, layer.input_layernorm)
        query, key = turned(split(own.q_proj(inner))), turned(split(own.k_proj(inner)))
        scores = (query @ key.transpose(2, 3) / width**0.5).masked_fill(hidden_away, -torch.inf)
        mixed = (scores.softmax(-1) @ split(own.v_proj(inner))).transpose(1, 2).flatten(2)
        x = x + own.o_proj(mixed)
        inner = normed(x, layer.post_attention_layernorm)
        gate = functional.silu(layer.mlp.gate_proj(inner)) * layer.mlp.up_proj(inner)
        x = x + layer.mlp.down_proj(gate)
    return normed(x, decoder.norm)[:, -slots:]


@pytest.mark.parametrize(("head", "attention"), CELLS)
def test_log_probs_and_gradients_are_those_of_a_script(head: str, attention: str) -> None:
    policy = build(head, attention)
    step = policy.act(seen(), torch.Generator().manual_seed(1))
    assert step.action.shape == step.log_prob.shape == (COUNT, SIZE)
    found = policy.evaluate(seen(), step.action)
    # Where slots see each other, those of the actions that are not executed are there as well.
    slots = CHUNK * NUMBERS if attention == "bidirectional" else SIZE
    hidden = hidden_by_hand(policy, attention, slots)[:, :SIZE]
    if head == "bins":
        logits = hidden @ policy.backbone.model.lm_head.weight[-SIZES["bins"] :].flip(0).T
        tokens = torch.distributions.Categorical(logits=logits)
        middles = decode(torch.arange(SIZES["bins"]), SIZES["bins"])
        token = (step.action.unsqueeze(-1) - middles).abs().argmin(-1)
        distribution: Any = tokens
        expected, entropy = distribution.log_prob(token), distribution.entropy()
    else:
        joined = hidden.reshape(COUNT, EXECUTED, -1)
        one, _, two = policy.head.network
        mean = functional.linear(
            functional.linear(joined, one.weight, one.bias).relu(), two.weight, two.bias
        )
        distribution = torch.distributions.Normal(mean, policy.head.log_std.exp())
        action = step.action.view(COUNT, EXECUTED, NUMBERS)
        expected = distribution.log_prob(action).flatten(1)
        entropy = distribution.entropy().flatten(1)
        torch.testing.assert_close(policy.mode(seen()), mean.flatten(1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.log_prob, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.entropy, entropy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.log_prob, step.log_prob, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.value, policy.critic(hidden[:, 0]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(step.value, found.value, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(policy.value(seen()), found.value, rtol=1e-5, atol=1e-5)
    gradients = []
    for total in (found.log_prob.sum(), expected.sum()):
        policy.zero_grad()
        total.backward(retain_graph=True)
        gradients.append(
            torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
        )
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
def test_cloning_of_numbers_minimises_the_absolute_error(attention: str) -> None:
    policy = build("continuous", attention)
    action = torch.rand(COUNT, CHUNK * NUMBERS) * 2 - 1
    given, shown = policy.demonstrated(action, np.random.default_rng(0))
    found = policy(policy.normalized(seen()), given, shown)
    hidden = hidden_by_hand(policy, attention, CHUNK * NUMBERS)
    mean, _ = policy.head(hidden)
    torch.testing.assert_close(-found.log_prob, (mean - action).abs(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head": "continuous", "decoding": "autoregressive"}, "set decoding = 'parallel'"),
        ({"attention": "bidirectional", "decoding": "autoregressive"}, "which has neither"),
        ({"head": "continuous", "bins": 7}, "bins is 7, but head = 'continuous' has no bins"),
    ],
)
def test_what_has_no_meaning_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VisionLanguageConfig(**fields)
