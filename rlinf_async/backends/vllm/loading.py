"""Loading weights into a running vLLM model, inside vLLM's own worker processes.

::

    tensors of a checkpoint --layout of vLLM's parameters--> this rank's parameters --> the model
        (shared memory)          (`rlinf_async.parallel`)      q, k and v lie behind one another:
                                                               a view; otherwise put together

vLLM makes its workers inherit from `WeightsExtension`, and calls its methods by name. vLLM's own
reloading rebuilds every layer, for any model; here each rank copies its own slices, for dense
decoders without quantisation (`ARCHITECTURES`). `load` refuses other models, which vLLM then loads.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlinf_async.backends.vllm.shared import Memory
from rlinf_async.parallel import Buffer, ParallelError, Strategy, layout
from rlinf_async.parallel.decoders import DecoderSizes, vllm
from rlinf_async.weights.pack import unpack


class Shard(NamedTuple):
    """A parameter of one rank."""

    name: str
    data: Tensor
    """tensor of the parameter's shape; may be a view of the tensors it is made of"""
    tensors: frozenset[str]
    """names of the tensors it is made of"""


class Unknown(Exception):
    """The model has to be loaded by vLLM's own loader; the message says why."""


def shards(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], tp: int, rank: int
) -> Iterator[Shard]:
    """Yield the parameters of tensor-parallel rank ``rank`` of ``tp``, from whole tensors by name.

    Only the bytes that the rank needs are read; none if a parameter is a view of the tensors.
    ``config`` is the content of the model's ``config.json``. Raises `Unknown` for a model without a
    layout.
    """
    try:
        decoder = DecoderSizes.from_config(config)
        held = layout(vllm(decoder), Strategy(tp=tp)).of_rank(rank)
    except (ParallelError, KeyError) as error:
        raise Unknown(str(error)) from error
    if decoder.experts:
        raise Unknown("the layout of experts depends on vLLM's kernels")
    for buffer in held:
        names = frozenset(piece.tensor for piece in buffer.pieces)
        if missing := names - tensors.keys():
            raise Unknown(f"{sorted(missing)} are missing")
        yield Shard(buffer.name, _joined(buffer, tensors), names)


def load(model: Any, config: Any, tensors: Mapping[str, Tensor], unchanged: frozenset[str]) -> None:
    """Put the tensors into the model, except the ``unchanged`` ones, which are loaded already.

    Output layers are not packed again. Raises `Unknown` before anything is written.
    """
    group = importlib.import_module("vllm.distributed.parallel_state").get_tp_group()
    found = list(shards(config.to_dict(), tensors, group.world_size, group.rank_in_group))
    own = {name for name, _ in model.named_parameters()}
    if own - {shard.name for shard in found}:
        raise Unknown(f"it has further parameters: {sorted(own - {one.name for one in found})[:8]}")
    targets = [(_target(model, shard), shard) for shard in found if shard.tensors - unchanged]
    with torch.no_grad():
        for target, shard in targets:
            target.take(shard.data)


class _Target:
    """A parameter of a layer.

    Args:
        packs: packs the layer's weight into the form it computes with, and drops the weight; None:
            the layer computes with the parameter as it is.
    """

    def __init__(self, layer: Any, name: str, packs: Any) -> None:
        self._layer, self._name, self._packs = layer, name, packs

    def take(self, data: Tensor) -> None:
        layer, kept = self._layer, getattr(self._layer, self._name)
        if self._packs is None:
            kept.copy_(data)
            return
        given = data.to(kept.dtype)
        layer.weight = torch.nn.Parameter(given, requires_grad=False)
        self._packs(layer)
        if layer.weight.numel():  # not packed: the layer must not keep a view of shared memory
            layer.weight = torch.nn.Parameter(given.clone(), requires_grad=False)


def _target(model: Any, shard: Shard) -> _Target:
    """Return the parameter that a shard belongs to. Raises `Unknown` if the layout does not fit."""
    path, _, name = shard.name.rpartition(".")
    try:
        layer = model.get_submodule(path)
        parameter = getattr(layer, name)
    except AttributeError as error:
        raise Unknown(f"it has no {shard.name}") from error
    linear = importlib.import_module("vllm.model_executor.layers.linear")
    embedding = importlib.import_module("vllm.model_executor.layers.vocab_parallel_embedding")
    platform = importlib.import_module("vllm.platforms").current_platform
    method = getattr(layer, "quant_method", None)
    plain = (linear.UnquantizedLinearMethod, embedding.UnquantizedEmbeddingMethod, type(None))
    if type(method) not in plain:
        raise Unknown(f"{path} is computed by {type(method).__name__}")
    packed = platform.is_cpu() and name == "weight" and isinstance(layer, linear.LinearBase)
    if packed and platform.is_zen_cpu():
        raise Unknown("on a Zen processor the packed weight may be the weight itself")
    shape = _shape_of(layer) if packed and not parameter.numel() else tuple(parameter.shape)
    if shape != tuple(shard.data.shape):
        raise Unknown(f"{shard.name} is {list(shape)}, not {list(shard.data.shape)}")
    return _Target(layer, name, method.process_weights_after_loading if packed and method else None)


def _shape_of(layer: Any) -> tuple[int, int]:
    """Return the shape of a weight that was dropped when it was packed."""
    return layer.output_size_per_partition, layer.input_size_per_partition


def _joined(buffer: Buffer, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return a buffer's content: a view if its pieces are adjacent, else a copy."""
    parts = []
    for piece in buffer.pieces:
        part = tensors[piece.tensor]
        for dim, (start, size) in enumerate(zip(piece.start, piece.size, strict=True)):
            part = part.narrow(dim, start, size)
        parts.append((piece.offset, part))
    size, end = math.prod(buffer.shape), 0
    together = len({part.untyped_storage().data_ptr() for _, part in parts}) == 1
    for offset, part in parts:
        follows = part.data_ptr() == parts[0][1].data_ptr() + offset * part.element_size()
        together = together and part.is_contiguous() and offset == end and follows
        end += part.numel()
    first = parts[0][1]
    if together and end == size and len({part.dtype for _, part in parts}) == 1:
        flat = first.as_strided((size,), (1,), first.storage_offset())
        return flat.view(buffer.shape)
    whole = torch.zeros(size, dtype=first.dtype)
    for offset, part in parts:
        whole[offset : offset + part.numel()].view(part.shape).copy_(part)
    return whole.view(buffer.shape)


logger = logging.getLogger(__name__)


class WeightsExtension:
    """A part of vLLM's ``Worker``."""

    model_runner: Any
    _rlinf_async_memory: Memory

    def rlinf_async_load(self, header: bytes) -> None:
        """Load the update that another process shares, and has verified.

        The names are those of a checkpoint. Models that `loading` does not know go through vLLM's
        own loader, which fuses and shards the tensors as it does with a checkpoint.
        """
        if not hasattr(self, "_rlinf_async_memory"):
            self._rlinf_async_memory = Memory()
        update, unchanged = self._rlinf_async_memory.open(header)
        tensors, runner = unpack(update), self.model_runner
        try:
            load(runner.get_model(), runner.model_config.hf_text_config, tensors, unchanged)
        except Unknown as why:
            logger.info("the weights go through vLLM's own loader: %s", why)
            self._forget_packed_experts()
            worker: Any = self
            worker.reload_weights(weights_iterator=iter(tensors.items()))
        self._pack_heads_again()

    def _forget_packed_experts(self) -> None:
        """Make vLLM pack the weights of experts when it loads them.

        On a CPU it packs them when it builds their kernel, which it does once: the kernel would
        read weights that are loaded later as if they were packed, and silently compute nonsense.
        """
        if not _on_cpu():
            return
        for module in self.model_runner.get_model().modules():
            method = getattr(module, "quant_method", None)
            if method is not None and getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None  # built anew from the next weights

    def _pack_heads_again(self) -> None:
        """Pack the weights of output layers.

        On a CPU the weight is packed for its matrix product. An output layer that is tied to the
        embedding would silently keep its old weights: no tensor comes under its name, so vLLM's
        reloading does not reach it.
        """
        if not _on_cpu():
            return
        layers = importlib.import_module("vllm.model_executor.layers.vocab_parallel_embedding")
        for module in self.model_runner.get_model().modules():
            if isinstance(module, layers.ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)


def _on_cpu() -> bool:
    found: bool = importlib.import_module("vllm.platforms").current_platform.is_cpu()
    return found
