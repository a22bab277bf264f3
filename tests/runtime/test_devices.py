"""The devices of a host, and what a worker's process sees of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import rlinf_async as ra
from rlinf_async.runtime import launching as devices
from rlinf_async.runtime.launching import (
    device_environment,
    host_devices,
    pinned_cores,
    stated_devices,
)
from rlinf_async.workers import Device

GPUS = tuple(Device("cuda", index) for index in range(3))


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A host with three GPUs, two of them near the core 0 and one near a core that is not there."""
    nvidia, pci = tmp_path / "nvidia", tmp_path / "pci"
    for number, cores in enumerate(["0", "0", "9990-9991,9995"]):
        address = f"0000:0{number}:00.0"
        (nvidia / address).mkdir(parents=True)
        (pci / address).mkdir(parents=True)
        (pci / address / "local_cpulist").write_text(f"{cores}\n")
    monkeypatch.setattr(devices, "_NVIDIA", nvidia)
    monkeypatch.setattr(devices, "_PCI", pci)
    monkeypatch.setattr(devices, "_FILES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    return pci


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, 3),
        ("0,2", 2),
        ("0,1,2,3", 3),
        ("0,3,1", 1),
        (" 1 ", 1),
        ("", 0),
        ("-1", 0),
        ("0,-1,1", 1),
        ("NoDevFiles", 0),
        ("GPU-a,GPU-b", 2),
        ("MIG-a,MIG-b,MIG-c,MIG-d", 4),
    ],
)
@pytest.mark.usefixtures("three_gpus")
def test_the_hosts_devices_are_those_that_cuda_sees(
    visible: str | None, seen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = host_devices()
    assert [one.index for one in found if one.kind == "cuda"] == list(range(seen))
    assert found


@pytest.mark.parametrize(
    ("files", "listed", "seen", "cores"),
    [
        ([], True, 3, {0}),  # nothing has used CUDA on this host yet
        (["nvidia0", "nvidia1", "nvidia2", "nvidiactl"], True, 3, {0}),
        (["nvidia2", "nvidiactl", "nvidia-uvm"], True, 1, {1}),  # a container with one of three
        (["nvidia0", "nvidia1", "nvidiactl"], False, 2, set[int]()),  # a sandbox without the list
    ],
)
def test_a_container_has_the_accelerators_of_which_it_has_the_files(
    files: list[str],
    listed: bool,
    seen: int,
    cores: set[int],
    three_gpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for number, folder in enumerate(sorted((tmp_path / "nvidia").iterdir())):
        (folder / "information").write_text(f"Bus Type: PCIe\nDevice Minor: \t {number}\n")
    (three_gpus / "0000:02:00.0" / "local_cpulist").write_text("1\n")
    for name in files:
        (tmp_path / name).touch()
    if not listed:
        monkeypatch.setattr(devices, "_NVIDIA", tmp_path / "none")
    assert len([one for one in host_devices() if one.kind == "cuda"]) == seen
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    assert pinned_cores(GPUS[:1]) == cores


@pytest.mark.parametrize(
    ("text", "hosts", "count", "kind"),
    [
        ("8xH100", [""], 8, "cuda"),
        ("1x8xH100", [""], 8, "cuda"),
        ("2x4xA100-80GB", ["host0", "host1"], 8, "cuda"),
        ("16xcpu", [""], 16, "cpu"),
    ],
)
def test_a_machine_can_be_stated(text: str, hosts: list[str], count: int, kind: str) -> None:
    found = stated_devices(text)
    assert list(dict.fromkeys(one.host for one in found)) == hosts
    assert len(found) == count
    assert {one.kind for one in found} == {kind}
    assert [one.index for one in found] == list(range(count // len(hosts))) * len(hosts)


@pytest.mark.parametrize("text", ["", "H100", "8x", "8", "0xH100", "0x8xH100", "2x0xH100", "axb"])
def test_a_description_of_no_machine_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="describes no machine: write hosts x devices x model"):
        stated_devices(text)


@pytest.mark.parametrize("text", ["99999999x8xH100", "257x256xA100", f"{'9' * 5000}xcpu"])
def test_a_machine_that_is_too_large_to_go_through_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"has more than 65,536 devices, .* a smaller machine"):
        stated_devices(text)


@pytest.mark.parametrize(
    ("given", "shown"), [(None, "0,2"), ("4,5,6", "4,6"), ("GPU-a,GPU-b,GPU-c", "GPU-a,GPU-c")]
)
@pytest.mark.usefixtures("three_gpus")
def test_a_process_is_shown_its_own_devices_alone(
    given: str | None, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    found = device_environment((GPUS[0], GPUS[2]))
    assert found.pop("CUDA_VISIBLE_DEVICES") == shown
    # Numbers that were given are in CUDA's own order, unless that is set too.
    assert found == ({} if given else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert device_environment((Device("cpu", 1),)) == {}
    assert device_environment(()) == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ra.BuildError, match="to have cuda:7, but CUDA_VISIBLE_DEVICES is"):
        device_environment((Device("cuda", 7),))


@pytest.mark.parametrize(
    ("visible", "cores"),
    [("0", {0}), ("0,1", {0}), ("2", set()), ("0,2", {0}), ("GPU-a", set()), ("7", set())],
)
@pytest.mark.usefixtures("three_gpus")
def test_a_process_keeps_to_the_cores_near_its_devices(
    visible: str, cores: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    assert pinned_cores(GPUS[:1]) == cores


def test_a_process_keeps_to_the_cores_that_are_its_devices_and_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 2, 5})
    assert pinned_cores((Device("cpu", 1), Device("cpu", 5))) == {1, 5}
    assert pinned_cores((Device("cpu", 1), Device("cpu", 7))) == {1}
    assert pinned_cores((Device("cpu", 7),)) == set()
    assert pinned_cores(()) == set()


class Seeing(ra.Worker):
    """Tells what it sees."""

    async def sees(self) -> tuple[str, str | None]:
        return self.device, os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize("isolated", [True, False])
def test_a_worker_names_its_device_as_torch_does_in_its_process(
    isolated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    make = ra.Cluster.process if isolated else ra.Cluster.local

    async def main() -> list[tuple[str, str | None]]:
        async with make(devices=GPUS) as cluster:
            workers = await cluster.launch(Seeing, count=2, placement=ra.Ranks([1, [2, 0]]))
            alone = await cluster.launch(Seeing, name="alone")
            return [*await workers.call(Seeing.sees), *await alone.call(Seeing.sees)]

    seen = ra.run(main())
    if isolated:
        assert seen == [("cuda:0", "1"), ("cuda:0", "2,0"), ("cpu", None)]
    else:
        assert seen == [("cuda:1", None), ("cuda:2", None), ("cpu", None)]
