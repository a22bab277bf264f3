"""``proximal = "step"``: the decoupled loss with several mini-batches, against plain torch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

import rlinf_async as ra
from rlinf_async.algorithms.config import LanguageLossConfig
from rlinf_async.backends.fsdp.language.trainer import PolicyTrainer
from rlinf_async.messages.language import SampleGroup, TrainingSample
from rlinf_async.weights.pack import unpack
from rlinf_async.workers.actor import FSDPActor
from tests.backends.language.kit import trainer_config
from tests.workers.actor.language.kit import BATCHES, OPTIMIZER, Channels, groups

CAP = 1.1
CONFIG = trainer_config(
    loss=LanguageLossConfig(proximal="step", off_policy="truncated", off_policy_cap=CAP),
    fsdp={"optimizer": OPTIMIZER},
)
STALENESS = 2


def stale_groups() -> list[SampleGroup]:
    """Groups whose tokens were sampled by a policy that is near the initial weights, not them."""
    made = groups(0)
    samples = [one for group in made for one in group.samples]
    found = PolicyTrainer(CONFIG, 1, 0).log_probs(samples)
    random = np.random.default_rng(5)
    for one, log_prob in zip(samples, found, strict=True):
        noise = random.normal(scale=0.3, size=len(log_prob)).astype(np.float32)
        one.log_prob = log_prob + noise
    return made


def token_log_probs(language: Any, sample: TrainingSample) -> Tensor:
    ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids])).long()
    logits = language(input_ids=ids[None]).logits[0, len(sample.prompt_ids) - 1 : -1]
    found: Tensor = (logits / sample.temperature).log_softmax(-1)
    return found.gather(-1, ids[len(sample.prompt_ids) :, None])[:, 0]


def by_hand(
    made: Sequence[SampleGroup], proximal: Literal["step", "current"]
) -> tuple[dict[str, Tensor], list[float]]:
    """Weights after one iteration of two mini-batches, and the mean weight of each."""
    trainer = PolicyTrainer(CONFIG, 1, 0)
    language = copy.deepcopy(trainer.language)
    parameters = [one for one in language.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, OPTIMIZER.lr, OPTIMIZER.betas, OPTIMIZER.eps, OPTIMIZER.weight_decay
    )
    every = [one for group in made for one in trainer.compute_advantages(group.samples)]
    with torch.no_grad():
        first = [token_log_probs(language, one) for one in every]
    means = []
    for start in (0, 8):
        losses, weights = [], []
        for one, initial in zip(every[start : start + 8], first[start : start + 8], strict=True):
            if not one.scored:
                continue
            assert one.advantage is not None
            now = token_log_probs(language, one)
            old = initial if proximal == "step" else now.detach()
            weight = (old - torch.from_numpy(one.log_prob)).exp().clamp(max=CAP)
            ratio, advantage = (now - old).exp(), torch.from_numpy(one.advantage)
            clipped = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
            losses.append(weight * clipped)
            weights.append(weight)
        optimizer.zero_grad()
        torch.cat(losses).mean().backward()  # type: ignore[no-untyped-call]
        assert OPTIMIZER.max_grad_norm is not None
        torch.nn.utils.clip_grad_norm_(parameters, OPTIMIZER.max_grad_norm)
        optimizer.step()
        means.append(float(torch.cat(weights).mean()))
    return {name: one.detach() for name, one in language.named_parameters()}, means


def differ(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    return max(float((left[name] - right[name]).abs().max()) for name in right)


@pytest.mark.parametrize("pipeline", [False, True], ids=["collected", "pipelined"])
async def test_the_decoupled_loss_of_two_mini_batches_is_that_of_plain_torch(
    pipeline: bool,
) -> None:
    made = stale_groups()
    expected, means = by_hand(made, "step")
    other, _ = by_hand(made, "current")
    assert differ(other, expected) > 1e-4  # the second mini-batch tells them apart
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        actors = await cluster.launch(FSDPActor, CONFIG, BATCHES, max_staleness=STALENESS)
        await channels.send(made)
        [report] = await channels.train(actors, 1, pipeline=pipeline)
        published = unpack(await channels.weights.receiver.get())
    assert differ(published, expected) < 1e-5
    assert report.metrics["off_policy_weight"] == pytest.approx(np.mean(means), rel=1e-5)
    assert 0.0 < report.metrics["off_policy_capped"] < 1.0


async def test_further_epochs_compare_with_the_weights_that_the_iteration_began_with() -> None:
    made = stale_groups()
    batches = msgspec.structs.replace(BATCHES, epochs=2)
    seen: list[dict[tuple[int, int], Any]] = []

    class Actor(FSDPActor):
        def make_trainer(self) -> Any:
            trainer: Any = super().make_trainer()
            step = trainer.training_step

            def noted(micro_batches: Any) -> Any:
                there = list(micro_batches)
                seen.append(
                    {(s.group, s.index): s.prev_log_prob for one in there for s in one.samples}
                )
                return step(there)

            trainer.training_step = noted
            return trainer

    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        actors = await cluster.launch(Actor, CONFIG, batches, max_staleness=STALENESS)
        await channels.send(made)
        [report] = await channels.train(actors, 1)
    assert report.steps == 4
    samples = [one for group in made for one in group.samples]
    expected = PolicyTrainer(CONFIG, 1, 0).log_probs(samples)
    for epoch in (seen[0] | seen[1], seen[2] | seen[3]):
        assert len(epoch) == len(samples)
        for one, log_prob in zip(samples, expected, strict=True):
            np.testing.assert_allclose(epoch[one.group, one.index], log_prob, atol=1e-5)
