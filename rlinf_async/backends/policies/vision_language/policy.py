"""Images, an instruction and the robot's state in; action tokens, their log-probs and a value out.

The sequence that the language model reads, all positions causal::

    image tokens | instruction | state | slot 1 ... slot H * A
                                           |             |
                                    value, token 1   token H * A

``H`` actions of ``A`` numbers each are predicted; the first ``k`` are executed and trained by
reinforcement, all of them by cloning. With parallel decoding every slot is a learned embedding, and
all tokens come out of one forward pass, each independent of the others given the observation (Kim,
Finn and Liang 2025, "OpenVLA-OFT"). Autoregressive, slot ``j`` is the embedding of token ``j - 1``,
as in OpenVLA (Kim et al. 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rlinf_async.backends.policies.base import Evaluation, Policy, Step, register_policy
from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.backends.policies.vision_language.backbone import Backbone
from rlinf_async.backends.policies.vision_language.fitting import misfit
from rlinf_async.backends.policies.vision_language.tokens import decode, encode
from rlinf_async.messages.spaces import STATE

Observation = Mapping[str, Tensor]
Choose = Callable[[Tensor], Tensor]
"""log-probs ``[N, S, bins]`` -> tokens ``[N, S]``"""


class Read(NamedTuple):
    """Everything before the slots."""

    embedded: Tensor
    """``[N, P, hidden]``"""
    mask: Tensor
    """``[N, P]``, False for padding"""


@register_policy("vision_language_action")
class VisionLanguageActionPolicy(Policy[Observation]):
    """Actions ``[N, k * A]`` in [-1, 1]; log-probs and entropies ``[N, k * A]``, values ``[N, k]``.

    With ``token_values`` there is a value before each token, ``[N, k * A]``, read at its own slot:
    where tokens are decoded one by one, it knows those before.

    The environment stretches [-1, 1] to its bounds (``env.actions = "rescale"``).
    """

    levels = ("token", "action", "chunk")

    @classmethod
    def misfit(cls, config: PolicyConfig) -> str:
        return misfit(config)

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        own = config.vision_language
        self.bins, self.executed = own.bins, max(config.action_chunk, 1)
        """actions of a chunk that are executed: ``k``"""
        self.numbers = config.action_size // self.executed
        """numbers of one action: ``A``"""
        self.chunk = own.chunk or self.executed
        self.parallel = own.decoding == "parallel"
        images, texts = config.sees.of_kind("image"), config.sees.of_kind("text")
        self._images, self._texts = [one.name for one in images], [one.name for one in texts]
        self.backbone = Backbone(own, images[0].shape[0])
        hidden = self.backbone.hidden_size
        state = config.sees.state_size
        self.state = nn.Linear(state, hidden) if state else None
        slots = self.chunk * self.numbers if self.parallel else 1
        self.slots = nn.Parameter(torch.randn(slots, hidden) * hidden**-0.5)
        self.token_values = config.token_values
        values = 1 if self.token_values else self.executed
        self.critic = nn.Sequential(nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, values))
        if own.lora.rank:
            from rlinf_async.backends.policies.vision_language.lora import add_adapters

            add_adapters(self.backbone.model, own.lora)

    # -- what a policy does -------------------------------------------------------------------

    @torch.no_grad()
    def act(self, observation: Observation, generator: torch.Generator | None = None) -> Step:
        def sample(log_probs: Tensor) -> Tensor:
            flat = log_probs.exp().flatten(0, -2)
            return torch.multinomial(flat, 1, generator=generator).view(log_probs.shape[:-1])

        token, log_probs, value = self._decoded(self._read(self.normalized(observation)), sample)
        self.require_finite(log_probs=log_probs, value=value)
        log_prob = log_probs.gather(-1, token.unsqueeze(-1)).squeeze(-1)
        return Step(decode(token, self.bins), log_prob, value)

    @torch.no_grad()
    def mode(self, observation: Observation) -> Tensor:
        def likeliest(log_probs: Tensor) -> Tensor:
            return log_probs.argmax(-1)

        token, log_probs, _ = self._decoded(self._read(self.normalized(observation)), likeliest)
        self.require_finite(log_probs=log_probs)
        return decode(token, self.bins)

    @torch.no_grad()
    def value(self, observation: Observation) -> Tensor:
        read = self._read(self.normalized(observation))
        hidden = self._hidden(read, self._slots(len(read.mask), None)[:, :1])
        value = self._values(hidden)
        self.require_finite(value=value)
        # Before the first token nobody knows the others.
        return value.expand(-1, self._length) if self.token_values else value

    def forward(self, normalized: Observation, action: Tensor) -> Evaluation:
        """Evaluate ``action [N, S]``: the first ``S`` numbers of a chunk, at most ``H * A``."""
        token = encode(action, self.bins)
        log_probs, value = self._distributions(normalized, token)
        # A sum over one element, so that no view is returned: FSDP2 loses its hooks on those.
        chosen = log_probs.gather(-1, token.unsqueeze(-1)).sum(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return Evaluation(chosen, entropy, value)

    def _distributions(self, normalized: Observation, token: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probs ``[N, S, bins]`` at the slots of the tokens ``[N, S]``, and values.

        ``S`` is at most ``H * A``.
        """
        hidden = self._hidden(self._read(normalized), self._slots(len(token), token))
        log_probs = self.backbone.logits(hidden, self.bins).log_softmax(-1)
        return log_probs, self._values(hidden)

    @property
    def _length(self) -> int:
        """Tokens that are executed: ``k * A``."""
        return self.executed * self.numbers

    def _values(self, hidden: Tensor) -> Tensor:
        """Values ``[N, k]`` at the first slot of ``[N, S, hidden]``, or one for each executed."""
        if not self.token_values:
            first: Tensor = self.critic(hidden[:, 0])
            return first
        # A sum over one element: see `forward`.
        each: Tensor = self.critic(hidden[:, : self._length]).sum(-1)
        return each

    # -- the sequence -------------------------------------------------------------------------

    def _read(self, normalized: Observation) -> Read:
        """Return the embeddings of images, instruction and state."""
        parts = [self.backbone.embed_image(normalized[name]) for name in self._images]
        masks = [part.new_ones(part.shape[:2], dtype=torch.bool) for part in parts]
        for name in self._texts:
            embedded, mask = self.backbone.embed_text(normalized[name])
            parts.append(embedded)
            masks.append(mask)
        if self.state is not None:
            parts.append(self.state(normalized[STATE]).unsqueeze(1))
            masks.append(masks[0].new_ones(len(masks[0]), 1))
        return Read(torch.cat(parts, 1), torch.cat(masks, 1))

    def _slots(self, samples: int, token: Tensor | None) -> Tensor:
        """The embeddings of the first ``S`` slots, given the tokens ``[N, S]``; else of all."""
        slots = self.slots.expand(samples, -1, -1)
        if token is None:
            return slots
        if self.parallel:
            return slots[:, : token.shape[1]]
        return torch.cat([slots, self.backbone.embed_token(token[:, :-1])], 1)

    def _hidden(self, read: Read, slots: Tensor) -> Tensor:
        there = read.mask.new_ones(slots.shape[:2])
        embedded = torch.cat([read.embedded, slots], 1)
        hidden, _ = self.backbone(embedded, torch.cat([read.mask, there], 1))
        found: Tensor = hidden[:, -slots.shape[1] :]
        return found

    def _decoded(self, read: Read, choose: Choose) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens ``[N, k * A]``, log-probs ``[N, k * A, bins]``, values ``[N, k]``."""
        if not self.parallel:
            return self._one_by_one(read, choose, self._length)
        hidden = self._hidden(read, self._slots(len(read.mask), None)[:, : self._length])
        log_probs = self.backbone.logits(hidden, self.bins).log_softmax(-1)
        return choose(log_probs), log_probs, self._values(hidden)

    def _one_by_one(self, read: Read, choose: Choose, length: int) -> tuple[Tensor, Tensor, Tensor]:
        from transformers import DynamicCache

        cache, mask = DynamicCache(), read.mask
        step = torch.cat([read.embedded, self.slots.expand(len(mask), -1, -1)], 1)
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        tokens: list[Tensor] = []
        rows: list[Tensor] = []
        values: list[Tensor] = []
        for index in range(length):
            hidden, cache = self.backbone(step, mask, cache)
            if self.token_values or not index:
                values.append(self._values(hidden[:, -1:]))
            rows.append(self.backbone.logits(hidden[:, -1:], self.bins).log_softmax(-1))
            tokens.append(choose(rows[-1]))
            step = self.backbone.embed_token(tokens[-1])
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        return torch.cat(tokens, 1), torch.cat(rows, 1), torch.cat(values, 1)
