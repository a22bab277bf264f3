"""Observations as tensors: one vector each, or their fields by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from rlinf_async.messages.spaces import Seen

Observed = Tensor | dict[str, Tensor]
"""``[N, D]``, or the fields of structured observations, ``[N, ...]`` each"""


def to_tensors(seen: Seen, device: torch.device) -> Observed:
    """Observations ``[N, D]`` or structured ``[N]`` on ``device``; images stay uint8."""
    names = seen.dtype.names
    if names is None:
        return _tensor(seen, device)
    # The rows of a field lie apart from each other: they are brought together in one copy.
    # (`np.ascontiguousarray` makes none for a single row, whose strides torch refuses.)
    return {name: _tensor(seen[name].copy(order="C"), device) for name in names}


def each(observed: Observed, function: Callable[[Tensor], Tensor]) -> Observed:
    """Apply ``function`` to the tensor, or to each field."""
    if isinstance(observed, Tensor):
        return function(observed)
    return {name: function(field) for name, field in observed.items()}


def _tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    # Arrays off the wire are read-only, which torch does not know how to respect.
    return torch.from_numpy(array if array.flags.writeable else array.copy()).to(device)
