"""A policy and its teacher through trainers: what the teacher tells, and what is learnt of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from rlinf_async.algorithms.config import LanguageLossConfig
from rlinf_async.algorithms.language.distillation import divergence
from rlinf_async.backends.base import OptimizerConfig
from rlinf_async.backends.fsdp.language.trainer import PolicyTrainer
from rlinf_async.messages.language import TeacherLogProbs, TrainingSample
from rlinf_async.workers.inference import TeacherQuestions, ask_teacher
from tests.backends.fsdp_helpers import in_processes, load_result, save_result
from tests.backends.language.kit import (
    QWEN3,
    VOCABULARY,
    assert_close,
    episodes,
    gradients,
    micro_batches,
    samples,
    trainer_config,
    weights,
)

LARGER = QWEN3 | {"num_hidden_layers": 3, "hidden_size": 48}
WIDER = LARGER | {"vocab_size": VOCABULARY + 9}
"""with tokens that the policy does not have, as a vocabulary that is padded otherwise has"""
NO_CLIPPING = {"optimizer": OptimizerConfig(lr=1e-2, eps=1e-6, max_grad_norm=None)}
REVERSE = LanguageLossConfig(name="distill")
LOSSES = {
    "drawn": (0, REVERSE),
    "top_k": (5, LanguageLossConfig(name="distill", divergence="jsd")),
    "all": ("all", REVERSE),
    "left out": (5, LanguageLossConfig(name="distill", divergence_outside="left_out")),
    "mixed": ("all", LanguageLossConfig(teacher_coefficient=0.3, divergence="forward")),
}


def teacher(model: dict[str, Any] | None = None, **fields: Any) -> PolicyTrainer:
    return PolicyTrainer(trainer_config(model or LARGER, seed=5, **fields), 1, 0)


def taught(batch: list[TrainingSample], top_k: Any, **fields: Any) -> list[TrainingSample]:
    asked = TeacherQuestions(top_k=top_k, vocabulary=VOCABULARY)
    found = ask_teacher(teacher(**fields), batch, asked)
    return [
        msgspec.structs.replace(one, teacher=told) for one, told in zip(batch, found, strict=True)
    ]


def log_probs(trainer: PolicyTrainer, one: TrainingSample) -> Tensor:
    """``[R, V]``, by transformers: each branch alone; 0 of tokens that were given."""
    language: Any = trainer.language
    rows = []
    for prompt, part in one.sequences:
        ids = torch.from_numpy(np.concatenate([prompt, one.response_ids[part]])).long()
        logits = language(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1]
        rows.append(logits / one.temperature)
    logits = torch.cat(rows)
    if one.kept is not None:
        outside = torch.zeros_like(logits, dtype=torch.bool)
        for row, kept in zip(outside, one.kept.sets(), strict=True):
            if len(kept):
                row[:] = True
                row[kept.astype(np.int64)] = False
        logits = logits.masked_fill(outside, -torch.inf)
    return logits.log_softmax(-1)


@pytest.mark.parametrize("top_k", [0, 5, "all", VOCABULARY + 40])
@pytest.mark.parametrize("chunk", [2**20, 1000], ids=["one chunk", "chunks"])
def test_a_teacher_tells_the_log_probs_of_transformers(top_k: Any, chunk: int) -> None:
    by = teacher(logit_chunk_bytes=chunk)
    asked = TeacherQuestions(top_k=top_k, vocabulary=VOCABULARY)
    batch = [*samples(2), *episodes(1)]
    for one, told in zip(batch, ask_teacher(by, batch, asked), strict=True):
        with torch.no_grad():
            every = log_probs(by, one)[torch.from_numpy(one.drawn_mask)]
        ids = torch.from_numpy(one.response_ids[one.drawn_mask]).long()
        expected = every.gather(-1, ids[:, None])[:, 0].numpy()
        np.testing.assert_allclose(told.drawn[one.drawn_mask], expected, atol=1e-5)
        assert not told.drawn[~one.drawn_mask].any()
        count = VOCABULARY if top_k == "all" else min(top_k, VOCABULARY)
        assert told.count == count
        rows = told.likely[one.drawn_mask]
        if top_k == "all":
            np.testing.assert_allclose(rows, every.numpy(), atol=1e-5)
        elif count:
            np.testing.assert_allclose(rows, every.topk(count, -1).values.numpy(), atol=1e-5)
            which = torch.from_numpy(told.token_ids[one.drawn_mask].astype(np.int64))
            np.testing.assert_allclose(rows, every.gather(-1, which).numpy(), atol=1e-5)


@pytest.mark.parametrize("top_k", [VOCABULARY, "all"])
def test_of_tokens_that_the_policy_lacks_a_teacher_tells_nothing(top_k: Any) -> None:
    [one] = taught(samples(1)[:1], top_k, model=WIDER)
    assert one.teacher is not None
    assert one.teacher.count == VOCABULARY
    assert one.teacher.token_ids.max(initial=0) < VOCABULARY
    # What it gives to these is missing: the distribution is not made one over the others.
    assert np.exp(one.teacher.likely).sum(-1).max() < 1.0


def test_an_answer_without_tokens_is_told_nothing_of() -> None:
    [one] = samples(1)[:1]
    empty = msgspec.structs.replace(one, response_ids=one.response_ids[:0])
    asked = TeacherQuestions(top_k=5, vocabulary=VOCABULARY)
    [told] = ask_teacher(teacher(), [empty], asked)
    assert (told.drawn.shape, told.likely.shape, told.token_ids.shape) == ((0,), (0, 5), (0, 5))


def ready(trainer: PolicyTrainer, kind: str, *, whole: bool = True) -> list[TrainingSample]:
    """Samples of the policy's, nearly: proximal log-probs are its own."""
    batch = taught([*samples(3), *episodes(1)] if whole else samples(4), LOSSES[kind][0])
    for one, own in zip(batch, trainer.log_probs(batch), strict=True):
        one.prev_log_prob = own
    return trainer.compute_advantages(batch)


def by_hand(trainer: PolicyTrainer, batch: list[TrainingSample], loss: LanguageLossConfig) -> Any:
    """The gradients of the mean over trained tokens, each sample alone, through transformers."""
    losses = []
    for one in batch:
        if not one.scored:
            continue
        assert one.teacher is not None
        assert one.advantage is not None
        at = torch.from_numpy(one.loss_mask)
        every = log_probs(trainer, one)[at]
        ids = torch.from_numpy(one.response_ids).long()[at]
        own = every.gather(-1, ids[:, None])[:, 0]
        advantage = torch.from_numpy(one.advantage)[at]
        if one.teacher.count:
            likely = torch.from_numpy(one.teacher.likely)[at]
            which = torch.from_numpy(one.teacher.token_ids.astype(np.int64))[at]
            mine = every if not which.numel() else every.gather(-1, which)
            whole = one.teacher.count == VOCABULARY
            found = divergence(mine, likely, loss, whole=whole)
        else:
            drawn = torch.from_numpy(one.teacher.drawn)[at]
            found = (own - own.detach()).exp() * (own.detach() - drawn)
        if loss.teacher_coefficient:
            surrogate = -(own - own.detach()).exp() * advantage
            found = surrogate + loss.teacher_coefficient * found
        losses.append(found)
    total = torch.cat(losses).mean()
    trainer.manager.zero_grad()
    total.backward()  # type: ignore[no-untyped-call]
    return {name: one.grad for name, one in trainer.manager.model.named_parameters()}


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("size", [16, 3])
def test_gradients_are_those_of_each_sample_alone_through_transformers(
    kind: str, size: int
) -> None:
    """However they are cut into micro-batches; with several turns, branches, and what was kept."""
    loss = LOSSES[kind][1]
    trainer = PolicyTrainer(trainer_config(loss=loss, fsdp=NO_CLIPPING), 1, 0)
    batch = ready(trainer, kind)
    expected = {name: one.clone() for name, one in by_hand(trainer, batch, loss).items()}
    trainer.manager.zero_grad()
    found = gradients(trainer, batch, size)
    assert max(float(tensor.abs().max()) for tensor in found.values()) > 1e-3
    assert_close(found, expected, 2e-6)


@pytest.mark.parametrize("kind", ["drawn", "top_k", "all"])
def test_a_policy_comes_near_its_teacher(kind: str) -> None:
    top_k, loss = LOSSES[kind]
    loss = msgspec.structs.replace(loss, proximal="current")
    trainer = PolicyTrainer(trainer_config(loss=loss), 1, 0)
    rows = []
    for _ in range(30):
        batch = trainer.compute_advantages(taught_again(trainer, top_k))
        rows.append(dict(trainer.training_step(micro_batches(batch, 64))))
    assert rows[0]["teacher_kl"] > 0.5
    assert rows[-1]["teacher_kl"] < 0.7 * rows[0]["teacher_kl"]
    if kind != "drawn":
        assert rows[-1]["teacher_divergence"] < 0.7 * rows[0]["teacher_divergence"]
    assert ("teacher_mass" in rows[0]) == (kind == "top_k")


def taught_again(trainer: PolicyTrainer, top_k: Any) -> list[TrainingSample]:
    """Single tokens that the policy draws after random prompts."""
    random = np.random.default_rng(trainer.manager.steps)
    batch = []
    for at, one in enumerate(samples(16)):
        prompt = random.integers(0, VOCABULARY, 3).astype(np.int32)
        bare = msgspec.structs.replace(
            one, prompt_ids=prompt, response_ids=one.response_ids[:1], temperature=1.0, index=at
        )
        with torch.no_grad():
            distribution = log_probs(trainer, bare).exp()[0].double().numpy()
        token = random.choice(VOCABULARY, p=distribution / distribution.sum())
        first = {
            name: None if getattr(one, name) is None else getattr(one, name)[:1]
            for name in ("log_prob", "version", "prev_log_prob", "ref_log_prob", "value")
        }
        batch.append(
            msgspec.structs.replace(
                bare,
                **first,
                response_ids=np.array([token], np.int32),
                loss_mask=np.ones(1, np.bool_),
                scored=True,
                reward=0.0,
            )
        )
    return taught(batch, top_k)


def test_samples_that_were_told_of_otherwise_do_not_go_together() -> None:
    trainer = PolicyTrainer(trainer_config(loss=REVERSE), 1, 0)
    batch = trainer.compute_advantages(samples(1))
    with pytest.raises(ValueError, match=r"sample 0/0 has no log-probs of a teacher"):
        trainer.training_step(micro_batches(batch, 4))
    told = [*taught(batch[:2], 5), *taught(batch[2:], 7)]
    with pytest.raises(ValueError, match=r"log-probs of \[5, 7\] tokens at 4 of 4 samples"):
        trainer.training_step(micro_batches(told, 4))


def test_a_trainer_that_tells_of_drawn_tokens_alone_is_named() -> None:
    class Plain:
        def log_probs(self, batch: list[TrainingSample]) -> Any:
            return [np.zeros(len(one.response_ids), np.float32) for one in batch]

    by: Any = Plain()
    asked = TeacherQuestions(vocabulary=VOCABULARY)
    [told] = ask_teacher(by, samples(1)[:1], asked)
    assert isinstance(told, TeacherLogProbs)
    with pytest.raises(TypeError, match=r"a Plain tells log-probs of the drawn tokens alone"):
        ask_teacher(by, samples(1)[:1], msgspec.structs.replace(asked, top_k=3))


def train(rank: int, world_size: int, folder: Path, kind: str, strategy: str) -> None:
    loss = LOSSES[kind][1]
    config = trainer_config(loss=loss, fsdp={"strategy": strategy})
    trainer = PolicyTrainer(config, world_size, rank)
    mine = [one for one in taught(samples(4), LOSSES[kind][0]) if one.group % world_size == rank]
    batch = trainer.compute_advantages(mine)
    metrics = [dict(trainer.training_step(micro_batches(batch, 4))) for _ in range(2)]
    save_result(folder, rank, {"metrics": metrics, "state": weights(trainer)})


def everything(rank: int, world_size: int, folder: Path) -> None:
    """All that two ranks do here: starting them takes longer than the work."""
    for kind in LOSSES:
        for strategy in ("fsdp2", "fsdp1"):
            train(rank, world_size, folder / f"{kind} {strategy}", kind, strategy)
    save_result(folder, rank, "done")


def test_two_ranks_learn_as_one(tmp_path: Path) -> None:
    for kind in LOSSES:
        for strategy in ("fsdp2", "fsdp1"):
            (tmp_path / f"{kind} {strategy}").mkdir()
    assert in_processes(everything, 2, tmp_path) == ["done", "done"]
    for kind in LOSSES:
        (tmp_path / kind).mkdir()
        train(0, 1, tmp_path / kind, kind, "fsdp2")
        alone = load_result(tmp_path / kind, 0)
        for strategy in ("fsdp2", "fsdp1"):
            found = load_result(tmp_path / f"{kind} {strategy}", 0)
            for step, expected in zip(found["metrics"], alone["metrics"], strict=True):
                for name, number in expected.items():
                    if name != "micro_batches":
                        assert step[name] == pytest.approx(number, rel=1e-4, abs=1e-5), name
            assert_close(found["state"], alone["state"], 1e-5)
