"""How asynchronous tests run.

An ``async def`` test runs on the loop that its ``loop_kind`` fixture names (asyncio in debug mode
where it has none). Fixtures that are asynchronous context managers are entered around it, in its
loop. It fails if it leaves a task, keeps the loop from answering, or lets an error reach nobody.

Models are tiny, and computed by one thread: several wait longer for one another than they work.

With ``-n`` (pytest-xdist) the tests of a file stay together, in one process and in their order:
many share what takes seconds to start. ``tests/together.py`` sees to it.
"""

from __future__ import annotations

import gc
import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from rlinf_async.runtime.wakers import mark_internal
from rlinf_async.testing import no_tasks_left
from tests.hangs import Hangs
from tests.loops import run_on_kind

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler.protocol import Scheduling

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, here and in children
# What vLLM compiles costs each of its engines seconds: the engine of the rollout bench does it.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
# Ray would start a process for each core of each host before anybody asks for one.
os.environ.setdefault("RAY_enable_worker_prestart", "0")
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")

# A shell's background job ignores SIGINT, and so would every process that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says something of the machine and its load, not of the code.
settings.register_profile(
    "tests", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--longest",
        metavar="K/N",
        help="of the files that take longest (tests/together.py) run a part, the first: 0/4",
    )


def pytest_configure(config: pytest.Config) -> None:
    """What is imported while tests are collected stays: the collector need not look at it."""
    gc.disable()
    config.pluginmanager.register(Hangs(config))


def pytest_collection_finish() -> None:
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a process of xdist: those that take longest come first, or one part of them."""
    if given := config.getoption("--longest"):
        from tests.together import Part, group_of

        others = Part.read(given).left_out()
        left_out = [item for item in items if group_of(item.nodeid) in others]
        items[:] = [item for item in items if group_of(item.nodeid) not in others]
        config.hook.pytest_deselected(items=left_out)
    if hasattr(config, "workerinput"):
        from tests.together import turn

        items.sort(key=lambda item: turn(item.nodeid))


def pytest_sessionfinish() -> None:
    """What the tests had left out of the collector's sight ends with the process, as ever."""
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)  # where pytest-xdist is not installed there is no such hook
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    """``--dist loadgroup``: files stay together. xdist's own groups do not, since pytest 9.2."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from tests.together import FilesTogether

    return FilesTogether(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run ``async def`` tests; leave the others to pytest."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    names = inspect.signature(test).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    run_on_kind(_loop_kind(pyfuncitem), lambda: _body(test, arguments))
    return True


def _loop_kind(item: pytest.Function) -> str:
    """A fixture's, or that of a parameter which no argument of the test asks for."""
    chosen = item.funcargs.get("loop_kind")
    if chosen is None and (callspec := getattr(item, "callspec", None)) is not None:
        chosen = callspec.params.get("loop_kind")
    return str(chosen or "asyncio")


async def _body(test: Callable[..., Any], arguments: dict[str, Any]) -> None:
    async with AsyncExitStack() as stack:
        for argument in arguments.values():
            if isinstance(argument, AbstractAsyncContextManager):
                await stack.enter_async_context(argument)
        await test(**arguments)
    no_tasks_left()


@pytest.fixture(autouse=True, scope="module")
def _only_what_is_new_is_collected() -> None:
    """The collector leaves out what is there already.

    Libraries and thousands of tests are millions of objects. Many tests have the garbage collected,
    some of them under many schedules, and each model that is made has the collector come by itself.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _threads_of_others() -> None:
    """Threads of pytest, and of tests before, are not what a deadlock's test waits for."""
    for thread in threading.enumerate():
        mark_internal(thread)


@pytest.fixture(autouse=True)
def _leaves_no_process_group() -> Iterator[None]:
    """A test that leaves torch's default process group behind breaks the next that makes one."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("torch's default process group was left behind")
