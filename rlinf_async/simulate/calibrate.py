"""Cost models fitted to a real run, from its metrics and its trace.

::

    generate  = seconds of the `generate` spans of the rollout worker that generates longest
              = decode_seconds x steps + sequence_seconds x tokens / workers

`training_costs` has those of the actor. The first iteration is left out: it allocates and compiles
what the others find ready. The steps of an iteration are at least the longest response of the
iteration; the lengths are those of the run's samples. `load_seconds`, `move_seconds` and
`rescale_seconds` are means of the spans of their names. On-policy, `publish_seconds` is what lies
between the end of training and the first token of the next iteration, without loading: publishing,
dispatching, calls. Work and hardware are those of the run's configuration.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlinf_async.config import Document, UsageError
from rlinf_async.episodes.environments import WAIT
from rlinf_async.observe.metrics import read_columns
from rlinf_async.observe.trace import Span, by_worker, is_waiting, read_perfetto
from rlinf_async.simulate.config import SimulationConfig

if TYPE_CHECKING:
    from rlinf_async.runtime.jobs.language.config import LanguageConfig

Floats = NDArray[np.float64]


class FittedCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Costs that were fitted to measured times."""

    name: str
    costs: tuple[float, float]
    measured: float
    """mean of a time, in seconds"""
    error: float
    """mean of |fitted - measured| / measured"""

    def seconds(self, first: Floats, second: Floats) -> Floats:
        """Return the fitted times."""
        fitted: Floats = self.costs[0] * first + self.costs[1] * second
        return fitted


def fit(name: str, seconds: Floats, first: Floats, second: Floats) -> FittedCosts:
    """Return non-negative ``a, b`` with ``seconds = a x first + b x second``.

    By least squares of the relative errors, then scaled so that the sum of all times is right: a
    simulation adds them up.
    """
    weights = 1.0 / np.maximum(seconds, 1e-9)
    columns = np.stack([first, second], axis=1) * weights[:, None]
    ones = np.ones(len(seconds))
    candidates = [np.linalg.lstsq(columns, ones, rcond=None)[0]]
    for only in (0, 1):
        column = columns[:, only]
        alone = np.zeros(2)
        alone[only] = max(0.0, float(column @ ones) / max(float(column @ column), 1e-300))
        candidates.append(alone)
    allowed = [one for one in candidates if (one >= 0.0).all()]
    best = min(allowed, key=lambda one: float(np.square(columns @ one - 1.0).sum()))
    best = best * float(seconds.sum()) / max(float((columns @ best) @ seconds), 1e-300)
    return FittedCosts(
        name=name,
        costs=(float(best[0]), float(best[1])),
        measured=float(seconds.mean()),
        error=float(np.abs(columns @ best - 1.0).mean()),
    )


TRAIN, MICRO_BATCH, GENERATE = "train", "micro-batch", "generate"
ENOUGH = 8
"""micro-batches while nobody generates, of which their costs are found; if fewer, of all"""


class TrainingCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of training, as in `CostTrainerConfig`."""

    token_seconds: float
    sample_seconds: float
    beside_generation: float
    iteration_seconds: float
    """seconds of the optimizer steps of an iteration"""
    fit: FittedCosts


def training_costs(
    spans: Mapping[str, Sequence[Span]], iterations: Iterable[int]
) -> TrainingCosts | None:
    """Return what training took in these iterations; None: there are no micro-batches of them.

    ::

        one rank     train |micro-batch|micro-batch|..| wait samples | train |micro-batch|  rest |
        another      train   |     micro-batch     |..|
                                 ^ until here it waited: both compute a micro-batch together

        micro-batch = token_seconds x tokens + sample_seconds x samples   (of the last rank to come)
        rest        = seconds of the optimizer steps

    Ranks meet within each micro-batch, where weights are gathered, so the shortest of those with
    the same number shows what it takes. Micro-batches beside which somebody generates are told
    apart: where all compute on the same cores they take longer, by
    `TrainingCosts.beside_generation`.

    Once everything is generated, no rank waits for samples; what is still recorded as such waits is
    the handing over of micro-batches to the compute thread, and part of what a sample takes.

    Args:
        spans: spans by worker, in order of their start.
        iterations: iterations to look at.
    """
    wanted = set(iterations)
    last = []
    for number in sorted(wanted):
        ranks = [mine for row in spans.values() if (mine := _spans_of(row, number, MICRO_BATCH))]
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
            inside = sum(map(_duration, _spans_of(row, number, MICRO_BATCH)))
            if inside:
                rest.append(sum(map(_duration, _spans_of(row, number, TRAIN))) - inside)
        least.append(max(0, min(rest, default=0)) / 1e9)
    return float(np.mean(least))


def _handing_over(
    spans: Mapping[str, Sequence[Span]], iterations: set[int], generated: Sequence[Span]
) -> float:
    """Return the seconds between two micro-batches while nobody generates, for each of their
    samples."""
    found = [one for row in spans.values() for one in row if _iteration(one) in iterations]
    made = _without_generation([one for one in found if one.name == MICRO_BATCH], generated)
    ranks = {one.worker for one in made}
    waits = [one for one in found if is_waiting(one.name) and one.worker in ranks]
    samples = sum(_number(one, "samples") for one in made)
    return sum(map(_duration, _without_generation(waits, generated))) / 1e9 / max(samples, 1.0)


def _without_generation(spans: Sequence[Span], generated: Sequence[Span]) -> list[Span]:
    """Return those during which nobody generates."""
    beside = _overlap(spans, generated)
    return [one for one, other in zip(spans, beside, strict=True) if not other]


def _overlap(spans: Sequence[Span], others: Sequence[Span]) -> NDArray[np.bool_]:
    """Return whether each span has a moment that lies in any of the others."""
    begun = np.searchsorted(np.sort([o.start for o in others]), [o.end for o in spans])
    ended = np.searchsorted(np.sort([o.end for o in others]), [o.start for o in spans], "right")
    overlap: NDArray[np.bool_] = begun > ended
    return overlap


def _spans_of(row: Sequence[Span], iteration: int, name: str) -> list[Span]:
    return [one for one in row if one.name == name and _iteration(one) == iteration]


def _iteration(span: Span) -> int:
    return int((span.args or {}).get("iteration", -1))


def _number(span: Span, key: str) -> float:
    return float((span.args or {}).get(key, 0))


def _duration(span: Span) -> int:
    return span.duration


CRITIC = "critic"
"""what the names of critics begin with; there are none in a simulation, so their spans are left
out"""
WAITS = "tool ", WAIT
"""what the names of spans begin with in which an episode waits for tools or its environment"""
LENGTHS = 200
"""most lengths that are kept to stand for those of all samples"""
LEAST_ITERATIONS = 4
"""fewer do not tell two costs apart, since the first is left out"""
NEEDED = ("iteration", "samples", "response_tokens", "prompt_tokens", "response_tokens_max")


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of a run."""

    iterations: int
    workers: int
    ranks: int
    generation: dict[str, float]
    actor: dict[str, float]
    lengths: tuple[int, ...]
    """lengths of responses, rising: those of the run, or `LENGTHS` quantiles of them"""
    fits: tuple[FittedCosts, ...]
    step_seconds: float = 0.0
    """mean seconds from one trained version to the next, which leaves the first out, too"""
    work: dict[str, float | int | bool] = {}
    """settings of ``[work]`` in a simulation of the same run; empty where the folder has no
    configuration"""
    hardware: dict[str, int] = {}
    """settings of ``[hardware]`` in a simulation of the same run; empty where the folder has no
    configuration"""
    episode: dict[str, Any] = {}
    """settings of ``[episode]`` in a simulation of the same run; empty where samples are single
    answers, or the folder has no configuration"""


def calibrate(run: Path) -> Calibration:
    """Fit the cost models to the run in this folder.

    Raises:
        UsageError: metrics or trace lack what it needs; says what.
        RunFolderError: they cannot be read.
    """
    rows = _rows(run)
    spans = by_worker(read_perfetto(run / "trace.json.gz"))
    spans = {name: row for name, row in spans.items() if not name.lower().startswith(CRITIC)}
    every = [span for row in spans.values() for span in row]
    trained = _train_seconds(spans, rows["iteration"], run)
    generated, workers = _generate_seconds(spans, trained, run)
    ranks = len({worker for worker, row in spans.items() if _named(row, "train")})
    training = training_costs(spans, map(int, rows["iteration"][1:]))
    lengths = _lengths(every)
    if training is None or not lengths:
        lacking = "span 'micro-batch'" if training is None else "lengths in its spans 'score'"
        raise UsageError(
            f"{run}/trace.json.gz: has no {lacking}: calibration needs a run that was made by this "
            "version"
        )
    responses = np.diff(np.concatenate([[0.0], rows["samples"]])) * rows["response_tokens"]
    made = fit("generate", generated[1:], rows["response_tokens_max"][1:], responses[1:] / workers)
    work, hardware, slots = _shape(run, workers, ranks)
    publish = _mean(every, "publish")
    if work:
        publish = publish if work["max_staleness"] else _between(spans, trained, publish)
        work["prompt_tokens"] = max(1, round(float(rows["prompt_tokens"].mean())))
    ends = [max(one.end for one in found) / 1e9 for found in trained]
    return Calibration(
        iterations=len(generated),
        workers=workers,
        ranks=ranks,
        generation={
            "decode_seconds": max(made.costs[0], 1e-9),
            "sequence_seconds": made.costs[1],
            "prefill_seconds": 0.0,
            "load_seconds": _mean(every, "load weights"),
            "move_seconds": _mean(every, "onload"),
            **slots,
        },
        actor={
            "token_seconds": max(training.token_seconds * hardware.get("actor_tp", 1), 1e-12),
            "sample_seconds": training.sample_seconds,
            "beside_generation": training.beside_generation,
            "step_seconds": training.iteration_seconds / work.get("mini_batches", 1),
            "rescale_seconds": _mean(every, "rescale"),
            "move_seconds": _mean(every, "offload"),
            "publish_seconds": publish,
        },
        lengths=lengths,
        fits=(training.fit, made),
        step_seconds=float(np.diff(ends).mean()),
        work=work,
        hardware=hardware,
        episode=_episode(run, every, rows) if work else {},
    )


def simulation_of(found: Calibration, iterations: int = 32) -> SimulationConfig | None:
    """Return the same run as a simulation of ``iterations`` iterations under the policy `static`;
    None where the folder has no configuration."""
    if not found.work:
        return None
    lengths = {"type": "empirical", "tokens": found.lengths}
    return msgspec.convert(
        {
            "work": found.work | {"iterations": iterations},
            "hardware": found.hardware,
            "generation": found.generation | {"lengths": lengths},
            "actor": found.actor,
            "episode": found.episode,
            "scheduler": {"policy": "static"},
        },
        SimulationConfig,
        strict=False,
    )


def _shape(
    run: Path, workers: int, ranks: int
) -> tuple[dict[str, float | int | bool], dict[str, int], dict[str, int]]:
    """Work, hardware and slots of the run's configuration; empty where there is none."""
    file = run / "config.toml"
    if not file.is_file():
        return {}, {}, {}
    config = _config(file)
    devices = workers + ranks
    work: dict[str, float | int | bool] = {
        "prompts_per_device": config.training.prompts / devices,
        "group_size": config.training.group_size,
        "mini_batches": config.actor.global_batches,
        "max_staleness": config.training.max_staleness,
        "pipelined": config.actor.pipelined,
    }
    hardware = {
        "devices": devices,
        "devices_per_host": devices,
        "actor_devices": ranks,
        "actor_tp": config.actor.model_ranks,
    }
    samples = config.training.prompts * config.training.group_size
    engine = config.rollout.engine
    slots = min(getattr(engine, "slots", getattr(engine, "max_concurrent", samples)), samples)
    return work, hardware, {"slots": config.rollout.serving.max_concurrent or slots}


def _config(file: Path) -> LanguageConfig:
    from rlinf_async.runtime.jobs.language.config import LanguageConfig

    return Document.read(file).to(LanguageConfig, {})


def _between(
    spans: dict[str, list[Span]], trained: Sequence[Sequence[Span]], publish: float
) -> float:
    """Return the median seconds from the end of an iteration's training to the first token of the
    next, without those of loading weights; at least those of publishing."""
    every = [span for row in spans.values() for span in row]
    begins = np.sort([span.start for span in every if span.name == "generate"])
    gaps = []
    for found in trained[:-1]:
        end = max(span.end for span in found)
        at = int(np.searchsorted(begins, end))
        if at < len(begins):
            gaps.append((int(begins[at]) - end) / 1e9)
    if not gaps:
        return publish
    return max(publish, float(np.median(gaps)) - _mean(every, "load weights"))


def _lengths(spans: Iterable[Span]) -> tuple[int, ...]:
    """Return the lengths of the trained answers, or `LENGTHS` quantiles of them. Of an episode all
    answers count as equally long."""
    found: list[float] = []
    for args in _scored(spans):
        turns = int(args.get("turns", 1))
        found += [int(args.get("drawn", args["tokens"])) / max(turns, 1)] * turns
    return tuple(max(1, round(one)) for one in _quantiles(found))


def _episode(run: Path, spans: Sequence[Span], rows: Mapping[str, Floats]) -> dict[str, Any]:
    """Return the settings of ``[episode]``: turns, and the seconds from an answer to the next turn,
    0 where nothing was waited for."""
    config = _config(run / "config.toml")
    turns = [max(1, int(args["turns"])) for args in _scored(spans) if "turns" in args]
    if not config.has_episodes or not turns:
        return {}
    further = sum(turns) - len(turns)
    waits = [
        span.duration / 1e9
        for span in spans
        if span.name.startswith(WAITS) and not str((span.args or {}).get("sample")).startswith("-")
    ]
    waits += [0.0] * (further - len(waits))
    given = float(rows["given_tokens"].mean()) * len(turns) / further if further else 0.0
    return {
        "turns": tuple(round(one) for one in _quantiles(turns)),
        "tool_seconds": tuple(float(f"{one:.4g}") for one in _quantiles(waits)) or (0.0,),
        "given_tokens": round(given),
        "max_turns": config.episode.max_turns,
        "concurrent": config.episode.concurrent,
        "workers": config.cluster.episode_workers,
    }


def _scored(spans: Iterable[Span]) -> list[Mapping[str, Any]]:
    """Return what the trace tells of the samples that were trained."""
    scored = (span.args or {} for span in spans if span.name == "score")
    return [args for args in scored if int(args.get("iteration", -1)) >= 0]


def _quantiles(values: Sequence[float]) -> list[float]:
    """Return the values, rising, or `LENGTHS` quantiles of them."""
    if len(values) > LENGTHS:
        places = (np.arange(LENGTHS) + 0.5) / LENGTHS
        return [float(one) for one in np.quantile(values, places)]
    return sorted(values)


def _rows(run: Path) -> dict[str, Floats]:
    """The columns of the metrics, over the rows of iterations."""
    if not (run / "metrics.csv").is_file():
        raise UsageError(f"{run}: has no metrics.csv: name the folder of a language run")
    columns = {name: np.array(values) for name, values in read_columns(run / "metrics.csv").items()}
    missing = [name for name in NEEDED if name not in columns]
    if missing:
        raise UsageError(
            f"{run}/metrics.csv: has no column {missing[0]!r}: calibration needs a run of the "
            "language job, made by this version"
        )
    whole = ~np.isnan([columns[name] for name in NEEDED]).any(axis=0)
    if whole.sum() < LEAST_ITERATIONS:
        raise UsageError(
            f"{run}/metrics.csv: has {whole.sum()} iterations; calibration needs at least "
            f"{LEAST_ITERATIONS}"
        )
    return {name: values[whole] for name, values in columns.items()}


def _train_seconds(spans: dict[str, list[Span]], iterations: Floats, run: Path) -> list[list[Span]]:
    """The `train` spans of each iteration, of all ranks."""
    found: dict[int, list[Span]] = defaultdict(list)
    for row in spans.values():
        for span in _named(row, "train"):
            found[int((span.args or {}).get("iteration", -1))].append(span)
    lacking = [int(one) for one in iterations if not found[int(one)]]
    if lacking:
        raise UsageError(
            f"{run}/trace.json.gz: has no span 'train' of iteration {lacking[0]}: was the run "
            "resumed, or its trace cut?"
        )
    return [found[int(one)] for one in iterations]


def _generate_seconds(
    spans: dict[str, list[Span]], trained: Sequence[Sequence[Span]], run: Path
) -> tuple[Floats, int]:
    """Seconds in which each iteration was generated, of the busiest worker, and their number.

    What is generated between the end of one iteration and that of the next counts to the next.
    """
    rows = [found for row in spans.values() if (found := _named(row, "generate"))]
    if not rows:
        raise UsageError(f"{run}/trace.json.gz: has no span 'generate' of a rollout worker")
    ends = np.array([max(span.end for span in one) for one in trained])
    seconds = np.zeros((len(rows), len(ends)))
    for number, row in enumerate(rows):
        for span in row:
            at = int(np.searchsorted(ends, span.start))
            if at < len(ends):  # else: of the evaluation at the end
                seconds[number, at] += span.duration / 1e9
    busiest: Floats = seconds.max(axis=0)
    return busiest, len(rows)


def _named(row: Sequence[Span], name: str) -> list[Span]:
    return [span for span in row if span.name == name]


def _mean(spans: Sequence[Span], name: str) -> float:
    found = [span.duration / 1e9 for span in spans if span.name == name]
    return sum(found) / len(found) if found else 0.0
