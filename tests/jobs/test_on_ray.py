"""Both jobs on Ray: the same run as on processes."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.jobs.embodied.kit import Job as EmbodiedJob
from tests.jobs.kit import Job
from tests.jobs.language.kit import LOSSES, TINY
from tests.jobs.language.kit import Job as LanguageJob
from tests.runtime.ray.kit import Hosts

pytestmark = pytest.mark.xdist_group("ray")

LANGUAGE = (
    *("--training.iterations", 3, "--actor.pipelined", "false"),
    *("--data.verifier", "tests.jobs.language.verifiers:letters"),
)


def tiny(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> LanguageJob:
    return LanguageJob(folder, capsys, TINY)


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    """A Ray that both jobs connect to."""
    hosts = Hosts()
    try:
        hosts.add("alpha")
        hosts.add("beta", resources={"robot": 1})
        yield hosts.address
    finally:
        hosts.shutdown()


@pytest.mark.parametrize(
    ("make", "settings", "columns"),
    [
        (
            EmbodiedJob,
            ("--cluster.rollout_workers", 0, "--env.stages", 1),
            ("policy_loss", "value_loss"),
        ),
        (tiny, LANGUAGE, LOSSES),
    ],
    ids=["embodied", "language"],
)
def test_a_run_has_the_losses_of_one_on_processes(
    make: Callable[..., Job[Any]],
    settings: tuple[object, ...],
    columns: tuple[str, ...],
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    ray_address: str,
) -> None:
    runs = []
    for name, cluster in (
        ("process", ("--cluster.backend", "process")),
        ("ray", ("--cluster.backend", "ray", "--cluster.ray.address", ray_address)),
    ):
        (tmp_path / name).mkdir()
        run = make(tmp_path / name, capsys)
        run.succeed(*settings, *cluster)
        runs.append(run)
    process, ray = runs
    assert len(ray.iterations) == len(process.iterations) > 2
    for mine, theirs in zip(ray.iterations, process.iterations, strict=True):
        for name in columns:
            assert float(mine[name]) == pytest.approx(float(theirs[name]), abs=1e-6), name


def test_resources_of_a_role_reach_its_launch_by_configuration(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], ray_address: str
) -> None:
    run = EmbodiedJob(tmp_path, capsys)
    wanted = ("--cluster.placement.env.resources.robot", 2, "--cluster.ray.wait", 0)
    ended = run.train(*wanted, "--cluster.backend", "ray", "--cluster.ray.address", ray_address)
    assert ended.code == 2
    assert "robot, which no host has: of 2 hosts" in ended.err
