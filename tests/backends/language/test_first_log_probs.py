"""Log-probs under the weights that an iteration began with, while the strategy changes in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlinf_async.backends.fsdp.language.trainer import PolicyTrainer
from rlinf_async.messages.language import TrainingSample
from rlinf_async.parallel import Strategy
from tests.backends.fsdp_helpers import in_processes, save_result
from tests.backends.language.kit import micro_batches, samples, trainer_config

ONE, TWO = Strategy(dp=1), Strategy(dp=2)
FSDP = (ONE, TWO, ONE, TWO)
"""in force for the global batches of an iteration"""
MEGATRON = (Strategy(tp=2), Strategy(dp=2), Strategy(pp=2), Strategy())
SIZE = 4
"""samples of a global batch, on each rank or once"""


def share(trainer: Any, batch: int) -> list[TrainingSample]:
    at = trainer.data_rank
    whole = samples(2, SIZE, seed=batch)
    return [one for one in whole if one.group % at.size == at.rank] if at.is_io else []


def iteration(trainer: Any, ring: tuple[Strategy, ...]) -> list[float]:
    """Train a global batch on each strategy.

    Returns, on rank 0, how far the first log-probs of each are from those of before the iteration,
    and, last, how far the weights have moved from there.
    """
    change(trainer, ring[0])
    active = trainer.manager.active
    before = [trainer.log_probs(every(trainer, at)) if active else [] for at in range(len(ring))]
    found: list[float] = []
    here: list[Any] = []
    for batch, strategy in enumerate(ring):
        change(trainer, strategy)
        if not trainer.manager.active:
            continue
        here = share(trainer, batch)
        first = trainer.first_log_probs(here, batch=batch, batches=len(ring))
        found.append(distance(here, before[batch], first))
        for one, got in zip(here, first, strict=bool(here)):
            one.prev_log_prob = got
        ready = trainer.compute_advantages(here)
        trainer.training_step(iter(micro_batches(ready, 2) if ready else ()))
    if trainer.manager.active:
        found.append(distance(here, before[-1], trainer.log_probs(here)))
        assert "step" not in trainer.kept_weights.tags
    return found


def change(trainer: Any, strategy: Strategy) -> None:
    trainer.rescale(strategy, timeout=60.0, bucket_bytes=1 << 13)


def every(trainer: Any, batch: int) -> list[TrainingSample]:
    return samples(2, SIZE, seed=batch) if trainer.data_rank.is_io else []


def distance(here: list[TrainingSample], before: list[Any], found: list[Any]) -> float:
    """Largest difference, of the samples that rank 0 trains."""
    known = {(n // SIZE, n % SIZE): one for n, one in enumerate(before)}
    pairs = [(known.get((s.group, s.index)), p) for s, p in zip(here, found, strict=bool(here))]
    return max((float(abs(p - old).max()) for old, p in pairs if old is not None), default=0.0)


def fsdp(rank: int, world_size: int, folder: Path) -> None:
    save_result(folder, rank, [iteration(PolicyTrainer(trainer_config(), world_size, rank), FSDP)])


def megatron(rank: int, world_size: int, folder: Path) -> None:
    from rlinf_async.backends.megatron.trainer import MegatronTrainer
    from tests.backends.megatron.rescaling import config

    found = []
    for distributed in (True, False):
        settings = config("untied", sequence_parallel=False, distributed_optimizer=distributed)
        trainer: Any = MegatronTrainer(settings, world_size, rank)
        found.append(iteration(trainer, MEGATRON))
    save_result(folder, rank, found)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_every_mini_batch_is_compared_with_the_weights_the_iteration_began_with(
    backend: str, tmp_path: Path
) -> None:
    if backend == "megatron":
        pytest.importorskip("megatron.core")
    results = in_processes({"fsdp": fsdp, "megatron": megatron}[backend], 2, tmp_path)
    for differences in results[0]:
        assert len(differences) == 5
        assert max(differences[:-1]) < 1e-5
        assert differences[-1] > 1e-2  # the weights themselves are others by then
