"""The engines that tests share. Without vLLM they are skipped; `make test` installs it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip(
    "vllm", reason="vLLM is not installed: make test installs it", exc_type=ImportError
)

from rlinf_async.backends.vllm.config import VllmEngineConfig
from tests.backends.vllm.kit import CONTEXT, SMALL, Exported, Served, export


@pytest.fixture(scope="package")
def tied_export(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """What `tied` begins with."""
    return export(tmp_path_factory.mktemp("tied"), tied=True, max_position_embeddings=CONTEXT)


@pytest.fixture(scope="package")
def tied(tied_export: Exported) -> Iterator[Served]:
    """Tied embeddings; an exported checkpoint."""
    config = VllmEngineConfig(model=str(tied_export.folder), weights="folder", **SMALL)
    with Served(config) as served:
        yield served


@pytest.fixture(scope="package")
def untied_export(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """What `untied` begins with."""
    return export(tmp_path_factory.mktemp("untied"), tied=False, max_position_embeddings=CONTEXT)


@pytest.fixture(scope="package")
def untied(untied_export: Exported) -> Iterator[Served]:
    """An exported checkpoint. A test kills the engine: that one comes last."""
    config = VllmEngineConfig(model=str(untied_export.folder), weights="folder", **SMALL)
    with Served(config) as served:
        yield served
