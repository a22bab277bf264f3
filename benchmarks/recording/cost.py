"""One kind of run with ``--record all`` and without, in turning order; prints one line of JSON.

    python cost.py items | embodied | grpo | samples OUT [--pairs 5]

``samples`` is GRPO again: with the samples that every run keeps, and without any.

``speed``: median over the pairs of what the recorded one does in a second, by what the other does.
``size``: bytes of the files, by those of ``zstd -3`` over all bodies, as one stream.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import zstandard

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import rlinf_async as ra
from benchmarks.channels import ours
from rlinf_async.recording import Recording, read_recording

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 4_000_000_000
STEPS = 60_000
"""environment steps of a run of PPO"""
ITERATIONS = 20
"""iterations of a run of GRPO"""
WARM_START = 60
"""steps before them: weights that are never changed would be compressed to nothing"""


def items(out: Path, *, record: bool) -> float:
    """Items a second, the slowest direction."""

    async def main() -> float:
        async with ra.Cluster.process() as cluster:
            if record:
                cluster.record_into(out / "recording" / "1", ["all"], LIMIT)
            return (await ours.items(cluster))["items_per_s"]

    return asyncio.run(main())


def embodied(out: Path, *, record: bool) -> float:
    """Environment steps a second."""
    file = ROOT / "benchmarks" / "half_cheetah_ppo.toml"
    words = ["--training.total_steps", str(STEPS), "--evaluation.episodes", "1"]
    summary = trained(file, out, words, record=record)
    return float(summary["steps_per_second"])


def grpo(out: Path, *, record: bool) -> float:
    """Iterations a second."""
    return _grpo(out, [], record=record)


def samples(out: Path, *, record: bool) -> float:
    """Iterations a second; ``record``: with samples."""
    return _grpo(out, [] if record else ["--samples.keep", "0"], record=False)


def _grpo(out: Path, more: list[str], *, record: bool) -> float:
    file = ROOT / "examples" / "grpo_arithmetic.toml"
    words = ["--training.iterations", str(ITERATIONS), "--warm_start.steps", str(WARM_START)]
    summary = trained(file, out, [*words, "--evaluation.samples", "1", *more], record=record)
    return float(summary["iterations"]) / float(summary["train_seconds"])


def trained(file: Path, out: Path, words: list[str], *, record: bool) -> dict[str, float]:
    """The summary of a run."""
    recorded = ["--record", "all"] if record else []
    command = [sys.executable, "-m", "rlinf_async", "train", str(file), "--out", str(out)]
    done = subprocess.run(
        [*command, *words, *recorded], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode > 1:
        sys.exit(done.stderr)
    summary: dict[str, float] = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    return summary


def size_ratio(recording: Recording) -> tuple[float, float]:
    """Bytes of the files by those of a plain compression of the payload; megabytes of that."""
    compressing = zstandard.ZstdCompressor(level=3).compressobj()
    payload = plain = 0
    for event in recording.events():
        for body in event.bodies:
            for part in (body.data, *body.buffers):
                payload += len(part)
                plain += len(compressing.compress(part))
    plain += len(compressing.flush())
    files = sum(one.stat().st_size for one in recording.folder.iterdir())
    return files / plain, payload / 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("items", "embodied", "grpo", "samples"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--pairs", type=int, default=5)
    chosen = parser.parse_args()
    kinds = {"items": items, "embodied": embodied, "grpo": grpo, "samples": samples}
    measure = kinds[chosen.kind]
    quotients: list[float] = []
    speeds: list[float] = []
    size = megabytes = 0.0
    for pair in range(chosen.pairs):
        found: dict[bool, float] = {}
        for record in (False, True) if pair % 2 else (True, False):
            out = chosen.out / f"{pair}-{record}"
            found[record] = measure(out, record=record)
            if record and chosen.kind != "samples":
                size, megabytes = size_ratio(read_recording(out))
            shutil.rmtree(out, ignore_errors=True)
        quotients.append(found[True] / found[False])
        speeds.append(found[False])
        print(f"{chosen.kind}: {found[False]:.4g}/s, {found[True]:.4g}/s recorded", file=sys.stderr)
    measured = {
        "speed": statistics.median(quotients),
        "size": size,
        "payload_mb": megabytes,
        "per_second": statistics.median(speeds),
    }
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
