"""Stages of environments that step together in one call, or of which some get ready before others.

A simulator that steps many environments in one call (`BatchedStage`) has to have a part of
`gymnasium.vector.VectorEnv`. How an episode that ended is followed by the next differs::

    same_step   by the same step: it shows the new episode, and the last observation of the old one
                in ``info["final_obs"]``
    next_step   by the step after: that one ignores the action, and is no sample
                (`StageOutcome.valid`)
    disabled    by ``reset(options={"reset_mask": ended})``, which this stage calls

(`gymnasium.vector.AutoresetMode`). In all three an episode that was cut is bootstrapped from its
own last observation.

Of environments that get ready by themselves (`AsyncStage`), those that are ready are answered::

    step(answer, rows) --send--> [ in flight ] --receive--> those that are ready: the outcome
                                       |
                                       +--> the others go on, and are part of a later outcome

`Readiness` says how long those that are ready wait for others. A reset is part of the step that
ended the episode: its environment is not ready before, and nobody waits for it who need not.

They are in processes of their own (`rlinf_async.workers.env.pool`), or in one simulator that gives
those that are ready (`SimulatorEnvs`), which has to have EnvPool's asynchronous interface::

    async_reset()          begin an episode in all; each is ready when it has begun
    send(actions, env_id)  begin a step in these
    recv()                 wait for some: observations, rewards, terminations, truncations, and
                           info, in which ``env_id`` says which they are

``recv`` has no limit in time, so a thread of its own calls it: as often as environments are under
way, never more. Arrays of simulators may be numpy's or torch's, on any device.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlinf_async.config.registry import raised
from rlinf_async.messages.converting import ActionReader, ObservationWriter, array_of
from rlinf_async.messages.described import EnvError
from rlinf_async.messages.embodied import (
    Bools,
    Choice,
    ControlCounts,
    Floats,
    Ints,
    Level,
    all_counts,
    success_at,
)
from rlinf_async.messages.spaces import ObservationArray, ObservationSpec, all_finite, numbers_of
from rlinf_async.workers.env.config import Autoreset, EnvFailed
from rlinf_async.workers.env.evaluation import Readiness
from rlinf_async.workers.env.stage import (
    Episode,
    ForeignEnv,
    StageOutcome,
    chunk_rewards,
    reward_problem,
    wrong_reward,
)
from rlinf_async.workers.foreign_calls import (
    ASYNC_RESET,
    CLOSE,
    NOT_NOTED,
    RECV,
    RECV_AND_RESET,
    RESET,
    SEND,
    STEP,
    STEP_AND_RESET,
    Call,
)

FINAL = ("final_obs", "final_observation")
"""Where ``info`` has the last observations of episodes: since, and before, Gymnasium 1.0."""


class BatchedEnv(Protocol):
    """Many environments that are stepped in one call."""

    num_envs: int
    single_observation_space: Any
    single_action_space: Any

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]: ...

    def step(self, actions: Any, /) -> tuple[Any, Any, Any, Any, dict[str, Any]]: ...

    def close(self) -> None: ...


EnvT = TypeVar("EnvT", BatchedEnv, "AsyncEnv")


class SimulatorOfMany(ForeignEnv, Generic[EnvT]):
    """A simulator of ``E`` environments, whose episodes are counted here."""

    def __init__(
        self,
        env: EnvT,
        writer: ObservationWriter,
        actions: ActionReader,
        autoreset: Autoreset,
        *,
        label: str,
        seed: int,
        call: Call,
    ) -> None:
        super().__init__(f"simulator {label}", seed, call)
        self.env: EnvT = env
        self._writer, self._actions, self._autoreset = writer, actions, autoreset
        self._returns = np.zeros(env.num_envs)
        self._lengths = np.zeros(env.num_envs, np.int64)

    def _episode(self, env: int, place: int, info: Mapping[str, Any]) -> Episode:
        """End the episode of an environment, of which ``info`` tells in this place."""
        last = info.get("final_info", info) if self._autoreset == "same_step" else info
        ended = Episode(float(self._returns[env]), int(self._lengths[env]), success_at(last, place))
        self._returns[env], self._lengths[env] = 0.0, 0
        return ended

    def _last_observations(
        self, places: Sequence[int], info: Mapping[str, Any]
    ) -> ObservationArray:
        """Return what ``info`` shows of the ends of episodes; raises `ValueError` where nothing."""
        name = last_name(info)
        rows = self._writer.spec.empty(len(places))
        for row, place in enumerate(places):
            self._writer.write(at(info[name], place), rows[row])
        return rows


class BatchedStage(SimulatorOfMany[BatchedEnv]):
    """``E`` environments of one simulator; an `EnvStage`."""

    rows: Ints | None = None
    in_flight = 0

    def __init__(
        self,
        env: BatchedEnv,
        writer: ObservationWriter,
        actions: ActionReader,
        autoreset: Autoreset,
        *,
        label: str,
        seed: int,
        call: Call = NOT_NOTED,
    ) -> None:
        """``call`` is where its calls are noted."""
        super().__init__(env, writer, actions, autoreset, label=label, seed=seed, call=call)
        self.observation: ObservationArray = writer.spec.empty(env.num_envs)
        """``[E, D]``: present observations; a step makes a new array, the old stays as it is"""
        self._fresh = True
        self._ended = np.zeros(env.num_envs, np.bool_)

    @property
    def needs_reset(self) -> bool:
        """Whether `reset` is due before the next step."""
        return self._fresh or (self._autoreset == "disabled" and bool(self._ended.any()))

    def reset(self) -> None:
        """Begin all episodes, or those that ended where the simulator does not begin them itself.

        Raises:
            EnvFailed: the simulator raised, or showed NaN or infinity.
        """
        with self.during(RESET):
            if self._fresh:
                seen, _ = self.env.reset(seed=self.seed)
            else:
                seen, _ = self.env.reset(options={"reset_mask": self._ended.copy()})
            self.observation = self._written(seen)
        self._check(self.observation, RESET)
        self._fresh = False
        self._ended = np.zeros_like(self._ended)

    def step(self, answer: Choice | None, rows: Ints | None = None) -> StageOutcome:
        """Take one step in every environment, with actions ``[E, A]`` (or int64 ``[E]``).

        Raises:
            EnvFailed: the simulator raised, or returned NaN, infinity or arrays of another shape.
            EnvError: the actions do not fit.
        """
        actions = batch_of(self._actions.read(answer, self.env.num_envs))
        begins = self._ended if self._autoreset == "next_step" else None
        self.steps += 1
        with self.during(self._stepping):
            seen, rewards, terminations, truncations, info = self.env.step(actions)
            shown = self._written(seen)
            count = self.env.num_envs
            paid = one_each(rewards, "rewards", count).astype(np.float64)
            terminated = one_each(terminations, "terminations", count).astype(np.bool_)
            cut = one_each(truncations, "truncations", count).astype(np.bool_) & ~terminated
            ended = terminated | cut
            final = self._final(shown, cut, info) if cut.any() else None
        self._check(shown, STEP)
        if wrong := wrong_reward(paid):
            raise self.failed(STEP, f"returned {wrong.problem}, environment {wrong.place}")
        reward = paid.astype(np.float32)
        valid = None if begins is None else ~begins
        episodes = self._episodes(reward, ended, valid, info)
        self.observation, self._ended = shown, ended
        return StageOutcome(reward, terminated, cut, final, episodes, valid=valid)

    def pause(self, rows: Ints | None = None) -> None:
        """Do nothing: none of these is in real time."""

    def take_level(self, level: Level) -> None:
        """Raise `EnvError`: a simulator of many begins episodes by itself."""
        raise no_levels(self.label)

    def judge(self, env: int, *, success: bool) -> None:
        """Raise `EnvError`: a simulator of many ends episodes by itself."""
        raise no_verdicts(self.label)

    def close(self) -> None:
        """Close the simulator.

        Raises:
            EnvFailed: it raised.
        """
        with self.during(CLOSE):
            self.env.close()

    @property
    def _stepping(self) -> int:
        """What a step is: with the resets of episodes that have ended, or without."""
        if self._autoreset == "next_step":
            return STEP_AND_RESET if self._ended.any() else STEP
        return STEP_AND_RESET if self._autoreset == "same_step" else STEP

    def _written(self, seen: Any) -> ObservationArray:
        rows = self._writer.spec.empty(self.env.num_envs)
        self._writer.write_all(seen, rows)
        return rows

    def _final(
        self, shown: ObservationArray, cut: Bools, info: Mapping[str, Any]
    ) -> ObservationArray:
        """The last observations of the episodes that were cut."""
        if self._autoreset != "same_step":
            last: ObservationArray = shown[cut]
            return last
        return self._last_observations(np.flatnonzero(cut).tolist(), info)

    def _episodes(
        self, reward: Floats, ended: Bools, valid: Bools | None, info: Mapping[str, Any]
    ) -> list[Episode]:
        self._returns += reward if valid is None else np.where(valid, reward, 0.0)
        self._lengths += 1 if valid is None else valid
        return [self._episode(env, env, info) for env in np.flatnonzero(ended).tolist()]

    def _check(self, observation: ObservationArray, what: int) -> None:
        numbers = numbers_of(observation)
        if numbers is None or all_finite(numbers):
            return
        rows = np.flatnonzero(~np.isfinite(numbers).all(-1))
        if rows.size:
            raise self.failed(
                what,
                "returned observations with NaN or infinity as float32, in environments "
                f"{rows.tolist()}",
            )


def no_levels(label: str) -> EnvError:
    """The error where a simulator of many is to begin episodes in a level of a curriculum."""
    return EnvError(f"{label} begins episodes by itself, and cannot be told a level")


def no_verdicts(label: str) -> EnvError:
    """The error where a person is to end an episode of a simulator of many."""
    return EnvError(f"{label} ends episodes by itself, and cannot be told to")


def one_each(values: Any, name: str, count: int) -> NDArray[Any]:
    """Return an array of one value for each of ``count`` environments; raises `ValueError`."""
    array = array_of(values)
    if array.shape != (count,):
        raise ValueError(f"{name} of shape {array.shape}, there are {count} environments")
    return array


def last_name(info: Mapping[str, Any]) -> str:
    """Return where info has the last observations of episodes that were cut.

    Raises:
        ValueError: nowhere.
    """
    name = next((name for name in FINAL if name in info), None)
    if name is None:
        raise ValueError(
            f"episodes were cut, but info has none of {' and '.join(FINAL)}: with "
            "env.autoreset = 'same_step' their last observations have to stand there"
        )
    return name


def batch_of(actions: Sequence[Any] | NDArray[Any]) -> Any:
    """One action with all environments in its first dimension, as a batched space has them."""
    if isinstance(actions, np.ndarray):
        return actions
    first = actions[0]
    if isinstance(first, dict):
        return {key: batch_of([action[key] for action in actions]) for key in first}
    if isinstance(first, tuple):
        return tuple(batch_of(list(parts)) for parts in zip(*actions, strict=True))
    return np.asarray(actions)


def at(batch: Any, index: int) -> Any:
    """One environment's observation out of a batch."""
    if isinstance(batch, Mapping):
        return {key: at(part, index) for key, part in batch.items()}
    if isinstance(batch, tuple):
        return tuple(at(part, index) for part in batch)
    one = batch[index]
    return one if isinstance(one, (str, Mapping, tuple)) else array_of(one)


class Ready(msgspec.Struct, kw_only=True):
    """An environment that has ended its step, or its reset."""

    env: int
    ready_at: float
    """seconds of `time.monotonic`"""
    observation: Any
    """``[D]``, or a structured scalar: what it shows now, after a reset where its episode ended"""
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    """cut, and not terminated"""
    final_observation: Any = None
    """the last observation of the episode, where that was cut; of one that terminated, where it is
    known"""
    episode: Episode | None = None
    """the episode that ended with the step, if one did"""
    action_rewards: Sequence[float] = ()
    """rewards of the executed actions, where actions come in chunks"""
    valid: bool = True
    """whether the step is a sample; else it only began an episode"""
    control: ControlCounts | None = None
    """what was counted in real time"""


class AsyncEnvs(Protocol):
    """Environments that step by themselves, numbered from 0.

    Raises `EnvFailed` where one raised, or showed NaN or infinity.
    """

    def begin(self, seeds: Sequence[int] | None) -> None:
        """Begin an episode in every environment; with a seed for each, where they are given."""
        ...

    def send(self, answer: Choice, rows: Ints) -> None:
        """Begin a step in these environments, with actions ``[len(rows), A]``."""
        ...

    def receive(self, timeout: float | None) -> list[Ready]:
        """Wait for at least one environment, and return all that are ready; none after ``timeout``
        seconds. None waits without limit."""
        ...

    def pause(self, rows: Ints) -> None:
        """Stop the time of those that are in real time, until their next step."""
        ...

    def take_level(self, level: Level) -> None:
        """From now on episodes begin in this level."""
        ...

    def judge(self, env: int, *, success: bool) -> None:
        """End the episode of an environment with its next step."""
        ...

    def close(self) -> None:
        """Close the environments, those in the middle of a step too."""
        ...


class AsyncStage:
    """``E`` environments; an `EnvStage`."""

    def __init__(
        self,
        envs: AsyncEnvs,
        count: int,
        spec: ObservationSpec,
        actions: ActionReader,
        readiness: Readiness,
        *,
        action_chunk: int = 1,
        group_size: int = 1,
        seeds: Sequence[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``seeds`` are those of the first episodes; None: the simulator has its own."""
        self._envs, self._spec, self._actions = envs, spec, actions
        self._readiness, self._clock, self._seeds = readiness, clock, seeds
        self._action_chunk, self._group_size = action_chunk, group_size
        self.rows: Ints | None = np.arange(count)
        self.observation: ObservationArray = spec.empty(count)
        """``[E, D]``: present observations; rows change in place as environments get ready"""
        self._fresh = True
        self.in_flight = 0
        """number of environments that have a step under way"""
        self._shown_at = -math.inf
        """when the last outcome was returned"""

    @property
    def needs_reset(self) -> bool:
        """Whether `reset` is due before the first step: never again after it."""
        return self._fresh

    def reset(self) -> None:
        """Begin the first episodes; wait for steps under way, of which nobody wants the outcome.

        Raises:
            EnvFailed: an environment raised, or showed NaN or infinity.
        """
        self._settle()
        if self._fresh:
            self._begin(self._seeds)

    def begin_groups(self, seeds: Sequence[int]) -> None:
        """Begin an episode in every environment, from one seed for each group.

        Raises: as `reset`.
        """
        self._settle()
        self._begin([seed for seed in seeds for _ in range(self._group_size)])

    def step(self, answer: Choice | None, rows: Ints | None = None) -> StageOutcome:
        """Begin a step in ``rows``, and return the steps that have ended: at least one.

        Raises:
            EnvFailed: an environment raised, or returned NaN or infinity.
            EnvError: the actions do not fit.
        """
        sent = np.arange(len(self.observation)) if rows is None else rows
        if sent.size:
            if math.isfinite(self._shown_at):
                self._readiness.answered(self._clock() - self._shown_at)
            self._envs.send(self._actions.checked(answer, len(sent)), sent)
            self.in_flight += len(sent)
        ready = sorted(self._gather(), key=lambda one: one.env)
        self._shown_at = self._clock()
        return self._outcome(ready)

    def pause(self, rows: Ints | None = None) -> None:
        """Stop the time of environments in real time until their next step."""
        self._envs.pause(np.arange(len(self.observation)) if rows is None else rows)

    def take_level(self, level: Level) -> None:
        """From now on begin episodes in this level."""
        self._envs.take_level(level)

    def judge(self, env: int, *, success: bool) -> None:
        """End the episode of an environment with its next step."""
        self._envs.judge(env, success=success)

    def close(self) -> None:
        """Close the environments."""
        self._envs.close()

    def _begin(self, seeds: Sequence[int] | None) -> None:
        self._envs.begin(seeds)
        self.in_flight = len(self.observation)
        self._settle()
        self._fresh = False

    def _settle(self) -> None:
        while self.in_flight:
            self._receive(None)

    def _gather(self) -> list[Ready]:
        """Return the environments that are answered together."""
        ready: list[Ready] = []
        while self.in_flight:
            until = self._readiness.wait_until([one.ready_at for one in ready], self.in_flight)
            left = until - self._clock()
            # One that is ready is taken, also where nobody would wait for it.
            came = self._receive(None if left == math.inf else max(left, 0.0))
            ready += came
            if not came and left <= 0.0:
                break
        return ready

    def _receive(self, timeout: float | None) -> list[Ready]:
        came = self._envs.receive(timeout)
        self.in_flight -= len(came)
        for one in came:
            self.observation[one.env] = one.observation
        return came

    def _outcome(self, ready: Sequence[Ready]) -> StageOutcome:
        finals = [one.final_observation for one in ready if one.truncated]
        known = [one.final_observation is not None for one in ready if one.terminated]
        terminal = [one.final_observation for one in ready if one.terminated]
        action_reward, executed = None, None
        if self._action_chunk > 1:
            rewards = [one.action_rewards for one in ready]
            action_reward, executed = chunk_rewards(rewards, self._action_chunk)
        return StageOutcome(
            _floats([one.reward for one in ready]),
            np.array([one.terminated for one in ready], np.bool_),
            np.array([one.truncated for one in ready], np.bool_),
            self._stacked(finals) if finals else None,
            [one.episode for one in ready if one.episode is not None],
            action_reward,
            executed,
            None
            if all(one.valid for one in ready)
            else np.array([one.valid for one in ready], np.bool_),
            np.array([one.env for one in ready], np.int64),
            all_counts(one.control for one in ready),
            self._stacked(terminal) if known and all(known) else None,
        )

    def _stacked(self, observations: Sequence[Any]) -> ObservationArray:
        rows = self._spec.empty(len(observations))
        for place, one in enumerate(observations):
            rows[place] = one
        return rows


def _floats(values: Sequence[float]) -> Floats:
    return np.array(values, np.float32)


class AsyncEnv(Protocol):
    """Many environments, of which some are ready before others."""

    num_envs: int
    single_observation_space: Any
    single_action_space: Any

    def async_reset(self) -> None: ...

    def send(self, actions: Any, env_id: Any, /) -> None: ...

    def recv(self) -> tuple[Any, Any, Any, Any, dict[str, Any]]: ...

    def close(self) -> None: ...


class _Received(NamedTuple):
    """Result of one `AsyncEnv.recv`, and the time at which it came."""

    ready_at: float
    rows: Ints
    batch: tuple[Any, Any, Any, Any, dict[str, Any]]


class SimulatorEnvs(SimulatorOfMany[AsyncEnv]):
    """`AsyncEnvs` of one simulator."""

    def __init__(
        self,
        env: AsyncEnv,
        writer: ObservationWriter,
        actions: ActionReader,
        autoreset: Autoreset,
        *,
        label: str,
        seed: int,
        calls: tuple[Call, Call] = (NOT_NOTED, NOT_NOTED),
    ) -> None:
        """``calls`` are where those of ``recv`` are noted, and all others."""
        self._receiving, call = calls
        super().__init__(env, writer, actions, autoreset, label=label, seed=seed, call=call)
        self._beginning = np.zeros(env.num_envs, np.bool_)
        """whether what comes next only begins an episode"""
        self._asked = np.zeros(env.num_envs, np.bool_)
        """whether that was a step, and no reset"""
        self._under_way = threading.Semaphore(0)
        self._came: queue.SimpleQueue[_Received | BaseException] = queue.SimpleQueue()
        self._closing = False
        self._thread = threading.Thread(target=self._receive_all, name=label, daemon=True)
        self._thread.start()

    def begin(self, seeds: Sequence[int] | None) -> None:
        """Begin an episode in every environment; the simulator was seeded when it was made."""
        self._beginning[:], self._asked[:] = True, False
        with self.during(ASYNC_RESET):
            self.env.async_reset()
        self._under_way.release(self.env.num_envs)

    def send(self, answer: Choice, rows: Ints) -> None:
        """Begin a step in these environments."""
        self._asked[rows] = True
        actions = batch_of(self._actions.read(answer, len(rows)))
        with self.during(SEND):
            self.env.send(actions, rows)
        self._under_way.release(len(rows))

    def receive(self, timeout: float | None) -> list[Ready]:
        """Wait for at least one environment, and return all that are ready.

        Raises:
            EnvFailed: the simulator raised, or returned NaN, infinity or arrays of another shape.
        """
        ready: list[Ready] = []
        try:
            ready += self._read(self._came.get(timeout=timeout))
            while True:
                ready += self._read(self._came.get_nowait())
        except queue.Empty:
            return ready

    def pause(self, rows: Ints | None = None) -> None:
        """Do nothing: none of these is in real time."""

    def take_level(self, level: Level) -> None:
        """Raise `EnvError`: a simulator of many begins episodes by itself."""
        raise no_levels(self.label)

    def judge(self, env: int, *, success: bool) -> None:
        """Raise `EnvError`: a simulator of many ends episodes by itself."""
        raise no_verdicts(self.label)

    def close(self) -> None:
        """Wait for the steps that are under way, and close the simulator."""
        self._closing = True
        self._under_way.release()
        self._thread.join()
        with self.during(CLOSE):
            self.env.close()

    def _receive_all(self) -> None:
        while True:
            self._under_way.acquire()
            if self._closing:
                return
            resets = self._autoreset == "same_step" or bool(self._beginning.any())
            self._receiving.begin(RECV_AND_RESET if resets else RECV, self.seed, self.steps)
            try:
                batch = self.env.recv()
                rows = array_of(batch[4]["env_id"]).astype(np.int64)
            except BaseException as error:  # raised where it is asked for
                self._came.put(error)
                return
            finally:
                self._receiving.end()
            self.steps += 1  # here: times that some were ready
            self._came.put(_Received(time.monotonic(), rows, batch))
            for _ in range(len(rows) - 1):
                self._under_way.acquire()

    def _read(self, came: _Received | BaseException) -> list[Ready]:
        if isinstance(came, BaseException):
            raise self.failed(RECV, f"raised {raised(came)}") from came
        seen, rewards, terminations, truncations, info = came.batch
        try:
            columns = [
                one_each(values, name, len(came.rows))
                for values, name in (
                    (rewards, "rewards"),
                    (terminations, "terminations"),
                    (truncations, "truncations"),
                )
            ]
            shown = self._writer.spec.empty(len(came.rows))
            self._writer.write_all(seen, shown)
            return [
                self._one(env, came.ready_at, place, shown, columns, info)
                for place, env in enumerate(came.rows.tolist())
            ]
        except EnvFailed:
            raise
        except Exception as error:
            raise self.failed(RECV, f"raised {raised(error)}") from error

    def _one(
        self,
        env: int,
        ready_at: float,
        place: int,
        shown: Any,
        columns: Sequence[NDArray[Any]],
        info: Mapping[str, Any],
    ) -> Ready:
        self._check(shown[place], env)
        if self._beginning[env]:
            self._beginning[env] = False
            self._returns[env], self._lengths[env] = 0.0, 0
            valid = not self._asked[env]  # a step that began an episode is no sample
            return Ready(env=env, ready_at=ready_at, observation=shown[place], valid=valid)
        reward, terminated, truncated = (column[place] for column in columns)
        if problem := reward_problem(float(reward)):
            raise self.failed(RECV, f"returned {problem}, environment {env}")
        self._returns[env] += float(reward)
        self._lengths[env] += 1
        cut = bool(truncated) and not terminated
        episode, final = None, None
        if terminated or truncated:
            episode = self._episode(env, place, info)
            if cut and self._autoreset == "next_step":
                final = shown[place]
            elif cut:
                final = self._last_observations([place], info)[0]
            self._beginning[env] = self._autoreset == "next_step"
        return Ready(
            env=env,
            ready_at=ready_at,
            observation=shown[place],
            reward=float(reward),
            terminated=bool(terminated),
            truncated=cut,
            final_observation=final,
            episode=episode,
        )

    def _check(self, row: Any, env: int) -> None:
        numbers = numbers_of(row)
        if numbers is not None and not all_finite(numbers):
            raise self.failed(
                RECV,
                f"returned an observation with NaN or infinity as float32, environment {env}",
            )
