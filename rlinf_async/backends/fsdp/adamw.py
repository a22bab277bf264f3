"""AdamW over plain parameters on the CPU: torch's kernel, without the look at every tensor before it.

For a policy of a few small layers, half of a step of `torch.optim.AdamW` is spent on sorting the
tensors by device and dtype, and on marks for profilers. Here the kernel is called at once. The
numbers are torch's to the last bit; a test compares them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class PlainAdamW(torch.optim.AdamW):
    """Fused AdamW over plain float32 parameters on the CPU, see `covers`."""

    @staticmethod
    def covers(model: nn.Module) -> bool:
        """Whether all parameters are such: none is sharded, or elsewhere, or of another dtype."""
        return all(
            type(one.data) is Tensor and one.device.type == "cpu" and one.dtype == torch.float32
            for one in model.parameters()
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take a step with the present gradients; parameters without one are left as they are."""
        if closure is not None:
            raise ValueError("closures are for torch.optim.AdamW: this one takes present gradients")
        for before in self._optimizer_step_pre_hooks.values():
            before(self, (), {})
        for group in self.param_groups:
            trained, gradients, first, second, unused, steps = ([] for _ in range(6))
            self._init_group(group, trained, gradients, first, second, unused, steps)
            if not trained:
                continue
            beta1, beta2 = group["betas"]
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                trained,
                gradients,
                first,
                second,
                unused,
                steps,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )
        for after in self._optimizer_step_post_hooks.values():
            after(self, (), {})

    step.hooked = True  # so says torch of a step that calls the hooks itself
