"""Which tests stay together in one process, with pytest-xdist, and whose turn is when."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

TOGETHER = ("backends/vllm", "gpu")
"""Folders whose files stay together too: they share engines, or a device."""


class FilesTogether(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Hands out whole files."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def group_of(nodeid: str) -> str:
    """The file of a test, or the folder that stays together."""
    file = nodeid.partition("::")[0].removeprefix("tests/").removesuffix(".py")
    folder = file.rpartition("/")[0]
    return folder if folder in TOGETHER else file
