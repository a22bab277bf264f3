"""Building a model from its folder, and putting new weights into it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rlinf_async.backends.transformers import attention
from rlinf_async.backends.transformers.config import TransformersEngineConfig
from rlinf_async.backends.transformers.folder import ModelFolder
from rlinf_async.backends.transformers.tensors import ModelTensors
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.weights import check_fit as compare
from rlinf_async.weights import unpack, verify


def build_model(folder: ModelFolder, config: TransformersEngineConfig, device: str) -> nn.Module:
    """Build the causal language model: with the folder's weights, or with none yet.

    Then its memory is not filled: drawing random numbers that the first update replaces would take
    half a minute for each billion of them.
    """
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    factory: Any = AutoModelForCausalLM
    options = {
        "dtype": getattr(torch, config.dtype),
        # other implementations ignore the soft cap that some models were trained with
        "attn_implementation": "eager" if _caps(folder.config) else attention.register(),
    }
    if config.weights == "folder":
        model: nn.Module = factory.from_pretrained(folder.path, local_files_only=True, **options)
    else:
        with no_init_weights():
            model = factory.from_config(folder.config, **options)
        tied: Any = model
        tied.tie_weights()  # what is not filled is not tied either
    return model.to(device).eval().requires_grad_(False)


def check_fit(update: WeightUpdate, tensors: ModelTensors) -> None:
    """Check names and shapes against a model. Tied tensors may come under one name; floats may be
    cast.

    Raises:
        WeightsMismatch: something is missing, unexpected, or of another shape.
    """
    arrived = {
        slot.name: torch.empty(slot.shape, dtype=getattr(torch, slot.dtype), device="meta")
        for bucket in update.buckets
        for slot in bucket.slots
    }
    slices = tensors.slices
    covered = {slices[name] for name in arrived if name in slices}
    wanted = {
        name: _cast(tensors.of(name), arrived.get(name))
        for name, one in slices.items()
        if name in arrived or one not in covered
    }
    compare(arrived, wanted, f"weights version {update.version}")


def load_weights(update: WeightUpdate, model: nn.Module, tensors: ModelTensors) -> int:
    """Copy the update into the model, in place; return the checksum of the bytes.

    Raises:
        WeightsDamaged, WeightsMismatch: before anything was written.
    """
    verify(update)
    check_fit(update, tensors)
    arrived = unpack(update)
    present: dict[str, Tensor] = model.state_dict()
    with torch.no_grad():
        for name, tensor in arrived.items():
            one = tensors.slices[name]
            one.of(present[one.tensor]).copy_(tensor)
    return update.checksum


def _cast(present: Tensor, arrived: Tensor | None) -> Tensor:
    """Return the tensor as `compare` may see it: a cast between floats is no misfit."""
    if arrived is None or not (arrived.is_floating_point() and present.is_floating_point()):
        return present
    return present.to(arrived.dtype)


def _caps(config: Any) -> bool:
    return getattr(config, "attn_logit_softcapping", None) is not None
