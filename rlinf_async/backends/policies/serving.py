"""A policy that answers: numpy in, numpy out, under one weight version."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf_async.backends.base import PolicyAnswer
from rlinf_async.backends.policies.base import Policy, Step, find_policy, to_tensors
from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.backends.policies.mlp import ArrayGaussian
from rlinf_async.backends.policies.recurrent import MEMORY, RecurrentPolicy
from rlinf_async.messages.embodied import Floats, Ints
from rlinf_async.messages.spaces import STATE, ObservationArray
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.weights.pack import load


class PolicyServer:
    """A `PolicyBackend` over a registered policy, for a rollout worker.

    ``seed`` makes its sampling repeatable; give every worker its own.
    """

    def __init__(self, config: PolicyConfig, seed: int = 0, device: str = "cpu") -> None:
        self._device = torch.device(device)
        self._policy = self._build(config).to(self._device).eval()
        self._generator = torch.Generator(self._device).manual_seed(seed)
        self._on_arrays = ArrayGaussian.of(self._policy, self._device)

    def _build(self, config: PolicyConfig) -> Policy[Any]:
        return find_policy(config.name)(config)

    @property
    def policy(self) -> Policy[Any]:
        """The policy itself."""
        return self._policy

    @property
    def version(self) -> int:
        """The version of the loaded weights; -1 before the first."""
        return self._policy.version

    def load(self, update: WeightUpdate) -> None:
        """Take the weights; raises `WeightsError` before anything changed if they do not fit."""
        load(update, self._policy)
        self._policy.version = update.version

    def act(self, observation: ObservationArray) -> PolicyAnswer:
        """Sample actions for ``[N, D]``; raises `PolicyOutputError` for NaN or infinity."""
        if self._on_arrays is not None:
            return self._on_arrays.act(observation, self._generator)
        step = self._policy.act(to_tensors(observation, self._device), self._generator)
        return _answer(step)

    def mode(self, observation: ObservationArray) -> Floats | Ints:
        """Return the most likely actions for ``[N, D]``."""
        action: Floats | Ints = (
            self._policy.mode(to_tensors(observation, self._device)).cpu().numpy()
        )
        return action

    def value(self, observation: ObservationArray) -> Floats:
        """Return values ``[N]`` of ``[N, D]``."""
        value: Floats = self._policy.value(to_tensors(observation, self._device)).cpu().numpy()
        return value


class RecurrentPolicyServer(PolicyServer):
    """A `RecurrentPolicyBackend` over a registered policy; `act` and the like begin an episode."""

    _policy: RecurrentPolicy

    def _build(self, config: PolicyConfig) -> RecurrentPolicy:
        policy = super()._build(config)
        if not isinstance(policy, RecurrentPolicy):
            raise TypeError(f"{config.name!r} is not recurrent")
        return policy

    @property
    def memory_size(self) -> int:
        """Numbers of a memory."""
        return self._policy.memory_size

    def act_from(self, observation: ObservationArray, memory: Floats) -> PolicyAnswer:
        """Sample actions for ``[N, D]``, given the memories ``[N, H]``."""
        observed = self._observed(observation, memory)
        step, after = self._policy.act_and_remember(observed, self._generator)
        return _answer(step)._replace(memory=after.cpu().numpy())

    def mode_from(
        self, observation: ObservationArray, memory: Floats
    ) -> tuple[Floats | Ints, Floats]:
        """Return the most likely actions, and the memories ``[N, H]`` after the observations."""
        action, after = self._policy.mode_and_remember(self._observed(observation, memory))
        return action.cpu().numpy(), after.cpu().numpy()

    def value_from(self, observation: ObservationArray, memory: Floats) -> Floats:
        """Return values ``[N]``, given the memories."""
        value: Floats = self._policy.value(self._observed(observation, memory)).cpu().numpy()
        return value

    def act(self, observation: ObservationArray) -> PolicyAnswer:
        return self.act_from(observation, self._nothing(observation))

    def mode(self, observation: ObservationArray) -> Floats | Ints:
        return self.mode_from(observation, self._nothing(observation))[0]

    def value(self, observation: ObservationArray) -> Floats:
        return self.value_from(observation, self._nothing(observation))

    def _nothing(self, observation: ObservationArray) -> Floats:
        return np.zeros((len(observation), self.memory_size), np.float32)

    def _observed(self, observation: ObservationArray, memory: Floats) -> dict[str, Tensor]:
        seen = to_tensors(observation, self._device)
        fields = {STATE: seen} if isinstance(seen, Tensor) else seen
        remembered = to_tensors(memory, self._device)
        return {**fields, MEMORY: remembered} if isinstance(remembered, Tensor) else fields


def _answer(step: Step) -> PolicyAnswer:
    action, log_prob, value = (one.cpu().numpy() for one in step[:3])
    chain = None if step.chain is None else step.chain.cpu().numpy()
    return PolicyAnswer(action, log_prob, value, chain=chain)


def serve_policy(config: PolicyConfig, seed: int = 0, device: str = "cpu") -> PolicyServer:
    """Return the server that the registered policy needs."""
    recurrent = getattr(find_policy(config.name), "recurrent", False)
    return (RecurrentPolicyServer if recurrent else PolicyServer)(config, seed, device)
