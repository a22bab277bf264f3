"""A batch of samples, and the gradient of the PPO loss of a Gaussian tanh policy, written out by
hand.

For tensors this small, autograd's bookkeeping and torch's tanh cost several times the matrix
products. So: matrix products by torch into buffers that are kept, everything of one number a sample
by numpy on the same memory (its tanh is an order of magnitude faster here). The numbers are those
of `algorithms.losses.ppo_loss` through autograd; a test compares them.

Notation: ``B`` samples, ``A`` action values, ``L`` the loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from rlinf_async.algorithms.config import LossConfig
from rlinf_async.algorithms.losses import loss_functions, ppo_loss
from rlinf_async.backends.fsdp.manager import FSDPModelManager
from rlinf_async.backends.policies.base import HALF_LOG_TWO_PI, ObservationTensors, each
from rlinf_async.backends.policies.mlp import MlpGaussianPolicy
from rlinf_async.messages.embodied import Floats

METRICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")
"""names of what a `Gradient` returns, in this order"""


class FlatBatch(NamedTuple):
    """Samples in any order: ``[N]`` but for the first two. float32, discrete actions int64."""

    observation: ObservationTensors
    """``[N, D]`` or fields by name; numbers are normalised already, once an iteration"""
    action: Tensor
    """``[N, A]``, or ``[N]``"""
    log_prob: Tensor
    """log-prob of the action when it was sampled"""
    value: Tensor
    """value of the state when the action was sampled"""
    advantage: Tensor
    returns: Tensor
    executed: Tensor | None = None
    """``[N, tokens]``: log-probs of the policy that count; the columns ``[N]`` above are then
    ``[N, parts]``, at the configured level (see `levels`). None: all do, one for each sample"""
    weight: Tensor | None = None
    """``[N, parts]``, of log-probs in means"""
    value_weight: Tensor | None = None
    """weight of values in means"""

    @property
    def vectors(self) -> Tensor:
        """Observations ``[N, D]``; raises `TypeError` where they have fields."""
        if not isinstance(self.observation, Tensor):
            raise TypeError(f"observations have the fields {list(self.observation)}")
        return self.observation

    def take(self, order: Tensor) -> FlatBatch:
        """Return the samples in another order."""

        def taken(column: Tensor) -> Tensor:
            return column.index_select(0, order)

        others = self._others()
        moved = (None if one is None else taken(one) for one in others)
        return FlatBatch._make((each(self.observation, taken), *moved))

    def split(self, size: int) -> Iterator[FlatBatch]:
        """Cut into batches of ``size`` samples; the last may be smaller."""
        pieces = -(-len(self.action) // size)
        others = [
            [None] * pieces if column is None else torch.split(column, size)
            for column in self._others()
        ]
        seen = self.observation
        if isinstance(seen, Tensor):
            observations: Iterable[ObservationTensors] = torch.split(seen, size)
        else:
            fields = zip(*(torch.split(field, size) for field in seen.values()), strict=True)
            observations = (dict(zip(seen, cut, strict=True)) for cut in fields)
        yield from map(FlatBatch._make, zip(observations, *others, strict=True))

    def _others(self) -> tuple[Any, ...]:
        return self[1:]


class Gradient(Protocol):
    """Adds ``share`` times the gradient of the mean loss over a (micro-)batch to ``.grad``."""

    def __call__(self, batch: FlatBatch, share: float) -> Tensor:
        """Return the `METRICS` of the batch, ``[5]``."""
        ...


class FusedMlp:
    """Forward and backward of `policies.mlp.tanh_mlp`, for batches of ``size`` rows.

    The parameters stay in the memory where they are now.
    """

    def __init__(self, network: nn.Sequential, size: int) -> None:
        linears = [layer for layer in network if isinstance(layer, nn.Linear)]
        # A look at an attribute of a module takes as long as a product of matrices this small.
        self._weights = [layer.weight for layer in linears]
        self._biases = [layer.bias for layer in linears]
        self._turned = [weight.detach().t() for weight in self._weights]
        self._outputs = [torch.empty(size, layer.out_features) for layer in linears]
        self._flows = [torch.empty_like(output) for output in self._outputs[:-1]]
        self._inputs: list[Tensor] = []
        self._ones = torch.ones(size)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the output ``[B, out]``, in a buffer that the next call overwrites."""
        self._inputs = [inputs, *self._outputs[:-1]]
        last = self._outputs[-1]
        for bias, given, turned, output in zip(
            self._biases, self._inputs, self._turned, self._outputs, strict=True
        ):
            torch.addmm(bias, given, turned, out=output)
            if output is not last:
                hidden = output.numpy()
                np.tanh(hidden, out=hidden)
        return last

    def backward(self, flow: Tensor) -> None:
        """Add to the gradients, given dL/d(output) of the last `forward`, ``[B, out]``."""
        for index in range(len(self._weights) - 1, -1, -1):
            weight, given, turned = self._weights[index], self._inputs[index], flow.t()
            weight_grad, bias_grad = weight.grad, self._biases[index].grad
            if weight_grad is None or bias_grad is None:
                raise RuntimeError("the gradients are not attached: call zero_grad() first")
            weight_grad.addmm_(turned, given)
            bias_grad.addmv_(turned, self._ones)
            if index:
                before = torch.mm(flow, weight, out=self._flows[index - 1])
                flow = torch.ops.aten.tanh_backward.grad_input(before, given, grad_input=before)


class _PolicyTerm(NamedTuple):
    """All ``[B]``."""

    loss: Floats
    log_prob_flow: Floats
    """dL/d(log-prob) of each sample, before the mean is taken"""
    divergence: Floats
    clipped: Floats


class FusedPpo:
    """A `Gradient` for `MlpGaussianPolicy` with the loss ``ppo``, on one CPU."""

    def __init__(self, model: nn.Module, config: LossConfig) -> None:
        if not isinstance(model, MlpGaussianPolicy):
            raise TypeError(f"the fused gradient is for MlpGaussianPolicy, not {type(model)}")
        self._model = model
        self._config = config
        self._networks: dict[int, tuple[FusedMlp, FusedMlp]] = {}

    @staticmethod
    def covers(manager: FSDPModelManager, config: LossConfig) -> bool:
        """Whether the hand-written gradient is right for this model and loss."""
        plain = manager.world_size == 1 and type(manager.model) is MlpGaussianPolicy
        exact = manager.cfg.precision == "float32" and manager.device.type == "cpu"
        return plain and exact and loss_functions.named(config.name) is ppo_loss

    @torch.no_grad()
    def __call__(self, batch: FlatBatch, share: float) -> Tensor:
        """Add ``share`` times the gradient of the mean loss; return the metrics ``[5]``."""
        actor, critic = self._networks_for(len(batch.action))
        policy, entropy = self._policy_gradient(actor, batch, share)
        errors = self._value_gradient(critic, batch, share)
        rows = (policy.loss, errors, policy.divergence, policy.clipped)
        loss, value, divergence, clipped = (float(np.add.reduce(row)) / len(row) for row in rows)
        return torch.tensor((loss, value, entropy, divergence, clipped))

    def _networks_for(self, size: int) -> tuple[FusedMlp, FusedMlp]:
        if size not in self._networks:
            model = self._model
            self._networks[size] = (FusedMlp(model.actor, size), FusedMlp(model.critic, size))
        return self._networks[size]

    def _policy_gradient(
        self, actor: FusedMlp, batch: FlatBatch, share: float
    ) -> tuple[_PolicyTerm, float]:
        log_std = self._model.log_std.detach().numpy()
        inverse = np.exp(-log_std)
        standard = (batch.action.numpy() - actor.forward(batch.vectors).numpy()) * inverse
        squares = standard * standard
        log_scale = float(log_std.sum()) + HALF_LOG_TWO_PI * log_std.size
        log_prob = np.float32(-0.5) * squares.sum(1) - np.float32(log_scale)
        term = self._policy_term(log_prob - batch.log_prob.numpy(), batch.advantage.numpy())
        flow = term.log_prob_flow * np.float32(share / len(log_prob))
        # d(log-prob)/d(mean) = standard / deviation; d(log-prob)/d(log deviation) = standard^2 - 1
        standard *= inverse
        standard *= flow[:, None]
        actor.backward(torch.from_numpy(standard))
        gradient = self._model.log_std.grad
        if gradient is None:
            raise RuntimeError("the gradients are not attached: call zero_grad() first")
        bonus = np.float32(self._config.entropy_coefficient * share)
        gradient += torch.from_numpy(flow @ squares - (flow.sum() + bonus))
        return term, log_scale + 0.5 * log_std.size

    def _policy_term(self, log_ratio: Floats, advantage: Floats) -> _PolicyTerm:
        config = self._config
        ratio = np.exp(log_ratio)
        low, high = np.float32(1.0 - config.clip_low), np.float32(1.0 + config.clip_high)
        held = np.minimum(np.maximum(ratio, low), high)
        free = advantage * ratio
        objective = np.minimum(free, advantage * held)
        # Where the clipped term is the smaller one, nothing flows: it is constant there.
        flow = np.where(free <= objective, -free, np.float32(0.0))
        if config.dual_clip is not None:
            floor = np.float32(config.dual_clip) * advantage
            bounded = (advantage < 0) & (objective < floor)
            objective = np.where(bounded, floor, objective)
            flow = np.where(bounded, np.float32(0.0), flow)
        divergence = np.expm1(log_ratio) - log_ratio
        return _PolicyTerm(-objective, flow, divergence, ratio != held)

    def _value_gradient(self, critic: FusedMlp, batch: FlatBatch, share: float) -> Floats:
        value = critic.forward(batch.vectors).numpy()[:, 0]
        returns = batch.returns.numpy()
        error = value - returns
        loss: Floats = np.float32(0.5) * error * error
        flow = error
        clip = self._config.value_clip
        if clip is not None:
            old = batch.value.numpy()
            moved = value - old
            held = np.minimum(np.maximum(moved, np.float32(-clip)), np.float32(clip))
            near_loss = np.float32(0.5) * np.square(old + held - returns)
            # The clipped value is constant outside of the range, so nothing flows there.
            outside = (near_loss > loss) & (held != moved)
            loss, flow = np.maximum(loss, near_loss), np.where(outside, np.float32(0.0), flow)
        flow = flow * np.float32(self._config.value_coefficient * share / len(value))
        critic.backward(torch.from_numpy(flow[:, None]))
        return loss
