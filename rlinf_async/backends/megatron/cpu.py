"""megatron-core on the CPU: it is written for CUDA, and asks torch for it by name.

Installed once, in processes that train with Megatron and only where there is no CUDA. Nothing else
knows of these shims:

1. the current CUDA device is the CPU;
2. the random state of CUDA is that of the CPU;
3. tensors that are made on, or moved to, ``"cuda"`` are made on the CPU;
4. `Tensor.type` gives the names of CUDA's types, with which the optimizers compare.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _device as device_contexts

_CPU = torch.device("cpu")
_FACTORIES = ("arange", "empty", "full", "ones", "rand", "randn", "tensor", "zeros")


@functools.lru_cache(maxsize=1)
def install_cpu_shims() -> None:
    """Install the shims, unless there is CUDA. Idempotent."""
    if torch.cuda.is_available():
        return
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    cuda.synchronize = lambda device=None: None
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device="cuda": torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = _set_rng_state
    # ``with torch.device(...)`` knows the factories by identity, from its first use on: by now.
    device_contexts._device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensor: Any = Tensor
    tensor.cuda = lambda self, *_, **__: self
    tensor.type = _cuda_type(Tensor.type)


def shim_random_states(random: Any) -> None:
    """Give Megatron's module of random states those of the CPU, unless there is CUDA."""
    if not torch.cuda.is_available():
        random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
        random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _set_rng_state(state: Tensor, device: object = "cuda") -> None:
    torch.set_rng_state(state)


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(factory)
    def made(*args: Any, **options: Any) -> Tensor:
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = _CPU
        return factory(*args, **options)

    return made


def _cuda_type(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def type_of(self: Tensor, dtype: Any = None, *args: Any, **options: Any) -> Any:
        if dtype is not None:
            return original(self, dtype, *args, **options)
        name: str = original(self)
        return name.replace("torch.", "torch.cuda.", 1) if name.count(".") == 1 else name

    return type_of
