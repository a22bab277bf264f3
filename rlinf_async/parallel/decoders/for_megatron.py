"""megatron-core: ``linear_qkv`` by key-value group, ``linear_fc1``; norms apart or fused."""

from __future__ import annotations

from typing import Literal

from rlinf_async.parallel.decoders.decoder import (
    GATE_UP,
    Decoder,
    between_ends,
    parameter,
)
from rlinf_async.parallel.errors import ModelMismatch
from rlinf_async.parallel.splits import (
    GroupedHeads,
    Row,
    Vocabulary,
    Whole,
)
from rlinf_async.parallel.tensors import Model, Parameter

Norms = Literal["apart", "fused"]


def megatron(one: Decoder, norms: Norms = "apart", vocabulary_multiple: int = 128) -> Model:
    """Return the parameters of a megatron-core GPT model.

    ``norms="fused"`` is the Transformer Engine spec, in which a linear layer holds the norm before
    it. Experts are those of ``SequentialMLP``. Raises `ModelMismatch` for post-norms."""
    if one.post_norms:
        raise ModelMismatch("megatron-core's GPT layer has no norms after attention and MLP")
    held: list[Parameter] = []
    grouped = GroupedHeads(one.heads, one.kv_heads)
    fused = norms == "fused"
    for layer in range(one.layers):
        name = f"decoder.layers.{layer}"
        attention, found = f"{name}.self_attention", one.norms(layer)
        before_qkv = (
            f"{attention}.linear_qkv.layer_norm_weight"
            if fused
            else f"{name}.input_layernorm.weight"
        )
        before_mlp = (
            f"{name}.mlp.linear_fc1.layer_norm_weight"
            if fused and not one.experts
            else f"{name}.pre_mlp_layernorm.weight"
        )
        held.append(parameter(before_qkv, (found["input_layernorm"],), Whole(), layer))
        held.append(
            parameter(f"{attention}.linear_proj.weight", (one.output(layer),), Row(), layer)
        )
        for kind in one.qkv_kinds():
            qkv = f"{attention}.linear_qkv.{kind}"
            held.append(parameter(qkv, one.qkv(layer, kind), grouped, layer))
        if one.qk_norm:
            for part in ("q", "k"):
                norm = found[f"self_attn.{part}_norm"]
                held.append(
                    parameter(f"{attention}.{part}_layernorm.weight", (norm,), Whole(), layer)
                )
        held.append(parameter(before_mlp, (found["post_attention_layernorm"],), Whole(), layer))
        held += _megatron_mlp(one, layer, f"{name}.mlp")
    names = (
        "embedding.word_embeddings.weight",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    )
    return between_ends(one, held, names, Vocabulary(vocabulary_multiple, per_rank=True))


def _megatron_mlp(one: Decoder, layer: int, name: str) -> list[Parameter]:
    gate_up, down = one.gate_up(layer), one.down(layer)
    if not one.experts:
        return [
            parameter(f"{name}.linear_fc1.weight", gate_up, GATE_UP, layer),
            parameter(f"{name}.linear_fc2.weight", down, Row(), layer),
        ]
    held = [parameter(f"{name}.router.weight", (one.router(layer),), Whole(), layer)]
    for expert in range(one.experts):
        mlp, place = f"{name}.experts.local_experts.{expert}", (expert, one.experts)
        both = gate_up[2 * expert : 2 * expert + 2]
        held.append(parameter(f"{mlp}.linear_fc1.weight", both, GATE_UP, layer, place))
        held.append(parameter(f"{mlp}.linear_fc2.weight", (down[expert],), Row(), layer, place))
    return held
