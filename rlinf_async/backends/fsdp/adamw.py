"""AdamW over plain parameters on the CPU: torch's kernel, without its look at every tensor.

For a policy of a few small layers, half of a step of `torch.optim.AdamW` is spent on sorting the
tensors by device and dtype, and on marks for profilers. Here the kernel is called at once. The
numbers are torch's to the last bit; a test compares them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

# What torch.optim calls; torch exports no kernel by a public name.
_count_up: Any = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]
_kernel: Any = torch._fused_adamw_  # pyright: ignore[reportPrivateImportUsage]


class PlainAdamW(torch.optim.AdamW):
    """Fused AdamW over plain float32 parameters on the CPU, see `covers`."""

    @staticmethod
    def covers(model: nn.Module) -> bool:
        """Whether all parameters are such: none is sharded, or elsewhere, or of another dtype."""
        if any(isinstance(one, FullyShardedDataParallel) for one in model.modules()):
            return False  # its shards are plain tensors
        return all(
            type(one.data) is Tensor and one.device.type == "cpu" and one.dtype == torch.float32
            for one in model.parameters()
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step with the present gradients; parameters without one are left as they are."""
        if closure is not None:
            raise ValueError("closures are for torch.optim.AdamW: this one takes present gradients")
        for before in self._optimizer_step_pre_hooks.values():
            before(self, (), {})
        for group in self.param_groups:
            lists: list[list[Tensor]] = [[] for _ in range(6)]
            self._init_group(group, *lists)  # type: ignore[no-untyped-call]
            trained, gradients, first, second, largest, steps = lists
            if not trained:
                continue
            beta1, beta2 = group["betas"]
            _count_up(steps, 1)
            _kernel(
                trained,
                gradients,
                first,
                second,
                largest,
                steps,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=group["amsgrad"],
                maximize=group["maximize"],
            )
        for after in self._optimizer_step_post_hooks.values():
            after(self, (), {})

    # So says torch of a step that calls the hooks itself.
    step.hooked = True  # type: ignore[attr-defined]
