"""Settings of the transformers engine. Imports no torch."""

from __future__ import annotations

from typing import Literal

import msgspec

from rlinf_async.config.counts import MOST_THREADS, check_bounds


class TransformersEngineConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """A model folder, and how it generates."""

    model: str = ""
    """folder with a Hugging Face config and tokenizer, and weights where they are asked for"""
    weights: Literal["update", "folder", "adapter"] = "update"
    """``update``: the first `WeightUpdate` brings them; ``folder``: those there are version 0;
    ``adapter``: those there, under the adapter (LoRA) that each `WeightUpdate` brings"""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """dtype of weights and arithmetic; log-probs are float32"""
    max_concurrent: int = 128
    """sequences decoded together; more wait, by priority"""
    context: int | None = None
    """limit for the tokens of a prompt and its response; the model's own when left out"""
    prefill_tokens: int = 8192
    """tokens of prompts in one forward pass, padding included"""
    threads: int = 1
    """threads of the arithmetic; 0: torch's default"""

    def __post_init__(self) -> None:
        check_bounds(self, "max_concurrent", "prefill_tokens", least=1)
        check_bounds(self, "context", least=2)
        check_bounds(self, "threads", least=0, most=MOST_THREADS)
