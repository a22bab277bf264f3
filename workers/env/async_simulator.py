"""A simulator that steps many environments, and gives those that are ready.

What such a simulator has to have is EnvPool's asynchronous interface; arrays may be numpy's or
torch's, on any device::

    async_reset()          begin an episode in all; each is ready when it has begun
    send(actions, env_id)  begin a step in these
    recv()                 wait for some: observations, rewards, terminations, truncations, and
                           info, in which ``env_id`` says which they are

``recv`` has no limit in time, so a thread of its own calls it: as often as environments are under
way, never more.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rlinf_async.config.errors import raised
from rlinf_async.messages.embodied import Choice, Ints
from rlinf_async.messages.spaces import all_finite, numbers_of
from rlinf_async.messages.success import success_at
from rlinf_async.workers.env.actions import ActionReader
from rlinf_async.workers.env.async_stage import Ready
from rlinf_async.workers.env.batched import FINAL, at, batch_of
from rlinf_async.workers.env.config import Autoreset
from rlinf_async.workers.env.errors import EnvFailed, is_interrupt
from rlinf_async.workers.env.observations import ObservationWriter, array_of
from rlinf_async.workers.env.slot import Episode, reward_problem
from rlinf_async.workers.foreign_calls import (
    CLOSE,
    NO_LENGTH,
    NOT_NOTED,
    RECV,
    RECV_AND_RESET,
    RESET,
    SEND,
    Call,
    in_words,
)


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
    """What one `AsyncEnv.recv` gave, and when."""

    ready_at: float
    rows: Ints
    batch: tuple[Any, Any, Any, Any, dict[str, Any]]


class Simulated:
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
        self._receiving, self._call = calls
        self._env, self._writer, self._actions = env, writer, actions
        self._autoreset, self._label, self._seed = autoreset, label, seed
        count = env.num_envs
        self._beginning = np.zeros(count, np.bool_)
        """whether what comes next only begins an episode"""
        self._asked = np.zeros(count, np.bool_)
        """whether that was a step, and no reset"""
        self._returns = np.zeros(count)
        self._lengths = np.zeros(count, np.int64)
        self._under_way = threading.Semaphore(0)
        self._came: queue.SimpleQueue[_Received | BaseException] = queue.SimpleQueue()
        self._closing = False
        self._steps = 0
        """times that it gave some"""
        self._thread = threading.Thread(target=self._receive_all, name=label, daemon=True)
        self._thread.start()

    def begin(self, seeds: Sequence[int] | None) -> None:
        """Begin an episode in every environment; the simulator was seeded when it was made."""
        self._beginning[:], self._asked[:] = True, False
        self._do(RESET, "async_reset", self._env.async_reset)
        self._under_way.release(self._env.num_envs)

    def send(self, answer: Choice, rows: Ints) -> None:
        """Begin a step in these environments."""
        self._asked[rows] = True
        self._do(
            SEND, "send", self._env.send, batch_of(self._actions.read(answer, len(rows))), rows
        )
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

    def close(self) -> None:
        """Wait for the steps that are under way, and close the simulator."""
        self._closing = True
        self._under_way.release()
        self._thread.join()
        self._do(CLOSE, "close", self._env.close)

    def _receive_all(self) -> None:
        while True:
            self._under_way.acquire()
            if self._closing:
                return
            resets = self._autoreset == "same_step" or bool(self._beginning.any())
            self._receiving.begin(RECV_AND_RESET if resets else RECV, self._seed, self._steps)
            try:
                batch = self._env.recv()
                rows = array_of(batch[4]["env_id"]).astype(np.int64)
            except BaseException as error:  # raised where it is asked for
                self._came.put(error)
                return
            finally:
                self._receiving.end()
            self._steps += 1
            self._came.put(_Received(time.monotonic(), rows, batch))
            for _ in range(len(rows) - 1):
                self._under_way.acquire()

    def _read(self, came: _Received | BaseException) -> list[Ready]:
        if isinstance(came, BaseException):
            raise self._failed("recv", came) from came
        seen, rewards, terminations, truncations, info = came.batch
        try:
            columns = [
                self._each(values, name, len(came.rows))
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
            raise self._failed("recv", error) from error

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
            raise EnvFailed(f"{self._where('recv')} returned {problem}, environment {env}")
        self._returns[env] += float(reward)
        self._lengths[env] += 1
        cut = bool(truncated) and not terminated
        episode, final = None, None
        if terminated or truncated:
            last = info.get("final_info", info) if self._autoreset == "same_step" else info
            episode = Episode(
                float(self._returns[env]), int(self._lengths[env]), success_at(last, place)
            )
            final = self._final(place, shown, info) if cut else None
            self._beginning[env] = self._autoreset == "next_step"
            self._returns[env], self._lengths[env] = 0.0, 0
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

    def _final(self, place: int, shown: Any, info: Mapping[str, Any]) -> Any:
        if self._autoreset == "next_step":
            return shown[place]
        name = next((name for name in FINAL if name in info), None)
        if name is None:
            raise ValueError(
                f"an episode was cut, but info has none of {' and '.join(FINAL)}: with "
                "env.autoreset = 'same_step' its last observation has to stand there"
            )
        row = self._writer.spec.empty(1)
        self._writer.write(at(info[name], place), row[0])
        return row[0]

    def _each(self, values: Any, name: str, count: int) -> NDArray[Any]:
        array = array_of(values)
        if array.shape != (count,):
            raise ValueError(f"{name} of shape {array.shape} for {count} environments")
        return array

    def _check(self, row: Any, env: int) -> None:
        numbers = numbers_of(row)
        if numbers is not None and not all_finite(numbers):
            raise EnvFailed(
                f"{self._where('recv')} returned an observation with NaN or infinity as float32, "
                f"environment {env}"
            )

    def _do(self, what: int, doing: str, call: Any, *args: Any) -> None:
        self._call.begin(what, self._seed, self._steps)
        try:
            call(*args)
        except BaseException as error:
            raise self._failed(doing, error) from error
        finally:
            self._call.end()

    def _failed(self, doing: str, error: BaseException) -> EnvFailed:
        if is_interrupt(error):
            raise error
        return EnvFailed(f"{self._where(doing)} raised {raised(error)}")

    def _where(self, doing: str) -> str:
        where = in_words(f"simulator {self._label}", doing, self._seed, self._steps, NO_LENGTH)
        return f"{where},"
