"""vLLM: ``qkv_proj``, ``gate_up_proj``, experts ``w13_weight`` and ``w2_weight``."""

from __future__ import annotations

from rlinf_async.parallel.decoders.decoder import (
    GATE_UP,
    Decoder,
    between_ends,
    layer_name,
    parameter,
)
from rlinf_async.parallel.splits import (
    Joined,
    Row,
    Stacked,
    Vocabulary,
    Whole,
)
from rlinf_async.parallel.tensors import Model, Parameter


def vllm(one: Decoder) -> Model:
    """Return the parameters of vLLM's model of the same architecture; the vocabulary padded to
    64."""
    held: list[Parameter] = []
    joined = Joined(one.qkv_splits())
    for layer in range(one.layers):
        name = layer_name(layer)
        for kind in one.qkv_kinds():
            qkv = f"{name}.self_attn.qkv_proj.{kind}"
            held.append(parameter(qkv, one.qkv(layer, kind), joined, layer))
        held.append(parameter(one.output(layer).name, (one.output(layer),), Row(), layer))
        held += [
            parameter(norm.name, (norm,), Whole(), layer) for norm in one.norms(layer).values()
        ]
        gate_up, down = one.gate_up(layer), one.down(layer)
        if one.experts:
            each, back = Stacked(GATE_UP, one.experts), Stacked(Row(), one.experts)
            held.append(parameter(one.router(layer).name, (one.router(layer),), Whole(), layer))
            held.append(parameter(f"{one.block(layer)}.experts.w13_weight", gate_up, each, layer))
            held.append(parameter(f"{one.block(layer)}.experts.w2_weight", down, back, layer))
        else:
            held.append(parameter(f"{name}.mlp.gate_up_proj.weight", gate_up, GATE_UP, layer))
            held.append(parameter(down[0].name, down, Row(), layer))
    names = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    return between_ends(one, held, names, Vocabulary(64))
