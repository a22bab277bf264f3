from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path, PosixPath

import msgspec
import pytest
import torch

from rlinf_async.backends.base import SchedulerConfig
from rlinf_async.backends.checkpoint import folders, reading, tensor_file
from rlinf_async.backends.checkpoint import folders as metadata
from rlinf_async.backends.checkpoint.folders import CheckpointError
from rlinf_async.backends.fsdp.config import FSDPConfig
from rlinf_async.backends.fsdp.manager import FSDPModelManager
from rlinf_async.backends.fsdp.state import check_fits
from tests.backends.checkpoint.damage import sign
from tests.backends.fsdp_helpers import POLICY, set_up, train_steps

CONFIG = FSDPConfig(policy=POLICY, scheduler=SchedulerConfig(kind="linear", total_steps=20))


def trained(steps: int = 3) -> FSDPModelManager:
    manager = set_up(CONFIG)
    train_steps(manager, range(steps))
    return manager


def test_a_resumed_run_equals_one_that_never_stopped(tmp_path: Path) -> None:
    manager, resumed = trained(), set_up(CONFIG)
    manager.save_checkpoint(tmp_path / "checkpoint", {"note": 5, "tensor": torch.ones(2)})
    expected_noise = torch.randn(3)
    expected = train_steps(manager, range(3, 6))
    extras = resumed.load_checkpoint(tmp_path / "checkpoint", restore_rng=True)
    assert torch.equal(torch.randn(3), expected_noise)
    assert train_steps(resumed, range(3, 6)) == expected
    assert resumed.steps == manager.steps == 6
    assert resumed.optimizer.param_groups[0]["lr"] == manager.optimizer.param_groups[0]["lr"]
    assert extras[0]["note"] == 5
    assert extras[0]["tensor"].tolist() == [1.0, 1.0]


def test_loading_leaves_the_random_numbers_of_the_process_alone(tmp_path: Path) -> None:
    manager = trained()
    manager.save_checkpoint(tmp_path / "checkpoint")
    torch.rand(1)
    before = torch.get_rng_state()
    manager.load_checkpoint(tmp_path / "checkpoint")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_checkpoint_from_before_the_first_step_can_be_loaded(tmp_path: Path) -> None:
    manager, resumed = set_up(CONFIG), trained()
    manager.save_checkpoint(tmp_path / "checkpoint")
    resumed.load_checkpoint(tmp_path / "checkpoint")
    assert train_steps(resumed, range(3)) == train_steps(manager, range(3))


def test_saving_again_replaces_the_checkpoint_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    manager, resumed = trained(), set_up(CONFIG)
    manager.save_checkpoint(tmp_path / "checkpoint")
    train_steps(manager, range(3, 5))
    manager.save_checkpoint(tmp_path / "checkpoint")
    resumed.load_checkpoint(tmp_path / "checkpoint")
    assert resumed.steps == 5
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]


def test_a_save_that_fails_keeps_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = trained()
    manager.save_checkpoint(tmp_path / "checkpoint")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    train_steps(manager, range(3, 4))
    monkeypatch.setattr(os, "write", full)
    manager.offload_param_and_grad()
    with pytest.raises(OSError, match=r"No space left.*rank_0_of_1\.safetensors"):
        manager.save_checkpoint(tmp_path / "checkpoint")
    assert manager.param_offloaded
    resumed = set_up(CONFIG)
    resumed.load_checkpoint(tmp_path / "checkpoint")
    assert resumed.steps == 3


def test_a_kill_between_the_two_renames_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    manager, resumed = trained(), set_up(CONFIG)
    manager.save_checkpoint(tmp_path / "checkpoint")
    (tmp_path / "checkpoint").rename(tmp_path / ".checkpoint.previous")
    resumed.load_checkpoint(tmp_path / "checkpoint")
    assert resumed.steps == 3


def test_a_kill_while_writing_does_not_hinder_the_next_save(tmp_path: Path) -> None:
    left = tmp_path / ".checkpoint.partial"
    left.mkdir()
    (left / "rank_7_of_8.pt").write_bytes(b"half")
    trained(1).save_checkpoint(tmp_path / "checkpoint")
    assert not left.exists()
    assert not (tmp_path / "checkpoint" / "rank_7_of_8.pt").exists()


def test_what_was_offloaded_stays_offloaded(tmp_path: Path) -> None:
    manager = trained()
    manager.offload_param_and_grad()
    manager.offload_optimizer()
    manager.save_checkpoint(tmp_path / "checkpoint")
    manager.load_checkpoint(tmp_path / "checkpoint")
    assert manager.param_offloaded
    assert manager.optimizer_offloaded


def flip_a_bit(folder: Path) -> None:
    target = folder / "rank_0_of_1.safetensors"
    content = bytearray(target.read_bytes())
    content[len(content) // 2] ^= 1
    target.write_bytes(content)


def cut_short(folder: Path) -> None:
    target = folder / "rank_0_of_1.safetensors"
    target.write_bytes(target.read_bytes()[:-10])


def lose_a_file(folder: Path) -> None:
    (folder / "rank_0_of_1.pt").unlink()


def lose_the_metadata(folder: Path) -> None:
    (folder / "metadata.json").unlink()


def spoil_the_metadata(folder: Path) -> None:
    (folder / "metadata.json").write_text('{"format": "one"}')


def come_from_the_future(folder: Path) -> None:
    metadata = msgspec.json.decode((folder / "metadata.json").read_bytes())
    (folder / "metadata.json").write_bytes(msgspec.json.encode(metadata | {"format": 99}))


def change_the_metadata(folder: Path, **fields: object) -> None:
    known = msgspec.json.decode((folder / "metadata.json").read_bytes())
    (folder / "metadata.json").write_bytes(msgspec.json.encode(known | fields | {"crc32": None}))


def name_a_file_elsewhere(folder: Path) -> None:
    file = folder.parent / "elsewhere"
    file.write_bytes(b"{}")
    record = {"name": "../elsewhere", "size": 2, "checksum": tensor_file.checksum(file)}
    change_the_metadata(folder, model=[record])


def forget_the_ranks(folder: Path) -> None:
    change_the_metadata(folder, own=[])


def name_a_tensor_that_is_not_there(folder: Path) -> None:
    change_the_metadata(folder, aliases={"model.a": "model.b"})


def without(folder: Path, what: str) -> None:
    """The same, but for what a rank keeps of its own under a name."""
    file = folder / "rank_0_of_1.pt"
    own = torch.load(file, weights_only=True)
    del own[what]
    torch.save(own, file)
    record = {"name": file.name, "size": file.stat().st_size}
    change_the_metadata(folder, own=[record | {"checksum": tensor_file.checksum(file)}])


def lose_the_progress(folder: Path) -> None:
    without(folder, "progress")


def lose_a_moment(folder: Path) -> None:
    file = folder / "rank_0_of_1.safetensors"
    file.write_bytes(file.read_bytes().replace(b".exp_avg_sq", b".exp_avg_cb"))
    sign(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (name_a_file_elsewhere, r"metadata\.json names a file outside of its folder: '\.\./else"),
        (forget_the_ranks, "has no file with a rank's own state"),
        (name_a_tensor_that_is_not_there, "says that 'model.a' is 'model.b', which is in no file"),
        (
            lose_the_progress,
            r"lacks a part of a rank's own state \('progress'\): it was not",
        ),
        (
            lose_a_moment,
            r"state of '.*' is incomplete: .*_1\.safetensors has .* no file has its exp_avg_sq",
        ),
        (flip_a_bit, r"rank_0_of_1\.safetensors is damaged: its checksum"),
        (cut_short, r"rank_0_of_1\.safetensors is damaged: it has \d+ bytes"),
        (lose_a_file, r"rank_0_of_1\.pt is missing"),
        (lose_the_metadata, r"is not a checkpoint: it has no metadata\.json"),
        (spoil_the_metadata, r"metadata\.json cannot be read"),
        (come_from_the_future, "has format 99"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_nothing_is_loaded(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    trained().save_checkpoint(tmp_path / "checkpoint")
    damage(tmp_path / "checkpoint")
    manager, untouched = set_up(CONFIG), set_up(CONFIG)
    with pytest.raises(CheckpointError, match=message):
        manager.load_checkpoint(tmp_path / "checkpoint")
    for ours, theirs in zip(manager.model.parameters(), untouched.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("hidden", "message"),
    [
        ((7,), r"of another model: unexpected 'actor\.4\.bias'"),
        ((7, 6, 6), r"of another model: missing 'actor\.6\.weight'"),
        ((7, 5), r"'actor\.2\.weight' is \[6, 7\] in .*safetensors, \[5, 7\] in the model"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    tmp_path: Path, hidden: tuple[int, ...], message: str
) -> None:
    trained().save_checkpoint(tmp_path / "checkpoint")
    other = set_up(FSDPConfig(policy=msgspec.structs.replace(POLICY, hidden_sizes=hidden)))
    with pytest.raises(CheckpointError, match=message):
        other.load_checkpoint(tmp_path / "checkpoint")


def test_a_checkpoint_cannot_run_code(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    trained().save_checkpoint(folder)
    torch.save({"progress": Path("anything")}, folder / "rank_0_of_1.pt")
    size = (folder / "rank_0_of_1.pt").stat().st_size
    record = metadata.FileRecord(
        "rank_0_of_1.pt", size, tensor_file.checksum(folder / "rank_0_of_1.pt")
    )
    known = metadata.read_metadata(folder)
    assert isinstance(known, metadata.Metadata)
    changed = msgspec.structs.replace(known, own=(record,))
    (folder / "metadata.json").write_bytes(metadata.encode(changed))
    refused = pytest.raises(CheckpointError, match="holds more than tensors and plain values")
    # As megatron-core lets every file of the process, once it is imported.
    with torch.serialization.safe_globals([PosixPath]), refused:
        set_up(CONFIG).load_checkpoint(folder)


def write_format_1(manager: FSDPModelManager, folder: Path) -> None:
    """A folder as the version before this one wrote it, by two ranks."""
    manager.save_checkpoint(folder)
    saved = reading.read_checkpoint(folder)
    files = []
    for rank in range(2):
        state = {}
        for name, tensor in saved.tensors.items():
            whole = tensor.whole().clone()
            if whole.ndim == 0 or name.endswith("_moments"):
                if rank == 0:
                    state[name] = {"data": whole, "start": 0, "rows": -1}
                continue
            start = rank * -(-len(whole) // 2)
            rows = whole[start : start + -(-len(whole) // 2)].clone()
            state[name] = {"data": rows, "start": start, "rows": len(whole)}
        target = folder / f"rank_{rank}_of_2.pt"
        torch.save({"state": state, **saved.own[0]}, target)
        files.append(
            {
                "name": target.name,
                "size": target.stat().st_size,
                "checksum": tensor_file.checksum(target),
            }
        )
    note = {"format": 1, "world_size": 2, "files": files}
    (folder / "metadata.json").write_bytes(msgspec.json.encode(note))


def test_a_folder_of_format_1_can_still_be_loaded(tmp_path: Path) -> None:
    manager, resumed = trained(), set_up(CONFIG)
    write_format_1(manager, tmp_path / "checkpoint")
    resumed.load_checkpoint(tmp_path / "checkpoint")
    assert train_steps(resumed, range(3, 6)) == train_steps(manager, range(3, 6))


def test_elements_that_are_in_no_file_are_counted(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    box = tensor_file.Box("w", (0, 0), (2, 3), 0)
    entry = tensor_file.TensorEntry("w", torch.float32, (2, 3), (box,))
    content = tensor_file.header([entry], {"w": (5, 3)}) + bytes(24)
    tensors = tensor_file.write_file(folder, "rank_0_of_1.safetensors", content)
    note = metadata.Metadata(strategy=metadata.SavedStrategy(), tensors=(tensors,), own=())
    folders.write_whole(folder / "metadata.json", metadata.encode(note))
    with pytest.raises(CheckpointError, match="'w': 9 of its 15 elements are in no file"):
        reading.read_checkpoint(folder)


def test_another_dtype_is_refused() -> None:
    saved = reading.SavedTensor("w", (2,), torch.float64, Path("a file"))
    with pytest.raises(CheckpointError, match=r"torch\.float64 in a file"):
        check_fits(torch.zeros(2), saved, "w")
