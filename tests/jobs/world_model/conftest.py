from __future__ import annotations

import pathlib

import pytest

from tests.jobs.world_model.kit import Job


@pytest.fixture
def job(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> Job:
    return Job(tmp_path, capsys)
