"""Images, an instruction and the robot's state in; action tokens, their log-probs and a value out.

The sequence that the language model reads, all positions causal::

    image tokens | instruction | state | slot 1 ... slot H * A
                                           |             |
                                    value, token 1   token H * A

``H`` actions of ``A`` numbers each are predicted; the first ``k`` are executed and trained by
reinforcement, all of them by cloning. With parallel decoding every slot is a learned embedding, and
all tokens come out of one forward pass, each independent of the others given the observation (Kim,
Finn and Liang 2025, "OpenVLA-OFT"); with ``attention = "bidirectional"`` the slots see each other,
and with ``head = "continuous"`` a network says an action's numbers from its slots, in place of
tokens. Autoregressive, slot ``j`` is the embedding of token ``j - 1``,
as in OpenVLA (Kim et al. 2024).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf_async.backends.base import LoraConfig
from rlinf_async.backends.building import one_at_a_time
from rlinf_async.backends.policies.base import Evaluation, Policy, Step, register_policy
from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.backends.policies.vision_language.config import VisionLanguageConfig
from rlinf_async.backends.policies.vision_language.continuous import (
    ContinuousHead,
    entropy_of,
    log_prob_of,
)
from rlinf_async.backends.policies.vision_language.fitting import misfit
from rlinf_async.messages.spaces import STATE

BYTES = 256
SPECIAL = 4  # ids below: padding, begin, end, image


class Backbone(nn.Module):
    """A vision-language model of Hugging Face: images and texts -> embeddings, which go into its
    language model together; embeddings -> hidden states ``[N, S, hidden]``.

    Any model will do that has the methods which transformers gives all of them:
    `get_image_features`, `get_input_embeddings`, `get_decoder`. Images are prepared by torch alone.

    ``config``: of the policy; ``image_size``: pixels along a side of the environment's images,
    which a new model is built for, and which a folder's model scales to its own.

    Raises `ValueError` for more bins than there are tokens. What else can be wrong with a folder,
    or with the sizes, `fitting.misfit` says before.
    """

    def __init__(self, config: VisionLanguageConfig, image_size: int) -> None:
        super().__init__()
        self.model = _loaded(config) if config.folder else _new(config, image_size)
        self._tokenizer = _Tokenizer(config.folder)
        sizes = self.model.config
        self.image_size: int = sizes.vision_config.image_size
        self.hidden_size: int = sizes.text_config.hidden_size
        self.vocabulary: int = self.model.get_input_embeddings().weight.shape[0]
        if config.bins > self.vocabulary:
            raise ValueError(
                f"bins is {config.bins}, but the vocabulary of {config.folder!r} has "
                f"{self.vocabulary} tokens, of which the last ones become action tokens"
            )

    def embed_image(self, pixels: Tensor) -> Tensor:
        """Return ``[N, tokens, hidden]`` of one uint8 image ``[N, height, width, channels]``."""
        image = pixels.movedim(-1, 1).to(torch.float32).div_(127.5).sub_(1.0)
        if image.shape[1] == 1:
            image = image.expand(-1, 3, -1, -1)
        side = self.image_size
        if image.shape[-2:] != (side, side):
            image = functional.interpolate(
                image, (side, side), mode="bilinear", align_corners=False, antialias=True
            )
        features: Tensor = self.model.model.get_image_features(image.unsqueeze(1)).pooler_output
        return features

    def embed_text(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``[N, tokens, hidden]`` of UTF-8 ``[N, bytes]``, and where there is no padding."""
        tokens, mask = self._tokenizer(text)
        return self.model.get_input_embeddings()(tokens), mask

    def embed_token(self, token: Tensor) -> Tensor:
        """Return ``[..., hidden]`` of action tokens, counted from the end of the vocabulary."""
        embedded: Tensor = self.model.get_input_embeddings()(self.vocabulary - 1 - token)
        return embedded

    def logits(self, hidden: Tensor, bins: int) -> Tensor:
        """Return the logits ``[..., bins]`` of action tokens alone: the last of the vocabulary."""
        weight = self.model.get_output_embeddings().weight[-bins:].flip(0)
        return functional.linear(hidden, weight)

    def forward(
        self, embedded: Tensor, mask: Tensor, cache: Any = None, *, mutual: int = 0
    ) -> tuple[Tensor, Any]:
        """Return hidden states of the last ``S`` positions, ``[N, S, hidden]``, and the cache.

        ``mask``: ``[N, P + S]``, 0 for padding, of the ``P`` positions in the cache too. The last
        ``mutual`` positions see each other.
        """
        positions = (mask.cumsum(-1) - 1).clamp_(min=0)[:, -embedded.shape[1] :]
        if mutual:
            mask = _seeing(mask, mutual)
        output = self.model.get_decoder()(
            inputs_embeds=embedded,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=cache is not None,
        )
        return output.last_hidden_state, output.past_key_values


def _seeing(mask: Tensor, mutual: int) -> Tensor:
    """``[N, 1, S, S]``, True where a position sees another."""
    size = mask.shape[1]
    sees = torch.ones(size, size, dtype=torch.bool, device=mask.device).tril()
    sees[-mutual:, -mutual:] = True
    return (sees & mask.bool().unsqueeze(1)).unsqueeze(1)


class _Tokenizer:
    """UTF-8 bytes -> tokens: the folder's tokenizer, or each byte is a token."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        if folder:
            import transformers

            self._words = transformers.AutoTokenizer.from_pretrained(folder)
            self._encoded = lru_cache(maxsize=4096)(self._encode)

    def __call__(self, text: Tensor) -> tuple[Tensor, Tensor]:
        if not self._folder:
            there = text != 0
            return torch.where(there, text.long() + SPECIAL, 0), there
        rows = [self._encoded(bytes(row)) for row in text.cpu().numpy()]
        length = max(len(row) for row in rows)
        tokens = torch.zeros(len(rows), length, dtype=torch.long)
        mask = torch.zeros(len(rows), length, dtype=torch.bool)
        for index, row in enumerate(rows):
            tokens[index, : len(row)] = torch.tensor(row)
            mask[index, : len(row)] = True
        return tokens.to(text.device), mask.to(text.device)

    def _encode(self, text: bytes) -> tuple[int, ...]:
        return tuple(self._words.encode(text.rstrip(b"\0").decode("utf-8", "replace")))


def _loaded(config: VisionLanguageConfig) -> Any:
    import transformers

    with one_at_a_time:
        return transformers.AutoModelForImageTextToText.from_pretrained(
            config.folder, dtype=torch.float32
        )


def _new(config: VisionLanguageConfig, image_size: int) -> Any:
    library: Any = importlib.import_module("transformers")

    inner = {
        "hidden_size": config.hidden_size,
        "intermediate_size": 2 * config.hidden_size,
        "num_attention_heads": config.heads,
        # The usual 0.02 suits models that are ten times as wide; a tiny one hardly learns from it.
        "initializer_range": config.hidden_size**-0.5,
    }
    vision = inner | {
        "num_hidden_layers": config.vision_layers,
        "image_size": image_size,
        "patch_size": config.patch_size,
    }
    language = inner | {
        "model_type": "llama",
        "num_hidden_layers": config.layers,
        "num_key_value_heads": config.heads,
        "vocab_size": SPECIAL + BYTES + config.bins,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    return library.SmolVLMForConditionalGeneration(
        library.SmolVLMConfig(
            vision_config=vision,
            text_config=language,
            scale_factor=config.scale_factor,
            initializer_range=config.hidden_size**-0.5,
            image_token_id=3,
            pad_token_id=0,
            tie_word_embeddings=False,
        )
    )


LAYERS = r".*text_model.*\.(q|k|v|o|gate|up|down)_proj"
"""linear layers of a language model"""


def add_adapters(model: nn.Module, config: LoraConfig, layers: str = LAYERS) -> None:
    """Give the linear layers whose names ``layers`` matches low-rank adapters, in place; the
    model's own weights are frozen.

    Raises `ModuleNotFoundError` where peft is not installed.
    """
    peft: Any = importlib.import_module("peft")
    model.requires_grad_(False)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=layers,
    )
    peft.inject_adapter_in_model(settings, model)


def encode(action: Tensor, bins: int) -> Tensor:
    """Return the bin, int64, of each number; numbers outside [-1, 1] are in the outer ones.

    OpenVLA's bins (Kim et al. 2024, section 3.2) lie between quantiles of the training data; these
    are equal parts of [-1, 1], which the environment stretches to its bounds: no data is needed,
    and decoding is exact.
    """
    return ((action + 1.0) * (0.5 * bins)).floor().long().clamp(0, bins - 1)


def decode(token: Tensor, bins: int) -> Tensor:
    """Return the middle of each bin, float32. `encode` gives the same bin for it."""
    return (token.float() + 0.5) * (2.0 / bins) - 1.0


Observation = Mapping[str, Tensor]
Choose = Callable[[Tensor], Tensor]
"""log-probs ``[N, S, bins]`` -> tokens ``[N, S]``"""


class Read(NamedTuple):
    """Everything before the slots."""

    embedded: Tensor
    """``[N, P, hidden]``"""
    mask: Tensor
    """``[N, P]``, False for padding"""


def read(
    backbone: Backbone,
    normalized: Observation,
    images: Sequence[str],
    texts: Sequence[str],
    state: nn.Linear | None,
) -> Read:
    """Return the embeddings of the parts of these names, and of the state where there is a layer
    for it."""
    parts = [backbone.embed_image(normalized[name]) for name in images]
    masks = [part.new_ones(part.shape[:2], dtype=torch.bool) for part in parts]
    for name in texts:
        embedded, mask = backbone.embed_text(normalized[name])
        parts.append(embedded)
        masks.append(mask)
    if state is not None:
        parts.append(state(normalized[STATE]).unsqueeze(1))
        masks.append(masks[0].new_ones(len(masks[0]), 1))
    return Read(torch.cat(parts, 1), torch.cat(masks, 1))


@register_policy("vision_language_action")
class VisionLanguageActionPolicy(Policy[Observation]):
    """Actions ``[N, k * A]`` in [-1, 1]; log-probs and entropies ``[N, k * A]``, values ``[N, k]``.

    With ``token_values`` there is a value before each token, ``[N, k * A]``, read at its own slot:
    where tokens are decoded one by one, it knows those before.

    The environment stretches [-1, 1] to its bounds (``env.actions = "rescale"``).
    """

    levels = ("token", "action", "chunk")
    rescaled = True

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
        self.mutual = own.attention == "bidirectional"
        images, texts = config.sees.of_kind("image"), config.sees.of_kind("text")
        self._images, self._texts = [one.name for one in images], [one.name for one in texts]
        self.backbone = Backbone(own, images[0].shape[0])
        hidden = self.backbone.hidden_size
        state = config.sees.state_size
        self.state = nn.Linear(state, hidden) if state else None
        slots = self.chunk * self.numbers if self.parallel else 1
        self.slots = nn.Parameter(torch.randn(slots, hidden) * hidden**-0.5)
        continuous = own.head == "continuous"
        self.head = (
            ContinuousHead(hidden, self.numbers, config.initial_log_std) if continuous else None
        )
        self.token_values = config.token_values
        values = 1 if self.token_values else self.executed
        self.critic = nn.Sequential(nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, values))
        if own.lora.rank:
            add_adapters(self.backbone.model, own.lora)

    # -- what a policy does -------------------------------------------------------------------

    @torch.no_grad()
    def act(self, observation: Observation, generator: torch.Generator | None = None) -> Step:
        if self.head is not None:
            return self._act_by_numbers(self.head, observation, generator)

        def sample(log_probs: Tensor) -> Tensor:
            flat = log_probs.exp().flatten(0, -2)
            return torch.multinomial(flat, 1, generator=generator).view(log_probs.shape[:-1])

        token, log_probs, value = self._decoded(self._read(self.normalized(observation)), sample)
        self.require_finite(log_probs=log_probs, value=value)
        log_prob = log_probs.gather(-1, token.unsqueeze(-1)).squeeze(-1)
        return Step(decode(token, self.bins), log_prob, value)

    @torch.no_grad()
    def mode(self, observation: Observation) -> Tensor:
        if self.head is not None:
            hidden = self._at_slots(self._read(self.normalized(observation)), self._length)
            mean: Tensor = self.head(hidden)[0]
            self.require_finite(action=mean)
            return mean

        def likeliest(log_probs: Tensor) -> Tensor:
            return log_probs.argmax(-1)

        token, log_probs, _ = self._decoded(self._read(self.normalized(observation)), likeliest)
        self.require_finite(log_probs=log_probs)
        return decode(token, self.bins)

    @torch.no_grad()
    def value(self, observation: Observation) -> Tensor:
        read = self._read(self.normalized(observation))
        slots = self._slots(len(read.mask), None)
        hidden = self._hidden(read, slots if self.mutual else slots[:, :1])[:, :1]
        value = self._values(hidden)
        self.require_finite(value=value)
        # Before the first token nobody knows the others.
        return value.expand(-1, self._length) if self.token_values else value

    def demonstrated(self, action: Tensor, generator: np.random.Generator) -> tuple[Tensor, ...]:
        """Return the actions; with a continuous head twice, which asks for their errors."""
        return (action,) if self.head is None else (action, action)

    def forward(
        self, normalized: Observation, action: Tensor, shown: Tensor | None = None
    ) -> Evaluation:
        """Evaluate ``action [N, S]``: the first ``S`` numbers of a chunk, at most ``H * A``; of a
        continuous head, where actions are ``shown``, minus the absolute error of each number stands
        for its log-prob."""
        if self.head is not None:
            hidden = self._at_slots(self._read(normalized), action.shape[1])
            mean, log_std = self.head(hidden)
            value, entropy = self._values(hidden), entropy_of(log_std)
            if shown is not None:
                return Evaluation(-(shown - mean).abs(), entropy, value)
            return Evaluation(log_prob_of(action, mean, log_std), entropy, value)
        token = encode(action, self.bins)
        log_probs, value = self._distributions(normalized, token)
        # A sum over one element, so that no view is returned: FSDP2 loses its hooks on those.
        chosen = log_probs.gather(-1, token.unsqueeze(-1)).sum(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return Evaluation(chosen, entropy, value)

    def _act_by_numbers(
        self, head: ContinuousHead, observation: Observation, generator: torch.Generator | None
    ) -> Step:
        hidden = self._at_slots(self._read(self.normalized(observation)), self._length)
        mean, log_std = head(hidden)
        noise = torch.randn(mean.shape, generator=generator, device=mean.device)
        action = torch.addcmul(mean, noise, log_std.exp())
        value = self._values(hidden)
        self.require_finite(action=action, value=value)
        return Step(action, log_prob_of(action, mean, log_std), value)

    def _distributions(self, normalized: Observation, token: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probs ``[N, S, bins]`` at the slots of the tokens ``[N, S]``, and values.

        ``S`` is at most ``H * A``.
        """
        hidden = self._hidden(self._read(normalized), self._slots(len(token), token))
        hidden = hidden[:, : token.shape[1]]
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
        return read(self.backbone, normalized, self._images, self._texts, self.state)

    def _slots(self, samples: int, token: Tensor | None) -> Tensor:
        """The embeddings of the first ``S`` slots, given the tokens ``[N, S]``; else, and where
        slots see each other, of all."""
        slots = self.slots.expand(samples, -1, -1)
        if token is None or self.mutual:
            return slots
        if self.parallel:
            return slots[:, : token.shape[1]]
        return torch.cat([slots, self.backbone.embed_token(token[:, :-1])], 1)

    def _hidden(self, read: Read, slots: Tensor) -> Tensor:
        there = read.mask.new_ones(slots.shape[:2])
        embedded = torch.cat([read.embedded, slots], 1)
        mutual = slots.shape[1] if self.mutual else 0
        hidden, _ = self.backbone(embedded, torch.cat([read.mask, there], 1), mutual=mutual)
        found: Tensor = hidden[:, -slots.shape[1] :]
        return found

    def _at_slots(self, read: Read, size: int) -> Tensor:
        """Hidden states at the first slots of parallel decoding, ``[N, size, hidden]``."""
        slots = self._slots(len(read.mask), None)
        hidden: Tensor = self._hidden(read, slots if self.mutual else slots[:, :size])
        return hidden[:, :size]

    def _decoded(self, read: Read, choose: Choose) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens ``[N, k * A]``, log-probs ``[N, k * A, bins]``, values ``[N, k]``."""
        if not self.parallel:
            return self._one_by_one(read, choose, self._length)
        hidden = self._at_slots(read, self._length)
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
