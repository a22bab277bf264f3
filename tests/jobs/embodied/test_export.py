"""``rlinf-async export`` of a run in environments, and the policy where the framework is not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from rlinf_async.policy import Policy
from tests.docs.pages import ROOT, blocks
from tests.jobs.embodied.kit import Job
from tests.jobs.embodied_sac.kit import Job as SacJob

SMALL = ("--training.total_steps", 64, "--evaluation.episodes", 1)
RUNTIME = ("channels", "workers", "runtime", "gymnasium", "ray", "uvloop", "click")
"""parts of the project and packages that a policy does not need"""
PRINTED = re.compile(
    r"(?P<out>.*): policy '(?P<name>\w+)' of (?P<env>[\w-]+), version 1, as (?P<form>\w+), "
    r"\d+\.\d\d KiB\n"
    r"largest difference to the trained policy: \d\.\de[+-]\d\d \(64 observations\)\n"
    r"one action takes \d+\.\d{3} ms; 99 of 100 take at most \d+\.\d{3} ms\n"
)


def test_the_policy_of_a_run_acts_without_the_framework(job: Job, tmp_path: Path) -> None:
    """CartPole; loaded by a process that shows what it has imported."""
    job.succeed(*SMALL)
    folder, onnx = tmp_path / "folder", tmp_path / "onnx"
    ended = job.command("export", job.out, folder)
    assert (ended.code, ended.err) == (0, "")
    found = PRINTED.fullmatch(ended.out)
    assert found is not None, ended.out
    assert found.group("out", "name", "env", "form") == (
        *(str(folder), "mlp_categorical", "CartPole-v1", "folder"),
    )
    checkpoint = job.out / "checkpoints" / job.note["checkpoint"]
    assert job.command("export", checkpoint, onnx, "--to", "onnx").code == 0
    observation = [0.1, -0.2, 0.3, -0.4]
    policy = Policy.load(folder)
    action = policy.act(np.array(observation, np.float32))
    assert action in (0, 1)
    for path, absent in ((folder, ()), (onnx, ("torch", "safetensors", "xxhash"))):
        ran = _loading(path, observation)
        assert ran["action"] == [str(action)]
        assert not {*RUNTIME, *absent} & {*ran["modules"]}
    again = job.command("export", job.out, folder)
    assert (again.code, again.out) == (2, "")
    assert "exists already" in again.err


def _loading(folder: Path, observation: list[float]) -> dict[str, list[str]]:
    code = (
        "import sys\n"
        "from rlinf_async.policy import Policy\n"
        f"policy = Policy.load({str(folder)!r})\n"
        f"action = policy.act({observation!r})\n"
        "policy.act(" + repr(observation) + ", deterministic=False)\n"
        "print('action', action)\n"
        "ours = [one.split('.')[1] for one in sys.modules if one.startswith('rlinf_async.')]\n"
        "print('modules', *ours, *(one.partition('.')[0] for one in sys.modules))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return {line.split()[0]: line.split()[1:] for line in ran.stdout.splitlines()}


def test_the_loop_of_the_page_runs_as_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Soft actor-critic on Pendulum, exported as a graph of TorchScript in place of ONNX's."""
    job = SacJob(tmp_path, capsys)
    job.succeed("--training.total_steps", 96, "--evaluation.episodes", 1)
    out = tmp_path / "out" / "pendulum"
    assert job.command("export", job.out, out, "--to", "torchscript").code == 0
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "deploy.md"
    [loop] = [one.text for one in blocks(page) if "50 Hz" in one.text]
    assert loop.count("500") == 2
    exec(compile(loop.replace("500", "5"), str(page), "exec"), {})
    assert re.fullmatch(r"\d+ of 5 steps came late\n", capsys.readouterr().out)
    env: Any = gymnasium.make("Pendulum-v1")
    policy = Policy.load(out)
    for step in range(5):
        observation, _ = env.reset(seed=step)
        assert env.action_space.contains(policy.act(observation))
        assert env.action_space.contains(policy.act(observation, deterministic=False))
    env.close()


def test_what_cannot_be_exported_is_refused(job: Job, tmp_path: Path) -> None:
    job.succeed(*SMALL)
    out = tmp_path / "out"

    def refused(said: str, *arguments: object) -> None:
        ended = job.command("export", *arguments)
        assert (ended.code, ended.out) == (2, "")
        assert said in ended.err
        assert not out.exists()

    refused("--to lerobot: lerobot loads only the policies that", job.out, out, "--to", "lerobot")
    refused("--dtype: is of language models", job.out, out, "--dtype", "bfloat16")
    refused("--shard-size: is of language models", job.out, out, "--shard-size", 2)
    refused(
        f"--to onnx: {tmp_path / 'model'} is not of a run in environments",
        *(tmp_path / "model", out, "--to", "onnx"),
    )
    refused(
        "has no such checkpoint; it has: version-000001",
        job.out / "checkpoints/version-000009",
        out,
    )
    for checkpoint in (job.out / "checkpoints").iterdir():
        if checkpoint.name == "latest.json":
            checkpoint.unlink()
    refused("there is no checkpoint yet, so there is nothing to export", job.out, out)


def test_a_policy_that_would_act_otherwise_is_not_written(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy of one's own, whose most likely action is not what its graph draws."""
    file = tmp_path / "mine.py"
    file.write_text(
        "from rlinf_async.backends.policies.mlp import MlpCategoricalPolicy\n"
        "class Mine(MlpCategoricalPolicy):\n"
        "    def mode(self, observation):\n"
        "        return 1 - super().mode(observation)\n"
    )
    monkeypatch.chdir(tmp_path)
    job.succeed(*SMALL, "--actor.fsdp.policy.name", "mine.py:Mine")
    ended = job.command("export", job.out, tmp_path / "out", "--to", "torchscript")
    assert (ended.code, ended.out) == (2, "")
    assert "acts otherwise than the trained one, by 1: nothing was written" in ended.err
    assert not (tmp_path / "out").exists()
    assert job.command("export", job.out, tmp_path / "out").code == 0
    assert Policy.load(tmp_path / "out").act(np.zeros(4, np.float32)) in (0, 1)
