"""The configuration of a language rollout worker."""

from __future__ import annotations

import msgspec


class LanguageRolloutConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One language rollout worker, whatever its engine."""

    max_concurrent: int | None = None
    """number of requests held at a time; when left out, as many as the engine generates for at a
    time, and a sixteenth more"""
    engine_restarts: int = 3
    """number of times that an engine that died is built again, in this worker's life"""
    seed: int = 0
    """seed of everything that a request's own seed does not cover; every rank derives its own"""

    def __post_init__(self) -> None:
        if self.max_concurrent is not None and self.max_concurrent < 1:
            raise ValueError(
                f"max_concurrent is {self.max_concurrent}; it must be at least 1, or left out"
            )
        for name in ("engine_restarts", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0")
