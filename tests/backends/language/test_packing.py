"""Packed samples give the numbers of the samples one by one, whatever the architecture."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from rlinf_async.backends.fsdp.language.trainer import PolicyTrainer
from rlinf_async.backends.language_training.model import packed_attention
from rlinf_async.backends.language_training.objective import by_tokens, pack_samples
from rlinf_async.messages.language import TrainingSample
from tests.backends.language.kit import (
    QWEN3,
    UNTIED,
    VOCABULARY,
    sample,
    samples,
    trainer_config,
    weights,
)

COMMON = {name: value for name, value in QWEN3.items() if name not in ("model_type", "head_dim")}
ARCHITECTURES = {
    "qwen3": QWEN3,
    "qwen3, untied": UNTIED,
    "qwen2": COMMON | {"model_type": "qwen2"},
    "llama": COMMON | {"model_type": "llama", "tie_word_embeddings": False},
    "mistral, sliding window": COMMON | {"model_type": "mistral", "sliding_window": 4},
    "gemma2, soft caps": COMMON
    | {"model_type": "gemma2", "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8},
    "gemma3": COMMON
    | {"model_type": "gemma3_text", "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8},
    "granite, scaled logits": COMMON | {"model_type": "granite", "logits_scaling": 3.0},
    "gpt2, dropout and a table of positions": {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "vocab_size": VOCABULARY,
    },
}


def by_transformers(trainer: PolicyTrainer, one: TrainingSample) -> Any:
    """Log-probs of the response in a forward pass of its own, by an untouched model."""
    live: Any = trainer.language
    automatic: Any = transformers.AutoModelForCausalLM
    config = type(live.config).from_dict(live.config.to_dict())
    model = automatic.from_config(config, attn_implementation="eager")
    model.load_state_dict(weights(trainer), strict=False)
    model.tie_weights()
    ids = torch.from_numpy(np.concatenate([one.prompt_ids, one.response_ids])).long()
    with torch.no_grad():
        logits = model.eval()(input_ids=ids[None]).logits[0] / one.temperature
    start = len(one.prompt_ids)
    rows = logits[start - 1 : -1].log_softmax(-1)
    return rows.gather(-1, ids[start:, None])[:, 0].numpy()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_log_probs_are_those_of_transformers_one_by_one(name: str) -> None:
    trainer = PolicyTrainer(trainer_config(ARCHITECTURES[name]), 1, 0)
    batch = samples()
    for one, found in zip(batch, trainer.log_probs(batch), strict=True):
        np.testing.assert_allclose(found, by_transformers(trainer, one), rtol=1e-6, atol=1e-6)


def test_a_sample_alone_has_the_log_probs_it_has_among_others() -> None:
    trainer = PolicyTrainer(trainer_config(), 1, 0)
    batch = samples(3)
    together = trainer.log_probs(batch)
    for one, found in zip(batch, together, strict=True):
        np.testing.assert_allclose(trainer.log_probs([one])[0], found, atol=1e-6)


def test_few_tokens_at_a_time_give_the_same_log_probs_in_the_order_they_were_given() -> None:
    batch = samples(3)
    large, small = (
        PolicyTrainer(trainer_config(max_tokens_per_forward=limit), 1, 0) for limit in (10_000, 20)
    )
    for found, expected in zip(small.log_probs(batch), large.log_probs(batch), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_row_says_where_each_response_token_is_predicted() -> None:
    first, second = sample(0, 0), sample(0, 1)
    masks = [first.drawn_mask, np.zeros(len(second.response_ids), np.bool_)]
    masks[1][-1] = True
    packed = pack_samples([first, second], masks, torch.device("cpu"))
    tokens = [len(one.prompt_ids) + len(one.response_ids) - 1 for one in (first, second)]
    assert packed.lengths == tokens
    assert packed.position_ids[0].tolist() == [*range(tokens[0]), *range(tokens[1])]
    responses = range(len(first.prompt_ids) - 1, tokens[0])
    assert packed.rows.tolist() == [*responses, sum(tokens) - 1]
    assert packed.targets.tolist() == [*first.response_ids, second.response_ids[-1]]


def test_an_empty_response_has_no_log_probs_and_harms_no_other() -> None:
    trainer = PolicyTrainer(trainer_config(), 1, 0)
    empty, other = sample(0, 0), sample(0, 1)
    for field in ("response_ids", "loss_mask", "log_prob", "version"):
        setattr(empty, field, getattr(empty, field)[:0])
    nothing, found = trainer.log_probs([empty, other])
    assert len(nothing) == 0
    np.testing.assert_allclose(found, trainer.log_probs([other])[0], atol=1e-6)


def test_a_prompt_without_tokens_is_named() -> None:
    one = sample(4, 2)
    one.prompt_ids = one.prompt_ids[:0]
    with pytest.raises(ValueError, match=r"sample 4/2 has a prompt without tokens"):
        PolicyTrainer(trainer_config(), 1, 0).log_probs([one])


def test_parts_keep_to_the_limit_and_hold_every_sample_once() -> None:
    lengths = np.random.default_rng(0).integers(1, 90, 60).tolist()
    parts = by_tokens(lengths, 100)
    assert sorted(at for part in parts for at in part) == list(range(60))
    assert all(sum(lengths[at] for at in part) <= 100 for part in parts)
    assert len(parts) <= 11 / 9 * -(-sum(lengths) // 100) + 1
    assert by_tokens([500, 1], 100) == [[0], [1]]  # too long: a part of its own
    assert by_tokens([], 100) == []


def test_attention_refuses_what_it_would_leave_out() -> None:
    heads = torch.zeros(1, 2, 3, 4)
    with pytest.raises(NotImplementedError, match="'softcap'"):
        packed_attention(torch.nn.Identity(), heads, heads, heads, None, softcap=5.0)
