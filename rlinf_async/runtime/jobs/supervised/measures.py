"""Log-probs of many examples: what is measured on held-out ones, those of the reference, and those
of a teacher.

::

    examples --piece by piece--> actors, each its share --> log-probs [R] of each, in order
                                                              |
                          held out: loss, accuracy <----------+----------> reference.npz
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from rlinf_async.algorithms.config import LanguageLossConfig, PairLossConfig
from rlinf_async.config import UsageError
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import Example
from rlinf_async.observe.files import RunFolderError, atomic_write
from rlinf_async.runtime.calls import WorkerGroup
from rlinf_async.workers.actor import LanguageActor

PIECE: Final = 128
"""examples of a call, for each actor"""

References = Mapping[int, Sequence[Floats]]
"""log-probs ``[R]`` of each example of a record under the first weights, by the record's number"""


async def log_probs(
    actors: WorkerGroup[LanguageActor], examples: Sequence[Example]
) -> list[Floats]:
    """Return log-probs ``[R]`` of each example under the present weights, in order."""
    found: list[Floats] = []
    size = PIECE * len(actors)
    for start in range(0, len(examples), size):
        piece = list(examples[start : start + size])
        answered = await actors.call(LanguageActor.log_probs_of_share, piece)
        shares, ranks = {one.rank: one for one in answered}, answered[0].ranks
        found += [shares[at % ranks].log_probs[at // ranks] for at in range(len(piece))]
    return found


def sums(examples: Sequence[Example], numbers: Sequence[Floats]) -> np.ndarray[Any, Any]:
    """Return the sum over the tokens that each example's answer has to learn, float64."""
    return np.asarray(
        [
            float(one[example.mask].sum(dtype=np.float64))
            for example, one in zip(examples, numbers, strict=True)
        ]
    )


def measured(
    loss: LanguageLossConfig,
    examples: Sequence[Example],
    found: Sequence[Floats],
    reference: Sequence[Floats],
) -> dict[str, float]:
    """Return what the loss says of examples that are not learnt from; names as in the metrics.

    Args:
        loss: the run's loss.
        examples: examples, those of a record together.
        found: log-probs under the present weights.
        reference: log-probs under the first ones; nothing where the loss needs none.
    """
    if not isinstance(loss, PairLossConfig):
        tokens = sum(int(one.mask.sum()) for one in examples)
        name = "cross_entropy" if loss.uses_teacher else "loss"
        return {name: float(-sums(examples, found).sum() / tokens)}
    reward = loss.beta * (sums(examples, found) - sums(examples, reference))
    chosen, rejected = reward[0::2], reward[1::2]
    margin, smoothing = chosen - rejected, loss.label_smoothing
    # log sigmoid(x) is -log(1 + exp(-x)): see `rlinf_async.algorithms.language.losses.dpo`.
    each = (1.0 - smoothing) * np.logaddexp(0.0, -margin) + smoothing * np.logaddexp(0.0, margin)
    numbers = {
        "loss": each,
        "reward_chosen": chosen,
        "reward_rejected": rejected,
        "reward_margin": margin,
        "reward_accuracy": margin > 0.0,
    }
    return {name: float(np.mean(one)) for name, one in numbers.items()}


def save_references(file: Path, references: References) -> None:
    """Write log-probs of records; raises `RunFolderError`."""
    flat = [one for answers in references.values() for one in answers]
    content = io.BytesIO()
    np.savez(
        content,
        records=np.asarray(list(references), np.int64),
        lengths=np.asarray([len(one) for one in flat], np.int64),
        log_probs=np.concatenate([np.empty(0, np.float32), *flat]),
    )
    atomic_write(file, content.getvalue())


def load_references(file: Path, records: Sequence[int], each: int) -> dict[int, list[Floats]]:
    """Read log-probs of records.

    Args:
        file: what `save_references` wrote.
        records: records that are needed.
        each: examples of a record.

    Raises:
        RunFolderError: the file is not there, or is damaged.
        UsageError: it lacks some of these records.
    """
    try:
        with np.load(file, allow_pickle=False) as read:
            ends = np.cumsum(read["lengths"])[:-1]
            flat = np.split(read["log_probs"], ends)
            numbers: list[int] = read["records"].tolist()
    except (OSError, ValueError, KeyError) as error:
        raise RunFolderError(
            f"{file} cannot be read ({error}): the log-probs of the first weights are in it; put "
            "it back, or start in another folder"
        ) from error
    found = {record: flat[each * at : each * (at + 1)] for at, record in enumerate(numbers)}
    if missing := set(records) - found.keys():
        raise UsageError(
            f"{file} has no log-probs of {len(missing)} records that further steps learn from: "
            "the first weights are trained by now. Give training.steps as at first, or start in "
            "another folder with as many from the beginning"
        )
    return found
