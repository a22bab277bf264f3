"""A small language model, trained the same under any strategy."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlinf_async.backends.base import OptimizerConfig
from rlinf_async.backends.language_training.objective import PackedTokens, TokenStatistics
from rlinf_async.backends.megatron.config import Architecture, architecture_of
from rlinf_async.backends.megatron.forward import read_statistics
from rlinf_async.backends.megatron.grid import Grid, make_grid
from rlinf_async.backends.megatron.manager import Sharding, make_optimizer, with_gradients
from rlinf_async.backends.megatron.model import Options, build_stage
from rlinf_async.backends.megatron.schedule import Schedule, Work
from rlinf_async.backends.megatron.weights import HeldParameter, held_weights, load_weights
from rlinf_async.parallel import Strategy

VOCABULARY = 101
"""a prime: no number of tensor ranks divides it"""


def configuration(kind: str, *, tied: bool) -> dict[str, Any]:
    """A Hugging Face configuration."""
    return {
        "model_type": kind,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
        "sliding_window": None,
    }


def hugging_face(kind: str, *, tied: bool) -> Any:
    """The same model on every rank, in transformers."""
    transformers: Any = importlib.import_module("transformers")
    fields = configuration(kind, tied=tied)
    described = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(described, dtype=torch.float32).eval()
    with torch.no_grad():
        for one in model.parameters():  # norms too: those of 1 would hide a mistake
            one.add_(0.02 * torch.randn_like(one))
    return model


class Stage(NamedTuple):
    """This rank's part of a model."""

    architecture: Architecture
    grid: Grid
    chunks: list[Any]
    held: list[HeldParameter]


def stage_of(model: Any, strategy: Strategy, options: Options | None = None) -> Stage | None:
    """Build this rank's stage; None on an idle rank. Collective."""
    grid = make_grid(strategy)
    if grid.place is None:
        return None
    architecture = architecture_of(model.config.to_dict())
    chunks = build_stage(architecture, grid, options or Options())
    held = held_weights(chunks, architecture, grid)
    load_weights(held, model.state_dict().__getitem__)
    return Stage(architecture, grid, chunks, held)


def samples(step: int, count: int = 8) -> list[Tensor]:
    """Token ids of the samples of one global batch."""
    generator = torch.Generator().manual_seed(1000 + step)
    lengths = torch.randint(4, 12, (count,), generator=generator).tolist()
    return [torch.randint(0, VOCABULARY, (one,), generator=generator) for one in lengths]


def packed(ids: list[Tensor]) -> PackedTokens:
    """Every token but the first of each sample is predicted."""
    lengths = [len(one) - 1 for one in ids]
    total = sum(lengths)
    return PackedTokens(
        torch.cat([one[:-1] for one in ids])[None],
        torch.cat([torch.arange(one) for one in lengths])[None],
        lengths,
        torch.arange(total),
        torch.cat([one[1:] for one in ids]),
        torch.full((total,), 1.25),
    )


def statistics(stage: Stage, ids: list[Tensor]) -> list[Tensor]:
    """Log-probs and entropies of a micro-batch; empty but on the last stage. Collective."""
    read = read_statistics(VOCABULARY, stage.grid)
    schedule = Schedule(stage.chunks, stage.chunks, stage.grid, read)

    def answer(found: TokenStatistics) -> tuple[Tensor, Any]:
        return found.log_prob.sum(), [found.log_prob, found.entropy]

    found = schedule.infer(iter([Work(packed(ids), answer, True, 1)]), 1)
    return found[0] if found else []


def train(stage: Stage, sharding: Sharding, steps: int) -> list[list[float]]:
    """Train; return loss and norm of the gradients of each step. Collective over active ranks."""
    models = with_gradients(stage.chunks, stage.grid, sharding)
    config = OptimizerConfig(lr=1e-3, eps=1e-8, max_grad_norm=1.0)
    optimizer = make_optimizer(models, stage.grid, config, sharding)
    schedule = Schedule(models, stage.chunks, stage.grid, read_statistics(VOCABULARY, stage.grid))
    place, strategy = stage.grid.place, stage.grid.strategy
    assert place is not None
    history = []
    for step in range(steps):
        everything = samples(step)
        units = sum(len(one) - 1 for one in everything)
        mine = everything[place.dp :: strategy.dp]
        micro_batches = [mine[at : at + 2] for at in range(0, len(mine), 2)]
        for model in models:
            model.zero_grad_buffer()
        optimizer.zero_grad()
        found = schedule.train(_work(micro_batches))
        for model in models:
            model.scale_gradients(1.0 / units)
        _, norm, _ = optimizer.step()
        history.append([_sum(stage.grid, found) / units, float(norm)])
    return history


def _work(micro_batches: list[list[Tensor]]) -> Iterator[Work]:
    count = len(micro_batches)
    for number, ids in enumerate(micro_batches, 1):
        yield Work(packed(ids), _loss, number == count, count)


def _loss(found: TokenStatistics) -> tuple[Tensor, Any]:
    loss = -(found.log_prob.sum() + 0.01 * found.entropy.sum())
    return loss, loss.detach().clone()


def _sum(grid: Grid, losses: list[Tensor]) -> float:
    """The loss of all data ranks, on every stage."""
    total = torch.stack(losses).sum() if losses else torch.zeros(())
    dist.all_reduce(total, group=grid.data)
    last = dist.get_process_group_ranks(grid.groups.pp)[-1]
    dist.broadcast(total, last, group=grid.groups.pp)
    return float(total)
