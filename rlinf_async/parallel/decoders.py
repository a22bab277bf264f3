"""Name maps of decoder-only language models: their parameters in three backends.

::

    megatron      megatron-core: linear_qkv by key-value group, linear_fc1; norms apart or fused
    vllm          qkv_proj, gate_up_proj, experts w13_weight and w2_weight
    huggingface   transformers 5: query, key, value, gate and up apart; experts fused

All hold the same global tensors, which have the names that checkpoints of the architecture have. So
``plan(layout(huggingface(d), ...), layout(vllm(d), ...))`` publishes a trainer's weights to an
engine. Megatron and vLLM number the layers of a stage from 0 on; here a parameter has its layer's
number in the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from rlinf_async.parallel.splits import (
    ColumnParallel,
    GroupedHeads,
    Heads,
    Joined,
    ModelMismatch,
    RowParallel,
    Split,
    Stacked,
    Vocabulary,
    Whole,
)
from rlinf_async.parallel.strategy import GlobalTensor, Model, Parameter

ARCHITECTURES = ("gemma3_text", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
GATE_UP = Joined((ColumnParallel(), ColumnParallel()))
Kind = Literal["weight", "bias"]


class DecoderSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a decoder, and the options of its layers beside attention and a gated MLP."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    """inner size of the MLP; of one expert where there are experts"""
    vocabulary: int
    tied: bool = False
    """whether the output layer is the embedding"""
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    """further norms after attention and MLP (Gemma)"""
    experts: int = 0
    block_sparse: bool = False
    """whether the names are those of Mixtral: ``block_sparse_moe``, with ``w1``, ``w3``, ``w2``"""
    dtype: str = "float32"

    @classmethod
    def from_config(cls, config: Mapping[str, Any], dtype: str = "float32") -> DecoderSizes:
        """Read a Hugging Face ``config.json``. Raises `ModelMismatch` for another architecture."""
        kind = config.get("model_type")
        if kind not in ARCHITECTURES:
            raise ModelMismatch(
                f"model_type {kind!r} has no name map; there are: {', '.join(ARCHITECTURES)}. A "
                "model that is not cut by tensor or pipeline ranks needs none: use Model.of(shapes)"
            )
        _refuse_variants(kind, config)
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        # Their number has two names; transformers writes the second.
        experts = "num_experts" if "num_experts" in config else "num_local_experts"
        return cls(
            layers=config["num_hidden_layers"],
            hidden=hidden,
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            mlp=config["moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"],
            vocabulary=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", kind == "gemma3_text")),
            qkv_bias=kind == "qwen2",
            qk_norm=kind in {"qwen3", "qwen3_moe", "gemma3_text"},
            post_norms=kind == "gemma3_text",
            experts=config[experts] if kind in {"mixtral", "qwen3_moe"} else 0,
            block_sparse=kind == "mixtral",
            dtype=dtype,
        )

    def tensor(self, name: str, *shape: int) -> GlobalTensor:
        """Return a global tensor of this model's dtype."""
        return GlobalTensor(name, shape, self.dtype)

    def norms(self, layer: int) -> dict[str, GlobalTensor]:
        """Return the tensors of a layer's norms by their name in the layer."""
        names = ["input_layernorm", "post_attention_layernorm"]
        if self.post_norms:
            names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        found = {
            name: self.tensor(f"{layer_name(layer)}.{name}.weight", self.hidden) for name in names
        }
        if self.qk_norm:
            for name in ("q_norm", "k_norm"):
                full = f"{layer_name(layer)}.self_attn.{name}.weight"
                found[f"self_attn.{name}"] = self.tensor(full, self.head_dim)
        return found

    def qkv(self, layer: int, kind: Kind) -> tuple[GlobalTensor, ...]:
        """Return query, key and value."""
        rows = {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads}
        inner = (self.hidden,) if kind == "weight" else ()
        return tuple(
            self.tensor(
                f"{layer_name(layer)}.self_attn.{name}_proj.{kind}", count * self.head_dim, *inner
            )
            for name, count in rows.items()
        )

    def qkv_splits(self) -> tuple[Split, ...]:
        """Return how tensor-parallel ranks cut query, key and value."""
        few = Heads(self.kv_heads, shared=True)
        return Heads(self.heads), few, few

    def output(self, layer: int) -> GlobalTensor:
        """Return the attention's output projection."""
        name = f"{layer_name(layer)}.self_attn.o_proj.weight"
        return self.tensor(name, self.hidden, self.heads * self.head_dim)

    def gate_up(self, layer: int) -> tuple[GlobalTensor, ...]:
        """Return gate and up of the MLP, or of each expert in turn."""
        names = ("w1", "w3") if self.block_sparse else ("gate_proj", "up_proj")
        return tuple(
            self.tensor(f"{mlp}.{name}.weight", self.mlp, self.hidden)
            for mlp in self._mlps(layer)
            for name in names
        )

    def down(self, layer: int) -> tuple[GlobalTensor, ...]:
        """Return down of the MLP, or of each expert in turn."""
        name = "w2" if self.block_sparse else "down_proj"
        return tuple(
            self.tensor(f"{mlp}.{name}.weight", self.hidden, self.mlp) for mlp in self._mlps(layer)
        )

    def router(self, layer: int) -> GlobalTensor:
        """Return the weight of the router."""
        return self.tensor(f"{self.block(layer)}.gate.weight", self.experts, self.hidden)

    def embedding(self) -> GlobalTensor:
        """Return the word embeddings."""
        return self.tensor("model.embed_tokens.weight", self.vocabulary, self.hidden)

    def head(self) -> GlobalTensor:
        """Return the output layer, which may be the embeddings."""
        if self.tied:
            return self.embedding()
        return self.tensor("lm_head.weight", self.vocabulary, self.hidden)

    def block(self, layer: int) -> str:
        """Return the name in checkpoints and vLLM of the MLP, or of the router with its experts."""
        return f"{layer_name(layer)}.{'block_sparse_moe' if self.block_sparse else 'mlp'}"

    def _mlps(self, layer: int) -> list[str]:
        mlp = self.block(layer)
        return [f"{mlp}.experts.{e}" for e in range(self.experts)] if self.experts else [mlp]

    def qkv_kinds(self) -> tuple[Kind, ...]:
        """Return the kinds of tensors of query, key and value: weights, and biases if any."""
        return ("weight", "bias") if self.qkv_bias else ("weight",)


def between_ends(
    one: DecoderSizes, layers: list[Parameter], names: tuple[str, str, str], vocabulary: Split
) -> Model:
    """Add embedding, final norm and output layer to the layers."""
    embedding, norm, head = names
    final = one.tensor("model.norm.weight", one.hidden)
    return Model(
        (
            Parameter(name=embedding, tensors=(one.embedding(),), split=vocabulary, stage="first"),
            *layers,
            Parameter(name=norm, tensors=(final,), stage="last"),
            Parameter(
                name=head,
                tensors=(one.head(),),
                split=vocabulary,
                stage="last",
                tied_to=embedding if one.tied else None,
            ),
        ),
        one.layers,
    )


def parameter(
    name: str,
    tensors: tuple[GlobalTensor, ...],
    split: Split,
    layer: int,
    expert: tuple[int, int] | None = None,
) -> Parameter:
    return Parameter(name=name, tensors=tensors, split=split, layer=layer, expert=expert)


def layer_name(layer: int) -> str:
    return f"model.layers.{layer}"


def _refuse_variants(kind: str, config: Mapping[str, Any]) -> None:
    """Raise for options that add tensors which the name maps do not have."""
    faults = [
        f"{name}={config[name]!r}"
        for name in ("attention_bias", "mlp_bias", "mlp_only_layers")
        if config.get(name)
    ]
    if kind == "qwen3_moe" and config.get("decoder_sparse_step", 1) != 1:
        faults.append(f"decoder_sparse_step={config['decoder_sparse_step']}")
    if faults:
        raise ModelMismatch(f"{kind} with {', '.join(faults)} has no name map")


Norms = Literal["apart", "fused"]


def megatron(one: DecoderSizes, norms: Norms = "apart", vocabulary_multiple: int = 128) -> Model:
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
            parameter(f"{attention}.linear_proj.weight", (one.output(layer),), RowParallel(), layer)
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


def _megatron_mlp(one: DecoderSizes, layer: int, name: str) -> list[Parameter]:
    gate_up, down = one.gate_up(layer), one.down(layer)
    if not one.experts:
        return [
            parameter(f"{name}.linear_fc1.weight", gate_up, GATE_UP, layer),
            parameter(f"{name}.linear_fc2.weight", down, RowParallel(), layer),
        ]
    held = [parameter(f"{name}.router.weight", (one.router(layer),), Whole(), layer)]
    for expert in range(one.experts):
        mlp, place = f"{name}.experts.local_experts.{expert}", (expert, one.experts)
        both = gate_up[2 * expert : 2 * expert + 2]
        held.append(parameter(f"{mlp}.linear_fc1.weight", both, GATE_UP, layer, place))
        held.append(
            parameter(f"{mlp}.linear_fc2.weight", (down[expert],), RowParallel(), layer, place)
        )
    return held


def vllm(one: DecoderSizes) -> Model:
    """Return the parameters of vLLM's model of the same architecture; the vocabulary padded to
    64."""
    return _named_as_in_checkpoints(one, Vocabulary(64), joined=True)


def huggingface(one: DecoderSizes) -> Model:
    """Return the parameters of a transformers 5 model, cut over tensor ranks where they can be."""
    return _named_as_in_checkpoints(one, Vocabulary(), joined=False)


def _named_as_in_checkpoints(one: DecoderSizes, vocabulary: Split, *, joined: bool) -> Model:
    """Return parameters with the names of checkpoints, but for those of several tensors.

    ``joined``: query, key and value are one parameter, and so are gate and up.
    """
    held: list[Parameter] = []
    for layer in range(one.layers):
        name, splits = layer_name(layer), one.qkv_splits()
        for kind in one.qkv_kinds():
            qkv = one.qkv(layer, kind)
            if joined:
                fused = f"{name}.self_attn.qkv_proj.{kind}"
                held.append(parameter(fused, qkv, Joined(splits), layer))
            else:
                held += [
                    parameter(part.name, (part,), split, layer)
                    for part, split in zip(qkv, splits, strict=True)
                ]
        held.append(parameter(one.output(layer).name, (one.output(layer),), RowParallel(), layer))
        held += [
            parameter(norm.name, (norm,), Whole(), layer) for norm in one.norms(layer).values()
        ]
        gate_up, down = one.gate_up(layer), one.down(layer)
        if one.experts:
            each, back = Stacked(GATE_UP, one.experts), Stacked(RowParallel(), one.experts)
            block = one.block(layer) if joined else f"{name}.mlp"
            inner, outer = ("w13_weight", "w2_weight") if joined else ("gate_up_proj", "down_proj")
            held.append(parameter(f"{block}.gate.weight", (one.router(layer),), Whole(), layer))
            held.append(parameter(f"{block}.experts.{inner}", gate_up, each, layer))
            held.append(parameter(f"{block}.experts.{outer}", down, back, layer))
            continue
        if joined:
            held.append(parameter(f"{name}.mlp.gate_up_proj.weight", gate_up, GATE_UP, layer))
        else:
            held += [parameter(part.name, (part,), ColumnParallel(), layer) for part in gate_up]
        held.append(parameter(down[0].name, down, RowParallel(), layer))
    names = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    return between_ends(one, held, names, vocabulary)
