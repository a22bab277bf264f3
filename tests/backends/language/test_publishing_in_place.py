"""Two to four real ranks over gloo write one update, each its rows: the one that is gathered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from rlinf_async.backends.fsdp.language.publishing import hugging_face_state
from rlinf_async.backends.fsdp.language.trainer import PolicyTrainer
from rlinf_async.backends.fsdp.manager import DTYPES
from rlinf_async.backends.language_training.weights import NotPublished
from rlinf_async.channels.wire import shared_bytes
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.parallel import Strategy
from rlinf_async.weights.pack import pack, verify
from tests.backends.fsdp_helpers import in_processes, save_result
from tests.backends.language.kit import QWEN3, UNTIED, micro_batches, samples, trainer_config

LIMIT = 60.0
"""seconds"""
MIXTURE = QWEN3 | {
    "model_type": "qwen3_moe",
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}
"""experts that are fused in memory, and that ranks do not share evenly"""
VARIANTS: dict[str, dict[str, Any]] = {
    "uneven, tied": {"bucket_bytes": 1 << 12},
    "one bucket": {},
    "fewer rows than ranks": {"model": QWEN3 | {"head_dim": 2}, "bucket_bytes": 1 << 10},
    "a tensor a bucket": {"model": UNTIED, "bucket_bytes": 1},
    "experts": {"model": MIXTURE, "bucket_bytes": 1 << 12},
    "bfloat16": {"publish_precision": "bfloat16", "bucket_bytes": 1 << 12},
    "float16, untied": {
        "model": UNTIED | {"head_dim": 2, "num_key_value_heads": 1},
        "publish_precision": "float16",
        "bucket_bytes": 3000,
    },
}  # fmt: skip


def ordinary(size: int) -> NDArray[np.uint8]:
    return np.full(size, 7, np.uint8)


def soiled(size: int) -> NDArray[np.uint8] | None:
    """Shared memory in which nothing is zero that nobody wrote."""
    given = shared_bytes(size)
    if given is not None:
        given[:] = 255
    return given


def refusing(size: int) -> NDArray[np.uint8]:
    raise MemoryError(f"no {size} bytes")


@contextmanager
def nothing_gathered() -> Iterator[None]:
    """Whoever makes a sharded tensor whole in here fails."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a tensor was gathered")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DTensor, "full_tensor", refuse)
        patch.setattr(DTensor, "redistribute", refuse)
        yield


def written(trainer: PolicyTrainer) -> WeightUpdate:
    with nothing_gathered():
        return trainer.publish(soiled)


def gathered(trainer: PolicyTrainer) -> WeightUpdate:
    config = trainer.config
    state = hugging_face_state(trainer.manager, DTYPES[config.publish_precision])
    return pack(state, trainer.version, config.bucket_bytes)


def assert_same(found: WeightUpdate, expected: WeightUpdate) -> None:
    verify(found)
    assert found.version == expected.version
    for one, other in zip(found.buckets, expected.buckets, strict=True):
        assert one.slots == other.slots
        assert np.array_equal(one.data, other.data)
        assert one.checksum == other.checksum
    assert found.checksum == expected.checksum


def check_equal(trainer: PolicyTrainer, rank: int) -> WeightUpdate:
    found = written(trainer)
    assert_same(found, gathered(trainer))
    assert len(found.buckets) == 0 if rank else len(found.buckets) > 0
    return found


def train(trainer: PolicyTrainer, rank: int) -> None:
    batch = [one for one in samples(4) if one.group % trainer.manager.world_size == rank]
    trainer.training_step(micro_batches(trainer.compute_advantages(batch), len(batch)))
    trainer.end_iteration()


def all_variants(rank: int, world_size: int, folder: Path) -> None:
    buckets = {}
    for name, fields in VARIANTS.items():
        trainer = PolicyTrainer(trainer_config(**fields), world_size, rank)
        check_equal(trainer, rank)
        train(trainer, rank)
        buckets[name] = len(check_equal(trainer, rank).buckets)
    save_result(folder, rank, buckets)


def what_changed(rank: int, world_size: int, folder: Path) -> None:
    """Buckets of which the memory is another one than before."""
    trainer = PolicyTrainer(trainer_config(bucket_bytes=1 << 12), world_size, rank)

    def renewed(before: WeightUpdate) -> list[str]:
        after = check_equal(trainer, rank)
        pairs = zip(before.buckets, after.buckets, strict=True)
        return [slot.name for old, new in pairs if old.data is not new.data for slot in new.slots]

    first = check_equal(trainer, rank)
    result: dict[str, Any] = {"nothing": renewed(first)}
    if rank == world_size - 1:  # the last number of one tensor, on the last rank alone
        last = trainer.manager.model.get_parameter("language.model.layers.1.mlp.down_proj.weight")
        with torch.no_grad():
            assert isinstance(last, DTensor)
            last.to_local()[-1, -1] += 1.0
    result["one number"] = renewed(first)
    result["slots"] = [[slot.name for slot in one.slots] for one in first.buckets]
    save_result(folder, rank, result)


def after_rescaling(rank: int, world_size: int, folder: Path) -> None:
    config = trainer_config(model=QWEN3 | {"head_dim": 2}, bucket_bytes=1 << 11)
    trainer = PolicyTrainer(config, world_size, rank)
    train(trainer, rank)
    before = check_equal(trainer, rank)
    kept = []
    for size in (2, 3, 1, 3):
        trainer.rescale(Strategy(dp=size), timeout=LIMIT, bucket_bytes=1 << 13)
        if trainer.manager.active:
            after = check_equal(trainer, rank)
            kept.append(all(a is b for a, b in zip(after.buckets, before.buckets, strict=True)))
            train(trainer, rank)
            before = check_equal(trainer, rank)
        else:
            assert written(trainer).buckets == ()
    save_result(folder, rank, kept)


def where_it_cannot(rank: int, world_size: int, folder: Path) -> None:
    """Memory that the others cannot map, none, FSDP1; then rank 0 that fails."""
    trainer = PolicyTrainer(trainer_config(bucket_bytes=1 << 12), world_size, rank)
    for allocate in (ordinary, None, lambda _: None):
        assert_same(trainer.publish(allocate), gathered(trainer))
        train(trainer, rank)
    check_equal(trainer, rank)  # after buckets in memory of its own
    train(trainer, rank)
    error = MemoryError if rank == 0 else NotPublished
    with pytest.raises(error, match="no .* bytes" if rank == 0 else "see that rank's error"):
        trainer.publish(refusing)
    check_equal(trainer, rank)
    whole = PolicyTrainer(trainer_config(fsdp={"strategy": "fsdp1"}), world_size, rank)
    assert_same(whole.publish(soiled), gathered(whole))
    save_result(folder, rank, True)


@pytest.mark.parametrize("world_size", [3, 4])  # the tests below have 2
def test_the_update_that_ranks_write_is_bit_for_bit_the_one_that_is_gathered(
    world_size: int, tmp_path: Path
) -> None:
    buckets = in_processes(all_variants, world_size, tmp_path)
    assert buckets[0]["one bucket"] == 1
    assert all(count > world_size for name, count in buckets[0].items() if name != "one bucket")
    assert all(set(other.values()) == {0} for other in buckets[1:])


def test_only_buckets_in_which_some_rank_changed_a_number_are_written_again(tmp_path: Path) -> None:
    first, second = in_processes(what_changed, 2, tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    assert first["nothing"] == []
    [expected] = [slots for slots in first["slots"] if name in slots]
    assert first["one number"] == expected
    assert second["one number"] == []


def test_after_a_rescale_ranks_write_other_rows_and_keep_what_is_the_same(tmp_path: Path) -> None:
    kept, *_ = in_processes(after_rescaling, 3, tmp_path)
    assert kept == [True] * 4


def test_weights_are_gathered_where_ranks_cannot_map_the_memory(tmp_path: Path) -> None:
    assert in_processes(where_it_cannot, 2, tmp_path) == [True, True]
