"""Costs are found again in a trace that was made by them; what is missing is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlinf_async.backends.cost.lengths import LogNormal
from rlinf_async.cli import main
from rlinf_async.config import Document, UsageError
from rlinf_async.observe.perfetto import write_perfetto
from rlinf_async.observe.trace import Span
from rlinf_async.simulate import SimulationConfig
from rlinf_async.simulate.calibrate import calibrate
from tests.jobs.language.kit import TOY

ROWS = [(16, 100.0, 400.0), (16, 150.0, 500.0), (16, 90.0, 800.0), (16, 200.0, 900.0)]
"""samples, mean and longest response of each iteration"""
DECODE, SEQUENCE, TOKEN, STEP = 0.01, 0.002, 1e-3, 0.25
WARMING = 20.0
"""seconds by which the first iteration is slower"""


def made(folder: Path, *, column: str = "response_tokens_max", train: str = "train") -> Path:
    lines = [f"step,iteration,samples,response_tokens,prompt_tokens,{column}"]
    spans, now, samples = [], 0.0, 0
    for number, (count, mean, longest) in enumerate(ROWS):
        samples += count
        lines.append(f"{samples},{number},{samples},{mean},10,{longest}")
        warming = WARMING if number == 0 else 0.0
        generate = warming + DECODE * longest + SEQUENCE * count * mean / 2
        spans += [span(one, "generate", now, generate) for one in ("rollout[0]", "rollout[1]")]
        now += generate
        seconds = warming + TOKEN * count * (mean + 10) + STEP
        spans.append(span("actor[0]", train, now, seconds, iteration=number))
        now += seconds
        spans.append(span("rollout[0]", "load weights", now, 0.5))
        now += 0.5
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    write_perfetto(spans, folder / "trace.json.gz")
    return folder


def span(worker: str, name: str, start: float, seconds: float, **args: int) -> Span:
    return Span(worker, name, round(start * 1e9), round(seconds * 1e9), {**args})


def test_the_costs_of_a_run_are_found(tmp_path: Path) -> None:
    found = calibrate(made(tmp_path))
    assert found.generation["decode_seconds"] == pytest.approx(DECODE, rel=1e-4)
    assert found.generation["sequence_seconds"] == pytest.approx(SEQUENCE, rel=1e-4)
    assert found.generation["load_seconds"] == pytest.approx(0.5)
    assert found.actor["token_seconds"] == pytest.approx(TOKEN, rel=1e-4)
    assert found.actor["step_seconds"] == pytest.approx(STEP, rel=1e-3)
    assert (found.workers, found.ranks) == (2, 1)
    assert all(fit.error < 1e-3 for fit in found.fits)


def test_what_it_prints_is_a_simulations_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", str(made(tmp_path))]) == 0
    printed = capsys.readouterr().out
    assert "fitted within 0.0%" in printed
    config = Document("printed", printed).to(SimulationConfig)
    assert config.generation.lengths.longest == 900


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"column": "other"}, "has no column 'response_tokens_max'"),
        ({"train": "trains"}, "has no span 'train' of iteration 0"),
    ],
)
def test_what_a_run_lacks_is_named(tmp_path: Path, changes: dict[str, str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        calibrate(made(tmp_path, **changes))


def test_a_folder_without_a_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", str(tmp_path)]) == 2
    assert "has no metrics.csv" in capsys.readouterr().err


def test_lengths_whose_tail_was_cut_are_found_by_their_mean(tmp_path: Path) -> None:
    lengths = LogNormal(median=25.0, ratio=10.0, longest=150).many(64 * 50, 0)
    np.random.default_rng(1).shuffle(lengths)
    names = ("response_tokens_median", "response_tokens_p99", "response_tokens_max")
    head = ("step", "iteration", "samples", "response_tokens", "prompt_tokens", *names)
    lines, spans = [",".join(head)], []
    for number, batch in enumerate(lengths.reshape(50, 64)):
        found = (np.median(batch), np.percentile(batch, 99), batch.max())
        done = 64 * (number + 1)
        lines.append(",".join(map(str, (done, number, done, batch.mean(), 10, *found))))
        spans.append(span("rollout[0]", "generate", 2.0 * number, 1.0))
        spans.append(span("actor[0]", "train", 2.0 * number + 1.0, 1.0, iteration=number))
    (tmp_path / "metrics.csv").write_text("\n".join(lines) + "\n")
    write_perfetto(spans, tmp_path / "trace.json.gz")
    assert calibrate(tmp_path).lengths["ratio"] == pytest.approx(10.0, rel=0.1)


def test_a_run_with_its_configuration_is_simulated_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = TOY.format(data=tmp_path).replace("prompts = 4", "prompts = 8")
    (made(tmp_path) / "config.toml").write_text(settings)
    assert main(["calibrate", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "s real, " in printed
    config = Document("printed", printed).to(SimulationConfig)
    assert (config.samples, config.hardware.actor_devices) == (16, 1)
    assert config.work.pipelined
