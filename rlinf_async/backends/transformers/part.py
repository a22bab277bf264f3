"""The transformers engine as an engine of a run. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from rlinf_async.backends.parts import LANGUAGE_IMPORTS, EnginePart
from rlinf_async.backends.transformers.config import TransformersEngineConfig


class Transformers(EnginePart):
    """The trainer's own arithmetic, on one device."""

    Config = TransformersEngineConfig
    library = "transformers"
    extra = "llm"
    factory = "rlinf_async.backends.transformers.engine:TransformersEngine"
    slow_imports = (*LANGUAGE_IMPORTS, "rlinf_async.backends.transformers.engine")
    honours = frozenset({"min_p", "logit_bias", "repetition_penalty", "grammar", "routing_replay"})
    one_device = True
    exact = True
    sees_images = True

    def with_adapter(self, settings: TransformersEngineConfig, rank: int) -> Any:
        """Return the settings with the weights of the folder under an adapter."""
        return msgspec.structs.replace(settings, weights="adapter")

    def inspect(self, settings: TransformersEngineConfig, folder: Path, device: str) -> None:
        """Refuse a context that is longer than the model's own."""
        from rlinf_async.backends.transformers.folder import open_folder

        open_folder(settings.model or str(folder), context=settings.context)
