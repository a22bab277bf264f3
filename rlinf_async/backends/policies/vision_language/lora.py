"""Low-rank adapters in a vision-language model, by peft. Its own weights are frozen."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from rlinf_async.backends.policies.vision_language.config import LoraConfig


def add_adapters(model: nn.Module, config: LoraConfig) -> None:
    """Give every linear layer of the language model an adapter, in place.

    Raises `ModuleNotFoundError` where peft is not installed.
    """
    peft: Any = importlib.import_module("peft")
    model.requires_grad_(False)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=r".*text_model.*\.(q|k|v|o|gate|up|down)_proj",
    )
    peft.inject_adapter_in_model(settings, model)
