"""The modules that are sharded: a Hugging Face decoder with a head for log-probs or for values.

Everything that computes with parameters runs inside ``forward`` of the outermost module: only there
are sharded parameters whole.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from rlinf_async.backends.families import UnsupportedModel, supported_families
from rlinf_async.backends.fsdp.language.head import token_statistics
from rlinf_async.backends.language_training.packing import Packed
from rlinf_async.backends.language_training.token_statistics import TokenStatistics
from rlinf_async.backends.transformers.tensors import ModelTensors


class LanguageNetwork(nn.Module):
    """A causal language model over packed rows."""

    def __init__(self, language: nn.Module, *, packs: bool) -> None:
        """Take a model of transformers.

        ``packs``: its attention is `packed_attention`; else it separates the samples by positions.
        """
        super().__init__()
        self.language = language
        self._packs = packs

    def hidden_states(self, packed: Packed) -> Tensor:
        """Return ``[N, D]``: the last hidden states at ``packed.rows``."""
        lengths: dict[str, Any] = {"sample_lengths": packed.lengths} if self._packs else {}
        decoder = cast(Any, self.language).get_decoder()
        output = decoder(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            use_cache=False,
            **lengths,
        )
        hidden: Tensor = output.last_hidden_state
        return hidden[0].index_select(0, packed.rows)


class PolicyNetwork(LanguageNetwork):
    """Computes log-probs and entropies."""

    def __init__(self, language: nn.Module, *, packs: bool, logit_chunk_bytes: int) -> None:
        super().__init__(language, packs=packs)
        self.published = ModelTensors(language).published()
        """tensors of its checkpoints, by name: where each lies in ``language``"""
        self._chunk_bytes = logit_chunk_bytes
        config = cast(Any, language).config
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        # Cohere multiplies the logits, Granite divides them.
        multiplied = getattr(config, "logit_scale", None) or 1.0
        self._logit_scale = multiplied / (getattr(config, "logits_scaling", None) or 1.0)

    def forward(self, packed: Packed) -> TokenStatistics:
        """Return log-probs and entropies ``[N]`` of the targets."""
        head = cast(Any, self.language).get_output_embeddings()
        return token_statistics(
            self.hidden_states(packed),
            head.weight,
            head.bias,
            packed.targets,
            packed.inverse_temperature * self._logit_scale,
            kept=packed.kept,
            softcap=self._softcap,
            chunk_bytes=self._chunk_bytes,
        )


class ValueNetwork(LanguageNetwork):
    """Computes values: the decoder of a language model and one output, which begins at 0."""

    def __init__(self, language: nn.Module, *, packs: bool) -> None:
        super().__init__(language, packs=packs)
        head = cast(Any, language).get_output_embeddings()
        # The head over the vocabulary has no part in a value; an embedding tied to it stays.
        for name, child in list(language.named_children()):
            if child is head:
                setattr(language, name, nn.Identity())
        self.value_head = nn.Linear(head.in_features, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, packed: Packed) -> Tensor:
        """Return the values ``[N]`` of the states before the targets."""
        value: Tensor = self.value_head(self.hidden_states(packed)).float()
        return value.squeeze(-1).clone()


def check_same_as_transformers(network: PolicyNetwork) -> None:
    """Raise `UnsupportedModel` unless packed log-probs are those of transformers' forward pass.

    Architectures differ in what they do to logits and in what they carry from token to token; one
    that does more than is known here must not be silently trained wrongly.
    """
    language = cast(Any, network.language)
    size = min(language.config.get_text_config().vocab_size, 97)
    device = next(network.parameters()).device
    ids = (torch.arange(1, 12, device=device) * 7) % size
    parts = [ids[:6], ids[6:]]
    packed = Packed(
        torch.cat([part[:-1] for part in parts])[None],
        torch.cat([torch.arange(len(part) - 1, device=device) for part in parts])[None],
        [len(part) - 1 for part in parts],
        torch.arange(9, device=device),
        torch.cat([part[1:] for part in parts]),
        torch.ones(9, device=device),
    )
    with torch.no_grad():
        try:
            found = network(packed).log_prob
        except (AttributeError, LookupError, RuntimeError, TypeError) as error:
            raise UnsupportedModel(
                f"a {type(language).__name__} cannot be trained: its forward pass over packed "
                f"samples fails with {type(error).__name__}: {error}. {supported_families()}"
            ) from error
        expected = torch.cat(
            [
                language(input_ids=part[None, :-1], use_cache=False)
                .logits[0]
                .float()
                .log_softmax(-1)
                .gather(-1, part[1:, None])[:, 0]
                for part in parts
            ]
        )
    worst = float((found - expected).abs().max())
    if not worst <= 1e-3:
        raise UnsupportedModel(
            f"a {type(language).__name__} cannot be trained: log-probs of packed samples differ "
            f"from its own forward pass by up to {worst:.3g}. {supported_families()}"
        )
