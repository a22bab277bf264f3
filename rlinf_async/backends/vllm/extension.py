"""What runs inside vLLM's own worker processes: loading weights from shared memory.

vLLM makes its workers inherit from `WeightsExtension`, and calls its methods by name.
"""

from __future__ import annotations

import importlib
from typing import Any

from rlinf_async.backends.vllm.shared import open_shared
from rlinf_async.weights import unpack


class WeightsExtension:
    """A part of vLLM's ``Worker``."""

    model_runner: Any

    def rlinf_async_load(self, path: str) -> int:
        """Load the update that another process shares under ``path``; its checksum.

        The names are Hugging Face's: vLLM's own loader fuses and shards them as it does with a
        checkpoint.
        """
        update = open_shared(path)
        worker: Any = self
        worker.reload_weights(weights_iterator=iter(unpack(update).items()))
        self._pack_heads_again()
        return update.checksum

    def _pack_heads_again(self) -> None:
        """Rebuild what an output layer holds beside its weight.

        On a CPU the weight is packed anew for its matrix product when it is loaded. vLLM's
        reloading misses an output layer that is tied to the embedding, since no weight is loaded
        under its name: it would go on with the old product, silently.
        """
        if not importlib.import_module("vllm.platforms").current_platform.is_cpu():
            return
        layers = importlib.import_module("vllm.model_executor.layers.vocab_parallel_embedding")
        for module in self.model_runner.get_model().modules():
            if isinstance(module, layers.ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
