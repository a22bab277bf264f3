"""Our actor and critic as ranks of a training group.

::

    groups --> [ log-probs: ref, old_actor or actor ] --> hook --> FSDPActor.run_training
                              |                      ^
                 (KL rewards) v                      | values
                        the critic of the same rank: `GroupCritic`

`GroupRank` is what both have in common: where a rank begins, its checkpoints, its sleep in parts.
`GroupActor` keeps weights by tag beside those that are trained.
"""

from __future__ import annotations

import asyncio
import importlib
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
from numpy import array_equal

from rlinf_async.backends.language import PARTS, LanguageTrainer, SleepingTrainer
from rlinf_async.backends.megatron.config import MegatronTrainerConfig
from rlinf_async.channels import Channel, LatestSender, Receiver
from rlinf_async.messages.language import LanguageTrainReport, SampleGroup, TrainingSample
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.parallel import DataRank
from rlinf_async.runtime.ray.training.args import (
    TrainArgs,
    backend,
    batches,
    checkpoint_folder,
    hugging_face_config,
    start_of,
    trainer_config,
    write_tracker,
)
from rlinf_async.runtime.ray.training.pairs import ActorStep, CriticStep, from_peer
from rlinf_async.runtime.ray.training.ranks import PeerFailed
from rlinf_async.workers.actor import FSDPActor
from rlinf_async.workers.actor.language import LanguageTrainingWorker
from rlinf_async.workers.critic import LanguageCritic

if TYPE_CHECKING:
    from rlinf_async.backends.language_training.weights import KeptWeights


class GroupRank(LanguageTrainingWorker):
    """Base of ranks of an actor and of a critic. ``args`` are those of its role."""

    args: TrainArgs
    torch_device: str
    """torch's name of this rank's device"""
    start_rollout_id: int = 0
    """the first rollout to train"""
    paused: bool = False
    """whether a memory saver has taken all of the device's memory"""

    async def join_collective(self) -> None:
        """Set up torch.distributed with the other ranks, unless that was done."""
        if not self._context.joined:
            await super().join_collective()

    def make_trainer(self) -> LanguageTrainer:
        """Build the trainer, once all ranks agree where to begin."""
        from rlinf_async.algorithms.language.advantages import group_advantages
        from rlinf_async.backends.language_training.model import without_progress_bars

        _ = group_advantages[self._config.advantage.name]  # is it known?
        start = start_of(self.args)
        self._check_same_start(start.rollout_id)
        self.start_rollout_id = start.rollout_id
        with without_progress_bars():
            made = super().make_trainer()
        self._trainer = made  # `restore` uses it
        if start.checkpoint is not None:
            self.restore(made.load_checkpoint(start.checkpoint))
        return made

    @abstractmethod
    async def train_rollout(
        self, groups: Sequence[SampleGroup], *, rollout_id: int, paired: Any = None
    ) -> LanguageTrainReport:
        """Train on this rank's share of one rollout.

        Args:
            groups: the share.
            rollout_id: number of the rollout.
            paired: the step in which the other rank of a pair trains the same rollout.
        """

    def restore(self, extras: Sequence[Mapping[str, Any]]) -> None:
        """Take back what each rank has saved beside its model."""

    def beside_model(self) -> dict[str, object]:
        """Return what this rank saves beside its model."""
        return {}

    def vote(self, error: Exception | None) -> None:
        """Raise this rank's error, or `RuntimeError` where another rank has one. Collective.

        So no rank goes on to compute with one that does not.
        """
        failed = self.any_rank(error is not None)
        if error is not None:
            raise error
        if failed:
            raise RuntimeError(f"{self.name} does not train: another rank failed, see its error")

    def any_rank(self, answer: bool) -> bool:
        """Return whether ``answer`` is true on any rank. Collective over all ranks, those of one
        model too."""
        if self.world_size == 1:
            return answer
        import torch
        from torch import distributed

        found = torch.tensor([int(answer)], device=self.torch_device)
        distributed.all_reduce(found, distributed.ReduceOp.MAX)
        return bool(found)

    def _check_same_start(self, rollout_id: int) -> None:
        if self.world_size == 1:
            return
        import torch
        from torch import distributed

        if self.torch_device != "cpu":
            torch.cuda.set_device(self.torch_device)
        found: list[Any] = [None] * self.world_size
        distributed.all_gather_object(found, rollout_id)
        if len(set(found)) > 1:
            ids = ", ".join(f"rank {rank}: {one}" for rank, one in enumerate(found))
            raise ValueError(
                f"the ranks would begin at different rollouts ({ids}): load is "
                f"{self.args.load!r}; it must be the same folder on all hosts"
            )

    @property
    def trained_version(self) -> int:
        """Number of rollouts that the weights were trained on."""
        return self._trainer.version

    @property
    def data_rank(self) -> DataRank:
        """Share of a rollout that this rank trains."""
        return self._trainer.data_rank

    @property
    def _sleeping(self) -> SleepingTrainer:
        return cast(SleepingTrainer, self._trainer)

    async def sleep(self, parts: Collection[str] = PARTS) -> None:
        """Free the device's memory of these parts."""
        await self.compute(self._sleeping.sleep, parts)

    async def wake_up(self, parts: Collection[str] = PARTS) -> None:
        """Take these parts back to the device, where they slept."""
        await self.compute(self._sleeping.wake_up, parts)

    @property
    def asleep(self) -> frozenset[str]:
        """The parts that sleep."""
        if self.paused:
            return PARTS
        return self._sleeping.asleep

    async def offload(self) -> None:
        """Free the device's memory."""
        await self.sleep()

    async def onload(self) -> None:
        """Take everything back to the device."""
        await self.wake_up()

    async def save(self, rollout_id: int) -> str:
        """Write the checkpoint after a rollout; return its folder. Collective."""
        if self.args.save is None:
            raise ValueError(
                f"save_model({rollout_id}): there is no folder to save to; set args.save (of a "
                "critic: args.critic_save)"
            )
        folder = checkpoint_folder(self.args.save, rollout_id)
        await self.compute(self._trainer.save_checkpoint, folder, self.beside_model())
        if self.rank == 0:
            write_tracker(self.args.save, rollout_id)
        await self.compute(self.any_rank, False)  # all ranks wait until it is written
        return str(folder)

    def read_model_files(self) -> tuple[Any, Any]:
        """Return the Hugging Face config, and the tokenizer of the folder if there is one.

        One rank after the other: they may share a disk, and a cache. Collective.
        """
        found: tuple[Any, Any] = (None, None)
        failed: Exception | None = None
        for rank in range(self.world_size):
            if rank == self.rank:
                try:
                    found = _model_files(self.args)
                except Exception as error:  # after the others had their turn, too
                    failed = error
            self.any_rank(False)
        if failed is not None:
            raise failed
        return found

    def _check_ready(
        self, samples: Sequence[TrainingSample], *, reference: bool, values: bool
    ) -> None:
        """Raise `ValueError` where samples lack what the loss or the advantage needs."""
        for one in samples:
            if values and one.advantage is None and one.value is None:
                raise ValueError(
                    f"advantage_estimator {self.args.advantage_estimator!r} needs values: "
                    "connect() a group of role 'critic', or pass values with the rollout data"
                )
            if reference and one.ref_log_prob is None:
                raise ValueError(
                    "kl_coef or kl_loss_coef needs reference log-probs: call async_init(..., "
                    "with_ref=True), or pass ref_log_probs with the rollout data (of a critic "
                    "that trains alone always the latter)"
                )

    def check_size(self, groups: Sequence[SampleGroup]) -> None:
        """Raise `ValueError` unless these are this rank's whole share of a rollout."""
        size = sum(len(group.samples) for group in groups)
        wanted = self._sizes.total_batch_size
        if size != wanted:
            raise ValueError(
                f"{self.name} was given {size} samples of {len(groups)} prompts, but its share of "
                f"a rollout is {wanted} (rollout_batch_size {self.args.rollout_batch_size} x "
                f"n_samples_per_prompt {self.args.n_samples_per_prompt}, over "
                f"{self.data_rank.size} data ranks)"
            )

    def _fed(self, groups: Sequence[SampleGroup]) -> Channel[SampleGroup]:
        """Return a channel of this process with these groups, for this rank's share."""
        channel = Channel(SampleGroup, name=f"{self.name} rollout", capacity=max(len(groups), 1))
        for group in groups:
            channel.sender.put_nowait(group, key=self.data_rank.rank, weight=len(group.samples))
        return channel


def _model_files(args: TrainArgs) -> tuple[Any, Any]:
    config, folder = hugging_face_config(args), args.hf_checkpoint
    if folder is None:
        return config, None
    from rlinf_async.data.prompts import FILES, load_tokenizer

    has_tokenizer = any((Path(folder) / name).is_file() for name in FILES)
    return config, load_tokenizer(folder) if has_tokenizer else None


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
        alone = self.args.num_critic_only_steps
        if rollout_id < alone:
            raise ValueError(
                f"rollout {rollout_id} is trained by the critic alone (num_critic_only_steps is "
                f"{alone}): call async_train of the actor from rollout {alone} on"
            )
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
        """Return whether an answer is true for a sample of any rank: all of them compute, or none.
        Collective."""
        return self.any_rank(any(answers))

    async def _add_values(
        self, groups: Sequence[SampleGroup], paired: ActorStep, rollout_id: int
    ) -> None:
        """Have the critic value these samples."""
        if paired.prepares:
            for group in groups:
                await paired.prepared.sender.put(group)
        by_number = {(s.group, s.index): s for group in groups for s in group.samples}
        missing = set(by_number)
        while missing:
            valued = await paired.values.receiver.get()
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
        """Keep the weights that the engines generated with, after they were given new ones."""
        if self.args.keep_old_actor:
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


class GroupCritic(GroupRank, LanguageCritic):
    """One rank of a critic. Of the ranks of one model, the one that reads values for the others."""

    def __init__(self, args: TrainArgs, device: str) -> None:
        self.args, self.torch_device = args, device
        config = trainer_config(args, critic=True, reference=False, device=device)
        # No limit of staleness: rollouts that a critic trains alone make no version of the actor.
        super().__init__(
            config,
            batches(args),
            actor_ranks=args.data_ranks(self.world_size),
            backend=backend(args, critic=True),
        )

    @staticmethod
    def ranks_of_a_model(trainer: Any) -> int:
        """Return how many ranks hold one model together."""
        if isinstance(trainer, MegatronTrainerConfig):
            return trainer.megatron.tp * trainer.megatron.pp
        return 1

    async def train_rollout(
        self, groups: Sequence[SampleGroup], *, rollout_id: int, paired: CriticStep | None = None
    ) -> LanguageTrainReport:
        """Value this rank's share of one rollout, and train on it.

        Args:
            groups: the share.
            rollout_id: number of the rollout.
            paired: the step in which the actor of this rank trains the same rollout; None while
                the critic trains alone.

        Raises:
            PeerFailed: that actor failed before it gave what values are computed from, or is lost.
        """
        failed: Exception | None = None
        if paired is not None and paired.prepared is not None and self.data_rank.is_io:
            doing = f"{self.name} cannot train rollout {rollout_id}"
            try:
                prepared = self._prepared(paired.prepared, len(groups))
                groups = await from_peer(paired.peer, doing, prepared)
            except PeerFailed as error:  # the other ranks must not train either
                failed = error
        samples = [sample for group in groups for sample in group.samples]
        await self.compute(self._agree_ready, samples, failed)
        valued = Channel(SampleGroup, name=f"{self.name} valued", capacity=max(len(groups), 1))
        with valued.receiver:
            if paired is None or not self.data_rank.is_io:  # nobody takes them
                return await self.value_and_train(self._fed(groups).receiver, valued.sender)
            passing = asyncio.create_task(
                paired.pass_on(len(groups), valued.receiver, self.data_rank.rank)
            )
            try:
                report = await self.value_and_train(self._fed(groups).receiver, valued.sender)
                await passing
                return report
            finally:
                passing.cancel()

    async def _prepared(self, actor: Receiver[SampleGroup], groups: int) -> list[SampleGroup]:
        """Take the share from the actor, which has added reference log-probs."""
        return [await actor.get() for _ in range(groups)]

    def _agree_ready(self, samples: Sequence[TrainingSample], failed: Exception | None) -> None:
        """Check the samples, of those who read them, for all ranks or for none. Collective.

        Args:
            failed: what this rank failed with before.
        """
        try:
            if self.data_rank.is_io and failed is None:
                self._check_ready(samples, reference=self.args.kl_coef > 0.0, values=False)
        except ValueError as error:
            failed = error
        self.vote(failed)
