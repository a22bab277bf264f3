"""Name maps: parameters are those that the backends have; weights survive the way between them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from rlinf_async.parallel import FSDP2, DistributedOptimizer, ModelMismatch, Strategy, layout, plan
from rlinf_async.parallel.decoders import ARCHITECTURES, DecoderSizes, huggingface, megatron, vllm
from tests.parallel.arrays import reshard, scatter

CONFIG: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "tie_word_embeddings": False,
}
EXPERTS = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 12},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
}


def config(kind: str, **changes: object) -> dict[str, Any]:
    return {"model_type": kind, **CONFIG, **EXPERTS.get(kind, {}), **changes}


def whole_values(one: DecoderSizes) -> dict[str, np.ndarray[Any, Any]]:
    found: dict[str, np.ndarray[Any, Any]] = {}
    first = 1
    for name, tensor in huggingface(one).tensors().items():
        found[name] = np.arange(first, first + tensor.elements).reshape(tensor.shape)
        first += tensor.elements
    return found


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_the_hugging_face_parameters_are_those_of_the_real_model(kind: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    made = config(kind)
    fields = {name: value for name, value in made.items() if name != "model_type"}
    with torch.device("meta"):
        real = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(kind, **fields)
        )
    shapes = {name: tuple(one.shape) for name, one in real.named_parameters()}
    mine = layout(huggingface(DecoderSizes.from_config(made)), Strategy())
    assert {buffer.name: buffer.shape for buffer in mine.of_rank(0)} == shapes


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_an_engine_rank_gets_its_own_fused_slices_from_a_trainer_of_any_size(kind: str) -> None:
    one = DecoderSizes.from_config(config(kind))
    trainer = layout(huggingface(one), Strategy(dp=3, sharding=FSDP2()))
    engine = layout(vllm(one), Strategy(tp=2), range(3, 5))
    whole = whole_values(one)
    got = reshard(plan(trainer, engine), scatter(trainer, whole))[4]
    attention = "model.layers.1.self_attn"
    q, k, v = (whole[f"{attention}.{part}_proj.weight"] for part in "qkv")
    expected = np.concatenate([q[16:], k[8:], v[8:]])
    assert np.array_equal(got[f"{attention}.qkv_proj.weight"], expected)
    head = got["lm_head.weight"]
    assert head.shape == (32, 16)
    assert np.array_equal(head[:5], whole["lm_head.weight"][32:])
    assert not head[5:].any()
    if not one.experts:
        gate, up = (whole[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up"))
        fused = got["model.layers.0.mlp.gate_up_proj.weight"]
        assert np.array_equal(fused, np.concatenate([gate[12:], up[12:]]))
    else:
        mixtral = kind == "mixtral"
        block = f"model.layers.0.{'block_sparse_moe' if mixtral else 'mlp'}"
        fused = got[f"{block}.experts.w13_weight"]
        parts = ("w1", "w3") if mixtral else ("gate_proj", "up_proj")
        gate, up = (whole[f"{block}.experts.2.{part}.weight"] for part in parts)
        assert np.array_equal(fused[2], np.concatenate([gate[6:], up[6:]]))


def test_megatron_holds_query_key_and_value_by_group() -> None:
    one = DecoderSizes.from_config(config("qwen2"))
    made = layout(megatron(one), Strategy(tp=2))
    whole = whole_values(one)
    name = "model.layers.0.self_attn"
    q, k, v = (whole[f"{name}.{part}_proj.weight"] for part in "qkv")
    groups = [[q[8 * g : 8 * g + 8], k[4 * g : 4 * g + 4], v[4 * g : 4 * g + 4]] for g in (2, 3)]
    got = scatter(made, whole)[1]["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert np.array_equal(got, np.concatenate([part for group in groups for part in group]))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["llama", "mixtral", "qwen2", "qwen3", "qwen3_moe"])
def test_weights_go_round_the_three_backends_unchanged(kind: str, tied: bool) -> None:
    one = DecoderSizes.from_config(config(kind, tie_word_embeddings=tied))
    ep, expert_tp = (2, 1) if one.experts else (1, None)
    ring = [
        layout(huggingface(one), Strategy(dp=3, sharding=FSDP2())),
        layout(megatron(one), Strategy(tp=2, pp=2, dp=2, ep=ep, expert_tp=expert_tp)),
        layout(vllm(one), Strategy(tp=4)),
        layout(
            megatron(one, norms="fused"),
            Strategy(
                tp=4,
                dp=2,
                sharding=DistributedOptimizer(bucket_elements=500),
                ep=ep,
                expert_tp=expert_tp,
            ),
        ),
        layout(huggingface(one), Strategy(dp=3, sharding=FSDP2())),
    ]
    start = held = scatter(ring[0], whole_values(one))
    for old, new in pairwise(ring):
        held = reshard(plan(old, new), held)
    assert all(np.array_equal(held[r][n], start[r][n]) for r in start for n in start[r])


def test_tied_weights_are_held_once_where_a_rank_has_both_ends() -> None:
    one = DecoderSizes.from_config(config("qwen3", tie_word_embeddings=True))
    alone = {buffer.name for buffer in layout(vllm(one), Strategy(tp=2)).of_rank(0)}
    assert "lm_head.weight" not in alone
    last = {buffer.name for buffer in layout(vllm(one), Strategy(pp=2)).of_rank(1)}
    assert "lm_head.weight" in last
    assert "model.embed_tokens.weight" not in last


def test_the_engine_gets_no_byte_that_it_does_not_need() -> None:
    one = DecoderSizes.from_config(config("qwen3"))
    made = plan(
        layout(huggingface(one), Strategy(dp=2, sharding=FSDP2())),
        layout(vllm(one), Strategy(tp=2), range(2, 4)),
    )
    assert sum(made.received().values()) == 4 * int(made.new.boxes.volume.sum())
    assert sum(made.received().values()) < 2 * sum(
        4 * tensor.elements for tensor in huggingface(one).tensors().values()
    )


def test_an_unknown_architecture_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(
        ModelMismatch, match=r"'gpt2' has no name map; there are: gemma3_text, llama"
    ):
        DecoderSizes.from_config(config("gpt2"))
    with pytest.raises(ModelMismatch, match="attention_bias=True"):
        DecoderSizes.from_config(config("llama", attention_bias=True))
    with pytest.raises(ModelMismatch, match="no norms after attention"):
        megatron(DecoderSizes.from_config(config("gemma3_text")))
