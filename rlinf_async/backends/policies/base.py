"""The base class of policies, their registry, and the distribution of an action.

An action of several factors has a distribution for each, whose log-probs and entropies add up: a
normal one for a continuous factor, with a deviation that does not depend on the state, and a
categorical one for a choice. The outputs of a network are one mean for each number and one logit
for each choice, in the order of the factors.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rlinf_async.backends.base import PolicyOutputError
from rlinf_async.backends.policies.config import PolicyConfig, policy_for
from rlinf_async.backends.policies.moments import ObservationNormalizer, ReturnNormalizer
from rlinf_async.config.registry import Registry
from rlinf_async.messages.spaces import STATE, ActionSpec, ObservationArray

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
    chain: Tensor | None = None
    """``[N, C]``: how the action came about, which ``forward`` takes in place of it to evaluate it;
    None: the action says it"""


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
    normalizes: ClassVar[bool] = True
    """whether the numbers of observations are normalised"""
    off_policy: ClassVar[bool] = False
    """whether it has no value of its own, and learns from stored transitions"""
    rescaled: ClassVar[bool] = False
    """whether its actions are numbers in [-1, 1], which the environment stretches to its bounds"""

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
        self.chunk = max(config.action_chunk, 1)
        """actions of a demonstration, as `forward` takes them in cloning"""
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

    @classmethod
    def entropy_misfit(cls, config: PolicyConfig) -> str:
        """Why a bonus for entropy would do nothing; empty if it does something."""
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
        """Evaluate ``action`` at observations that are normalised already; where `act` returned a
        chain, the chain."""

    def evaluate(self, observation: ObservedT, action: Tensor) -> Evaluation:
        """Return log-probs and entropy of ``action``, and values, with gradients; all ``[N]``."""
        evaluation: Evaluation = self(self.normalized(observation), action)
        return evaluation

    def demonstrated(self, action: Tensor, generator: np.random.Generator) -> tuple[Tensor, ...]:
        """Return what ``forward`` takes after the observation in cloning, which maximises the
        log-probs that it returns, of demonstrated actions: the actions alone.

        ``generator`` is that of the optimizer step, the same on every rank.
        """
        return (action,)

    @torch.no_grad()
    def normalized(self, observation: ObservedT) -> ObservedT:
        """Normalise the numbers of observations; images and texts stay as they are."""
        if isinstance(observation, Tensor):
            return cast(ObservedT, self.observation_normalizer.forward(observation))
        if STATE not in observation:
            return observation
        state = self.observation_normalizer.forward(observation[STATE])
        return cast(ObservedT, {**observation, STATE: state})

    def graph_misfit(self) -> str:
        """Why the policy cannot leave the framework as one graph, although it has the methods that
        a graph is made of; empty if it can."""
        return ""

    def value_parameter_names(self) -> set[str]:
        """Return the names of the parameters that only the value uses."""
        return {name for name, _ in self.named_parameters() if name.startswith("critic.")}

    def action_parameter_names(self) -> set[str]:
        """Return the names of the parameters that stand for numbers and choices of an action: with
        another space of actions they mean something else, even where they have the same shape."""
        return set()

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


@runtime_checkable
class Drawing(Protocol):
    """A policy that can be one graph: tensors only, and no look at their values."""

    def features(self, normalized: Any) -> Tensor:
        """Return features ``[N, F]``; of a recurrent policy, its memory."""
        ...

    def draw(self, features: Tensor, noise: Tensor) -> Tensor:
        """Return the actions to which ``noise [N, outputs]`` leads; zeros: the most likely ones."""
        ...


class PolicyBuilder(Protocol):
    """The signature of a registered policy: a class, or a function that returns one."""

    def __call__(self, config: PolicyConfig, /) -> Policy[Any]: ...


policies: Registry[PolicyBuilder] = Registry(
    "policy",
    built_in=(
        "rlinf_async.backends.policies.mlp",
        "rlinf_async.backends.policies.images",
        "rlinf_async.backends.policies.recurrent",
        "rlinf_async.backends.policies.off_policy",
        "rlinf_async.backends.policies.squashed",
        "rlinf_async.backends.policies.bounded",
        "rlinf_async.backends.policies.residual",
        "rlinf_async.backends.policies.vision_language.policy",
        "rlinf_async.backends.policies.flow_action.policy",
        "rlinf_async.backends.policies.expert_flow.smolvla",
        "rlinf_async.backends.policies.expert_flow.pi0",
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
        deviations = iter(torch.split(log_std, normal) if normal else ())
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

    def draw(self, noise: Tensor) -> Tensor:
        """The actions to which ``noise [N, spec.outputs]`` leads: zeros to the most likely ones,
        standard normal numbers (of choices: standard Gumbel ones) to samples."""
        parts = torch.split(noise, [factor.size for factor in self._spec.factors], dim=-1)
        return self._joined(
            [factor.draw(part) for factor, part in zip(self._factors, parts, strict=True)]
        )

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

    def draw(self, noise: Tensor) -> Tensor:
        return torch.addcmul(self._mean, noise, self._log_std.exp())

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

    def draw(self, noise: Tensor) -> Tensor:
        # The largest of log-probs and Gumbel noise is a sample (Gumbel 1954; Maddison et al. 2014).
        return (self._log_probs + noise).argmax(-1, keepdim=True)

    def log_prob(self, value: Tensor) -> Tensor:
        # A sum over one element is a new tensor: FSDP2 loses its hooks on outputs that are views.
        return self._log_probs.gather(-1, value.long()).sum(-1)

    def entropy(self) -> Tensor:
        return -(self._log_probs.exp() * self._log_probs).sum(-1)


ObservationTensors = Tensor | dict[str, Tensor]
"""``[N, D]``, or the fields of structured observations, ``[N, ...]`` each"""


def to_tensors(seen: ObservationArray, device: torch.device) -> ObservationTensors:
    """Observations ``[N, D]`` or structured ``[N]`` on ``device``; images stay uint8."""
    names = seen.dtype.names
    if names is None:
        return _tensor(seen, device)
    # The rows of a field lie apart from each other: they are brought together in one copy.
    # (`np.ascontiguousarray` makes none for a single row, whose strides torch refuses.)
    return {name: _tensor(seen[name].copy(order="C"), device) for name in names}


def each(observed: ObservationTensors, function: Callable[[Tensor], Tensor]) -> ObservationTensors:
    """Apply ``function`` to the tensor, or to each field."""
    if isinstance(observed, Tensor):
        return function(observed)
    return {name: function(field) for name, field in observed.items()}


def _tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    # Arrays off the wire are read-only, which torch does not know how to respect.
    return torch.from_numpy(array if array.flags.writeable else array.copy()).to(device)
