"""A flow policy's log-probs, losses and gradients in plain torch, from the papers' formulas.

It takes weights by name, and imports nothing of the framework. Observations are features already.

ReinFlow (arXiv 2505.22094): a step's distribution is N(a + v(t, a, o) dt, sigma(t, a, o)^2), time
from 0 (noise) to 1. Flow-GRPO (arXiv 2505.05470, equations 8 and 9), as pi-RL (arXiv 2510.25889)
takes it over: time from 1 (noise) to 0, velocity = noise - action, sigma_t = a sqrt(t / (1 - t)),
with the second time in the denominator of the first step, as their code has it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Normal

Weights = dict[str, Tensor]


def network(weights: Weights, name: str, x: Tensor) -> Tensor:
    layers = sorted({int(key.split(".")[1]) for key in weights if key.startswith(f"{name}.")})
    for index in layers:
        x = x @ weights[f"{name}.{index}.weight"].T + weights[f"{name}.{index}.bias"]
        x = x if index == layers[-1] else torch.tanh(x)
    return x


def inputs(features: Tensor, x: Tensor, time: float | Tensor) -> Tensor:
    turns = torch.pi * time * torch.tensor([1.0, 2.0, 4.0, 8.0])
    waves = torch.cat([torch.sin(turns), torch.cos(turns)])
    return torch.cat([features, x, waves.expand(len(x), -1)], -1)


def reinflow(
    weights: Weights, features: Tensor, x: Tensor, k: int, steps: int, least: float, largest: float
) -> Any:
    seen = inputs(features, x, k / steps)
    share = (torch.tanh(network(weights, "deviation", seen)) + 1) / 2
    return Normal(
        x + network(weights, "velocity", seen) / steps, least ** (1 - share) * largest**share
    )


def flow_grpo(weights: Weights, features: Tensor, x: Tensor, k: int, steps: int, a: float) -> Any:
    t, dt = 1 - k / steps, -1 / steps
    velocity = -network(weights, "velocity", inputs(features, x, k / steps))
    sigma = a * (t / (1 - (t if t < 1 else 1 - 1 / steps))) ** 0.5
    drift = velocity + sigma**2 / (2 * t) * (x + (1 - t) * velocity)
    return Normal(x + drift * dt, torch.full_like(x, sigma * (-dt) ** 0.5))


def chains(weights: Weights, features: Tensor, chain: Tensor, step: Any, *settings: float) -> Any:
    """Log-probs and entropies ``[N, C]`` of chains ``[N, S + 1, C]``."""
    steps = chain.shape[1] - 1
    normals = [step(weights, features, chain[:, k], k, steps, *settings) for k in range(steps)]
    log_probs = [one.log_prob(chain[:, k + 1]) for k, one in enumerate(normals)]
    return sum(log_probs), sum(one.entropy() for one in normals)


def ppo(
    weights: Weights, features: Tensor, chain: Tensor, old: Tensor, advantage: Tensor,
    returns: Tensor, entropy_weight: float, step: Any, *settings: float,
) -> Tensor:  # fmt: skip
    """Clipped surrogate for each number of an action, plus half the squared error of the values."""
    log_prob, entropy = chains(weights, features, chain, step, *settings)
    ratio = (log_prob - old).exp()
    policy = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    error = network(weights, "critic", features)[:, :1] - returns
    loss: Tensor = policy + 0.5 * error.square().mean() - entropy_weight * entropy.mean()
    return loss


def matching(
    weights: Weights, features: Tensor, action: Tensor, noise: Tensor, time: Tensor
) -> Tensor:
    """Conditional flow matching: |v(x_t) - (action - noise)|^2, x_t = t action + (1 - t) noise."""
    errors = []
    for o, a, e, t in zip(features, action, noise, time, strict=True):
        x = (t * a + (1 - t) * e)[None]
        errors.append(network(weights, "velocity", inputs(o[None], x, t)) - (a - e))
    mean: Tensor = torch.cat(errors).square().mean()
    return mean
