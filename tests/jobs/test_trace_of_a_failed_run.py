"""What a failed run raises when workers fail while its trace is written."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from rlinf_async.runtime.jobs.run import _written
from rlinf_async.testing import run


class View:
    """Its trace takes until it is cancelled."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()

    async def write_trace(self) -> None:
        self.begun.set()
        await asyncio.Event().wait()


async def cancelled_while_writing(failed: BaseException | None) -> None:
    view = View()
    writing = asyncio.create_task(_written(cast("Any", view), failed))
    await view.begun.wait()
    writing.cancel()
    await writing


def test_the_error_of_the_run_is_raised_whoever_fails_while_its_trace_is_written() -> None:
    try:
        raise ZeroDivisionError("the run") from ValueError("its cause")
    except ZeroDivisionError as error:
        failed = error
    with pytest.raises(ZeroDivisionError, match="the run") as caught:
        run(cancelled_while_writing(failed))
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_cancelled_run_that_has_not_failed_stays_cancelled() -> None:
    with pytest.raises(asyncio.CancelledError):
        run(cancelled_while_writing(None))
