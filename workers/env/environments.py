"""The environments of one env worker: those of its stages, and those of its evaluations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlinf_async.messages.spaces import EnvSpec
from rlinf_async.workers.env.actions import ActionReader
from rlinf_async.workers.env.async_stage import AsyncEnvs, AsyncStage
from rlinf_async.workers.env.batched import BatchedStage
from rlinf_async.workers.env.batched_evaluation import BatchedEvaluation
from rlinf_async.workers.env.config import EnvConfig
from rlinf_async.workers.env.evaluation import Evaluation
from rlinf_async.workers.env.observations import ObservationWriter
from rlinf_async.workers.env.readiness import Readiness
from rlinf_async.workers.env.seeds import env_seed, episode_seed
from rlinf_async.workers.env.slot import Slot
from rlinf_async.workers.env.stage import EnvStage, Stage
from rlinf_async.workers.foreign_calls import making, place_for

if TYPE_CHECKING:
    from gymnasium import Space


class Environments:
    """Makes them; each stage is made, used and closed in one thread."""

    def __init__(self, config: EnvConfig, rank: int, incarnation: int) -> None:
        self.config = config
        self._rank, self._incarnation = rank, incarnation
        self._evaluation_slots: list[Slot] = []

    @property
    def spec(self) -> EnvSpec:
        """What a policy needs to know about them, once a stage is made."""
        return EnvSpec(
            observation=self._writer.spec,
            action=self._reader.spec,
            max_episode_steps=self._max_episode_steps,
            bounds=self._reader.bounds,
        )

    def look(self) -> None:
        """Make the first environment of the evaluations, where those of the stages are in other
        processes: it says what the spaces are."""
        if self.config.simulator == "pool":
            self._add_evaluation_slot()

    def stage(self, number: int) -> EnvStage:
        """Make the environments of a stage."""
        config, count = self.config, self.config.envs_per_stage
        label = f"{config.name}[{number}]"
        if config.simulator == "pool":
            return self._pool(number)
        if config.many_in_a_call:
            seed = self._seed(number, 0)
            if config.asynchronous:
                return self._async_simulator(count, label, seed)
            return self._simulator(count, label, seed)
        slots = [self._slot(number, index) for index in range(count)]
        return Stage(
            slots,
            self._writer.spec.empty(len(slots)),
            self._reader,
            action_chunk=config.action_chunk,
            group_size=config.group_size,
        )

    def evaluation(self, episodes: range, seed: int) -> Evaluation | BatchedEvaluation:
        """Make the environments of an evaluation, or take those of the last one."""
        if self.config.many_in_a_call:
            count = min(len(episodes), self.config.envs_per_stage)
            label = f"{self.config.name}[evaluation]"
            own = episode_seed(seed, self._rank)
            if self.config.simulator == "async":
                lock_step = self._async_simulator(count, label, own, Readiness(count))
                return BatchedEvaluation(lock_step, episodes)
            return BatchedEvaluation(self._simulator(count, label, own), episodes)
        while len(self._evaluation_slots) < min(len(episodes), self.config.envs):
            self._add_evaluation_slot()
        slots = self._evaluation_slots[: len(episodes)]
        return Evaluation(slots, self._writer.spec, self._reader, iter(episodes), seed)

    def close(self) -> None:
        """Close those of the evaluations; stages are closed by themselves."""
        for slot in self._evaluation_slots:
            slot.close()

    def _look_at(self, observation: Space[Any], action: Space[Any], spec: Any) -> None:
        self._writer = ObservationWriter(observation, self.config.name)
        self._reader = ActionReader(action, self.config.name, self.config.actions)
        self._max_episode_steps = spec.max_episode_steps if spec else None

    def _simulator(self, count: int, label: str, seed: int) -> BatchedStage:
        from rlinf_async.workers.env.make_batched import autoreset_of, make_batched

        call = place_for(f"simulator {label}", self.config.limits)
        with making(call):
            env = make_batched(self.config, count, seed)
            self._look_at(
                env.single_observation_space, env.single_action_space, getattr(env, "spec", None)
            )
            mode = autoreset_of(self.config, env)
        return BatchedStage(
            env, self._writer, self._reader, mode, label=label, seed=seed, call=call
        )

    def _async_simulator(
        self, count: int, label: str, seed: int, readiness: Readiness | None = None
    ) -> AsyncStage:
        from rlinf_async.workers.env.async_simulator import Simulated
        from rlinf_async.workers.env.make_batched import autoreset_of, make_async

        limits = self.config.limits
        calls = place_for(f"simulator {label}", limits), place_for(f"simulator {label}", limits)
        with making(calls[0]):
            env = make_async(self.config, count, seed)
            self._look_at(
                env.single_observation_space, env.single_action_space, getattr(env, "spec", None)
            )
            mode = autoreset_of(self.config, env)
        envs = Simulated(env, self._writer, self._reader, mode, label=label, seed=seed, calls=calls)
        return self._answered_when_ready(envs, count, readiness)

    def _pool(self, number: int) -> AsyncStage:
        from rlinf_async.workers.env.pool import Pool

        count = self.config.envs_per_stage
        labels = [self._label(number, index) for index in range(count)]
        seeds = [self._seed(number, index) for index in range(count)]
        envs = Pool(self.config, self._writer.spec, labels)
        return self._answered_when_ready(envs, count, seeds=seeds)

    def _answered_when_ready(
        self,
        envs: AsyncEnvs,
        count: int,
        readiness: Readiness | None = None,
        seeds: list[int] | None = None,
    ) -> AsyncStage:
        ready = self.config.ready
        return AsyncStage(
            envs,
            count,
            self._writer.spec,
            self._reader,
            readiness or Readiness("adaptive" if ready == "auto" else ready),
            action_chunk=self.config.action_chunk,
            group_size=self.config.group_size,
            seeds=seeds,
        )

    def _add_evaluation_slot(self) -> None:
        slot = self._slot(self.config.stages, len(self._evaluation_slots))
        self._evaluation_slots.append(slot)

    def _slot(self, stage: int, index: int) -> Slot:
        """Make an environment."""
        from rlinf_async.workers.env.make import make_env

        label, seed = self._label(stage, index), self._seed(stage, index)
        call = place_for(f"env {label}", self.config.limits)
        with making(call):
            env = make_env(self.config)
            if not index and stage in (0, self.config.stages):  # an evaluation may have no stages
                self._look_at(env.observation_space, env.action_space, env.spec)
        return Slot(env, self._writer.write, label=label, seed=seed, call=call)

    def _label(self, stage: int, index: int) -> str:
        return f"{self.config.name}[{stage * self.config.envs_per_stage + index}]"

    def _seed(self, stage: int, env: int) -> int:
        return env_seed(
            self.config.seed, rank=self._rank, stage=stage, env=env, incarnation=self._incarnation
        )
