"""Running engines that several tests share: a start takes seconds.

The engine lives on an event loop in a thread of its own; tests hand it coroutines.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import torch
import uvloop
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rlinf_async.backends.checkpoint.exporting import Export
from rlinf_async.backends.vllm.config import VllmEngineConfig
from rlinf_async.backends.vllm.engine import VllmEngine
from tests.backends.checkpoint.kit import model_folder, own_log_probs, trained

R = TypeVar("R")

PATIENCE = 300.0
"""seconds that anything may take on a busy machine"""

CONTEXT = 4096
FOR_EVER = CONTEXT - 96
"""tokens that the engine makes in far more time than a test stands still; not to be waited for"""

SMALL: dict[str, Any] = {
    "kv_cache_bytes": 64 * 1024 * 1024,
    "max_concurrent": 64,
    "extra": {"block_size": 32},  # on a CPU 128, so that no prompt of a test would be cached
}


class Exported(NamedTuple):
    """A checkpoint as Hugging Face has it, in several files, and what the trainer computes."""

    folder: Path
    log_probs: Tensor
    """of `RESPONSE` after `PROMPT`"""

    def model(self) -> nn.Module:
        """The model, as transformers loads it."""
        auto: Any = AutoModelForCausalLM
        loaded: nn.Module = auto.from_pretrained(self.folder, dtype=torch.float32)
        return loaded.eval()


def export(folder: Path, **fields: Any) -> Exported:
    """Train a small model, and export its checkpoint."""
    trainer = trained(model_folder(folder / "model", **fields), folder / "checkpoint")
    Export(folder / "checkpoint", shard_bytes=300_000).run(folder / "out")
    return Exported(folder / "out", own_log_probs(trainer))


class Served:
    """An engine that runs until the block ends."""

    def __init__(self, config: VllmEngineConfig) -> None:
        self._config = config

    def __enter__(self) -> Self:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        self.engine = VllmEngine(self._config)
        try:
            self.run(self.engine.start())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self.engine.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, call: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine on the engine's loop, and wait for its result."""
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(PATIENCE)


def shared_memory() -> list[str]:
    """The weights that this process has in shared memory now."""
    links = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # another thread has closed it since
            links.append(os.readlink(path))
    return [link for link in links if "rlinf_async weights" in link]


def wait_for_shared_memory() -> None:
    """Wait until an update has begun to travel."""
    give_up = time.monotonic() + PATIENCE
    while not shared_memory():
        assert time.monotonic() < give_up, "no update began to travel"
        time.sleep(0.001)
