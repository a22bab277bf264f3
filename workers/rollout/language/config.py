"""How a language rollout worker serves."""

from __future__ import annotations

import msgspec


class LanguageRolloutConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One language rollout worker, whatever its engine."""

    max_concurrent: int | None = None
    """requests that it holds at a time; as many as the engine works on and a sixteenth more when
    left out"""
    engine_restarts: int = 3
    """how often an engine that died is built again, in this worker's life"""
    seed: int = 0
    """of what a request's own seed does not reach; every rank gets its own from it"""

    def __post_init__(self) -> None:
        if self.max_concurrent is not None and self.max_concurrent < 1:
            raise ValueError(
                f"max_concurrent is {self.max_concurrent}; it must be at least 1, or left out"
            )
        for name in ("engine_restarts", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0")
