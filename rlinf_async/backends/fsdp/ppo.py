"""PPO's inner loop: epochs x shuffled minibatches over one flat batch.

It waits for no other worker: the batch is complete, and only gradients cross ranks. A minibatch is
one optimizer step; micro-batches split it to save memory, and do not change the numbers.

A step of an environment that takes chunks executes ``k`` actions, each of some tokens. A policy may
answer with a log-prob for each token, ``[N, k * tokens]``, and with a value for each action,
``[N, k]``, or each token. Two settings say what the loss is made of::

    advantage.level      chunk    rewards are summed; one value, one advantage for a chunk
                         action   each action has its own
                         token    each token has its own; the reward of an action is that of its
                                  last token
    ppo.log_prob_level   chunk    one ratio for all tokens of a chunk
                         action   one for those of each action
                         token    one for each

Actions that were not executed, because the episode had ended, count nowhere: log-probs of their
tokens are left out of sums, and their rows have weight 0. Weights have mean 1 over all ranks, so
that the mean of weighted losses is the masked mean, whatever share of the batch a rank or a
micro-batch holds.

The gradient of a Gaussian tanh policy is written out by hand (`FusedPpo`): for tensors this small,
autograd's bookkeeping and torch's tanh cost several times the matrix products. So: matrix products
by torch into buffers that are kept, everything of one number a sample by numpy on the same memory
(its tanh is an order of magnitude faster here). The numbers are those of
`algorithms.losses.ppo_loss` through autograd; a test compares them. Notation there: ``B`` samples,
``A`` action values, ``L`` the loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rlinf_async.algorithms.advantages import AdvantageInputs, Advantages, compute_advantages
from rlinf_async.algorithms.config import OF_CORRECTION, AdvantageConfig, LossConfig
from rlinf_async.algorithms.losses import LossInputs, loss_functions, ppo_loss
from rlinf_async.backends.base import TrainingDiverged
from rlinf_async.backends.checkpoint import collectives
from rlinf_async.backends.fsdp.config import OF_LOSS, OF_UPDATES, PPOConfig
from rlinf_async.backends.fsdp.manager import FSDPModelManager
from rlinf_async.backends.policies.base import HALF_LOG_TWO_PI, Evaluation, ObservationTensors, each
from rlinf_async.backends.policies.mlp import MlpGaussianPolicy
from rlinf_async.messages.embodied import Bools, Floats

ORDER: Final = ("token", "action", "chunk")
"""levels of log-probs and advantages, from fine to coarse"""


class FlatBatch(NamedTuple):
    """Samples in any order: ``[N]`` but for the first two. float32, discrete actions int64."""

    observation: ObservationTensors
    """``[N, D]`` or fields by name; numbers are normalised already, once an iteration"""
    action: Tensor
    """``[N, A]``, or ``[N]``; of a flow policy the chains by which actions came about"""
    log_prob: Tensor
    """log-prob of the action when it was sampled, or of the proximal policy: see `off_policy`"""
    value: Tensor
    """value of the state then, or of the proximal policy"""
    advantage: Tensor
    returns: Tensor
    executed: Tensor | None = None
    """``[N, tokens]``: log-probs of the policy that count; the columns ``[N]`` above are then
    ``[N, parts]``, at the configured level (see `levels`). None: all do, one for each sample"""
    weight: Tensor | None = None
    """``[N, parts]``, of log-probs in means"""
    value_weight: Tensor | None = None
    """weight of values in means"""
    correction: Tensor | None = None
    """as ``log_prob``: factor of advantages, once they are normalised; see `off_policy`"""

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

    @property
    def names(self) -> Sequence[str]:
        """Names of the metrics, once it was called."""
        ...

    def __call__(self, batch: FlatBatch, share: float) -> Tensor:
        """Return the metrics of the batch, as many as there are names."""
        ...


class Steps(NamedTuple):
    """One iteration of ``E`` environments; ``k`` is 1 where actions come one by one."""

    reward: Floats
    """``[T, E, k]``"""
    executed: Bools
    """``[T, E, k]``"""
    value: Floats
    """``[T + 1, E, V]``: ``V`` is 1, or ``k``, or ``tokens``"""
    tokens: int
    """log-probs of a sample: 1, or the tokens of ``k`` actions"""
    terminated: Bools
    truncated: Bools
    final_value: Floats
    """all three ``[T, E]``"""


def masked_after_done(executed: Bools, ended: Bools) -> Bools:
    """Leave out all steps after the first that ended an episode, ``[T, E, k]``."""
    before: NDArray[np.int64] = np.cumsum(ended, axis=0) - ended
    kept: Bools = executed & (before == 0)[..., None]
    return kept


def chunk_advantages(steps: Steps, config: AdvantageConfig) -> Advantages:
    """Return advantages and returns ``[T, E, 1]``, or ``[T, E, k]`` at the level ``action``, or as
    many as there are values at the level ``token``."""
    if config.level == "chunk":
        rows = AdvantageInputs(
            reward=(steps.reward * steps.executed).sum(-1, dtype=np.float32),
            value=steps.value[..., 0],
            terminated=steps.terminated,
            truncated=steps.truncated,
            final_value=steps.final_value,
            valid=np.asarray(steps.executed.any(-1)),
        )
        made = compute_advantages(rows, config)
        return Advantages(made.advantage[..., None], made.returns[..., None])
    return _action_advantages(steps if config.level == "action" else by_token(steps), config)


def by_token(steps: Steps) -> Steps:
    """Return steps whose actions are the tokens of the given ones: as many as there are values.

    Raises:
        ValueError: the policy gives no value for each token.
    """
    *shape, actions = steps.reward.shape
    values = steps.value.shape[-1]
    tokens, rest = divmod(steps.tokens, actions)
    if rest or values != steps.tokens:
        raise ValueError(
            f"actor.advantage.level is 'token', and the policy gives {values} values for the "
            f"{steps.tokens} tokens of {actions} actions: it must give one for each token (its "
            "setting token_values says so), or set 'action' or 'chunk'"
        )
    reward = np.zeros((*shape, actions * tokens), np.float32)
    reward[..., tokens - 1 :: tokens] = steps.reward
    return steps._replace(reward=reward, executed=steps.executed.repeat(tokens, axis=-1))


def _action_advantages(steps: Steps, config: AdvantageConfig) -> Advantages:
    length, envs, size = steps.reward.shape
    last = np.maximum(
        steps.executed.sum(-1) - 1, 0
    )  # the action at which an episode may have ended
    at_end = np.arange(size) == last[..., None]
    rows = AdvantageInputs(
        reward=_by_action(steps.reward * steps.executed),
        value=np.concatenate([_by_action(steps.value[:-1]), steps.value[-1:, :, 0]]),
        terminated=_by_action(at_end & steps.terminated[..., None]),
        truncated=_by_action(at_end & steps.truncated[..., None]),
        final_value=_by_action(at_end * steps.final_value[..., None]),
        valid=_by_action(steps.executed),
    )
    made = compute_advantages(rows, config)
    return Advantages(*(one.reshape(length, size, envs).swapaxes(1, 2) for one in made))


def _by_action(array: NDArray[Any]) -> NDArray[Any]:
    """``[T, E, k]`` -> ``[T * k, E]``, in the order of time."""
    length, envs, size = array.shape
    return np.ascontiguousarray(array.swapaxes(1, 2)).reshape(length * size, envs)


def parts_of(level: str, tokens: int, actions: int) -> int:
    """Return how many log-probs a sample of ``tokens`` tokens has at the level."""
    return {"token": tokens, "action": actions, "chunk": 1}[level]


def summed(tokens: Tensor, executed: Tensor, parts: int) -> Tensor:
    """Return ``[N, parts]``: sums of ``[N, tokens]`` over the executed ones of each part."""
    return torch.where(executed, tokens, 0.0).view(len(tokens), parts, -1).sum(-1)


def spread(action: Tensor, columns: int) -> Tensor:
    """Return ``[N, columns]`` of a number for each action (or one for all), ``[N, k]``."""
    return action.repeat_interleave(columns // action.shape[1], dim=1)


def weights(member: collectives.Rank, mask: Tensor) -> Tensor:
    """Return weights for ``mask``, 0 where it is False, with mean 1 over all ranks. Collective."""
    counts = torch.tensor([float(mask.sum()), float(mask.numel())], dtype=torch.float64)
    valid, total = torch.stack(collectives.all_gather(member, counts)).sum(0).tolist()
    scale: float = total / max(valid, 1.0)
    return mask.to(torch.float32) * scale


class _Totals(NamedTuple):
    """Results of all updates."""

    metrics: list[Tensor]
    samples: list[int]
    grad_norms: list[float]


def ppo_epochs(
    manager: FSDPModelManager,
    batch: FlatBatch,
    config: PPOConfig,
    generator: torch.Generator | None = None,
) -> dict[str, float]:
    """Train on ``batch`` and return the means of the metrics over all updates, each by the number
    of its samples. Collective.

    ``generator`` shuffles; rank r of a sharded run should have its own. The last minibatch of an
    epoch is smaller when the sizes do not divide. Raises `ValueError` for an empty batch or one
    that differs in size between ranks, and `TrainingDiverged` when every update was skipped.
    """
    samples = len(batch.action)
    if not samples:
        raise ValueError("the batch is empty: there is nothing to train on")
    collectives.require_equal(manager, samples, "the number of samples")
    gradient = choose_gradient(manager, config, masked=batch.executed is not None)
    totals = _Totals([], [], [])
    skipped = manager.skipped_steps
    lrs: list[float] = []
    for _ in range(config.epochs):
        order = torch.randperm(samples, generator=generator).to(batch.action.device)
        before = len(totals.metrics)
        for minibatch in batch.take(order).split(config.minibatch_size):
            if config.normalize_advantage == "minibatch":
                advantage = standardized(minibatch.advantage, minibatch.weight)
                minibatch = minibatch._replace(advantage=advantage)
            if minibatch.correction is not None:
                # A positive factor of the advantage is one of the clipped surrogate.
                advantage = minibatch.advantage * minibatch.correction
                minibatch = minibatch._replace(advantage=advantage)
            totals.metrics.append(_accumulate(manager, gradient, minibatch, config))
            totals.samples.append(len(minibatch.action))
            grad_norm, lrs = manager.optimizer_step()
            totals.grad_norms.append(grad_norm)
        if _kl_exceeded(manager, gradient.names, totals.metrics[before:], config.target_kl):
            break
    return _summary(gradient.names, totals, lrs, manager.skipped_steps - skipped)


def standardized(advantage: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return advantages of any shape with mean 0 and (unbiased) standard deviation 1.

    Where ``weight`` is 0 they do not count.
    """
    counted = advantage if weight is None else advantage[weight > 0]
    if counted.numel() < 2:
        return advantage
    deviation, mean = torch.std_mean(counted)
    return advantage.sub(mean).div_(deviation + 1e-8)


def choose_gradient(
    manager: FSDPModelManager, config: PPOConfig, *, masked: bool = False
) -> Gradient:
    """Return the hand-written gradient if it covers this model and loss, else autograd's."""
    if config.fused and not masked and FusedPpo.covers(manager, config.loss):
        return FusedPpo(manager.model, config.loss)
    return AutogradLoss(manager, config.loss)


class AutogradLoss:
    """Any policy, any registered loss, any sharding."""

    def __init__(self, manager: FSDPModelManager, config: LossConfig) -> None:
        self._manager = manager
        self._config = config
        self._loss = loss_functions.named(config.name)
        self.names: Sequence[str] = ()

    def __call__(self, batch: FlatBatch, share: float) -> Tensor:
        """Add ``share`` times the gradient of the mean loss over ``batch``."""
        with self._manager.autocast():
            evaluation: Evaluation = self._manager.model(batch.observation, batch.action)
        log_prob, entropy, value = at_level(evaluation, batch)
        inputs = LossInputs(
            log_prob=log_prob,
            entropy=entropy,
            value=value,
            old_log_prob=batch.log_prob,
            old_value=batch.value,
            advantage=batch.advantage,
            returns=batch.returns,
            weight=batch.weight,
            value_weight=batch.value_weight,
        )
        output = self._loss(inputs, self._config)
        self._manager.backward(output.loss * share)
        return self._numbers(output.metrics, output.loss.device)

    def _numbers(self, metrics: Mapping[str, Tensor | float], device: torch.device) -> Tensor:
        """The metrics of a call, in the order of their names, float32."""
        if not self.names:
            self._check_names(metrics)
            self.names = tuple(metrics)
        if metrics.keys() != set(self.names):
            raise ValueError(
                f"loss {self._config.name!r} returned the metrics {sorted(metrics)}, and before "
                f"{sorted(self.names)}: it has to return the same in every call, NaN where there "
                "is nothing to say"
            )
        found = []
        for name in self.names:
            value = torch.as_tensor(metrics[name])
            if value.numel() != 1:
                raise ValueError(
                    f"loss {self._config.name!r} returned {list(value.shape)} numbers as "
                    f"{name!r}: a metric is a single one, such as their mean"
                )
            found.append(value.detach().to(device, torch.float32).reshape(()))
        return torch.stack(found) if found else torch.zeros(0, device=device)

    def _check_names(self, metrics: Mapping[str, Tensor | float]) -> None:
        if taken := [name for name in metrics if name in (*OF_UPDATES, *OF_CORRECTION)]:
            raise ValueError(
                f"loss {self._config.name!r} returned a metric {taken[0]!r}, which an iteration "
                "has already: give it another name"
            )


def at_level(evaluation: Evaluation, batch: FlatBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs, entropies and values, float32, as many for a sample as ``batch`` has."""
    log_prob, entropy = evaluation.log_prob.float(), evaluation.entropy.float()
    value = evaluation.value.float()
    if batch.executed is None:
        return log_prob, entropy, value
    samples, parts = batch.log_prob.shape

    def of_level(tokens: Tensor) -> Tensor:
        return summed(tokens.view(samples, -1), taken, parts)

    taken = batch.executed
    return (
        of_level(log_prob),
        of_level(entropy),
        value.view(samples, -1)[:, : batch.returns.shape[1]],
    )


def _accumulate(
    manager: FSDPModelManager, gradient: Gradient, minibatch: FlatBatch, config: PPOConfig
) -> Tensor:
    samples = len(minibatch.action)
    size = config.micro_batch_size or samples
    if size >= samples:
        with manager.before_micro_batch(manager.model, is_last_micro_batch=True):
            return gradient(minibatch, 1.0)
    parts: list[Tensor] = []
    for start, micro in zip(range(0, samples, size), minibatch.split(size), strict=True):
        share = len(micro.action) / samples
        last = start + size >= samples
        with manager.before_micro_batch(manager.model, is_last_micro_batch=last):
            parts.append(share * gradient(micro, share))
    return torch.stack(parts).sum(0)


def _kl_exceeded(
    manager: FSDPModelManager, names: Sequence[str], metrics: list[Tensor], target: float | None
) -> bool:
    if target is None:
        return False
    if "approx_kl" not in names:
        raise ValueError(
            f"actor.ppo.target_kl is {target}, but the loss returns no metric 'approx_kl'"
        )
    kl = torch.stack(metrics)[:, names.index("approx_kl")].mean()
    everywhere = collectives.all_gather(manager, kl)
    return torch.stack(everywhere).mean().item() > target


def _summary(
    names: Sequence[str], totals: _Totals, lrs: list[float], skipped: int
) -> dict[str, float]:
    updates = len(totals.metrics)
    if skipped == updates:
        raise TrainingDiverged(
            f"all {updates} updates of this iteration had a gradient norm that is not finite "
            f"(last: {totals.grad_norms[-1]}): nothing was learnt. Lower the learning rate, or "
            "look for NaN in observations and rewards; the last checkpoint is from before"
        )
    metrics = torch.stack(totals.metrics)
    shares = torch.tensor(totals.samples).to(metrics) / sum(totals.samples)
    means = (shares @ metrics).tolist()
    finite = [norm for norm in totals.grad_norms if np.isfinite(norm)]
    return dict(zip(names, means, strict=True)) | {
        "grad_norm": float(np.mean(finite)),
        "lr": lrs[0],
        "updates": float(updates),
        "skipped_updates": float(skipped),
    }


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
        self.names: Sequence[str] = OF_LOSS
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
