"""A SmolVLA of some 40,000 weights in a folder as LeRobot 0.4.4 writes it, made from nothing.

Its numbers come from a generator of numpy, so that they are the same wherever they are drawn:
``reference.json`` holds what LeRobot 0.4.4 itself computed with this folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.backends.policies.flow_action.config import FlowConfig
from rlinf_async.backends.policies.vision_language.config import VisionLanguageConfig
from rlinf_async.messages.spaces import (
    ObservationArray,
    ObservationPart,
    ObservationSpec,
    continuous,
)

CHUNK, EXECUTED, NUMBERS, STATE, STEPS = 4, 3, 2, 3, 4
PADDED_STATE, PADDED_ACTION = 6, 5
HIDDEN, INNER, HEADS, SHARED, HEAD = 16, 32, 2, 1, 8
LAYERS, ALL_LAYERS, VISION_LAYERS, SIDE, PATCH, SCALE = 3, 4, 1, 16, 4, 2
WIDTH, EXPERT_INNER = 12, 256
CHARACTERS = "abcdefghijklmnopqrstuvwxyz \n"
TOKENS = 2 + len(CHARACTERS)
SIZES = {"front": (12, 16), "wrist": (8, 8)}
"""height and width of each camera"""
SPEC = ObservationSpec(
    (
        ObservationPart(name="state", kind="state", shape=(STATE,)),
        *(
            ObservationPart(name=name, kind="image", shape=(*size, 3))
            for name, size in SIZES.items()
        ),
        ObservationPart(name="task", kind="text", shape=(12,)),
    )
)
CONFIG: dict[str, Any] = {
    "type": "smolvla",
    "n_obs_steps": 1,
    "input_features": {
        "observation.state": {"type": "STATE", "shape": [STATE]},
        **{
            f"observation.images.{name}": {"type": "VISUAL", "shape": [3, *size]}
            for name, size in SIZES.items()
        },
    },
    "output_features": {"action": {"type": "ACTION", "shape": [NUMBERS]}},
    "device": "cpu",
    "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
    "chunk_size": CHUNK,
    "n_action_steps": EXECUTED,
    "max_state_dim": PADDED_STATE,
    "max_action_dim": PADDED_ACTION,
    "resize_imgs_with_padding": [SIDE, SIDE],
    "empty_cameras": 0,
    "tokenizer_max_length": 8,
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


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of ``model.safetensors``, in the order in which they are drawn."""
    inside = "model.vlm_with_expert."
    vision = f"{inside}vlm.model.vision_model."
    yield f"{vision}embeddings.patch_embedding.weight", (HIDDEN, 3, PATCH, PATCH)
    yield f"{vision}embeddings.patch_embedding.bias", (HIDDEN,)
    yield f"{vision}embeddings.position_embedding.weight", ((SIDE // PATCH) ** 2, HIDDEN)
    for index in range(VISION_LAYERS):
        layer = f"{vision}encoder.layers.{index}."
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield f"{layer}self_attn.{name}.weight", (HIDDEN, HIDDEN)
            yield f"{layer}self_attn.{name}.bias", (HIDDEN,)
        for name, (out, of) in {"fc1": (INNER, HIDDEN), "fc2": (HIDDEN, INNER)}.items():
            yield f"{layer}mlp.{name}.weight", (out, of)
            yield f"{layer}mlp.{name}.bias", (out,)
        for name in ("layer_norm1", "layer_norm2"):
            yield f"{layer}{name}.weight", (HIDDEN,)
            yield f"{layer}{name}.bias", (HIDDEN,)
    yield f"{vision}post_layernorm.weight", (HIDDEN,)
    yield f"{vision}post_layernorm.bias", (HIDDEN,)
    connector = f"{inside}vlm.model.connector.modality_projection.proj.weight"
    yield connector, (HIDDEN, HIDDEN * SCALE**2)
    text = f"{inside}vlm.model.text_model."
    yield f"{text}embed_tokens.weight", (TOKENS, HIDDEN)
    yield f"{inside}vlm.lm_head.weight", (TOKENS, HIDDEN)
    for start, width, inner in ((text, HIDDEN, INNER), (expert_of(inside), WIDTH, EXPERT_INNER)):
        for index in range(LAYERS):
            across = start != text and index % 2 == 1
            yield from layer_shapes(f"{start}layers.{index}.", width, inner, across=across)
        yield f"{start}norm.weight", (width,)
    yield from linear("model.state_proj", HIDDEN, PADDED_STATE)
    yield from linear("model.action_in_proj", WIDTH, PADDED_ACTION)
    yield from linear("model.action_out_proj", PADDED_ACTION, WIDTH)
    yield from linear("model.action_time_mlp_in", WIDTH, 2 * WIDTH)
    yield from linear("model.action_time_mlp_out", WIDTH, WIDTH)


def expert_of(inside: str) -> str:
    return f"{inside}lm_expert."


def layer_shapes(
    layer: str, width: int, inner: int, *, across: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    keys = SHARED * HEAD
    of = keys if across else width
    yield f"{layer}self_attn.q_proj.weight", (HEADS * HEAD, width)
    yield f"{layer}self_attn.k_proj.weight", (keys, of)
    yield f"{layer}self_attn.v_proj.weight", (keys, of)
    yield f"{layer}self_attn.o_proj.weight", (width, HEADS * HEAD)
    yield f"{layer}mlp.gate_proj.weight", (inner, width)
    yield f"{layer}mlp.up_proj.weight", (inner, width)
    yield f"{layer}mlp.down_proj.weight", (width, inner)
    yield f"{layer}input_layernorm.weight", (width,)
    yield f"{layer}post_attention_layernorm.weight", (width,)


def linear(name: str, out: int, of: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (out, of)
    yield f"{name}.bias", (out,)


def weights() -> dict[str, NDArray[np.float32]]:
    drawn = np.random.default_rng(0)
    found: dict[str, NDArray[np.float32]] = {}
    for name, shape in shapes():
        numbers = drawn.standard_normal(shape)
        scale = 1.0 / np.sqrt(np.prod(shape[1:])) if len(shape) > 1 else 0.3
        middle = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        found[name] = (middle + scale * numbers).astype(np.float32)
    return found


def statistics() -> dict[str, NDArray[np.float32]]:
    return {
        "observation.state.mean": np.array([0.2, -0.3, 1.0], np.float32),
        "observation.state.std": np.array([0.5, 2.0, 1.5], np.float32),
        "action.mean": np.array([0.1, -0.2], np.float32),
        "action.std": np.array([0.3, 0.6], np.float32),
    }


def write_folder(folder: Path, **changes: Any) -> Path:
    """Write the folder, with the vision-language model's own files in ``vlm``; ``changes`` are of
    ``config.json``."""
    config = CONFIG | changes
    features = {**config["input_features"], **config["output_features"]}
    folder.mkdir(parents=True)
    write(folder / "config.json", config)
    save_file(weights(), folder / "model.safetensors")
    state = "policy_preprocessor_step_5_normalizer_processor.safetensors"
    norm = {"eps": 1e-8, "features": features, "norm_map": config["normalization_mapping"]}
    steps: list[dict[str, Any]] = [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
        {"registry_name": "to_batch_processor", "config": {}},
        {"registry_name": "smolvla_new_line_processor", "config": {}},
        {
            "registry_name": "tokenizer_processor",
            "config": {
                "max_length": config["tokenizer_max_length"],
                "task_key": "task",
                "padding_side": "right",
                "padding": "longest",
                "truncation": True,
                "tokenizer_name": str(folder / "vlm"),
            },
        },
        {
            "registry_name": "device_processor",
            "config": {"device": "cpu", "float_dtype": None},
        },
        {"registry_name": "normalizer_processor", "config": norm, "state_file": state},
    ]
    write(folder / "policy_preprocessor.json", {"name": "policy_preprocessor", "steps": steps})
    save_file(statistics(), folder / state)
    after = "policy_postprocessor_step_0_unnormalizer_processor.safetensors"
    own = norm | {"features": config["output_features"]}
    steps = [
        {"registry_name": "unnormalizer_processor", "config": own, "state_file": after},
        {
            "registry_name": "device_processor",
            "config": {"device": "cpu", "float_dtype": None},
        },
    ]
    write(folder / "policy_postprocessor.json", {"name": "policy_postprocessor", "steps": steps})
    save_file(statistics(), folder / after)
    write_vision_language(folder / "vlm")
    return folder


def write_vision_language(folder: Path) -> None:
    """Configuration and tokenizer of the model, whose tokens are characters."""
    folder.mkdir()
    write(folder / "config.json", VLM)
    vocabulary = {one: number for number, one in enumerate(("<pad>", "<unk>", *CHARACTERS))}
    model = {"type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": "<unk>"}
    special = [
        {
            "id": number,
            "content": one,
            "special": True,
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        }
        for number, one in enumerate(("<pad>", "<unk>"))
    ]
    empty = dict.fromkeys(
        ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    )
    whole = {"version": "1.0", "added_tokens": special, **empty, "model": model}
    write(folder / "tokenizer.json", whole)
    own = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>"}
    write(folder / "tokenizer_config.json", own)


def write(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2))


def config(folder: Path, noise: str = "network", **fields: Any) -> PolicyConfig:
    """Chunks of 4 actions of 2 numbers, of which 3 are executed."""
    own = {"lora": fields.pop("lora")} if "lora" in fields else {}
    flow: dict[str, Any] = {"steps": STEPS, "noise": noise}
    flow |= {"noise_level": 0.6} if noise == "sde" else {"largest_deviation": 0.4}
    size = EXECUTED * NUMBERS
    return PolicyConfig(
        **{
            "name": "smolvla",
            "observation": SPEC,
            "observation_size": STATE,
            "action": continuous(size),
            "action_size": size,
            "action_chunk": EXECUTED,
            "hidden_sizes": (8,),
            "vision_language": VisionLanguageConfig(folder=str(folder), **own),
            "flow": FlowConfig(**flow),
            **fields,
        }
    )


def observations(count: int, seed: int = 0) -> ObservationArray:
    """Pictures, states, and instructions of several lengths, one of them longer than is read."""
    drawn = np.random.default_rng(seed)
    seen = SPEC.empty(count)
    for name, size in SIZES.items():
        seen[name] = drawn.integers(0, 256, (count, *size, 3))
    seen["state"] = drawn.normal(size=(count, STATE))
    seen["task"] = 0
    for index in range(count):
        text = ("reach", "go", "push the cube")[index % 3].encode()[:12]
        seen["task"][index, : len(text)] = np.frombuffer(text, np.uint8)
    return seen


def noise(count: int, seed: int = 1) -> NDArray[np.float32]:
    """``[N, H, D]``"""
    drawn = np.random.default_rng(seed)
    return drawn.standard_normal((count, CHUNK, PADDED_ACTION), np.float32)
