from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rlinf_async.backends.fsdp.adamw import PlainAdamW


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def groups(model: nn.Module, lr: float, decay: float) -> list[dict[str, Any]]:
    first, *others = model.parameters()
    return [
        {"params": [first], "lr": lr, "weight_decay": 0.0},
        {"params": others, "lr": 3 * lr, "weight_decay": decay},
    ]


def draw_gradients(model: nn.Module, generator: torch.Generator, *, missing: bool) -> None:
    for index, parameter in enumerate(model.parameters()):
        drawn = torch.randn(parameter.shape, generator=generator)
        parameter.grad = None if missing and index == 1 else drawn


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 1000),
    lr=st.sampled_from([1e-4, 1e-1]),
    decay=st.sampled_from([0.0, 0.1]),
    betas=st.sampled_from([(0.9, 0.999), (0.0, 0.5)]),
    missing=st.lists(st.booleans(), min_size=1, max_size=6),
)
def test_a_step_is_that_of_torch_to_the_last_bit(
    seed: int, lr: float, decay: float, betas: tuple[float, float], missing: list[bool]
) -> None:
    ours, theirs = network(seed), network(seed)
    optimizers = [
        made(groups(model, lr, decay), betas=betas, eps=1e-5, fused=True)
        for made, model in ((PlainAdamW, ours), (torch.optim.AdamW, theirs))
    ]
    for step, one in enumerate(missing):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            draw_gradients(model, torch.Generator().manual_seed(seed + step), missing=one)
            optimizer.step()
    for left, right in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(left, right)
    state, expected = (one.state_dict()["state"] for one in optimizers)
    assert state.keys() == expected.keys()
    for number, values in expected.items():
        for name, value in values.items():
            assert torch.equal(state[number][name], value), name


def test_hooks_run_once_a_step_and_before_it_changes_anything() -> None:
    model = network(0)
    optimizer = PlainAdamW(model.parameters(), lr=0.1, fused=True)
    torch.optim.AdamW(network(1).parameters())  # torch patches the class when it makes one
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)  # and this, the step of ours
    [bias] = [one for name, one in model.named_parameters() if name == "2.bias"]
    seen: list[tuple[str, torch.Tensor]] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(("before", bias.detach().clone())))
    optimizer.register_step_post_hook(lambda *_: seen.append(("after", bias.detach().clone())))
    first = bias.detach().clone()
    draw_gradients(model, torch.Generator().manual_seed(0), missing=False)
    optimizer.step()
    assert [name for name, _ in seen] == ["before", "after"]
    assert torch.equal(seen[0][1], first)
    assert torch.equal(seen[1][1], bias)
    assert not torch.equal(bias, first)


def test_a_closure_is_refused() -> None:
    model = network(0)
    optimizer = PlainAdamW(model.parameters(), fused=True)
    with pytest.raises(ValueError, match="closure"):
        optimizer.step(lambda: 0.0)


def test_only_plain_parameters_are_covered() -> None:
    assert PlainAdamW.covers(network(0))
    assert not PlainAdamW.covers(network(0).to(torch.bfloat16))
    assert not PlainAdamW.covers(network(0).to("meta"))
