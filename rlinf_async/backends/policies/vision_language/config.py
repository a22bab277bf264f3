"""The configuration of the vision-language-action policy."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from rlinf_async.backends.base import LoraConfig
from rlinf_async.config.counts import check_bounds

DEFAULT_BINS: Final = 256


class VisionLanguageConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A vision-language model, and how it expresses actions.

    The sizes are those of a model that is built with random weights, a small SmolVLM; with
    ``folder`` they are the folder's.
    """

    folder: str = ""
    """folder of a Hugging Face vision-language model; a new model is built when left out"""
    hidden_size: int = 64
    layers: int = 2
    """layers of the language model"""
    vision_layers: int = 2
    heads: int = 4
    patch_size: int = 8
    """pixels along a side of an image patch"""
    scale_factor: int = 2
    """square root of the number of patches that become one image token"""
    bins: int = DEFAULT_BINS
    """action tokens: each number of an action is one of so many equal parts of [-1, 1]"""
    chunk: int = 0
    """actions that are predicted at once, of which ``env.action_chunk`` are executed; 0: as many"""
    decoding: Literal["parallel", "autoregressive"] = "parallel"
    """all action tokens in one forward pass, each independent of the others; or one by one"""
    attention: Literal["causal", "bidirectional"] = "causal"
    """which action slots of parallel decoding a slot sees: those before, or all"""
    head: Literal["bins", "continuous"] = "bins"
    """actions as tokens, or as numbers with a normal distribution, of a network"""
    lora: LoraConfig = LoraConfig()

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "layers", "vision_layers", "heads", "patch_size", "scale_factor")
        check_bounds(self, *sizes, least=1)
        check_bounds(self, "bins", least=2)
        check_bounds(self, "chunk", least=0)
        if self.decoding != "parallel" and (self.attention, self.head) != ("causal", "bins"):
            raise ValueError(
                f"attention is {self.attention!r}, head is {self.head!r}, but decoding is "
                f"{self.decoding!r}, which has neither: set decoding = 'parallel'"
            )
        if self.head == "continuous" and self.bins != DEFAULT_BINS:
            raise ValueError(
                f"bins is {self.bins}, but head = 'continuous' has no bins: leave it out"
            )
        if self.hidden_size % (2 * self.heads):
            raise ValueError(
                f"hidden_size is {self.hidden_size}; it must be a multiple of 2 x heads = "
                f"{2 * self.heads}"
            )
