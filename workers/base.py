"""`Worker`: a class with async methods, and a thread for blocking work.

::

    class Doubler(Worker):
        async def run(self, numbers: Receiver[Number], doubled: Sender[Number]) -> None:
            async for number in numbers:
                await doubled.put(Number(number.value * 2))

What a rank goes through::

    created -> __init__ -> setup() -> ready: calls run, several at once -> teardown() -> gone

Channel ends given as arguments of a call belong to that call: every rank gets its own clone, and it
is closed when the call returns. So "the last sender has closed" means "every producer has
returned".
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, ParamSpec, TypeVar

from rlinf_async.channels.waitfor import computations, current_thread
from rlinf_async.workers.context import Device, WorkerContext

P = ParamSpec("P")
R = TypeVar("R")
W = TypeVar("W", bound="Worker")


class Worker:
    """Base class of all workers. Its attributes are available before ``__init__`` runs."""

    _context: WorkerContext

    @property
    def name(self) -> str:
        """Group and rank: ``"Doubler[1]"``."""
        return self._context.info.name

    @property
    def rank(self) -> int:
        """This worker's number in its group, from 0."""
        return self._context.info.rank

    @property
    def world_size(self) -> int:
        """How many workers the group has."""
        return self._context.info.world_size

    @property
    def incarnation(self) -> int:
        """How often this rank was restarted after a death; 0 at first."""
        return self._context.info.incarnation

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that the placement gave to this rank; empty without a placement."""
        return self._context.info.devices

    @property
    def device(self) -> str:
        """The first device as torch names it in this process: ``"cuda:0"``, else ``"cpu"``.

        A worker with a process of its own sees no accelerators but its own.
        """
        found = self.devices
        if not found or found[0].kind != "cuda":
            return "cpu"
        return "cuda:0" if self._context.info.sees_own_devices else str(found[0])

    @cached_property
    def log(self) -> logging.Logger:
        """A logger under this worker's name."""
        return logging.getLogger(f"rlinf_async.{self.name}")

    @classmethod
    def slow_imports(cls, arguments: Mapping[str, Any]) -> Sequence[str]:
        """Modules that take long to import, and that a worker with these arguments of ``__init__``
        needs.

        Where ranks are processes of the driver's host, these are imported once, and the processes
        of all ranks, also of those that are started again, are forked from the one that did. So a
        module is no such one if its import starts a thread, or opens a device.
        """
        return ()

    async def setup(self) -> None:
        """Runs once after ``__init__``, before the first call. Override it for slow preparation:
        load a model, start a simulator."""

    async def teardown(self) -> None:
        """Runs once after the last call. Override it to release what ``setup`` took."""

    async def compute(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run blocking work in this worker's compute thread and wait for its result.

        The event loop goes on meanwhile: it answers calls, cancellation and heartbeats, and fetches
        the next batch. There is one such thread, so blocking work runs in the order of the calls.
        Cancelling the wait does not stop work that has begun.
        """
        return await self.compute_in(self._context.executor, fn, *args, **kwargs)

    async def compute_in(
        self, executor: ThreadPoolExecutor, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Run blocking work in a thread of your own, beside the compute thread, as `compute` does.

        Shut the executor down in `teardown`.
        """
        if inspect.iscoroutinefunction(fn):
            raise TypeError(f"{_name_of(fn)} is async: await it, compute runs blocking functions")
        context = contextvars.copy_context()
        context.run(current_thread.set, self._context.thread)

        def call() -> R:
            try:
                return context.run(fn, *args, **kwargs)
            except (
                StopIteration
            ) as end:  # a future refuses it, and whoever waits would wait for ever
                raise RuntimeError(
                    f"{_name_of(fn)} raised StopIteration, which leaves no coroutine: catch it "
                    "inside, or give next() a default that says that there is no more"
                ) from end

        self._context.computing += 1
        try:
            done = asyncio.get_running_loop().run_in_executor(executor, call)
            computations[done] = self._context.thread
            return await done
        finally:
            self._context.computing -= 1

    def span(self, name: str, **args: Any) -> AbstractContextManager[Any]:
        """Record the block as a named span of the run's trace."""
        return self._context.span(name, **args)

    async def join_collective(self) -> None:
        """Set up torch.distributed with the other ranks of this group.

        Needs ``launch(..., collective="gloo")``, or another backend. Call it in `setup`; it waits
        for all ranks.
        """
        from rlinf_async.workers.collective import join

        await self.compute(join, self._context)

    def __repr__(self) -> str:
        return f"<{self.name}>" if hasattr(self, "_context") else f"<{type(self).__name__}>"


def _name_of(fn: Callable[..., object]) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)


def make(
    cls: type[W], context: WorkerContext, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> W:
    """Build a worker that knows its name, rank and devices inside ``__init__``."""
    worker = cls.__new__(cls)
    worker._context = context
    worker.__init__(*args, **kwargs)  # type: ignore[misc]
    return worker
