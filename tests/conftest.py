"""How asynchronous tests run.

An ``async def`` test runs on the loop that its ``loop_kind`` fixture names (asyncio in debug mode
where it has none). Fixtures that are asynchronous context managers are entered around it, in its
loop. It fails if it leaves a task, keeps the loop from answering, or lets an error reach nobody.

Models are tiny, and computed by one thread: several wait longer for one another than they work.

With ``-n`` (pytest-xdist) the tests of a file stay together, in one process and in their order:
many share what takes seconds to start.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

import pytest

from rlinf_async.testing import no_tasks_left
from tests.loops import run_on_kind

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, here and in children


TOGETHER = ("backends/vllm", "gpu")
"""Folders whose files stay together too: they share engines, or a device."""


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in this hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Group tests for ``--dist loadgroup``."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        file = item.path.relative_to(config.rootpath / "tests").with_suffix("")
        folder = file.parent.as_posix()
        group = folder if folder in TOGETHER else file.as_posix()
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run ``async def`` tests; leave the others to pytest."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    names = inspect.signature(test).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    kind = pyfuncitem.funcargs.get("loop_kind", "asyncio")
    run_on_kind(str(kind), lambda: _body(test, arguments))
    return True


async def _body(test: Callable[..., Any], arguments: dict[str, Any]) -> None:
    async with AsyncExitStack() as stack:
        for argument in arguments.values():
            if isinstance(argument, AbstractAsyncContextManager):
                await stack.enter_async_context(argument)
        await test(**arguments)
    no_tasks_left()
