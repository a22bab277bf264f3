"""Ranks that show each other their memory, and one that does not come."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlinf_async.backends.reshard import PeerLost, shared_memory
from rlinf_async.backends.reshard.signals import Inboxes
from rlinf_async.weights.memory_files import this_host
from tests.backends.reshard.test_executor import in_ranks

IMPATIENT = timedelta(seconds=2)
"""much less than the group's own limit of 60 s"""


def descriptors() -> set[str]:
    """The pipes and nameless memory that this process has open."""
    found = set()
    for one in Path("/proc/self/fd").iterdir():
        try:
            kind = os.readlink(one)
        except FileNotFoundError:  # the listing's own
            continue
        if kind.startswith(("pipe:", "/memfd:reshard")):
            found.add(one.name)
    return found


def first_only(rank: int) -> list[float]:
    """Rank 1 shows its memory, and then does not say whether it sees rank 0's."""
    dist.barrier()
    before, began, said = descriptors(), time.monotonic(), 0.0
    if rank == 0:
        with pytest.raises(PeerLost, match="before anything was sent"):
            shared_memory.connect(None, 100, {1 - rank}, IMPATIENT)
        said = time.monotonic() - began
    else:
        memory = os.memfd_create("reshard")
        os.ftruncate(memory, 4096)
        inboxes = Inboxes(rank, 2)
        mine = [this_host(), os.getpid(), memory, 4096, *inboxes.numbers()]
        with suppress(PeerLost):  # it came too late even for that
            shared_memory.gathered(torch.tensor(mine), None, timedelta(seconds=60), "late")
    left = len(descriptors() - before)
    dist.distributed_c10d._get_default_store().set(f"done/{rank}", "")
    dist.distributed_c10d._get_default_store().wait([f"done/{1 - rank}"], timedelta(seconds=60))
    return [said, left]


def test_a_rank_that_does_not_answer_is_lost_in_time_and_nothing_stays_open(
    tmp_path: Path,
) -> None:
    (seconds, left), _ = in_ranks(first_only, tmp_path, ranks=2)
    assert seconds < 30
    assert left == 0
