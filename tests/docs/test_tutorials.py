"""The tutorials: their commands run as they stand there, in their order, with shorter runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.docs.pages import ROOT, blocks, links

TUTORIALS: Final = ROOT / "docs" / "tutorials"
NO_TARGET: Final = "--evaluation.target_accuracy none --warm_start.steps 10 --evaluation.samples 10"
SHORT_PUSH: Final = (
    "--training.total_steps 2560 --actor.ppo.epochs 1 --evaluation.episodes 4 "
    "--evaluation.video_episodes 0 --evaluation.target_success_rate none"
)
SHORT_REACH: Final = (
    "--training.total_steps 800 --evaluation.episodes 2 --evaluation.video_episodes 0 "
    "--evaluation.target_success_rate none"
)
SHORTER: Final = {
    "first-run": ("--out runs/reach", f"--out runs/reach {SHORT_REACH}"),
    "own-environment": ("make train", f'make train ARGS="{SHORT_PUSH}"'),
    "own-language-task": (
        "make train",
        f'make train ARGS="{NO_TARGET} --training.iterations 1"',
    ),
    "own-agent": ("make train", f'make train ARGS="{NO_TARGET} --training.iterations 1"'),
    "own-worker": ("", ""),
    "own-job": ("", ""),
    "cluster": (
        'make train ARGS="--cluster.backend ray"',
        f'make train ARGS="--cluster.backend ray {SHORT_PUSH}"',
    ),
}
"""the tutorials in their order, and what of their commands is replaced by what, for the test"""
LEFT: Final = {
    "first-run": ("runs/reach/summary.json", "runs/reach/timeline.png", "reach.png"),
    "own-environment": ("push/picture.png",),
    "own-language-task": ("larger/runs/*/learning_curve.png", "larger/runs/*/trained"),
    "own-agent": ("shop/runs/*/learning_curve.png",),
    "own-worker": ("bandit/accuracy.png",),
    "own-job": ("runs/passes/timeline.png",),
    "cluster": ("push/runs/*/learning_curve.png",),
}
"""what the commands leave"""
NEEDS: Final = {
    "first-run": "gymnasium_robotics",
    "own-environment": "gymnasium",
    "own-language-task": "transformers",
    "own-agent": "transformers",
    "own-job": "transformers",
    "cluster": "ray",
}


def steps(name: str) -> str:
    """The commands that a tutorial has its reader give."""
    [block] = [one for one in blocks(TUTORIALS / f"{name}.md") if one.mark == "steps"]
    return block.text


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a reader, who has installed the package and copied the job of docs/jobs.md."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "examples").symlink_to(ROOT / "examples")
    shown = blocks(ROOT / "docs" / "jobs.md")
    for language, name in (("python", "pass_at_k.py"), ("toml", "pass_at_k.toml")):
        text = next(one.text for one in shown if one.language == language)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "bin").mkdir()
    for name, what in (("python", ""), ("rlinf-async", "-m rlinf_async")):
        command = folder / "bin" / name
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" {what} "$@"\n')
        command.chmod(0o755)
    return folder


@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize("name", SHORTER)
def test_the_commands_of_a_tutorial_run_as_they_stand_there(name: str, reader: Path) -> None:
    pytest.importorskip(NEEDS.get(name, "msgspec"))
    long, short = SHORTER[name]
    text = steps(name)
    assert long in text
    if name == "cluster" and not (reader / "push").is_dir():
        text = f"rlinf-async init embodied push\n{text}"
    done = subprocess.run(
        ["bash", "-euc", text.replace(long, short) if long else text],
        cwd=reader,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PATH": f"{reader / 'bin'}:{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for left in LEFT[name]:
        assert list(reader.glob(left)), f"{left} is not there"
    if name == "own-worker":  # the same numbers on every machine
        said = next(one.text for one in blocks(TUTORIALS / "own-worker.md") if "right" in one.text)
        assert done.stdout.count(said) == 2  # from processes, and from one loop


def test_the_tutorials_follow_one_another_and_end_with_a_picture() -> None:
    assert {page.stem for page in TUTORIALS.glob("*.md")} == set(SHORTER)
    names = list(SHORTER)
    for number, name in enumerate(names, start=1):
        text = (TUTORIALS / f"{name}.md").read_text(encoding="utf-8")
        assert text.startswith(f"# {number}. ")
        reached = text.partition("## What was reached\n")[2]
        [picture] = re.findall(r"^!\[.+\]\(\.\./images/(\w+\.png)\)$", reached, re.MULTILINE)
        assert (ROOT / "docs" / "images" / picture).stat().st_size < 100_000
        if name != names[-1]:
            assert f"{names[number]}.md" in links(TUTORIALS / f"{name}.md")[-1]
