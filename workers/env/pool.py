"""An env worker's side of a pool of processes, each with one environment.

::

    env worker --Begin, Act--> env process 0: an environment
               --Begin, Act--> env process 1: an environment    all forked by one pool process,
               <--Shown------  ...                              which imports for all of them

A socket for each environment: what it shows comes when it is ready, whatever the others do.
`rlinf_async.workers.env.pool_process` is the other side. The messages::

    Begin   worker -> env process    begin an episode
    Act     worker -> env process    take a step
    Pause   worker -> env process    stop the time of an environment in real time
    Made    env process -> worker    the environment is made
    Shown   env process -> worker    the episode has begun, or the step is taken
    Broken  env process -> worker    the environment cannot be made, or it raised
    Ended   pool process -> worker   an env process has ended

Observations and actions are the bytes of one row of their arrays.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np

from rlinf_async.config import ConfigError
from rlinf_async.messages.described import EnvError
from rlinf_async.messages.embodied import Choice, ControlCounts, Ints, Level
from rlinf_async.messages.spaces import ObservationSpec
from rlinf_async.processes import frame, how_it_ended, read_message
from rlinf_async.workers import foreign_calls
from rlinf_async.workers.env.config import EnvConfig, EnvFailed
from rlinf_async.workers.env.many import Ready
from rlinf_async.workers.env.stage import Episode
from rlinf_async.workers.foreign_calls import FailedEpisode, ForeignCalls, Verdict

log = logging.getLogger(__name__)


class Begin(msgspec.Struct, frozen=True, tag=True):
    """worker -> env process: begin an episode; with a seed, seed the environment too."""

    seed: int | None


class Act(msgspec.Struct, frozen=True, tag=True):
    """worker -> env process: take a step."""

    action: bytes
    dtype: str
    """numpy's name of the action's dtype"""
    verdict: bool | None = None
    """what a person says of the episode, which ends with this step; None: it goes on"""


class Pause(msgspec.Struct, frozen=True, tag=True):
    """worker -> env process: stop the time until the next step; nothing is answered."""


class TakeLevel(msgspec.Struct, frozen=True, tag=True):
    """worker -> env process: from the next episode on, this level; nothing is answered."""

    level: Level


class Made(msgspec.Struct, frozen=True, tag=True):
    """env process -> worker: the environment is made."""


class Shown(msgspec.Struct, frozen=True, tag=True):
    """env process -> worker: what it shows, and what the step gave. See `Ready`."""

    ready_at: float
    observation: bytes
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    final_observation: bytes | None = None
    episode: Episode | None = None
    action_rewards: tuple[float, ...] = ()
    control: ControlCounts | None = None


class Broken(msgspec.Struct, frozen=True, tag=True):
    """env process -> worker: the text of the `EnvFailed` that it raised."""

    error: str


class EnvEnded(msgspec.Struct, frozen=True, tag=True):
    """pool process -> worker: this env process has ended."""

    env: int
    status: int
    """exit code; of a signal its number, negative"""


ToEnv = Begin | Act | Pause | TakeLevel
FromEnv = Made | Shown | Broken

MODULE: Final = "rlinf_async.workers.env.pool_process"
LIMIT: Final = 10.0
"""seconds for the pool process to end, or to say how an env process has ended"""
PATIENCE: Final = 3.0
"""seconds of closing after which those that do not close are named"""
LAST_SECONDS: Final = 2.0
"""seconds in which an env process that hangs may say where"""


class PoolStart(msgspec.Struct, frozen=True, kw_only=True):
    """env worker -> pool process, as an argument."""

    config: EnvConfig
    labels: list[str]
    """label of each environment, for errors"""
    sockets: list[int]
    """file descriptors, one for each environment"""
    control: int
    """file descriptor for `EnvEnded`; it ends with the worker"""
    calls: list[int]
    """file descriptors, where each notes its calls: see `foreign_calls`"""
    main: dict[str, Any]
    """how to import the worker's main module, which may register environments"""


class EnvPool:
    """`AsyncEnvs` over one process for each label."""

    def __init__(self, config: EnvConfig, spec: ObservationSpec, labels: Sequence[str]) -> None:
        """Make the environments, all at the same time.

        Raises:
            EnvFailed: one cannot be made, though one could in this process; see `_died`.
            ConfigError: the configuration has values that do not travel to another process.
        """
        _check_plain(config)
        self._spec, self._labels, self._made = spec, labels, False
        self._control_hz = config.control.hz
        self._verdicts: dict[int, bool] = {}
        self._row = spec.empty(1).dtype
        self._decoder = msgspec.msgpack.Decoder(FromEnv)
        pairs = [socket.socketpair() for _ in labels]
        self._sockets = [ours for ours, _ in pairs]
        # An env process says one thing at a time: nothing waits in a buffer behind what was read.
        self._files = [ours.makefile("rb") for ours in self._sockets]
        self._control, control = socket.socketpair()
        files = [tempfile.TemporaryFile() for _ in labels]  # noqa: SIM115
        self._calls = [ForeignCalls(one.fileno(), 1) for one in files]
        if any(config.limits_in_pool):
            for calls in self._calls:
                foreign_calls.watch.add(calls, config.limits_in_pool, partial(_end, calls))
        self._selector = selectors.DefaultSelector()
        for env, ours in enumerate(self._sockets):
            self._selector.register(ours, selectors.EVENT_READ, env)
        theirs = [one.fileno() for _, one in pairs]
        try:
            start = PoolStart(
                config=config,
                labels=list(labels),
                sockets=theirs,
                control=control.fileno(),
                calls=[one.fileno() for one in files],
                main=_main_module(),
            )
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, msgspec.json.encode(start).decode()],
                stdin=subprocess.DEVNULL,
                pass_fds=(*theirs, control.fileno(), *start.calls),
            )
        finally:
            for _, one in pairs:
                one.close()
            control.close()
            for file in files:
                file.close()
        try:
            self._wait_until_made()
        except BaseException:
            self.close()
            raise

    def begin(self, seeds: Sequence[int] | None) -> None:
        """Begin an episode in every environment. All reset at the same time."""
        for env in range(len(self._sockets)):
            self._send(env, Begin(None if seeds is None else seeds[env]))

    def send(self, answer: Choice, rows: Ints) -> None:
        """Begin a step in these environments."""
        dtype = answer.dtype.str
        for env, action in zip(rows.tolist(), answer, strict=True):
            self._send(env, Act(action.tobytes(), dtype, self._verdicts.pop(env, None)))

    def receive(self, timeout: float | None) -> list[Ready]:
        """Wait for at least one environment, and return all that are ready.

        Raises:
            EnvFailed: an environment raised, or its process has died.
        """
        return [
            self._ready(key.data, self._receive_message(key.data))
            for key, _ in self._selector.select(timeout)
        ]

    def pause(self, rows: Ints) -> None:
        """Stop the time of environments in real time until their next step."""
        if self._control_hz:
            for env in rows.tolist():
                self._send(env, Pause())

    def take_level(self, level: Level) -> None:
        """From now on begin episodes in this level."""
        for env in range(len(self._sockets)):
            self._send(env, TakeLevel(level))

    def judge(self, env: int, *, success: bool) -> None:
        """End the episode of an environment with its next step."""
        self._verdicts[env] = success

    def close(self) -> None:
        """Have the environments closed, and wait for their processes. One in the middle of a step
        has `LIMIT` seconds, and is then killed."""
        for calls in self._calls:
            foreign_calls.watch.remove(calls)
        self._selector.close()
        for file in self._files:
            file.close()
        for one in (*self._sockets, self._control):
            one.close()  # they end with it
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            for call in (call for calls in self._calls for call in calls.under_way()):
                log.warning("%s, does not return though its pool is closed", call.where)
            self._wait_or_kill()

    def _wait_or_kill(self) -> None:
        try:
            self._process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait_until_made(self) -> None:
        for env, label in enumerate(self._labels):
            if not isinstance(self._receive_message(env), Made):
                raise EnvError(f"env {label}: its process did not say that it is made")
        self._made = True

    def _ready(self, env: int, said: FromEnv) -> Ready:
        if not isinstance(said, Shown):
            raise EnvError(f"env {self._labels[env]}: its process answered {said!r} to a step")
        return Ready(
            env=env,
            ready_at=said.ready_at,
            observation=self._seen(said.observation),
            reward=said.reward,
            terminated=said.terminated,
            truncated=said.truncated,
            final_observation=None
            if said.final_observation is None
            else self._seen(said.final_observation),
            episode=said.episode,
            action_rewards=said.action_rewards,
            control=said.control,
        )

    def _seen(self, row: bytes) -> Any:
        if self._spec.flat:
            return np.frombuffer(row, np.float32)
        return np.frombuffer(row, self._row)[0]

    def _send(self, env: int, message: ToEnv) -> None:
        try:
            self._sockets[env].sendall(frame(message))
        except (BrokenPipeError, ConnectionResetError):
            raise self._died(env) from None

    def _receive_message(self, env: int) -> FromEnv:
        """The next message of an env process; raises what is wrong with it."""
        said: FromEnv | None = None
        with contextlib.suppress(ConnectionResetError):
            said = read_message(self._files[env], self._decoder)
        if said is None:
            raise self._died(env)
        if isinstance(said, Broken):
            raise EnvFailed(said.error)
        return said

    def _died(self, env: int) -> EnvFailed:
        """The end of an env process, which is that of its worker, too: that is started again as
        after its own. Where a worker has no process of its own, it is an error."""
        last, status = self._calls[env].last_words(), self._status(env)
        how = "" if status is None else f": {how_it_ended(status)}"
        where = last.where[0] if last.where else f"env {self._labels[env]}"
        said = last.reason or f"{where}, its process has ended{how}"
        # Between two calls it is in an episode, too.
        between = FailedEpisode() if self._made and not (last.where or last.reason) else None
        if foreign_calls.of_this_process() is not None:
            verdict = Verdict(f"{said}, in its pool", last.waited, last.failed or between)
            foreign_calls.end_this_process(verdict)
        return EnvFailed(f"{said}, in its pool")

    def _status(self, env: int) -> int | None:
        """How an env process has ended, as the pool process says within some seconds."""
        self._control.settimeout(LIMIT)
        decoder = msgspec.msgpack.Decoder(EnvEnded)
        with contextlib.suppress(OSError), self._control.makefile("rb") as told:
            while ended := read_message(told, decoder):
                if ended.env == env:
                    return ended.status
        return None


def _end(calls: ForeignCalls, verdict: Verdict) -> None:
    """End the process of these calls; on its way it prints where it is. One that lets the signal
    for that pass is killed some seconds later."""
    calls.killed(verdict)
    with contextlib.suppress(ProcessLookupError):
        process = os.pidfd_open(calls.process)
        os.kill(calls.process, signal.SIGABRT)
        timer = threading.Timer(LAST_SECONDS, _kill, (process,))
        timer.daemon = True
        timer.start()


def _kill(process: int) -> None:
    """Kill the process of this descriptor, if it still runs."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, signal.SIGKILL)
    os.close(process)


def _main_module() -> dict[str, Any]:
    """How another process imports this one's main module: as multiprocessing does."""
    from multiprocessing.spawn import get_preparation_data

    data = get_preparation_data("pool")
    names = ("sys_path", "init_main_from_name", "init_main_from_path")
    return {name: data[name] for name in names if name in data}


def _check_plain(config: EnvConfig) -> None:
    try:
        msgspec.json.encode(config)
    except (TypeError, OverflowError) as error:
        raise ConfigError(
            f"{error}: simulator = 'pool' makes the environment in other processes, so its kwargs "
            "have to be numbers, texts, lists and tables",
            path=("kwargs",),
        ) from error
