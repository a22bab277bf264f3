"""The channels of a run with a replay worker, and how much each may hold.

::

    env worker --Trajectory, leased--> replay worker
    actor --BatchRequest, leased--> replay worker --ReplayBatch, by key of the DP rank--> actor

The others are those of `EmbodiedChannels`.
"""

from __future__ import annotations

from rlinf_async.channels import Channel
from rlinf_async.messages.replay import BatchRequest, ReplayBatch
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.jobs.embodied.channels import EmbodiedChannels
from rlinf_async.runtime.jobs.embodied_sac.config import FittedSac
from rlinf_async.runtime.jobs.failures import max_deliveries


class SacChannels(EmbodiedChannels):
    """Every channel of the run.

    There are never more than ``replay.prefetch`` requests under way. After a restart of the replay
    worker one batch may be there twice, and wait for the actor's next iteration; each rank empties
    its key by itself, so a second batch of one holds no other up.
    """

    def __init__(self, cluster: Cluster, config: FittedSac) -> None:
        super().__init__(cluster, config)
        ahead = config.replay.prefetch
        self.requests: Channel[BatchRequest] = cluster.channel(
            BatchRequest,
            name="batch requests",
            capacity=ahead,
            max_deliveries=max_deliveries(1, config.cluster.max_restarts),
        )
        self.batches: Channel[ReplayBatch] = cluster.channel(
            ReplayBatch, name="batches", capacity=ahead
        )
