"""Environments that get ready one before the other collect what they collect together."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

import rlinf_async as ra
from rlinf_async.backends.base import PolicyAnswer, PolicyBackend
from rlinf_async.messages.embodied import Collect, Floats, Ints, Trajectory
from rlinf_async.realtime import ControlConfig
from rlinf_async.workers.env import EnvConfig, EnvReport, EnvWorker
from rlinf_async.workers.env.evaluation import Readiness
from rlinf_async.workers.env.many import AsyncStage
from rlinf_async.workers.env.stage import EnvStage
from rlinf_async.workers.env.worker import Environments
from tests.workers.env.toy import MAKE, Channels, ToyPolicy, ToyRollout, weights
from tests.workers.env.virtual import Clock, Virtual, durations

TIMES = 20
"""random programs of each kind"""


class ChunkPolicy(ToyPolicy):
    """Answers with three actions."""

    def act(self, observation: Floats) -> PolicyAnswer:
        one = super().act(observation)
        action: Floats = np.repeat(one.action, 3, axis=1).astype(np.float32)
        return PolicyAnswer(action, one.log_prob, one.value)


class RememberingPolicy(ToyPolicy):
    """Acts by the sum of what it has seen since the episode began."""

    memory_size = 1

    def act_from(self, observation: Floats, memory: Floats) -> PolicyAnswer:
        after = memory + observation[:, 1:]
        one = super().act(observation)
        return PolicyAnswer(
            one.action + memory, one.log_prob, self._worth(one.value, memory), after
        )

    def mode_from(self, observation: Floats, memory: Floats) -> tuple[Floats | Ints, Floats]:
        return super().mode(observation), memory

    def value_from(self, observation: Floats, memory: Floats) -> Floats:
        return self._worth(super().value(observation), memory)

    def _worth(self, value: Floats, memory: Floats) -> Floats:
        worth: Floats = (value + memory[:, 0] / 8).astype(np.float32)
        return worth


class RememberingRollout(ToyRollout):
    """A rollout worker over `RememberingPolicy`."""

    def make_policy(self) -> PolicyBackend:
        return RememberingPolicy()


class ChunkRollout(ToyRollout):
    """A rollout worker over `ChunkPolicy`."""

    def make_policy(self) -> PolicyBackend:
        return ChunkPolicy()


class VirtualEnvironments(Environments):
    """Their steps take random times of a virtual clock."""

    made: list[Virtual]

    def stage(self, number: int) -> EnvStage:
        config, count, clock = self.config, self.config.envs_per_stage, Clock()
        slots = [self._slot(number, index) for index in range(count)]
        virtual = Virtual(
            slots, self._writer.spec, self._reader, clock, durations(config.seed + number)
        )
        self.made = [*getattr(self, "made", []), virtual]
        return AsyncStage(
            virtual,
            count,
            self._writer.spec,
            self._reader,
            Readiness("adaptive" if config.ready == "auto" else config.ready),
            action_chunk=config.action_chunk,
            group_size=config.group_size,
            seeds=[slot.seed for slot in slots],
            clock=clock,
        )


class VirtualWorker(EnvWorker):
    """An env worker whose environments get ready in virtual time."""

    worker: VirtualWorker
    """the last one that was made"""

    def __init__(self, config: EnvConfig, *, actor_ranks: int = 1) -> None:
        super().__init__(config, actor_ranks=actor_ranks)
        steps = msgspec.structs.replace(config, control=ControlConfig())
        self._envs = VirtualEnvironments(steps, self.rank, self.incarnation)
        VirtualWorker.worker = self

    @property
    def virtual(self) -> list[Virtual]:
        """The environments of each stage."""
        assert isinstance(self._envs, VirtualEnvironments)
        return self._envs.made


async def collected(
    worker: type[EnvWorker],
    config: EnvConfig,
    tickets: list[Collect],
    rollouts: type[ToyRollout] = ToyRollout,
) -> tuple[list[Trajectory], EnvReport]:
    """What a worker collects, in the order of iteration, stage and epoch."""
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        envs = await cluster.launch(worker, config)
        rollout = await cluster.launch(rollouts, None)
        serving = rollout.call(
            ToyRollout.serve,
            channels.observations.receiver,
            channels.actions.sender,
            channels.weights.receiver,
        )
        collecting = envs.call(
            EnvWorker.collect,
            channels.tickets.receiver,
            channels.observations.sender,
            channels.actions.receiver,
            channels.trajectories.sender,
        )
        await channels.weights.sender.publish(weights(0))
        await channels.issue(tickets)
        [report] = await collecting
        await serving
        order = sorted(channels.collected(), key=lambda one: (one.iteration, one.stage, one.epoch))
        return order, report


def equal(got: list[Trajectory], wanted: list[Trajectory]) -> None:
    """Every field of every trajectory."""
    assert len(got) == len(wanted) > 0
    for one, other in zip(got, wanted, strict=True):
        for each in (one, other):  # None and all True say the same
            if each.valid is not None and each.valid.all():
                each.valid = None
        for name in Trajectory.__struct_fields__:
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


def program(seed: int) -> tuple[dict[str, Any], list[Collect]]:
    """Environments and tickets at random."""
    random = np.random.default_rng(seed)
    stages, per_stage = int(random.integers(1, 3)), int(random.integers(1, 6))
    settings = {
        "entry_point": MAKE,
        "envs": stages * per_stage,
        "stages": stages,
        "seed": seed,
        "action_chunk": int(random.choice([1, 1, 3])),
    }
    tickets = [
        Collect(
            iteration=iteration,
            steps=int(random.integers(1, 9)),
            min_version=0,
            epochs=int(random.integers(1, 3)),
            transitions=bool(random.random() < 0.3),
        )
        for iteration in range(3)
    ]
    return settings, tickets


@pytest.mark.parametrize("seed", range(TIMES))
async def test_trajectories_are_those_of_environments_that_step_together(seed: int) -> None:
    settings, tickets = program(seed)
    rollouts = ChunkRollout if settings["action_chunk"] > 1 else ToyRollout
    if seed % 3 == 0 and rollouts is ToyRollout:
        rollouts = RememberingRollout
    wanted, report = await collected(EnvWorker, EnvConfig(**settings), tickets, rollouts)
    per_stage = settings["envs"] // settings["stages"]
    ready = [1, per_stage, "adaptive", max(1, per_stage // 2)][seed % 4]
    config = EnvConfig(**settings, simulator="pool", ready=ready)
    got, own = await collected(VirtualWorker, config, tickets, rollouts)
    equal(got, wanted)
    assert (own.env_steps, own.episodes) == (report.env_steps, report.episodes)
    for virtual in VirtualWorker.worker.virtual:
        counts = np.bincount(np.concatenate([np.array(batch) for batch in virtual.batches]))
        steps = sum(ticket.steps * ticket.epochs for ticket in tickets)
        assert counts.tolist() == [steps] * per_stage  # none has more for being fast
        if ready == per_stage:
            assert {len(batch) for batch in virtual.batches} == {per_stage}


class NoisyPolicy(ToyPolicy):
    """Draws its actions, one batch after the other, with one generator."""

    def __init__(self) -> None:
        super().__init__()
        self._random = np.random.default_rng(0)

    def act(self, observation: Floats) -> PolicyAnswer:
        answer = super().act(observation)
        noise = self._random.standard_normal(answer.action.shape).astype(np.float32)
        return answer._replace(action=answer.action + noise)


class NoisyRollout(ToyRollout):
    """A rollout worker over `NoisyPolicy`."""

    def make_policy(self) -> PolicyBackend:
        return NoisyPolicy()


@pytest.mark.parametrize("ready", [5, 1])
async def test_actions_that_are_drawn_are_those_of_single_environments_in_lock_step_only(
    ready: int,
) -> None:
    settings: dict[str, Any] = {"entry_point": MAKE, "envs": 5, "stages": 1, "seed": 1}
    tickets = [Collect(iteration=number, steps=6, min_version=0) for number in range(2)]
    wanted, _ = await collected(EnvWorker, EnvConfig(**settings), tickets, NoisyRollout)
    config = EnvConfig(**settings, simulator="pool", ready=ready)
    got, _ = await collected(VirtualWorker, config, tickets, NoisyRollout)
    if ready == 5:
        equal(got, wanted)
        return
    for one, other in zip(got, wanted, strict=True):  # the same episodes, other actions
        np.testing.assert_array_equal(one.observation, other.observation)
        assert one.episode_length == other.episode_length
        assert not np.array_equal(one.action, other.action)


async def test_some_are_answered_while_others_are_still_in_their_step() -> None:
    config = EnvConfig(entry_point=MAKE, envs=6, stages=1, simulator="pool", ready=2, seed=3)
    await collected(VirtualWorker, config, [Collect(iteration=0, steps=50, min_version=0)])
    sizes = [len(batch) for batch in VirtualWorker.worker.virtual[0].batches]
    assert sum(sizes) == 300
    assert sum(2 <= size < 6 for size in sizes) > 30


async def test_the_time_of_those_that_have_finished_stands_still_while_others_go_on() -> None:
    config = EnvConfig(
        entry_point=MAKE,
        envs=6,
        stages=1,
        simulator="pool",
        ready=2,
        seed=3,
        control=ControlConfig(hz=50),
    )
    tickets = [Collect(iteration=one, steps=20, min_version=0) for one in range(2)]
    await collected(VirtualWorker, config, tickets)
    [virtual] = VirtualWorker.worker.virtual
    paused: dict[int, int] = {}  # in the first ticket: after so many batches
    for rows, at in virtual.paused:
        for row in rows:
            paused.setdefault(row, at)
    assert sorted(row for rows, _ in virtual.paused for row in rows) == sorted([*range(6)] * 2)
    last = dict.fromkeys(range(6), 0)
    for number, batch in enumerate(virtual.batches):
        for row in batch:
            if sum(row in one for one in virtual.batches[: number + 1]) == 20:
                last[row] = number
    # Each at once, when its last step of the ticket has come back; the first long before the last.
    assert all(paused[row] > last[row] for row in paused)
    assert min(paused.values()) < max(last.values())


def test_groups_begin_in_the_same_state() -> None:
    place = "tests.workers.env.toy:make_drawing"
    config = EnvConfig(entry_point=place, envs=4, stages=1, group_size=2, simulator="pool")
    stage = VirtualEnvironments(config, 0, 0).stage(0)
    assert isinstance(stage, AsyncStage)
    for seeds in ((7, 8), (9, 10)):
        stage.begin_groups(seeds)
        first, second, third, fourth = stage.observation[:, 0].tolist()
        assert first == second != third
        assert third == fourth


def test_steps_that_nobody_waits_for_are_settled_by_a_reset() -> None:
    config = EnvConfig(entry_point=MAKE, envs=3, stages=1, simulator="pool", ready=1)
    stage = VirtualEnvironments(config, 0, 0).stage(0)
    assert stage.needs_reset
    stage.reset()
    outcome = stage.step(np.ones((3, 1), np.float32), np.arange(3))
    assert outcome.rows is not None
    assert len(outcome.rows) == 1
    assert stage.in_flight == 2  # a ticket that is given up now leaves two steps
    stage.reset()
    assert stage.in_flight == 0
    assert stage.observation.tolist() == [[1.0, 1.0]] * 3  # all took it, none began anew
