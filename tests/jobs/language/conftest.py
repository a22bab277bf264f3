"""One small job for each test."""

from __future__ import annotations

import pathlib

import pytest

from tests.jobs.language.kit import TINY, Job


@pytest.fixture
def job(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> Job:
    """With toys: nothing is computed."""
    return Job(tmp_path, capsys)


@pytest.fixture
def tiny(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> Job:
    """With a real model."""
    return Job(tmp_path, capsys, TINY)
