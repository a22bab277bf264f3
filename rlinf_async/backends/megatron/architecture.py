"""What Megatron's layers need to know of a model, from its Hugging Face configuration. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from rlinf_async.parallel import (
    GlobalTensor,
    Layout,
    Model,
    ModelMismatch,
    Parameter,
    Strategy,
    StrategyError,
    Whole,
    layout,
)
from rlinf_async.parallel.decoders import Decoder, megatron
from rlinf_async.parallel.errors import UNEVEN

FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3")
VOCABULARY_MULTIPLE: Final = 1
"""the vocabulary is padded to a multiple of this times the number of tensor ranks"""

OUTPUT_LAYER: Final = "output_layer."
VALUE_HEAD: Final = "value_head."
"""of a critic's tensors in a checkpoint"""


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """What a Hugging Face configuration says of a model, as Megatron needs it."""

    decoder: Decoder
    norm_eps: float
    rope_theta: float
    rope_factor: float | None
    """of Llama 3's scaling of rotary positions; None: not scaled"""
    longest: int
    """tokens of a sequence"""
    padding: int | None = None
    """token whose embedding is not trained"""
    values: bool = False
    """a critic: a value head in place of the output layer"""


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """Read a Hugging Face ``config.json``.

    Raises:
        ModelMismatch: Megatron's layers would compute something else.
    """
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ModelMismatch(
            f"the backend 'megatron' does not train model_type {kind!r}; it trains "
            f"{', '.join(FAMILIES)}. Use the backend 'fsdp' for others"
        )
    faults = []
    if config.get("hidden_act", "silu") != "silu":
        faults.append(f"hidden_act={config['hidden_act']!r} (only 'silu')")
    if config.get("use_sliding_window") or (kind == "mistral" and config.get("sliding_window")):
        faults.append(f"sliding_window={config.get('sliding_window')}")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scaling = rope.get("rope_type", rope.get("type", "default"))
    factor = None
    if scaling == "llama3":
        factor = float(rope["factor"])
        known = {
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        faults += [
            f"{name}={rope[name]} of the rotary positions (only {value})"
            for name, value in known.items()
            if rope.get(name, value) != value
        ]
    elif scaling != "default":
        faults.append(f"rotary positions of type {scaling!r} (only 'default' and 'llama3')")
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        faults.append("partial_rotary_factor (only 1)")
    if config.get("attention_dropout"):
        faults.append(f"attention_dropout={config['attention_dropout']} (only 0)")
    if faults:
        raise ModelMismatch(
            f"the backend 'megatron' does not train a {kind} with {', '.join(faults)}. Use the "
            "backend 'fsdp'"
        )
    theta = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    return Architecture(
        decoder=Decoder.from_config(config),
        norm_eps=float(config["rms_norm_eps"]),
        rope_theta=float(theta),
        rope_factor=factor,
        longest=int(config["max_position_embeddings"]),
        padding=config.get("pad_token_id"),
    )


def layout_of(architecture: Architecture, strategy: Strategy) -> Layout:
    """Return who holds which slices. Raises `StrategyError` for what does not divide."""
    decoder = architecture.decoder
    model = megatron(decoder, vocabulary_multiple=VOCABULARY_MULTIPLE)
    if architecture.values:
        model = _with_value_head(model, decoder)
    try:
        return layout(model, strategy)
    except StrategyError as error:  # stages have the same number of layers each here
        raise StrategyError([one.partition(UNEVEN)[0] for one in error.faults]) from None


def _with_value_head(model: Model, decoder: Decoder) -> Model:
    """Return the parameters of a critic: every tensor rank has the whole head."""
    kept = [one for one in model.parameters if one.name != OUTPUT_LAYER + "weight"]
    head = {"weight": (1, decoder.hidden), "bias": (1,)}
    kept += [
        Parameter(
            name=OUTPUT_LAYER + kind,
            tensors=(GlobalTensor(VALUE_HEAD + kind, shape, decoder.dtype),),
            split=Whole(),
            stage="last",
        )
        for kind, shape in head.items()
    ]
    return Model(tuple(kept), model.layers)
