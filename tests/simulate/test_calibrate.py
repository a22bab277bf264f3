"""Costs are found again in a trace that was made by them; what is missing is named."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from rlinf_async.backends.cost.config import LogNormal
from rlinf_async.cli import main
from rlinf_async.config import Document, UsageError
from rlinf_async.observe.trace import Span, read_perfetto, write_perfetto
from rlinf_async.simulate import SimulationConfig
from rlinf_async.simulate.calibrate import LENGTHS, calibrate
from tests.jobs.language.kit import TOY

ROWS = [(16, 100.0, 400.0), (16, 150.0, 500.0), (16, 90.0, 800.0), (16, 200.0, 900.0)]
"""samples, mean and longest response of each iteration"""
PROMPT = 10
MICRO_BATCHES = (0.5, 1.5, 0.8, 1.2)
"""of an iteration: their tokens over the mean ones"""
DECODE, SEQUENCE, TOKEN, SAMPLE, STEP = 0.01, 0.002, 1e-3, 0.05, 0.25
WARMING = 20.0
"""seconds by which the first iteration is slower"""


def made(folder: Path, *, column: str = "response_tokens_max", without: str = "") -> Path:
    """A run of two rollout workers and one actor, which trains after all was generated; without
    the spans of a name."""
    lines = [f"step,iteration,samples,response_tokens,prompt_tokens,{column}"]
    spans, now, samples = [], 0.0, 0
    for number, (count, mean, longest) in enumerate(ROWS):
        samples += count
        lines.append(f"{samples},{number},{samples},{mean},{PROMPT},{longest}")
        warming = WARMING if number == 0 else 0.0
        generate = warming + DECODE * longest + SEQUENCE * count * mean / 2
        spans += [span(one, "generate", now, generate) for one in ("rollout[0]", "rollout[1]")]
        now += generate
        spans += [
            span("reward[0]", "score", now, 0.0, iteration=number, tokens=tokens)
            for tokens in (round(mean), round(longest))
        ]
        spans.append(span("reward[0]", "score", now, 0.0, iteration=-1, tokens=5000))
        began = now
        now += warming
        here = count // len(MICRO_BATCHES)
        for share in MICRO_BATCHES:
            tokens = round(share * here * (mean + PROMPT))
            seconds = TOKEN * tokens + SAMPLE * here
            labels = {"iteration": number, "samples": here, "tokens": tokens}
            spans.append(span("actor[0]", "micro-batch", now, seconds, **labels))
            now += seconds
        now += STEP
        spans.append(span("actor[0]", "train", began, now - began, iteration=number))
        spans.append(span("rollout[0]", "load weights", now, 0.5))
        now += 0.5
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    write_perfetto([one for one in spans if one.name != without], folder / "trace.json.gz")
    return folder


def span(worker: str, name: str, start: float, seconds: float, **args: int) -> Span:
    return Span(worker, name, round(start * 1e9), round(seconds * 1e9), {**args})


def test_the_costs_of_a_run_are_found(tmp_path: Path) -> None:
    found = calibrate(made(tmp_path))
    assert found.generation["decode_seconds"] == pytest.approx(DECODE, rel=1e-4)
    assert found.generation["sequence_seconds"] == pytest.approx(SEQUENCE, rel=1e-4)
    assert found.generation["load_seconds"] == pytest.approx(0.5)
    assert found.actor["token_seconds"] == pytest.approx(TOKEN, rel=1e-4)
    assert found.actor["sample_seconds"] == pytest.approx(SAMPLE, rel=1e-3)
    assert found.actor["step_seconds"] == pytest.approx(STEP, rel=1e-3)
    assert found.actor["beside_generation"] == 1.0
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
        ({"without": "train"}, "has no span 'train' of iteration 0"),
        ({"without": "micro-batch"}, "has no span 'micro-batch'"),
        ({"without": "score"}, "has no lengths in its spans 'score'"),
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


def test_critics_are_left_out(tmp_path: Path) -> None:
    folder = made(tmp_path)
    spans = read_perfetto(folder / "trace.json.gz")
    alone = calibrate(folder)
    actors = [one for one in spans if one.worker == "actor[0]"]
    spans += [msgspec.structs.replace(one, worker="Critic[0]", duration=7) for one in actors]
    write_perfetto(spans, folder / "trace.json.gz")
    assert calibrate(folder) == alone


def test_lengths_are_those_of_the_samples_that_were_trained(tmp_path: Path) -> None:
    assert calibrate(made(tmp_path)).lengths == (90, 100, 150, 200, 400, 500, 800, 900)


def test_many_lengths_are_told_by_their_quantiles(tmp_path: Path) -> None:
    lengths = LogNormal(median=25.0, ratio=10.0, longest=150).many(5000, 0)
    spans = read_perfetto(made(tmp_path, without="score") / "trace.json.gz")
    spans += [span("reward[0]", "score", 0.0, 0.0, iteration=0, tokens=int(n)) for n in lengths]
    write_perfetto(spans, tmp_path / "trace.json.gz")
    found = calibrate(tmp_path).lengths
    assert len(found) == LENGTHS
    assert np.mean(found) == pytest.approx(lengths.mean(), rel=0.02)
    assert found[-1] == 150


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


@pytest.mark.parametrize("wait", ["tool add", "environment"])
def test_episodes_are_simulated_with_the_turns_and_waits_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wait: str
) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text("async def run(episode): ...\n")
    settings = TOY.format(data=tmp_path).replace("prompts = 4", "prompts = 8")
    settings = settings.replace("[cluster]", "[cluster]\nepisode_workers = 2")
    episode = f'[episode]\nrun = "{agent}:run"\nmax_turns = 5\n'
    folder = made(tmp_path, without="score")
    (folder / "config.toml").write_text(settings + episode)
    spans = read_perfetto(folder / "trace.json.gz")
    for sample, turns in ((0, 1), (1, 3)):
        drawn = {"turns": turns, "drawn": 40 * turns, "tokens": 40 * turns + 9 * (turns - 1)}
        spans.append(span("reward[0]", "score", 0.0, 0.0, iteration=0, **drawn))
        evaluation = {"iteration": -1, "turns": 7, "drawn": 7, "tokens": 7}
        spans.append(span("reward[0]", "score", 0.0, 0.0, **evaluation))
        spans.append(Span("episode[0]", wait, 0, 9_000_000_000, {"sample": f"-{sample + 1}/0"}))
    spans.append(Span("episode[0]", wait, 0, 2_500_000_000, {"sample": "0/1"}))
    write_perfetto(spans, folder / "trace.json.gz")
    lines = (folder / "metrics.csv").read_text().splitlines()
    rows = [lines[0] + ",given_tokens", *(f"{line},9" for line in lines[1:])]
    (folder / "metrics.csv").write_text("\n".join(rows) + "\n")
    assert main(["calibrate", str(folder)]) == 0
    config = Document("printed", capsys.readouterr().out).to(SimulationConfig)
    assert config.episode.turns == (1, 3)
    assert config.episode.tool_seconds == (0.0, 2.5)
    assert (config.episode.given_tokens, config.episode.max_turns) == (9, 5)
    assert config.episode.workers == 2
    assert config.generation.lengths.many(4, 0).tolist() == [40.0] * 4
