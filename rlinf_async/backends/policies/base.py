"""The base class of policies, their registry, and the check of their outputs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from rlinf_async.algorithms.registry import Registry
from rlinf_async.backends.base import PolicyOutputError
from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.backends.policies.moments import ObservationNormalizer, ReturnNormalizer


class Step(NamedTuple):
    """Sampled actions for ``N`` observations."""

    action: Tensor
    """``[N, A]``, or int64 ``[N]``; the other two are ``[N]``"""
    log_prob: Tensor
    value: Tensor


class Evaluation(NamedTuple):
    """Log-probs, entropy and values for given actions, with gradients; all ``[N]``."""

    log_prob: Tensor
    entropy: Tensor
    value: Tensor


class Policy(nn.Module, ABC):
    """Actor, critic and normalisers in one module.

    `act`, `mode`, `value` and `evaluate` take observations as the environment gave them,
    ``forward`` those that are normalised already. ``version``, which is set when weights are
    loaded, names them in errors.
    """

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        if config.observation_size < 1 or config.action_size < 1:
            raise ValueError(
                f"policy {config.name!r}: observation_size is {config.observation_size}, "
                f"action_size is {config.action_size}; fill in the environment's sizes first"
            )
        self.version = -1
        self.observation_normalizer = ObservationNormalizer(
            config.observation_size, config.observation_clip
        )
        self.return_normalizer = ReturnNormalizer()

    @abstractmethod
    def act(self, observation: Tensor, generator: torch.Generator | None = None) -> Step:
        """Sample actions for ``[N, D]``, without gradients.

        Raises `PolicyOutputError` when an output is not finite.
        """

    @abstractmethod
    def mode(self, observation: Tensor) -> Tensor:
        """Return the most likely actions for ``[N, D]``, without gradients."""

    @abstractmethod
    def value(self, observation: Tensor) -> Tensor:
        """Return the values ``[N]`` of ``[N, D]``, without gradients."""

    @abstractmethod
    def forward(self, normalized: Tensor, action: Tensor) -> Evaluation:
        """Evaluate ``action`` at observations that are normalised already."""

    def evaluate(self, observation: Tensor, action: Tensor) -> Evaluation:
        """Return log-probs and entropy of ``action``, and values, with gradients; all ``[N]``."""
        with torch.no_grad():
            normalized = self.observation_normalizer(observation)
        evaluation: Evaluation = self(normalized, action)
        return evaluation

    def value_parameter_names(self) -> set[str]:
        """Return the names of the parameters that only the value uses."""
        return {name for name, _ in self.named_parameters() if name.startswith("critic.")}

    def require_finite(self, **outputs: Tensor) -> None:
        """Raise `PolicyOutputError`, naming version and tensor, unless all are finite."""
        # One sum for each tensor is the cheapest check: NaN and infinity carry over to it.
        if all(math.isfinite(tensor.sum().item()) for tensor in outputs.values()):
            return
        for name, tensor in outputs.items():
            bad = int((~torch.isfinite(tensor)).sum())
            if bad:
                raise PolicyOutputError(
                    f"policy {type(self).__name__}, weights version {self.version}: {bad} of "
                    f"{tensor.numel()} elements of {name!r} are NaN or infinite; look at the "
                    "observations first, then at the learning rate"
                )


class PolicyBuilder(Protocol):
    """The signature of a registered policy: a class, or a function that returns one."""

    def __call__(self, config: PolicyConfig, /) -> Policy: ...


policies: Registry[PolicyBuilder] = Registry(
    "policy", built_in=("rlinf_async.backends.policies.mlp",)
)

Builder = TypeVar("Builder", bound=PolicyBuilder)


def register_policy(name: str) -> Callable[[Builder], Builder]:
    """Return a decorator that registers a policy under ``name`` and keeps its type."""

    def register(builder: Builder) -> Builder:
        policies.register(name)(builder)
        return builder

    return register
