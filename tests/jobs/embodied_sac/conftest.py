"""One small job for each test."""

from __future__ import annotations

import pathlib

import pytest

from tests.jobs.embodied_sac.kit import Job


@pytest.fixture
def job(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> Job:
    return Job(tmp_path, capsys)
