"""Memory of a device that is given back while a rank sleeps: by torch_memory_saver where there are
a GPU and that package, else by moving tensors to the CPU."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any, Final

PRELOADED: Final = "torch_memory_saver_hook_mode_preload.abi3.so"
ENABLED: Final = "TMS_INIT_ENABLE"


def saver_environment() -> dict[str, str]:
    """Return the environment of a process whose device memory the saver is to hold; empty where
    the package is not installed. Its library has to be loaded before torch."""
    found = importlib.util.find_spec("torch_memory_saver")
    if found is None or found.origin is None:
        return {}
    library = Path(found.origin).parents[1] / PRELOADED
    if not library.is_file():
        return {}
    return {"LD_PRELOAD": str(library), ENABLED: "1", f"{ENABLED}_CPU_BACKUP": "1"}


def saver() -> Any | None:
    """Return the saver of this process, None where it was started without one."""
    if os.environ.get(ENABLED) != "1":
        return None
    found: Any = importlib.import_module("torch_memory_saver").torch_memory_saver
    return found


def clear() -> None:
    """Collect garbage, and give what torch keeps back to the device."""
    import gc

    import torch

    gc.collect()
    torch.cuda.empty_cache()  # nothing happens without CUDA
