"""Pairs through a trainer: how they are cut changes nothing, and metrics are means over pairs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rlinf_async.algorithms.config import PairLossConfig
from rlinf_async.backends.fsdp.language.trainer import PolicyTrainer
from rlinf_async.messages.language import Example, TrainingSample
from tests.backends.language.kit import (
    VOCABULARY,
    assert_close,
    gradients,
    micro_batches,
    trainer_config,
)

LOSS = PairLossConfig(beta=0.5, label_smoothing=0.1, proximal="current")


def pairs(count: int) -> list[TrainingSample]:
    """Pairs of unequal lengths; of some answers a part is given."""
    random = np.random.default_rng(3)
    found = []
    for group in range(count):
        prompt = random.integers(0, VOCABULARY, int(random.integers(1, 7))).astype(np.int32)
        for index in range(2):
            size = int(random.integers(2, 16))
            learnt = random.random(size) < 0.7
            learnt[0] = True
            ids = random.integers(0, VOCABULARY, size).astype(np.int32)
            reference = random.normal(-4.0, 1.0, size).astype(np.float32)
            found.append(Example(prompt, ids, learnt).sample(group, index, reference))
    return found


@pytest.mark.parametrize("size", [2, 6])
def test_gradients_do_not_depend_on_how_pairs_are_cut(size: int) -> None:
    whole, cut = (PolicyTrainer(trainer_config(loss=LOSS), 1, 0) for _ in range(2))
    batch = pairs(6)
    expected = gradients(whole, batch, len(batch))
    assert max(float(tensor.abs().max()) for tensor in expected.values()) > 1e-3
    assert_close(gradients(cut, batch, size), expected, 1e-6)


def test_a_step_reports_means_over_pairs_as_the_model_of_transformers_has_them() -> None:
    trainer, batch = PolicyTrainer(trainer_config(loss=LOSS), 1, 0), pairs(6)
    rewards = []
    for one in batch:
        ids = torch.from_numpy(np.concatenate([one.prompt_ids, one.response_ids])).long()
        with torch.no_grad():
            logits = trainer.language(input_ids=ids[None]).logits[0]
        at = len(one.prompt_ids) - 1
        every = logits[at:-1].log_softmax(-1).gather(-1, ids[at + 1 :, None])[:, 0]
        assert one.ref_log_prob is not None
        change = (every - torch.from_numpy(one.ref_log_prob))[torch.from_numpy(one.loss_mask)]
        rewards.append(LOSS.beta * change.sum())
    chosen, rejected = torch.stack(rewards[0::2]), torch.stack(rewards[1::2])
    margin = chosen - rejected
    loss = -0.9 * F.logsigmoid(margin) - 0.1 * F.logsigmoid(-margin)

    metrics = trainer.training_step(micro_batches(batch, 4))
    for name, expected in {
        "loss": loss,
        "reward_chosen": chosen,
        "reward_rejected": rejected,
        "reward_margin": margin,
        "reward_accuracy": (margin > 0).float(),
    }.items():
        assert metrics[name] == pytest.approx(float(expected.mean()), abs=1e-5), name


def test_a_pair_that_is_torn_apart_is_refused() -> None:
    trainer = PolicyTrainer(trainer_config(loss=LOSS), 1, 0)
    with pytest.raises(ValueError, match="a micro-batch holds 3 samples"):
        trainer.training_step(micro_batches(pairs(3), 3))
