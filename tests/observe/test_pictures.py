"""The pictures show what was measured, whatever was measured."""

from __future__ import annotations

from pathlib import Path

import imageio.v3 as iio
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from numpy.typing import NDArray

from rlinf_async.observe.files import RunFolderError
from rlinf_async.observe.metrics import MetricsWriter
from rlinf_async.observe.pictures import COLOURS, draw_learning_curve, draw_timeline
from rlinf_async.observe.trace import Span

SECOND = 10**9


def picture(path: Path) -> NDArray[np.float64]:
    """The pixels ``[height, width, rgb]``, 0 to 1."""
    return np.asarray(iio.imread(path), dtype=np.float64)[..., :3] / 255


def share_of(path: Path, colour: str) -> float:
    """Which share of the picture has this very colour."""
    close = np.abs(picture(path) - np.array(to_rgb(colour))).max(axis=2) < 0.02
    return float(close.mean())


def test_the_timeline_returns_where_the_time_went(tmp_path: Path) -> None:
    spans = [
        Span("env 0", "step", 0, 6 * SECOND),
        Span("env 0", "wait actions", 6 * SECOND, 4 * SECOND),
        Span("rollout 0", "forward", 2 * SECOND, 1 * SECOND),
    ]
    env, rollout = draw_timeline(spans, tmp_path / "timeline.png")
    assert (env.worker, rollout.worker) == ("env 0", "rollout 0")
    assert env.idle_share == pytest.approx(0.4)
    assert rollout.idle_share == pytest.approx(0.9)


def test_the_timeline_gives_each_name_its_share_of_the_row(tmp_path: Path) -> None:
    path = tmp_path / "timeline.png"
    spans = [Span("env 0", "step", 0, 6 * SECOND), Span("env 0", "reset", 6 * SECOND, 3 * SECOND)]
    draw_timeline(spans, path)
    # The two patches of the legend are the same size and small: the rows make the ratio.
    assert share_of(path, COLOURS[0]) / share_of(path, COLOURS[1]) == pytest.approx(2.0, rel=0.05)


def test_the_timeline_of_a_long_run_has_a_close_up(tmp_path: Path) -> None:
    spans = [Span("env 0", "step", 1000 * step, 500) for step in range(5000)]
    draw_timeline(spans, tmp_path / "long.png")
    draw_timeline(spans[:20], tmp_path / "short.png")
    assert picture(tmp_path / "long.png").shape[0] > picture(tmp_path / "short.png").shape[0]
    # Half-busy columns of the whole run are a mixture; only the close-up shows the pure colour.
    assert share_of(tmp_path / "long.png", COLOURS[0]) > 0.03


def test_a_close_up_can_be_asked_for_in_seconds(tmp_path: Path) -> None:
    spans = [Span("env 0", "step", step * SECOND, SECOND // 2) for step in range(20)]
    draw_timeline(spans, tmp_path / "without.png")
    draw_timeline(spans, tmp_path / "with.png", close_up=4.0)
    assert picture(tmp_path / "with.png").shape[0] > picture(tmp_path / "without.png").shape[0]


def test_a_timeline_without_spans_is_a_picture_too(tmp_path: Path) -> None:
    assert draw_timeline([], tmp_path / "timeline.png", left_out={"env 0": 4}) == []
    assert picture(tmp_path / "timeline.png").std() > 0


def test_a_timeline_of_a_single_instant_is_a_picture_too(tmp_path: Path) -> None:
    (only,) = draw_timeline([Span("env 0", "step", 5, 0)], tmp_path / "timeline.png")
    assert only.idle_share == 1.0


def write_metrics(folder: Path, *rows: dict[str, float]) -> Path:
    with MetricsWriter(folder, sinks=[]) as writer:
        for step, row in enumerate(rows):
            writer.write(step, row)
    return folder / "metrics.csv"


def full_row(step: int) -> dict[str, float]:
    return {
        "env_steps": 800.0 * step,
        "train_seconds": 0.5 * step,
        "return": step - 40.0,
        "success_rate": step / 40,
    }


def test_the_learning_curve_shows_return_and_success(tmp_path: Path) -> None:
    metrics = write_metrics(tmp_path, *(full_row(step) for step in range(40)))
    draw_learning_curve(metrics, tmp_path / "curve.png", title="Reach", target=0.95)
    assert share_of(tmp_path / "curve.png", COLOURS[0]) > 0.001
    assert share_of(tmp_path / "curve.png", COLOURS[2]) > 0.001


def test_an_env_without_success_has_a_learning_curve_of_its_return(tmp_path: Path) -> None:
    rows = [full_row(step) | {"success_rate": float("nan")} for step in range(9)]
    draw_learning_curve(write_metrics(tmp_path, *rows), tmp_path / "curve.png")
    assert share_of(tmp_path / "curve.png", COLOURS[0]) > 0.001
    assert share_of(tmp_path / "curve.png", COLOURS[2]) == 0.0


def test_evaluations_stand_in_the_learning_curve(tmp_path: Path) -> None:
    rows = [full_row(step) for step in range(9)]
    rows[-1] |= {"eval_return": -30.0, "eval_success_rate": 1.0}
    draw_learning_curve(write_metrics(tmp_path, *rows), tmp_path / "curve.png")
    assert share_of(tmp_path / "curve.png", COLOURS[5]) > 0


@pytest.mark.parametrize("rows", [[], [{"loss": 1.0}], [{"return": 1.0}], [full_row(1)]])
def test_a_run_of_next_to_nothing_has_a_learning_curve(
    tmp_path: Path, rows: list[dict[str, float]]
) -> None:
    draw_learning_curve(write_metrics(tmp_path, *rows), tmp_path / "curve.png")
    assert picture(tmp_path / "curve.png").std() > 0


def test_metrics_that_are_not_numbers_are_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,return\n0,high\n")
    with pytest.raises(RunFolderError, match=r"metrics\.csv holds something that is not a number"):
        draw_learning_curve(tmp_path / "metrics.csv", tmp_path / "curve.png")


def test_a_picture_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=r"cannot write .*timeline\.png: Not a directory"):
        draw_timeline([Span("env 0", "step", 0, 9)], tmp_path / "file" / "timeline.png")
