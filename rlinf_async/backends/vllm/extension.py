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

        The names are Hugging Face's. What `loading` does not know goes through vLLM's own loader,
        which fuses and shards it as it does with a checkpoint.
        """
        if not hasattr(self, "_rlinf_async_memory"):
            self._rlinf_async_memory = Memory()
        update, unchanged = self._rlinf_async_memory.open(header)
        tensors, runner = unpack(update), self.model_runner
        try:
            load(runner.get_model(), runner.model_config.hf_text_config, tensors, unchanged)
        except Unknown as why:
            logger.info("the weights go through vLLM's own loader: %s", why)
            worker: Any = self
            worker.reload_weights(weights_iterator=iter(tensors.items()))
        self._pack_heads_again()

    def _pack_heads_again(self) -> None:
        """Rebuild what an output layer holds beside its weight.

        On a CPU the weight is packed for its matrix product. An output layer that is tied to the
        embedding would go on with what was packed before, silently: no weight comes under its name,
        so vLLM's reloading misses it too.
        """
        if not importlib.import_module("vllm.platforms").current_platform.is_cpu():
            return
        layers = importlib.import_module("vllm.model_executor.layers.vocab_parallel_embedding")
        for module in self.model_runner.get_model().modules():
            if isinstance(module, layers.ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
