"""A model's tensors, in memory and as checkpoints of its architecture have them; building a model.

::

    in memory     model.layers.0.mlp.experts.gate_up_proj          [experts, 2 x inner, hidden]
    checkpoint    model.layers.0.mlp.experts.0.gate_proj.weight    [inner, hidden]
                  model.layers.0.mlp.experts.0.up_proj.weight      [inner, hidden]
                  model.layers.0.mlp.experts.1.gate_proj.weight    ...

transformers fuses and renames some tensors when it loads a checkpoint, and reverses that when it
saves one. The reverse conversion runs here once, over tensors without memory, and says where each
tensor of a checkpoint lies. Published weights and exported folders have the checkpoint's names.

Invariant: the names follow from the configuration alone, so trainer, engines and exported folders
agree on them, whatever files a model was loaded from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlinf_async.backends.building import building, one_at_a_time
from rlinf_async.backends.language import model_factory, sees_images
from rlinf_async.backends.language_training.lora import is_of_adapter, take_adapter
from rlinf_async.backends.transformers import sampling as attention
from rlinf_async.backends.transformers.config import TransformersEngineConfig
from rlinf_async.backends.transformers.folder import ModelFolder
from rlinf_async.messages.weights import WeightsMismatch, WeightUpdate
from rlinf_async.weights.pack import check_fit as compare
from rlinf_async.weights.pack import unpack, verify


class Slice(NamedTuple):
    """A tensor of a checkpoint: consecutive elements of a tensor in memory."""

    tensor: str
    """name in memory; of tied tensors the first"""
    offset: int
    """elements before it"""
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def of(self, whole: Tensor) -> Tensor:
        """Return the slice of the tensor in memory, as a view."""
        return whole.view(-1)[self.offset : self.offset + self.elements].view(self.shape)


class ModelTensors:
    """Names, shapes and dtypes of a model's tensors.

    Args:
        model: a causal language model of transformers that is not sharded, or the configuration of
            one, which is then built without memory.

    Raises:
        ValueError: a tensor of its checkpoints is no slice of one tensor in memory.
    """

    def __init__(self, model: Any) -> None:
        if not isinstance(model, nn.Module):
            model = model_without_memory(model)
        state: dict[str, Tensor] = model.state_dict(keep_vars=True)
        first: dict[int, str] = {}
        names = {name: first.setdefault(id(tensor), name) for name, tensor in state.items()}
        self.tied = {name: one for name, one in names.items() if name != one}
        """tensors that are another one: name -> the first name, both in memory"""
        self.memory = {name: tensor.detach().to("meta") for name, tensor in state.items()}
        """tensors by name in memory, without elements"""
        self.slices = _slices(model, names, self.memory)
        """slices by name in the checkpoint; tied tensors under each of their names"""

    def of(self, name: str) -> Tensor:
        """Return a tensor of the checkpoint without its elements."""
        one = self.slices[name]
        return torch.empty(one.shape, dtype=self.memory[one.tensor].dtype, device="meta")

    def published(self) -> dict[str, Slice]:
        """Return the tensors of a checkpoint in the order of memory, tied ones once."""
        order = {name: place for place, name in enumerate(self.memory)}
        found: dict[Slice, str] = {}
        for name, one in self.slices.items():
            found.setdefault(one, name)
        ordered = sorted(found.items(), key=lambda item: order[item[0].tensor])
        return {name: one for one, name in ordered}


def model_without_memory(config: Any) -> nn.Module:
    """Build a causal language model on torch's meta device.

    Args:
        config: a configuration of transformers, or the content of a ``config.json``.
    """
    from transformers import AutoConfig

    described: Any = config
    if isinstance(config, Mapping):
        described = AutoConfig.for_model(**config)
    factory = model_factory(described.model_type)
    with building(0), torch.device("meta"):
        model: nn.Module = factory.from_config(described)
    return model


class _Placeholder(Tensor):
    """A tensor without memory, whose slices stay views of it: transformers copies them with this
    method."""

    def contiguous(self, *args: Any, **kwargs: Any) -> Tensor:
        return self


def _slices(
    model: nn.Module, names: Mapping[str, str], memory: Mapping[str, Tensor]
) -> dict[str, Slice]:
    """Return the slices in the order of ``names``, which maps tied tensors to the first one."""
    placeholders: dict[str, Tensor] = {
        name: torch.empty(one.shape, device="meta").as_subclass(_Placeholder)
        for name, one in memory.items()
    }
    owners = {one.untyped_storage()._cdata: name for name, one in placeholders.items()}
    order = {name: place for place, name in enumerate(names)}
    found: list[tuple[int, str, Slice]] = []
    for name, one in _reverted(model, placeholders).items():
        owner = owners.get(one.untyped_storage()._cdata)
        if owner is None or not one.is_contiguous():
            raise ValueError(
                f"checkpoints of a {type(model).__name__} have a tensor {name!r} that is put "
                "together from several in memory, or transposed: its weights cannot be published"
            )
        piece = Slice(names[owner], int(one.storage_offset()), tuple(one.shape))
        found.append((order[owner], name, piece))
    found.sort(key=lambda entry: entry[0])
    return {name: piece for _, name, piece in found}


def _reverted(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by their names in checkpoints: what ``save_pretrained`` does before it writes.

    A model remembers the conversions that the files it was loaded from needed; here the ones that
    its architecture has by default are wanted.
    """
    from transformers.core_model_loading import revert_weight_conversion

    whole: Any = model
    remembered = getattr(whole, "_weight_conversions", None)
    whole._weight_conversions = None
    try:
        found: dict[str, Tensor] = revert_weight_conversion(whole, dict(state))
    finally:
        whole._weight_conversions = remembered
    return found


def attention_of(config: Any, text: str) -> str | dict[str, str]:
    """Return the attention of a model's parts, of which only its text is to attend by ``text``.

    Args:
        config: its configuration, of all parts.
        text: name of an attention of transformers.
    """
    if not sees_images({"model_type": config.model_type}):
        return text
    return {"text_config": text, "vision_config": "sdpa"}


def build_model(folder: ModelFolder, config: TransformersEngineConfig, device: str) -> nn.Module:
    """Build the causal language model: with the folder's weights, or with none yet.

    Then its memory is not filled: drawing random numbers that the first update replaces would take
    half a minute for each billion of them.
    """
    from transformers.initialization import no_init_weights

    factory = model_factory(folder.described.model_type)
    capped = getattr(folder.config, "attn_logit_softcapping", None) is not None
    # other implementations ignore the soft cap that some models were trained with
    chosen = "eager" if capped else attention.register()
    options = {
        "dtype": getattr(torch, config.dtype),
        "attn_implementation": attention_of(folder.described, chosen),
    }
    if config.weights != "update":
        with one_at_a_time:
            model: nn.Module = factory.from_pretrained(
                folder.path, local_files_only=True, **options
            )
    else:
        with one_at_a_time, no_init_weights():
            model = factory.from_config(folder.described, **options)
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


def is_adapter(update: WeightUpdate) -> bool:
    """Whether an update is an adapter (LoRA) alone."""
    names = [slot.name for bucket in update.buckets for slot in bucket.slots]
    return bool(names) and all(map(is_of_adapter, names))


def check_kind(update: WeightUpdate, *, adapter: bool) -> None:
    """Raise `WeightsMismatch` unless an update is what an engine waits for: an adapter alone, or
    whole weights."""
    if is_adapter(update) == adapter:
        return
    found = "whole weights" if adapter else "an adapter (LoRA) alone"
    wanted = "an adapter over the weights of its folder" if adapter else "whole weights"
    raise WeightsMismatch(
        f"version {update.version} is {found}, but the engine takes {wanted}: its setting weights "
        "and actor.lora.publish contradict each other"
    )


def load_weights(update: WeightUpdate, model: nn.Module, tensors: ModelTensors) -> int:
    """Copy the update into the model, in place; return the checksum of the bytes. An adapter alone
    becomes that of the model.

    Raises:
        WeightsDamaged, WeightsMismatch: before anything was written.
    """
    verify(update)
    if is_adapter(update):
        take_adapter(unpack(update), model, f"the adapter of version {update.version}")
        return update.checksum
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
