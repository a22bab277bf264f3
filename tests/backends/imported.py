"""What most ranks import sooner or later, for the process from which they are forked.

The collector leaves it out, there and in the ranks: it would write to memory that they share.
"""

from __future__ import annotations

import gc
import importlib
from contextlib import suppress

IMPORTED = (
    "megatron.core",  # left out where it is not installed
    "torch._dynamo",
    "torch.distributed.fsdp",
    "transformers.models.qwen3.modeling_qwen3",
    "tests.backends.checkpoint.kit",
    "tests.backends.fsdp_helpers",
    "tests.backends.rescale.kit",
)

gc.disable()
for name in IMPORTED:
    with suppress(ImportError):
        importlib.import_module(name)
gc.enable()
gc.collect()
gc.freeze()
