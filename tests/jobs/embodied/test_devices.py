"""Which device each actor takes, and what they talk over. No accelerator is needed to know."""

from __future__ import annotations

import pytest

from rlinf_async.backends.fsdp.config import EmbodiedTrainerConfig, FSDPConfig
from rlinf_async.backends.fsdp.offload import rank_device
from rlinf_async.config import ConfigError, MissingDevice
from rlinf_async.runtime.jobs import config as jobs_config
from rlinf_async.runtime.jobs.embodied.config import ClusterConfig, EmbodiedConfig, TrainingConfig
from rlinf_async.workers.context import Device
from rlinf_async.workers.env import EnvConfig


def config(device: str, actors: int) -> EmbodiedConfig:
    return EmbodiedConfig(
        env=EnvConfig(id="CartPole-v1"),
        training=TrainingConfig(total_steps=1, steps_per_iteration=1),
        actor=EmbodiedTrainerConfig(fsdp=FSDPConfig(device=device)),
        cluster=ClusterConfig(actors=actors),
    )


@pytest.mark.parametrize(
    ("device", "actors", "collective"),
    [("cpu", 1, None), ("cpu", 2, "gloo"), ("cuda", 1, None), ("cuda", 2, "nccl")],
)
def test_actors_talk_over_what_their_device_can(
    device: str, actors: int, collective: str | None
) -> None:
    assert config(device, actors).collective == collective


def test_several_actors_take_an_accelerator_each() -> None:
    assert [rank_device("cuda", 2, rank) for rank in (0, 1)] == ["cuda:0", "cuda:1"]
    assert rank_device("cuda", 1, 0) == "cuda"
    assert rank_device("cuda:1", 1, 0) == "cuda:1"
    assert rank_device("cpu", 2, 1) == "cpu"


def test_what_the_actors_need_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    two = (Device("cuda", 0), Device("cuda", 1))
    monkeypatch.setattr(jobs_config, "host_devices", lambda: two)
    jobs_config.check_device("cuda", actors=2, path=("actor", "fsdp", "device"))
    jobs_config.check_device("cuda:1", actors=1, path=("actor", "fsdp", "device"))
    with pytest.raises(MissingDevice, match="3 actors need an accelerator each"):
        jobs_config.check_device("cuda", actors=3, path=("actor", "fsdp", "device"))
    with pytest.raises(ConfigError, match="2 actors cannot share 'cuda:1': write 'cuda'"):
        jobs_config.check_device("cuda:1", actors=2, path=("actor", "fsdp", "device"))
