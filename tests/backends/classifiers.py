"""Tiny reward models: classifiers with one label, and a tokenizer of letters of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789+-=?<>[] \n"
TEMPLATE = "{% for one in messages %}[{{ one.role }}]{{ one.content }}\n{% endfor %}"
_Config: Any = AutoConfig
_Model: Any = AutoModelForSequenceClassification
_Tokenizer: Any = AutoTokenizer
_Fast: Any = PreTrainedTokenizerFast


def save_classifier(
    folder: Path, kind: str = "qwen3", *, template: str = TEMPLATE, **fields: Any
) -> Path:
    """Write a reward model of random weights; further fields are those of its configuration."""
    names = ["<pad>", "<unk>", *LETTERS]
    inner = Tokenizer(WordLevel({one: at for at, one in enumerate(names)}, unk_token="<unk>"))
    cuts: Any = Split(Regex("."), "isolated")
    inner.pre_tokenizer = cuts
    tokenizer = _Fast(tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>")
    tokenizer.chat_template = template or None
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    given = {"num_labels": 1, "pad_token_id": 0, "max_position_embeddings": 256, **fields}
    config = _Config.for_model(kind, vocab_size=len(names), **sizes, **heads, **given)
    torch.manual_seed(0)
    model = _Model.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        model.score.weight.normal_(std=0.2)
    model.save_pretrained(folder)
    return folder


class OneByOne:
    """The same as transformers says it, one conversation after the other."""

    def __init__(self, folder: Path) -> None:
        self._model = _Model.from_pretrained(folder, dtype=torch.float32).eval()
        self._tokenizer = _Tokenizer.from_pretrained(folder)

    def score(self, messages: Sequence[Mapping[str, Any]], answer: str) -> float:
        conversation = [*messages, {"role": "assistant", "content": answer}]
        text = self._tokenizer.apply_chat_template(conversation, tokenize=False)
        asked = self._tokenizer(text, add_special_tokens=False, return_tensors="pt")
        with torch.no_grad():
            logits = self._model(input_ids=asked["input_ids"]).logits
        assert logits.shape == (1, 1)
        return float(logits[0, 0])
