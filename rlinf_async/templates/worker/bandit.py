"""Two kinds of workers over typed channels: players try a game, a learner learns from them.

    main --Ticket--> players --Game--> learner --Report--> main
                        ^                 |
                        +----- Weights ---+        the newest only: a `Latest`

The game: a number from 0 to 9 is shown, and one of ten buttons has to be pressed. Which one is
right for which number is found out by trying. The policy is a table, learnt by REINFORCE.

    python bandit.py [--processes] [--iterations 40] [--picture accuracy.png]
"""

import argparse
from pathlib import Path

import msgspec
import numpy as np
import rlinf_async as ra
from matplotlib.figure import Figure
from numpy.typing import NDArray

SIZE = 10
LEARNING_RATE = 2.0
RIGHT = np.random.default_rng(7).permutation(SIZE)
"""the button that is right, for each number"""


class Ticket(msgspec.Struct, frozen=True):
    """main -> a player: play these games."""

    iteration: int
    seed: int
    games: int


class Weights(msgspec.Struct, frozen=True):
    """learner -> players: the policy."""

    iteration: int
    logits: NDArray[np.float64]  # [number, button]


class Games(msgspec.Struct, frozen=True):
    """a player -> learner: what was played."""

    seed: int
    shown: NDArray[np.int64]  # [game]
    pressed: NDArray[np.int64]  # [game]
    reward: NDArray[np.float64]  # [game]


class Report(msgspec.Struct, frozen=True):
    """learner -> main: how one iteration went."""

    iteration: int
    accuracy: float


def probabilities(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """The policy: how likely each button is. [number, button]"""
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    policy: NDArray[np.float64] = powers / powers.sum(axis=1, keepdims=True)
    return policy


def play(ticket: Ticket, logits: NDArray[np.float64]) -> Games:
    """Play the games of a ticket; the same ones again under the same seed."""
    chance = np.random.default_rng(ticket.seed)
    shown = chance.integers(SIZE, size=ticket.games)
    policy = probabilities(logits)
    pressed = np.array([chance.choice(SIZE, p=policy[number]) for number in shown])
    return Games(ticket.seed, shown, pressed, (pressed == RIGHT[shown]).astype(float))


def learn(logits: NDArray[np.float64], games: Games) -> NDArray[np.float64]:
    """A step of REINFORCE: what was rewarded above the mean becomes more likely."""
    policy = probabilities(logits)
    advantage = games.reward - games.reward.mean()
    gradient = np.zeros_like(logits)
    for number, button, value in zip(games.shown, games.pressed, advantage, strict=True):
        gradient[number] -= value * policy[number]
        gradient[number, button] += value
    return logits + LEARNING_RATE * SIZE * gradient / len(games.shown)


def joined(parts: list[Games]) -> Games:
    """All games of an iteration, in the order of their tickets: whoever was first, the same sum."""
    parts = sorted(parts, key=lambda one: one.seed)
    return Games(
        parts[0].seed,
        np.concatenate([one.shown for one in parts]),
        np.concatenate([one.pressed for one in parts]),
        np.concatenate([one.reward for one in parts]),
    )


class Player(ra.Worker):
    """Plays what it is asked for, with weights of that iteration."""

    async def run(
        self,
        tickets: ra.Receiver[Ticket],
        weights: ra.LatestReceiver[Weights],
        games: ra.Sender[Games],
    ) -> int:
        """Return the number of tickets that this player has had."""
        done = 0
        newest = await weights.get()
        async for ticket in tickets:
            while newest.iteration < ticket.iteration:
                newest = await weights.get()
            # What takes long runs in the worker's compute thread: it goes on answering meanwhile.
            await games.put(await self.compute(play, ticket, newest.logits))
            done += 1
        return done


class Learner(ra.Worker):
    """Trains on the games of all players, and publishes new weights."""

    async def run(
        self,
        games: ra.Receiver[Games],
        weights: ra.LatestSender[Weights],
        reports: ra.Sender[Report],
        tickets: int,
    ) -> None:
        """Train once for each iteration, on the games of all its tickets."""
        logits = np.zeros((SIZE, SIZE))
        iteration = 0
        arrived: list[Games] = []
        await weights.publish(Weights(iteration, logits))
        async for each in games:
            arrived.append(each)
            if len(arrived) == tickets:
                batch = joined(arrived)
                logits = await self.compute(learn, logits, batch)
                await reports.put(Report(iteration, float(batch.reward.mean())))
                iteration += 1
                arrived.clear()
                await weights.publish(Weights(iteration, logits))


async def train(cluster: ra.Cluster, iterations: int, players: int = 2) -> list[float]:
    """Connect the workers and run them; return the accuracy of each iteration."""
    tickets = cluster.channel(Ticket, name="tickets", capacity=players)
    games = cluster.channel(Games, name="games", capacity=players)
    reports = cluster.channel(Report, name="reports", capacity=1)
    weights = cluster.latest(Weights, name="weights")
    player = await cluster.launch(Player, count=players)
    learner = await cluster.launch(Learner)
    playing = player.call(Player.run, tickets.receiver, weights.receiver, games.sender)
    learning = learner.call(Learner.run, games.receiver, weights.sender, reports.sender, players)
    accuracy: list[float] = []
    with tickets.sender as sender:
        for iteration in range(iterations):
            for rank in range(players):
                await sender.put(Ticket(iteration, iteration * players + rank, games=100))
            accuracy.append((await reports.receiver.get()).accuracy)
    await playing  # one result for each player, or the first cause of a failure
    await learning
    return accuracy


async def main(iterations: int, processes: bool) -> list[float]:
    """Run with a process for each worker, or with all of them in this one, for a debugger."""
    cluster = ra.Cluster.process() if processes else ra.Cluster.local()
    async with cluster:
        return await train(cluster, iterations)


def show(accuracy: list[float], picture: Path) -> None:
    """Print the accuracy, and draw it."""
    for at in range(0, len(accuracy), max(1, len(accuracy) // 8)):
        print(f"iteration {at:3}  right {accuracy[at]:4.0%}  {'#' * round(40 * accuracy[at])}")
    print(f"the last iteration: {accuracy[-1]:.0%} right -> {picture}")
    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot(accuracy)
    axes.set(xlabel="iteration", ylabel="share of games won", ylim=(0, 1.05))
    figure.savefig(picture)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Learn which button is right for which number.")
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--processes", action="store_true", help="a process for each worker")
    parser.add_argument("--picture", type=Path, default=Path("accuracy.png"))
    given = parser.parse_args()
    show(ra.run(main(given.iterations, given.processes)), given.picture)
