"""Small runs of the embodied job, by the command line's own `main`, in this process."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from rlinf_async.backends.fsdp.embodied import EmbodiedTrainer
from rlinf_async.messages.embodied import Trajectory
from rlinf_async.observe.summary import EmbodiedSummary
from rlinf_async.observe.trace import read_perfetto
from tests.jobs import kit as jobs

SMALL = """\
job = "embodied_ppo"
name = "small"

[env]
id = "CartPole-v1"
envs = 4
stages = 2

[training]
total_steps = 384
steps_per_iteration = 16
checkpoint_every = 2

[actor.ppo]
epochs = 2
minibatch_size = 16

[evaluation]
episodes = 3
video_episodes = 0

[cluster]
backend = "local"
rollout_workers = 1
"""
"""Six iterations of 64 steps."""

ENTRY = "tests.jobs.embodied.envs"
LEFT = ("config.toml", "metrics.csv", "summary.json", "trace.json.gz", "run.json")
PICTURES = ("learning_curve.png", "timeline.png")


class Job(jobs.Job[EmbodiedSummary]):
    """One configuration file and one run folder."""

    def __init__(self, folder: pathlib.Path, capture: pytest.CaptureFixture[str]) -> None:
        super().__init__(folder / "small.toml", SMALL, capture, EmbodiedSummary)

    @property
    def note(self) -> dict[str, Any]:
        """What a resume would go on from."""
        found: dict[str, Any] = json.loads((self.out / "checkpoints/latest.json").read_bytes())
        return found

    def check_records(self, iterations: int, steps: int, *, resumed: bool = False) -> None:
        """Everything that a run leaves is there, and consistent."""
        summary, rows = self.summary, self.iterations
        assert summary.iterations == iterations
        assert summary.env_steps == iterations * steps
        assert [int(row["iteration"]) for row in rows] == [*range(iterations)]
        assert [int(row["step"]) for row in rows] == [
            steps * count for count in range(1, iterations + 1)
        ]
        assert self.note["version"] == iterations
        assert self.checkpoints[-1] == self.note["checkpoint"]
        for name in LEFT:
            assert (self.out / name).stat().st_size > 0
        for name in PICTURES:
            assert (self.out / name).read_bytes().startswith(b"\x89PNG")
        if not resumed:
            assert self.trained_in_trace() == [*range(iterations)]

    def trained_in_trace(self) -> list[int]:
        """The iterations whose training the trace shows, on rank 0 of the actors."""
        spans = read_perfetto(self.out / "trace.json.gz")
        mine = [one for one in spans if one.name == "train" and one.worker == "Actor[0]"]
        return [int(one.args["iteration"]) for one in mine if one.args is not None]


class Trained(NamedTuple):
    """One call of a trainer."""

    version: int
    """before it"""
    batch: list[Trajectory]


def record_training(monkeypatch: pytest.MonkeyPatch) -> list[Trained]:
    """Note everything that trainers of this process are given, until the test is over."""
    train, seen = EmbodiedTrainer.train, list[Trained]()

    def noted(trainer: EmbodiedTrainer, batch: Sequence[Trajectory]) -> Any:
        seen.append(Trained(trainer.version, list(batch)))
        return train(trainer, batch)

    monkeypatch.setattr(EmbodiedTrainer, "train", noted)
    return seen
