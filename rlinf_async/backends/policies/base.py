"""The base class of policies, their registry, and the check of their outputs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from rlinf_async.backends.base import PolicyOutputError
from rlinf_async.backends.policies.config import PolicyConfig, policy_for
from rlinf_async.backends.policies.moments import ObservationNormalizer, ReturnNormalizer
from rlinf_async.config.registry import Registry
from rlinf_async.messages.spaces import STATE

ObservedT = TypeVar("ObservedT", bound=Tensor | Mapping[str, Tensor])
"""Observations ``[N, ...]`` as a policy sees them: a vector, or the fields by name."""


class Step(NamedTuple):
    """Sampled actions for ``N`` observations."""

    action: Tensor
    """``[N, A]``, or int64 ``[N, A]`` or ``[N]``"""
    log_prob: Tensor
    """``[N]``; or ``[N, k * tokens]``, one for each token of ``k`` actions"""
    value: Tensor
    """``[N]``; or ``[N, k]``, one for each action; or ``[N, k * tokens]``, one for each token"""


class Evaluation(NamedTuple):
    """Log-probs, entropy and values for given actions, with gradients; shapes as in `Step`."""

    log_prob: Tensor
    entropy: Tensor
    value: Tensor


class Policy(nn.Module, ABC, Generic[ObservedT]):
    """Actor, critic and normalisers in one module, for observations of type ``ObservedT``.

    Where an observation is one vector, that is a tensor ``[N, D]``; else it is a mapping of names
    to tensors: ``state [N, D]``, images uint8 ``[N, height, width, channels]``, and texts as bytes
    ``[N, size]``. The configuration has the specs of both spaces.

    `act`, `mode`, `value` and `evaluate` take observations as the environment gave them,
    ``forward`` those that are normalised already. ``version``, which is set when weights are
    loaded, names them in errors.
    """

    recurrent: ClassVar[bool] = False
    """whether it remembers what it saw before: a `RecurrentPolicy`"""
    off_policy: ClassVar[bool] = False
    """whether it has no value of its own, and learns from stored transitions"""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        problem = self.misfit(config)
        if problem:
            raise ValueError(f"policy {config.name!r}: {problem}")
        if config.observation_size < 1 > len(config.observation.parts) or config.action_size < 1:
            raise ValueError(
                f"policy {config.name!r}: observation_size is {config.observation_size}, "
                f"action_size is {config.action_size}; fill in the environment's sizes first"
            )
        self.version = -1
        self.observation_normalizer = ObservationNormalizer(
            config.observation_size, config.observation_clip
        )
        self.return_normalizer = ReturnNormalizer()

    @classmethod
    def misfit(cls, config: PolicyConfig) -> str:
        """Why this policy cannot have the observations or actions of ``config``; empty if it can.

        Asked before anything starts.
        """
        return ""

    @abstractmethod
    def act(self, observation: ObservedT, generator: torch.Generator | None = None) -> Step:
        """Sample actions for ``[N, D]``, without gradients.

        Raises `PolicyOutputError` when an output is not finite.
        """

    @abstractmethod
    def mode(self, observation: ObservedT) -> Tensor:
        """Return the most likely actions for ``[N, D]``, without gradients."""

    @abstractmethod
    def value(self, observation: ObservedT) -> Tensor:
        """Return the values ``[N]`` of ``[N, D]``, without gradients."""

    @abstractmethod
    def forward(self, normalized: ObservedT, action: Tensor) -> Evaluation:
        """Evaluate ``action`` at observations that are normalised already."""

    def evaluate(self, observation: ObservedT, action: Tensor) -> Evaluation:
        """Return log-probs and entropy of ``action``, and values, with gradients; all ``[N]``."""
        evaluation: Evaluation = self(self.normalized(observation), action)
        return evaluation

    @torch.no_grad()
    def normalized(self, observation: ObservedT) -> ObservedT:
        """Normalise the numbers of observations; images and texts stay as they are."""
        if isinstance(observation, Tensor):
            return cast(ObservedT, self.observation_normalizer.forward(observation))
        if STATE not in observation:
            return observation
        state = self.observation_normalizer.forward(observation[STATE])
        return cast(ObservedT, {**observation, STATE: state})

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

    def __call__(self, config: PolicyConfig, /) -> Policy[Any]: ...


policies: Registry[PolicyBuilder] = Registry(
    "policy",
    built_in=(
        "rlinf_async.backends.policies.mlp",
        "rlinf_async.backends.policies.factored",
        "rlinf_async.backends.policies.cnn",
        "rlinf_async.backends.policies.recurrent",
        "rlinf_async.backends.policies.squashed",
        "rlinf_async.backends.policies.vision_language.policy",
    ),
    group="rlinf_async.policies",
    called_with=("config",),
)


def find_policy(name: str) -> PolicyBuilder:
    """Return the policy that a setting names. Raises `UnknownName` and `ConfigError`."""
    return policies.load(name)


@policies.register("auto")
def _fitting(config: PolicyConfig) -> Policy[Any]:
    """The built-in policy that fits the spaces."""
    return policies[policy_for(config)](config)


Builder = TypeVar("Builder", bound=PolicyBuilder)


def register_policy(name: str) -> Callable[[Builder], Builder]:
    """Return a decorator that registers a policy under ``name`` and keeps its type."""

    def register(builder: Builder) -> Builder:
        policies.register(name)(builder)
        return builder

    return register
