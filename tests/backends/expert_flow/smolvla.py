"""A SmolVLA of some 40,000 weights in a folder as LeRobot 0.4.4 writes it, made from nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.backends.expert_flow.kit import (
    FEATURES,
    PADDED_ACTION,
    PADDED_STATE,
    PATCH,
    SIDE,
    STEPS,
    TOKENS,
    Shape,
    encoder_shapes,
    layer_shapes,
    linear,
    weights,
    write,
    write_policy,
)

HIDDEN, INNER, HEADS, SHARED, HEAD = 16, 32, 2, 1, 8
LAYERS, ALL_LAYERS, VISION_LAYERS, SCALE = 3, 4, 1, 2
WIDTH, EXPERT_INNER = 12, 256
CONFIG: dict[str, Any] = {
    "type": "smolvla",
    **FEATURES,
    "resize_imgs_with_padding": [SIDE, SIDE],
    "num_steps": STEPS,
    "vlm_model_name": "vlm",
    "load_vlm_weights": False,
    "attention_mode": "cross_attn",
    "num_expert_layers": -1,
    "num_vlm_layers": LAYERS,
    "self_attn_every_n_layers": 2,
    "expert_width_multiplier": 0.75,
}
VLM: dict[str, Any] = {
    "model_type": "smolvlm",
    "architectures": ["SmolVLMForConditionalGeneration"],
    "scale_factor": SCALE,
    "image_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "vision_config": {
        "model_type": "smolvlm_vision",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": VISION_LAYERS,
        "num_attention_heads": HEADS,
        "image_size": SIDE,
        "patch_size": PATCH,
    },
    "text_config": {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": ALL_LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": SHARED,
        "head_dim": HEAD,
        "vocab_size": TOKENS,
        "rms_norm_eps": 1e-5,
        "pad_token_id": 0,
        "rope_theta": 100000.0,
    },
}


def shapes() -> Iterator[Shape]:
    """The tensors of ``model.safetensors``, in the order in which they are drawn."""
    inside = "model.vlm_with_expert."
    yield from encoder_shapes(f"{inside}vlm.model.vision_model.", HIDDEN, INNER, VISION_LAYERS)
    connector = f"{inside}vlm.model.connector.modality_projection.proj"
    yield from linear(connector, HIDDEN, HIDDEN * SCALE**2, biased=False)
    text, expert = f"{inside}vlm.model.text_model.", f"{inside}lm_expert."
    yield f"{text}embed_tokens.weight", (TOKENS, HIDDEN)
    yield f"{inside}vlm.lm_head.weight", (TOKENS, HIDDEN)
    heads = (HEADS * HEAD, SHARED * HEAD)
    for start, width, inner in ((text, HIDDEN, INNER), (expert, WIDTH, EXPERT_INNER)):
        for index in range(LAYERS):
            across = start == expert and index % 2 == 1
            layer = f"{start}layers.{index}."
            yield from layer_shapes(layer, width, inner, *heads, across=across)
        yield f"{start}norm.weight", (width,)
    yield from linear("model.state_proj", HIDDEN, PADDED_STATE)
    yield from linear("model.action_in_proj", WIDTH, PADDED_ACTION)
    yield from linear("model.action_out_proj", PADDED_ACTION, WIDTH)
    yield from linear("model.action_time_mlp_in", WIDTH, 2 * WIDTH)
    yield from linear("model.action_time_mlp_out", WIDTH, WIDTH)


def around(name: str) -> float:
    return 1.0 if "norm" in name and name.endswith("weight") else 0.0


def write_folder(folder: Path, **changes: Any) -> Path:
    """Write the folder, with the vision-language model's own files in ``vlm``; ``changes`` are of
    ``config.json``."""
    write_policy(folder, CONFIG | changes, weights(shapes(), around), "vlm")
    write(folder / "vlm/config.json", VLM)
    return folder
