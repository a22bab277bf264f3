"""Ends this process at once and leaves nothing of it: no worker, no temporary folder.

For the moment when an orderly end takes too long. It may run in any thread, whatever the event loop
is doing, so it takes no lock and waits for nobody.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

_folders: set[Path] = set()


def make_temporary_folder() -> Path:
    """A new folder in the temporary folder, which `exit_at_once` removes."""
    folder = Path(tempfile.mkdtemp(prefix="rlinf-async-"))
    _folders.add(folder)
    return folder


def remove_temporary_folder(folder: Path) -> None:
    """Remove a folder that `make_temporary_folder` made."""
    shutil.rmtree(folder, ignore_errors=True)
    _folders.discard(folder)


def kill_tree(process: BaseProcess) -> None:
    """Kill a process, and the processes of the group that it leads.

    Also after it has ended, but not after it was joined: its number may be another's by then.
    """
    if process.pid is None:
        return
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(ProcessLookupError):  # it may not lead its own group yet
        os.kill(process.pid, signal.SIGKILL)


def exit_at_once(code: int, reason: str) -> NoReturn:
    """Kill the processes that this one started, remove its temporary folders, and exit."""
    with suppress(OSError):
        os.write(2, f"{reason}\n".encode())  # `sys.stderr` may be locked by another thread
    for process in multiprocessing.active_children():
        with suppress(Exception):  # one that is being closed meanwhile is gone
            kill_tree(process)
    for folder in list(_folders):
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(code)
