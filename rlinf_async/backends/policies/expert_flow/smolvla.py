"""The policy ``smolvla``: the first layers of a small vision-language model, and their expert.

Images and instruction see each other, the state sees all; of the expert, every other layer attends
to the trunk's keys and values and to the actions before, the others to the trunk's alone, through
projections of their own (Shukor et al. 2025, "SmolVLA", arXiv 2506.01844).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from torch import Tensor
from torch.nn import functional

from rlinf_async.backends.policies.base import register_policy
from rlinf_async.backends.policies.config import SMOLVLA
from rlinf_async.backends.policies.expert_flow.folder import CONFIG, FolderSettings, located
from rlinf_async.backends.policies.expert_flow.model import (
    ExpertFlow,
    Layer,
    Seen,
    Shape,
    Text,
    Trunk,
    scaled,
)
from rlinf_async.backends.policies.expert_flow.policy import ExpertFlowPolicy

INSIDE: Final = "model.vlm_with_expert."


class SmolVlaSettings(FolderSettings, frozen=True, kw_only=True):
    """Those of a SmolVLA. It needs the configuration of the model that it is built on, too."""

    family = SMOLVLA
    steps_name = "num_steps"
    resize_imgs_with_padding: tuple[int, int] | None = (512, 512)
    """width and height"""
    adapt_to_pi_aloha: bool = False
    freeze_vision_encoder: bool = True
    train_expert_only: bool = True
    train_state_proj: bool = True
    vlm_model_name: str = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"
    add_image_special_tokens: bool = False
    attention_mode: str = "cross_attn"
    num_expert_layers: int = -1
    num_vlm_layers: int = 16
    self_attn_every_n_layers: int = 2
    expert_width_multiplier: float = 0.75

    def unread(self) -> tuple[tuple[bool, str], ...]:
        return (
            (self.adapt_to_pi_aloha, "adapt_to_pi_aloha is true, which is not read"),
            (self.add_image_special_tokens, "add_image_special_tokens is true: not read"),
            (
                self.num_expert_layers not in (-1, 0, self.num_vlm_layers),
                "num_expert_layers is neither -1 nor num_vlm_layers: as many of both are read",
            ),
        )

    def language(self, path: Path, tokenizer: str) -> Path:
        what = "the model that it is built on, vlm_model_name"
        files = (CONFIG, "tokenizer.json", "tokenizer_config.json")
        return located(path, self.vlm_model_name, what, files)


class SmolVla(ExpertFlow):
    """The trunk reads the state as its last token."""

    names: ClassVar = {
        "trunk.": f"{INSIDE}vlm.model.",
        "expert.": f"{INSIDE}lm_expert.",
        "": "model.",
    }
    causal = True

    def __init__(self, settings: SmolVlaSettings, config: Any) -> None:
        text = config.text_config
        layers = settings.num_vlm_layers
        layers = min(layers, text.num_hidden_layers) if layers > 0 else text.num_hidden_layers
        hidden = int(text.hidden_size)
        width = int(hidden * settings.expert_width_multiplier)
        own = _shape(text, width, _inner(width))
        every = settings.self_attn_every_n_layers
        crossing = "cross" in settings.attention_mode
        across = [crossing and not (every > 0 and i % every == 0) for i in range(layers)]
        trunk = _trunk(config, layers, _shape(text, hidden, text.intermediate_size))
        expert = Text([Layer(own, across=one) for one in across], own)
        super().__init__(settings, trunk, expert, width, hidden)
        self._resized = settings.resize_imgs_with_padding
        self.state_proj.requires_grad_(settings.train_state_proj)

    @classmethod
    def built(cls, settings: Any, language: Path, tensors: Mapping[str, Tensor]) -> ExpertFlow:
        import transformers

        return cls(settings, transformers.AutoConfig.from_pretrained(language))

    def prepared(self, image: Tensor) -> Tensor:
        if self._resized is not None:
            image = padded(image, *self._resized)
        return image * 2.0 - 1.0

    def read(self, embedded: Tensor, there: Tensor, state: Tensor) -> Seen:
        joined = torch.cat([embedded, state], 1)
        there = functional.pad(there, (0, 1), value=True)
        mask = there.unsqueeze(1).repeat(1, there.shape[1], 1)
        mask[:, :-1, -1] = False
        found = self.trunk(joined, there, mask)
        summary = self.trunk.text_model.norm(found.hidden[:, -1])
        return Seen(found.keys, found.values, there, summary)


@register_policy(SMOLVLA)
class SmolVlaPolicy(ExpertFlowPolicy):
    """The policy of a SmolVLA's folder."""

    reads = SmolVlaSettings
    flow = SmolVla


def padded(image: Tensor, width: int, height: int) -> Tensor:
    """Scale pictures ``[N, C, H, W]`` until one side fits, and fill with 0 left and above."""
    image = scaled(image, width, height)
    missing = (width - image.shape[3], height - image.shape[2])
    return functional.pad(image, (max(0, missing[0]), 0, max(0, missing[1]), 0))


def _trunk(config: Any, layers: int, shape: Shape) -> Trunk:
    library: Any = importlib.import_module("transformers.models.smolvlm.modeling_smolvlm")
    text = Text([Layer(shape) for _ in range(layers)], shape, config.text_config.vocab_size)
    with torch.device("cpu"):  # it has buffers
        vision = library.SmolVLMVisionTransformer._from_config(config.vision_config)
    return Trunk(text, vision, library.SmolVLMConnector(config), math.sqrt(shape.width))


def _shape(text: Any, width: int, inner: int) -> Shape:
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return Shape(
        width=width,
        inner=inner,
        heads=text.num_attention_heads,
        shared=text.num_key_value_heads,
        size=size,
        epsilon=text.rms_norm_eps,
        biased=bool(getattr(text, "attention_bias", False)),
        biased_mlp=bool(getattr(text, "mlp_bias", False)),
    )


def _inner(width: int) -> int:
    """Width within the expert's perceptrons: 8/3 of its own, up to a multiple of 256."""
    return -(-4 * (2 * width // 3) // 256) * 256
