"""Rollout data as users of slime pass it, and as our trainers take it.

::

    columns, or a list of samples --> RolloutData --this rank's prompts--> SampleGroup
                                      (checked)

Samples of one prompt are next to each other, or say their prompt by ``group_indices``. Prompts go
round the ranks in the order in which they come: the k-th one to rank ``k % ranks``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlinf_async.messages.language import Kept, SampleGroup, TrainingSample
from rlinf_async.runtime.ray.library import of_ray
from rlinf_async.runtime.ray.training.args import TrainArgs

SINGULAR = {
    "tokens": "tokens",
    "response_lengths": "response_length",
    "rewards": "reward",
    "loss_masks": "loss_mask",
    "rollout_log_probs": "rollout_log_probs",
    "rollout_kept": "rollout_kept",
    "log_probs": "log_probs",
    "ref_log_probs": "ref_log_probs",
    "values": "values",
    "advantages": "advantages",
    "returns": "returns",
    "group_indices": "group_index",
    "weight_versions": "weight_version",
}
"""the columns, and what each is called in a single sample"""

REQUIRED = ("tokens", "response_lengths", "rewards")


class RolloutDataError(ValueError):
    """Rollout data cannot be trained on; the message names column, sample and numbers."""


class RolloutData(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of one rollout, by columns of one entry for each sample; ``R``: response tokens."""

    tokens: Sequence[Any]
    """token ids ``[P + R]``: prompt and response"""
    response_lengths: Sequence[int]
    """``R``"""
    rewards: Sequence[float | None]
    """None or NaN: not scored, which trains nothing"""
    loss_masks: Sequence[Any] | None = None
    """``[R]``: 1 for tokens in the loss; all where left out"""
    rollout_log_probs: Sequence[Any] | None = None
    """``[R]``: of the engine; computed by the actor where left out"""
    rollout_kept: Sequence[Any] | None = None
    """``[R]`` lists of token ids: what each token was drawn from, with ``rollout_top_p`` or
    ``rollout_top_k``; an empty one is the whole vocabulary"""
    log_probs: Sequence[Any] | None = None
    """``[R]``: that the ratio is to, where they were computed already"""
    ref_log_probs: Sequence[Any] | None = None
    values: Sequence[Any] | None = None
    advantages: Sequence[Any] | None = None
    returns: Sequence[Any] | None = None
    group_indices: Sequence[int] | None = None
    """which prompt; ``n_samples_per_prompt`` samples in a row where left out"""
    weight_versions: Sequence[Any] | None = None
    """version of the weights that made the response: one number, or ``[R]``; the present one where
    left out"""

    @classmethod
    def of(cls, data: Any) -> RolloutData:
        """Return the columns of a mapping, or of a list of samples (mappings or objects).

        Further columns are ignored. Raises `RolloutDataError`.
        """
        if isinstance(data, cls):
            return data
        if isinstance(data, Mapping):
            columns = {name: data[name] for name in SINGULAR if data.get(name) is not None}
        elif isinstance(data, Sequence) and not isinstance(data, str | bytes):
            columns = _columns(data)
        else:
            raise RolloutDataError(
                f"rollout data is a {type(data).__name__}; it must be a dict of columns, a list of "
                "samples, or a reference to one of them (ray.put)"
            )
        missing = [name for name in REQUIRED if name not in columns]
        if missing:
            raise RolloutDataError(
                f"rollout data has no {', '.join(missing)} (there is: "
                f"{', '.join(columns) or 'nothing'})"
            )
        return cls(**columns)

    def groups(
        self, args: TrainArgs, *, rollout_id: int, version: int, rank: int = 0, ranks: int = 1
    ) -> list[SampleGroup]:
        """Return the prompts of a rank, with all their samples.

        Args:
            args: of the group.
            rollout_id: number of the rollout.
            version: of the weights, for samples that do not say theirs.
            rank: whose prompts.
            ranks: between which they are divided.

        Raises:
            RolloutDataError: the data is not as `args` say, or columns do not fit each other.
        """
        size = len(self.tokens)
        self._check_sizes(size)
        found: dict[int, list[TrainingSample]] = {}
        for at in range(size):
            group = at // args.n_samples_per_prompt
            if self.group_indices is not None:
                group = int(self.group_indices[at])
            members = found.setdefault(group, [])
            members.append(self._sample(at, group, len(members), version, args))
        wrong = [one for one, samples in found.items() if len(samples) != args.n_samples_per_prompt]
        if wrong:
            raise RolloutDataError(
                f"prompt {wrong[0]} has {len(found[wrong[0]])} samples; n_samples_per_prompt is "
                f"{args.n_samples_per_prompt}"
            )
        return [
            SampleGroup(iteration=rollout_id, group=group, samples=samples)
            for at, (group, samples) in enumerate(found.items())
            if at % ranks == rank
        ]

    def _check_sizes(self, size: int) -> None:
        for name in SINGULAR:
            column = getattr(self, name)
            if column is not None and len(column) != size:
                raise RolloutDataError(
                    f"{name} has {len(column)} entries, but tokens has {size}: one for each sample"
                )

    def _sample(
        self, at: int, group: int, index: int, version: int, args: TrainArgs
    ) -> TrainingSample:
        tokens = _vector("tokens", at, self.tokens[at], np.int32)
        response = int(self.response_lengths[at])
        if not 0 < response < len(tokens):
            raise RolloutDataError(
                f"response_lengths[{at}] is {response}, of {len(tokens)} tokens: prompt and "
                "response must have at least one token each"
            )
        if tokens.min() < 0:
            raise RolloutDataError(f"tokens[{at}] has the token {tokens.min()}, below 0")

        def column(name: str) -> Any:
            given = getattr(self, name)
            if given is None or given[at] is None:
                return None
            return _vector(name, at, given[at], np.float32, response)

        reward = self.rewards[at]
        reward = math.nan if reward is None else _number(at, reward)
        mask = np.ones(response, np.bool_)
        if self.loss_masks is not None:
            mask = _vector("loss_masks", at, self.loss_masks[at], np.bool_, response)
        log_prob = column("rollout_log_probs")
        kept = None if self.rollout_kept is None else self.rollout_kept[at]
        if args.truncates and kept is None:
            raise RolloutDataError(
                f"rollout_kept[{at}] is missing: with rollout_top_p = {args.rollout_top_p} and "
                f"rollout_top_k = {args.rollout_top_k} tokens were drawn from a part of the "
                "vocabulary. Log-probs over all of it, those that the actor computes too, are of a "
                "distribution that nothing was drawn from: say which token ids were kept for each "
                "token, or draw from all"
            )
        if kept is not None and len(kept) != response:
            raise RolloutDataError(
                f"rollout_kept[{at}] has {len(kept)} entries, but the response has {response} "
                "tokens: one list of token ids for each"
            )
        made_by = version if self.weight_versions is None else self.weight_versions[at]
        return TrainingSample(
            group=group,
            index=index,
            prompt_ids=tokens[:-response],
            response_ids=tokens[-response:],
            loss_mask=mask if math.isfinite(reward) else np.zeros_like(mask),
            # Without it, the actor fills it in: see `GroupActor.train_rollout`.
            log_prob=np.full(response, np.nan, np.float32) if log_prob is None else log_prob,
            version=np.broadcast_to(np.asarray(made_by, np.int32), response).copy(),
            temperature=args.rollout_temperature,
            kept=None if kept is None else _kept(at, kept),
            reward=reward,
            scored=math.isfinite(reward),
            prev_log_prob=column("log_probs"),
            ref_log_prob=column("ref_log_probs"),
            value=column("values"),
            advantage=column("advantages"),
            returns=column("returns"),
        )


def _kept(at: int, sets: Any) -> Kept:
    try:
        return Kept.of(sets)
    except (ValueError, TypeError) as error:
        raise RolloutDataError(
            f"rollout_kept[{at}] has to be lists of token ids: {error}"
        ) from error


def _columns(samples: Sequence[Any]) -> dict[str, list[Any]]:
    """Return the columns that any of the samples has."""

    def entry(sample: Any, name: str) -> Any:
        return sample.get(name) if isinstance(sample, Mapping) else getattr(sample, name, None)

    found = {}
    for name, one in SINGULAR.items():
        column = [entry(sample, one) for sample in samples]
        if any(value is not None for value in column):
            absent = [at for at, value in enumerate(column) if value is None]
            if absent and name != "rewards":
                raise RolloutDataError(f"sample {absent[0]} has no {one}, but others have")
            found[name] = column
    return found


def _vector(name: str, at: int, given: Any, dtype: Any, size: int | None = None) -> NDArray[Any]:
    try:
        vector = np.asarray(given)
        vector = vector.astype(dtype) if len(vector) else np.zeros(0, dtype)
    except (TypeError, ValueError) as error:
        raise RolloutDataError(f"{name}[{at}] holds no numbers: {error}") from error
    if vector.ndim != 1 or (size is not None and len(vector) != size):
        wanted = "a list of token ids" if size is None else f"one number for each of {size} tokens"
        raise RolloutDataError(
            f"{name}[{at}] has the shape {list(vector.shape)}; it must be {wanted} of the response"
        )
    return vector


def _number(at: int, reward: Any) -> float:
    try:
        return float(reward)
    except (TypeError, ValueError):
        raise RolloutDataError(
            f"rewards[{at}] is {reward!r}; it must be a number, or None where there is none"
        ) from None


def fetched(given: Any, rank: int, ranks: int) -> tuple[Any, bool]:
    """Return rollout data that may be behind references, and whether it is this rank's share alone.

    Args:
        given: the data, a reference to it, or a list of references: one for each rank, or one for
            all. What has a reference as ``inner`` (a box of slime) counts as one.
        rank: this one.
        ranks: number of ranks.

    Raises:
        RolloutDataError: there are as many references as neither.
    """
    ray = of_ray()

    def is_reference(one: Any) -> bool:
        return isinstance(getattr(one, "inner", one), ray.ObjectRef)

    def get(one: Any) -> Any:
        return ray.get(getattr(one, "inner", one))

    if is_reference(given):
        return get(given), False
    if not (isinstance(given, list | tuple) and given and all(map(is_reference, given))):
        return given, False
    if len(given) == 1:
        return get(given[0]), ranks == 1
    if len(given) != ranks:
        raise RolloutDataError(
            f"rollout_data_ref has {len(given)} references; give one for all ranks, or one for "
            f"each of the {ranks}"
        )
    return get(given[rank]), True
