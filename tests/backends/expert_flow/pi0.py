"""A pi0 of some 30,000 weights in a folder as LeRobot 0.4.4 writes it, made from nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.backends.expert_flow.kit import (
    FEATURES,
    PADDED_ACTION,
    PADDED_STATE,
    SIDE,
    STEPS,
    TOKENS,
    Shape,
    encoder_shapes,
    layer_shapes,
    linear,
    weights,
    write_policy,
)

VISION, VISION_INNER, VISION_LAYERS = 16, 20, 1
HIDDEN, INNER, HEADS, HEAD, LAYERS = 24, 32, 8, 4, 3
WIDTH, EXPERT_INNER = 12, 16
CONFIG: dict[str, Any] = {
    "type": "pi0",
    **FEATURES,
    "paligemma_variant": "gemma_2b",
    "action_expert_variant": "gemma_300m",
    "dtype": "float32",
    "image_resolution": [SIDE, SIDE],
    "num_inference_steps": STEPS,
    "train_expert_only": True,
}
INSIDE = "model.paligemma_with_expert."
EMBEDDINGS = f"{INSIDE}paligemma.model.language_model.embed_tokens.weight"
HEAD_NAME = f"{INSIDE}paligemma.lm_head.weight"
"""the same tensor, of which LeRobot writes only this one"""


def shapes() -> Iterator[Shape]:
    """The tensors of ``model.safetensors``, in the order in which they are drawn."""
    model = f"{INSIDE}paligemma.model."
    encoder = f"{model}vision_tower.vision_model."
    yield from encoder_shapes(encoder, VISION, VISION_INNER, VISION_LAYERS)
    yield from linear(f"{model}multi_modal_projector.linear", HIDDEN, VISION)
    yield HEAD_NAME, (TOKENS, HIDDEN)
    text, expert = f"{model}language_model.", f"{INSIDE}gemma_expert.model."
    for start, width, inner in ((text, HIDDEN, INNER), (expert, WIDTH, EXPERT_INNER)):
        for index in range(LAYERS):
            yield from layer_shapes(f"{start}layers.{index}.", width, inner, HEADS * HEAD, HEAD)
        yield f"{start}norm.weight", (width,)
    yield f"{INSIDE}gemma_expert.lm_head.weight", (TOKENS, WIDTH)
    yield from linear("model.state_proj", WIDTH, PADDED_STATE)
    yield from linear("model.action_in_proj", WIDTH, PADDED_ACTION)
    yield from linear("model.action_out_proj", PADDED_ACTION, WIDTH)
    yield from linear("model.action_time_mlp_in", WIDTH, 2 * WIDTH)
    yield from linear("model.action_time_mlp_out", WIDTH, WIDTH)


def around(name: str) -> float:
    """Gemma's norms have weights that are added to one."""
    vision = ".vision_model." in name
    return 1.0 if vision and "norm" in name and name.endswith("weight") else 0.0


def write_folder(folder: Path, **changes: Any) -> Path:
    """Write the folder, with the tokenizer in ``vlm``; ``changes`` are of ``config.json``."""
    write_policy(folder, CONFIG | changes, weights(shapes(), around), "vlm")
    return folder
