"""One Ray of this host for all tests of this folder, which leave nothing in it."""

from __future__ import annotations

import importlib
import logging
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from rlinf_async.runtime.ray.session import LOCAL_STORE_BYTES
from tests.preloaded import preloaded

IMPORTS = (
    "transformers.models.qwen3.modeling_qwen3",
    "rlinf_async.runtime.ray.training.actor",
    "rlinf_async.backends.fsdp.language.trainer",
    *(["rlinf_async.backends.megatron.trainer"] if find_spec("megatron.core") else []),
)
"""What takes an actor of a training group seconds. The examples' actors import it themselves. Ray
itself starts a thread when it is imported."""


@pytest.fixture
def ray(started: Any) -> Iterator[Any]:
    """Ray with eight cores, all of them free."""
    yield started
    groups = importlib.import_module("ray.util.placement_group")
    states: dict[str, Any] = groups.placement_group_table()
    for name, one in states.items():
        if one["state"] != "REMOVED":
            group_id = importlib.import_module("ray").PlacementGroupID(bytes.fromhex(name))
            groups.remove_placement_group(groups.PlacementGroup(group_id))


@pytest.fixture(scope="package")
def started() -> Iterator[Any]:
    """Ray with eight cores, whatever this machine has."""
    before = signal.getsignal(signal.SIGTERM)
    library: Any = importlib.import_module("ray")
    with preloaded(*IMPORTS) as python:
        library.init(
            address="local",
            num_cpus=8,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=LOCAL_STORE_BYTES,
            logging_level=logging.ERROR,
            log_to_driver=False,
            runtime_env={"py_executable": python.command},
        )
        try:
            yield library
        finally:
            library.shutdown()
            signal.signal(signal.SIGTERM, before)
