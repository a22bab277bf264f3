"""Soft actor-critic: the arithmetic of one rank of `SacActor`.

::

    share of a batch --> losses of `SacModel` --> one backward, one step of all ranks together
                                                                |
                                                    targets follow the critics

All three losses are of the same weights, and change them in one step: the policy's gradient is that
of the critics before the step, where other implementations update the critics first. In the steps
of the critics alone (``policy_every``) the other parameters are a frozen group of the optimizer.

RLPD (Ball et al. 2023, algorithm 1) is this with an ensemble of critics, of which some are drawn
for each target (REDQ, Chen et al. 2021), layer norm in them, several of their steps for one of the
policy, and demonstrations in each batch, which are the replay worker's part.

Any number of ranks takes the same steps as one, as far as rounding goes: every rank draws the noise
of the whole batch (of actions, and of the shifts of images), and takes the part of its share.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf_async.algorithms.losses import (
    critic_loss,
    entropy_coefficient_loss,
    policy_loss,
    polyak_update,
    soft_target,
    soft_value,
)
from rlinf_async.backends.base import FirstWeights, GradientStep, TrainingDiverged
from rlinf_async.backends.building import building
from rlinf_async.backends.checkpoint import collectives
from rlinf_async.backends.fsdp.fused_sac import FusedSac, Layers
from rlinf_async.backends.fsdp.manager import FSDPModelManager
from rlinf_async.backends.fsdp.state import local_shard
from rlinf_async.backends.policies.base import ObservationTensors, find_policy, to_tensors
from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.backends.policies.images import random_shift
from rlinf_async.backends.policies.off_policy import OffPolicyPolicy, SoftCategoricalPolicy
from rlinf_async.backends.policies.squashed import (
    MlpSquashedGaussianPolicy,
    SquashedGaussianPolicy,
)
from rlinf_async.backends.sac_config import (
    CriticLossConfig,
    CriticTrainerConfig,
    SacLossConfig,
    SacTrainerConfig,
)
from rlinf_async.messages.embodied import Bools, Floats, ReplayBatch
from rlinf_async.messages.spaces import ObservationArray
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.weights.pack import pack

OF_POLICY = ("policy_loss", "entropy")
"""metrics of the steps that train the policy"""
OF_CLONING = ("policy_loss",)
"""metrics of a policy that clones alone, without critics"""


class SacBatch(NamedTuple):
    """A share of ``N`` transitions, and standard normal noise for the actions that are sampled."""

    observation: ObservationTensors
    """``[N, D]``, or fields ``[N, ...]``"""
    next_observation: ObservationTensors
    action: Tensor
    """``[N, A]``; int64 ``[N]`` of choices"""
    reward: Tensor
    """``[N]``"""
    discount: Tensor
    """``[N]``"""
    weight: Tensor
    """``[N]``"""
    noise: Tensor
    """``[N, A]``, for the action at the observation"""
    next_noise: Tensor
    """``[N, A]``, for the action at the next observation"""
    target_critics: Tensor | None = None
    """int64 ``[K]``: critics of which the target has the least value; None: all"""
    trains_policy: bool = True
    """whether the policy and the entropy coefficient have losses, too"""
    demonstrated: Tensor | None = None
    """``[N]``: 0 of own experience; of demonstrations the size of the whole batch divided by their
    number in it; None: there are none"""


class SacLosses(NamedTuple):
    """Losses of a forward pass, and values for the metrics."""

    total: Tensor
    """a scalar: the sum of all losses"""
    error: Tensor
    """``[N]``: absolute temporal-difference errors, mean over the critics; 0 without any"""
    value: Tensor
    """``[N]``: values, mean over the critics; 0 without any"""
    metrics: Tensor
    """``[M]``: means over the share, in the order of the model's ``metrics``; NaN for those of a
    policy that is not trained"""


class Critics(nn.Module):
    """``E`` MLPs of features and an action, ReLU between the layers, in one multiplication; of none
    there is the head alone.

    Where actions are choices, ``action`` is None: the values are those of every choice, ``[E, N,
    A]``.

    Weights begin as those of `torch.nn.Linear`. All share the head of the features.

    Args:
        head: head for the features ``[N, F]``, see `OffPolicyPolicy`.
        sizes: sizes of the layers, from what the head makes, and a continuous action, to the value,
            or to those of all choices.
        count: ``E``.
        layer_norm: whether each hidden layer is normalised before its ReLU, with a scale and a
            shift of its own in each critic (Ba et al. 2016).
    """

    def __init__(
        self, head: nn.Module, sizes: Sequence[int], count: int = 2, *, layer_norm: bool = False
    ) -> None:
        super().__init__()
        self.head = head
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        self.scales, self.shifts = nn.ParameterList(), nn.ParameterList()
        for inputs, outputs in pairwise(sizes) if count else ():
            bound = 1.0 / math.sqrt(inputs)
            for into, shape in (
                (self.weights, (count, inputs, outputs)),
                (self.biases, (count, 1, outputs)),
            ):
                into.append(nn.Parameter(torch.empty(shape).uniform_(-bound, bound)))
        for size in sizes[1:-1] if layer_norm and count else ():
            self.scales.append(nn.Parameter(torch.ones(count, 1, size)))
            self.shifts.append(nn.Parameter(torch.zeros(count, 1, size)))

    def forward(
        self, features: Tensor, action: Tensor | None, which: Tensor | None = None
    ) -> Tensor:
        """Return values ``[E, N]``, or ``[K, N]`` of the critics ``which [K]``."""
        layers = self._layers
        if which is not None:
            layers = [[one[which] for one in layer] for layer in layers]
        return self._values(self.head(features), action, layers)

    def frozen(self, features: Tensor, action: Tensor) -> Tensor:
        """Return values ``[E, N]`` with gradients for ``action`` and none for the critics."""
        with torch.no_grad():
            seen = self.head(features)
        layers = [[one.detach() for one in layer] for layer in self._layers]
        return self._values(seen, action, layers)

    @property
    def _layers(self) -> list[list[Tensor]]:
        """Of each layer its weight and bias, and where it is normalised, the scale and shift."""
        norms = [[*pair] for pair in zip(self.scales, self.shifts, strict=True)]
        norms += [[] for _ in range(len(self.weights) - len(norms))]
        linear = zip(self.weights, self.biases, strict=True)
        return [[*pair, *norm] for pair, norm in zip(linear, norms, strict=True)]

    @staticmethod
    def _values(seen: Tensor, action: Tensor | None, layers: list[list[Tensor]]) -> Tensor:
        inputs = seen if action is None else torch.cat([seen, action], -1)
        hidden = inputs.expand(len(layers[0][0]), -1, -1)
        for index, (weight, bias, *norm) in enumerate(layers):
            hidden = torch.baddbmm(bias, hidden if index == 0 else functional.relu(hidden), weight)
            if norm:
                scale, shift = norm
                hidden = functional.layer_norm(hidden, hidden.shape[-1:]) * scale + shift
        return hidden if action is None else hidden.squeeze(-1)


class CriticModel(nn.Module):
    """A policy, critics, and the targets that follow them.

    Images have one encoder, which policy and critics share. It is part of the policy, which acts
    with it, but only the losses of values train it; the targets see with it, too, as in Yarats et
    al. 2021, "Mastering Visual Continuous Control: Improved Data-Augmented Reinforcement Learning"
    (DrQ-v2).

    All losses are of one forward pass, because FSDP2 gathers weights around that. They are means
    over the share of a rank, and linear in it: their gradients, averaged over ranks of equal
    shares, are those of the whole batch.

    Raises `ValueError` for a policy that it cannot train.
    """

    trains: ClassVar[tuple[type[OffPolicyPolicy[Any]], ...]]
    """policies that it can train"""
    metrics: ClassVar[tuple[str, ...]]
    """metrics of its losses"""

    def __init__(self, policy: PolicyConfig, losses: CriticLossConfig) -> None:
        super().__init__()
        found = find_policy(policy.name)(policy)
        if not isinstance(found, self.trains):
            raise ValueError(f"{type(self).__name__} cannot train the policy {policy.name!r}")
        self.policy: Any = found
        self.discrete = policy.acts.discrete
        self.critic, self.target = (self._critics(policy, losses) for _ in range(2))
        self.target.load_state_dict(self.critic.state_dict())
        self.target.requires_grad_(False)

    def _critics(self, policy: PolicyConfig, losses: CriticLossConfig) -> Critics:
        head, size = self.policy.new_head()
        actions = policy.action_size
        given, values = (0, actions) if self.discrete else (actions, 1)
        sizes = (size + given, *policy.hidden_sizes, values)
        return Critics(head, sizes, losses.critics, layer_norm=losses.critic_layer_norm)

    def value_parameter_names(self) -> set[str]:
        """Return the names of what the losses of values train, with a learning rate of its own: the
        critics, and the encoder of images."""
        of_values = ("critic.", "value.", "policy.encoder.")
        return {name for name, _ in self.named_parameters() if name.startswith(of_values)}

    def values_of(self, critics: Critics, seen: Tensor, action: Tensor) -> Tensor:
        """Return the critics' values of the actions that were taken, ``[E, N]``."""
        if not self.discrete:
            values: Tensor = critics(seen, action)
            return values
        every = critics(seen, None)
        taken = action.expand(len(every), -1).unsqueeze(-1)
        chosen: Tensor = every.gather(-1, taken).sum(-1)
        return chosen


class SacModel(CriticModel):
    """Everything that soft actor-critic learns, and the targets that follow it.

    ::

        batch --+--> target critics --> target --+
                +--> critics ---------------------+--> critics' loss --+
                +--> policy --> critics, frozen -----> policy's loss --+--> total
                           +-------------------> entropy coefficient --+

    The entropy coefficient's loss is linear in the share of a rank, too.
    """

    trains: ClassVar[tuple[type[OffPolicyPolicy[Any]], ...]] = (SquashedGaussianPolicy,)
    metrics = ("critic_loss", "policy_loss", "entropy", "entropy_coefficient", "value")

    def __init__(self, policy: PolicyConfig, sac: SacLossConfig) -> None:
        super().__init__(policy, sac)
        self._sac = sac
        self.log_entropy_coefficient = nn.Parameter(
            torch.full((1,), math.log(sac.initial_entropy_coefficient))
        )
        asked = sac.target_entropy
        self._target_entropy = self.entropy_aimed_at(policy.action_size) if asked is None else asked

    @staticmethod
    def entropy_aimed_at(action_size: int) -> float:
        """Return the target of the entropy where none is set: Haarnoja et al. 2018."""
        return -float(action_size)

    def by_hand(self) -> FusedSac:
        """Return losses and gradients written out by hand, for what `FusedSac` covers."""
        critics, targets = (
            Layers(tuple(one.weights), tuple(one.biases)) for one in (self.critic, self.target)
        )
        coefficient, fixed = self.log_entropy_coefficient, self._sac.entropy_coefficient
        return FusedSac(self.policy, critics, targets, coefficient, fixed, self._target_entropy)

    def forward(self, batch: SacBatch) -> SacLosses:
        """Return the losses of a batch, with gradients for all but the targets."""
        fixed = self._sac.entropy_coefficient
        coefficient = self.log_entropy_coefficient.detach().exp()
        if fixed is not None:
            coefficient = coefficient.new_full((1,), fixed)
        with torch.no_grad():
            target = self._aimed_at(batch, coefficient)
        seen = self.policy.features(batch.observation)
        values = self.values_of(self.critic, seen, batch.action)
        total = of_critics = critic_loss(values, target, batch.weight)
        of_policy = entropy = coefficient.new_full((), math.nan)
        if batch.trains_policy:
            # The policy's loss does not train the encoder.
            of_policy, log_prob = self._policy_loss(seen.detach(), batch.noise, coefficient)
            if self._sac.cloning:
                cloned = cloning_loss(self.policy, seen, batch)
                of_policy = torch.lerp(of_policy, cloned, self._sac.cloning)
            total, entropy = total + of_policy, -log_prob.mean()
            if fixed is None and self._sac.cloning < 1.0:
                total = total + entropy_coefficient_loss(
                    self.log_entropy_coefficient, log_prob, self._target_entropy
                )
        with torch.no_grad():
            error = (values - target).abs().mean(0).float()
            metrics = [of_critics, of_policy, entropy, coefficient.mean(), values.mean()]
            stacked = torch.stack([one.detach().float() for one in metrics])
            value = values.mean(0).float()
        # A sum and no view: FSDP2 loses its hooks on outputs that are views.
        return SacLosses(total.sum(), error, value, stacked)

    def _aimed_at(self, batch: SacBatch, coefficient: Tensor) -> Tensor:
        """The target of the critics, ``[N]``."""
        following = self.policy.features(batch.next_observation)
        next_action, next_log_prob = self.policy.sample(following, batch.next_noise)
        next_values = self.target(following, next_action, batch.target_critics)
        return soft_target(batch.reward, batch.discount, next_values, next_log_prob, coefficient)

    def _policy_loss(
        self, seen: Tensor, noise: Tensor, coefficient: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The policy's loss, and the log-probs ``[N]`` of the actions that it sampled, or what is
        expected of them."""
        acted, log_prob = self.policy.sample(seen, noise)
        values = self.critic.frozen(seen, acted)
        if self._sac.target_critics is not None:
            values = values.mean(0, keepdim=True)
        return policy_loss(log_prob, values, coefficient), log_prob


class ChoosingSacModel(SacModel):
    """The same where an action is one choice: the critics know the values of all, so what else is
    sampled is an expectation.

    Source: Christodoulou 2019, "Soft Actor-Critic for Discrete Action Settings"; its target of the
    entropy is 0.98 of that of uniform choices.
    """

    trains = (SoftCategoricalPolicy,)

    @staticmethod
    def entropy_aimed_at(action_size: int) -> float:
        return 0.98 * math.log(action_size)

    def _aimed_at(self, batch: SacBatch, coefficient: Tensor) -> Tensor:
        following = self.policy.features(batch.next_observation)
        values = self.target(following, None, batch.target_critics)
        following_value = soft_value(values, self.policy.log_probs(following), coefficient)
        return batch.reward + batch.discount * following_value

    def _policy_loss(
        self, seen: Tensor, noise: Tensor, coefficient: Tensor
    ) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            values = self.critic(seen, None)
            if self._sac.target_critics is not None:
                values = values.mean(0, keepdim=True)
        log_probs = self.policy.log_probs(seen)
        expected = (log_probs.exp() * log_probs).sum(-1)
        return -soft_value(values, log_probs, coefficient).mean(), expected


class CloningModel(CriticModel):
    """A policy that clones demonstrations and learns nothing else: it has no critics."""

    trains = (SquashedGaussianPolicy, SoftCategoricalPolicy)
    metrics = OF_CLONING

    def forward(self, batch: SacBatch) -> SacLosses:
        """Return the loss of a batch, with gradients for the policy and its encoder."""
        loss = cloning_loss(self.policy, self.policy.features(batch.observation), batch)
        none = torch.zeros_like(batch.weight)
        # A sum and no view: FSDP2 loses its hooks on outputs that are views.
        return SacLosses(loss.sum(), none, none, loss.detach().float().reshape(1))


def cloning_loss(policy: Any, seen: Tensor, batch: SacBatch) -> Tensor:
    """What the policy says against the actions of demonstrations; it trains the encoder, too.

    HG-DAgger (Kelly et al. 2019) where these grow by what a person does.
    """
    cloned: Tensor = policy.cloned(seen, batch.action)
    if batch.demonstrated is None:
        return (0.0 * cloned).mean()  # with gradients, of 0: nothing else may have any
    return -(cloned * batch.demonstrated).mean()


def model_for(policy: PolicyConfig, sac: SacLossConfig) -> CriticModel:
    """Return the new model that learns actions of this kind."""
    if not sac.critics:
        return CloningModel(policy, sac)
    return (ChoosingSacModel if policy.acts.discrete else SacModel)(policy, sac)


LossesT = TypeVar("LossesT", bound=CriticLossConfig)
SKIPPED_IN_A_ROW = 100
"""gradient steps whose gradients were not finite, after which the training has diverged"""


class CriticTrainer(ABC, Generic[LossesT]):
    """An `OffPolicyTrainer` over `FSDPModelManager`, for one rank of an actor group.

    torch.distributed must be up when ``world_size`` is above 1. All methods are collective.

    Args:
        config: losses and optimizer.
        losses: the losses' own numbers, of ``config``.
        policy: the policy and its spaces.
        world_size: ranks, which share each batch equally.
        rank: number of this rank.

    Raises `ValueError` for a policy that does not fit the spaces, and for FSDP1 over several ranks.
    """

    def __init__(
        self,
        config: CriticTrainerConfig,
        losses: LossesT,
        policy: PolicyConfig,
        world_size: int = 1,
        rank: int = 0,
    ) -> None:
        if world_size > 1 and config.fsdp.strategy != "fsdp2":
            raise ValueError(
                f"strategy is {config.fsdp.strategy!r}: its ranks hold other parts of the critics "
                "than of their targets, which follow them; over several ranks take 'fsdp2'"
            )
        self.losses = losses
        self._bucket_bytes = config.bucket_bytes
        model = partial(self.make_model, policy)
        self.manager = FSDPModelManager(config.fsdp, world_size, rank, model)
        with building(config.seed):
            self.manager.setup_model_and_optimizer()
        self._generator = torch.Generator(self.manager.device).manual_seed(config.seed)
        self._noise_size = 0 if policy.acts.discrete else policy.action_size
        """numbers of noise for an action; choices need none"""
        self._images = [image.name for image in policy.sees.of_kind("image")]
        self.version = 0
        """number of iterations that were trained"""
        self._skipped_in_a_row = 0
        self._critics, self._targets = _local(self._model.critic), _local(self._model.target)

    @abstractmethod
    def make_model(self, policy: PolicyConfig) -> CriticModel:
        """Return what is trained, new."""

    def target_critics(self) -> Tensor | None:
        """Return the critics for the targets of this step, the same on all ranks; None: all."""
        return None

    @property
    def trains_policy(self) -> bool:
        """Whether this step trains the policy, too."""
        return True

    @property
    def _model(self) -> CriticModel:
        model = self.manager.model
        if not isinstance(model, CriticModel):
            raise TypeError(f"a CriticModel is trained, not {type(model)}")
        return model

    def step(self, batch: ReplayBatch) -> GradientStep:
        """Take one gradient step. Raises `TrainingDiverged` where many in a row were skipped."""
        manager = self.manager
        self._model.policy.uniform.fill_(False)
        share = self._share(batch)
        for group in manager.optimizer.param_groups:
            group["frozen"] = group["name"] == "policy" and not share.trains_policy
        losses = self.accumulate(share)
        norm, _ = manager.optimizer_step()
        if math.isfinite(norm):
            self._skipped_in_a_row = 0
            polyak_update(self._targets, self._critics, self.losses.tau)
        else:
            self._skipped_in_a_row += 1
            if self._skipped_in_a_row == SKIPPED_IN_A_ROW:
                raise TrainingDiverged(
                    f"{SKIPPED_IN_A_ROW} gradient steps in a row had gradients that are not finite "
                    f"(last norm: {norm}): lower the learning rate, or look for NaN in "
                    "observations and rewards; the last checkpoint is from before"
                )
        numbers, error = self._measured(losses, batch.demonstrated)
        if not share.trains_policy:
            numbers = {name: one for name, one in numbers.items() if name not in OF_POLICY}
        return GradientStep({**numbers, "grad_norm": norm}, error)

    def accumulate(self, share: SacBatch) -> SacLosses:
        """Return the losses of a share; set the gradients, which were zero."""
        with self.manager.autocast():
            losses: SacLosses = self.manager.model(share)
        self.manager.backward(losses.total)
        return losses

    def _measured(self, losses: SacLosses, shown: Bools | None) -> tuple[dict[str, float], Floats]:
        """Metrics of a step, and the errors ``[B]``, of all ranks."""
        kinds = torch.zeros(len(losses.error)) if shown is None else torch.from_numpy(shown)
        columns = torch.stack([losses.error, losses.value, kinds.to(losses.error)])
        mine = torch.cat([losses.metrics, columns.flatten()])
        gathered = torch.stack(collectives.all_gather(self.manager, mine)).cpu()
        names = self._model.metrics
        metrics, rest = gathered[:, : len(names)], gathered[:, len(names) :]
        error, value, demonstrated = rest.reshape(len(rest), 3, -1).movedim(1, 0).flatten(1)
        numbers: dict[str, float] = dict(zip(names, metrics.mean(0).tolist(), strict=True))
        if shown is not None:
            shares = _halves(error, value, demonstrated > 0.0)
            told = shares if self.losses.critics else ("demonstrations_share",)
            numbers |= {name: shares[name] for name in told}
        return numbers, error.numpy()

    def _share(self, batch: ReplayBatch) -> SacBatch:
        """Return this rank's share of a batch, on its device."""

        def tensor(column: ObservationTensors) -> Tensor:
            if not isinstance(column, Tensor):
                raise TypeError("a column of numbers was expected")
            return column

        device = self.manager.device
        columns = (batch.action, batch.reward, batch.discount, batch.weight)
        action, reward, discount, weight = (tensor(to_tensors(one, device)) for one in columns)
        next_noise, noise = self._noise(len(reward)), self._noise(len(reward))
        return SacBatch(
            self._observed(batch.observation),
            self._observed(batch.next_observation),
            action,
            reward,
            discount,
            weight,
            noise,
            next_noise,
            self.target_critics(),
            self.trains_policy,
            self._demonstrated(batch),
        )

    def _demonstrated(self, batch: ReplayBatch) -> Tensor | None:
        """The weights of demonstrations in this rank's share: see `SacBatch`."""
        count = int((batch.index < 0).sum())
        if batch.demonstrated is None or not count:
            return None
        weights = torch.from_numpy(batch.demonstrated).to(self.manager.device, torch.float32)
        return weights * (len(batch.index) / count)

    def _observed(self, seen: ObservationArray) -> ObservationTensors:
        """Observations on the device; of images, each shifted by as much as it happens."""
        manager, limit = self.manager, self.losses.image_shift
        observed = to_tensors(seen, manager.device)
        if isinstance(observed, Tensor) or not limit:
            return observed
        for name in self._images:
            offsets = torch.randint(
                -limit,
                limit + 1,
                (manager.world_size, len(seen), 2),
                generator=self._generator,
                device=manager.device,
            )
            observed[name] = random_shift(observed[name], offsets[manager.rank])
        return observed

    def _noise(self, share: int) -> Tensor:
        """This rank's part of the standard normal noise of all: ``[share, A]``, or ``[share, 0]``
        for choices."""
        manager = self.manager
        whole = torch.randn(
            (manager.world_size, share, self._noise_size),
            generator=self._generator,
            device=manager.device,
        )
        return whole[manager.rank]

    def end_iteration(self) -> None:
        """Count the version up."""
        self.version += 1

    def publish(self) -> WeightUpdate:
        """Return the policy's weights of the present version; empty buckets but on rank 0."""
        prefix = "policy."
        state = self.manager.get_model_state_dict()
        policy = {
            name.removeprefix(prefix): tensor
            for name, tensor in state.items()
            if name.startswith(prefix)
        }
        return pack(policy, self.version, self._bucket_bytes)

    def begin_checkpoint(self, path: Path) -> Future[Path]:
        """Start writing a checkpoint folder, and return."""
        return self.manager.begin_checkpoint(path, self._extra())

    def save_checkpoint(self, path: Path) -> None:
        """Write a checkpoint folder, atomically."""
        self.manager.save_checkpoint(path, self._extra())

    def _extra(self) -> dict[str, object]:
        return {"version": self.version, "noise": self._generator.get_state()}

    def take_weights(self, first: FirstWeights) -> None:
        """Begin with weights of another run; optimizer and version stay as they are."""
        self.manager.take_weights(first)

    def load_checkpoint(self, path: Path) -> None:
        """Continue where the checkpoint was written, under any world size."""
        extra = self.manager.load_checkpoint(path)[0]
        self.version = extra["version"]
        self._generator.set_state(extra["noise"].clone())


class SacTrainer(CriticTrainer[SacLossConfig]):
    """Soft actor-critic: see `CriticTrainer`."""

    def __init__(
        self, config: SacTrainerConfig, policy: PolicyConfig, world_size: int = 1, rank: int = 0
    ) -> None:
        super().__init__(config, config.sac, policy, world_size, rank)
        self._by_hand = fused_sac(self.manager, self.losses)

    def make_model(self, policy: PolicyConfig) -> CriticModel:
        return model_for(policy, self.losses)

    def accumulate(self, share: SacBatch) -> SacLosses:
        if self._by_hand is None:
            return super().accumulate(share)
        self.manager.check_loaded("a gradient step")
        error, value, metrics = self._by_hand(share)
        return SacLosses(metrics.new_zeros(()), error, value, metrics)

    def target_critics(self) -> Tensor | None:
        sac, generator = self.losses, self._generator
        if sac.target_critics is None:
            return None
        drawn = torch.randperm(sac.critics, generator=generator, device=generator.device)
        return drawn[: sac.target_critics]

    @property
    def trains_policy(self) -> bool:
        return self.manager.steps % self.losses.policy_every == 0


def fused_sac(manager: FSDPModelManager, sac: SacLossConfig) -> FusedSac | None:
    """Return the hand-written losses and gradients if they cover this model, else None."""
    model, cpu = manager.model, manager.device.type == "cpu"
    if type(model) is not SacModel or type(model.policy) is not MlpSquashedGaussianPolicy:
        return None
    exact = manager.world_size == 1 and cpu and manager.cfg.precision == "float32"
    other = sac.critic_layer_norm or sac.cloning or sac.target_critics is not None
    return model.by_hand() if sac.fused and exact and not other else None


def _halves(error: Tensor, value: Tensor, demonstrated: Tensor) -> dict[str, float]:
    """Return means over demonstrations, and over own experience, of columns ``[B]``."""
    kinds = {"demonstrations": demonstrated, "own": ~demonstrated}
    halves = {
        f"{name}_{kind}": float(column[rows].mean())
        for name, column in (("value", value), ("error", error))
        for kind, rows in kinds.items()
        if rows.any()
    }
    return {**halves, "demonstrations_share": float(demonstrated.float().mean())}


def _local(module: nn.Module) -> list[Tensor]:
    """Return this rank's shards of the parameters: the memory itself."""
    return [local_shard(one).detach() for one in module.parameters()]
