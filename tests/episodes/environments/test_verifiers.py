"""Environments of verifiers, in a virtualenv of their own: its client, its harness, its scores."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.harness.peers import PeerMissing, default_store
from rlinf_async.config import MissingExtra
from tests.episodes.endpoint.programs import PACKAGES
from tests.episodes.environments.kit import agent
from tests.interpreters import OURS, make_python, packages_of

HERE = Path(__file__).parent


def test_without_the_package_its_extra_is_named() -> None:
    with pytest.raises(MissingExtra, match=r"pip install 'rlinf-async\[verifiers\]'"):
        agent("verifiers", env={"taskset": {"id": "sums-v1"}})


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_its_client_harness_and_scores_are_its_own(tmp_path: Path, loop: str) -> None:
    try:
        peer = default_store().python(PACKAGES["verifiers"])
    except PeerMissing as missing:
        pytest.skip(str(missing))
    python = make_python(tmp_path / "verifiers", packages_of(peer.parents[1]), OURS)
    path = os.pathsep.join(map(str, (HERE.parents[2], HERE / "packages")))
    done = subprocess.run(
        [python, "-m", f"{__package__}.verifiers_program", loop],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["at once"] == [[float(at % 2), 2, {"unfinished": 0.0}, 1] for at in range(6)]
    assert found["two workers"] == [[1.0, 2, {"unfinished": 0.0}, 1]] * 2
    assert "does not train its agent 'judge'" in found["fixed"][0]
    assert "episode.environment.env.judge.client and .model" in found["fixed"][0]
    assert found["fixed apart"] == [1.0, 2, {"unfinished": 0.0}, 1, 2]
    assert found["a row once"] == [False, [1.0, 2, {"unfinished": 0.0}, 1], True]
    assert "verifiers environment 'sums-v1' failed: " in found["scoring raises"][0]
    assert "board" in found["scoring raises"][0]
    assert found["a limit"][1:] == [1, {"unfinished": 1.0}, 1]
    assert "has 20 tasks, and none of number 20" in found["no such task"][0]
    assert found["keys left"] == []
    assert "enough" not in found
    assert found["too few"].startswith("data.environment_tasks: environment_tasks is 21, but verif")
    assert "'sums-v1' has 20 tasks" in found["too few"]
    assert "episode.environment.env: verifiers environment 'none-v1' cannot be" in found["unknown"]
    assert "episode.environment.env: verifiers environment 'sums-v1' cannot be" in found["strange"]
