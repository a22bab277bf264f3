"""A tiny language model built from its configuration, and samples for it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf_async.algorithms.config import LanguageAdvantageConfig, LanguageLossConfig
from rlinf_async.backends.base import OptimizerConfig
from rlinf_async.backends.fsdp.language.config import LanguageFSDPConfig, LanguageTrainerConfig
from rlinf_async.backends.fsdp.language.trainer import PolicyTrainer
from rlinf_async.backends.language import MicroBatch
from rlinf_async.backends.language_training.config import LanguageModelConfig
from rlinf_async.messages.language import (
    Branch,
    Generated,
    Kept,
    Prompt,
    Request,
    Sample,
    Sampling,
    TrainingSample,
    TurnSpan,
)
from rlinf_async.weights.pack import unpack

VOCABULARY = 61

QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,  # logits that differ, as those of a trained model do
}
UNTIED = QWEN3 | {"tie_word_embeddings": False}


def trainer_config(
    model: dict[str, Any] | None = None,
    *,
    loss: LanguageLossConfig | None = None,
    advantage: LanguageAdvantageConfig | None = None,
    checkpointing: bool = False,
    fsdp: dict[str, Any] | None = None,
    **fields: Any,
) -> LanguageTrainerConfig:
    described = LanguageModelConfig(config=model or QWEN3, activation_checkpointing=checkpointing)
    optimizer = OptimizerConfig(lr=1e-2, eps=1e-6, max_grad_norm=0.5)
    sharding: dict[str, Any] = {"optimizer": optimizer} | (fsdp or {})
    return LanguageTrainerConfig(
        fsdp=LanguageFSDPConfig(model=described, **sharding),
        advantage=advantage or LanguageAdvantageConfig(),
        loss=loss or LanguageLossConfig(),
        **fields,
    )


def sample(group: int, index: int, *, scored: bool = True, seed: int = 0) -> TrainingSample:
    """Random tokens of a length of its own; log-probs as of a policy near the uniform one."""
    random = np.random.default_rng([seed, group, index])
    prompt, tokens = int(random.integers(1, 7)), int(random.integers(1, 16))

    def near(center: float) -> Any:
        return (center + 0.5 * random.normal(size=tokens)).astype(np.float32)

    log_prob = near(-math.log(VOCABULARY))
    return TrainingSample(
        group=group,
        index=index,
        prompt_ids=random.integers(0, VOCABULARY, prompt).astype(np.int32),
        response_ids=random.integers(0, VOCABULARY, tokens).astype(np.int32),
        loss_mask=np.full(tokens, scored),
        log_prob=log_prob,
        version=np.zeros(tokens, np.int32),
        temperature=float(random.choice([0.7, 1.0, 1.3])),
        reward=float(random.normal()) if scored else math.nan,
        scored=scored,
        prev_log_prob=log_prob + 0.1 * near(0.0),
        ref_log_prob=log_prob + 0.1 * near(0.0),
        value=near(0.0),
    )


def samples(groups: int = 2, size: int = 4, seed: int = 0) -> list[TrainingSample]:
    """Whole groups; the last sample of every second one was not scored."""
    return [
        sample(group, index, scored=index < size - 1 or group % 2 == 0, seed=seed)
        for group in range(groups)
        for index in range(size)
    ]


def as_sample(one: TrainingSample) -> Sample:
    """The sample of which a trainer gets this one, as a rollout worker sends it."""
    prompt = Prompt(index=0, text="", token_ids=one.prompt_ids, verifier="exact", reference="")
    request = Request(
        group=one.group,
        index=one.index,
        group_size=4,
        iteration=0,
        min_version=0,
        prompt=prompt,
        sampling=Sampling(temperature=one.temperature),
        seed=0,
    )
    generated = Generated(
        token_ids=one.response_ids,
        log_prob=one.log_prob,
        version=one.version,
        finish="stop",
        kept=one.kept,
        drawn=one.drawn,
    )
    return Sample(
        request=request, generated=generated, text="", rollout_rank=0, branches=one.branches
    )


def micro_batches(batch: list[TrainingSample], size: int) -> list[MicroBatch]:
    return [
        MicroBatch(batch[start : start + size], start + size >= len(batch))
        for start in range(0, len(batch), size)
    ]


def weights(trainer: PolicyTrainer) -> dict[str, Tensor]:
    return unpack(trainer.publish())


def gradients(trainer: PolicyTrainer, batch: list[TrainingSample], size: int) -> dict[str, Tensor]:
    """The clipped gradients of one optimizer step at world size 1, by parameter."""
    kept: dict[str, Tensor] = {}
    manager = trainer.manager

    def keep(*_: object) -> None:
        kept.update(
            (name, parameter.grad.clone())
            for name, parameter in manager.model.named_parameters()
            if parameter.grad is not None
        )

    hook = manager.optimizer.register_step_pre_hook(keep)
    trainer.training_step(micro_batches(batch, size))
    hook.remove()
    return kept


def assert_close(left: dict[str, Tensor], right: dict[str, Tensor], tolerance: float) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], atol=tolerance, rtol=0.0, msg=name)


def episode(
    group: int, index: int, *, branches: int = 1, scored: bool = True, seed: int = 0
) -> TrainingSample:
    """Two turns in each branch, the first of which has a reward; tokens between them were given.

    Nothing may read what is NaN: log-probs and values of these. One sample was drawn from a part
    of the vocabulary.
    """
    random = np.random.default_rng([seed, group, index])
    masks: list[bool] = []
    turns: list[TurnSpan] = []
    starts: list[int] = []
    for _ in range(branches):
        starts.append(len(masks))
        first, given, second = random.integers(1, 6, 3).tolist()
        turns.append(TurnSpan(start=len(masks), stop=len(masks) + first, reward=random.normal()))
        masks += [True] * first + [False] * given + [True] * second
        turns.append(TurnSpan(start=len(masks) - second, stop=len(masks)))
    drawn, tokens = np.array(masks), random.integers(0, VOCABULARY, len(masks)).astype(np.int32)

    def near(center: Any, unknown: float = math.nan) -> Any:
        found = center + 0.5 * random.normal(size=len(masks))
        return np.where(drawn, found, unknown).astype(np.float32)

    def prompt() -> Any:
        return random.integers(0, VOCABULARY, random.integers(1, 7)).astype(np.int32)

    kept = None
    if index == 1:
        others = random.choice(VOCABULARY, (len(masks), 30)).tolist()
        sets = [{one, *rest} for one, rest in zip(tokens.tolist(), others, strict=True)]
        kept = Kept.of([[*one] if own else [] for one, own in zip(sets, masks, strict=True)])
    log_prob = near(-math.log(VOCABULARY if kept is None else 30), 0.0)
    return TrainingSample(
        group=group,
        index=index,
        prompt_ids=prompt(),
        response_ids=tokens,
        loss_mask=drawn & scored,
        log_prob=log_prob,
        version=np.where(drawn, 0, -1).astype(np.int32),
        temperature=float(random.choice([0.7, 1.0, 1.3])),
        reward=float(random.normal()) if scored else math.nan,
        scored=scored,
        prev_log_prob=log_prob + 0.2 * near(0.0),
        ref_log_prob=log_prob + 0.2 * near(0.0),
        value=near(0.0),
        kept=kept,
        branches=tuple(Branch(prompt_ids=prompt(), start=start) for start in starts[1:]),
        turns=tuple(turns),
        drawn=drawn,
    )


def episodes(groups: int = 2, size: int = 4, seed: int = 0) -> list[TrainingSample]:
    """Whole groups; the third sample of each has branches, the last one of every second one was
    not scored."""
    return [
        episode(
            group,
            at,
            branches=2 + group % 2 if at == 2 else 1,
            scored=at < size - 1 or group % 2 == 0,
            seed=seed,
        )
        for group in range(groups)
        for at in range(size)
    ]


def whole_gradients(trainer: Any, batch: list[TrainingSample], size: int) -> dict[str, Tensor]:
    """Gradients of one global batch by the names of a checkpoint, whatever library computes them on
    whatever ranks: what rank 0 publishes where they are in the place of the weights."""
    manager, found = trainer.manager, dict[str, Tensor]()
    held = getattr(manager, "held", None)  # of Megatron
    parameters = list(manager.model.parameters()) if held is None else [o.parameter for o in held]

    def publish(units: float) -> float:
        before = [one.detach().clone() for one in parameters]
        with torch.no_grad():
            for one in parameters:
                gradient = one.grad * manager.world_size if held is None else one.main_grad
                one.copy_(gradient / units)
            found.update((name, one.clone()) for name, one in unpack(trainer.publish()).items())
            for one, weights in zip(parameters, before, strict=True):
                one.copy_(weights)
        manager.zero_grad()
        return 0.0

    trainer._optimizer_step = publish
    trainer.training_step(iter(micro_batches(batch, size)))
    return found
