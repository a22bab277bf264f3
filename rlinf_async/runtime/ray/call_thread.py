"""A thread that makes blocking calls, one after the other, and is not waited for.

Threads of `concurrent.futures` are joined when the process ends: a call that never returns, as to a
head of Ray that stands still, would keep the process for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class CallThread(Executor):
    """Calls what is submitted, in order. The thread starts with the first call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call this after what was submitted before.

        Raises:
            RuntimeError: it was shut down.
        """
        future: Future[R] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._lock:
            if self._closed:
                raise RuntimeError(f"the thread {self._name!r} takes no more calls")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._calls.put(call)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; what was submitted is still called."""
        if cancel_futures:
            raise NotImplementedError("what was submitted is called")
        with self._lock:
            thread, already, self._closed = self._thread, self._closed, True
            if thread is not None and not already:
                self._calls.put(None)
        if wait and thread is not None:
            thread.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
