"""`GroupRank`: what an actor and a critic have in common as one rank of a training group: where it
begins, its checkpoints, its sleep in parts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from rlinf_async.backends.language import PARTS, LanguageTrainer, SleepingTrainer
from rlinf_async.channels import Channel
from rlinf_async.messages.language import SampleGroup, TrainingSample
from rlinf_async.parallel import DataRank
from rlinf_async.runtime.ray.training.args import TrainArgs
from rlinf_async.runtime.ray.training.checkpoints import checkpoint_folder, start_of, write_tracker
from rlinf_async.runtime.ray.training.settings import hugging_face_config
from rlinf_async.workers.actor.language_worker import LanguageTrainingWorker


class GroupRank(LanguageTrainingWorker):
    """What ranks of an actor and of a critic have in common. ``args`` are those of its role."""

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
        from rlinf_async.backends.language_training.hugging_face import without_progress_bars

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
        """Whether it is true on any rank. Collective over all ranks, those of one model too."""
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
        """Which share of a rollout this rank trains."""
        return self._trainer.data_rank

    @property
    def _sleeping(self) -> SleepingTrainer:
        return cast(SleepingTrainer, self._trainer)

    async def barrier(self) -> None:
        """Wait for all ranks."""
        await self.compute(self.any_rank, False)

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
    from rlinf_async.data.tokenizer import FILES, load_tokenizer

    has_tokenizer = any((Path(folder) / name).is_file() for name in FILES)
    return config, load_tokenizer(folder) if has_tokenizer else None
