"""Our actor and critic as one rank of a training group: `FSDPActor` and `FSDPCritic` with the log-
probs of tagged weights, hooks, and a sleep in parts.

::

    train_rollout of an actor:
        groups --> [ log-probs: ref, old_actor or actor ] --> hook --> FSDPActor.run_training
                                  |                      ^
                     (KL rewards) v                      | values
    train_rollout of a critic:  groups --> FSDPCritic.value_and_train
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from rlinf_async.backends.language import LanguageTrainer
from rlinf_async.channels import Channel, LatestSender, Receiver, Sender
from rlinf_async.messages.language import LanguageTrainReport, SampleGroup, TrainingSample
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.runtime.ray.training.args import TrainArgs
from rlinf_async.runtime.ray.training.checkpoints import checkpoint_folder, start_of, write_tracker
from rlinf_async.runtime.ray.training.settings import batches, trainer_config
from rlinf_async.workers.actor import FSDPActor
from rlinf_async.workers.actor.language_worker import LanguageTrainingWorker
from rlinf_async.workers.critic import FSDPCritic

if TYPE_CHECKING:
    from rlinf_async.backends.fsdp.language.reference import KeptWeights
    from rlinf_async.backends.fsdp.language.trainer import LanguageTrainerBase

ACTOR, REF, OLD_ACTOR, ROLLOUT_ACTOR = "actor", "ref", "old_actor", "rollout_actor"
WEIGHTS, OPTIMIZER = "weights", "optimizer"
PARTS: Final = frozenset({WEIGHTS, OPTIMIZER})
"""parts that sleep"""


class GroupRank(LanguageTrainingWorker):
    """What ranks of an actor and of a critic have in common. ``args`` are those of its role."""

    args: TrainArgs
    start_rollout_id: int = 0
    """the first rollout to train"""
    paused: bool = False
    """whether a memory saver has taken all of the device's memory"""
    _fsdp: LanguageTrainerBase

    def make_trainer(self) -> LanguageTrainer:
        """Build the trainer, once all ranks agree where to begin."""
        start = start_of(self.args)
        self._check_same_start(start.rollout_id)
        self.start_rollout_id = start.rollout_id
        self._resume = None if start.checkpoint is None else str(start.checkpoint)
        made = super().make_trainer()
        self._fsdp = cast("LanguageTrainerBase", made)
        return made

    def _check_same_start(self, rollout_id: int) -> None:
        if self.world_size == 1:
            return
        import torch
        from torch import distributed

        if self._config.fsdp.device != "cpu":
            torch.cuda.set_device(self._config.fsdp.device)
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
        return self._fsdp.version

    async def barrier(self) -> None:
        """Wait for all ranks."""
        await self.compute(self._trainer.agree, 0)

    async def sleep(self, parts: Collection[str] = PARTS) -> None:
        """Free the device's memory of these parts."""
        await self.compute(self._sleep, parts)

    def _sleep(self, parts: Collection[str]) -> None:
        if WEIGHTS in parts and OPTIMIZER in parts:
            self._fsdp.offload()
        elif OPTIMIZER in parts:
            self._fsdp.offload(keep_weights=True)
        elif WEIGHTS in parts:
            self._fsdp.manager.offload_param_and_grad()

    async def wake_up(self, parts: Collection[str] = PARTS) -> None:
        """Take these parts back to the device, where they slept."""
        await self.compute(self._wake_up, parts)

    def _wake_up(self, parts: Collection[str]) -> None:
        if WEIGHTS in parts:
            self._fsdp.manager.load_param_and_grad()
        if OPTIMIZER in parts:
            self._fsdp.manager.load_optimizer()

    @property
    def asleep(self) -> frozenset[str]:
        """The parts that sleep."""
        if self.paused:
            return PARTS
        manager = self._fsdp.manager
        sleeping = {WEIGHTS: manager.param_offloaded, OPTIMIZER: manager.optimizer_offloaded}
        return frozenset(part for part, one in sleeping.items() if one)

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
        await self.compute(self._trainer.save_checkpoint, folder)
        if self.rank == 0:
            write_tracker(self.args.save, rollout_id)
        await self.barrier()
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
                    found = _model_files(self.args.hf_checkpoint, self._fsdp.language)
                except Exception as error:  # after the others had their turn, too
                    failed = error
            self._fsdp.agree(0)
        if failed is not None:
            raise failed
        return found

    def _fed(self, groups: Sequence[SampleGroup]) -> Channel[SampleGroup]:
        """Return a channel of this process with these groups for this rank."""
        size = sum(len(group.samples) for group in groups)
        wanted = self._sizes.total_batch_size
        if size != wanted:
            raise ValueError(
                f"{self.name} was given {size} samples of {len(groups)} prompts, but its share of "
                f"a rollout is {wanted} (rollout_batch_size {self.args.rollout_batch_size} x "
                f"n_samples_per_prompt {self.args.n_samples_per_prompt}, over {self.world_size} "
                "ranks)"
            )
        channel = Channel(SampleGroup, name=f"{self.name} rollout", capacity=max(len(groups), 1))
        for group in groups:
            channel.sender.put_nowait(group, key=self.rank, weight=len(group.samples))
        return channel


class GroupActor(GroupRank, FSDPActor):
    """One rank of an actor."""

    def __init__(self, args: TrainArgs, device: str, *, with_ref: bool) -> None:
        self.args = args
        self._with_ref = with_ref
        config = trainer_config(args, critic=False, reference=with_ref, device=device)
        super().__init__(config, batches(args), max_staleness=args.max_staleness)
        path = args.rollout_data_postprocess_path
        self._hook = None if path is None else load_function(path)

    async def setup(self) -> None:
        """Build the model; keep the weights that are asked for."""
        await super().setup()
        await self.compute(self._keep)

    def _keep(self) -> None:
        kept = self.kept_weights
        if self._with_ref and self.args.ref_load is not None:
            self._load_reference(self.args.ref_load)
        if self.args.keep_old_actor:
            kept.backup(OLD_ACTOR)
            if self.args.update_weights_interval == 1:
                kept.backup(ROLLOUT_ACTOR)

    def _load_reference(self, folder: str) -> None:
        """Keep the weights of another folder as the reference."""
        args = msgspec.structs.replace(self.args, hf_checkpoint=folder, model_config={})
        device = str(self._fsdp.manager.device)
        config = trainer_config(args, critic=False, reference=False, device=device)
        other = type(self._fsdp)(config, self.world_size, self.rank)
        self.kept_weights.keep(REF, other.manager)

    @property
    def kept_weights(self) -> KeptWeights:
        """Copies of weights on the CPU, by tag."""
        trainer: Any = self._fsdp
        kept: KeptWeights = trainer.kept_weights
        return kept

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
        to_critic: Sender[SampleGroup] | None = None,
        values: Receiver[SampleGroup] | None = None,
    ) -> LanguageTrainReport:
        """Train on this rank's share of one rollout.

        Args:
            groups: the share.
            rollout_id: number of the rollout.
            to_critic: where the critic of this rank waits for reference log-probs.
            values: where the values of the critic of this rank come from.
        """
        await self.switch(ACTOR)
        channel = self._fed(groups)  # before anything is computed: is it the whole share?
        samples = [sample for group in groups for sample in group.samples]
        await self.compute(self._add_log_probs, samples)
        if to_critic is not None:
            for group in groups:
                await to_critic.put(group, key=self.rank)
        if values is not None:
            await self._add_values(groups, values, rollout_id)
        if self._hook is not None:
            self._call_hook(samples)
        report = await self.run_training(channel.receiver)
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

    def _any(self, answers: Any) -> bool:
        """Whether it is true of a sample of any rank: all of them compute, or none. Collective."""
        return bool(self._trainer.agree(int(any(answers))))

    async def _add_values(
        self, groups: Sequence[SampleGroup], values: Receiver[SampleGroup], rollout_id: int
    ) -> None:
        """Take the values of these samples from the critic."""
        by_number = {(s.group, s.index): s for group in groups for s in group.samples}
        missing = set(by_number)
        while missing:
            valued = await values.get(key=self.rank)
            if valued.iteration != rollout_id:
                raise RuntimeError(
                    f"the critic sent values of rollout {valued.iteration}, but the actor trains "
                    f"rollout {rollout_id}: train both on the same rollouts, in order"
                )
            for sample in valued.samples:
                by_number[sample.group, sample.index].value = sample.value
                missing.discard((sample.group, sample.index))

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


class GroupCritic(GroupRank, FSDPCritic):
    """One rank of a critic."""

    def __init__(self, args: TrainArgs, device: str) -> None:
        self.args = args
        config = trainer_config(args, critic=True, reference=False, device=device)
        # No limit of staleness: rollouts that a critic trains alone make no version of the actor.
        super().__init__(config, batches(args), actor_ranks=self.world_size)

    async def train_rollout(
        self,
        groups: Sequence[SampleGroup],
        values: Sender[SampleGroup] | None = None,
        prepared: Receiver[SampleGroup] | None = None,
    ) -> LanguageTrainReport:
        """Value this rank's share of one rollout, and train on it.

        Args:
            groups: the share.
            values: to the actor of this rank; None while the critic trains alone.
            prepared: the same groups with reference log-probs, from that actor, if they are needed.
        """
        if prepared is not None:
            groups = [await prepared.get(key=self.rank) for _ in groups]
        channel = self._fed(groups)
        if values is not None:
            return await self.value_and_train(channel.receiver, values)
        alone = Channel(SampleGroup, name=f"{self.name} alone", capacity=len(groups))
        with alone.receiver:  # nobody takes them
            return await self.value_and_train(channel.receiver, alone.sender)


def _unknown(sample: TrainingSample) -> bool:
    """Whether the rollout gave no log-probs."""
    return bool(sample.log_prob[0] != sample.log_prob[0])


def _model_files(folder: str | None, language: Any) -> tuple[Any, Any]:
    if folder is None:
        return language.config, None
    from rlinf_async.data.tokenizer import FILES, load_tokenizer

    transformers = importlib.import_module("transformers")
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    has_tokenizer = any((Path(folder) / name).is_file() for name in FILES)
    return config, load_tokenizer(folder) if has_tokenizer else None


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
