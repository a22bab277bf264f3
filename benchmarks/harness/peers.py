"""Peers' virtualenvs: made on demand, and kept.

A virtualenv is named by its requirements, so changing a pin makes a new one. It counts as made once
its ``complete`` file is there; anything else is removed and made again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence

from benchmarks.harness.model import PeerSoftware

_TAIL = 3
"""lines of pip's error output that are shown"""


class PeerMissing(Exception):
    """A peer could not be installed; the text says why."""


class PeerStore:
    """The folder that peers' virtualenvs are kept in."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root

    def python(self, peer: PeerSoftware) -> pathlib.Path:
        """The peer's interpreter, its virtualenv made first if need be; `PeerMissing` if not."""
        folder = self.folder(peer)
        with self._lock(folder):
            if not (folder / "complete").exists():
                self._make(peer, folder)
        return folder / "bin" / "python"

    def folder(self, peer: PeerSoftware) -> pathlib.Path:
        """Return the folder of the peer's virtualenv, made or not."""
        recipe = repr((peer.requirements, sys.version_info[:3]))
        digest = hashlib.sha256(recipe.encode()).hexdigest()[:8]
        return self.root / f"{peer.name}-{digest}"

    def is_made(self, peer: PeerSoftware) -> bool:
        """Whether the peer can be run without installing anything."""
        return (self.folder(peer) / "complete").exists()

    def _make(self, peer: PeerSoftware, folder: pathlib.Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        _succeed(peer, [sys.executable, "-m", "venv", str(folder)])
        # What is imported is compiled then: compiling all is half of the work.
        options = ["--quiet", "--disable-pip-version-check", "--no-compile"]
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", *options]
        for stage in peer.requirements:
            _succeed(peer, [*pip, *stage])
        (folder / "complete").write_text("\n".join(peer.pins), encoding="utf-8")

    @contextlib.contextmanager
    def _lock(self, folder: pathlib.Path) -> Iterator[None]:
        """Two benches at once make a virtualenv once."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / f"{folder.name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def default_store() -> PeerStore:
    """``.peers`` in a checkout, else the user's cache folder."""
    checkout = pathlib.Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").exists() and os.access(checkout, os.W_OK):
        return PeerStore(checkout / ".peers")
    cache = os.environ.get("XDG_CACHE_HOME") or str(pathlib.Path.home() / ".cache")
    return PeerStore(pathlib.Path(cache) / "rlinf-async" / "peers")


def _succeed(peer: PeerSoftware, command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        output = (done.stderr or done.stdout).strip().splitlines()[-_TAIL:]
        raise PeerMissing(f"{peer.name} could not be installed: {' / '.join(output)}")
