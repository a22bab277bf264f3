"""Weights and moments of a rank's parameters, wherever Megatron's optimizer keeps them.

With the distributed optimizer a data rank has a range of each parameter's elements, in float32;
otherwise the moments of whole parameters, and with bfloat16 their float32 copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from rlinf_async.backends.megatron.library import of_megatron
from rlinf_async.backends.reshard.reserved import Empty, untouched

MOMENTS: Final = ("exp_avg", "exp_avg_sq")


class Kept(NamedTuple):
    """What the optimizer of this rank has of a parameter."""

    optimizer: torch.optim.Optimizer
    main: Tensor
    """the elements that it steps, float32"""
    start: int
    """of them in the flat parameter"""

    @property
    def state(self) -> dict[str, Any]:
        """The moments; empty before the first step."""
        found: dict[str, Any] = self.optimizer.state[self.main]
        return found


def kept_of(optimizer: Any, parameter: nn.Parameter) -> Kept | None:
    """Return what this rank's optimizer has of a parameter; None: other data ranks have all."""
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        places = getattr(one, "model_param_gbuf_map", None)
        if places is not None:
            if parameter in one.model_param_group_index_map:
                main = one._get_main_param_and_optimizer_states(parameter)["param"]
                start = one._get_model_param_range_map(parameter)["param"].start
                return Kept(one.optimizer, main, start)
            continue
        main = getattr(parameter, "main_param", parameter)
        if any(main is held for group in one.optimizer.param_groups for held in group["params"]):
            return Kept(one.optimizer, main, 0)
    return None


def set_state(
    optimizer: Any,
    parameter: nn.Parameter,
    whole: Mapping[str, Tensor],
    steps: int,
    empty: Empty = untouched,
) -> None:
    """Take a whole flat parameter, and its moments if there are any, as this rank keeps them;
    ``empty`` makes room for these."""
    with torch.no_grad():
        parameter.view(-1).copy_(whole["param"])
    kept = kept_of(optimizer, parameter)
    if kept is None:
        return
    end = kept.start + kept.main.numel()
    with torch.no_grad():
        kept.main.view(-1).copy_(whole["param"][kept.start : end])
    moments = {
        name: empty(kept.main.shape, torch.float32, kept.main.device).copy_(
            whole[name][kept.start : end].view(kept.main.shape)
        )
        for name in MOMENTS
        if name in whole
    }
    replace_moments(kept, moments, steps)


def replace_moments(kept: Kept, moments: Mapping[str, Tensor], steps: float) -> None:
    """Make these very tensors the optimizer's moments, after so many steps; without moments, it
    begins anew.

    The step counter is where Megatron's Adam has it: PyTorch's has one in the state of each
    parameter; that of Transformer Engine or Apex, which Megatron takes where one is installed, has
    one in each group of parameters.
    """
    state: dict[str, Any] = dict(moments)
    if of_megatron("optimizer").USING_PYTORCH_OPTIMIZER:
        if moments:
            state["step"] = torch.tensor(float(steps))
    else:
        for group in kept.optimizer.param_groups:
            if any(kept.main is held for held in group["params"]):
                group["step"] = int(steps) if moments else 0
    kept.optimizer.state[kept.main] = state


def make_moments(optimizer: Any, parameter: nn.Parameter, empty: Empty) -> None:
    """Make the moments of a parameter where there are none: what the optimizer's first step would
    do, in memory of ``empty``."""
    kept = kept_of(optimizer, parameter)
    if kept is None or kept.state:
        return
    shape, device = kept.main.shape, kept.main.device
    replace_moments(kept, {one: empty(shape, torch.float32, device).zero_() for one in MOMENTS}, 0)


def torch_optimizers(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """Yield PyTorch's optimizers inside of Megatron's."""
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        yield one.optimizer
