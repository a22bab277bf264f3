"""An environment that fails, in each way and in each place; one by one and many in a call."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

EPISODE = 8
PLACES = ("make", "reset", "step", "close")
BLOCK_MB = 50


def fail(fault: str) -> None:
    """Do what this fault is called; ``"invalid"`` and ``"misshapen"`` are of what is shown."""
    match fault:
        case "raises":
            raise ArithmeticError("the simulator exploded")
        case "hangs":
            while True:
                time.sleep(0.05)
        case "blocks":
            ctypes.PyDLL(None).sleep(10_000)  # keeps the interpreter's lock
        case "deaf":
            libc = ctypes.CDLL(None)
            for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGABRT):
                libc.signal(int(ignored), 1)  # SIG_IGN, also in other threads than the main one
            while True:
                time.sleep(0.05)
        case "leaks":
            blocks = []
            while True:
                blocks.append(b"x" * (BLOCK_MB * 1_000_000))
                time.sleep(0.05)
        case "is slow":
            time.sleep(0.2)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()
        case "exits":
            os._exit(7)
        case "crashes":
            ctypes.string_at(0)
        case "prints":
            for number in range(10_000):
                print("noise", number)
        case "leaves":
            sys.exit(3)
        case "interrupts":
            raise KeyboardInterrupt


class Failing(gymnasium.Env[Any, Any]):
    """Episodes of 8 steps, which succeed.

    Args:
        where: the place of its fault.
        fault: see `fail`.
        at: the step of its life at which it fails.
        once: a file; it fails only if that is not there yet, and makes it.
        log: a file to which it writes what is called.
        seed: it fails only in an episode that begins with this seed.
    """

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(
        self,
        where: str = "",
        fault: str = "",
        at: int = 3,
        once: str = "",
        log: str = "",
        seed: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        self.seed, self.seeded = seed, seed is None
        self.where, self.fault, self.at, self.once, self.log = where, fault, at, once, log
        self.render_mode = render_mode
        self.life = self.steps = 0
        self._called("make")

    def _called(self, place: str) -> Any:
        """What is shown, unless it fails."""
        shown = np.zeros(2, np.float32)
        if self.log:
            with Path(self.log).open("a") as file:
                file.write(f"{place} {os.getpid()}\n")
        in_life = place == "step" and self.seed is None
        if place != self.where or not self.seeded or (in_life and self.life != self.at):
            return shown
        if self.once:
            if Path(self.once).exists():
                return shown
            Path(self.once).touch()
        fail(self.fault)
        if self.fault == "invalid":
            shown[1] = np.nan
        return np.zeros(3, np.float32) if self.fault == "misshapen" else shown

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        self.seeded = self.seed is None or self.seed == seed
        return self._called("reset"), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        self.life += 1
        shown = self._called("step")
        ended = self.steps == EPISODE
        return shown, 1.0, ended, False, {"is_success": ended}

    def render(self) -> Any:
        self._called("render")
        return self.np_random.integers(0, 255, (32, 32, 3), np.uint8)

    def close(self) -> None:
        self._called("close")


class FailingMany(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Many of these in one call."""

    def __init__(self, num_envs: int, **kwargs: Any) -> None:
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.one = Failing(**kwargs)
        self.single_observation_space = self.one.observation_space
        self.single_action_space = self.one.action_space

    def reset(self, **options: Any) -> Any:
        shown, _ = self.one.reset(seed=options.get("seed"))
        return np.stack([shown] * self.num_envs), {}

    def step(self, actions: Any) -> Any:
        shown, paid, *_ = self.one.step(0)
        no = np.zeros(self.num_envs, np.bool_)
        return np.stack([shown] * self.num_envs), np.full(self.num_envs, paid), no, no, {}

    def close(self, **options: Any) -> None:
        self.one.close()


class FailingInTurn:
    """Gives all that are ready, by EnvPool's asynchronous interface; steps in ``recv``."""

    def __init__(self, num_envs: int, seed: int, **kwargs: Any) -> None:
        self.many = FailingMany(num_envs, **kwargs)
        self.num_envs, self.metadata = num_envs, self.many.metadata
        self.single_observation_space = self.many.single_observation_space
        self.single_action_space = self.many.single_action_space
        self.fresh = True

    def async_reset(self) -> None:
        self.fresh = True

    def send(self, actions: Any, env_id: Any) -> None:
        self.fresh = False

    def recv(self) -> Any:
        nothing = np.zeros(self.num_envs)
        if self.fresh:
            shown, _ = self.many.reset()
            stepped: Any = (shown, nothing, nothing > 0, nothing > 0, {})
        else:
            stepped = self.many.step(None)
        return *stepped[:4], {"env_id": np.arange(self.num_envs)}

    def close(self) -> None:
        self.many.close()
