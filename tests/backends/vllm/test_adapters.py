"""vLLM under adapters that are published alone."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rlinf_async.backends.vllm.config import VllmEngineConfig
from rlinf_async.backends.vllm.part import Vllm
from tests.backends.adapters import ADAPTER, publisher, serves_each_version
from tests.backends.vllm.kit import SMALL, Served

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what vLLM imports
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def test_each_version_of_an_adapter_is_served_over_the_weights_of_the_folder(
    tmp_path: Path,
) -> None:
    trainer = publisher(tmp_path)
    config = Vllm().with_adapter(VllmEngineConfig(model=str(tmp_path), **SMALL), ADAPTER.rank)
    assert msgspec.structs.asdict(config)["weights"] == "adapter"
    with Served(config) as served:
        assert served.engine.version == -1
        served.run(serves_each_version(served.engine, trainer))
