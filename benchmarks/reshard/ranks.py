"""Processes that hold a model of blocks and its Adam state, for the cases of this bench.

A block is two linear layers of 1,024 x 4,096: 8.4 M parameters. Nothing is computed with it; one
optimizer step with made-up gradients gives it moments.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.multiprocessing.spawn import ProcessContext, start_processes

from rlinf_async.backends.fsdp.config import ShardingConfig
from rlinf_async.backends.fsdp.manager import FSDPModelManager
from rlinf_async.backends.fsdp.state import local_shard

HIDDEN = 1024
PER_BLOCK = 8 * HIDDEN * HIDDEN
Method = Literal["fork", "spawn"]
STATES = 3
"""weights and two moments"""


class Blocks(nn.Module):
    """So many blocks, never called."""

    def __init__(self, parameters: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(HIDDEN, 4 * HIDDEN, bias=False), nn.Linear(4 * HIDDEN, HIDDEN, bias=False)
            )
            for _ in range(max(1, round(parameters / PER_BLOCK)))
        )


class BlocksManager(FSDPModelManager):
    """The manager of `Blocks`."""

    def __init__(self, parameters: float, world_size: int, rank: int) -> None:
        super().__init__(ShardingConfig(), world_size, rank, lambda: Blocks(parameters))
        self.setup_model_and_optimizer()

    def take_a_step(self) -> None:
        """Give the optimizer its moments."""
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.optimizer_step()

    def held_bytes(self) -> int:
        """Bytes of weights and moments on this rank."""
        return STATES * sum(local_shard(one).nbytes for one in self.model.parameters())

    def fingerprint(self) -> str:
        """A digest of the weights and moments on this rank."""
        seen = xxhash.xxh3_128()
        for parameter in self.model.parameters():
            state = self.optimizer.state[parameter]
            for one in (parameter, state["exp_avg"], state["exp_avg_sq"]):
                seen.update(local_shard(one).detach().contiguous().numpy().data)
        return seen.hexdigest()


def argument_parser(what: str, parameters: float) -> argparse.ArgumentParser:
    """The command line of a case."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("folder", type=Path, help="an empty folder for what the ranks write")
    parser.add_argument(
        "--parameters", type=float, default=parameters, help=f"of the model; {parameters:g}"
    )
    return parser


def arguments(what: str) -> argparse.Namespace:
    """The command line of a case of FSDP2."""
    parser = argument_parser(what, 200e6)
    parser.add_argument("--memory", action="store_true", help="measure memory instead of time")
    return parser.parse_args()


def start(
    work: Callable[..., dict[str, Any]],
    ranks: int,
    folder: Path,
    *given: object,
    method: Method = "fork",
) -> ProcessContext:
    """Run ``work(rank, ranks, *given)`` in new processes; `results` has what they return.

    They are forked from this one, which has imported what they need and computes nothing;
    ``"spawn"``: they import it again, as the processes of a run that is started again.
    """
    context = start_processes(  # type: ignore[no-untyped-call]
        _begin, (work, ranks, folder, given), nprocs=ranks, join=False, start_method=method
    )
    assert isinstance(context, ProcessContext)
    return context


def results(work: Callable[..., Any], ranks: int, folder: Path) -> list[dict[str, Any]]:
    """What every rank returned."""
    return [json.loads(_file(folder, work, ranks, rank).read_text()) for rank in range(ranks)]


def in_ranks(
    work: Callable[..., dict[str, Any]],
    ranks: int,
    folder: Path,
    *given: object,
    method: Method = "fork",
) -> list[dict[str, Any]]:
    """`start`, wait, `results`."""
    context = start(work, ranks, folder, *given, method=method)
    while not context.join():
        continue
    return results(work, ranks, folder)


@contextmanager
def timed_together() -> Iterator[list[float]]:
    """Append the seconds from when all ranks were here until all are done."""
    seconds: list[float] = []
    dist.barrier()
    begin = time.perf_counter()
    yield seconds
    dist.barrier()
    seconds.append(time.perf_counter() - begin)


def _begin(
    rank: int, work: Callable[..., dict[str, Any]], ranks: int, folder: Path, given: tuple[Any, ...]
) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    place = folder / f"{work.__name__}_{ranks}"
    dist.init_process_group("gloo", f"file://{place}", rank=rank, world_size=ranks)
    found = work(rank, ranks, *given)
    _file(folder, work, ranks, rank).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _file(folder: Path, work: Callable[..., Any], ranks: int, rank: int) -> Path:
    return folder / f"{work.__name__}_{ranks}_{rank}.json"


def own_core(rank: int) -> None:
    """Let this rank have a core of those there are to itself."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
