"""Checkpoints of Megatron's ranks: what fails on one of them is an error on each, at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from rlinf_async.backends.checkpoint.folders import CheckpointError
from tests.backends.fsdp_helpers import in_processes, save_result
from tests.backends.megatron.test_manager import learn, made

pytest.importorskip("megatron.core")


def error_of(call: Callable[[], object]) -> str:
    """The error that a call raises."""
    try:
        call()
    except (CheckpointError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def full(*_: object) -> int:
    raise OSError(28, "No space left on device")


def fail_and_go_on(rank: int, world_size: int, folder: Path) -> None:
    """Each checkpoint that fails on one rank, with an optimizer step after it."""
    expected = learn(made(world_size, rank, tp=2), 5)
    trainer = made(world_size, rank, tp=2)
    errors, norms = {}, learn(trainer, 1)

    if rank == 0:
        (folder / "file").touch()
    errors["under a file"] = error_of(lambda: trainer.save_checkpoint(folder / "file" / "new"))
    norms += learn(trainer, 1)

    dist.barrier()
    with pytest.MonkeyPatch.context() as patched:
        if rank == 1:
            patched.setattr(os, "write", full)
        errors["full disk"] = error_of(lambda: trainer.save_checkpoint(folder / "full"))
        # Begun, the error is told by the next one.
        trainer.begin_checkpoint(folder / "full").exception(60)
        errors["full before"] = error_of(lambda: trainer.begin_checkpoint(folder / "next"))
    assert not (folder / "full").exists()
    norms += learn(trainer, 1)

    trainer.save_checkpoint(folder / "good")
    if rank == 0:
        damaged = folder / "good" / "rank_1_of_2.safetensors"
        content = bytearray(damaged.read_bytes())
        content[-1] ^= 1
        damaged.write_bytes(content)
    dist.barrier()
    trainer.end_iteration()
    norms += learn(trainer, 1)
    errors["damaged"] = error_of(lambda: trainer.load_checkpoint(folder / "good"))
    counters = (trainer.manager.steps, trainer.version)
    norms += learn(trainer, 1)
    save_result(folder, rank, {"errors": errors, "norms": [norms, expected], "at": counters})


def test_a_checkpoint_fails_on_all_ranks_together_and_training_goes_on(tmp_path: Path) -> None:
    results = in_processes(fail_and_go_on, 2, tmp_path)
    for one in results:
        norms, expected = one["norms"]
        assert norms == expected
        assert one["at"] == (4, 1)
    first, second = (one["errors"] for one in results)
    assert first["under a file"].startswith(("NotADirectoryError", "FileExistsError"))
    assert "preparing" in second["under a file"]
    assert "failed on rank [0]" in second["under a file"]
    for where in ("full disk", "full before"):
        assert "No space left on device" in second[where]
        assert "failed on rank [1]" in first[where]
    assert "rank_1_of_2.safetensors is damaged" in second["damaged"]
    assert "failed on rank [1]" in first["damaged"]
