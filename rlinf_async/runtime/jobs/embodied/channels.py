"""The channels of an embodied run, and how much each may hold.

::

    this process --Collect, by key of the env rank--> env worker
    env worker --Observations--> rollout worker --Actions, by key of the stage--> env worker
    env worker --Trajectory, by key of the DP rank--> actor --TrainReport--> this process
    actor --WeightUpdate, `Latest`--> rollout worker
    env worker --EvaluatedEpisode--> this process, at the end

Observations and actions are there only where rollout workers are: where each env worker runs the
policy itself, it takes the weights.
"""

from __future__ import annotations

from rlinf_async.channels import Channel, Latest
from rlinf_async.messages.embodied import Actions, Collect, Observations, Trajectory
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.jobs.embodied.settings import EnvironmentSettings
from rlinf_async.runtime.jobs.failures import max_deliveries
from rlinf_async.workers.env import EvaluatedEpisode


class EmbodiedChannels:
    """Every channel of the run.

    Capacities follow from admission: there are never more than ``max_staleness + 1`` iterations
    under way, and each stage of an env worker waits for one answer at a time.
    """

    def __init__(self, cluster: Cluster, config: EnvironmentSettings) -> None:
        counts = config.cluster
        once = max_deliveries(1, counts.max_restarts)
        ahead = config.training.max_staleness + 1
        self.tickets: Channel[Collect] = cluster.channel(
            Collect,
            name="tickets",
            capacity=ahead,
            max_deliveries=once,
        )
        self.trajectories: Channel[Trajectory] = cluster.channel(
            Trajectory,
            name="trajectories",
            capacity=config.trajectories * ahead,
            max_deliveries=once,  # where they are leased: by a replay worker
        )
        self.evaluated: Channel[EvaluatedEpisode] = cluster.channel(
            EvaluatedEpisode, name="evaluated"
        )
        self.weights: Latest[WeightUpdate] = cluster.latest(WeightUpdate, name="weights")
        if counts.rollout_count:
            stages = config.env.stages + 1  # one more for the evaluation
            self.observations: Channel[Observations] = cluster.channel(
                Observations,
                name="observations",
                capacity=stages * counts.env_workers,
                max_deliveries=max_deliveries(counts.rollout_count, counts.max_restarts),
            )
            self.actions: Channel[Actions] = cluster.channel(Actions, name="actions", capacity=2)
