"""Ranks in processes of their own.

What a rank imports takes it seconds, and is the same for every test. So ranks are forked from one
process that has imported it. They share its seed of hashes, and with it the order in which they go
through a set of strings, as the ranks of a job do not: ``spawn`` starts them as a job would. Plans
are carried out by such ranks in ``reshard/test_executor.py``; rescaling and sharded training in the
processes of workers, in ``tests/workers/actor`` and ``critic``.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from typing import Any, Literal

from torch.multiprocessing.spawn import start_processes

IMPORTED = "tests.backends.imported"
"""what imports all that most ranks need"""


def forking() -> ForkServerContext:
    """Return what forks processes from one that has imported `IMPORTED`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([IMPORTED])
    return context


def start_ranks(
    start: Callable[..., object],
    arguments: tuple[Any, ...],
    ranks: int,
    method: Literal["forkserver", "spawn"] = "forkserver",
) -> None:
    """Run ``start(rank, *arguments)`` in every rank.

    Raises:
        ProcessRaisedException: with the traceback of a rank that raised; the others were killed.
    """
    forking()
    start_processes(start, arguments, nprocs=ranks, start_method=method)  # type: ignore[no-untyped-call]
