"""An env worker and a rollout worker in one process."""

from __future__ import annotations

from typing import ClassVar

import pytest

import rlinf_async as ra
from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.workers.collocated import CollocatedEnvWorker
from rlinf_async.workers.env import EnvConfig
from tests.workers.env.toy import Counting


class Open(Counting):
    """Counts those of its kind that nobody has closed."""

    count: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        Open.count += 1

    def close(self) -> None:
        Open.count -= 1


ENV = EnvConfig(id="Open", entry_point=f"{__name__}:Open", envs=2)


@pytest.mark.parametrize("loop_kind", ["uvloop"])
async def test_no_environment_stays_open_where_the_policy_cannot_be_made(loop_kind: str) -> None:
    wrong = PolicyConfig(name="none", observation_size=2, action_size=1)
    async with ra.Cluster.local() as cluster:
        with pytest.raises(ra.WorkerError, match="none"):
            await cluster.launch(CollocatedEnvWorker, ENV, wrong)
    assert Open.count == 0


@pytest.mark.parametrize("loop_kind", ["uvloop"])
async def test_environments_are_closed_at_the_end(loop_kind: str) -> None:
    right = PolicyConfig(observation_size=2, action_size=1)
    async with ra.Cluster.local() as cluster:
        await cluster.launch(CollocatedEnvWorker, ENV, right)
        assert Open.count > 0
    assert Open.count == 0
