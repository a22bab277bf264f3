"""RMSNorm for Megatron's layers: PyTorch's, also where the sequence is cut over tensor ranks."""

from __future__ import annotations

from typing import Any

from torch import nn


class Norm(nn.RMSNorm):
    """A norm, made as Megatron's layers make one.

    With sequence parallelism each tensor rank sees a part of the tokens, so their gradients of the
    norm have to be added up: Megatron does that for parameters with the mark that is set here.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        if config.sequence_parallel:
            self.weight.sequence_parallel = True  # type: ignore[attr-defined]
