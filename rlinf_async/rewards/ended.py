"""How a process ended."""

from __future__ import annotations

import signal


def how_it_ended(code: int) -> str:
    """Say it in words, of an exit code; one below 0 is that of a signal.

    Real-time signals have numbers, but most of them no name.
    """
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
