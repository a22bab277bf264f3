"""``make test``: the workers in 20 other orders of events, without a process or a wait.

Where an order breaks them, the report names its seed, and how to replay it.
"""

import numpy as np
import rlinf_async as ra
from rlinf_async.testing import explore, no_tasks_left

from bandit import RIGHT, SIZE, Games, learn, probabilities, train


async def short_run() -> list[float]:
    async with ra.Cluster.local() as cluster:
        accuracy = await train(cluster, iterations=3)
    no_tasks_left()
    return accuracy


def test_the_workers_learn_the_same_in_every_order_of_events() -> None:
    results = explore(short_run, seeds=range(20))
    assert all(one == results[0] for one in results)


def test_what_was_rewarded_becomes_more_likely() -> None:
    shown = np.array([3, 3])
    pressed = np.array([RIGHT[3], (RIGHT[3] + 1) % SIZE])
    before = np.zeros((SIZE, SIZE))
    after = learn(before, Games(0, shown, pressed, np.array([1.0, 0.0])))
    assert probabilities(after)[3, RIGHT[3]] > probabilities(before)[3, RIGHT[3]]
    assert probabilities(after)[3, pressed[1]] < probabilities(before)[3, pressed[1]]
