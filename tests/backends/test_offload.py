"""Offloading and loading at world size 1."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlinf_async.backends.base import OffloadedError
from rlinf_async.backends.fsdp.manager import FSDPModelManager
from rlinf_async.backends.fsdp.sharding import pinned_like
from tests.backends.fsdp_helpers import (
    backward,
    changed,
    config,
    copied,
    samples,
    set_up,
    train_steps,
)


def test_where_no_memory_can_be_pinned_other_memory_is_used_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    empty_like = torch.empty_like

    def refuse(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("the limit on locked memory is reached")
        return empty_like(*args, **kwargs)

    monkeypatch.setattr(torch, "empty_like", refuse)
    found = pinned_like(torch.ones(3, 4, dtype=torch.bfloat16))
    assert (found.shape, found.dtype, found.device.type) == ((3, 4), torch.bfloat16, "cpu")
    assert "memory cannot be pinned" in caplog.text
    assert "the limit on locked memory is reached" in caplog.text


def test_offloading_drops_the_gradients_and_refuses_to_step() -> None:
    manager = set_up(config())
    backward(manager)
    manager.offload_param_and_grad()
    assert all(p.grad is None for p in manager.model.parameters())
    with pytest.raises(OffloadedError, match=r"load_param_and_grad\(\) and load_optimizer\(\)"):
        manager.optimizer_step()
    manager.load_param_and_grad(0)
    assert manager.optimizer_step()[0] == 0.0


def test_offloaded_gradients_come_back_when_asked_for() -> None:
    manager, other = set_up(config()), set_up(config())
    backward(manager)
    backward(other)
    manager.offload_param_and_grad(offload_grad=True)
    manager.load_param_and_grad("cpu", load_grad=True)
    assert manager.optimizer_step()[0] == pytest.approx(other.optimizer_step()[0])


@pytest.mark.parametrize("offload_grad", [False, True])
def test_nothing_of_the_gradients_memory_stays_on_the_device(offload_grad: bool) -> None:
    manager = set_up(config())
    backward(manager)
    gradients = [one.grad for one in manager.model.parameters() if one.grad is not None]
    buffers = [weakref.ref(gradient._base) for gradient in gradients]
    del gradients
    manager.offload_param_and_grad(offload_grad=offload_grad)
    if offload_grad:  # as moving to another device does
        for parameter in manager.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    assert buffers
    assert all(buffer() is None for buffer in buffers)


def test_gradients_that_are_not_asked_for_do_not_come_back() -> None:
    manager = set_up(config())
    backward(manager)
    manager.offload_param_and_grad(offload_grad=True)
    manager.load_param_and_grad(load_grad=False)
    assert manager.optimizer_step()[0] == 0.0


def test_offloading_twice_and_loading_twice_is_harmless() -> None:
    manager = set_up(config())
    train_steps(manager, range(1))
    before = copied(manager)
    for method in (
        manager.offload_param_and_grad,
        manager.offload_optimizer,
        manager.load_param_and_grad,
        manager.load_optimizer,
    ):
        repeated: Callable[[], None] = method
        repeated()
        repeated()
    assert changed(before, manager) == set()
    assert not manager.param_offloaded
    assert not manager.optimizer_offloaded


def test_an_optimizer_without_moments_has_nothing_to_offload() -> None:
    manager = set_up(config())
    manager.offload_optimizer()
    assert not manager.optimizer_offloaded


def test_training_goes_on_after_offloading_as_if_nothing_had_been() -> None:
    manager, other = set_up(config()), set_up(config())
    train_steps(manager, range(2))
    train_steps(other, range(2))
    manager.offload_optimizer()
    manager.offload_param_and_grad()
    manager.load_param_and_grad()
    manager.load_optimizer()
    assert train_steps(manager, range(2, 4)) == train_steps(other, range(2, 4))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_offloading_moves_the_memory() -> None:
    manager = set_up(config(device="cuda"))
    train_steps_on_gpu(manager)
    manager.offload_param_and_grad()
    manager.offload_optimizer()
    assert {p.device.type for p in manager.model.parameters()} == {"cpu"}
    assert {t.device.type for s in manager.optimizer.state.values() for t in s.values()} == {"cpu"}
    manager.load_param_and_grad(0)
    manager.load_optimizer(0)
    train_steps_on_gpu(manager)
    assert {p.device.type for p in manager.model.parameters()} == {"cuda"}


def train_steps_on_gpu(manager: FSDPModelManager) -> None:
    batch = samples(0)
    evaluation = manager.model(batch.vectors.cuda(), batch.action.cuda())
    manager.backward(evaluation.value.mean())
    assert math.isfinite(manager.optimizer_step()[0])
