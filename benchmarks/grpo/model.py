"""The model that all sides start from: built, taught the task half way, and kept.

    python model.py full|small

Made at its first use by whichever side comes first, in ``.cache`` beside this file; another size or
other settings make another. Needs torch and transformers, nothing else.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.grpo import task

CACHE = Path(__file__).parent / ".cache"
PAD, END, UNKNOWN = "<pad>", "<end>", "<unk>"
LETTERS = "0123456789=abcdefghijklmnopqrstuvwxyz"
IGNORED = -100
BATCH = 24
LR = 1e-3
SEED = 0


def model_folder(size: task.Size) -> Path:
    """The folder, made if it is not there."""
    recipe = repr((size._replace(prompts=0, steps=0), BATCH, LR, task.SIGMA, LETTERS))
    folder = CACHE / hashlib.sha256(recipe.encode()).hexdigest()[:8]
    CACHE.mkdir(exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two sides at once make it once
        if not folder.exists():
            unfinished = folder.with_suffix(".new")
            shutil.rmtree(unfinished, ignore_errors=True)
            _make(size, unfinished)
            unfinished.rename(folder)
    return folder


def _make(size: task.Size, folder: Path) -> None:
    torch.manual_seed(SEED)
    torch.set_num_threads(1)  # more round otherwise, and make another model
    tokenizer = _tokenizer()
    model = _model(size, tokenizer)
    rates: Any = torch.optim.lr_scheduler.OneCycleLR
    optimizer = torch.optim.AdamW(model.parameters(), LR, weight_decay=0.0)
    rate = rates(optimizer, LR, total_steps=size.warm_steps, pct_start=0.1)
    asked = task.numbers(size.warm_steps * BATCH, seed=-1)
    for step in range(size.warm_steps):
        row = asked[step * BATCH : (step + 1) * BATCH]
        ids, positions, targets = _row(row, tokenizer)
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
        loss = cross_entropy(logits, targets, ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _row(asked: list[int], tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prompts with right responses in one row, their positions, and what each token predicts.

    Positions begin at 0 in every sample: transformers lets none look at another by that.
    """
    ids: list[int] = []
    positions: list[int] = []
    targets: list[int] = []
    for one in asked:
        before: list[int] = tokenizer(task.prompt(one))["input_ids"]
        after = [*tokenizer(task.right(one))["input_ids"], tokenizer.eos_token_id]
        ids += [*before, *after[:-1]]
        positions += range(len(before) + len(after) - 1)
        targets += [*[IGNORED] * (len(before) - 1), *after]
    return torch.tensor([ids]), torch.tensor([positions]), torch.tensor(targets)


def _model(size: task.Size, tokenizer: Any) -> Any:
    factory: Any = AutoModelForCausalLM
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=max(1, size.hidden // 64),
        num_key_value_heads=max(1, size.hidden // 128),
        head_dim=64,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
    )
    return factory.from_config(config, dtype=torch.float32)


def _tokenizer() -> Any:
    """One token for each letter."""
    words = {word: at for at, word in enumerate((PAD, END, UNKNOWN, *LETTERS))}
    made = Tokenizer(models.WordLevel(words, unk_token=UNKNOWN))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens([PAD, END, UNKNOWN])
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=made, pad_token=PAD, eos_token=END, unk_token=UNKNOWN)


if __name__ == "__main__":
    print(model_folder(task.SIZES[sys.argv[1]]))
