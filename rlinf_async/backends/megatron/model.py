"""Building a rank's part of a language model from megatron-core's layers.

A Hugging Face configuration says what the model is: the decoders that `parallel.decoders` has name
maps for, without experts and without attention in windows. Attention, norms and the value head are
PyTorch's own; Megatron's are written for Transformer Engine.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from rlinf_async.backends.megatron.config import VOCABULARY_MULTIPLE, Architecture
from rlinf_async.backends.megatron.cpu import of_megatron
from rlinf_async.backends.megatron.grid import Grid
from rlinf_async.backends.reshard.reserved import untouched_zeros
from rlinf_async.parallel import Strategy
from rlinf_async.parallel.decoders import DecoderSizes


@contextmanager
def buffers_in(reused: Iterable[Tensor] = ()) -> Iterator[None]:
    """Let Megatron make its buffers in these, in this order, and in new ones where there are none.

    Megatron makes them with ``torch.zeros``, whose first touch of every page is most of what
    building a part of a model costs on a CPU. Here they are memory of the system that is 0 without
    being touched; or those of the part that is being replaced, where parameters lie in them in the
    same places.

    A reused buffer keeps its content; it must have the size and dtype that is asked for.
    """
    module = of_megatron("distributed.param_and_grad_buffer")
    before = module.torch
    module.torch = _Torch(reused)
    try:
        yield
    finally:
        module.torch = before


def buffers_of(models: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the buffers of Megatron's wrapped chunks, in the order in which it makes them."""
    for model in models:
        for buffer in (*model.buffers, *model.expert_parallel_buffers):
            yield from (one for one in (buffer.param_data, buffer.grad_data) if one is not None)


class _Torch:
    """torch, as that one module of Megatron sees it."""

    def __init__(self, reused: Iterable[Tensor]) -> None:
        self._reused = list(reused)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(
        self, size: Any, *, dtype: torch.dtype | None = None, device: Any, **options: Any
    ) -> Tensor:
        """A buffer of ``size`` elements."""
        if not isinstance(size, int) or dtype is None:
            return torch.zeros(size, dtype=dtype, device=device, **options)
        if self._reused:
            found = self._reused.pop(0)
            if (found.numel(), found.dtype) != (size, dtype):
                raise ValueError(
                    f"a buffer of {found.numel()} {found.dtype} cannot hold {size} {dtype}"
                )
            return found
        return untouched_zeros((size,), dtype, torch.device(device))


class PackedAttention(nn.Module):
    """Causal attention over ``[T, heads, D]``, inside each sample of a packed row, with fewer heads
    of key and value.

    Transformer Engine does this on GPUs. Without it, one call of PyTorch's fused attention for each
    sample: no mask is built, and no work is done for pairs of tokens of different samples.
    """

    def __init__(self, config: Any, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__()
        self._scale = softmax_scale
        self._dropout = float(config.attention_dropout)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *_: Any,
        packed_seq_params: Any = None,
        **__: Any,
    ) -> Tensor:
        """Return ``[T, heads x D]``; the bounds of the samples are in ``packed_seq_params``."""
        bounds = packed_seq_params.cu_seqlens_q
        lengths = (bounds[1:] - bounds[:-1]).tolist()
        parts = []
        samples = (torch.split(one, lengths) for one in (query, key, value))
        for q, k, v in zip(*samples, strict=True):
            found = scaled_dot_product_attention(
                q.transpose(0, 1),
                k.transpose(0, 1),
                v.transpose(0, 1),
                is_causal=True,
                dropout_p=self._dropout if self.training else 0.0,
                scale=self._scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            parts.append(found.transpose(0, 1))
        return torch.cat(parts).flatten(1)


class FrozenPadding:
    """A hook of the embedding: hidden states of the padding token pass no gradient on.

    The models of transformers make their embedding with ``padding_idx``: that row begins at 0 and
    gets no gradient. The norm behind it would make a large one of it, should the token ever be in a
    sample.
    """

    def __init__(self, token: int, tensor_ranks: dist.ProcessGroup) -> None:
        self._token = token
        self._group = tensor_ranks

    def __call__(
        self, _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Tensor
    ) -> Tensor:
        """``output`` is ``[S, B, D]``, or this tensor rank's part of the tokens."""
        ids: Tensor = named["input_ids"] if "input_ids" in named else inputs[0]
        padding = (ids == self._token).t()
        if len(padding) != len(output):
            part = dist.get_rank(self._group)
            padding = padding[part * len(output) : (part + 1) * len(output)]
        return torch.where(padding[..., None], output.detach(), output)


class ValueHead(nn.Module):
    """One output, which begins at 0.

    Every tensor rank has the whole head and computes the same values, so its gradients need no sum.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.sequence_parallel = bool(config.sequence_parallel)
        """whether the hidden states are cut over tensor ranks: they are gathered before"""
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.bias = nn.Parameter(torch.zeros(1, dtype=config.params_dtype))

    def forward(self, hidden: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, Any]:
        """Return ``[N, 1, 1]`` of ``[N, 1, D]``, as Megatron's output layer returns logits."""
        return nn.functional.linear(hidden, self.weight, self.bias), None


class Norm(nn.RMSNorm):
    """A norm, made as Megatron's layers make one.

    With sequence parallelism each tensor rank sees a part of the tokens, so their gradients of the
    norm have to be added up: Megatron does that for parameters with the mark that is set here.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        if config.sequence_parallel:
            self.weight.sequence_parallel = True  # type: ignore[attr-defined]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Options of training, beside the model and the strategy."""

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
    """Return the options of virtual stages. Both neighbours of one of two stages are the same rank:
    activations and gradients must not travel in one batch then, whose messages would be mixed up.
    """
    if strategy.virtual_stages == 1:
        return {}
    return {
        "virtual_pipeline_model_parallel_size": strategy.virtual_stages,
        "overlap_p2p_comm": True,
        "batch_p2p_comm": False,
    }


def _use_own_parts(spec: Any, one: DecoderSizes) -> None:
    """Put our attention and norms into the specification of a layer."""
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = Norm
    attention = layer.self_attention.submodules
    attention.core_attention = PackedAttention
    if one.qk_norm:
        attention.q_layernorm = attention.k_layernorm = Norm
