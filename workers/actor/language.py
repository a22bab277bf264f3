"""`LanguageActor`: trains a language model on sample groups and publishes every version of it.

::

    SampleGroup --by rank--> [ advantages -> normalised -> micro-batches -> steps ] --> report
                                                     |
                                                version + 1 --WeightUpdate, `Latest`--> rollout
    Sample --> [ previous, reference log-probs ] --> Sample

What it waits for: see `LanguageTrainingWorker`; publishing waits for nothing.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from rlinf_async.channels import LatestSender, Receiver, Sender
from rlinf_async.channels.wire import shared_bytes
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import Sample, Tokens
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.workers.actor.errors import WeightsDisagree
from rlinf_async.workers.actor.language_worker import LanguageTrainingWorker
from rlinf_async.workers.inference.answers import bare_sample, with_log_probs


class LanguageActor(LanguageTrainingWorker):
    """One rank of the actor group, over any `LanguageTrainer`; see `LanguageTrainingWorker`.

    `FSDPActor` and `MegatronActor` are this one with a backend of their own.
    """

    async def run_inference(
        self,
        input_channel: Receiver[Sample],
        output_channel: Sender[Sample],
        compute_ref_logprobs: bool = False,
    ) -> int:
        """Add previous (and reference) log-probs to this rank's share of one iteration.

        Each is sent on at once. Returns the number of samples, 0 on an idle rank; see
        `pass_through`.
        """
        if not self.active:
            return 0
        answer = partial(with_log_probs, self._trainer, reference=compute_ref_logprobs)
        return await self.pass_through(input_channel, output_channel, answer)

    async def sync_model_to_rollout(self, weights: LatestSender[WeightUpdate]) -> int:
        """Publish the present version, from rank 0; returns it. Every rank takes part."""
        with self.span("publish", version=self._trainer.version):
            update = await self.compute(self._trainer.publish, shared_bytes)
            if self.rank == 0:
                await weights.publish(update)
        return update.version

    async def save_pretrained(self, path: str) -> str:
        """Write the model as Hugging Face does, from rank 0: config and weights, no tokenizer."""
        await self.onload()
        with self.span("export"):
            await self.compute(self._trainer.save_pretrained, Path(path))
        return path

    async def get_model_state_and_offload(self) -> WeightUpdate:
        """Return the weights (in buckets, on rank 0) and free all of the device's memory.

        Optimizer and gradients go first, which makes room for the copy of the weights.
        """
        await self.compute(self._trainer.offload, keep_weights=True)
        update = await self.compute(self._trainer.publish, shared_bytes)
        await self.offload()
        return update

    async def log_probs(self, sequences: list[tuple[Tokens, Tokens]]) -> list[Floats]:
        """Return log-probs at temperature 1 of ``(prompt [P], response [R])``: ``[R]`` each.

        Every rank of a sharded model takes part, with the same sequences or other ones.
        """
        await self.onload()
        samples = [bare_sample(*one, index=at) for at, one in enumerate(sequences)]
        return await self.compute(self._trainer.log_probs, samples)

    async def check_weight_update_equal(
        self,
        sequences: list[tuple[Tokens, Tokens]],
        log_probs: list[Floats],
        tolerance: float = 1e-3,
        in_the_mean: bool = False,
    ) -> float:
        """Compare an engine's log-probs with this model's; return the largest difference.

        Args:
            sequences: ``(prompt [P], response [R])``.
            log_probs: the engine's, under the present version, at temperature 1.
            tolerance: the largest difference that is allowed.
            in_the_mean: over the tokens of all sequences, not of each one: for less than float32,
                whose rounding moves single tokens far.

        Raises:
            WeightsDisagree: a token, or the mean, differs by more, or is NaN on either side.
        """
        own = await self.log_probs(sequences)
        differences = []
        for at, (ours, theirs) in enumerate(zip(own, log_probs, strict=True)):
            if len(ours) != len(theirs):
                raise WeightsDisagree(
                    f"sequence {at} has {len(ours)} response tokens, but the engine returned "
                    f"log-probs of {len(theirs)}"
                )
            differences.append(np.abs(ours.astype(np.float64) - theirs))
        every = np.concatenate([np.empty(0), *differences])
        worst, mean = every.max(initial=0.0), every.sum() / max(len(every), 1)
        if not (mean if in_the_mean else worst) <= tolerance:
            at = int(
                np.argmax([np.nan_to_num(one, nan=np.inf).max(initial=0.0) for one in differences])
            )
            token = int(np.argmax(np.nan_to_num(differences[at], nan=np.inf)))
            limit = f"allowed {tolerance:.0e}{' in the mean' if in_the_mean else ''}"
            raise WeightsDisagree(
                f"version {self._trainer.version}: the engine's log-prob of token {token} of "
                f"sequence {at} is {log_probs[at][token]:.6f}, the actor's is "
                f"{own[at][token]:.6f} (difference {differences[at][token]:.2e}, the mean of all "
                f"tokens is {mean:.2e}; {limit}). The engine does not serve the weights that were "
                "published, or computes in another precision (then raise "
                "training.check_weights_tolerance)"
            )
        return float(worst)
