"""The losses of `SacModel` and their gradients, written out by hand: see `FusedSac`.

For networks as small as those of soft actor-critic, autograd's bookkeeping and the dispatch of
hundreds of small operations cost more than the matrix products. Here the products are torch's, into
buffers that are kept, and what is one number a sample or an action is numpy's, on the same memory.
Samples are columns, so that the numbers of an action lie row by row: numpy is several times as fast
on these, and so are products that lead to a few rows. What the same weights see is multiplied
together::

    columns of `_Room.block`    observation    action          seen by
    0 .. N                      of the batch   of the batch              critics
    N .. 2N                     of the batch   sampled         policy    critics
    2N .. 3N                    the next one   sampled         policy              targets

A step of the critics alone has no second part. The numbers are those of autograd; a test compares
them. Notation: ``N`` samples, ``D`` numbers of an observation, ``A`` of an action, ``E`` critics,
``R`` columns, ``L`` the loss.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from rlinf_async.algorithms.losses import HALF_LOG_TWO_PI, LOG_TWO
from rlinf_async.backends.policies.base import ObservationTensors
from rlinf_async.backends.policies.squashed import (
    LOG_STD_MAX,
    LOG_STD_MIN,
    MlpSquashedGaussianPolicy,
)
from rlinf_async.messages.embodied import Bools, Floats


class Transitions(Protocol):
    """What is asked of a `SacBatch`, which has the shapes."""

    @property
    def observation(self) -> ObservationTensors: ...
    @property
    def next_observation(self) -> ObservationTensors: ...
    @property
    def action(self) -> Tensor: ...
    @property
    def reward(self) -> Tensor: ...
    @property
    def discount(self) -> Tensor: ...
    @property
    def weight(self) -> Tensor: ...
    @property
    def noise(self) -> Tensor: ...
    @property
    def next_noise(self) -> Tensor: ...
    @property
    def trains_policy(self) -> bool: ...


class Layers(NamedTuple):
    """The parameters of ``E`` MLPs with ReLU between their layers."""

    weights: Sequence[nn.Parameter]
    """of each layer ``[E, inputs, outputs]``, or of one `torch.nn.Linear`"""
    biases: Sequence[nn.Parameter]
    """of each layer ``[E, 1, outputs]``, or of one `torch.nn.Linear`"""


class _Learnt(NamedTuple):
    """What one layer has to do in `Networks.backward`."""

    flow: Tensor
    """dL/d(output before ReLU), ``[E, outputs, R]``"""
    weight: Tensor
    """``[E, inputs, outputs]``"""
    factors: tuple[Tensor, Tensor]
    """of which the product is the gradient of the weights"""
    weight_grad: Tensor
    used: Tensor
    """the columns of ``flow`` by which the parameters are trained"""
    bias_grad: Tensor
    given: Tensor
    """``[E, inputs, R]``"""


class Networks:
    """Forward and backward of `Layers`, all for the same columns.

    The parameters stay in the memory where they are now.

    Args:
        layers: the parameters.
        inputs: ``[inputs, R]``, memory that is filled before each forward pass.
        flowing: number of columns, the first ones, that `backward` has dL/d(output) of.
        trained: number of these, the first ones, by which the parameters are trained.
    """

    def __init__(self, layers: Layers, inputs: Tensor, flowing: int = 0, trained: int = 0) -> None:
        self._parameters = [*layers.weights, *layers.biases]
        self._weights = [_turned(one.detach()) for one in layers.weights]
        count = len(self._weights[0])
        biases = [one.detach().view(count, -1, 1) for one in layers.biases]
        outputs = [inputs.new_empty(count, w.shape[1], inputs.shape[1]) for w in self._weights]
        self._given = [inputs.expand(count, -1, -1), *outputs[:-1]]
        self._forward = [*zip(biases, self._weights, self._given, outputs, strict=True)]
        self._flows = [torch.empty_like(output[..., :flowing]) for output in outputs]
        self._flowing, self._trained = flowing, trained
        self._grads: list[Tensor] = []
        self._learnt: list[_Learnt] = []
        self.output = outputs[-1].numpy()
        """output of the last `forward`, ``[E, outputs, R]``"""
        self.flow = self._flows[-1].numpy()
        """dL/d(output), which is filled before each `backward`"""

    def forward(self) -> Floats:
        """Compute and return the output."""
        for bias, weight, given, output in self._forward[:-1]:
            torch.baddbmm(bias, weight, given, out=output).relu_()
        bias, weight, given, output = self._forward[-1]
        torch.baddbmm(bias, weight, given, out=output)
        return self.output

    def backward(self) -> None:
        """Set the gradients of the last `forward`."""
        grads = [_gradient(one) for one in self._parameters]
        if not self._grads or any(map(operator.is_not, grads, self._grads)):
            self._grads, self._learnt = grads, self._prepared(grads)
        for index in range(len(self._learnt) - 1, -1, -1):
            flow, weight, factors, weight_grad, used, bias_grad, given = self._learnt[index]
            torch.bmm(*factors, out=weight_grad)
            torch.sum(used, 2, keepdim=True, out=bias_grad)
            if index:
                before = self._flows[index - 1]
                # Of a single output, as critics have it, the product is one of each with each.
                product = torch.mul if weight.shape[2] == 1 else torch.bmm
                product(weight, flow, out=before)
                torch.ops.aten.threshold_backward.grad_input(before, given, 0.0, grad_input=before)

    def into_inputs(self, rows: slice, columns: slice) -> Floats:
        """Return dL/d(inputs) after `backward`, of these rows and columns, summed over ``E``."""
        weight = self._weights[0].transpose(1, 2)[:, rows]
        flows: Floats = torch.bmm(weight, self._flows[0][..., columns]).numpy()
        total: Floats = np.add.reduce(flows)
        return total

    def _prepared(self, grads: Sequence[Tensor]) -> list[_Learnt]:
        learnt = []
        of_weights, of_biases = grads[: len(self._weights)], grads[len(self._weights) :]
        for flow, weight, given, weight_grad, bias_grad in zip(
            self._flows, self._weights, self._given, of_weights, of_biases, strict=True
        ):
            used, by = flow[..., : self._trained], given[..., : self._trained]
            # In the order in which the gradient lies in memory.
            factors = (by, used.transpose(1, 2))
            if weight_grad.dim() == 2:
                factors, weight_grad = (used, by.transpose(1, 2)), weight_grad.unsqueeze(0)
            bias_grad = bias_grad.view(len(flow), -1, 1)
            seen = given[..., : self._flowing]
            learnt.append(_Learnt(flow, weight.mT, factors, weight_grad, used, bias_grad, seen))
        return learnt


def _turned(weight: Tensor) -> Tensor:
    """A weight as ``[E, outputs, inputs]``: the same memory."""
    return weight.transpose(1, 2) if weight.dim() == 3 else weight.unsqueeze(0)


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        raise RuntimeError("the gradients are not attached: call zero_grad() first")
    return parameter.grad


class _Sampled(NamedTuple):
    """Actions of the policy; all but ``log_prob`` are ``[A, R]``."""

    action: Floats
    scaled: Floats
    """noise times deviation: d(unsquashed action)/d(log of the deviation)"""
    free: Bools
    """whether the log of the deviation is within its limits"""
    log_prob: Floats
    """``[R]``"""


class _Room:
    """Buffers for batches of ``N`` samples."""

    def __init__(
        self, actor: Layers, critics: Layers, targets: Layers, size: int, *, trains_policy: bool
    ) -> None:
        seen = actor.weights[0].shape[1]
        numbers, parts = critics.weights[0].shape[1], 2 if trains_policy else 1
        block = critics.weights[0].new_empty(numbers, (parts + 1) * size)
        self.seen, self.actions = np.split(block.numpy(), [seen])
        self.noise = np.empty_like(self.actions[:, size:])
        self.actor = Networks(actor, block[:seen, size:], size, size)
        self.critics = Networks(critics, block[:, : parts * size], parts * size, size)
        self.targets = Networks(targets, block[:, parts * size :])

    def fill(self, batch: Transitions) -> None:
        """Copy a batch in; the sampled actions are left out."""
        seen, following = batch.observation, batch.next_observation
        if not isinstance(seen, Tensor) or not isinstance(following, Tensor):
            raise TypeError("a policy without an encoder takes one vector")
        size = len(batch.reward)
        self.seen[:, :size] = seen.numpy().T
        self.actions[:, :size] = batch.action.numpy().T
        if batch.trains_policy:
            self.seen[:, size:-size] = self.seen[:, :size]
            self.noise[:, :size] = batch.noise.numpy().T
        self.seen[:, -size:] = following.numpy().T
        self.noise[:, -size:] = batch.next_noise.numpy().T

    def sample(self) -> _Sampled:
        """Do what `SquashedGaussianPolicy.sample` does with the noise."""
        mean, given = np.split(self.actor.forward()[0], 2)
        log_std = np.minimum(np.maximum(given, LOG_STD_MIN), LOG_STD_MAX)
        scaled = np.exp(log_std)
        scaled *= self.noise
        unsquashed = mean + scaled
        # log(1 - tanh(u)^2) = 2 (log 2 - |u| - log(1 + exp(-2 |u|)))
        terms = np.abs(unsquashed)
        terms += np.log1p(np.exp(-2.0 * terms))
        terms *= 2.0
        terms -= log_std
        terms -= 0.5 * self.noise * self.noise
        log_prob = np.add.reduce(terms)
        log_prob -= len(mean) * (HALF_LOG_TWO_PI + 2.0 * LOG_TWO)
        return _Sampled(np.tanh(unsquashed), scaled, given == log_std, log_prob)

    def train_policy(self, sampled: _Sampled, size: int, coefficient: float) -> None:
        """Set the policy's gradients, after those of the critics."""
        sampling = slice(len(self.seen), None)
        action, share = sampled.action[:, :size], coefficient / size
        # d(action)/d(unsquashed) = 1 - action^2; d(log-prob)/d(unsquashed) = 2 action
        flow = 1.0 - action * action
        flow *= self.critics.into_inputs(sampling, slice(size, None))
        flow += (2.0 * share) * action
        of_mean, of_log_std = np.split(self.actor.flow[0], 2)
        of_mean[:] = flow
        # The log-prob has the log of the deviation as a term of its own, too: less itself.
        flow *= sampled.scaled[:, :size]
        flow -= share
        np.multiply(flow, sampled.free[:, :size], out=of_log_std)
        self.actor.backward()


class FusedSac:
    """Losses and gradients of `SacModel` for `MlpSquashedGaussianPolicy` on one CPU: all critics
    give the target, without layer norm, and nothing is cloned.

    Args:
        policy: the policy.
        critics: parameters of the critics.
        targets: parameters of their targets.
        log_coefficient: logarithm of the entropy coefficient, ``[1]``.
        fixed: the entropy coefficient; None: it is learnt.
        target_entropy: target of the entropy, where it is learnt.
    """

    def __init__(
        self,
        policy: MlpSquashedGaussianPolicy,
        critics: Layers,
        targets: Layers,
        log_coefficient: nn.Parameter,
        fixed: float | None,
        target_entropy: float,
    ) -> None:
        linears = [layer for layer in policy.actor if isinstance(layer, nn.Linear)]
        actor = Layers(
            tuple(one.get_parameter("weight") for one in linears),
            tuple(one.get_parameter("bias") for one in linears),
        )
        self._networks = (actor, critics, targets)
        self._log_coefficient, self._fixed = log_coefficient, fixed
        self._target_entropy = target_entropy
        self._rooms: dict[tuple[int, bool], _Room] = {}

    @torch.no_grad()
    @np.errstate(all="ignore")  # what is not finite is found in the norm of the gradients
    def __call__(self, batch: Transitions) -> tuple[Tensor, Tensor, Tensor]:
        """Return error, value and metrics as `SacLosses` has them; set the gradients of what the
        batch trains, which were zero."""
        size, trains_policy, fixed = len(batch.reward), batch.trains_policy, self._fixed
        key = (size, trains_policy)
        if key not in self._rooms:
            self._rooms[key] = _Room(*self._networks, size, trains_policy=trains_policy)
        room = self._rooms[key]
        learnt = float(np.exp(self._log_coefficient.item()))
        coefficient = learnt if fixed is None else fixed
        room.fill(batch)
        sampled = room.sample()
        room.actions[:, size:] = sampled.action
        following = np.minimum.reduce(room.targets.forward()[:, 0])
        following -= coefficient * sampled.log_prob[-size:]
        following *= batch.discount.numpy()
        following += batch.reward.numpy()
        every, flow = room.critics.forward()[:, 0], room.critics.flow[:, 0]
        values = every[:, :size]
        error = values - following
        used = np.multiply(error, batch.weight.numpy() / size, out=flow[:, :size])
        of_critics = 0.5 * float(np.vdot(error, used))
        of_policy = entropy = math.nan
        if trains_policy:
            acted = every[:, size:]
            least = np.minimum.reduce(acted)
            chosen = acted == least
            # Critics that agree share what flows, as they do in autograd.
            np.divide(chosen, -size * np.add.reduce(chosen), out=flow[:, size:])
            entropy = -float(np.add.reduce(sampled.log_prob[:size])) / size
            of_policy = -coefficient * entropy - float(np.add.reduce(least)) / size
        room.critics.backward()
        if trains_policy:
            room.train_policy(sampled, size, coefficient)
            if fixed is None:
                _gradient(self._log_coefficient).fill_(entropy - self._target_entropy)
        error, value = (np.add.reduce(one) / len(values) for one in (np.abs(error), values))
        mean = float(np.add.reduce(value)) / size
        metrics = torch.tensor((of_critics, of_policy, entropy, coefficient, mean))
        return torch.from_numpy(error), torch.from_numpy(value), metrics
