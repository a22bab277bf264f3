"""A worker that tells which Python it runs in; another Python imports it without pytest."""

from __future__ import annotations

import os
import sys

from rlinf_async.workers.base import Worker


class Teller(Worker):
    """Tells which Python it runs in."""

    async def prefix(self) -> str:
        """The virtualenv."""
        return sys.prefix

    async def word(self) -> str:
        """What a package says that only the other Python has."""
        import only_there  # type: ignore[import-not-found]

        said: str = only_there.WORD
        return said

    async def path(self) -> list[str]:
        """Where it imports from."""
        return sys.path

    async def variable(self) -> str:
        """A variable of the role."""
        return os.environ.get("ROLE", "")

    async def dies_once(self, died: str) -> str:
        """End the process, the first time; then tell which Python it runs in."""
        try:
            os.mkdir(died)
        except FileExistsError:
            return sys.prefix
        os._exit(3)
