"""What training takes, from the spans of a run.

::

    one rank     train |micro-batch|micro-batch|..| wait samples | train |micro-batch|  rest |
    another      train   |     micro-batch     |..|
                             ^ until here it waited: both compute a micro-batch together

    micro-batch = token_seconds x tokens + sample_seconds x samples     (of the last rank to come)
    rest        = seconds of the optimizer steps

Ranks meet within each micro-batch, where weights are gathered, so the shortest of those with the
same number shows what it takes. Micro-batches beside which somebody generates are told apart:
where all compute on the same cores they take longer, by `TrainingCosts.beside_generation`.

Once everything is generated, no rank waits for samples; what is still recorded as such waits is the
handing over of micro-batches to the compute thread, and part of what a sample takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlinf_async.observe.trace import Span, is_waiting
from rlinf_async.simulate.fit import Fit, fit

TRAIN, MICRO_BATCH, GENERATE = "train", "micro-batch", "generate"
ENOUGH = 8
"""micro-batches while nobody generates, of which their costs are found; if fewer, of all"""


class TrainingCosts(msgspec.Struct, frozen=True, kw_only=True):
    """See `CostTrainerConfig`."""

    token_seconds: float
    sample_seconds: float
    beside_generation: float
    iteration_seconds: float
    """of the optimizer steps of an iteration"""
    fit: Fit


def training_costs(
    spans: Mapping[str, Sequence[Span]], iterations: Iterable[int]
) -> TrainingCosts | None:
    """Return what training took in these iterations; None: there are no micro-batches of them.

    Args:
        spans: by worker, in order of their start.
        iterations: which are looked at.
    """
    wanted = set(iterations)
    last = []
    for number in sorted(wanted):
        ranks = [mine for row in spans.values() if (mine := _of(row, number, MICRO_BATCH))]
        last += [min(same, key=_duration) for same in zip(*ranks, strict=False)]
    if not last:
        return None
    generated = [one for row in spans.values() for one in row if one.name == GENERATE]
    beside = _overlap(last, generated)
    alone = ~beside if np.count_nonzero(~beside) >= ENOUGH else np.ones(len(last), np.bool_)
    seconds = np.array([one.duration / 1e9 for one in last])
    tokens, samples = (np.array([_number(o, key) for o in last]) for key in ("tokens", "samples"))
    found = fit("micro-batch", seconds[alone], tokens[alone], samples[alone])
    slower = 1.0
    if beside.any() and not alone.all():
        slower = float(seconds[beside].sum() / found.seconds(tokens, samples)[beside].sum())
    handing = _handing_over(spans, wanted, generated)
    return TrainingCosts(
        token_seconds=found.costs[0],
        sample_seconds=found.costs[1] + handing,
        beside_generation=max(1.0, slower),
        iteration_seconds=_rest(spans, sorted(wanted)),
        fit=found,
    )


def _rest(spans: Mapping[str, Sequence[Span]], iterations: Sequence[int]) -> float:
    """Return the mean seconds of an iteration that a rank trains outside of micro-batches: of the
    rank that has the least, since the others wait for it there."""
    least = []
    for number in iterations:
        rest = []
        for row in spans.values():
            inside = sum(map(_duration, _of(row, number, MICRO_BATCH)))
            if inside:
                rest.append(sum(map(_duration, _of(row, number, TRAIN))) - inside)
        least.append(max(0, min(rest, default=0)) / 1e9)
    return float(np.mean(least))


def _handing_over(
    spans: Mapping[str, Sequence[Span]], iterations: set[int], generated: Sequence[Span]
) -> float:
    """Return the seconds between two micro-batches while nobody generates, for each of their
    samples."""
    found = [one for row in spans.values() for one in row if _iteration(one) in iterations]
    made = _alone([one for one in found if one.name == MICRO_BATCH], generated)
    ranks = {one.worker for one in made}
    waits = [one for one in found if is_waiting(one.name) and one.worker in ranks]
    samples = sum(_number(one, "samples") for one in made)
    return sum(map(_duration, _alone(waits, generated))) / 1e9 / max(samples, 1.0)


def _alone(spans: Sequence[Span], generated: Sequence[Span]) -> list[Span]:
    """Return those during which nobody generates."""
    beside = _overlap(spans, generated)
    return [one for one, other in zip(spans, beside, strict=True) if not other]


def _overlap(spans: Sequence[Span], others: Sequence[Span]) -> NDArray[np.bool_]:
    """Return whether each span has a moment that lies in any of the others."""
    begun = np.searchsorted(np.sort([o.start for o in others]), [o.end for o in spans])
    ended = np.searchsorted(np.sort([o.end for o in others]), [o.start for o in spans], "right")
    overlap: NDArray[np.bool_] = begun > ended
    return overlap


def _of(row: Sequence[Span], iteration: int, name: str) -> list[Span]:
    return [one for one in row if one.name == name and _iteration(one) == iteration]


def _iteration(span: Span) -> int:
    return int((span.args or {}).get("iteration", -1))


def _number(span: Span, key: str) -> float:
    return float((span.args or {}).get(key, 0))


def _duration(span: Span) -> int:
    return span.duration
