"""A small run that is the same at any world size, and processes to run it in."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlinf_async.algorithms.config import LossConfig
from rlinf_async.backends.fsdp.config import FSDPConfig, PPOConfig
from rlinf_async.backends.fsdp.manager import FSDPModelManager
from rlinf_async.backends.fsdp.ppo import FlatBatch, choose_gradient
from rlinf_async.backends.policies.config import PolicyConfig
from tests.backends.ranks import forking, start_ranks

POLICY = PolicyConfig(observation_size=5, action_size=3, hidden_sizes=(7, 6))
LOSS = LossConfig(entropy_coefficient=0.01, value_clip=0.3)


def in_processes(
    work: Callable[..., None],
    world_size: int,
    folder: Path,
    *arguments: object,
) -> list[Any]:
    """Run ``work(rank, world_size, folder, *arguments)`` in every rank; return what each saved."""
    rendezvous = folder / f"rendezvous_{work.__name__}_{world_size}"
    start_ranks(_start, (work, world_size, folder, rendezvous, arguments), world_size)
    return [load_result(folder, rank) for rank in range(world_size)]


def exit_codes(work: Callable[..., None], world_size: int, *arguments: object) -> list[int | None]:
    """Run ``work(rank, *arguments)`` in every rank, also when one is killed; how each ended."""
    context = forking()
    made = [
        context.Process(target=work, args=(rank, *arguments), daemon=True)
        for rank in range(world_size)
    ]
    for one in made:
        one.start()
    for one in made:
        one.join(200)
    return [one.exitcode for one in made]


def save_result(folder: Path, rank: int, result: object) -> None:
    torch.save(result, folder / f"result_{rank}.pt")


def load_result(folder: Path, rank: int) -> Any:
    return torch.load(folder / f"result_{rank}.pt", weights_only=True)


def _start(
    rank: int,
    work: Callable[..., None],
    world_size: int,
    folder: Path,
    rendezvous: Path,
    arguments: tuple[object, ...],
) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # megatron-core takes any that it sees
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=world_size)
    try:
        # A warning in a child would be lost otherwise.
        warnings.simplefilter("error")
        work(rank, world_size, folder, *arguments)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def set_up(cfg: FSDPConfig, world_size: int = 1, rank: int = 0) -> FSDPModelManager:
    torch.manual_seed(3)
    manager = FSDPModelManager(cfg, world_size, rank)
    manager.setup_model_and_optimizer()
    return manager


def samples(step: int, count: int = 12) -> FlatBatch:
    """The global minibatch of one optimizer step."""
    generator = torch.Generator().manual_seed(100 + step)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return FlatBatch(
        observation=draw(count, 5),
        action=draw(count, 3),
        log_prob=draw(count) - 4.0,
        value=draw(count),
        advantage=draw(count),
        returns=draw(count),
    )


def train_steps(
    manager: FSDPModelManager, steps: range, micro_batches: int = 1, *, fused: bool = False
) -> list[list[float]]:
    """Take optimizer steps on this rank's share; return metrics and grad norm of each."""
    gradient = choose_gradient(manager, PPOConfig(loss=LOSS, fused=fused))
    history: list[list[float]] = []
    for step in steps:
        share = slice(manager.rank, None, manager.world_size)
        whole = samples(step)
        mine = whole.take(torch.arange(len(whole.action))[share])
        size = len(mine.action) // micro_batches
        pieces = list(mine.split(size))
        metrics = torch.zeros(5)
        for index, piece in enumerate(pieces):
            with manager.before_micro_batch(manager.model, index == len(pieces) - 1):
                metrics += gradient(piece, 1.0 / micro_batches) / micro_batches
        if manager.world_size > 1:
            dist.all_reduce(metrics, group=manager.group)
            metrics /= manager.world_size
        grad_norm, _ = manager.optimizer_step()
        history.append([*metrics.tolist(), grad_norm])
    return history


def config(**fields: Any) -> FSDPConfig:
    return FSDPConfig(policy=POLICY, **fields)


def copied(manager: FSDPModelManager) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in manager.get_model_state_dict().items()}


def backward(manager: FSDPModelManager, scale: float = 1.0) -> None:
    batch = samples(0)
    evaluation = manager.model(batch.observation, batch.action)
    manager.backward(scale * (evaluation.log_prob.mean() + evaluation.value.mean()))


def changed(before: dict[str, Tensor], manager: FSDPModelManager) -> set[str]:
    now = manager.get_model_state_dict()
    return {name for name in before if not torch.equal(before[name], now[name])}
