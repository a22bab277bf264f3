"""Four real ranks over gloo write one update, each its slices: the one that is gathered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.parallel import Strategy
from rlinf_async.weights.pack import pack
from tests.backends.fsdp_helpers import in_processes, save_result
from tests.backends.language.test_publishing_in_place import assert_same, ordinary, soiled
from tests.backends.megatron.rescaling import BUCKET, LIMIT, config, one_step

pytest.importorskip("megatron.core")

LAUNCHED = 4
BUCKET_BYTES = 1 << 12
RING = (
    Strategy(tp=2, dp=2),
    Strategy(tp=2, pp=2),
    Strategy(dp=4),
    Strategy(pp=2),
)


class Counted:
    """What a rank writes of an update, and that nothing is gathered for it."""

    def __init__(self) -> None:
        self.elements = 0

    def publish(self, trainer: Any, allocate: Any = soiled) -> WeightUpdate:
        from rlinf_async.backends.language_training import trainer as publishing
        from rlinf_async.backends.megatron import manager

        own: Any = publishing
        in_place = own.publish_in_place

        def counted(member: Any, share: Any, *rest: Any, **more: Any) -> Any:
            parts = share.parts.values()
            self.elements = sum(one.live.numel() for every in parts for one in every)
            return in_place(member, share, *rest, **more)

        def refuse(*_: object) -> None:
            raise AssertionError("weights were gathered")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(own, "publish_in_place", counted)
            patch.setattr(manager, "on_first_rank", refuse)
            return trainer.publish(allocate)  # type: ignore[no-any-return]


def gathered(trainer: Any, like: WeightUpdate) -> WeightUpdate:
    """The same tensors in the same order, whole on rank 0."""
    state = trainer.manager.whole_weights(getattr(torch, trainer.config.publish_precision))
    names = [slot.name for one in like.buckets for slot in one.slots]
    assert set(names) == state.keys()
    return pack({name: state[name] for name in names}, trainer.version, BUCKET_BYTES)


def on_every_strategy(rank: int, world_size: int, folder: Path) -> None:
    from rlinf_async.backends.megatron.trainer import MegatronTrainer

    found: dict[str, Any] = {}
    for name, kind, precision, fields in (
        ("tied", "tied", "float32", {}),
        ("untied, bfloat16", "untied", "bfloat16", {"overlap": True}),
    ):
        changes = {"publish_precision": precision, "bucket_bytes": BUCKET_BYTES}
        cfg = msgspec.structs.replace(config(kind, **fields), **changes)
        trainer = MegatronTrainer(cfg, world_size, rank)
        counted, rows = Counted(), []
        for at, strategy in enumerate(RING):
            before = trainer._published
            trainer.rescale(strategy, timeout=LIMIT, bucket_bytes=BUCKET)
            if not trainer.manager.active:
                assert trainer.publish(soiled).buckets == ()
                continue
            update = counted.publish(trainer)
            assert_same(update, gathered(trainer, update))
            assert bool(update.buckets) == (rank == 0)
            kept = before is not None and [id(one) for one in before.buckets] == [
                id(one) for one in update.buckets
            ]
            rows.append([counted.elements, kept])
            one_step(trainer, at)
            trained = counted.publish(trainer)
            assert_same(trained, gathered(trainer, trained))
        found[name] = rows
    elsewhere = trainer.publish(ordinary) if trainer.manager.active else None
    if elsewhere is not None:  # the others cannot map that
        assert_same(elsewhere, gathered(trainer, elsewhere))
    save_result(folder, rank, found)


def test_the_update_that_ranks_write_is_bit_for_bit_the_one_that_is_gathered(
    tmp_path: Path,
) -> None:
    found = in_processes(on_every_strategy, LAUNCHED, tmp_path)
    for name in found[0]:
        for at, strategy in enumerate(RING):
            active = found[: strategy.world_size]
            shares = [one[name][at][0] for one in active]
            assert max(shares) <= 1.3 * sum(shares) / len(shares), (name, strategy.sizes, shares)
        assert [kept for _, kept in found[0][name]] == [False, True, True, True]
