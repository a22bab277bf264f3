"""What becomes of a process when the one that started it ends."""

from __future__ import annotations

import ctypes
import sys
from typing import Final

PR_SET_PDEATHSIG: Final = 1


def signal_at_end_of_parent(number: int) -> None:
    """Let the kernel send this process a signal when its parent ends, on Linux. Not if it has ended
    already.

    The signal also comes when only the thread ends that started this process: one that kills is for
    children of a process with one thread.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
