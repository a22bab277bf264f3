"""What an embodied run shows of itself: rows of the metrics, the headline of the live view."""

from __future__ import annotations

from rlinf_async.messages.embodied import TrainReport
from rlinf_async.observe.progress import figure
from rlinf_async.runtime.jobs.embodied.config import EmbodiedConfig
from rlinf_async.runtime.jobs.embodied.reached import Reached
from rlinf_async.runtime.jobs.live import Headline


def row(reached: Reached, report: TrainReport) -> dict[str, float]:
    """One row of the metrics. What was not measured stays out."""
    row = {
        "iteration": float(report.iteration),
        "version": float(report.version),
        "env_steps": float(reached.env_steps),
        "train_seconds": reached.train_seconds,
        "steps_per_second": reached.env_steps / max(reached.train_seconds, 1e-9),
        "episodes": float(reached.episodes),
        "staleness_mean": report.lag_mean,
        "staleness_max": float(report.lag_max),
        "second_trajectories": float(report.duplicates),
        **report.metrics,
    }
    if reached.returns:
        row["return"] = sum(reached.returns) / len(reached.returns)
    if reached.successes:
        row["success_rate"] = sum(reached.successes) / len(reached.successes)
    return row


def headline(config: EmbodiedConfig, reached: Reached, last: TrainReport | None) -> Headline:
    """What stands on top of the live view."""
    rate = reached.env_steps / max(reached.train_seconds, 1e-9) if reached.version else None
    figures = (
        ("steps", f"{reached.env_steps:,}"),
        ("steps/s", figure(rate, ",.0f")),
        ("seconds", f"{reached.train_seconds:.0f}"),
        ("return", figure(_mean(reached.returns), ".2f")),
        ("success", figure(_mean(reached.successes), ".0%")),
        ("staleness", figure(last.lag_mean if last else None, ".1f")),
    )
    run = f"{config.name} (seed {config.seed})"
    return Headline(run, reached.version, config.iterations, figures)


def _mean(values: list[float] | list[bool]) -> float | None:
    return sum(values) / len(values) if values else None
