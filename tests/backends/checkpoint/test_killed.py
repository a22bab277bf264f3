"""SIGKILL at every single touch of the disk, and of one rank of two: the checkpoint before, or the
new one, is there."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlinf_async.backends.checkpoint.folders import CheckpointError, clean
from rlinf_async.backends.fsdp.manager import FSDPModelManager
from tests.backends.fsdp_helpers import (
    exit_codes,
    load_result,
    save_result,
    set_up,
    train_steps,
)
from tests.backends.ranks import forking
from tests.backends.test_fsdp_sharded import config

PATIENCE = 250.0
"""seconds for what takes some ten on an idle machine: a checkpoint is written some fifty times"""
TOUCHES = ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir")


class Deadly:
    """Counts calls of functions of ``os``; instead of the n-th one the process is killed."""

    def __init__(self, number: int) -> None:
        self._left = number

    def arm(self) -> None:
        for name in TOUCHES:
            setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, touch: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return touch(*args, **kwargs)

        return counted


def save_over_it(manager: FSDPModelManager, folder: Path, number: int) -> int:
    """Write a checkpoint over the one that is there, in a process that may not survive it."""
    process = os.fork()
    if process == 0:
        Deadly(number).arm()
        manager.begin_checkpoint(folder / "checkpoint").result()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def kill_at_every_touch(first: Path) -> None:
    """In a process of its own, which has one thread: it is forked again and again."""
    torch.set_num_threads(1)
    manager, found = set_up(config("fsdp2")), set_up(config("fsdp2"))
    manager.load_checkpoint(first / "checkpoint")
    train_steps(manager, range(3, 5))
    reached: list[int] = []
    for number in itertools.count(1):
        folder = first.parent / str(number)
        shutil.copytree(first, folder)
        ended = save_over_it(manager, folder, number)
        assert ended in (0, -signal.SIGKILL)
        found.load_checkpoint(folder / "checkpoint")
        reached.append(found.steps)
        clean(folder)
        assert [one.name for one in folder.iterdir()] == ["checkpoint"]
        found.load_checkpoint(folder / "checkpoint")
        assert found.steps == reached[-1]
        found.save_checkpoint(folder / "checkpoint")
        if ended == 0:
            break
    save_result(first, 0, reached)


def test_a_kill_at_any_touch_of_the_disk_leaves_a_checkpoint(tmp_path: Path) -> None:
    manager = set_up(config("fsdp2"))
    train_steps(manager, range(3))
    manager.save_checkpoint(tmp_path / "first" / "checkpoint")
    process = forking().Process(target=kill_at_every_touch, args=(tmp_path / "first",))
    process.start()
    try:
        process.join(PATIENCE)
        assert process.exitcode == 0
    finally:
        process.kill()
    reached = load_result(tmp_path / "first", 0)
    assert reached == sorted(reached)  # once the new one is there, it stays
    assert (reached[0], reached[-1]) == (3, 5)
    assert len(reached) > 15


def one_of_two(rank: int, folder: Path, touch: str) -> None:
    """Rank 1 is killed while it writes its part of the second checkpoint."""
    torch.set_num_threads(1)
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    manager = set_up(config("fsdp2"), 2, rank)
    train_steps(manager, range(3))
    manager.save_checkpoint(folder / "first")
    train_steps(manager, range(3, 5))
    if rank == 1:
        whole = getattr(os, touch)

        def killed(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                os.kill(os.getpid(), signal.SIGKILL)
            return whole(*args, **kwargs)

        setattr(os, touch, killed)
    try:
        manager.save_checkpoint(folder / "second")
    except CheckpointError as error:
        save_result(folder, rank, str(error))
    os._exit(0)  # the group is broken


@pytest.mark.parametrize("touch", ["write", "fsync", "rename"])
def test_a_rank_of_two_that_is_killed_while_it_writes_leaves_the_checkpoint_before(
    tmp_path: Path, touch: str
) -> None:
    assert exit_codes(one_of_two, 2, tmp_path, touch) == [0, -signal.SIGKILL]
    said = load_result(tmp_path, 0)
    # Rank 0 hears of it while it writes, or while it still copies.
    assert f"{tmp_path / 'second'}: another rank was lost" in said
    assert not (tmp_path / "second").exists()
    clean(tmp_path)
    assert not any("second" in one.name for one in tmp_path.iterdir())
    found = set_up(config("fsdp2"))
    found.load_checkpoint(tmp_path / "first")
    assert found.steps == 3
