"""Forward and backward passes of a global batch, in Megatron's order for pipeline stages.

::

    stage 0   F0 F1 F2 B0 F3 B1 ...        each stage takes the micro-batches in the same order;
    stage 1      F0 B0 F1 B1 ...           the last one computes log-probs and the loss

A micro-batch is pulled when the schedule comes to it, so it may still be on its way when the first
one is computed. With several stages their number must be known before: how many forward passes a
stage runs ahead depends on it. With interleaving (``virtual_stages`` model chunks on each stage)
it is made a multiple of the number of stages.

Where an error comes in place of a micro-batch, it comes on all stages. One stage alone raises it.
Several first let what is in flight come to its end, all in the same way: passes over a single token
stand for the micro-batches that are missing. `Arriving` does both, and lets no stage wait in a
transfer of activations, which has a limit, for samples, which have none.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import tee
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from rlinf_async.backends.language_training.objective import PackedTokens, single_token
from rlinf_async.backends.megatron.cpu import of_megatron
from rlinf_async.backends.megatron.forward import Read, SelectRows, padded, run_stage
from rlinf_async.backends.megatron.grid import Grid


class Work(NamedTuple):
    """One micro-batch, on every rank of a model-parallel group."""

    packed: PackedTokens
    answer: Callable[[Any], tuple[Tensor, Any]]
    """function of what was read from the output: returns the loss to differentiate and the result;
    called on the last stage"""
    is_last: bool
    of: int | None
    """micro-batches of the global batch; stages of a pipeline have to know"""


class Schedule:
    """Runs the stage of this rank."""

    def __init__(
        self, models: Sequence[nn.Module], chunks: Sequence[nn.Module], grid: Grid, read: Read
    ) -> None:
        """``models`` are the chunks of the stage, or wrap them (for gradients); ``read`` takes log-
        probs or values from what the last one computes."""
        self._models = list(models)
        self._chunks = list(chunks)
        self._grid = grid
        self._read = read
        last: Any = chunks[-1]
        self._select = SelectRows.of(last.output_layer, grid) if grid.is_last_stage else None
        self._config: Any = last.config

    def train(self, work: Iterable[Work]) -> list[Any]:
        """Run the micro-batches of a global batch; return the answers, on the last stage.
        Collective.

        Gradients have to be 0 before. They are undivided, and reduced over data ranks, tied
        embeddings and sequence-parallel ranks.
        """
        if self._grid.strategy.pp == 1:
            return self._train_one_stage(work)
        arriving = Arriving(work, self._device)
        return self._pipeline(arriving, arriving.count, backward=True)

    def infer(self, work: Iterable[Work], count: int) -> list[Any]:
        """Run ``count`` micro-batches without gradients; return the answers, on the last stage.
        Collective."""
        with torch.no_grad():
            if self._grid.strategy.pp == 1:
                return [self._compute(one)[1] for one in work]
        return self._pipeline(Arriving(work, self._device), count, backward=False)

    @property
    def _device(self) -> torch.device:
        return next(self._chunks[0].parameters()).device

    def _train_one_stage(self, work: Iterable[Work]) -> list[Any]:
        """One after the other as they arrive, however many there are."""
        answers, model = [], self._models[0]
        for one in work:
            waits = nullcontext() if one.is_last else cast(Any, model).no_sync()
            with waits:
                loss, answer = self._compute(one)
                torch.autograd.backward(loss)
            answers.append(answer)
        self._config.finalize_model_grads_func([model], None, pg_collection=self._grid.groups)
        return answers

    def _compute(self, one: Work) -> tuple[Tensor, Any]:
        model, chunk = self._models[0], self._chunks[0]
        output = run_stage(model, chunk, one.packed, self._grid, self._select)
        return one.answer(self._read(output, one.packed))

    def _pipeline(self, work: Arriving, count: int, *, backward: bool) -> list[Any]:
        """Raises the error that came in place of a micro-batch, if one did."""
        schedules = of_megatron("pipeline_parallel.schedules")
        size = len(self._models)
        if size == 1:
            run = schedules.forward_backward_pipelining_without_interleaving
        else:
            run = schedules.forward_backward_pipelining_with_interleaving
        # Interleaved stages take the micro-batches in groups of as many as there are stages.
        missing = -count % self._grid.strategy.pp if size > 1 else 0
        iterators = make_data_iterator_list(work, vpp_size=size)
        with torch.set_grad_enabled(backward):
            found: list[Any] = run(
                forward_step_func=self.step,
                data_iterator=iterators if size > 1 else iterators[0],
                model=self._models if size > 1 else self._models[0],
                num_microbatches=count + missing,
                seq_length=1,  # the real ones are exchanged between the stages
                micro_batch_size=1,
                forward_only=not backward,
                p2p_communicator=self._communicator(work),
                pg_collection=self._grid.groups,
            )
        if work.error is not None:
            raise work.error
        return found[:count]

    def _communicator(self, work: Arriving) -> Any:
        """Return Megatron's transfers between stages; those that receive activations first wait
        until this rank has the micro-batch.

        Passes come in groups: of as many micro-batches as there are stages, with each chunk of the
        stage in turn.
        """
        p2p = of_megatron("pipeline_parallel.p2p_communication")
        communicator = p2p.P2PCommunicator(self._grid.groups.pp, self._config)
        place, stages, chunks = self._grid.place, self._grid.strategy.pp, len(self._models)
        assert place is not None
        if not place.stage:  # it computes nothing before it has pulled the micro-batch
            return communicator
        passes, communicate = itertools.count(), communicator._communicate

        def after_arrival(*, recv_prev: bool, **options: Any) -> Any:
            if recv_prev:
                number = next(passes)
                work.wait_for(number // (stages * chunks) * stages + number % stages)
            return communicate(recv_prev=recv_prev, **options)

        communicator._communicate = after_arrival
        return communicator

    def step(self, work: Iterator[Work], model: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        """Compute the next micro-batch; return the output of this model chunk, and what makes loss
        and answer of it on the last stage. What Megatron's schedule calls."""
        one = next(work)
        at = next(at for at, known in enumerate(self._models) if known is model)
        select = self._select if at == len(self._models) - 1 else None
        output = run_stage(model, self._chunks[at], one.packed, self._grid, select)
        return output, partial(self._answer, one)

    def _answer(self, work: Work, output: Tensor) -> tuple[Tensor, Tensor, Any]:
        loss, answer = work.answer(self._read(output, work.packed))
        return loss, torch.zeros([], dtype=torch.int), answer


class Arriving(Iterator[Work]):
    """Micro-batches of a pipeline; once there are no more, or an error came instead of one, those
    of a single token, whose answers nobody takes."""

    def __init__(self, work: Iterable[Work], device: torch.device) -> None:
        self._work, self._device = iter(work), device
        self._ahead: deque[Work] = deque()
        self._pulled = 0
        self.error: Exception | None = None
        """came in place of a micro-batch"""

    def __next__(self) -> Work:
        if not self._ahead:
            self._pull()
        return self._ahead.popleft()

    @property
    def count(self) -> int:
        """Number of micro-batches; known with the first one."""
        self.wait_for(0)
        return self._ahead[0].of or 1

    def wait_for(self, number: int) -> None:
        """Wait until ``number`` micro-batches, and one more, have arrived."""
        while self._pulled <= number:
            self._pull()

    def _pull(self) -> None:
        self._pulled += 1
        one = None
        if self.error is None:
            try:
                one = next(self._work, None)
            except Exception as error:
                self.error = error
        # In place of one that is missing: a single token, without a gradient.
        self._ahead.append(one or Work(single_token(self._device), _nothing, True, None))


def make_data_iterator_list(
    data_iterator: Iterator[Work], padding: bool = False, vpp_size: int = 1, multiple: int = 1
) -> list[Iterator[Work]]:
    """Return an iterator for each model chunk: all of them yield every micro-batch.

    A micro-batch is pulled when the first chunk comes to it, and kept until the last one has it, so
    the iterator may be a live channel's.

    Args:
        data_iterator: micro-batches, possibly still arriving.
        padding: pad each row of tokens to a multiple of ``multiple``.
        vpp_size: number of model chunks of this stage.
        multiple: number of tensor ranks, which share the tokens with sequence parallelism.
    """
    if padding:
        data_iterator = (one._replace(packed=padded(one.packed, multiple)) for one in data_iterator)
    return list(tee(data_iterator, vpp_size))


def _nothing(found: Any) -> tuple[Tensor, Any]:
    first: Tensor = found if isinstance(found, Tensor) else found[0]
    return first.sum() * 0.0, None
