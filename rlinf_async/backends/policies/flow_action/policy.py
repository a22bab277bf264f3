"""A velocity field carries Gaussian noise to a chunk of actions, in ``S`` Euler steps.

::

    x_0 ~ N(0, I)    x_{i+1} = x_i + v(x_i, t_i, o) / S,  t_i = i / S    actions = x_S

``o`` are the features that a trunk makes of the observation. Cloning matches the field to straight
paths from noise to demonstrated actions (Lipman et al. 2023, "Flow Matching for Generative
Modeling"; Liu et al. 2023, "Flow Straight and Fast")::

    x_t = (1 - t) x_0 + t action        loss = |v(x_t, t, o) - (action - x_0)|^2

A deterministic integration has no log-probs. Sampled actions come from one with noise in its
steps, each of which is then a normal distribution of known mean and deviation; the log-prob of an
action is that of its chain ``x_0 ... x_S``, given ``x_0``, whose distribution is always the same:
the sum over the steps. Two kinds of noise:

``network``
    ``x_{i+1} ~ N(x_i + v / S, s^2)``, where a second network of the same inputs says ``s`` between
    two bounds (Zhang et al. 2025, "ReinFlow", arXiv 2505.22094).
``sde``
    The stochastic equation that has the flow's marginals, ``dx = [v + g^2/2 score] dt + g dw``. For
    straight paths ``score = -(x - t v) / (1 - t)``; with ``g = a sqrt((1 - t) / t)`` (Liu et al.
    2025, "Flow-GRPO", arXiv 2505.05470, equations 7 to 9; Chen et al. 2025, "pi-RL", arXiv
    2510.25889), whose time runs the other way::

        x_{i+1} ~ N(x_i + (v - a^2 / (2 t') (x_i - t_i v)) / S,  a^2 (1 - t_i) / t' / S)

    ``t' = max(t_i, 1 / S)``: as in Flow-GRPO, the first step takes the second's place there.

The most likely action is the integration without noise from ``x_0 = 0``, the mean of the noise.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from rlinf_async.backends.policies.base import (
    HALF_LOG_TWO_PI,
    Evaluation,
    Policy,
    Step,
    register_policy,
)
from rlinf_async.backends.policies.config import PolicyConfig, cnn_misfit, mlp_misfit, reads_text
from rlinf_async.backends.policies.flow_action.noise import StepNoise
from rlinf_async.backends.policies.flow_action.trunks import VisionLanguage, trunk_of
from rlinf_async.backends.policies.mlp import run_mlp, tanh_mlp
from rlinf_async.backends.policies.vision_language import fitting

FREQUENCIES: Final = 4
"""of the sines and cosines by which a network sees the time"""


def embedded(time: Tensor) -> Tensor:
    """Return ``[M, 8]`` of times ``[M, 1]``: sines and cosines of 1, 2, 4 and 8 half turns."""
    turns = 2.0 ** torch.arange(FREQUENCIES, device=time.device)
    angles = math.pi * time * turns
    return torch.cat([angles.sin(), angles.cos()], -1)


@register_policy("flow_action")
class FlowActionPolicy(Policy[Any]):
    """Actions ``[N, k * A]``, about [-1, 1]; log-probs and entropies ``[N, k * A]``, one for each
    number; values ``[N, k]``, or as many as log-probs with ``token_values``.

    A chain ``[N, (S + 1) * k * A]`` is ``x_0 ... x_S``, one after the other. The entropy is that of
    the steps of a chain, given where each began.
    """

    levels = ("token", "action", "chunk")
    rescaled = True

    @classmethod
    def misfit(cls, config: PolicyConfig) -> str:
        if not config.acts.continuous:
            return (
                f"it integrates the numbers of a Box, but the environment takes {config.acts}: "
                "leave actor.fsdp.policy.name out"
            )
        if reads_text(config):
            return fitting.misfit(config)
        return cnn_misfit(config) if config.sees.of_kind("image") else mlp_misfit(config)

    @classmethod
    def entropy_misfit(cls, config: PolicyConfig) -> str:
        if config.flow.noise == "network":
            return ""
        return (
            "the noise of actor.fsdp.policy.flow.noise = 'sde' is not learnt, so that its entropy "
            "is always the same: leave it out, or set noise = 'network'"
        )

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self.steps, self.size = config.flow.steps, config.action_size
        """``S``, and numbers of an answer: ``k * A``"""
        self._noise = StepNoise(config.flow)
        self.trunk = trunk_of(config)
        features, hidden = self.trunk.size, config.hidden_sizes
        inputs = (features + self.size + 2 * FREQUENCIES, *hidden, self.size)
        self.velocity = tanh_mlp(inputs, output_gain=0.01)
        learnt = self._noise.learnt
        self.deviation = tanh_mlp(inputs, output_gain=0.01) if learnt else None
        values = self.size if config.token_values else max(config.action_chunk, 1)
        self.critic = tanh_mlp((features, *hidden, values), output_gain=1.0)

    # -- what a policy does -------------------------------------------------------------------

    @torch.no_grad()
    def act(self, observation: Any, generator: torch.Generator | None = None) -> Step:
        features: Tensor = self.trunk(self.normalized(observation))
        shape, device = (self.steps + 1, len(features), self.size), features.device
        x, *noises = torch.randn(shape, generator=generator, device=device)
        chain, log_prob = [x], torch.zeros_like(x)
        for index, noise in enumerate(noises):
            mean, log_std = self._next(features, x, _time(x, index / self.steps))
            x = torch.addcmul(mean, noise, log_std.exp())
            log_prob = log_prob - (0.5 * noise.square() + log_std + HALF_LOG_TWO_PI)
            chain.append(x)
        value = run_mlp(self.critic, features)
        self.require_finite(action=x, log_prob=log_prob, value=value)
        return Step(x, log_prob, value, torch.cat(chain, 1))

    @torch.no_grad()
    def mode(self, observation: Any) -> Tensor:
        features: Tensor = self.trunk(self.normalized(observation))
        action = self.draw(features, features.new_zeros(len(features), self.size))
        self.require_finite(action=action)
        return action

    def features(self, normalized: Any) -> Tensor:
        """Return what the networks see of an observation, ``[N, F]``, with gradients."""
        seen: Tensor = self.trunk(normalized)
        return seen

    def draw(self, features: Tensor, noise: Tensor) -> Tensor:
        """Return the actions to which the flow carries ``noise [N, k * A]``, without noise in its
        steps: zeros to the most likely ones."""
        x = noise
        for index in range(self.steps):
            x = x + self._velocity(features, x, _time(x, index / self.steps)) / self.steps
        return x

    @torch.no_grad()
    def value(self, observation: Any) -> Tensor:
        value = run_mlp(self.critic, self.trunk(self.normalized(observation)))
        self.require_finite(value=value)
        return value

    def demonstrated(self, action: Tensor, generator: np.random.Generator) -> tuple[Tensor, ...]:
        """Return the actions, and noise and time of a point on the path to each, ``[N, C + 1]``."""
        noise = generator.standard_normal(action.shape, np.float32)
        time = generator.random((len(action), 1), np.float32)
        return action, torch.from_numpy(np.concatenate([noise, time], 1))

    def forward(self, normalized: Any, action: Tensor, point: Tensor | None = None) -> Evaluation:
        """Evaluate chains; with points of `demonstrated`, match the flow to actions instead: minus
        the squared error of the velocity stands for the log-prob of each number."""
        features: Tensor = self.trunk(normalized)
        value = run_mlp(self.critic, features)
        if point is not None:
            error = self._mismatch(features, action, point)
            return Evaluation(-error, torch.zeros_like(error), value)
        chain = action.view(len(action), self.steps + 1, self.size)
        before, after = chain[:, :-1].flatten(0, 1), chain[:, 1:].flatten(0, 1)
        time = torch.arange(self.steps, device=action.device) / self.steps
        rows = features.repeat_interleave(self.steps, 0)
        mean, log_std = self._next(rows, before, time.repeat(len(action)).unsqueeze(-1))
        log_std = log_std.expand_as(mean)
        noise = (after - mean) * (-log_std).exp()
        log_prob = -0.5 * noise.square() - log_std - HALF_LOG_TWO_PI
        entropy = log_std + (0.5 + HALF_LOG_TWO_PI)
        shape = (len(action), self.steps, self.size)
        return Evaluation(log_prob.view(shape).sum(1), entropy.view(shape).sum(1), value)

    def action_parameter_names(self) -> set[str]:
        """Return those of the first layers, which see the numbers, and of the last ones."""
        ends = ("0.", f"{len(self.velocity) - 1}.")
        names = {name for name, _ in self.named_parameters()}
        starts = tuple(f"{net}.{end}" for net in ("velocity", "deviation") for end in ends)
        return {name for name in names if name.startswith(starts)}

    def graph_misfit(self) -> str:
        reads = isinstance(self.trunk, VisionLanguage)
        return "a vision-language model reads its observations" if reads else ""

    # -- the flow -----------------------------------------------------------------------------

    def _velocity(self, features: Tensor, x: Tensor, time: Tensor) -> Tensor:
        """``v``, float32 ``[M, C]``."""
        return run_mlp(self.velocity, self._inputs(features, x, time)).float()

    def _inputs(self, features: Tensor, x: Tensor, time: Tensor) -> Tensor:
        return torch.cat([features, x, embedded(time)], -1)

    def _mismatch(self, features: Tensor, action: Tensor, point: Tensor) -> Tensor:
        """Squared errors of the velocity on straight paths, ``[N, C]``."""
        noise, time = point[:, :-1], point[:, -1:]
        x = torch.lerp(noise, action, time)
        return (self._velocity(features, x, time) - (action - noise)).square()

    def _next(self, features: Tensor, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """Mean ``[M, C]`` and logarithm of the deviation (``[M, C]`` or ``[M, 1]``) after a step
        from ``x [M, C]`` at ``time [M, 1]``."""
        velocity = self._velocity(features, x, time)
        said = None
        if self.deviation is not None:
            said = run_mlp(self.deviation, self._inputs(features, x, time))
        return self._noise.after(x, velocity, time, said)


def _time(like: Tensor, time: float) -> Tensor:
    """``[M, 1]``"""
    return torch.full_like(like[:, :1], time)
