"""The device of these tests, what of its memory this process holds, and jobs on it."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

DEVICE: Final = "cuda"


def held() -> int:
    """Bytes that tensors of this process take on the device; torch keeps no others for itself."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def assert_near(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float
) -> None:
    """Tensors of the same names, wherever they are, that differ by at most the tolerance."""
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(
            tensor.cpu(), expected[name].cpu(), atol=tolerance, rtol=0.0, msg=name
        )
