"""The processes of a pool: one that imports for all, and one for each environment.

The first is the main program. It makes no environment: it forks one process for each, and says how
each has ended. Env processes end when the worker closes their socket, or ends itself; one that is
in the middle of a step then is killed some seconds later.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing.spawn
import os
import select
import signal
import socket
import sys
import time
from typing import Final

import msgspec
import numpy as np

from rlinf_async.config import UsageError
from rlinf_async.messages.converting import ActionReader, ObservationWriter
from rlinf_async.messages.described import EnvError
from rlinf_async.processes import (
    end_with_parent,
    frame,
    leave_signals_to_driver,
    read_message,
)
from rlinf_async.workers import foreign_calls
from rlinf_async.workers.env.config import EnvConfig
from rlinf_async.workers.env.make import make_env
from rlinf_async.workers.env.pool import (
    Act,
    Begin,
    Broken,
    EnvEnded,
    FromEnv,
    Made,
    Pause,
    PoolStart,
    Shown,
    TakeLevel,
    ToEnv,
)
from rlinf_async.workers.env.stage import Slot

GRACE: Final = 5.0
"""seconds for a step that is under way when the worker has left"""


def main() -> None:
    """Fork a process for each environment, and wait for them."""
    start = msgspec.json.decode(sys.argv[1], type=PoolStart)
    leave_signals_to_driver()
    sys.path[:] = start.main.pop("sys_path")
    multiprocessing.spawn.prepare(start.main)
    control = socket.socket(fileno=start.control)
    own = os.getpid()
    running: dict[int, int] = {}
    for env, descriptor in enumerate(start.sockets):
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if not child:
            _run_env(start, env, own)
        running[child] = env
        os.close(descriptor)  # whoever has it keeps it open
    _wait_for(running, control)


def _wait_for(running: dict[int, int], control: socket.socket) -> None:
    """Say how each has ended; once the worker has left, kill those that stay."""
    # A pidfd of each, and the socket, whose end is the worker's.
    descriptors = {os.pidfd_open(child): child for child in running}
    waiting = select.poll()
    for descriptor in (*descriptors, control.fileno()):
        waiting.register(descriptor, select.POLLIN)
    deadline: float | None = None
    while running:
        left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1e3
        came = waiting.poll(left)
        if not came:
            for child in running:
                os.kill(child, signal.SIGKILL)
            for child in running:
                os.waitpid(child, 0)
            return
        for descriptor, _ in came:
            if descriptor == control.fileno():
                deadline = time.monotonic() + GRACE
                waiting.unregister(descriptor)
                continue
            child = descriptors[descriptor]
            waiting.unregister(descriptor)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            with contextlib.suppress(OSError):
                control.sendall(frame(EnvEnded(running.pop(child), status)))
    if deadline is None:  # its owner may still ask
        waiting.poll()


def _run_env(start: PoolStart, env: int, owner: int) -> None:
    """Serve one environment, and end this process."""
    end_with_parent(owner)
    faulthandler.enable()
    foreign_calls.note_in_descriptor(start.calls[env])
    os.close(start.control)
    for descriptor in start.sockets[env + 1 :]:
        os.close(descriptor)
    code = 1
    try:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            EnvProcess(socket.socket(fileno=start.sockets[env])).serve(
                start.config, start.labels[env]
            )
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class EnvProcess:
    """The process of one environment, which does what the worker says until the worker closes its
    end."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reading = connection.makefile("rb")
        self._decoder = msgspec.msgpack.Decoder(ToEnv)

    def serve(self, config: EnvConfig, label: str) -> None:
        """Make the environment, and answer every message."""
        call = foreign_calls.place_for(f"env {label}", config.limits)
        try:
            with foreign_calls.making(call):
                env = make_env(config)
            writer = ObservationWriter(env.observation_space, config.name)
            self._actions = ActionReader(env.action_space, config.name, config.actions)
        except (EnvError, UsageError) as error:
            self._say(Broken(str(error)))
            return
        self._slot = Slot(env, writer.write, label=label, seed=0, call=call, options=config.options)
        self._rows = writer.spec.empty(1)
        self._say(Made())
        while (asked := read_message(self._reading, self._decoder)) is not None:
            if isinstance(asked, Pause):
                self._slot.pause()
                continue
            if isinstance(asked, TakeLevel):
                self._slot.level = asked.level
                continue
            said: FromEnv
            try:
                said = self._begin(asked) if isinstance(asked, Begin) else self._step(asked)
            except EnvError as error:
                said = Broken(str(error))
            self._say(said)
        self._slot.close()

    def _begin(self, asked: Begin) -> Shown:
        observation = self._reset(asked.seed)
        return Shown(time.monotonic(), observation)

    def _step(self, asked: Act) -> Shown:
        answer = np.frombuffer(asked.action, asked.dtype).reshape(1, *self._actions.spec.shape)
        row = self._rows[0]
        self._slot.verdict = asked.verdict
        reward, terminated, truncated, episode = self._slot.step(
            self._actions.read(answer, 1)[0], row
        )
        self._slot.check(row)
        observation, final = self._rows.tobytes(), None
        action_rewards, control = tuple(self._slot.action_rewards), self._slot.control
        cut = truncated and not terminated
        if episode is not None:
            final = observation
            observation = self._reset(None)
        return Shown(
            time.monotonic(),
            observation,
            reward,
            terminated,
            cut,
            final,
            episode,
            action_rewards,
            control,
        )

    def _reset(self, seed: int | None) -> bytes:
        row = self._rows[0]
        self._slot.reset(row, seed)
        self._slot.check(row)
        return self._rows.tobytes()

    def _say(self, message: FromEnv) -> None:
        self._connection.sendall(frame(message))


if __name__ == "__main__":
    main()
