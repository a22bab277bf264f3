"""Gymnasium, and the ids that it knows.

gymnasium is imported here when the first environment is made, gymnasium_robotics and others only
for an id that gymnasium does not know.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from contextlib import suppress
from typing import Any

from rlinf_async.config import ConfigError, MissingExtra
from rlinf_async.workers.env.config import EnvConfig
from rlinf_async.workers.env.simulators import simulator_of


def known_gymnasium(config: EnvConfig) -> Any:
    """The package, which knows the configuration's id.

    Raises:
        MissingExtra: it is not installed.
        ConfigError: no env is called so.
    """
    gym = gymnasium_for(config)
    _register(config.id)
    return gym


def gymnasium_for(config: EnvConfig) -> Any:
    """The package; raises `MissingExtra` where it is not installed."""
    try:
        return importlib.import_module("gymnasium")
    except ModuleNotFoundError as error:
        if error.name != "gymnasium":
            raise
        needed_for = f"env {config.name}"
        raise MissingExtra("gymnasium", extra="embodied", needed_for=needed_for) from None


def _register(name: str) -> None:
    """Register the id's package; raise `ConfigError` with the nearest ids for an unknown one."""
    gym = importlib.import_module("gymnasium")
    if ":" in name or name in gym.registry:  # "module:Id" is for gymnasium to import
        return
    if (simulator := simulator_of(name)) is not None:
        if simulator.missing:
            raise ConfigError(
                f"{name!r} is of {simulator.name}, which is not installed: pip install "
                f"{simulator.install}",
                path=("id",),
            )
        gym.register_envs(importlib.import_module(simulator.modules[0]))
    has_robotics = importlib.util.find_spec("gymnasium_robotics") is not None
    if has_robotics:
        gym.register_envs(_robotics())
    try:
        gym.spec(name)  # also fills in a version that was left out
    except gym.error.Error:
        close = difflib.get_close_matches(name, gym.registry, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(repr(one) for one in close)}?" if close else ""
        extra = "" if has_robotics else " (pip install 'rlinf-async[embodied]' adds robot arms)"
        raise ConfigError(f"no env is called {name!r}{hint}{extra}", path=("id",)) from None


def _robotics() -> Any:
    with suppress(ModuleNotFoundError):
        # It would print a notice about three other environments, in every process.
        importlib.import_module("farama_notifications").notifications.pop(
            "gymnasium_robotics", None
        )
    return importlib.import_module("gymnasium_robotics")
