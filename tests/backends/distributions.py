"""Samples of every sampling setting, and whether a trainer computes the distribution that they were
drawn from."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import nn

from rlinf_async.algorithms.config import LanguageLossConfig
from rlinf_async.backends.base import OptimizerConfig
from rlinf_async.backends.language import MicroBatch
from rlinf_async.backends.language_training.config import LanguageModelConfig
from rlinf_async.episodes.conversation import Conversation, joined
from rlinf_async.messages.language import (
    Branch,
    Generated,
    Request,
    Sample,
    Scored,
    ScoredSample,
    TrainingSample,
)
from rlinf_async.runtime.jobs.language.samples import to_train
from rlinf_async.workers.inference import with_log_probs
from tests.backends.models import VOCABULARY, endless, make_model, qwen3, save_folder
from tests.backends.requests import request

WITHIN: Final = 1e-5
RULES: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 1.7},
    "one token": {"top_k": 1},
    "two": {"top_k": 2},
    "a tie at the border": {"top_k": 5},
    "hot and few": {"top_k": 20, "temperature": 1.7},
    "the whole vocabulary by number": {"top_k": VOCABULARY},
    "more than the vocabulary": {"top_k": 4 * VOCABULARY},
    "number and mass": {"top_k": 40, "top_p": 0.8},
    "cold number and mass": {"top_k": 30, "top_p": 0.9, "temperature": 0.7},
    "mass": {"top_p": 0.5},
    "hot mass": {"top_p": 0.9, "temperature": 1.3},
    "hardly any mass": {"top_p": 1e-6},
    "nearly all mass": {"top_p": 1.0 - 1e-7},
    "twenty": {"top_k": 20},
    "twenty and mass": {"top_k": 20, "top_p": 0.9},
    "likely": {"min_p": 0.1},
    "only the likeliest": {"min_p": 1.0},
    "hot, likely and mass": {"min_p": 0.05, "top_p": 0.9, "temperature": 1.7},
    "likely and few": {"min_p": 0.02, "top_k": 20, "temperature": 1.7},
    "likely, few and mass": {"min_p": 0.02, "top_k": 20, "top_p": 0.9},
    "bias": {"logit_bias": ((5, 4.0), (6, -100.0), (255, 2.5))},
    "cold bias and few": {"logit_bias": ((9, 3.0), (0, 1.0)), "top_k": 20, "temperature": 0.5},
    "bias and mass": {"logit_bias": ((7, 2.0),), "top_k": 30, "top_p": 0.9, "min_p": 0.01},
}
UNBOUNDED: Final = (
    *("mass", "hot mass", "hardly any mass", "nearly all mass"),
    *("likely", "only the likeliest", "hot, likely and mass"),
)
"""those of which vLLM may keep more tokens than it tells"""
FURTHER: Final = [rule for rule, given in RULES.items() if {"min_p", "logit_bias"} & given.keys()]
"""those that not every engine has to honour"""
PROXIMAL: Final = {
    "by the engine": LanguageLossConfig(proximal="behaviour", kl_coefficient=0.05),
    "by the engine or inference": LanguageLossConfig(kl_coefficient=0.05),
    "of the weights that the pass has": LanguageLossConfig(proximal="current"),
    "of the weights that the step began with": LanguageLossConfig(proximal="step"),
    "decoupled": LanguageLossConfig(proximal="step", off_policy="decoupled", off_policy_cap=5.0),
}
"""where the denominator of the ratio comes from"""
BAR: Final = ("twenty", "twenty and mass", "hot mass", "likely", "likely and few", "bias and mass")
"""settings that are combined with each of them"""
TOKENS: Final = 12
LOSS: Final = LanguageLossConfig(kl_coefficient=0.05)

Generate = Callable[[Request], Awaitable[Generated]]


def twin_model() -> nn.Module:
    """A model in which tokens ``2 n`` and ``2 n + 1`` are always equally likely."""
    model: Any = endless(make_model(qwen3(layers=1), 3, sharpness=0.3))
    with torch.no_grad():
        weight = model.get_output_embeddings().weight
        weight[3::2] = weight[2::2]
    twins: nn.Module = model
    return twins


def save_with_defaults(folder: Path, model: nn.Module) -> str:
    """Save the model with settings of generation that nothing may apply on its own."""
    config: Any = model.config
    path = save_folder(folder, config, model)
    settings = {"do_sample": True, "top_k": 3, "top_p": 0.4, "temperature": 0.3}
    penalties = {"repetition_penalty": 1.9, "min_new_tokens": 4, "no_repeat_ngram_size": 2}
    (folder / "generation_config.json").write_text(json.dumps(settings | penalties))
    return path


def asked(rule: str, count: int = 4) -> list[Request]:
    """Requests of one prompt each."""
    return [
        request(at, range(2, 5 + at), group=at, seed=7 + at, max_tokens=TOKENS, **RULES[rule])
        for at in range(count)
    ]


def sample_of(one: Request, made: Generated) -> Sample:
    """What a rollout worker sends on."""
    return Sample(request=one, generated=made, text="", rollout_rank=0)


async def episode_of(generate: Generate, rule: str) -> Sample:
    """An episode of three turns: the third one in a branch, which leaves after the first one."""
    task = request(0, range(2, 7), group=90, max_tokens=TOKENS, **RULES[rule])
    chat = Conversation(task.prompt.token_ids)
    await _turn(generate, chat, rule, 1)
    branch = chat.fork()
    for number, each, given in ((2, chat, [9, 8, 7]), (3, branch, [7])):
        each.give(np.array(given, np.int32))
        await _turn(generate, each, rule, number)
    parts = [chat.response(), branch.response()]
    return Sample(
        request=task,
        generated=joined(parts),
        text="",
        rollout_rank=0,
        branches=(Branch(prompt_ids=branch.prompt, start=len(parts[0].token_ids)),),
    )


async def _turn(generate: Generate, chat: Conversation, rule: str, number: int) -> None:
    tokens = chat.tokens.tolist()
    one = request(number, tokens, group=90, turn=number, max_tokens=5, **RULES[rule])
    chat.answer(await generate(one))


def trained_on(samples: Sequence[Sample], advantage: float | None = None) -> list[TrainingSample]:
    """What an actor gets; with an advantage of every token."""
    scored = [ScoredSample(sample=one, outcome=Scored(reward=1.0)) for one in samples]
    found = [made for one in scored for made in to_train([one]).samples]
    for one in found if advantage is not None else ():
        one.advantage = np.full(len(one.response_ids), advantage, np.float32)
    return found


def fields_of(path: str) -> dict[str, Any]:
    """The model and the optimizer of a trainer."""
    return {
        "model": LanguageModelConfig(path=path),
        "optimizer": OptimizerConfig(lr=1e-9, eps=1e-8, max_grad_norm=None),
    }


def by_hand(model: nn.Module, one: TrainingSample) -> tuple[Any, Any]:
    """Log-probs and entropies ``[R]`` over what was kept, in double; 0 of what was given."""
    rows = []
    for prompt, part in one.sequences:
        ids = torch.from_numpy(np.concatenate([prompt, one.response_ids[part]])).long()
        with torch.no_grad():
            rows.append(model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].double())
    logits = torch.cat(rows)
    for token, bias in one.logit_bias:
        logits[:, token] += bias
    logits = logits / one.temperature
    found = []
    whole: list[list[int]] = [[]] * len(one.response_ids)
    sets = whole if one.kept is None else [each.tolist() for each in one.kept.sets()]
    drawn = one.drawn_mask
    for at, (row, token, kept) in enumerate(
        zip(logits, one.response_ids.tolist(), sets, strict=True)
    ):
        if not drawn[at]:
            found.append((0.0, 0.0))
            continue
        allowed = kept or list(range(len(row)))
        log_p = row[allowed].log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum()
        found.append((float(log_p[allowed.index(token)]), float(entropy)))
    log_probs, entropies = zip(*found, strict=True)
    return np.array(log_probs), np.array(entropies)


def check_kept(rule: str, made: Generated) -> None:
    """The sets are those of the setting: sorted, without repetition, with what was drawn."""
    sampling = asked(rule, 1)[0].sampling
    assert (made.kept is None) == (not sampling.truncates)
    if made.kept is None:
        return
    assert made.kept.counts.dtype.itemsize <= 2
    assert made.kept.token_ids.dtype == np.uint8  # of a vocabulary of 256
    every = zip(made.token_ids.tolist(), made.kept.sets(), made.drawn_mask, strict=True)
    for token, kept, drawn in every:
        if not drawn:
            assert not len(kept)
            continue
        assert np.all(np.diff(kept.astype(int)) > 0)
        assert not len(kept) or token in kept
        if sampling.top_k >= VOCABULARY and sampling.top_p == 1.0:
            assert not len(kept)  # nothing was left out: nothing is said
        elif rule == "hardly any mass":
            assert 1 <= len(kept) <= 2  # vLLM keeps both of a pair
        elif sampling.top_k:
            assert 1 <= len(kept) <= sampling.top_k + 1


def computed(trainer: Any, samples: Sequence[Sample]) -> dict[str, Any]:
    """What a trainer, on every rank of one model, computes of samples: twice a step of an iteration
    whose rate is too small to change anything, with advantages of 1 and of -1."""
    reads = trainer.data_rank.is_io
    answered = with_log_probs(trainer, list(samples) if reads else [], reference=True)
    bare = trainer.log_probs(trained_on(samples) if reads else [])
    steps = []
    for advantage in (1.0, -1.0):
        batch = trained_on(answered, advantage)
        last = len(batch) - 1
        parts = [MicroBatch([one], at == last, len(batch)) for at, one in enumerate(batch)]
        steps.append(dict(trainer.training_step(parts if reads else ())))
        trainer._stepped = False  # the rate is 1e-9
    return {
        "log_prob": [one.tolist() for one in bare],
        "prev": [one.prev_log_prob.tolist() for one in answered if one.prev_log_prob is not None],
        "ref": [one.ref_log_prob.tolist() for one in answered if one.ref_log_prob is not None],
        "steps": steps,
    }


def check_computed(model: nn.Module, samples: Sequence[Sample], found: dict[str, Any]) -> None:
    """The trainer's numbers are those of the distribution that was sampled, on policy."""
    batch = trained_on(samples)
    expected = [by_hand(model, one) for one in batch]
    for at, one in enumerate(batch):
        for name in ("log_prob", "prev", "ref"):
            for right in (expected[at][0], one.log_prob):
                np.testing.assert_allclose(found[name][at], right, atol=WITHIN, rtol=1e-6)
    tokens = sum(int(one.loss_mask.sum()) for one in batch)
    entropy = np.concatenate([one[1] for one in expected]).sum() / tokens
    for step in found["steps"]:
        assert step["ratio"] == _near(1.0)
        assert step["clip_fraction"] == 0.0
        assert step["approx_kl"] == _near(0.0)
        assert step["ref_kl"] == _near(0.0)
        assert step["engine_actor_difference"] == _near(0.0)
        assert step["engine_actor_tokens"] == tokens
        assert step["entropy"] == _near(entropy)
    alone = all(
        one.kept is not None and (one.kept.counts[one.drawn_mask] == 1).all() for one in batch
    )
    up, down = (step["policy_loss"] for step in found["steps"])
    assert (up, down) == (_near(-1.0), _near(1.0))
    norms = [step["grad_norm"] for step in found["steps"]]
    if alone:  # what could not have been another token teaches nothing
        assert norms == [0.0, 0.0]
        assert all(number == 0.0 for one in found["log_prob"] for number in one)
    else:
        assert norms[0] > 1e-3
        assert norms[1] == pytest.approx(norms[0], rel=1e-3)


def check_each_token_is_trained(trainer: Any, samples: Sequence[Sample]) -> None:
    """On policy each ratio is 1, wherever its denominator comes from, and tokens of a negative
    advantage have the gradient that those of a positive one have, turned round: none is left out.
    """
    loss = trainer.config.loss
    answered = with_log_probs(trainer, list(samples), reference=loss.kl_coefficient > 0)
    for one in answered if loss.proximal == "behaviour" else ():
        one.prev_log_prob = None
    steps = []
    for advantage in (1.0, -1.0):
        steps.append(trainer.training_step([MicroBatch(trained_on(answered, advantage), True)]))
        trainer._stepped = False  # the rate is 1e-9
    for step, loss_of in zip(steps, (-1.0, 1.0), strict=True):
        assert step["ratio"] == _near(1.0)
        assert step["clip_fraction"] == 0.0
        assert step["approx_kl"] == _near(0.0)
        assert step["policy_loss"] == _near(loss_of)
    up, down = (step["grad_norm"] for step in steps)
    assert up > 1e-3
    assert down == pytest.approx(up, rel=1e-3)


def _near(number: float) -> Any:
    return pytest.approx(number, abs=WITHIN)
