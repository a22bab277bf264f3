"""A Qwen3 with random weights and a tokenizer, in a folder. Nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config


def save_model(
    folder: Path, *, hidden: int, layers: int, vocabulary: int = 256, context: int = 512
) -> str:
    """Write the folder; its path."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(4, hidden // 64),
        num_key_value_heads=2,
        head_dim=64 if hidden >= 256 else 32,
        max_position_embeddings=context,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
    )
    factory: Any = AutoModelForCausalLM
    factory.from_config(config, dtype=torch.float32).save_pretrained(folder)
    words = {"<pad>": 0, "<end>": 1} | {f"w{i}": i for i in range(2, vocabulary)}
    tokenizer: Any = PreTrainedTokenizerFast
    tokenizer(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")),
        eos_token="<end>",
        pad_token="<pad>",
    ).save_pretrained(folder)
    return str(folder)
