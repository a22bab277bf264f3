"""A policy that answers: numpy in, numpy out, under one weight version."""

from __future__ import annotations

import torch

from rlinf_async.backends.base import PolicyAnswer
from rlinf_async.backends.policies.base import find_policy
from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.backends.policies.tensors import to_tensors
from rlinf_async.messages.embodied import Floats, Ints
from rlinf_async.messages.spaces import Seen
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.weights import load


class PolicyServer:
    """A `PolicyBackend` over a registered policy, for a rollout worker.

    ``seed`` makes its sampling repeatable; give every worker its own.
    """

    def __init__(self, config: PolicyConfig, seed: int = 0, device: str = "cpu") -> None:
        self._device = torch.device(device)
        self._policy = find_policy(config.name)(config).to(self._device).eval()
        self._generator = torch.Generator(self._device).manual_seed(seed)

    @property
    def version(self) -> int:
        """The version of the loaded weights; -1 before the first."""
        return self._policy.version

    def load(self, update: WeightUpdate) -> None:
        """Take the weights; raises `WeightsError` before anything changed if they do not fit."""
        load(update, self._policy)
        self._policy.version = update.version

    def act(self, observation: Seen) -> PolicyAnswer:
        """Sample actions for ``[N, D]``; raises `PolicyOutputError` for NaN or infinity."""
        step = self._policy.act(to_tensors(observation, self._device), self._generator)
        return PolicyAnswer(*(tensor.cpu().numpy() for tensor in step))

    def mode(self, observation: Seen) -> Floats | Ints:
        """Return the most likely actions for ``[N, D]``."""
        action: Floats | Ints = (
            self._policy.mode(to_tensors(observation, self._device)).cpu().numpy()
        )
        return action

    def value(self, observation: Seen) -> Floats:
        """Return values ``[N]`` of ``[N, D]``."""
        value: Floats = self._policy.value(to_tensors(observation, self._device)).cpu().numpy()
        return value
