"""Building a rank's part of a language model from megatron-core's layers.

A Hugging Face configuration says what the model is: the decoders that `parallel.decoders` has name
maps for, without experts and without attention in windows.
"""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import torch
from torch import nn

from rlinf_async.backends.megatron.architecture import VOCABULARY_MULTIPLE, Architecture
from rlinf_async.backends.megatron.attention import PackedAttention
from rlinf_async.backends.megatron.grid import Grid
from rlinf_async.backends.megatron.library import of_megatron
from rlinf_async.backends.megatron.norms import Norm
from rlinf_async.backends.megatron.padding import FrozenPadding
from rlinf_async.backends.megatron.values import ValueHead
from rlinf_async.parallel import Strategy
from rlinf_async.parallel.decoders import Decoder


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What is chosen for training, beside the model and the strategy."""

    dtype: torch.dtype = torch.float32
    sequence_parallel: bool = False
    recompute: bool = False
    """compute each layer again in the backward pass"""


def build_stage(architecture: Architecture, grid: Grid, options: Options) -> list[nn.Module]:
    """Build this rank's stage, on the CPU, with weights that are to be replaced: one model chunk,
    or several with interleaved stages.

    Raises:
        StrategyError: the strategy does not divide the model; `parallel.layout` says so before.
    """
    assert grid.place is not None
    _track_random_states(grid.place.tp)
    _make_global_buffer()
    last = grid.strategy.virtual_stages - 1
    return [
        build_chunk(
            architecture,
            grid,
            options,
            number=number,
            pre_process=grid.place.stage == 0 and number == 0,
            post_process=grid.is_last_stage and number == last,
        )
        for number in range(last + 1)
    ]


def build_chunk(
    architecture: Architecture,
    grid: Grid,
    options: Options,
    *,
    number: int,
    pre_process: bool,
    post_process: bool,
) -> nn.Module:
    """Build one model chunk of a stage, with the embedding (``pre_process``) and the output layer
    or value head (``post_process``)."""
    assert grid.place is not None
    one, strategy = architecture.decoder, grid.strategy
    config = _transformer_config(architecture, strategy, options)
    specs = of_megatron("models.gpt.gpt_layer_specs")
    spec = specs.get_gpt_layer_local_spec(qk_layernorm=one.qk_norm, normalization="RMSNorm")
    _use_own_parts(spec, one)
    block = of_megatron("transformer.transformer_block")
    vp_stage = number if strategy.virtual_stages > 1 else None
    counts = block.get_num_layers_to_build(config, vp_stage, pp_rank=grid.place.stage)
    layers = block.TransformerBlockSubmodules(layer_specs=[spec] * counts, layer_norm=Norm)
    model: nn.Module = of_megatron("models.gpt").GPTModel(
        config,
        layers,
        padded_vocabulary(one.vocabulary, strategy.tp),
        architecture.longest,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=one.tied and not architecture.values,
        position_embedding_type="rope",
        rotary_base=architecture.rope_theta,
        rope_scaling=architecture.rope_factor is not None,
        rope_scaling_factor=architecture.rope_factor or 8.0,
        pg_collection=_without_ends(grid),
        vp_stage=vp_stage,
    )
    language: Any = model
    language.embd_group = grid.groups.embd
    language.computes_values = architecture.values
    if architecture.padding is not None and pre_process:
        embedding: Any = model.embedding
        frozen = FrozenPadding(architecture.padding, grid.groups.tp)
        embedding.register_forward_hook(frozen, with_kwargs=True)
    if architecture.values and post_process:
        model.output_layer = ValueHead(config)
    _mark_cut_parameters(model)
    return model


def _without_ends(grid: Grid) -> Any:
    """Return the groups for building a model: with the one of first and last stage, Megatron would
    add up tied embeddings over it, which are filled later. Nothing that is built is collective."""
    groups = copy.copy(grid.groups)
    groups.embd = None
    return groups


def padded_vocabulary(size: int, tp: int) -> int:
    """Return the rows that all tensor ranks have together."""
    multiple = VOCABULARY_MULTIPLE * tp
    return -(-size // multiple) * multiple


def _track_random_states(tp_rank: int) -> None:
    """Megatron's layers ask for random states by name, although no dropout draws from them."""
    before = torch.get_rng_state()
    seed = of_megatron("tensor_parallel").model_parallel_cuda_manual_seed
    seed(0, tp_rank=tp_rank, ep_rank=0, etp_rank=tp_rank, force_reset_rng=True)
    torch.set_rng_state(before)


def _mark_cut_parameters(model: nn.Module) -> None:
    """Mark the parameters that tensor ranks have parts of: the others are copies, which the norm of
    the gradients counts once. Megatron does this where it draws the first weights itself."""
    parallel = of_megatron("tensor_parallel")
    mark = parallel.set_tensor_model_parallel_attributes
    for module in model.modules():
        if isinstance(module, parallel.ColumnParallelLinear | parallel.VocabParallelEmbedding):
            dim = 0
        elif isinstance(module, parallel.RowParallelLinear):
            dim = 1
        else:
            continue
        for name, one in module.named_parameters(recurse=False):
            if not hasattr(one, "tensor_model_parallel") and not (name == "bias" and dim == 1):
                mark(one, True, dim, 1)


def _make_global_buffer() -> None:
    """Sequence parallelism gathers into one buffer of the process, which Megatron's own
    initialisation makes, and that is not used here."""
    state = of_megatron("parallel_state")
    if state._GLOBAL_MEMORY_BUFFER is None:
        state._set_global_memory_buffer()


def _transformer_config(architecture: Architecture, strategy: Strategy, options: Options) -> Any:
    one = architecture.decoder
    recompute: dict[str, Any] = {}
    if options.recompute:
        recompute = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return of_megatron("transformer").TransformerConfig(
        num_layers=one.layers,
        hidden_size=one.hidden,
        num_attention_heads=one.heads,
        num_query_groups=one.kv_heads,
        kv_channels=one.head_dim,
        ffn_hidden_size=one.mlp,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_eps,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=one.qkv_bias,
        qk_layernorm=one.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=strategy.tp,
        pipeline_model_parallel_size=strategy.pp,
        **_interleaving(strategy),
        sequence_parallel=options.sequence_parallel and strategy.tp > 1,
        pipeline_dtype=options.dtype,
        params_dtype=options.dtype,
        bf16=options.dtype == torch.bfloat16,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # variable_seq_lengths asks for it, without experts
        batch_p2p_sync=False,
        calculate_per_token_loss=True,
        use_cpu_initialization=not torch.cuda.is_available(),
        perform_initialization=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        **recompute,
    )


def _interleaving(strategy: Strategy) -> dict[str, Any]:
    """Both neighbours of one of two stages are the same rank: activations and gradients must not
    travel in one batch then, whose messages would be mixed up."""
    if strategy.virtual_stages == 1:
        return {}
    return {
        "virtual_pipeline_model_parallel_size": strategy.virtual_stages,
        "overlap_p2p_comm": True,
        "batch_p2p_comm": False,
    }


def _use_own_parts(spec: Any, one: Decoder) -> None:
    """Put our attention and norms into the specification of a layer."""
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = Norm
    attention = layer.self_attention.submodules
    attention.core_attention = PackedAttention
    if one.qk_norm:
        attention.q_layernorm = attention.k_layernorm = Norm
