"""A whole PPO training against Stable-Baselines3's, on HalfCheetah-v5.

Both train 200,000 steps with the same settings (8 envs, 256 steps, 10 epochs, batch 256, lr 3e-4,
tanh 64x64), for the same seeds, alternating, with two cores at their disposal. Stable-Baselines3
runs with one torch thread and with two, and is judged by whichever is faster. Seconds are those of
training: neither side's imports, start or evaluation count.
"""

from __future__ import annotations

import json

from rlinf_async.bench import Bar, Bench, Case, Outcome, Peer, Results
from rlinf_async.bench.model import sample_of
from rlinf_async.bench.results import Sample

OURS = "ours"
THEIRS = ("sb3, 1 thread", "sb3, 2 threads")
SPEED = "steps_per_second"
RETURN = "return"

STABLE_BASELINES3 = Peer(
    name="stable-baselines3",
    requirements=(
        ("torch==2.13.0",),
        (
            "stable-baselines3==2.9.2",
            "gymnasium==1.4.0",
            "mujoco==3.11.0",
            "imageio==2.38.1",
            "packaging==26.3",
        ),
    ),
)


def read_summary(outcome: Outcome) -> Sample:
    """Our run's ``summary.json``."""
    summary = sample_of(json.loads((outcome.out / "summary.json").read_text(encoding="utf-8")))
    missing = [name for name in (SPEED, RETURN) if name not in summary]
    if missing:
        raise ValueError(f"summary.json has no number {' or '.join(missing)}")
    return {SPEED: summary[SPEED], RETURN: summary[RETURN]}


def fastest_peer(results: Results) -> str:
    """Stable-Baselines3 with whichever thread count is faster."""
    return max(THEIRS, key=lambda case: results.median(case, SPEED))


def _speed_ratio(results: Results) -> float:
    return results.median(OURS, SPEED) / results.median(fastest_peer(results), SPEED)


def _lowest_return(results: Results) -> float:
    return min(results.values(fastest_peer(results), RETURN))


def _peer(name: str, threads: int) -> Case:
    return Case(
        name,
        ("{python}", "{here}/sb3_ppo.py", "{repetition}", str(threads)),
        peer=STABLE_BASELINES3,
        cores=2,
        threads=threads,
    )


_TRAIN = ("{python}", "-m", "rlinf_async.cli", "train", "{here}/../half_cheetah_ppo.toml")

BENCH = Bench(
    name="embodied",
    summary="PPO on HalfCheetah-v5, 200 k steps, against Stable-Baselines3",
    cases=(
        Case(
            OURS,
            (*_TRAIN, "--out", "{out}", "--seed", "{repetition}"),
            requires=("gymnasium", "mujoco"),
            cores=2,
            threads=None,
            read=read_summary,
        ),
        _peer(THEIRS[0], 1),
        _peer(THEIRS[1], 2),
    ),
    bars=(
        Bar(
            name="training steps/s / Stable-Baselines3's",
            cases=(OURS, *THEIRS),
            value=_speed_ratio,
            target=lambda _: 1.3,
            unit="x",
        ),
        Bar(
            name="median return / lowest of theirs over the seeds",
            cases=(OURS, *THEIRS),
            value=lambda results: results.median(OURS, RETURN),
            target=_lowest_return,
        ),
    ),
    repetitions=3,
    notes=(
        "two cores each; seeds 0, 1, 2; theirs is the faster of one and two torch threads",
        "return: mean of deterministic evaluation episodes after training",
    ),
)
