"""The distribution of an action of several factors: log-probs and entropies add up.

A continuous factor is a normal distribution whose deviation does not depend on the state, a choice
is categorical. The outputs of a network are one mean for each number and one logit for each choice,
in the order of the factors.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlinf_async.messages.spaces import ActionSpec

HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


class ActionDistribution:
    """Distributions of ``N`` actions.

    Args:
        spec: the factors.
        outputs: ``[N, spec.outputs]``, of a network.
        log_std: ``[C]``: logarithms of the deviations of all ``C`` continuous values.
    """

    def __init__(self, spec: ActionSpec, outputs: Tensor, log_std: Tensor) -> None:
        self._spec = spec
        parts = torch.split(outputs, [factor.size for factor in spec.factors], dim=-1)
        normal = [factor.size for factor in spec.factors if factor.kind == "continuous"]
        deviations = iter(torch.split(log_std, normal))
        self._factors: list[_Normal | _Categorical] = [
            _Normal(part, next(deviations)) if factor.kind == "continuous" else _Categorical(part)
            for factor, part in zip(spec.factors, parts, strict=True)
        ]

    def sample(self, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Actions ``[N, columns]`` (int64 ``[N]`` of one choice), and their log-probs ``[N]``."""
        drawn = [factor.sample(generator) for factor in self._factors]
        return self._joined(drawn), self._log_prob(drawn)

    def mode(self) -> Tensor:
        """The most likely actions."""
        return self._joined([factor.mode() for factor in self._factors])

    def log_prob(self, action: Tensor) -> Tensor:
        """Log-probs ``[N]`` of given actions."""
        columns = action.unsqueeze(-1) if self._spec.discrete else action
        return self._log_prob(
            list(torch.split(columns, [factor.columns for factor in self._spec.factors], dim=-1))
        )

    def entropy(self) -> Tensor:
        """``[N]``"""
        return torch.stack([factor.entropy() for factor in self._factors]).sum(0)

    def _log_prob(self, columns: list[Tensor]) -> Tensor:
        each = [factor.log_prob(part) for factor, part in zip(self._factors, columns, strict=True)]
        return torch.stack(each).sum(0)

    def _joined(self, columns: list[Tensor]) -> Tensor:
        if self._spec.discrete:
            return columns[0].squeeze(-1)
        floating = any(factor.kind == "continuous" for factor in self._spec.factors)
        joined = [part.float() for part in columns] if floating else columns
        return torch.cat(joined, dim=-1)


class _Normal:
    def __init__(self, mean: Tensor, log_std: Tensor) -> None:
        self._mean, self._log_std = mean, log_std

    def sample(self, generator: torch.Generator | None) -> Tensor:
        noise = torch.randn(self._mean.shape, generator=generator, device=self._mean.device)
        return torch.addcmul(self._mean, noise, self._log_std.exp())

    def mode(self) -> Tensor:
        return self._mean

    def log_prob(self, value: Tensor) -> Tensor:
        standard = (value - self._mean) * (-self._log_std).exp()
        return -0.5 * standard.square().sum(-1) - self._log_scale()

    def entropy(self) -> Tensor:
        return (self._log_scale() + 0.5 * self._log_std.numel()).repeat(len(self._mean))

    def _log_scale(self) -> Tensor:
        # The logarithm of the density's normalising constant, a scalar.
        return self._log_std.sum() + HALF_LOG_TWO_PI * self._log_std.numel()


class _Categorical:
    def __init__(self, logits: Tensor) -> None:
        self._log_probs = logits.log_softmax(-1)

    def sample(self, generator: torch.Generator | None) -> Tensor:
        return torch.multinomial(self._log_probs.exp(), 1, generator=generator)

    def mode(self) -> Tensor:
        return self._log_probs.argmax(-1, keepdim=True)

    def log_prob(self, value: Tensor) -> Tensor:
        # A sum over one element is a new tensor: FSDP2 loses its hooks on outputs that are views.
        return self._log_probs.gather(-1, value.long()).sum(-1)

    def entropy(self) -> Tensor:
        return -(self._log_probs.exp() * self._log_probs).sum(-1)
