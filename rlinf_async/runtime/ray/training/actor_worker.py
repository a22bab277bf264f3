"""`GroupActor`: our `FSDPActor` as one rank of a training group, with tagged weights.

::

    groups --> [ log-probs: ref, old_actor or actor ] --> hook --> FSDPActor.run_training
                              |                      ^
                 (KL rewards) v                      | values
                        the critic of the same rank: `GroupCritic`
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from numpy import array_equal

from rlinf_async.channels import LatestSender
from rlinf_async.messages.language import LanguageTrainReport, SampleGroup, TrainingSample
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.runtime.ray.training.args import TrainArgs
from rlinf_async.runtime.ray.training.critics import ActorStep, from_peer
from rlinf_async.runtime.ray.training.settings import backend, batches, trainer_config
from rlinf_async.runtime.ray.training.worker import GroupRank
from rlinf_async.workers.actor import FSDPActor

if TYPE_CHECKING:
    from rlinf_async.backends.language_training.kept_weights import KeptWeights

ACTOR, REF, OLD_ACTOR, ROLLOUT_ACTOR = "actor", "ref", "old_actor", "rollout_actor"


class GroupActor(GroupRank, FSDPActor):
    """One rank of an actor."""

    def __init__(self, args: TrainArgs, device: str, *, with_ref: bool) -> None:
        self.args, self.torch_device = args, device
        self._with_ref = with_ref
        self._restored_reference = False
        config = trainer_config(args, critic=False, reference=with_ref, device=device)
        super().__init__(
            config,
            batches(args),
            backend=backend(args, critic=False),
            max_staleness=args.max_staleness,
        )
        path = args.rollout_data_postprocess_path
        self._hook = None if path is None else load_function(path)

    async def setup(self) -> None:
        """Build the model; keep the weights that are asked for."""
        await super().setup()
        await self.compute(self._keep)

    def _keep(self) -> None:
        kept = self.kept_weights
        if self._with_ref and self.args.ref_load is not None and not self._restored_reference:
            self._load_reference(self.args.ref_load)
        if self.args.keep_old_actor:
            kept.backup(OLD_ACTOR)
            if self.args.update_weights_interval == 1:
                kept.backup(ROLLOUT_ACTOR)

    def _load_reference(self, folder: str) -> None:
        """Keep the weights of another folder as the reference."""
        args = msgspec.structs.replace(self.args, hf_checkpoint=folder, model_config={})
        config = trainer_config(args, critic=False, reference=False, device=self.torch_device)
        trainer: Any = self._trainer
        other = type(trainer)(config, self.world_size, self.rank)
        self.kept_weights.keep(REF, other.manager)

    @property
    def kept_weights(self) -> KeptWeights:
        """Copies of weights on the CPU, by tag."""
        trainer: Any = self._trainer
        kept: KeptWeights = trainer.kept_weights
        return kept

    def beside_model(self) -> dict[str, object]:
        """Return the reference, where it is another one than at the beginning."""
        if self.args.ref_update_interval is None or REF not in self.tags:
            return {}
        return {REF: self.kept_weights.of(REF)}

    def restore(self, extras: Sequence[Mapping[str, Any]]) -> None:
        """Take the saved reference."""
        if not self._with_ref or REF not in extras[0]:
            return
        if len(extras) != self.world_size:
            raise ValueError(
                f"the checkpoint has the reference of {len(extras)} ranks (ref_update_interval), "
                f"which {self.world_size} ranks cannot take: go on with as many, which cut the "
                "model in the same way"
            )
        self.kept_weights.put(REF, extras[self.rank][REF])
        self._restored_reference = True

    async def switch(self, tag: str) -> None:
        """Put the weights of a tag into the model."""
        await self.compute(self.kept_weights.switch, tag)

    async def save(self, rollout_id: int) -> str:
        """Write the checkpoint after a rollout; return its folder. Collective."""
        await self.switch(ACTOR)
        return await super().save(rollout_id)

    async def sync_model_to_rollout(self, weights: LatestSender[WeightUpdate]) -> int:
        """Publish the weights that are trained, from rank 0; return their version. Collective."""
        await self.switch(ACTOR)
        return await super().sync_model_to_rollout(weights)

    async def train_rollout(
        self,
        groups: Sequence[SampleGroup],
        *,
        rollout_id: int,
        paired: ActorStep | None = None,
    ) -> LanguageTrainReport:
        """Train on this rank's share of one rollout.

        Args:
            groups: the share.
            rollout_id: number of the rollout.
            paired: the step in which the critic of this rank values the same rollout.

        Raises:
            PeerFailed: that critic failed, or is lost.
        """
        await self.switch(ACTOR)
        samples = [sample for group in groups for sample in group.samples]
        await self.compute(self._add_log_probs, samples)
        failed: Exception | None = None
        if paired is not None and self.data_rank.is_io:  # it feeds the others of its model
            doing = f"{self.name} cannot train rollout {rollout_id}"
            try:
                await from_peer(paired.peer, doing, self._add_values(groups, paired, rollout_id))
            except RuntimeError as error:  # the other ranks must not train either
                failed = error
        await self.compute(self._make_ready, samples, failed)
        report = await self.run_training(self._fed(groups).receiver)
        interval = self.args.ref_update_interval
        if interval is not None and (rollout_id + 1) % interval == 0 and REF in self.tags:
            await self.compute(self.kept_weights.backup, REF)
        return report

    @property
    def tags(self) -> list[str]:
        """Tags of the weights that the model can be switched to."""
        return sorted({ACTOR, *self.kept_weights.tags})

    def _add_log_probs(self, samples: Sequence[TrainingSample]) -> None:
        """Fill in the log-probs that are missing on any rank."""
        if REF in self.tags and self._any(one.ref_log_prob is None for one in samples):
            found = self._trainer.log_probs(samples, reference=True)
            for sample, log_prob in zip(samples, found, strict=True):
                sample.ref_log_prob = log_prob
        no_rollout = self._any(one.log_prob.size > 0 and _unknown(one) for one in samples)
        if no_rollout and self.args.use_tis:
            raise ValueError(
                "use_tis needs rollout_log_probs of every sample: without them the actor's own "
                "would be taken for those of the rollout, and each weight would be 1"
            )
        no_previous = self._any(one.prev_log_prob is None for one in samples)
        if not no_rollout and (self.args.use_rollout_logprobs or not no_previous):
            return
        policy = OLD_ACTOR if OLD_ACTOR in self.tags else ACTOR
        with self.kept_weights.swapped_in(policy):
            found = self._trainer.log_probs(samples)
        for sample, log_prob in zip(samples, found, strict=True):
            if sample.prev_log_prob is None:
                sample.prev_log_prob = log_prob
            if _unknown(sample):
                sample.log_prob = sample.prev_log_prob

    def _any(self, answers: Iterable[bool]) -> bool:
        """Whether it is true of a sample of any rank: all of them compute, or none. Collective."""
        return self.any_rank(any(answers))

    async def _add_values(
        self, groups: Sequence[SampleGroup], paired: ActorStep, rollout_id: int
    ) -> None:
        """Have the critic value these samples."""
        if paired.prepared is not None:
            for group in groups:
                await paired.prepared.put(group)
        by_number = {(s.group, s.index): s for group in groups for s in group.samples}
        missing = set(by_number)
        while missing:
            valued = await paired.values.get()
            if valued.iteration != rollout_id:
                raise RuntimeError(
                    f"the critic sent values of rollout {valued.iteration}, but the actor trains "
                    f"rollout {rollout_id}: train both on the same rollouts, in order"
                )
            for sample in valued.samples:
                number = sample.group, sample.index
                mine = by_number.get(number)
                if mine is None or not same_tokens(mine, sample):
                    raise RuntimeError(
                        f"the critic sent values of sample {number[0]}/{number[1]}, which this "
                        "rank of the actor does not have: give both the same rollout data"
                    )
                mine.value = sample.value
                missing.discard(number)

    def _make_ready(self, samples: list[TrainingSample], failed: Exception | None) -> None:
        """Call the hook, and check the samples, on all ranks or on none. Collective.

        Args:
            failed: what this rank failed with before.
        """
        try:
            if self._hook is not None and failed is None:
                self._call_hook(samples)
            args = self.args
            if self.data_rank.is_io and failed is None:
                self._check_ready(samples, reference=args.needs_reference, values=args.needs_values)
        except Exception as error:
            failed = error
        self.vote(failed)

    def _call_hook(self, samples: list[TrainingSample]) -> None:
        assert self._hook is not None
        returned = self._hook(self.args, samples)
        if returned is None or returned is samples:
            return
        if len(returned) != len(samples):
            raise ValueError(
                f"rollout_data_postprocess returned {len(returned)} samples of {len(samples)}: it "
                "may change them, but not their number (set loss_mask to leave one out)"
            )
        for old, new in zip(samples, returned, strict=True):
            for name in TrainingSample.__struct_fields__:
                setattr(old, name, getattr(new, name))

    async def shift_weights(self) -> None:
        """After the engines were given the weights: which ones they had when they generated."""
        if not self.args.keep_old_actor:
            return
        await self.compute(self._shift_weights)

    def _shift_weights(self) -> None:
        if self.args.update_weights_interval == 1:
            self.kept_weights.copy(ROLLOUT_ACTOR, OLD_ACTOR)
            self.kept_weights.backup(ROLLOUT_ACTOR)
        else:
            self.kept_weights.backup(OLD_ACTOR)


def same_tokens(one: TrainingSample, other: TrainingSample) -> bool:
    """Whether both are of the same prompt and response."""
    return array_equal(one.prompt_ids, other.prompt_ids) and array_equal(
        one.response_ids, other.response_ids
    )


def _unknown(sample: TrainingSample) -> bool:
    """Whether the rollout gave no log-probs."""
    return bool(sample.log_prob[0] != sample.log_prob[0])


def load_function(path: str) -> Callable[..., Any]:
    """Return the function at ``module.name`` or ``module:name``.

    Raises `ValueError`: it is not there.
    """
    module, _, name = path.replace(":", ".").rpartition(".")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, ValueError, AttributeError) as error:
        raise ValueError(f"the function {path!r} cannot be loaded: {error}") from error
    return found
