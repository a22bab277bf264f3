"""Whole runs: what they leave, what is killed in them, and what they go on with."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_async import Policy
from rlinf_async.messages.embodied import TrainReport
from rlinf_async.runtime.jobs.embodied_sac.run import SacRun
from tests.jobs import killing
from tests.jobs.embodied.envs import TwoHands
from tests.jobs.embodied.test_beginning import newest, weights
from tests.jobs.embodied_sac.kit import STEPS, Job
from tests.jobs.killing import nothing_left_behind
from tests.jobs.processes import Start

PROCESS = ("--cluster.backend", "process")
MEMORY = ("--replay.storage", "memory")
TWO = ("--cluster.actors", 2)
PRIORITIZED = ("--replay.sampling", "prioritized", "--replay.n_step", 3)


class Killer(killing.Killer):
    """Kills workers as soon as a certain iteration is booked: the next one is collected by then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        write_row = SacRun._write_row

        def writing(run: SacRun, report: TrainReport, *rest: Any) -> None:
            write_row(run, report, *rest)
            self._kill(self.victims.pop(report.iteration, None))

        monkeypatch.setattr(SacRun, "_write_row", writing)


@pytest.mark.parametrize("storage", [(), MEMORY], ids=["disk", "memory"])
@pytest.mark.parametrize("form", [(), ("--cluster.rollout_workers", 1)], ids=["together", "apart"])
def test_a_run_keeps_its_books(
    job: Job, form: tuple[object, ...], storage: tuple[object, ...]
) -> None:
    summary = job.succeed(*form, *storage)
    job.check_books(6)
    assert summary.outcome == "finished"
    assert summary.evaluation_episodes == 2
    assert set(summary.dropped.values()) == {0}
    last = job.iterations[-1]
    assert math.isfinite(float(last["critic_loss"]))
    assert 0.0 < float(last["replay_age_max"]) <= 3.0


def test_two_ranks_share_batches_and_one_goes_on_alone(job: Job) -> None:
    job.succeed(*PROCESS, *PRIORITIZED, *TWO, "--training.total_steps", 4 * STEPS)
    job.check_books(4)
    summary = job.succeed(*PRIORITIZED, "--resume")
    job.check_books(6)
    assert set(summary.dropped.values()) == {0}


PIXELS = (
    *("--env.entry_point", "examples/reach_env.py:ReachTargets"),
    *("--env.kwargs", "{pixels_only = true, size = 12}"),
    *("--actor.fsdp.policy.channels", "[4]"),
)
COMPRESSED = (*PIXELS, "--replay.images", "compressed")


@pytest.mark.parametrize(
    ("images", "storage"),
    [(PIXELS, ()), (PIXELS, MEMORY), (COMPRESSED, MEMORY)],
    ids=["raw-disk", "raw-memory", "compressed-memory"],
)
def test_images_are_stored_as_bytes_and_learnt_from(
    job: Job, images: tuple[object, ...], storage: tuple[object, ...]
) -> None:
    job.succeed(*images, *storage, "--training.total_steps", 4 * STEPS)
    job.check_books(4)
    ended = job.train(*(COMPRESSED if images == PIXELS else PIXELS), *storage, "--resume")
    assert ended.code == 2
    assert "replay.images (" in ended.err
    job.succeed(*images, *storage, "--resume")
    job.check_books(6)
    if not storage:
        slots = (80 + STEPS * 5) * 12 * 12 * 3
        assert (job.out / "replay/observation.bin").stat().st_size == slots


def test_a_killed_store_keeps_compressed_images_and_a_file_that_was_cut_is_named(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    killer = Killer(monkeypatch)
    killer.victims = {1: "Replay[0]", 3: "Replay[0]"}
    with nothing_left_behind():
        summary = job.succeed(*PROCESS, *COMPRESSED, "--replay.n_step", 3)
    assert summary.restarts == {"Replay[0]": 2}
    job.check_books(6)
    again = (*COMPRESSED, "--replay.n_step", 3, "--resume", "--training.total_steps")
    job.succeed(*again, 7 * STEPS)
    job.check_books(7)
    files = (job.out / "replay").glob("images-*.bin")
    newest = max(files, key=lambda file: file.stat().st_mtime_ns)
    newest.write_bytes(newest.read_bytes()[:5])
    ended = job.train(*again, 8 * STEPS)
    assert ended.code == 1
    assert f"{newest.name} has 5 bytes" in ended.err


def test_choices_are_learnt_from_and_a_resumed_run_goes_on(job: Job) -> None:
    choosing = ("--env.id", "CartPole-v1", "--env.actions", "clip")
    job.succeed(*choosing, "--training.total_steps", 4 * STEPS)
    job.check_books(4)
    job.succeed(*choosing, "--resume")
    job.check_books(6)
    trained = [row for row in job.iterations if row["updates"]]
    assert all(0.0 < float(row["entropy"]) <= math.log(2) for row in trained)


def test_numbers_by_name_are_learnt_as_those_side_by_side(job: Job, tmp_path: Path) -> None:
    """Of a Dict of Boxes, to the last bit; an export answers by name again."""
    learnt = []
    for env in ("OneHand", "TwoHands"):
        job.out = tmp_path / env
        asked = ("--env.entry_point", f"tests.jobs.embodied.envs:{env}", "--env.id", "hands")
        # One stage: of two, whichever asks first has the first noise.
        job.succeed(*asked, "--training.max_staleness", 0, "--env.stages", 1)
        job.check_books(6)
        learnt.append(weights(newest(job.out)))
    assert learnt[0].keys() == learnt[1].keys()
    for name, one in learnt[0].items():
        torch.testing.assert_close(learnt[1][name], one, rtol=0, atol=0)
    assert job.command("export", job.out, tmp_path / "left").code == 0
    action = Policy.load(tmp_path / "left").act(np.zeros(2, np.float32))
    assert {name: one.shape for name, one in action.items()} == {"left": (1,), "right": (2,)}
    assert TwoHands.action_space.contains(action)


@pytest.mark.parametrize("storage", [(), MEMORY], ids=["disk", "memory"])
def test_a_resumed_run_goes_on_with_the_same_store(job: Job, storage: tuple[object, ...]) -> None:
    job.succeed(*PRIORITIZED, *storage, "--training.total_steps", 4 * STEPS)
    job.check_books(4)
    summary = job.succeed(*PRIORITIZED, *storage, "--resume")
    job.check_books(6)
    assert summary.dropped["second trajectories"] == 0


def test_a_store_that_is_gone_is_named_when_the_run_goes_on(job: Job) -> None:
    job.succeed("--training.total_steps", 4 * STEPS)
    (job.out / "replay" / "reward.bin").unlink()
    ended = job.train("--resume")
    assert ended.code == 1
    assert "reward.bin is missing: restore it" in ended.err
    folder = job.out / "checkpoints" / job.note["checkpoint"] / "replay"
    (folder / "state.json").unlink()
    ended = job.train("--resume")
    assert ended.code == 2
    assert "has no replay/state.json" in ended.err


def test_killed_workers_are_replaced_and_nothing_is_lost_or_stored_twice(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    killer = Killer(monkeypatch)
    killer.victims = {1: "Replay[0]", 2: "Env[0]", 4: "Replay[0]", 6: "Env[1]"}
    with nothing_left_behind():
        envs = ("--cluster.env_workers", 2, "--env.envs", 2, "--env.stages", 1)
        ten = ("--training.total_steps", 10 * STEPS)
        summary = job.succeed(*PROCESS, *PRIORITIZED, *TWO, *envs, *ten)
    assert summary.restarts == {"Replay[0]": 2, "Env[0]": 1, "Env[1]": 1}
    job.check_books(10)
    assert killer.dead_letters == []


def test_a_killed_store_in_memory_ends_the_run_which_can_be_resumed(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    killer = Killer(monkeypatch)
    killer.victims = {3: "Replay[0]"}
    ended = job.train(*PROCESS, *MEMORY)
    assert ended.code == 1
    assert "Replay[0] failed in its process" in ended.err
    job.succeed(*MEMORY, "--resume")
    job.check_books(6)


def test_a_killed_driver_leaves_a_run_that_can_be_resumed(job: Job, start_driver: Start) -> None:
    endless = ("--training.total_steps", 10**6 * STEPS)

    def booked() -> int:
        path = job.out / "metrics.csv"
        return path.read_text().count("\n") - 1 if path.exists() else 0

    arguments = ("train", job.file, "--out", job.out, "--resume", *PROCESS)
    driver = start_driver(*arguments, *endless)
    driver.until(lambda: booked() >= 5, "five iterations")
    driver.kill()
    assert driver.wait() == -9
    iterations = booked() + 4
    job.succeed("--resume", "--training.total_steps", iterations * STEPS)
    job.check_books(iterations)


def test_a_robot_in_real_time_learns_from_each_of_its_steps_once(job: Job) -> None:
    line = ("--env.id", "", "--env.entry_point", "tests.workers.env.test_real_time:Line")
    form = ("--env.kwargs.limit", 8, "--env.envs", 1, "--env.stages", 1, "--env.control.hz", 500)
    ended = job.train(*line, *form)
    assert ended.code == 0, ended.err
    for row in job.iterations:
        assert float(row["control_steps"]) - float(row["control_skipped"]) > 0
        assert row["return"] in ("", "8")
    assert job.summary.return_ == 8.0
