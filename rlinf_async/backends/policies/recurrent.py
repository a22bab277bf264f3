"""Recurrent policies: they remember what they saw since the episode began.

An observation is then a mapping: ``state [N, D]``, and ``memory [N, H]``, what was remembered
before it (zeros at the beginning of an episode). Training takes whole sequences: ``state
[N, T, D]``, ``memory [N, H]`` before the first step, and ``starts [N, T]``, 1 at the steps that
begin an episode, before which the memory is forgotten.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor, nn

from rlinf_async.backends.policies.base import (
    Evaluation,
    Policy,
    Step,
    register_policy,
)
from rlinf_async.backends.policies.config import PolicyConfig, mlp_misfit
from rlinf_async.backends.policies.mlp import ActorCriticPolicy, tanh_mlp
from rlinf_async.messages.spaces import STATE

MEMORY: Final = "memory"
STARTS: Final = "starts"

Observation = Mapping[str, Tensor]


class RecurrentPolicy(Policy[Observation]):
    """A policy whose answers depend on a memory ``[N, H]``, too.

    `act`, `mode` and `value` take single observations, ``forward`` whole sequences: log-probs,
    entropies and values are then ``[N, T]``.
    """

    recurrent = True
    memory_size: int
    """``H``"""

    @abstractmethod
    def act_and_remember(
        self, observation: Observation, generator: torch.Generator | None = None
    ) -> tuple[Step, Tensor]:
        """Sample actions; return the memory ``[N, H]`` after the observations, too."""

    @abstractmethod
    def mode_and_remember(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """Return the most likely actions, and the memory ``[N, H]`` after the observations."""

    def act(self, observation: Observation, generator: torch.Generator | None = None) -> Step:
        return self.act_and_remember(observation, generator)[0]

    def mode(self, observation: Observation) -> Tensor:
        return self.mode_and_remember(observation)[0]


@register_policy("gru")
class GruPolicy(RecurrentPolicy, ActorCriticPolicy[Observation]):
    """An MLP, a gated recurrent unit (Cho et al. 2014), and a linear layer each for action and
    value; observations of one vector, any action space.
    """

    @classmethod
    def misfit(cls, config: PolicyConfig) -> str:
        if config.action_chunk > 1:
            return (
                f"it acts once for each observation, and env.action_chunk is {config.action_chunk}"
            )
        return mlp_misfit(config)

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self.memory_size = config.memory_size
        sizes = (config.observation_size, *config.hidden_sizes)
        self.encoder = nn.Sequential(
            *(tanh_mlp(pair, output_gain=2**0.5) for pair in pairwise(sizes))
        )
        self.gates = nn.GRUCell(sizes[-1], config.memory_size)
        for weight in (self.gates.weight_ih, self.gates.weight_hh):
            nn.init.orthogonal_(weight)
        nn.init.zeros_(self.gates.bias_ih)
        nn.init.zeros_(self.gates.bias_hh)
        self.add_networks(config, config.memory_size, ())

    def features(self, normalized: Observation) -> Tensor:
        """Return the memory ``[N, H]`` after the observations."""
        remembered: Tensor = self.gates(self._encoded(normalized[STATE]), normalized[MEMORY])
        return remembered

    @torch.no_grad()
    def act_and_remember(
        self, observation: Observation, generator: torch.Generator | None = None
    ) -> tuple[Step, Tensor]:
        memory = self.features(self.normalized(observation))
        return self.step(memory, generator), memory

    @torch.no_grad()
    def mode_and_remember(self, observation: Observation) -> tuple[Tensor, Tensor]:
        memory = self.features(self.normalized(observation))
        return self.likeliest(memory), memory

    def forward(self, normalized: Observation, action: Tensor) -> Evaluation:
        state, memory, starts = normalized[STATE], normalized[MEMORY], normalized[STARTS]
        inputs = self._encoded(state)
        kept = (1.0 - starts).unsqueeze(-1)
        remembered = []
        for step in range(state.shape[1]):
            memory = self.gates(inputs[:, step], memory * kept[:, step])
            remembered.append(memory)
        features = torch.stack(remembered, 1).flatten(0, 1)  # [N * T, H]
        flat = self.evaluation(features, action.flatten(0, 1))
        # Sums over one element: FSDP2 loses its hooks on outputs that are views.
        return Evaluation(*(one.view(*state.shape[:2], 1).sum(-1) for one in flat))

    def _encoded(self, state: Tensor) -> Tensor:
        """What the gates see of an observation, ``[..., inputs]``."""
        hidden = state
        for layer in self.encoder:
            hidden = layer(hidden).tanh()
        return hidden
