"""Tiny language models in folders, as Hugging Face saves them. Nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.weights.pack import pack

VOCABULARY = 256
END = 1

_Auto: Any = AutoModelForCausalLM
QWEN3 = Qwen3ForCausalLM
"""imported here, since it takes long and tests may not hold up their loop"""


def qwen3(*, tied: bool = True, hidden: int = 64, layers: int = 2, **fields: Any) -> Qwen3Config:
    """A Qwen3 of some 0.2 million parameters, with grouped queries."""
    given: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "eos_token_id": END,
        "pad_token_id": 0,
        "architectures": ["Qwen3ForCausalLM"],
    }
    return Qwen3Config(**given | fields, tie_word_embeddings=tied)


def make_model(config: Any, seed: int = 0, *, sharpness: float = 0.4) -> nn.Module:
    """A float32 model with random weights, large enough that its distributions have peaks."""
    torch.manual_seed(seed)
    model: nn.Module = _Auto.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, sharpness)
    return model.eval().requires_grad_(False)


def endless(model: nn.Module) -> nn.Module:
    """The same model, which hardly ever ends a response: no token speaks for the end."""
    output: Any = model
    with torch.no_grad():
        output.get_output_embeddings().weight[END] = 0.0
    return model


def save_tokenizer(folder: Path) -> None:
    """One token ``wN`` for each number."""
    words = {"<pad>": 0, "<end>": END} | {f"w{i}": i for i in range(2, VOCABULARY)}
    inner = Tokenizer(WordLevel(words, unk_token="<pad>"))
    cuts: Any = WhitespaceSplit()
    inner.pre_tokenizer = cuts
    kind: Any = PreTrainedTokenizerFast
    tokenizer = kind(tokenizer_object=inner, eos_token="<end>", pad_token="<pad>")
    tokenizer.save_pretrained(folder)


def save_folder(folder: Path, config: Any, model: nn.Module | None = None) -> str:
    """Write a folder with configuration and tokenizer, and the model's weights if it is given."""
    config.save_pretrained(folder)
    save_tokenizer(folder)
    if model is not None:
        saved: Any = model
        saved.save_pretrained(folder)
    return str(folder)


def publish(model: nn.Module, version: int) -> WeightUpdate:
    """The model's weights, tied ones once."""
    found: dict[int, str] = {}
    state = model.state_dict()
    for name, tensor in state.items():
        found.setdefault(tensor.data_ptr(), name)
    return pack({name: state[name] for name in found.values()}, version, bucket_bytes=100_000)


@torch.no_grad()
def log_probs(
    model: nn.Module, prompt: Any, response: Any, *, temperature: float = 1.0
) -> torch.Tensor:
    """``[R]``, by one plain forward pass of the library."""
    ids = torch.tensor([[*map(int, prompt), *map(int, response)]])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    picked: torch.Tensor = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])
    return picked.squeeze(1)
