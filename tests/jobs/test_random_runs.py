"""A few random runs in this process; ``python -m tests.jobs.random_runs`` has all the others."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from random import Random

import pytest

from rlinf_async.cli import main
from tests.jobs.random_runs.embodied import embodied_run
from tests.jobs.random_runs.language import language_run
from tests.jobs.random_runs.settings import RandomRun

SEEDS = range(8)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("draw", [language_run, embodied_run])
def test_what_check_accepts_trains_as_configured(
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    draw: Callable[..., RandomRun],
    seed: int,
) -> None:
    drawn, file, out = draw(Random(seed), local=True), tmp_path / "run.toml", tmp_path / "run"
    file.write_text(drawn.text)
    code = main(["check", str(file), *drawn.arguments])
    if code != 0:
        said = capsys.readouterr().err
        assert code == 2, said
        assert said.startswith("error: ")
        return
    assert main(["train", str(file), "--out", str(out), *drawn.arguments]) == 0, drawn.arguments
    assert drawn.problems(out) == [], drawn.arguments
