"""What a policy says of the tokens of a micro-batch."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class TokenStatistics(NamedTuple):
    """Both ``[N]``, float32."""

    log_prob: Tensor
    entropy: Tensor
