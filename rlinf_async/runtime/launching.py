"""A launch: its arguments, their checks before anything is started, and what each rank gets."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rlinf_async.config.registry import names_for_workers
from rlinf_async.runtime.backend import Backend, WorkerSpec
from rlinf_async.runtime.supervise import Never, Restart
from rlinf_async.workers.base import Worker
from rlinf_async.workers.context import Device, WorkerInfo
from rlinf_async.workers.errors import BuildError
from rlinf_async.workers.methods import holds_ends


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of ``launch``, without those of the worker's ``__init__``."""

    worker: Any
    """a `Worker` class, once checked by `check_launch`"""
    name: str | None
    count: int
    placement: object
    restart: Never | Restart | None
    collective: str | None
    env_vars: dict[str, str] | None
    resources: dict[str, float] | None
    runtime_env: dict[str, Any] | None

    @property
    def group(self) -> str:
        """The group's name."""
        return self.name or str(getattr(self.worker, "__name__", self.worker))


DEFAULTS: Mapping[str, object] = {
    "name": None,
    "count": 1,
    "placement": None,
    "restart": None,
    "collective": None,
    "env_vars": None,
    "resources": None,
    "runtime_env": None,
}
"""Keywords that ``launch`` keeps to itself, and their defaults."""


def check_launch(launch: Launch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check the arguments of a launch.

    Raises:
        BuildError: not a worker class, or an abstract one; a wrong count; a restart policy that
            cannot be kept; wrong arguments.
    """
    if not isinstance(launch.worker, type) or not issubclass(launch.worker, Worker):
        raise BuildError(f"launch() takes a subclass of Worker, not {launch.worker!r}")
    if missing := sorted(getattr(launch.worker, "__abstractmethods__", ())):
        raise BuildError(
            f"{launch.worker.__name__} is abstract: launch a subclass that has "
            f"{' and '.join(missing)}"
        )
    group, count = launch.group, launch.count
    if type(count) is not int or count < 1:
        raise BuildError(f"{group}: count must be a whole number from 1, got {count!r}")
    _check_env_vars(group, launch.env_vars)
    if launch.resources is not None:
        try:
            check_resources(launch.resources)
        except BuildError as error:
            raise BuildError(f"{group}: {error}") from None
    if launch.collective is not None and count > 1 and isinstance(launch.restart, Restart):
        raise BuildError(
            f"{group}: ranks of one torch.distributed group cannot be restarted one by one: "
            "leave restart out, and resume from a checkpoint"
        )
    _check_arguments(launch, args, kwargs)


def _check_env_vars(group: str, env_vars: object) -> None:
    if env_vars is None:
        return
    if not isinstance(env_vars, dict):
        raise BuildError(f"{group}: env_vars must be a dict of names and values, got {env_vars!r}")
    for name, value in env_vars.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise BuildError(
                f"{group}: env_vars: {name!r} is {value!r}; names and values must be text"
            )


def _check_arguments(launch: Launch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    label = f"{launch.worker.__name__}.__init__"
    signature = inspect.signature(launch.worker)
    shared = [name for name in DEFAULTS if name in signature.parameters]
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise BuildError(f"{label}: {error}{_shadowed(shared)}") from None
    for name, value in bound.arguments.items():
        if holds_ends(value):
            raise BuildError(
                f"{label}: {name!r} has an end of a channel; ends are given to calls, which close "
                f"them when they return: pass it to a method of {launch.worker.__name__}"
            )
    taken = [
        name
        for name in shared
        if name not in bound.arguments and getattr(launch, name) != DEFAULTS[name]
    ]
    if taken:
        raise BuildError(f"{label}: {taken[0]!r} is not passed to it{_shadowed(taken)}")


def _shadowed(names: list[str]) -> str:
    if not names:
        return ""
    return (
        f"; launch() keeps the keyword {' and '.join(map(repr, names))} to itself: pass it to the "
        "worker by position, or give the parameter another name"
    )


def check_resources(resources: object) -> None:
    """Check what a host must have besides devices.

    Raises:
        BuildError: it is no mapping of names to amounts above 0.
    """
    if not isinstance(resources, dict):
        raise BuildError(f"resources must be a dict such as {{'robot': 1}}, got {resources!r}")
    for name, amount in resources.items():
        said = f"resources: {name!r} is {amount!r}"
        number = isinstance(amount, int | float) and not isinstance(amount, bool)
        if not isinstance(name, str) or not number or not 0 < amount < math.inf:
            raise BuildError(f"{said}; an amount is a number above 0: leave out what is not needed")
        if amount > 1 and amount != int(amount):
            raise BuildError(f"{said}; an amount above 1 is a whole number: Ray divides no other")


def specs(
    launch: Launch,
    places: Sequence[tuple[Device, ...]],
    backend: Backend,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> list[WorkerSpec]:
    """What each rank is started with; ``places`` are the devices of each."""
    return [
        WorkerSpec(
            cls=launch.worker,
            args=args,
            kwargs=kwargs,
            info=WorkerInfo(
                group=launch.group,
                rank=rank,
                world_size=launch.count,
                devices=places[rank],
                sees_own_devices=backend.isolates_devices,
                collective=launch.collective,
            ),
            env_vars={**names_for_workers(), **(launch.env_vars or {})},
            resources=launch.resources or {},
            runtime_env=launch.runtime_env or {},
            restartable=isinstance(launch.restart, Restart),
        )
        for rank in range(launch.count)
    ]


def check_limits(*, deadlock_after: float | None, grace: float) -> None:
    """Check the time limits of a cluster, in seconds.

    Raises:
        BuildError: invalid time limit.
    """
    if deadlock_after is not None:
        check_seconds("deadlock_after", deadlock_after, "None to only report who waits")
    if not grace >= 0:
        raise BuildError(
            f"grace must be seconds from 0, got {grace!r}: 0 kills workers without asking"
        )


def check_seconds(name: str, seconds: float, otherwise: str) -> None:
    """Raise `BuildError` unless the time limit is above 0; NaN is not."""
    if not seconds > 0:
        raise BuildError(f"{name} must be more than 0 seconds, got {seconds!r}: pass {otherwise}")
