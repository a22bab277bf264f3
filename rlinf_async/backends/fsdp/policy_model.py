"""The model of an embodied trainer: a registered policy, or a Hugging Face folder."""

from __future__ import annotations

import importlib
from pathlib import Path

import torch
from torch import nn

from rlinf_async.backends.fsdp.config import FSDPConfig
from rlinf_async.backends.policies.base import find_policy


def build_policy(config: FSDPConfig) -> nn.Module:
    """Return a new model, on the CPU: the registered policy, or ``pretrained`` where it is set.

    Raises what `load_pretrained` does.
    """
    if config.pretrained is not None:
        return load_pretrained(config.pretrained)
    return find_policy(config.policy.name)(config.policy)


def load_pretrained(folder: str) -> nn.Module:
    """Return the causal language model in ``folder``, float32.

    Raises `ValueError` when the folder holds no model and `ModuleNotFoundError` when the
    ``transformers`` package is missing.
    """
    if not (Path(folder) / "config.json").is_file():
        raise ValueError(
            f"pretrained is {folder!r}: there is no config.json in that folder; give the folder of "
            "a Hugging Face model, or leave it out to use a registered policy"
        )
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"pretrained is {folder!r}, but the package 'transformers' is not installed: "
            "pip install transformers"
        ) from error
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if not isinstance(model, nn.Module):
        raise ValueError(f"transformers made a {type(model).__name__} of {folder!r}, not a module")
    return model
