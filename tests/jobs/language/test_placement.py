"""What follows from the devices of a language run's roles, on stated machines and on this one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf_async.backends.vllm import part as vllm_part
from rlinf_async.backends.vllm.library import _arguments
from rlinf_async.config import ConfigError, Document
from rlinf_async.runtime.jobs.language import backends as placement
from rlinf_async.runtime.jobs.language.backends import actor_config, placed, plan_roles
from rlinf_async.runtime.jobs.language.checks import check_agent, check_families
from rlinf_async.runtime.jobs.language.config import LanguageConfig
from rlinf_async.runtime.launching import device_environment, stated_devices
from tests.interpreters import OURS, make_python
from tests.jobs.language.kit import TINY, Job


def config(tmp_path: Path, **settings: str) -> LanguageConfig:
    """The tiny job, with settings by path (``__`` for a dot)."""
    file = tmp_path / "run.toml"
    file.write_text(TINY.format(data=tmp_path / "sums.jsonl"))
    overrides: dict[str, str | None] = {
        name.replace("__", "."): value for name, value in settings.items()
    }
    return Document.read(file).to(LanguageConfig, overrides)


@pytest.mark.parametrize(
    ("machine", "settings", "engine", "rollouts", "actors", "environment"),
    [
        ("4xcpu", {}, (1, 0.9, False), 1, ("cpu", None, 1), {}),
        ("1xH100", {}, (1, 0.9, True), 1, ("cuda:0", None, 1), {"CUDA_VISIBLE_DEVICES": "0"}),
        ("2xH100", {}, (1, 0.9, False), 1, ("cuda:0", None, 1), {"CUDA_VISIBLE_DEVICES": "1"}),
        (
            "8xH100",
            {"cluster__placement__rollout__devices_per_worker": "2"},
            (2, 0.9, False),
            3,
            ("cuda:0", "nccl", 2),
            {"CUDA_VISIBLE_DEVICES": "2,3"},
        ),
        (
            "8xH100",
            {"cluster__placement__preset": "collocated", "cluster__actors": "2",
             "cluster__placement__rollout__devices_per_worker": "4"},
            (4, 0.9, True),
            2,
            ("cuda:0", "nccl", 2),
            {"CUDA_VISIBLE_DEVICES": "0,1,2,3"},
        ),
        (
            "1xH100",
            {"cluster__placement__actor": "cpu",
             "cluster__placement__rollout__devices_per_worker": "0.5"},
            (1, 0.45, False),
            2,
            ("cpu", None, 1),
            {"CUDA_VISIBLE_DEVICES": "0"},
        ),
        (
            "2xH100",
            {"cluster__critics": "1", "cluster__placement__rollout": "shared with critic"},
            (1, 0.9, True),
            1,
            ("cuda:0", None, 1),
            {"CUDA_VISIBLE_DEVICES": "1"},
        ),
        (
            "2xH100",
            {"cluster__placement": "collocated", "rollout__vllm__sleep": "false",
             "rollout__vllm__gpu_memory": "0.3"},
            (1, 0.3, False),
            2,
            ("cuda:0", "nccl", 2),
            {"CUDA_VISIBLE_DEVICES": "0"},
        ),
    ],
    ids=str,
)  # fmt: skip
def test_engines_and_trainers_get_what_follows_from_their_devices(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    machine: str,
    settings: dict[str, str],
    engine: tuple[int, float, bool],
    rollouts: int,
    actors: tuple[str, str | None, int],
    environment: dict[str, str],
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    asked = config(tmp_path, rollout__backend="vllm", **settings)
    plan = plan_roles(asked, stated_devices(machine))
    found = placed(asked, plan)
    folder: Any = SimpleNamespace(context=64, sees=False)
    arguments = _arguments(found.rollout.vllm, folder, 0, on_cpu=not plan.accelerated("rollout"))
    tensor_parallel, memory, sleep = engine
    assert arguments["tensor_parallel_size"] == tensor_parallel
    assert arguments["gpu_memory_utilization"] == pytest.approx(memory)
    assert arguments["enable_sleep_mode"] is sleep
    assert found.rollout_workers == rollouts
    device, collective, count = actors
    trainer = actor_config(found, tmp_path, plan.device("actor", own_process=True))
    assert trainer.fsdp.device == device
    assert plan.collective("actor") == collective
    assert found.actors == count
    first = [plan.machine[at] for at in plan.ranks["rollout"][0]]
    seen = device_environment(first)
    assert {name: seen[name] for name in environment} == environment
    assert bool(seen) == bool(environment)
    again = plan_roles(found, stated_devices(machine))  # what the run launches by
    assert again.ranks == plan.ranks


@pytest.mark.parametrize(
    ("machine", "settings", "error"),
    [
        (
            "1xH100",
            {"training__max_staleness": "1"},
            "max_staleness is 1, but rollout workers share devices",
        ),
        (
            "1xH100",
            {"rollout__vllm__tensor_parallel": "2"},
            "tensor_parallel is 2, but each rollout worker has 1 devices",
        ),
        (
            "2xH100",
            {"cluster__placement": "collocated", "actor__strategy": "fsdp1"},
            "have to be offloaded, which fsdp1 cannot on several GPUs",
        ),
    ],
)
def test_settings_that_contradict_the_devices_are_refused(
    tmp_path: Path, machine: str, settings: dict[str, str], error: str
) -> None:
    asked = config(tmp_path, rollout__backend="vllm", **settings)
    with pytest.raises(ConfigError, match=error):
        placed(asked, plan_roles(asked, stated_devices(machine)))


@pytest.mark.parametrize(
    ("machine", "vllm", "refused"),
    [("2xH100", "0.32.0", True), ("2xH100", "0.32.0+cpu", False), ("4xcpu", "0.32.0", False)],
)
def test_an_engine_for_gpus_is_not_started_where_it_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str, vllm: str, refused: bool
) -> None:
    monkeypatch.setattr(vllm_part, "version", lambda name: vllm)
    asked = config(tmp_path, rollout__backend="vllm", cluster__placement__rollout="cpu")
    plan = plan_roles(asked, stated_devices(machine))
    if not refused:
        assert placed(asked, plan).rollout.vllm.gpu_memory is None
        return
    with pytest.raises(ConfigError, match="the installed vLLM computes on GPUs alone"):
        placed(asked, plan)


@pytest.mark.parametrize(("each", "refused"), [("2", False), ("4", True), ("1", False)])
def test_heads_that_the_devices_of_an_engine_do_not_divide_are_named(
    tmp_path: Path, each: str, refused: bool
) -> None:
    asked = config(
        tmp_path, rollout__backend="vllm", cluster__placement__rollout__devices_per_worker=each
    )
    found = placed(asked, plan_roles(asked, stated_devices("8xH100")))
    if not refused:
        check_families(found)
        return
    with pytest.raises(ConfigError, match=r"2 attention heads, which 4 devices .*: use 2 "):
        check_families(found)


@pytest.mark.parametrize(
    ("machine", "backend", "actor", "hidden"),
    [
        ("1xH100", "megatron", "cpu", True),
        ("2xH100", "megatron", "0", False),
        ("1xH100", "fsdp", "cpu", False),
        ("2xcpu", "megatron", "cpu", False),
    ],
)
def test_megatron_sees_no_gpu_where_it_is_to_have_none(
    tmp_path: Path, machine: str, backend: str, actor: str, hidden: bool
) -> None:
    asked = config(tmp_path, actor__backend=backend, cluster__placement__actor=actor)
    found = placement.environment_of(asked, plan_roles(asked, stated_devices(machine)), "actor")
    assert (found.get("CUDA_VISIBLE_DEVICES") == "") is hidden


def test_a_worker_keeps_to_the_cores_that_a_run_gives_its_role(job: Job) -> None:
    """The verifier gives a reward of 1 for each core that its process may use."""
    summary = job.succeed(
        *("--cluster.backend", "process", "--cluster.placement.reward", "0"),
        *("--data.verifier", "tests.jobs.language.verifiers:cores", "--training.iterations", 1),
    )
    assert summary.samples > 0
    assert {float(row["reward"]) for row in job.iterations} == {1.0}


def test_an_agent_is_looked_up_as_its_workers_will_do_it(tmp_path: Path) -> None:
    """With their Python and their environment variables; on the hosts of Ray by them alone."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "only_theirs.py").write_text("async def acts(episode): ...\n")
    settings = {
        "episode__run": "only_theirs:acts",
        "cluster__episode_workers": "1",
        "cluster__placement__episode__python": str(make_python(tmp_path / "other", OURS)),
    }

    def check(**more: str) -> None:
        changed = config(tmp_path, **(settings | more))
        check_agent(changed, plan_roles(changed, stated_devices("4xcpu")))

    path = {"cluster__placement__episode__env_vars__PYTHONPATH": str(tmp_path / "theirs")}
    with pytest.raises(ConfigError, match="No module named 'only_theirs'"):
        check(cluster__backend="process")
    check(cluster__backend="process", **path)
    check(cluster__backend="ray", cluster__placement__episode__python="/opt/of/its/hosts/python")
    check(
        cluster__backend="ray",
        cluster__placement__episode__python="",
        cluster__placement__episode__runtime_env__working_dir="/of/its/hosts",
    )
    with pytest.raises(ConfigError, match="No module named 'only_theirs'"):
        check(cluster__backend="ray", cluster__placement__episode__python="")
