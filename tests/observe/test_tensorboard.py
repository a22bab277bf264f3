"""TensorBoard shows each step once, with the values of the start that came last."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlinf_async.observe.files import RunFolderError
from rlinf_async.observe.metrics import MetricsWriter


def write(folder: Path, steps: range, value: float, *, resume_at: int | None = None) -> None:
    with MetricsWriter(folder, resume_at=resume_at) as writer:
        for step in steps:
            writer.write(step, {"return": value})


def shown(folder: Path) -> list[tuple[int, float]]:
    """What TensorBoard reads of the metric ``return``: step and value."""
    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars("return")]


def test_scalars_reach_tensorboard(tmp_path: Path) -> None:
    write(tmp_path, range(3), 1.5)
    assert shown(tmp_path) == [(0, 1.5), (1, 1.5), (2, 1.5)]


def test_steps_past_the_resume_point_are_purged_however_soon_the_resume_comes(
    tmp_path: Path,
) -> None:
    write(tmp_path, range(4), 1.0)
    write(tmp_path, range(2, 5), 2.0, resume_at=1)
    write(tmp_path, range(4, 6), 3.0, resume_at=3)
    assert shown(tmp_path) == [(0, 1.0), (1, 1.0), (2, 2.0), (3, 2.0), (4, 3.0), (5, 3.0)]


def test_a_start_from_the_beginning_purges_all(tmp_path: Path) -> None:
    write(tmp_path, range(4), 1.0)
    write(tmp_path, range(1), 2.0)
    assert shown(tmp_path) == [(0, 2.0)]


def test_an_event_file_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("a file in its place")
    with pytest.raises(RunFolderError, match=r"cannot make .*tensorboard: File exists"):
        MetricsWriter(tmp_path)
