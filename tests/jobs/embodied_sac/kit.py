"""Small runs of soft actor-critic, by the command line's own `main`, in this process."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from rlinf_async.observe.summary import EmbodiedSummary
from rlinf_async.workers.replay.worker import ReplayState, read_state
from tests.jobs import kit as jobs

SMALL = """\
job = "embodied_sac"
name = "small"

[env]
id = "Pendulum-v1"
envs = 4
stages = 2
actions = "rescale"

[training]
total_steps = 192
steps_per_iteration = 8
learning_starts = 64
updates_per_step = 0.25
checkpoint_every = 2
metrics = []

[replay]
capacity = 80
batch_size = 16

[actor.fsdp.policy]
hidden_sizes = [8]

[evaluation]
episodes = 2
video_episodes = 0

[cluster]
backend = "local"
rollout_workers = 0
"""
"""Six iterations of 32 steps; the store holds two and a half. 8 gradient steps in each but the
first two."""

STEPS = 32
"""of an iteration"""


class Job(jobs.Job[EmbodiedSummary]):
    """One configuration file and one run folder."""

    def __init__(self, folder: pathlib.Path, capture: pytest.CaptureFixture[str]) -> None:
        super().__init__(folder / "small.toml", SMALL, capture, EmbodiedSummary)

    @property
    def note(self) -> dict[str, Any]:
        """What a resume would go on from."""
        found: dict[str, Any] = json.loads((self.out / "checkpoints/latest.json").read_bytes())
        return found

    @property
    def store(self) -> ReplayState:
        """What is booked of the store, in the newest checkpoint."""
        found = read_state(self.out / "checkpoints" / self.note["checkpoint"] / "replay/state.json")
        assert found is not None
        return found

    def check_books(self, iterations: int) -> None:
        """Every step was counted, stored and trained on once."""
        summary, rows = self.summary, self.iterations
        assert summary.iterations == iterations
        assert summary.env_steps == iterations * STEPS
        assert [int(row["iteration"]) for row in rows] == [*range(iterations)]
        assert [int(row["step"]) for row in rows] == [
            STEPS * count for count in range(1, iterations + 1)
        ]
        updates = [float(row["updates"] or 0.0) for row in rows]
        assert updates == [0.0, 0.0, *[8.0] * (iterations - 2)]
        assert summary.extra["gradient steps"] == 8 * (iterations - 2)
        assert [float(row["replay_size"]) for row in rows] == [
            min(STEPS * count, 80) for count in range(1, iterations + 1)
        ]
        assert self.note["version"] == iterations
        store = self.store
        assert (store.iteration, store.count) == (iterations - 1, iterations * STEPS)
