"""What the tests of environments share."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.harness.peers import PeerMissing, default_store
from tests.episodes.endpoint.programs import PACKAGES


@pytest.fixture(scope="module")
def textarena() -> Iterator[None]:
    """TextArena can be imported, from a virtualenv of its own behind what is installed here; to
    other tests it is not installed."""
    try:
        python = default_store().python(PACKAGES["textarena"])
    except PeerMissing as missing:
        pytest.skip(str(missing))
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = str(Path(python).parents[1] / "lib" / version / "site-packages")
    sys.path.append(packages)
    importlib.import_module("textarena")
    yield
    sys.path.remove(packages)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(packages):
            del sys.modules[name]
