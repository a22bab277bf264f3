"""Ray's own modules: an optional dependency, imported when it is first needed, which type checkers
need not have."""

from __future__ import annotations

import importlib
from typing import Any


def of_ray(module: str = "") -> Any:
    """Ray, or one of its modules: ``of_ray("util.placement_group")``."""
    return importlib.import_module(f"ray.{module}" if module else "ray")
