"""Ray's own modules: an optional dependency, imported when it is first needed, which type checkers
need not have."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any


def of_ray(module: str = "") -> Any:
    """Ray, or one of its modules: ``of_ray("util.placement_group")``."""
    return importlib.import_module(f"ray.{module}" if module else "ray")


def is_installed() -> bool:
    """Whether Ray can be imported, most likely; it is not."""
    return importlib.util.find_spec("ray") is not None


def not_installed(error: ImportError | None = None) -> str:
    """What to say where it cannot be."""
    why = "" if error is None else f" ({error})"
    return (
        f"Ray is not installed{why}: pip install 'rlinf_async[ray]', or use Cluster.process() "
        '(in a job: cluster.backend = "process")'
    )
