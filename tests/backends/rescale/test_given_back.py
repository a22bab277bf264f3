"""An idle rank's memory is the system's again, not the C library's for its next use."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from benchmarks.reshard.ranks import BlocksManager
from rlinf_async.backends.fsdp.rescale import rescale
from rlinf_async.parallel import Strategy
from tests.backends.fsdp_helpers import in_processes, save_result

PARAMETERS = 67e6


def go_idle(rank: int, world_size: int, folder: Path) -> None:
    empty = own_bytes()
    manager = BlocksManager(PARAMETERS, world_size, rank)
    manager.take_a_step()
    held = own_bytes() - empty
    rescale(manager, Strategy(dp=1))
    save_result(folder, rank, {"held": held, "left": own_bytes() - empty})


def own_bytes() -> int:
    """Memory of this process that is not of files or shared."""
    text = Path("/proc/self/status").read_text()
    [line] = [line for line in text.splitlines() if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps it, and is asked")
def test_a_rank_that_goes_idle_gives_back_what_its_optimizer_took(tmp_path: Path) -> None:
    idle = in_processes(go_idle, 2, tmp_path)[1]
    assert idle["held"] > PARAMETERS * 12 / 2  # half of weights and moments
    assert idle["left"] < 0.15 * idle["held"]
