"""megatron-core's own modules: an optional dependency, imported when it is first needed, which type
checkers need not have."""

from __future__ import annotations

import functools
import importlib
import re
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from rlinf_async.backends.megatron.cpu import install_cpu_shims, shim_random_states

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
