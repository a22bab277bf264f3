"""Memory for Megatron's buffers of parameters and gradients.

Megatron makes them with ``torch.zeros``, whose first touch of every page is most of what building a
part of a model costs on a CPU. Here they are memory of the system that is 0 without being touched;
or those of the part that is being replaced, where parameters lie in them in the same places.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rlinf_async.backends.megatron.library import of_megatron
from rlinf_async.backends.reshard.reserved import untouched_zeros


@contextmanager
def buffers_in(reused: Iterable[Tensor] = ()) -> Iterator[None]:
    """Let Megatron make its buffers in these, in this order, and in new ones where there are none.

    A reused buffer keeps its content; it must have the size and dtype that is asked for.
    """
    module = of_megatron("distributed.param_and_grad_buffer")
    before = module.torch
    module.torch = _Torch(reused)
    try:
        yield
    finally:
        module.torch = before


def buffers_of(models: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the buffers of Megatron's wrapped chunks, in the order in which it makes them."""
    for model in models:
        for buffer in (*model.buffers, *model.expert_parallel_buffers):
            yield from (one for one in (buffer.param_data, buffer.grad_data) if one is not None)


class _Torch:
    """torch, as that one module of Megatron sees it."""

    def __init__(self, reused: Iterable[Tensor]) -> None:
        self._reused = list(reused)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(
        self, size: Any, *, dtype: torch.dtype | None = None, device: Any, **options: Any
    ) -> Tensor:
        """A buffer of ``size`` elements."""
        if not isinstance(size, int) or dtype is None:
            return torch.zeros(size, dtype=dtype, device=device, **options)
        if self._reused:
            found = self._reused.pop(0)
            if (found.numel(), found.dtype) != (size, dtype):
                raise ValueError(
                    f"a buffer of {found.numel()} {found.dtype} cannot hold {size} {dtype}"
                )
            return found
        return untouched_zeros((size,), dtype, torch.device(device))
