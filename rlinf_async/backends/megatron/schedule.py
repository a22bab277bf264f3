"""Forward and backward passes of a global batch, in Megatron's order for pipeline stages.

::

    stage 0   F0 F1 F2 B0 F3 B1 ...        each stage takes the micro-batches in the same order;
    stage 1      F0 B0 F1 B1 ...           the last one computes log-probs and the loss

A micro-batch is pulled when the schedule comes to it, so it may still be on its way when the first
one is computed. With several stages their number must be known before: how many forward passes a
stage runs ahead depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from rlinf_async.backends.language_training.packing import Packed
from rlinf_async.backends.language_training.token_statistics import TokenStatistics
from rlinf_async.backends.megatron.forward import SelectRows, run_stage, statistics_of
from rlinf_async.backends.megatron.grid import Grid
from rlinf_async.backends.megatron.library import of_megatron


class Work(NamedTuple):
    """One micro-batch, on every rank of a model-parallel group."""

    packed: Packed
    answer: Callable[[TokenStatistics], tuple[Tensor, Any]]
    """loss to differentiate, and what is to be returned; called on the last stage"""
    is_last: bool
    of: int | None
    """micro-batches of the global batch; stages of a pipeline have to know"""


class Schedule:
    """Runs the stage of this rank."""

    def __init__(self, model: nn.Module, stage: nn.Module, grid: Grid, vocabulary: int) -> None:
        """``model`` is ``stage``, or wraps it (for gradients)."""
        self._model = model
        self._stage = stage
        self._grid = grid
        self._vocabulary = vocabulary
        last: Any = stage
        self._select = SelectRows.of(last.output_layer, grid) if grid.is_last_stage else None

    def train(self, work: Iterable[Work]) -> list[Any]:
        """Run the micro-batches of a global batch; return the answers, on the last stage.
        Collective.

        Gradients are added to those that are there, undivided; they are reduced over data ranks,
        tied embeddings and sequence-parallel ranks.
        """
        if self._grid.strategy.pp == 1:
            return self._train_one_stage(work)
        arriving = iter(work)
        first = next(arriving)
        assert first.of is not None
        return self._pipeline(chain([first], arriving), first.of, backward=True)

    def infer(self, work: Iterable[Work], count: int) -> list[Any]:
        """Run ``count`` micro-batches without gradients; return the answers, on the last stage.
        Collective."""
        with torch.no_grad():
            if self._grid.strategy.pp == 1:
                return [self._compute(one)[1] for one in work]
        return self._pipeline(work, count, backward=False)

    def _train_one_stage(self, work: Iterable[Work]) -> list[Any]:
        """One after the other as they arrive, however many there are."""
        answers, model, config = [], self._model, cast(Any, self._stage.config)
        for one in work:
            waits = nullcontext() if one.is_last else cast(Any, model).no_sync()
            with waits:
                loss, answer = self._compute(one)
                torch.autograd.backward(loss)
            answers.append(answer)
        config.finalize_model_grads_func([model], None, pg_collection=self._grid.groups)
        return answers

    def _compute(self, one: Work) -> tuple[Tensor, Any]:
        logits = run_stage(self._model, self._stage, one.packed, self._grid, self._select)
        return one.answer(statistics_of(logits, one.packed, self._vocabulary, self._grid))

    def _pipeline(self, work: Iterable[Work], count: int, *, backward: bool) -> list[Any]:
        schedules = of_megatron("pipeline_parallel.schedules")
        run = schedules.forward_backward_pipelining_without_interleaving
        config: Any = self._stage.config
        p2p = of_megatron("pipeline_parallel.p2p_communication")
        communicator = p2p.P2PCommunicator(self._grid.groups.pp, config)
        with torch.set_grad_enabled(backward):
            found: list[Any] = run(
                forward_step_func=self._step,
                data_iterator=iter(work),
                model=self._model,
                num_microbatches=count,
                seq_length=1,  # the real ones are exchanged between the stages
                micro_batch_size=1,
                forward_only=not backward,
                p2p_communicator=communicator,
                pg_collection=self._grid.groups,
            )
        return found

    def _step(self, work: Iterator[Work], model: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        one = next(work)
        output = run_stage(model, self._stage, one.packed, self._grid, self._select)
        return output, partial(self._answer, one)

    def _answer(self, work: Work, logits: Tensor) -> tuple[Tensor, Tensor, Any]:
        found = statistics_of(logits, work.packed, self._vocabulary, self._grid)
        loss, answer = work.answer(found)
        return loss, torch.zeros([], dtype=torch.int), answer
