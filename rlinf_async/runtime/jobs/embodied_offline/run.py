"""One run of learning from data alone, to the evaluation.

::

    demonstrations --read once--> replay worker <--BatchRequest, ReplayBatch--> actor
                                                                                  | WeightUpdate
    this process <--EvaluatedEpisode, at the end-- env workers (and rollout workers) <

Env workers wait for the evaluation: no ticket is issued. All else is as in `ReplayRun`.
"""

from __future__ import annotations

from rlinf_async.messages.embodied import TrainReport
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.runtime.calls import WorkerGroup
from rlinf_async.runtime.jobs.embodied.beginning import Beginning
from rlinf_async.runtime.jobs.embodied_offline.config import FittedOffline
from rlinf_async.runtime.jobs.embodied_sac.config import SacChannels
from rlinf_async.runtime.jobs.embodied_sac.run import ReplayRun, SacProgress
from rlinf_async.workers.actor import SacActor
from rlinf_async.workers.replay.worker import ReplayWorker


class OfflineProgress(SacProgress, kw_only=True):
    """Progress of a run."""

    @property
    def step(self) -> int:
        """Gradient steps."""
        return self.updates


class OfflineRun(ReplayRun[FittedOffline]):
    """A run that learns from demonstrations alone."""

    trainer = "offline"
    experience = False

    def __init__(
        self, config: FittedOffline, folder: RunFolder, beginning: Beginning | None = None
    ) -> None:
        super().__init__(config, folder, beginning, OfflineProgress())

    async def _issue(self, channels: SacChannels, iteration: int) -> None:
        """Nothing is collected."""

    async def _train_iteration(
        self,
        channels: SacChannels,
        actor: WorkerGroup[SacActor],
        replay: WorkerGroup[ReplayWorker],
        iteration: int,
    ) -> TrainReport:
        """Let the actor learn from demonstrations."""
        learnt = await self._learn(channels, actor, iteration)
        return TrainReport(
            iteration=iteration,
            version=learnt.version,
            metrics=learnt.metrics,
            env_steps=0,
            lag_mean=0.0,
            lag_max=0,
            duplicates=0,
            episode_return=[],
            episode_length=[],
            episode_success=[],
        )
