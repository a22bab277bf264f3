"""`MegatronTrainer` publishes, saves, loads and computes while its memory is given back.

The CPU counts as a device here whose memory is given back, as that of a GPU is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlinf_async.backends.checkpoint.folders import CheckpointError
from rlinf_async.backends.language import OPTIMIZER, PARTS, WEIGHTS
from rlinf_async.weights.pack import unpack
from tests.backends.fsdp_helpers import in_processes, save_result
from tests.backends.language.kit import samples
from tests.backends.megatron.rescaling import config, step

pytest.importorskip("megatron.core")

SETTINGS: tuple[dict[str, Any], ...] = (
    {"tp": 1, "overlap": True},
    {"tp": 1, "precision": "bfloat16"},
    {"tp": 2, "precision": "bfloat16", "distributed_optimizer": False},
)
SLEEPING = (frozenset({WEIGHTS}), frozenset({OPTIMIZER}), PARTS)


def made(world_size: int, rank: int, patch: pytest.MonkeyPatch, **fields: Any) -> Any:
    """A trainer whose memory is given back on a CPU, too."""
    from rlinf_async.backends.megatron.manager import MegatronModelManager
    from rlinf_async.backends.megatron.trainer import MegatronTrainer

    patch.setattr(MegatronModelManager, "_on_device", property(lambda _: True))
    return MegatronTrainer(config("tied", sequence_parallel=False, **fields), world_size, rank)


def tensors(trainer: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor whose memory is given back, and its part."""
    from rlinf_async.backends.megatron.memory import float32_copies
    from rlinf_async.backends.megatron.weights import MOMENTS, torch_optimizers

    manager = trainer.manager
    for one in manager.held:
        yield WEIGHTS, one.parameter
    for copy in float32_copies(manager.optimizer):
        yield OPTIMIZER, copy
    for optimizer in torch_optimizers(manager.optimizer):
        for state in optimizer.state.values():
            yield from ((OPTIMIZER, state[kind]) for kind in MOMENTS)
    for model in manager.models:
        yield from ((OPTIMIZER, buffer.grad_data) for buffer in model.buffers)


def assert_gone(trainer: Any, parts: frozenset[str]) -> None:
    """The memory of these parts, and of no other, is given back."""
    assert trainer.asleep == parts
    for part, one in tensors(trainer):
        assert bool(one.untyped_storage().size()) == (part not in parts)


def batch_of(trainer: Any) -> list[Any]:
    at = trainer.data_rank
    return [one for one in samples(4) if at.is_io and one.group % at.size == at.rank]


def observed(trainer: Any, asleep: frozenset[str]) -> dict[str, Any]:
    """What is read from a trainer, which leaves these parts asleep."""
    batch, found = batch_of(trainer), dict[str, Any]()
    readers: dict[str, Callable[[], Any]] = {
        "published": lambda: unpack(trainer.publish()),
        "whole": lambda: trainer.manager.whole_weights(torch.float32),
        "log_probs": lambda: trainer.log_probs(batch),
        "reference": lambda: trainer.log_probs(batch, reference=True),
    }
    for name, read in readers.items():
        found[name] = read()
        assert_gone(trainer, asleep)
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in ("published", "whole"):
        assert found[name].keys() == expected[name].keys()
        assert all(torch.equal(found[name][key], one) for key, one in expected[name].items())
    for name in ("log_probs", "reference"):
        for one, other in zip(found[name], expected[name], strict=True):
            np.testing.assert_array_equal(one, other)


def read_while_offloaded(rank: int, world_size: int, folder: Path) -> None:
    result = []
    with pytest.MonkeyPatch.context() as patch:
        for number, fields in enumerate(SETTINGS):
            trainer = made(world_size, rank, patch, **fields)
            step(trainer, 0)
            expected = observed(trainer, frozenset())
            trainer.save_checkpoint(folder / f"{number} awake")
            same = [id(one) for _, one in tensors(trainer)]
            for parts in SLEEPING:
                for one in sorted(parts, reverse=True):  # weights first
                    trainer.sleep({one})
                found = observed(trainer, parts)
                assert_same(found, expected)
                trainer.save_checkpoint(folder / f"{number} {sorted(parts)}")
                assert_gone(trainer, parts)
                with pytest.raises(CheckpointError):
                    trainer.load_checkpoint(folder / "nowhere")
                assert_gone(trainer, parts)
                trainer.wake_up()
                assert_gone(trainer, frozenset())
                assert [id(one) for _, one in tensors(trainer)] == same
            first = step(trainer, 1)
            trainer.offload()
            trainer.load_checkpoint(folder / f"{number} {sorted(PARTS)}")
            assert_gone(trainer, PARTS)
            assert_same(observed(trainer, PARTS), expected)
            trainer.onload()
            result.append([first, step(trainer, 1)])
    save_result(folder, rank, result)


def test_offloaded_models_are_published_saved_loaded_and_computed_with(tmp_path: Path) -> None:
    for rows in in_processes(read_while_offloaded, 2, tmp_path):
        assert len(rows) == len(SETTINGS)
        assert all(first == again for first, again in rows)
    for number in range(len(SETTINGS)):
        expected = content(tmp_path / f"{number} awake")
        assert expected
        for parts in SLEEPING:
            assert content(tmp_path / f"{number} {sorted(parts)}") == expected


def content(folder: Path) -> dict[str, bytes]:
    """The files with the tensors of a checkpoint."""
    return {one.name: one.read_bytes() for one in folder.rglob("rank_*.safetensors")}


def interrupted_by_errors(rank: int, world_size: int, folder: Path) -> None:
    from rlinf_async.backends.megatron.memory import StageMemory

    with pytest.MonkeyPatch.context() as patch:
        trainer = made(world_size, rank, patch, tp=1, precision="bfloat16")
        step(trainer, 0)
        expected = observed(trainer, frozenset())
        trainer.offload()
        with pytest.raises(ZeroDivisionError), trainer.manager.awake():
            _ = 1 / len(trainer.asleep)
        assert_gone(trainer, PARTS)

        def full(_: StageMemory) -> None:
            raise torch.OutOfMemoryError("the device is full")

        with patch.context() as inner:
            inner.setattr(StageMemory, "load_state", full)
            with pytest.raises(torch.OutOfMemoryError), trainer.manager.awake():
                pytest.fail("the block runs without its memory")
        assert_gone(trainer, PARTS)
        assert_same(observed(trainer, PARTS), expected)
    save_result(folder, rank, "as before")


def test_an_error_leaves_the_model_offloaded_and_whole(tmp_path: Path) -> None:
    assert in_processes(interrupted_by_errors, 1, tmp_path) == ["as before"]


def test_a_full_device_does_not_lose_the_copy() -> None:
    from rlinf_async.backends.megatron.memory import HostCopies

    class Full(torch.Tensor):
        """Its storage cannot grow."""

        full = True

        def untyped_storage(self) -> Any:
            storage: Any = super().untyped_storage()
            if self.full and not storage.size():
                return Refusing(storage)
            return storage

    class Refusing:
        def __init__(self, storage: Any) -> None:
            self._cdata, self.size = storage._cdata, storage.size

        def resize_(self, _: int) -> None:
            raise torch.OutOfMemoryError("the device is full")

    tensor = torch.arange(8.0).as_subclass(Full)
    copies = HostCopies()
    copies.offload([tensor])
    with pytest.raises(torch.OutOfMemoryError):
        copies.load([tensor])
    tensor.full = False
    copies.load([tensor])
    assert tensor.tolist() == [*range(8)]
