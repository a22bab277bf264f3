"""The configuration of the vision-language-action policy."""

from __future__ import annotations

from typing import Literal

import msgspec


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Low-rank adapters (Hu et al. 2021): the model's own weights stay as they are."""

    rank: int = 0
    """rank of the update of each linear layer; 0: no adapters, all weights are trained"""
    alpha: float = 16.0
    """the update is multiplied by ``alpha / rank``"""

    def __post_init__(self) -> None:
        if self.rank < 0 or not self.alpha > 0.0:
            raise ValueError(
                f"rank is {self.rank}, alpha is {self.alpha}; rank must be at least 0, and alpha "
                "above 0"
            )


class VisionLanguageConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A vision-language model, and how it says actions.

    The sizes are those of a model that is built with random weights, a small SmolVLM; with
    ``folder`` they are the folder's.
    """

    folder: str = ""
    """folder of a Hugging Face vision-language model; a new model is built when left out"""
    hidden_size: int = 64
    layers: int = 2
    """of the language model"""
    vision_layers: int = 2
    heads: int = 4
    patch_size: int = 8
    """pixels along a side of an image patch"""
    scale_factor: int = 2
    """that squared many patches become one image token"""
    bins: int = 256
    """action tokens: each number of an action is one of so many equal parts of [-1, 1]"""
    chunk: int = 0
    """actions that are predicted at once, of which ``env.action_chunk`` are executed; 0: as many"""
    decoding: Literal["parallel", "autoregressive"] = "parallel"
    """all action tokens in one forward pass, each independent of the others; or one by one"""
    lora: LoraConfig = LoraConfig()

    def __post_init__(self) -> None:
        for field in (
            "hidden_size",
            "layers",
            "vision_layers",
            "heads",
            "patch_size",
            "scale_factor",
        ):
            number = getattr(self, field)
            if number < 1:
                raise ValueError(f"{field} is {number}; it must be at least 1")
        if self.hidden_size % (2 * self.heads):
            raise ValueError(
                f"hidden_size is {self.hidden_size}; it must be a multiple of 2 x heads = "
                f"{2 * self.heads}"
            )
        if self.bins < 2 or self.chunk < 0:
            raise ValueError(
                f"bins is {self.bins}, chunk is {self.chunk}; bins must be at least 2, chunk at "
                "least 0"
            )
