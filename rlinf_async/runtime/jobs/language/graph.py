"""The channels of a language run, and how much each may hold.

::

    this process --Request--> rollout --Sample--> [inference] --Sample--> reward
         ^                                                                  |
         +--------------------------ScoredSample----------------------------+
    this process --SampleGroup, by key of the DP rank--> [critic] --SampleGroup--> actor
    actor --WeightUpdate, `Latest`--> rollout --WeightsTaken--> this process
"""

from __future__ import annotations

from rlinf_async.channels import Channel, Latest
from rlinf_async.messages.language import (
    Request,
    Sample,
    SampleGroup,
    ScoredSample,
    WeightsTaken,
)
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.jobs.language.config import LanguageConfig
from rlinf_async.runtime.jobs.lost import deliveries


class Graph:
    """Every channel of the run.

    Capacities follow from admission: there are never more than ``(max_staleness + 1)`` iterations
    of samples under way, so a sample that is done finds room and a rollout worker is not held up
    by a slow trainer.
    """

    def __init__(self, cluster: Cluster, config: LanguageConfig) -> None:
        training, counts = config.training, config.cluster
        ahead = training.max_staleness + 1
        samples = max(config.iteration_samples * ahead, config.evaluation.samples)

        def restarted(workers: int) -> int:
            return deliveries(workers, counts.max_restarts)

        self.requests: Channel[Request] = cluster.channel(
            Request,
            name="requests",
            capacity=samples,
            max_deliveries=restarted(counts.rollout_workers),
        )
        self.generated: Channel[Sample] = cluster.channel(
            Sample,
            name="generated",
            capacity=samples,
            max_deliveries=restarted(max(counts.reward_workers, 1)),
        )
        self.looked_over: Channel[Sample] = self.generated
        """with log-probs of the actor's forward; the same channel where none are asked for"""
        if config.needs_inference:
            self.looked_over = cluster.channel(
                Sample,
                name="looked over",
                capacity=samples,
                max_deliveries=restarted(counts.reward_workers),
            )
        self.scored: Channel[ScoredSample] = cluster.channel(
            ScoredSample, name="scored", capacity=samples
        )
        self.groups: Channel[SampleGroup] = cluster.channel(
            SampleGroup, name="groups", capacity=training.prompts * ahead
        )
        self.to_train: Channel[SampleGroup] = self.groups
        """with values; the same channel where there is no critic"""
        if config.has_critic:
            self.to_train = cluster.channel(
                SampleGroup, name="valued groups", capacity=training.prompts * ahead
            )
        self.weights: Latest[WeightUpdate] = cluster.latest(WeightUpdate, name="weights")
        self.taken: Channel[WeightsTaken] = cluster.channel(
            WeightsTaken, name="weights taken", capacity=16 * counts.rollout_workers
        )
