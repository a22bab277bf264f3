"""What a new user gets wrong: one clear message and exit code 2, before any worker starts."""

from __future__ import annotations

import os
import pathlib
import sys

import pytest

from tests.jobs.embodied.kit import Job

pytestmark = pytest.mark.usefixtures("no_cluster")

TOO_MANY = (
    "100000 samples are more than an actor gets in one iteration: 1 env workers x 4 envs x 16"
)


def said(job: Job, *arguments: object) -> str:
    """The one line that the user sees."""
    ended = job.train(*arguments)
    assert ended.code == 2, ended.err
    assert ended.out == ""
    [line] = ended.err.splitlines()
    assert line.startswith("error: ")
    assert not job.out.exists() or arguments[0] in ("--out", "--resume")
    return line


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("env.id", "CartPol-v1", "no env is called 'CartPol-v1'; did you mean 'CartPole-v1'"),
        ("env.id", "FetchReachDense-v5", "did you mean 'FetchReachDense-v4'"),
        ("env.idd", "CartPole-v1", "env.idd: unknown name (did you mean 'id'?)"),
        ("env.envs", "many", "env.envs: expected an integer, found 'many'"),
        ("env.envs", "99999999", "envs is 99999999; one env worker can have 65536 at most"),
        ("cluster.env_workers", "99999999", "env_workers is 99999999; it must be at most 4096"),
        ("cluster.rollout_workers", "99999999", "rollout_workers is 99999999; it must be at most"),
        ("cluster.threads", "99999999", "threads is 99999999; it must be at most 4096"),
        ("env.envs", "3", "envs = 3 cannot be divided into stages = 2 groups"),
        ("env.entry_point", "tests.jobs.embodied.envs:none", "has no function 'none'"),
        (
            "env.entry_point",
            "tests.jobs.embodied.envs:broken",
            "RuntimeError: no licence for the simul",
        ),
        ("env.entry_point", "tests.jobs.embodied.envs:rooms", "the observation space Graph("),
        ("training.total_steps", "0", "total_steps is 0; it must be at least 1"),
        ("training.max_staleness", "-1", "max_staleness is -1"),
        ("actor.ppo.minibatch_size", "100000", TOO_MANY),
        (
            "observe.sinks",
            "wanb",
            "no metrics sink is called 'wanb'; did you mean 'wandb'?",
        ),
        ("seed", "-1", "(--seed): seed: -1 is below 0"),
        ("actor.seed", "-1", "seed is -1; it must be at least 0"),
        ("evaluation.seed", "-1", "seed is -1; they must be at least 1, 0 and 0"),
        (
            "evaluation.target_success_rate",
            "nan",
            "target_success_rate is nan; it must be a finite number",
        ),
        ("evaluation.target_return", "nan", "target_return is nan; it must be a finite number"),
        ("cluster.heartbeat_limit", "0", "heartbeat_limit is 0.0; it must be at least 1"),
        ("cluster.heartbeat_limit", "nan", "heartbeat_limit is nan; it must be a finite number"),
        ("cluster.deadlock_after", "0", "deadlock_after is 0.0; it must be above 0, or 'none'"),
        ("cluster.max_restarts", "-1", "max_restarts is -1; it must be at least 0"),
        ("actor.fsdp.optimizer.lr", "nan", "lr is nan; it must be a finite number"),
        ("actor.fsdp.optimizer.eps", "nan", "eps is nan; it must be a finite number"),
        ("actor.fsdp.optimizer.weight_decay", "nan", "weight_decay is nan"),
        ("actor.fsdp.optimizer.max_grad_norm", "nan", "max_grad_norm is nan"),
        ("actor.fsdp.policy.observation_clip", "nan", "observation_clip is nan"),
        ("actor.ppo.target_kl", "nan", "target_kl is nan; it must be a finite number"),
        ("actor.ppo.loss.clip_high", "nan", "clip_high is nan; it must be a finite number"),
        ("actor.ppo.loss.value_coefficient", "inf", "value_coefficient is inf; it must be a"),
        ("cluster.backend", "kubernetes", "cluster.backend: expected one of"),
        ("cluster.actors", "2", "use backend = 'process', or actors = 1"),
        ("cluster.actors", "3", "2 trajectories cannot be divided among 3 actors"),
        ("actor.fsdp.device", "cuda:99", "takes the actors' devices from cluster.placement.actor"),
        ("cluster.placement.actor", "0-999", "device 999 is not there: the machine has"),
        ("cluster.placement", "collocate", "did you mean 'collocated'?"),
        ("actor.fsdp.policy.name", "mpl", "no policy is called 'mpl'"),
        ("actor.fsdp.policy.action_size", "3", "3 was given, but CartPole-v1 has 2: leave it out"),
        (
            "actor.fsdp.policy.vision_language.bins",
            "7",
            "bins: it is a setting of policy 'vision_language_action', but the policy is 'mlp_cat",
        ),
        ("actor.fsdp.policy.vision_language.lora.rank", "4", "vision_language.lora.rank: it is"),
        ("actor.fsdp.policy.memory_size", "8", "it is a setting of policy 'gru'"),
        ("actor.fsdp.policy.channels", "[4]", "it is a setting of policy 'cnn'"),
        ("env.max_memory_mb", "0", "max_memory_mb is 0.0; it must be megabytes above 0, or 'none'"),
        ("env.max_memory_mb", "500", "env.max_memory_mb: with cluster.backend = 'local' the env"),
        ("env.max_failures", "-1", "max_failures is -1; it must be at least 0"),
        ("env.max_failures", "7", "with cluster.backend = 'local' no env worker is started again"),
        ("env.autoreset", "same_step", "autoreset is 'same_step', but environments of simulator"),
        ("actor.fsdp.pretrained", "model", "trains a registered policy, not a language model"),
        ("actor.advantage.name", "gea", "no advantage is called 'gea'; did you mean 'gae'?"),
        ("actor.ppo.loss.name", "gae", "no loss is called 'gae' (known: 'ppo'"),
    ],
)
def test_a_wrong_setting_is_named_with_what_would_be_right(
    job: Job, setting: str, value: str, message: str
) -> None:
    line = said(job, f"--{setting}", value)
    assert message in line
    assert setting.split(".")[0] in line


def test_an_interface_that_this_host_does_not_have_is_named_with_those_there_are(job: Job) -> None:
    line = said(job, "--cluster.backend", "ray", "--cluster.ray.interface", "eth99")
    assert "cluster.ray.interface: " in line
    assert "has no interface 'eth99' with an IPv4 address: there is lo (127.0.0.1)" in line


def test_check_finds_the_same_and_a_right_file_is_ok(job: Job) -> None:
    assert job.command("check", job.file, "--env.id", "CartPol-v1").code == 2
    found = job.command("check", job.file)
    assert (found.code, found.err) == (0, "")
    assert found.out.endswith(f"\n{job.file}: ok\n")


def test_check_prints_the_device_of_every_worker_of_this_and_of_a_stated_machine(job: Job) -> None:
    rows = [line for line in job.command("check", job.file).out.splitlines() if "│" in line]
    assert [row.split("│")[1].strip() for row in rows] == ["actor", "rollout", "env"]
    few = ("--cluster.placement.env", "0", "--cluster.placement.preset", "disaggregated")
    stated = job.command("check", job.file, "--devices", "2x1xH100", *few)
    assert stated.code == 2  # nothing is left for one of the two others
    assert "2 devices are needed (actor 1, rollout 1), but 1 of 2 are free" in stated.err
    stated = job.command("check", job.file, "--devices", "2x1xH100")
    assert [row.split("│")[3:5] for row in stated.out.splitlines() if "cuda" in row] == [
        [" host0 ", " cuda:0 "],
        [" host1 ", " cuda:0 "],
    ]
    two = ("--devices", "4xH100", "--cluster.placement.rollout.devices_per_worker", "2")
    assert "a policy computes on one device" in job.command("check", job.file, *two).err
    wrong = job.command("check", job.file, "--devices", "many")
    assert wrong.code == 2
    assert "--devices: 'many' describes no machine" in wrong.err


def test_a_missing_extra_says_what_to_install(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    assert "pip install 'rlinf-async[embodied]'" in said(job)


@pytest.mark.parametrize("place", ["small.toml", "small.toml/run"])
def test_a_run_folder_that_is_a_file_is_refused(job: Job, place: str) -> None:
    line = said(job, "--out", job.file.parent / place)
    assert str(job.file) in line
    assert "is a file" in line


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_run_folder_that_may_not_be_written_is_refused(job: Job) -> None:
    job.out.parent.chmod(0o500)
    try:
        assert "you may not write there" in said(job)
    finally:
        job.out.parent.chmod(0o700)


def test_somebody_elses_folder_is_refused(job: Job, tmp_path: pathlib.Path) -> None:
    mine = tmp_path / "photos"
    mine.mkdir()
    (mine / "cat.jpg").write_bytes(b"")
    assert "holds 'cat.jpg'" in said(job, "--out", mine, "--resume")
