"""The policy ``pi0``: a PaliGemma, and an expert of as many layers of a smaller Gemma.

Images and instruction see each other. Each layer of the expert attends to the keys and values of
the trunk's; the state, its first token, sees these alone, the actions see the state and each other
(Black et al. 2024, "pi0", arXiv 2410.24164). So the state is read once, with the prefix.

LeRobot computes with a Gemma that was changed in one thing (``transformers_replace`` of openpi):
what is embedded is not scaled by the model, but the instruction before it, and images not at all.

Sizes are those of the weights, with what all variants of Gemma and SigLIP here have in common.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf_async.backends.policies.base import register_policy
from rlinf_async.backends.policies.config import PI0
from rlinf_async.backends.policies.expert_flow.folder import FolderSettings, Times, located
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

INSIDE: Final = "model.paligemma_with_expert."
PALIGEMMA: Final = f"{INSIDE}paligemma.model."
EMBEDDINGS: Final = f"{PALIGEMMA}language_model.embed_tokens.weight"
HEAD: Final = f"{INSIDE}paligemma.lm_head.weight"
"""the same tensor as `EMBEDDINGS`, of which a folder may hold either"""
HEADS: Final = 8
"""of attention in each layer"""
VISION_HEADS: Final = 16
EPSILON: Final = 1e-6


class Pi0Settings(FolderSettings, frozen=True, kw_only=True):
    """Those of a pi0."""

    family = PI0
    steps_name = "num_inference_steps"
    image_resolution: tuple[int, int] = (224, 224)
    time_sampling_beta_alpha: float = 1.5
    time_sampling_beta_beta: float = 1.0
    time_sampling_scale: float = 0.999
    time_sampling_offset: float = 0.001

    @property
    def times(self) -> Times:
        return Times(
            self.time_sampling_beta_alpha,
            self.time_sampling_beta_beta,
            self.time_sampling_scale,
            self.time_sampling_offset,
        )

    def unread(self) -> tuple[tuple[bool, str], ...]:
        height, width = self.image_resolution
        text = f"image_resolution is {height} x {width}: PaliGemma takes squares"
        return ((height != width, text),)

    def language(self, path: Path, tokenizer: str) -> Path:
        what = "the tokenizer of its processors, tokenizer_name"
        return located(path, tokenizer, what, ("tokenizer.json", "tokenizer_config.json"))


class Norm(nn.RMSNorm):
    """Gemma's, whose weights are what is added to one."""

    def forward(self, x: Tensor) -> Tensor:
        """``[..., width]``"""
        return functional.rms_norm(x, self.normalized_shape, 1.0 + self.weight, self.eps)


class Pi0(ExpertFlow):
    """The expert reads the state as its first token."""

    names: ClassVar = {
        "trunk.text_model.": f"{PALIGEMMA}language_model.",
        "trunk.vision_model.": f"{PALIGEMMA}vision_tower.vision_model.",
        "trunk.connector.": f"{PALIGEMMA}multi_modal_projector.linear.",
        "expert.": f"{INSIDE}gemma_expert.model.",
        "": "model.",
    }
    causal = False

    def __init__(self, settings: Pi0Settings, sizes: _Sizes) -> None:
        side = settings.image_resolution[0]
        text, hidden = _text(sizes, "trunk.text_model.")
        vision = _vision(sizes, side)
        connector = nn.Linear(vision.config.hidden_size, hidden)
        expert, width = _text(sizes, "expert.")
        trunk = Trunk(text, vision, connector, scale=1.0)
        super().__init__(settings, trunk, expert, width, width)
        self._side = side

    @classmethod
    def built(cls, settings: Any, language: Path, tensors: Mapping[str, Tensor]) -> ExpertFlow:
        return cls(settings, _Sizes(tensors))

    @classmethod
    def lerobot_names(cls, name: str) -> tuple[str, ...]:
        names = super().lerobot_names(name)
        names = (*names, HEAD) if names == (EMBEDDINGS,) else names
        # Folders of openpi's converter leave the beginning out.
        return (*names, *(one.removeprefix("model.") for one in names))

    def prepared(self, image: Tensor) -> Tensor:
        side = self._side
        image = scaled(image, side, side)
        above, left = (side - image.shape[2]) // 2, (side - image.shape[3]) // 2
        edges = (left, side - image.shape[3] - left, above, side - image.shape[2] - above)
        # LeRobot fills before it stretches [0, 1] to [-1, 1]: the edges become -3.
        return functional.pad(image, edges, value=-1.0) * 2.0 - 1.0

    def read(self, embedded: Tensor, there: Tensor, state: Tensor) -> Seen:
        mask = there.unsqueeze(1).expand(-1, there.shape[1], -1)
        found = self.trunk(embedded, there, mask)
        position = there.sum(1, keepdim=True)
        there = functional.pad(there, (0, 1), value=True)
        hidden, keys, values = state, [], []
        for layer, *before in zip(self.expert.layers, found.keys, found.values, strict=True):
            hidden, key, value = layer(hidden, position, there.unsqueeze(1), tuple(before))
            keys.append(key)
            values.append(value)
        return Seen(keys, values, there, self.expert.norm(hidden[:, -1]))


@register_policy(PI0)
class Pi0Policy(ExpertFlowPolicy):
    """The policy of a pi0's folder."""

    reads = Pi0Settings
    flow = Pi0


class _Sizes:
    """Shapes of a folder's tensors, by our names. Raises `ValueError` for those that it has not."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._shapes = {name: tuple(one.shape) for name, one in tensors.items()}

    def of(self, name: str) -> tuple[int, ...]:
        names = Pi0.lerobot_names(name)
        found = next((self._shapes[one] for one in names if one in self._shapes), None)
        if found is None:
            raise ValueError(f"its weights do not fit: {names[0]} is missing")
        return found

    def layers(self, start: str) -> int:
        """How many layers there are below a name."""
        starts = Pi0.lerobot_names(start)
        found = {
            name[len(one) :].split(".")[0]
            for one in starts
            for name in self._shapes
            if name.startswith(one)
        }
        return len(found)


def _text(sizes: _Sizes, start: str) -> tuple[Text, int]:
    """A Gemma, and its hidden size."""
    first = f"{start}layers.0."
    queries, width = sizes.of(f"{first}self_attn.q_proj.weight")
    size = queries // HEADS
    shape = Shape(
        width=width,
        inner=sizes.of(f"{first}mlp.gate_proj.weight")[0],
        heads=HEADS,
        shared=sizes.of(f"{first}self_attn.k_proj.weight")[0] // size,
        size=size,
        epsilon=EPSILON,
        norm=Norm,
        activation=partial(functional.gelu, approximate="tanh"),
    )
    layers = [Layer(shape) for _ in range(sizes.layers(f"{start}layers."))]
    reads = start.startswith("trunk.")
    tokens = sizes.of(f"{start}embed_tokens.weight")[0] if reads else 0
    return Text(layers, shape, tokens), width


def _vision(sizes: _Sizes, side: int) -> Any:
    """A SigLIP of pictures with this side."""
    library: Any = importlib.import_module("transformers.models.siglip.modeling_siglip")
    start = "trunk.vision_model."
    hidden, _, patch, _ = sizes.of(f"{start}embeddings.patch_embedding.weight")
    config = library.SiglipVisionConfig(
        hidden_size=hidden,
        intermediate_size=sizes.of(f"{start}encoder.layers.0.mlp.fc1.weight")[0],
        num_hidden_layers=sizes.layers(f"{start}encoder.layers."),
        num_attention_heads=VISION_HEADS,
        image_size=side,
        patch_size=patch,
        vision_use_head=False,
    )
    # In earlier versions of transformers, the encoder is a module within the model.
    encoder = getattr(library, "SiglipVisionTransformer", library.SiglipVisionModel)
    with torch.device("cpu"):  # it has buffers
        return encoder._from_config(config)
