"""Sizes of a decoder-only language model, and its global tensors by their names in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from rlinf_async.parallel.errors import ModelMismatch
from rlinf_async.parallel.splits import Column, Heads, Joined, Split
from rlinf_async.parallel.tensors import GlobalTensor, Model, Parameter

ARCHITECTURES = ("gemma3_text", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
GATE_UP = Joined((Column(), Column()))
Kind = Literal["weight", "bias"]


class Decoder(msgspec.Struct, frozen=True, kw_only=True):
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
    def from_config(cls, config: Mapping[str, Any], dtype: str = "float32") -> Decoder:
        """Read a Hugging Face ``config.json``. Raises `ModelMismatch` for another architecture."""
        kind = config.get("model_type")
        if kind not in ARCHITECTURES:
            raise ModelMismatch(
                f"model_type {kind!r} has no name map; there are: {', '.join(ARCHITECTURES)}. A "
                "model that is not cut by tensor or pipeline ranks needs none: use Model.of(shapes)"
            )
        _refuse_variants(kind, config)
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
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
            experts=_experts(config) if kind in {"mixtral", "qwen3_moe"} else 0,
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
    one: Decoder, layers: list[Parameter], names: tuple[str, str, str], vocabulary: Split
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


def _experts(config: Mapping[str, Any]) -> int:
    """Return the number of experts, which has two names; transformers writes the second."""
    found: int = config["num_experts" if "num_experts" in config else "num_local_experts"]
    return found


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
