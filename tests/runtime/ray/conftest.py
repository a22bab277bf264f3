"""A Ray cluster of three hosts on this machine, for all tests of a module."""

from __future__ import annotations

import gc
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from tests.runtime.ray.kit import Hosts


@pytest.fixture(autouse=True)
def own_sigterm() -> Iterator[None]:
    """The handler of SIGTERM is not Ray's afterwards: a `ray.init` in the main thread sets one."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(autouse=True, scope="module")
def own_garbage() -> Iterator[None]:
    """What Ray has left open is not for the tests of another module to be told of."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """alpha: the head, cores alone; beta: four accelerators; gamma: four, and a robot."""
    made = Hosts()
    try:
        made.add("alpha", include_dashboard=False)
        made.add("beta", num_gpus=4)
        made.add("gamma", num_gpus=4, resources={"robot": 1})
        yield made
    finally:
        made.shutdown()


@pytest.fixture(autouse=True)
def four_devices() -> Any:
    """The devices are those of the hosts here."""
