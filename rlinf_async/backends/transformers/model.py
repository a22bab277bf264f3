"""Building a model from its folder, and putting new weights into it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rlinf_async.backends.transformers import attention
from rlinf_async.backends.transformers.config import TransformersEngineConfig
from rlinf_async.backends.transformers.folder import ModelFolder
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.weights import check_fit, unpack, verify


def build_model(folder: ModelFolder, config: TransformersEngineConfig, device: str) -> nn.Module:
    """Build the causal language model: with the folder's weights, or with random ones."""
    from transformers import AutoModelForCausalLM

    factory: Any = AutoModelForCausalLM
    options = {
        "dtype": getattr(torch, config.dtype),
        # the others leave out the soft cap that some models were trained with
        "attn_implementation": "eager" if _caps(folder.config) else attention.register(),
    }
    if config.weights == "folder":
        model: nn.Module = factory.from_pretrained(folder.path, local_files_only=True, **options)
    else:
        model = factory.from_config(folder.config, **options)
    return model.to(device).eval().requires_grad_(False)


def load_weights(update: WeightUpdate, model: nn.Module) -> int:
    """Copy the update into the model, in place; return the checksum of the bytes.

    Tied tensors may come under one of their names, and floating-point dtypes may differ.

    Raises:
        WeightsDamaged, WeightsMismatch: before anything was written.
    """
    verify(update)
    arrived = unpack(update)
    present: dict[str, Tensor] = model.state_dict()
    named = {tensor.data_ptr() for name, tensor in present.items() if name in arrived}
    wanted = {
        name: _as(tensor, arrived.get(name))
        for name, tensor in present.items()
        if name in arrived or tensor.data_ptr() not in named
    }
    check_fit(arrived, wanted, f"weights version {update.version}")
    with torch.no_grad():
        for name, tensor in arrived.items():
            present[name].copy_(tensor)
    return update.checksum


def _as(present: Tensor, arrived: Tensor | None) -> Tensor:
    """Return the tensor as `check_fit` may compare it: a cast between floats is no misfit."""
    if arrived is None or not (arrived.is_floating_point() and present.is_floating_point()):
        return present
    return torch.empty(present.shape, dtype=arrived.dtype, device="meta")


def _caps(config: Any) -> bool:
    return getattr(config, "attn_logit_softcapping", None) is not None
