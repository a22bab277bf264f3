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
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from rlinf_async.config import Document, UsageError
from rlinf_async.observe.csv_log import read_columns
from rlinf_async.observe.perfetto import by_worker, read_perfetto
from rlinf_async.observe.trace import Span
from rlinf_async.simulate.config import SimulationConfig
from rlinf_async.simulate.fit import Fit, Floats, fit
from rlinf_async.simulate.training_costs import training_costs

CRITIC = "critic"
"""what the names of critics begin with; there are none in a simulation, so their spans are left
out"""
LENGTHS = 200
"""that stand for those of all samples at most"""
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
    """of responses, rising: those of the run, or as many quantiles as `LENGTHS`"""
    fits: tuple[Fit, ...]
    step_seconds: float = 0.0
    """mean seconds from one trained version to the next, which leaves the first out, too"""
    work: dict[str, float | int | bool] = {}
    """of a simulation of the same run; empty where the folder has no configuration"""
    hardware: dict[str, int] = {}
    """the same"""


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
    ranks = len({worker for worker, row in spans.items() if _of(row, "train")})
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
    )


def simulation_of(found: Calibration, iterations: int = 32) -> SimulationConfig | None:
    """Return the same run as a simulation, under the policy `static`, of so many iterations; None
    where the folder has no configuration."""
    if not found.work:
        return None
    lengths = {"type": "empirical", "tokens": found.lengths}
    return msgspec.convert(
        {
            "work": found.work | {"iterations": iterations},
            "hardware": found.hardware,
            "generation": found.generation | {"lengths": lengths},
            "actor": found.actor,
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
    from rlinf_async.runtime.jobs.language.config import LanguageConfig

    config = Document.read(file).to(LanguageConfig, {})
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
    engine = getattr(config.rollout, config.rollout.backend)
    slots = min(getattr(engine, "slots", getattr(engine, "max_concurrent", samples)), samples)
    return work, hardware, {"slots": config.rollout.serving.max_concurrent or slots}


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
    """Return the lengths of the responses that were trained, or quantiles of them."""
    scored = (span.args or {} for span in spans if span.name == "score")
    found = [int(args["tokens"]) for args in scored if int(args.get("iteration", -1)) >= 0]
    if len(found) > LENGTHS:
        places = (np.arange(LENGTHS) + 0.5) / LENGTHS
        found = np.quantile(found, places).round().astype(int).tolist()
    return tuple(sorted(found))


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
        for span in _of(row, "train"):
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
    rows = [found for row in spans.values() if (found := _of(row, "generate"))]
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


def _of(row: Sequence[Span], name: str) -> list[Span]:
    return [span for span in row if span.name == name]


def _mean(spans: Sequence[Span], name: str) -> float:
    found = [span.duration / 1e9 for span in spans if span.name == name]
    return sum(found) / len(found) if found else 0.0
