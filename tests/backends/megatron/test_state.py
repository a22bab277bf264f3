"""Moments and step counters, where each Adam that Megatron may take keeps them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("megatron.core")


def optimizer_of(*parameters: nn.Parameter) -> Any:
    """As Megatron's has PyTorch's, with a group for each parameter."""
    groups = [{"params": [one]} for one in parameters]
    return SimpleNamespace(optimizer=torch.optim.AdamW(groups, lr=1e-3))


def load(optimizer: Any, parameter: nn.Parameter, moments: dict[str, Tensor]) -> None:
    """As a checkpoint is loaded."""
    from rlinf_async.backends.megatron.weights import set_state

    set_state(optimizer, parameter, {"param": torch.ones(3), **moments}, 7)


def rescale(optimizer: Any, parameter: nn.Parameter, moments: dict[str, Tensor]) -> None:
    """As another strategy takes them."""
    from rlinf_async.backends.megatron.shards import set_moments
    from rlinf_async.backends.megatron.weights import HeldParameter

    given = {kind: {"one": moment} for kind, moment in moments.items()}
    set_moments([HeldParameter("one", parameter, ())], optimizer, given, 7.0)


@pytest.mark.parametrize("give", [load, rescale])
@pytest.mark.parametrize("fused", [False, True], ids=["PyTorch's", "fused"])
def test_the_step_counter_is_set_where_bias_correction_reads_it(
    monkeypatch: pytest.MonkeyPatch, give: Any, *, fused: bool
) -> None:
    from rlinf_async.backends.megatron.cpu import of_megatron

    monkeypatch.setattr(of_megatron("optimizer"), "USING_PYTORCH_OPTIMIZER", not fused)
    one, other = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    optimizer = optimizer_of(one, other)
    moments = {"exp_avg": torch.full((3,), 0.5), "exp_avg_sq": torch.full((3,), 0.25)}
    give(optimizer, one, moments)
    state = optimizer.optimizer.state[one]
    first, second = optimizer.optimizer.param_groups
    for kind, moment in moments.items():
        assert torch.equal(state[kind], moment)
    if fused:
        assert first["step"] == 7
        assert isinstance(first["step"], int)
        assert "step" not in state
    else:
        assert state["step"] == 7.0
        assert "step" not in first
    assert "step" not in second
    assert not optimizer.optimizer.state[other]


@pytest.mark.parametrize("fused", [False, True], ids=["PyTorch's", "fused"])
def test_a_checkpoint_without_moments_makes_the_optimizer_begin_anew(
    monkeypatch: pytest.MonkeyPatch, *, fused: bool
) -> None:
    from rlinf_async.backends.megatron.cpu import of_megatron

    monkeypatch.setattr(of_megatron("optimizer"), "USING_PYTORCH_OPTIMIZER", not fused)
    one = nn.Parameter(torch.zeros(3))
    optimizer = optimizer_of(one)
    load(optimizer, one, {"exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)})
    load(optimizer, one, {})
    assert not optimizer.optimizer.state[one]
    assert optimizer.optimizer.param_groups[0].get("step", 0) == 0
