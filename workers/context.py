"""A worker's identity in the run, and the means that its host gives it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec

from rlinf_async.channels.waitfor import ComputeThread

OpenSpan = Callable[..., AbstractContextManager[Any]]


class Device(msgspec.Struct, frozen=True):
    """One accelerator, or one CPU core where there is none."""

    kind: str
    """``"cuda"`` or ``"cpu"``"""
    index: int
    """its number on its host"""
    host: str = ""
    """name of its host, where a cluster has several; empty: the driver's"""

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's identity: plain data, sent to its process."""

    group: str
    rank: int
    world_size: int
    devices: tuple[Device, ...] = ()
    sees_own_devices: bool = False
    """whether its process sees these accelerators alone, as ``cuda:0`` and on"""
    host: str = ""
    """name of its host, where a cluster has several; empty: the hostname says it"""
    incarnation: int = 0
    """how often this rank was restarted"""
    collective: str | None = None
    """torch.distributed backend of the group (``"gloo"``, ``"nccl"``), where it has one"""
    rendezvous: str = ""
    """rendezvous of the group's ranks, as torch's ``init_method``"""

    @property
    def name(self) -> str:
        """Group and rank: ``"Rollout[1]"``."""
        return f"{self.group}[{self.rank}]"


class WorkerContext:
    """A worker's identity, its compute thread and its recorder of spans."""

    def __init__(
        self, info: WorkerInfo, executor: ThreadPoolExecutor, span: OpenSpan | None = None
    ) -> None:
        self.info = info
        self.executor = executor
        self.span: OpenSpan = span or _no_span
        self.joined = False
        """whether it has joined its group's torch.distributed"""
        self.computing = 0
        """number of calls in the compute thread"""
        self.thread = ComputeThread()

    @property
    def what_works(self) -> str:
        """The compute thread, if it can go on by itself: it has a call, and waits for no task."""
        return "its compute thread works" if self.computing and not self.thread.waits else ""


def _no_span(name: str, **args: Any) -> AbstractContextManager[None]:
    return nullcontext()
