"""Tiny checkpoints of architectures that users bring, as Hugging Face saves them."""

from __future__ import annotations

import pathlib
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlinf_async.data.prompts import arithmetic_tokenizer, save_arithmetic_tokenizer

_Config: Any = AutoConfig
_Model: Any = AutoModelForCausalLM

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}


def save_checkpoint(folder: pathlib.Path, model_type: str, **fields: Any) -> pathlib.Path:
    """A checkpoint of random weights with the arithmetic tokenizer."""
    tokenizer = arithmetic_tokenizer()
    if model_type != "qwen2":  # which always has heads of hidden_size / num_attention_heads
        fields["head_dim"] = 32
    config = _Config.for_model(
        model_type,
        **{"vocab_size": len(tokenizer)} | SIZES | fields,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    torch.manual_seed(0)
    model = _Model.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    save_arithmetic_tokenizer(folder)
    return folder


def load_checkpoint(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    """The weights, as transformers itself loads them."""
    model = _Model.from_pretrained(str(folder), local_files_only=True, dtype=torch.float32)
    state: dict[str, torch.Tensor] = model.state_dict()
    return state
