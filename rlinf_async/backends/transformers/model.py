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


class ModelShapes:
    """The tensors of a model: names, shapes, and which of them are one.

    Args:
        model: a model, or a configuration, of which the model is then built without memory.
    """

    def __init__(self, model: Any) -> None:
        if not isinstance(model, nn.Module):
            from transformers import AutoModelForCausalLM

            factory: Any = AutoModelForCausalLM
            with torch.device("meta"):
                model = factory.from_config(model)
        state: dict[str, Tensor] = model.state_dict(keep_vars=True)
        self._shapes = {name: tensor.detach().to("meta") for name, tensor in state.items()}
        self._same = {name: id(tensor) for name, tensor in state.items()}

    def check_fit(self, update: WeightUpdate) -> None:
        """Check names and shapes. Tied tensors may come under one name; floats may be cast.

        Raises:
            WeightsMismatch: something is missing, unexpected, or of another shape.
        """
        arrived = {
            slot.name: torch.empty(slot.shape, dtype=getattr(torch, slot.dtype), device="meta")
            for bucket in update.buckets
            for slot in bucket.slots
        }
        here = {self._same[name] for name in arrived if name in self._same}
        wanted = {
            name: _cast(tensor, arrived.get(name))
            for name, tensor in self._shapes.items()
            if name in arrived or self._same[name] not in here
        }
        check_fit(arrived, wanted, f"weights version {update.version}")


def load_weights(update: WeightUpdate, model: nn.Module, shapes: ModelShapes) -> int:
    """Copy the update into the model, in place; return the checksum of the bytes.

    Raises:
        WeightsDamaged, WeightsMismatch: before anything was written.
    """
    verify(update)
    shapes.check_fit(update)
    arrived = unpack(update)
    present: dict[str, Tensor] = model.state_dict()
    with torch.no_grad():
        for name, tensor in arrived.items():
            present[name].copy_(tensor)
    return update.checksum


def _cast(present: Tensor, arrived: Tensor | None) -> Tensor:
    """Return the tensor as `check_fit` may compare it: a cast between floats is no misfit."""
    if arrived is None or not (arrived.is_floating_point() and present.is_floating_point()):
        return present
    return present.to(arrived.dtype)


def _caps(config: Any) -> bool:
    return getattr(config, "attn_logit_softcapping", None) is not None
