"""Memory for Megatron's buffers of parameters and gradients.

Megatron makes them with ``torch.zeros``, whose first touch of every page is most of what building a
part of a model costs on a CPU. Here those of gradients are memory of the system that is 0 without
being touched, and those of parameters memory that parameters of earlier strategies had, if there is
some; or all are those of the part that is being replaced, where parameters lie in them in the same
places.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rlinf_async.backends.megatron.library import of_megatron
from rlinf_async.backends.reshard.address_space import without
from rlinf_async.backends.reshard.reserved import Empty, untouched_zeros


@contextmanager
def buffers_in(
    reused: Iterable[Tensor] = (), for_parameters: Empty | None = None
) -> Iterator[None]:
    """Let Megatron make its buffers in these, in this order, and in new ones where there are none.

    A reused buffer keeps its content; it must have the size and dtype that is asked for. Where
    parameters have buffers, each before that of its gradients, ``for_parameters`` makes them: what
    is between parameters is for `zero_gaps` then.
    """
    module = of_megatron("distributed.param_and_grad_buffer")
    before = module.torch
    module.torch = _Torch(reused, for_parameters)
    try:
        yield
    finally:
        module.torch = before


def buffers_of(models: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the buffers of Megatron's wrapped chunks, in the order in which it makes them."""
    for model in models:
        for buffer in (*model.buffers, *model.expert_parallel_buffers):
            yield from (one for one in (buffer.param_data, buffer.grad_data) if one is not None)


def zero_gaps(models: Iterable[Any]) -> None:
    """Zero what is between the parameters in their buffers, as Megatron has it."""
    for model in models:
        for buffer in (*model.buffers, *model.expert_parallel_buffers):
            if buffer.param_data is not None:
                places = (place[:2] for place in buffer.param_index_map.values())
                for low, high in without(0, buffer.param_data.numel(), places):
                    buffer.param_data[low:high].zero_()


class _Torch:
    """torch, as that one module of Megatron sees it."""

    def __init__(self, reused: Iterable[Tensor], for_parameters: Empty | None) -> None:
        self._reused = list(reused)
        self._turns = itertools.cycle(
            (untouched_zeros,) if for_parameters is None else (for_parameters, untouched_zeros)
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(
        self, size: Any, *, dtype: torch.dtype | None = None, device: Any, **options: Any
    ) -> Tensor:
        """A buffer of ``size`` elements."""
        if not isinstance(size, int) or dtype is None:
            return torch.zeros(size, dtype=dtype, device=device, **options)
        make = next(self._turns)
        if self._reused:
            found = self._reused.pop(0)
            if (found.numel(), found.dtype) != (size, dtype):
                raise ValueError(
                    f"a buffer of {found.numel()} {found.dtype} cannot hold {size} {dtype}"
                )
            return found
        return make((size,), dtype, torch.device(device))
