"""megatron-core, imported when it is first needed, and what lets it run on hosts without CUDA.

megatron-core is written for CUDA, and asks torch for it by name. The shims are installed once, in
processes that train with Megatron and only where there is no CUDA. Nothing else knows of them:

1. the current CUDA device is the CPU;
2. the random state of CUDA is that of the CPU;
3. tensors that are made on, or moved to, ``"cuda"`` are made on the CPU;
4. `Tensor.type` gives the names of CUDA's types, with which the optimizers compare.
"""

from __future__ import annotations

import functools
import importlib
import re
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

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


SUPPORTED: Final = (0, 16)
"""major and minor version; the shims and the weights' names are checked against these"""


class MegatronUnavailable(ImportError):
    """megatron-core is not installed, or in another version."""


def of_megatron(module: str = "") -> Any:
    """Return ``megatron.core``, or one of its modules: ``of_megatron("optimizer")``.

    Raises:
        MegatronUnavailable: it is not installed, or in another version.
    """
    core = _core()
    if not module:
        return core
    return importlib.import_module(f"megatron.core.{module}")


def check_installed() -> None:
    """Raise `MegatronUnavailable` unless a supported version is installed. Nothing is imported."""
    try:
        found = version("megatron-core")
    except PackageNotFoundError as error:
        raise MegatronUnavailable(
            "the backend 'megatron' needs megatron-core: pip install 'rlinf-async[megatron]'"
        ) from error
    _check_version(found)


def _check_version(found: str) -> None:
    numbers = re.match(r"(\d+)\.(\d+)(?!\d)", found)
    if numbers is None or (int(numbers[1]), int(numbers[2])) != SUPPORTED:
        raise MegatronUnavailable(
            f"megatron-core is installed in version {found}; this backend is made for "
            f"{SUPPORTED[0]}.{SUPPORTED[1]}: pip install 'rlinf-async[megatron]'"
        )


@functools.lru_cache(maxsize=1)
def _core() -> Any:
    install_cpu_shims()
    # It warns of optional parts that are missing and of defaults of its own that it deprecates, and
    # it calls what newer versions of torch deprecate.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
    try:
        core = importlib.import_module("megatron.core")
        random = importlib.import_module("megatron.core.tensor_parallel.random")
    except ImportError as error:
        raise MegatronUnavailable(
            f"the backend 'megatron' needs megatron-core ({error}): pip install "
            "'rlinf-async[megatron]'"
        ) from error
    shim_random_states(random)
    _check_version(str(core.__version__))
    return core
