"""What runs inside vLLM's own worker processes: loading weights from shared memory.

vLLM makes its workers inherit from `WeightsExtension`, and calls its methods by name.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from rlinf_async.backends.vllm.loading import Unknown, load
from rlinf_async.backends.vllm.shared import Memory
from rlinf_async.weights import unpack

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
