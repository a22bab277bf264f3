"""A training loop as megatron-core's examples have it, on one process: nothing of ours but the
shims for CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from rlinf_async.backends.base import OptimizerConfig
from rlinf_async.backends.megatron.cpu import of_megatron


class FusedAttention(nn.Module):
    """PyTorch's causal attention in the place of Megatron's own, ``[S, B, H, D]``."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        q, k, v = (one.permute(1, 2, 0, 3) for one in (query, key, value))
        found = scaled_dot_product_attention(q, k, v, is_causal=True)
        return found.permute(2, 0, 1, 3).flatten(2)


class Norm(nn.RMSNorm):
    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)


class BareLoop:
    """GPTModel, DistributedDataParallel, schedule and optimizer of megatron-core."""

    def __init__(
        self,
        model: dict[str, Any],
        optimizer: OptimizerConfig,
        ids: np.ndarray[Any, np.dtype[np.int32]],
        micro_batch: int,
        *,
        fused: bool,
    ) -> None:
        parallel = of_megatron("parallel_state")
        parallel.initialize_model_parallel()
        of_megatron("tensor_parallel").model_parallel_cuda_manual_seed(0)
        transformer = of_megatron("transformer")
        config = transformer.TransformerConfig(
            num_layers=model["num_hidden_layers"],
            hidden_size=model["hidden_size"],
            ffn_hidden_size=model["intermediate_size"],
            num_attention_heads=model["num_attention_heads"],
            num_query_groups=model["num_key_value_heads"],
            kv_channels=model["head_dim"],
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=nn.functional.silu,
            add_bias_linear=False,
            qk_layernorm=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            use_cpu_initialization=not torch.cuda.is_available(),
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
        )
        specs = of_megatron("models.gpt.gpt_layer_specs")
        spec = specs.get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
        layer, attention = spec.submodules, spec.submodules.self_attention.submodules
        layer.input_layernorm = layer.pre_mlp_layernorm = Norm
        attention.q_layernorm = attention.k_layernorm = Norm
        if fused:
            attention.core_attention = FusedAttention
        block = of_megatron("transformer.transformer_block").TransformerBlockSubmodules
        layers = block(layer_specs=[spec] * model["num_hidden_layers"], layer_norm=Norm)
        stage = of_megatron("models.gpt").GPTModel(
            config,
            layers,
            model["vocab_size"],
            model["max_position_embeddings"],
            share_embeddings_and_output_weights=model["tie_word_embeddings"],
            position_embedding_type="rope",
        )
        distributed = of_megatron("distributed")
        buffers = distributed.DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True
        )
        self._model = distributed.DistributedDataParallel(config, buffers, stage)
        config.finalize_model_grads_func = distributed.finalize_model_grads
        config.no_sync_func = self._model.no_sync
        optimizers = of_megatron("optimizer")
        settings = optimizers.OptimizerConfig(
            optimizer="adam",
            lr=optimizer.lr,
            weight_decay=optimizer.weight_decay,
            adam_beta1=optimizer.betas[0],
            adam_beta2=optimizer.betas[1],
            adam_eps=optimizer.eps,
            clip_grad=optimizer.max_grad_norm,
            use_distributed_optimizer=True,
        )
        self._optimizer = optimizers.get_megatron_optimizer(settings, [self._model])
        rows = torch.from_numpy(ids.astype(np.int64))
        self._batches = [rows[at : at + micro_batch] for at in range(0, len(rows), micro_batch)]
        size = rows.shape[1] - 1
        self._positions = torch.arange(size).expand(micro_batch, size)
        self._mask = torch.ones(1, 1, size, size).tril() < 0.5

    def step(self) -> float:
        """One optimizer step; its loss."""
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        run = of_megatron("pipeline_parallel").get_forward_backward_func()
        losses = run(
            forward_step_func=self._forward,
            data_iterator=iter(self._batches),
            model=self._model,
            num_microbatches=len(self._batches),
            seq_length=self._positions.shape[1],
            micro_batch_size=len(self._positions),
            forward_only=False,
        )
        self._optimizer.step()
        return float(torch.stack(losses).mean())

    def _forward(self, batches: Iterator[Tensor], model: nn.Module) -> tuple[Tensor, Any]:
        ids = next(batches)
        labels = ids[:, 1:].contiguous()
        losses = model(ids[:, :-1].contiguous(), self._positions, self._mask, labels=labels)
        return losses, _mean


def _mean(losses: Tensor) -> tuple[Tensor, Tensor]:
    loss = losses.float().mean()
    return loss, loss.detach().clone()
