"""Several epochs over one iteration: the same samples, under what they came with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec
import pytest

import rlinf_async as ra
from rlinf_async.algorithms.config import LanguageAdvantageConfig, LanguageLossConfig
from rlinf_async.backends.fsdp.language.config import LanguageTrainerConfig
from rlinf_async.backends.fsdp.language.trainer import PolicyTrainer
from rlinf_async.backends.language import LanguageTrainer, MicroBatch
from rlinf_async.messages.language import LanguageTrainReport
from rlinf_async.weights.pack import unpack
from rlinf_async.workers.actor import FSDPActor, LanguageBatches
from tests.workers.actor.language.kit import CONFIG, GROUP, Channels, groups

pytestmark = pytest.mark.parametrize("loop_kind", ["uvloop"])

WHITENED = msgspec.structs.replace(CONFIG, advantage=LanguageAdvantageConfig(name="reinforce++"))


class Noting(PolicyTrainer):
    """Notes what it trains on: in each optimizer step, the samples and their advantages."""

    def __init__(self, config: LanguageTrainerConfig, world_size: int, rank: int) -> None:
        super().__init__(config, world_size, rank)
        self.steps: list[dict[tuple[int, int], float]] = []

    def training_step(self, micro_batches: Iterable[MicroBatch]) -> Mapping[str, float]:
        seen: dict[tuple[int, int], float] = {}

        def noted() -> Iterable[MicroBatch]:
            for batch in micro_batches:
                for one in batch.samples:
                    assert one.advantage is not None
                    seen[one.group, one.index] = float(one.advantage.sum())
                yield batch

        self.steps.append(seen)
        return super().training_step(noted())


class NotingActor(FSDPActor):
    def make_trainer(self) -> LanguageTrainer:
        self.noting = Noting(self._config, self.world_size, self.rank)
        return self.noting

    async def steps(self) -> list[list[tuple[int, int, float]]]:
        return [[(*name, total) for name, total in one.items()] for one in self.noting.steps]

    async def weights(self) -> float:
        update = await self.compute(self._trainer.publish)
        return sum(float(tensor.abs().sum()) for tensor in unpack(update).values())


async def trained(
    config: LanguageTrainerConfig, epochs: int, *, steps: int = 2, pipelined: bool = False
) -> tuple[LanguageTrainReport, list[list[tuple[int, int, float]]], float]:
    """One iteration; its report, what every optimizer step saw, and the sum of the weights."""
    batches = LanguageBatches(
        samples=16, group_size=GROUP, optimizer_steps=steps, epochs=epochs, micro_batch_size=4
    )
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        actors = await cluster.launch(NotingActor, config, batches)
        await channels.send(groups(0))
        method = NotingActor.run_training_pipeline if pipelined else NotingActor.run_training
        [report] = await actors.call(method, channels.groups.receiver)
        [seen] = await actors.call(NotingActor.steps)
        [weights] = await actors.call(NotingActor.weights)
    return report, seen, weights


@pytest.mark.parametrize("pipelined", [True, False])
async def test_every_epoch_has_every_sample_once_under_the_same_advantage(
    loop_kind: str, pipelined: bool
) -> None:
    report, steps, _ = await trained(WHITENED, 3, pipelined=pipelined)
    assert report.steps == len(steps) == 6
    assert report.metrics["epochs"] == 3
    assert report.samples == 16  # counted where they arrive
    epochs = [steps[at] + steps[at + 1] for at in (0, 2, 4)]
    assert [len(one) for one in epochs] == [16, 16, 16]
    assert Counter(epochs[0]) == Counter(epochs[1]) == Counter(epochs[2])
    assert len({tuple(sorted(name[:2] for name in one)) for one in steps}) > 2  # shuffled


async def test_an_epoch_more_is_an_optimizer_step_more_on_the_same_batch(loop_kind: str) -> None:
    _, _, twice = await trained(CONFIG, 2, steps=1)
    trainer = PolicyTrainer(CONFIG, 1, 0)
    made = [sample for group in groups(0) for sample in group.samples]
    batch = trainer.compute_advantages(made)
    for _ in range(2):
        trainer.training_step([MicroBatch(batch, True)])
    expected = sum(float(one.abs().sum()) for one in unpack(trainer.publish()).values())
    assert twice == pytest.approx(expected, rel=1e-6)
    _, _, once = await trained(CONFIG, 1, steps=1)
    assert once != pytest.approx(expected, rel=1e-6)


async def test_epochs_are_spared_once_every_sample_is_stopped_by_its_ratio(loop_kind: str) -> None:
    stopping = msgspec.structs.replace(
        CONFIG, loss=LanguageLossConfig(early_stop_ratio=1e-6), skip_silent=False
    )
    report, steps, _ = await trained(stopping, 5)
    assert report.metrics["early_stopped"] == 1.0
    assert (report.metrics["epochs"], len(steps)) == (1, 2)


async def test_no_epoch_at_all_is_refused(loop_kind: str) -> None:
    with pytest.raises(ValueError, match="epochs is 0; it must be at least 1"):
        LanguageBatches(samples=16, epochs=0)
