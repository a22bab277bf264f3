"""The process of a run that was started from Python: ``rlinf-async train``, and what ended it told.

::

    caller   order.json ---------------> train ... run folder ... end      this process
    caller   <--------- failure.json     of an error: what it was

Where the caller ends, however that happens, the run ends in order, with a checkpoint.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Final

import msgspec

from rlinf_async.cli import commands
from rlinf_async.cli.failures import first_cause, guarded, message
from rlinf_async.cli.jobs import Session
from rlinf_async.config import ConfigError, UsageError
from rlinf_async.observe.files import atomic_write
from rlinf_async.runtime.driving import FAILURE, ORDER, Failure, Order
from rlinf_async.runtime.jobs import get_job
from rlinf_async.runtime.signals import RunSignals

LOOK_EVERY: Final = 0.2
"""seconds between two looks at the caller"""


def main(folder: Path) -> int:
    """Carry out the order in this folder, and return the exit code of ``rlinf-async train``."""
    order = msgspec.json.decode((folder / ORDER).read_bytes(), type=Order)
    sys.path += [one for one in order.sys_path if one not in sys.path]
    session = Session(get_job)

    def command() -> object:
        try:
            with RunSignals().handled(signal.SIG_IGN):
                _follow(order.caller)
                return commands.main(
                    args=order.arguments,
                    prog_name="rlinf-async",
                    standalone_mode=False,
                    obj=session,
                )
        except BaseException as error:
            _tell(folder, first_cause(error))
            raise

    try:
        return guarded(command, session)
    finally:
        if os.getppid() != order.caller:  # it would remove this, and cannot
            shutil.rmtree(folder, ignore_errors=True)


def _follow(caller: int) -> None:
    """Send this process SIGTERM once its caller has ended, however it did."""

    def look() -> None:
        while os.getppid() == caller:
            time.sleep(LOOK_EVERY)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=look, name="caller", daemon=True).start()


def _tell(folder: Path, error: BaseException) -> None:
    if not folder.is_dir():  # nobody asks any more
        return
    failure = Failure(kind="other", problem=message(error))
    if isinstance(error, ConfigError):
        failure = Failure(
            kind="config", problem=error.problem, path=error.path, origin=error.origin
        )
    elif isinstance(error, UsageError):
        failure = Failure(kind="usage", problem=str(error))
    atomic_write(folder / FAILURE, msgspec.json.encode(failure), durable=False)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
