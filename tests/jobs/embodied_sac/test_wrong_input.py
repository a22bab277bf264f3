"""What cannot be is named before any worker starts."""

from __future__ import annotations

import pathlib

import pytest

from tests.jobs.embodied_sac.kit import Job

pytestmark = pytest.mark.usefixtures("no_cluster")
KITCHEN = "tests.jobs.embodied.envs:Kitchen"


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        (
            "env.id",
            "CartPole-v1",
            "env.actions: 'rescale' stretches numbers to the bounds of a Box",
        ),
        ("env.entry_point", KITCHEN, "takes actions that are neither numbers alone nor one choice"),
        ("env.actions", "clip", "env.actions: 'clip', but the policy's actions lie in [-1, 1]"),
        ("env.group_size", 2, "env.group_size: 2 was given; soft actor-critic learns from single"),
        ("replay.capacity", 8, "batch_size is 16, which is more than the capacity of 8"),
        ("replay.capacity", 31, "replay.capacity: 31 transitions are less than one iteration"),
        ("replay.capacity", 10**15, "replay.capacity: 1000000000000000 transitions of 48 bytes"),
        ("replay.n_step", 9, "replay.n_step: returns of 9 steps were asked for, but a trajectory"),
        ("replay.priority_alpha", 1.5, "priority_alpha is 1.5; it must be above 0 and at most 1"),
        ("replay.sampling", "priority", "replay.sampling"),
        ("replay.images", "compressed", "images: 'compressed', but Pendulum-v1 shows no images"),
        ("replay.images", "png", "replay.images"),
        ("replay.folder", __file__, "replay.folder: the replay store cannot be written there"),
        ("training.learning_starts", 192, "nothing would be learnt"),
        ("training.updates_per_step", 0, "updates_per_step is 0.0; it must be above 0"),
        (
            "training.updates_per_step",
            0.001,
            "after the first 64 are none: nothing would be",
        ),
        ("actor.sac.image_shift", -1, "image_shift is -1; it must be at least 0"),
        ("actor.fsdp.policy.channels", "[]", "channels is []; there must be at least one"),
        ("cluster.actors", 2, "cluster.backend: several actors need a process each"),
        ("cluster.actors", 3, "replay.batch_size: 16 transitions cannot be divided among cluster"),
        ("actor.sac.tau", 0, "tau is 0.0; it must be above 0"),
        ("actor.sac.critics", 0, "critics is 0; it must be at least 1"),
        ("actor.sac.target_critics", 3, "target_critics is 3, but there are critics = 2: take at"),
        ("actor.sac.cloning", 1.5, "cloning is 1.5; it must"),
        ("actor.sac.cloning", 0.5, "actor.sac.cloning: 0.5 was given, but there are no demonstr"),
        ("actor.sac.policy_every", 0, "policy_every is 0; it must be at least 1"),
        ("replay.demonstrated_share", 0.25, "demonstrated_share: 0.25 was given, but there are no"),
        ("replay.demonstrated_share", 1.0, "demonstrated_share is 1.0; it must be below 1"),
        ("replay.demonstrations", "nowhere", "replay.demonstrations: 'nowhere' holds no demonstr"),
        ("demonstrations.policy", "nowhere:expert", "demonstrations.policy: "),
        ("actor.fsdp.critic_warmup_steps", 5, "soft actor-critic has training.learning_starts"),
    ],
)
def test_it_is_named(job: Job, setting: str, value: object, message: str) -> None:
    for command in (("check", job.file), ("train", job.file, "--out", job.out)):
        ended = job.command(*command, f"--{setting}", value)
        assert ended.code == 2, ended.err
        [line] = ended.err.splitlines()
        assert message in line
    assert not job.out.exists()


def test_an_entropy_that_choices_never_have_is_refused(job: Job) -> None:
    choosing = ("--env.id", "CartPole-v1", "--env.actions", "clip")
    ended = job.command("check", job.file, *choosing, "--actor.sac.target_entropy", 0.7)
    assert ended.code == 2
    assert "target_entropy: 0.7, but the entropy of 2 choices is below 0.6931" in ended.err
    assert job.command("check", job.file, *choosing, "--actor.sac.target_entropy", 0.6).code == 0


def test_a_store_of_images_without_room_is_refused(job: Job) -> None:
    pixels = (
        "--env.entry_point",
        "examples/reach_env.py:ReachTargets",
        "--replay.capacity",
        10**15,
    )
    form = ("check", job.file, *pixels, "--env.kwargs", "{pixels_only = true}")
    ended = job.command(*form)
    assert ended.code == 2
    assert "take fewer, or set replay.images = 'compressed'" in ended.err
    ended = job.command(*form, "--replay.images", "compressed")
    assert ended.code == 2
    assert "1000000000000000 transitions of 52 bytes, without their images, need" in ended.err


def test_demonstrations_of_numbers_by_name_are_refused(job: Job) -> None:
    hands = ("--env.entry_point", "tests.jobs.embodied.envs:TwoHands")
    ended = job.command("check", job.file, *hands, "--demonstrations.policy", "any.py:expert")
    assert ended.code == 2
    assert "demonstrations.policy: 'any.py:expert', but demonstrations have actions of" in ended.err


def test_several_ranks_of_fsdp1_are_refused(job: Job) -> None:
    two = ("--cluster.actors", 2, "--cluster.backend", "process")
    ended = job.train(*two, "--actor.fsdp.strategy", "fsdp1")
    assert ended.code == 2
    assert "actor.fsdp.strategy: 'fsdp1': its ranks hold other parts of the critics" in ended.err


@pytest.mark.parametrize(
    ("seen", "taken", "message"),
    [
        ("Text(5)", "Box(-1.0, 1.0, (1,))", "soft actor-critic read no text: leave it out"),
        (
            "Box(0, 255, (4, 8, 8, 3), numpy.uint8)",
            "Box(-1.0, 1.0, (1,))",
            "has shape [4, 8, 8, 3]; a CNN takes [height, width]",
        ),
        (
            "Box(0, 255, (4, 9, 3), numpy.uint8)",
            "Box(-1.0, 1.0, (1,))",
            "image_shift: images would be shifted by up to 4 pixels, but 'image' has 4 x 9",
        ),
        ("Box(-1.0, 1.0, (2,))", "Box(-1.0, 1.0, (0,))", "takes actions without any number"),
    ],
)
def test_spaces_that_do_not_fit_are_refused(
    job: Job, tmp_path: pathlib.Path, seen: str, taken: str, message: str
) -> None:
    env = tmp_path / "odd.py"
    env.write_text(
        "import gymnasium, numpy\n"
        "from gymnasium.spaces import Box, Text\n"
        "class Odd(gymnasium.Env):\n"
        f"    observation_space = {seen}\n"
        f"    action_space = {taken}\n"
    )
    ended = job.train("--env.entry_point", f"{env}:Odd", "--env.probe", "false")
    assert ended.code == 2
    assert message in ended.err


def test_the_store_of_another_run_is_not_overwritten(job: Job, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    (folder / "state.json").write_text('{"start": "/another/run, started at 1"}')
    ended = job.train("--replay.folder", folder)
    assert ended.code == 2
    assert "holds the replay store of another run (/another/run, started at 1)" in ended.err
