"""What the tiny policies of LeRobot's families have in common: `smolvla.py`, `pi0.py`.

Their numbers come from a generator of numpy, so that they are the same wherever they are drawn:
``smolvla.json`` and ``pi0.json`` hold what LeRobot 0.4.4 itself computed with these folders.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
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
SIDE, PATCH = 16, 4
"""of what the vision encoder sees"""
CHARACTERS = "abcdefghijklmnopqrstuvwxyz \n"
TOKENS = 2 + len(CHARACTERS)
SIZES = {"front": (12, 16), "wrist": (8, 8)}
"""height and width of each camera"""
Shape = tuple[str, tuple[int, ...]]
"""name and shape of a tensor"""
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
FEATURES: dict[str, Any] = {
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
    "empty_cameras": 0,
    "tokenizer_max_length": 8,
}
"""of ``config.json``, in both families"""


def linear(name: str, out: int, of: int, *, biased: bool = True) -> Iterator[Shape]:
    """The tensors of a linear layer."""
    yield f"{name}.weight", (out, of)
    if biased:
        yield f"{name}.bias", (out,)


def encoder_shapes(start: str, hidden: int, inner: int, layers: int) -> Iterator[Shape]:
    """The tensors of a SigLIP."""
    yield f"{start}embeddings.patch_embedding.weight", (hidden, 3, PATCH, PATCH)
    yield f"{start}embeddings.patch_embedding.bias", (hidden,)
    yield f"{start}embeddings.position_embedding.weight", ((SIDE // PATCH) ** 2, hidden)
    for index in range(layers):
        layer = f"{start}encoder.layers.{index}."
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from linear(f"{layer}self_attn.{name}", hidden, hidden)
        yield from linear(f"{layer}mlp.fc1", inner, hidden)
        yield from linear(f"{layer}mlp.fc2", hidden, inner)
        for name in ("layer_norm1", "layer_norm2"):
            yield f"{layer}{name}.weight", (hidden,)
            yield f"{layer}{name}.bias", (hidden,)
    yield f"{start}post_layernorm.weight", (hidden,)
    yield f"{start}post_layernorm.bias", (hidden,)


def layer_shapes(
    layer: str, width: int, inner: int, queries: int, keys: int, *, across: bool = False
) -> Iterator[Shape]:
    """The tensors of a layer of a language model. ``across``: of an expert, whose keys and values
    are made of the trunk's."""
    of = keys if across else width
    yield f"{layer}self_attn.q_proj.weight", (queries, width)
    yield f"{layer}self_attn.k_proj.weight", (keys, of)
    yield f"{layer}self_attn.v_proj.weight", (keys, of)
    yield f"{layer}self_attn.o_proj.weight", (width, queries)
    yield f"{layer}mlp.gate_proj.weight", (inner, width)
    yield f"{layer}mlp.up_proj.weight", (inner, width)
    yield f"{layer}mlp.down_proj.weight", (width, inner)
    yield f"{layer}input_layernorm.weight", (width,)
    yield f"{layer}post_attention_layernorm.weight", (width,)


def weights(
    shapes: Iterable[Shape], around: Callable[[str], float]
) -> dict[str, NDArray[np.float32]]:
    """Drawn numbers; ``around``: the middle of those of one dimension, by name."""
    drawn = np.random.default_rng(0)
    found: dict[str, NDArray[np.float32]] = {}
    for name, shape in shapes:
        numbers = drawn.standard_normal(shape)
        scale = 1.0 / np.sqrt(np.prod(shape[1:])) if len(shape) > 1 else 0.3
        middle = around(name) if len(shape) == 1 else 0.0
        found[name] = (middle + scale * numbers).astype(np.float32)
    return found


def statistics() -> dict[str, NDArray[np.float32]]:
    return {
        "observation.state.mean": np.array([0.2, -0.3, 1.0], np.float32),
        "observation.state.std": np.array([0.5, 2.0, 1.5], np.float32),
        "action.mean": np.array([0.1, -0.2], np.float32),
        "action.std": np.array([0.3, 0.6], np.float32),
    }


def write_policy(
    folder: Path, config: dict[str, Any], tensors: dict[str, NDArray[np.float32]], vlm: str
) -> None:
    """Write a policy's folder, with the tokenizer in the folder ``vlm`` below it."""
    features = {**config["input_features"], **config["output_features"]}
    folder.mkdir(parents=True)
    write(folder / "config.json", config)
    save_file(tensors, folder / "model.safetensors")
    state = "policy_preprocessor_step_5_normalizer_processor.safetensors"
    norm = {"eps": 1e-8, "features": features, "norm_map": config["normalization_mapping"]}
    steps: list[dict[str, Any]] = [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
        {"registry_name": "to_batch_processor", "config": {}},
        {"registry_name": f"{config['type']}_new_line_processor", "config": {}},
        {
            "registry_name": "tokenizer_processor",
            "config": {
                "max_length": config["tokenizer_max_length"],
                "task_key": "task",
                "padding_side": "right",
                "padding": "longest",
                "truncation": True,
                "tokenizer_name": vlm,
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
    write_tokenizer(folder / vlm)


def write_tokenizer(folder: Path) -> None:
    """Its tokens are characters."""
    folder.mkdir()
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


def config(
    folder: Path, noise: str = "network", name: str = "smolvla", **fields: Any
) -> PolicyConfig:
    """Chunks of 4 actions of 2 numbers, of which 3 are executed."""
    own = {"lora": fields.pop("lora")} if "lora" in fields else {}
    flow: dict[str, Any] = {"steps": STEPS, "noise": noise}
    flow |= {"noise_level": 0.6} if noise == "sde" else {"largest_deviation": 0.4}
    size = EXECUTED * NUMBERS
    return PolicyConfig(
        **{
            "name": name,
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
