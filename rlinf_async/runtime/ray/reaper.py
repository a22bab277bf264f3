"""Something to do once this process has ended, also where it was killed.

A shell waits for the end of a pipe whose other end this process holds, and does it then. Forked
children let go of the pipe.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from contextlib import suppress
from typing import Final

KILL_GROUP: Final = 'kill -KILL -"$1"'
"""kill the processes of a group"""
REMOVE_FOLDER: Final = 'rm -rf -- "$1"'
"""remove a folder and what is in it"""


def when_this_process_ends(what: str, argument: str) -> Callable[[], None]:
    """Do one of the above then; returns a function that does it at once."""
    command = ["/bin/sh", "-c", f"read -r _; {what}", "sh", argument]
    held, end = os.pipe()
    try:
        shell = subprocess.Popen(
            command,
            stdin=held,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    finally:
        os.close(held)
    open_ends = [end]

    def let_go() -> None:
        while open_ends:
            with suppress(OSError):
                os.close(open_ends.pop())

    def now() -> None:
        let_go()
        shell.wait()

    os.register_at_fork(after_in_child=let_go)
    return now
