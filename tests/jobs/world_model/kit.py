"""Small runs of the ``world_model`` job, by the command line's own `main`, in this process."""

from __future__ import annotations

import pathlib

import pytest

from rlinf_async.observe.summary import WorldModelSummary
from tests.jobs import kit as jobs

SMALL = """\
job = "world_model"
name = "small"

[env]
entry_point = "tests.jobs.world_model.envs:Line"

[demonstrations]
policy = "tests.jobs.world_model.envs:wander"
episodes = 24

[data]
held_out = 4

[model]
latent_size = 16
hidden_sizes = [32]
channels = [8, 8]
horizon = 5

[training]
steps = 80
steps_per_iteration = 20
batch_size = 32
checkpoint_every = 1

[actor.optimizer]
lr = 3e-3

[cluster]
backend = "local"
"""


class Job(jobs.Job[WorldModelSummary]):
    """One configuration file and one run folder."""

    def __init__(self, folder: pathlib.Path, capture: pytest.CaptureFixture[str]) -> None:
        super().__init__(folder / "small.toml", SMALL, capture, WorldModelSummary)

    @property
    def model(self) -> pathlib.Path:
        """The file that the run leaves."""
        return self.out / "world_model.safetensors"

    @property
    def losses(self) -> list[str]:
        """The loss of each iteration, as it was written."""
        return [row["loss"] for row in self.iterations]
