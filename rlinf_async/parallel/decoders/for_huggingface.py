"""transformers 5: query, key, value, gate and up apart; experts fused."""

from __future__ import annotations

from rlinf_async.parallel.decoders.decoder import (
    GATE_UP,
    Decoder,
    between_ends,
    layer_name,
    parameter,
)
from rlinf_async.parallel.splits import (
    Column,
    Row,
    Stacked,
    Vocabulary,
    Whole,
)
from rlinf_async.parallel.tensors import Model, Parameter


def huggingface(one: Decoder) -> Model:
    """Return the parameters of a transformers 5 model, cut over tensor ranks where they can be."""
    held: list[Parameter] = []
    for layer in range(one.layers):
        name = layer_name(layer)
        for kind in one.qkv_kinds():
            for part, split in zip(one.qkv(layer, kind), one.qkv_splits(), strict=True):
                held.append(parameter(part.name, (part,), split, layer))
        held.append(parameter(one.output(layer).name, (one.output(layer),), Row(), layer))
        held += [
            parameter(norm.name, (norm,), Whole(), layer) for norm in one.norms(layer).values()
        ]
        gate_up, down = one.gate_up(layer), one.down(layer)
        if one.experts:
            each, back = Stacked(GATE_UP, one.experts), Stacked(Row(), one.experts)
            held.append(parameter(f"{name}.mlp.gate.weight", (one.router(layer),), Whole(), layer))
            held.append(parameter(f"{name}.mlp.experts.gate_up_proj", gate_up, each, layer))
            held.append(parameter(f"{name}.mlp.experts.down_proj", down, back, layer))
        else:
            held += [parameter(part.name, (part,), Column(), layer) for part in gate_up]
            held.append(parameter(down[0].name, down, Row(), layer))
    names = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    return between_ends(one, held, names, Vocabulary())
