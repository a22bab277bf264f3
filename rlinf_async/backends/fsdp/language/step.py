"""One optimizer step from micro-batches that are still arriving; see `language_training.totals`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rlinf_async.backends.fsdp import ranks
from rlinf_async.backends.fsdp.manager import FSDPModelManager
from rlinf_async.backends.language import MicroBatch
from rlinf_async.backends.language_training.totals import (
    NothingToDo,
    Part,
    Totals,
    check_engine,
    check_finite,
)

PartOf = Callable[[MicroBatch], Part | NothingToDo]


def optimizer_step(
    manager: FSDPModelManager,
    micro_batches: Iterable[MicroBatch],
    part_of: PartOf,
    engine_tolerance: float | None = None,
    version: int = 0,
) -> dict[str, float]:
    """Make one optimizer step; return its metrics, equal on every rank. Collective.

    Without any trained token in the whole global batch there is no step (``empty`` is 1). Raises,
    before the weights change, `TrainingDiverged` when the loss is not finite, and `EngineDisagrees`
    when the engine's log-probs of this ``version`` differ by more than the tolerance.
    """
    manager.check_loaded("a training step")
    totals = Totals()
    for micro_batch in micro_batches:
        with manager.before_micro_batch(manager.model, micro_batch.is_last):
            part = part_of(micro_batch)
            if isinstance(part, Part):
                manager.backward(part.loss)
        totals.add(part)
    if manager.world_size > 1:
        row = totals.row(manager.device)
        ranks.all_reduce(manager, row)
        totals.take(row)
    metrics = totals.metrics()
    try:
        check_finite(metrics, manager.steps)
        check_engine(metrics, engine_tolerance, version)
    except Exception:
        manager.zero_grad()
        raise
    if totals.units == 0:
        manager.zero_grad()
        return metrics | {"empty": 1.0, "skipped": 0.0, "grad_norm": 0.0, "lr": _lr(manager)}
    before = manager.skipped_steps
    # FSDP takes the mean of the ranks' gradients; here it is their sum that is divided.
    grad_norm, lrs = manager.optimizer_step(manager.world_size / totals.units)
    skipped = manager.skipped_steps - before
    return metrics | {
        "empty": 0.0,
        "skipped": float(skipped),
        "grad_norm": grad_norm,
        "lr": lrs[0],
    }


def _lr(manager: FSDPModelManager) -> float:
    return float(manager.optimizer.param_groups[0]["lr"])
