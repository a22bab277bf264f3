"""The engines that tests share. Without vLLM they are skipped; `make test` installs it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from tests.backends.models import make_model, qwen3, save_folder

pytest.importorskip(
    "vllm", reason="vLLM is not installed: make test installs it", exc_type=ImportError
)

from rlinf_async.backends.vllm.config import VllmEngineConfig
from tests.backends.vllm.kit import CONTEXT, SMALL, Served


@pytest.fixture(scope="package")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Tied embeddings; weights come with updates."""
    folder = save_folder(tmp_path_factory.mktemp("tied"), qwen3(max_position_embeddings=CONTEXT))
    with Served(VllmEngineConfig(model=folder, **SMALL)) as served:
        yield served


@pytest.fixture(scope="package")
def untied_model() -> nn.Module:
    """What `untied` serves."""
    return make_model(qwen3(tied=False, max_position_embeddings=CONTEXT), 11)


@pytest.fixture(scope="package")
def untied(untied_model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Weights from a folder. A test kills it: that one comes last."""
    folder = tmp_path_factory.mktemp("untied")
    path = save_folder(Path(folder), untied_model.config, untied_model)
    with Served(VllmEngineConfig(model=path, weights="folder", **SMALL)) as served:
        yield served
