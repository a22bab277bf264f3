"""The channels of a language run, and how much each may hold.

::

    this process --Request--> rollout --Sample--> [inference] --Sample--> reward
         ^                                                                  |
         +--------------------------ScoredSample----------------------------+
    this process --SampleGroup, by key of the DP rank--> [critic] --SampleGroup--> actor
    where the actors' number changes: critic --SampleGroup--> this process --SampleGroup--> actor
    actor --WeightUpdate, `Latest`--> rollout --WeightsTaken--> this process
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

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
from rlinf_async.runtime.jobs.failures import max_deliveries
from rlinf_async.runtime.jobs.language.config import LanguageConfig


class LanguageChannels:
    """Every channel of the run.

    Capacities follow from admission: there are never more than ``(max_staleness + 1)`` iterations
    of samples under way, so there is room for every sample that is done, and a slow trainer does
    not hold up a rollout worker.
    """

    def __init__(self, cluster: Cluster, config: LanguageConfig) -> None:
        training, counts = config.training, config.cluster
        ahead = training.max_staleness + 1
        samples = max(config.iteration_samples * ahead, config.evaluation.samples)

        def restarted(workers: int) -> int:
            return max_deliveries(workers, counts.max_restarts)

        self.requests: Channel[Request] = cluster.channel(
            Request,
            name="requests",
            capacity=samples,
            max_deliveries=restarted(config.rollout_ranks + config.scheduled),
        )
        self.generated: Channel[Sample] = cluster.channel(
            Sample,
            name="generated",
            capacity=samples,
            max_deliveries=restarted(
                counts.inference_workers
                if config.needs_inference
                else max(counts.reward_workers, 1)
            ),
        )
        self.inferred: Channel[Sample] = self.generated
        """with log-probs of the actor's forward; the same channel where none are asked for"""
        if config.needs_inference:
            self.inferred = cluster.channel(
                Sample,
                name="inferred",
                capacity=samples,
                max_deliveries=restarted(counts.reward_workers),
            )
        self.scored: Channel[ScoredSample] = cluster.channel(
            ScoredSample, name="scored", capacity=samples
        )
        self.groups: Channel[SampleGroup] = cluster.channel(
            SampleGroup, name="groups", capacity=training.prompts * ahead
        )
        self.valued: Channel[SampleGroup] = self.groups
        """with values, by key of the critic; the same channel where there is no critic"""
        if config.has_critic:
            self.valued = cluster.channel(
                SampleGroup, name="valued groups", capacity=training.prompts * ahead
            )
        self.to_train: Channel[SampleGroup] = self.valued
        """by key of the actor; the same channel where each actor has the critic of its rank"""
        if config.has_critic and config.scheduled:
            self.to_train = cluster.channel(
                SampleGroup, name="dispatched groups", capacity=training.prompts * ahead
            )
        self.weights: Latest[WeightUpdate] = cluster.latest(WeightUpdate, name="weights")
        self.taken: Channel[WeightsTaken] = cluster.channel(
            WeightsTaken, name="weights taken", capacity=16 * config.rollout_ranks
        )

    @contextmanager
    def held_open(self) -> Iterator[None]:
        """This process's own ends, which stay open between two calls of the workers."""
        with ExitStack() as ends:
            ends.enter_context(self.scored.receiver)
            ends.enter_context(self.groups.sender)
            ends.enter_context(self.groups.receiver)
            for channel in (self.valued, self.to_train):  # the same where there is no critic
                ends.enter_context(channel.receiver)
                ends.enter_context(channel.sender)
            with self.requests.sender:
                yield
