"""Which experts tokens go through, in a model of transformers: read, or given (routing replay).

::

    hidden states --router--> logits --softmax, top-k--> weights [tokens, k], experts [tokens, k]
                                 |                           ^                 |
                                 |     ReplayedRoutes:       |                 | RecordedRoutes
                                 +-- softmax at given experts+                 v

A mixture of experts is not continuous: where two experts are nearly as likely, the last bits of an
engine's arithmetic choose another one than the trainer's, and the log-prob of the token is that of
another network. So the trainer goes through the experts that the engine has chosen (R3, Ma et al.
2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers"). Their
weights are those of its own router, which learns by them as by those of its own choice.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from rlinf_async.messages.language import Routes, Sampling

ROUTERS: Final = frozenset(
    {"MixtralTopKRouter", "OlmoeTopKRouter", "Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter"}
)
"""classes of routers that choose the ``k`` most likely experts of a softmax: those of the families
with `Family.routes`"""


def routers_of(model: nn.Module) -> list[nn.Module]:
    """Return the routers of a model of such a family, in the order of its layers."""
    return [one for one in model.modules() if type(one).__name__ in ROUTERS]


class Routed(Protocol):
    """A row of a batch."""

    sampling: Sampling


class RecordedRoutes:
    """The choices of a model's routers in its next forward pass, where somebody wants them."""

    def __init__(self, model: nn.Module) -> None:
        routers = routers_of(model)
        self._wanted = False
        self._found: list[Tensor] = [torch.empty(0)] * len(routers)
        self._dtype = np.min_scalar_type(max([_experts(one) for one in routers], default=1) - 1)
        for number, router in enumerate(routers):
            router.register_forward_hook(partial(self._record, number))

    def want(self, rows: Iterable[Routed]) -> None:
        """Record the next pass if one of its rows asks for it, and there are routers."""
        self._wanted = bool(self._found) and any(row.sampling.routing_replay for row in rows)

    def _record(self, number: int, router: nn.Module, given: Any, output: Any) -> None:
        if self._wanted:
            self._found[number] = output[2]

    def take(self) -> Routes | None:
        """Return ``[tokens, layers, k]``, tokens in the order of the pass; None where nobody wanted
        them. They are not wanted again."""
        wanted, self._wanted = self._wanted, False
        if not wanted:
            return None
        found: Routes = torch.stack(self._found, 1).cpu().numpy().astype(self._dtype)
        return found


class ReplayedRoutes:
    """Has a model's routers choose given experts."""

    def __init__(self, model: nn.Module) -> None:
        routers = routers_of(model)
        if not routers:
            raise ValueError(
                f"a {type(model).__name__} has no experts that a router chooses: there is nothing "
                "to replay; set rollout.sampling.routing_replay to false"
            )
        self._routes: Tensor | None = None
        self._shape = (len(routers), int(_of(routers[0]).top_k))
        self._experts = min(map(_experts, routers))
        self._others: list[Tensor] = [torch.empty(0)] * len(routers)
        for number, router in enumerate(routers):
            router.register_forward_hook(partial(self._replace, number))

    def use(self, routes: Tensor | None) -> None:
        """Set the experts of the tokens of the next forward pass ``[T, layers, k]``, and of that
        which its backward pass repeats; below 0, and None: those that the routers choose.

        Raises `ValueError` for those of another model.
        """
        if routes is not None and (
            routes.shape[1:] != self._shape or int(routes.max()) >= self._experts
        ):
            layers, count = self._shape
            raise ValueError(
                f"samples have {routes.shape[2]} experts of each token, numbered up to "
                f"{int(routes.max())}, in {routes.shape[1]} layers, but the model has layers of "
                f"{self._experts} experts, {layers} of them, which choose {count}: the engine "
                "serves another model than is trained"
            )
        self._routes = routes

    def changed(self, rows: Tensor) -> Tensor:
        """Return the share of the layers ``[N]`` in which the routers would have chosen other
        experts in the last forward pass, at the tokens in these rows."""
        if self._routes is None:
            return torch.zeros(len(rows), device=rows.device)
        return torch.stack(self._others, 1).float().mean(1).index_select(0, rows)

    def _replace(self, number: int, router: nn.Module, given: Any, output: Any) -> Any:
        if self._routes is None:
            return None
        logits, weights, own = output
        wanted = self._routes[:, number].long()
        chosen = torch.where(wanted < 0, own, wanted)
        new = logits.softmax(-1, dtype=torch.float32).gather(-1, chosen)
        if getattr(router, "norm_topk_prob", True):  # Mixtral's always are
            new = new / new.sum(-1, keepdim=True)
        self._others[number] = (chosen[:, :, None] != own[:, None, :]).all(-1).any(-1)
        return logits, new.to(weights.dtype), chosen


def _experts(router: nn.Module) -> int:
    return int(_of(router).num_experts)


def _of(router: nn.Module) -> Any:
    return router
