"""Code of the user's own that a run calls: ``[hooks] on_iteration``; and a reward of one's own."""

from __future__ import annotations

import pathlib

import pytest

from tests.jobs.embodied.kit import Job
from tests.jobs.embodied_sac.kit import Job as SacJob
from tests.jobs.language.kit import Job as LanguageJob
from tests.jobs.processes import Start

QUICK = ("--observe.sinks", "[]", "--evaluation.episodes", 1, "--training.total_steps", 192)

HOOKS = """
import asyncio, json, threading

def told(it):
    seen = [it.run, it.iteration, it.iterations, it.metrics["iteration"]]
    with (it.folder / "told.jsonl").open("a") as file:
        file.write(json.dumps(seen) + "\\n")

async def awaited(it):
    await asyncio.sleep(0)
    told(it)

def returns_one(it):
    return awaited(it)

def raises(it):
    if it.iteration == 1:
        raise ValueError("enough")
    told(it)

def raises_at_last(it):
    if it.iteration == 2:
        raise ValueError("enough")

async def raises_later(it):
    await asyncio.sleep(0)
    raises(it)

def changes(it):
    it.metrics["return"] = 1.0

async def cancels(it):
    task = asyncio.ensure_future(asyncio.sleep(60))
    task.cancel()
    await task

def leaves(it):
    raise SystemExit(3)

def of_nothing():
    pass

def never_returns(it):
    (it.folder / "called").touch()
    threading.Event().wait()
"""


def hooks(folder: pathlib.Path, name: str) -> tuple[object, ...]:
    file = folder / "mine.py"
    file.write_text(HOOKS)
    return "--hooks.on_iteration", f"{file}:{name}"


def told(run: pathlib.Path) -> list[str]:
    return (run / "told.jsonl").read_text().splitlines()


@pytest.mark.parametrize("name", ["told", "awaited", "returns_one"])
def test_a_hook_is_called_with_the_row_of_each_iteration(job: Job, name: str) -> None:
    job.succeed(*QUICK, *hooks(job.file.parent, name))
    assert told(job.out) == [f'["small", {one}, 3, {one}.0]' for one in range(3)]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raises", "raised in iteration 1: ValueError: enough"),
        ("raises_later", "raised in iteration 1: ValueError: enough"),
        ("changes", "raised in iteration 0: TypeError: 'mappingproxy' object does not support"),
        ("leaves", "raised in iteration 0: SystemExit: 3"),
        ("cancels", "raised in iteration 0: CancelledError"),
    ],
)
def test_what_a_hook_raises_ends_the_run_and_names_it(job: Job, name: str, said: str) -> None:
    """It goes on from its checkpoint, under another hook, and each iteration is there once."""
    setting, path = hooks(job.file.parent, name)
    ended = job.train(*QUICK, setting, path, "--training.checkpoint_every", 1)
    assert ended.code == 1
    assert f"error: hooks.on_iteration: {str(path)!r} {said}" in ended.err
    assert job.summary.outcome == "failed"
    assert str(job.summary.error).startswith("HookFailed: hooks.on_iteration")
    if name == "raises":
        job.succeed(*QUICK, "--resume", "--training.checkpoint_every", 1)
        job.check_records(3, 64, resumed=True)


def test_what_a_hook_raises_loses_no_checkpoint_that_was_begun(job: Job) -> None:
    """That after the last iteration has the whole training."""
    ended = job.train(*QUICK, *hooks(job.file.parent, "raises_at_last"))
    assert ended.code == 1
    assert "raised in iteration 2: ValueError: enough" in ended.err
    assert job.note["checkpoint"] == "version-000003"
    job.succeed(*QUICK, "--resume")
    job.check_records(3, 64, resumed=True)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("of_nothing", "takes other arguments (too many positional arguments): a hook is called"),
        ("nobody", "has no function 'nobody'"),
    ],
)
def test_a_hook_that_cannot_be_called_is_refused(job: Job, name: str, said: str) -> None:
    ended = job.command("check", job.file, *hooks(job.file.parent, name))
    assert ended.code == 2
    assert "hooks.on_iteration: " in ended.err
    assert said in ended.err


def test_sac_and_language_runs_call_hooks_too(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sac").mkdir()
    sac = SacJob(tmp_path / "sac", capsys)
    sac.succeed("--observe.sinks", "[]", *hooks(tmp_path, "told"))
    assert told(sac.out) == [f'["small", {one}, 6, {one}.0]' for one in range(6)]
    (tmp_path / "toys").mkdir()
    toys = LanguageJob(tmp_path / "toys", capsys)
    toys.succeed(*hooks(tmp_path, "awaited"))
    assert told(toys.out) == [f'["toys", {one}, 4, {one}.0]' for one in range(4)]


def test_a_run_waits_for_its_hook_says_so_and_a_ctrl_c_does_not_wait(
    job: Job, start_driver: Start
) -> None:
    driver = start_driver(
        *("train", job.file, "--out", job.out, *QUICK, "--observe.sinks", '["tensorboard"]'),
        *hooks(job.file.parent, "never_returns"),
    )
    driver.until((job.out / "called").exists, "the hook is called")
    waits = "waiting for hooks.on_iteration"
    driver.until(lambda: waits in job.command("status", job.out).out, "the status says so")
    driver.interrupt()
    assert driver.wait() == 130
    assert driver.said.splitlines()[-1] == "interrupted"
    assert (job.summary.outcome, job.summary.iterations) == ("stopped", 1)


REWARD = """
import gymnasium as gym

class EveryStepCosts(gym.Wrapper):
    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, -reward, terminated, truncated, info

def make(id):
    return EveryStepCosts(gym.make(id))
"""


def test_a_reward_of_ones_own_is_a_wrapper_that_the_entry_point_returns(job: Job) -> None:
    file = job.file.with_name("costs.py")
    file.write_text(REWARD)
    kwargs = '{id = "CartPole-v1"}'
    made = ("--env.id", "", "--env.entry_point", f"{file}:make", "--env.kwargs", kwargs)
    summary = job.succeed(*QUICK, *made)
    assert summary.return_ is not None
    assert summary.return_ <= -8.0  # steps: CartPole pays 1 for each
    last = job.iterations[-1]
    assert float(last["return"]) <= -8.0
