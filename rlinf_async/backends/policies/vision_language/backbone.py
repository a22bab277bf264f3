"""A vision-language model of Hugging Face, and the text it reads.

Images and text become embeddings here, and go into its language model together; so any model will
do that has the methods which transformers gives all of them: `get_image_features`,
`get_input_embeddings`, `get_decoder`. Images are prepared by torch alone.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf_async.backends.policies.vision_language.config import VisionLanguageConfig

BYTES = 256
SPECIAL = 4  # ids below: padding, begin, end, image


class Backbone(nn.Module):
    """Images and texts -> embeddings; embeddings -> hidden states ``[N, S, hidden]``.

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

    def forward(self, embedded: Tensor, mask: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        """Return hidden states of the last ``S`` positions, ``[N, S, hidden]``, and the cache.

        ``mask``: ``[N, P + S]``, 0 for padding, of the ``P`` positions in the cache too.
        """
        positions = (mask.cumsum(-1) - 1).clamp_(min=0)[:, -embedded.shape[1] :]
        output = self.model.get_decoder()(
            inputs_embeds=embedded,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=cache is not None,
        )
        return output.last_hidden_state, output.past_key_values


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
