"""Checkpoints cut anew, offline: nothing is lost, and the way back gives the same bits."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors import safe_open

from rlinf_async.backends.checkpoint.exporting import Cutting, Resharding
from rlinf_async.backends.checkpoint.folders import CheckpointError, FileRecord, clean, encode
from rlinf_async.backends.checkpoint.reading import read_checkpoint
from rlinf_async.backends.checkpoint.tensor_file import TensorEntry, checksum
from rlinf_async.parallel import StrategyError
from tests.backends.checkpoint.kit import (
    EXPERTS,
    assert_same_tensors,
    model_folder,
    noted,
    step,
    trained,
    trained_experts,
    trainer_of,
)
from tests.backends.fsdp_helpers import in_processes, load_result, save_result, set_up
from tests.backends.test_fsdp_sharded import config


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"), tied=request.param)


@pytest.fixture(scope="module")
def checkpoint(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "version-000001"
    trained(model, folder)
    return folder


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (3, 1), (1, 2), (2, 2), (3, 2)])
def test_the_way_there_and_back_gives_the_same_bytes(
    checkpoint: Path, tmp_path: Path, dp: int, tp: int
) -> None:
    Resharding(checkpoint, dp=dp, tp=tp).run(tmp_path / "there")
    there = noted(tmp_path / "there")
    assert (there.strategy.dp, there.strategy.tp, len(there.tensors)) == (dp, tp, dp * tp)
    assert_same_tensors(tmp_path / "there", checkpoint)
    Resharding(tmp_path / "there", dp=1, tp=1).run(tmp_path / "back")
    back, first = noted(tmp_path / "back"), noted(checkpoint)
    assert back.tensors == first.tensors  # sizes and checksums
    assert (back.own, back.model, back.aliases) == (first.own, first.model, first.aliases)


def test_a_tensor_parallel_rank_holds_its_slices_under_their_own_names(
    checkpoint: Path, tmp_path: Path
) -> None:
    Resharding(checkpoint, dp=1, tp=2).run(tmp_path / "two")
    saved = read_checkpoint(checkpoint).tensors
    name = "model.language.model.layers.1.self_attn.{}_proj.weight"
    with safe_open(tmp_path / "two" / "rank_1_of_2.safetensors", framework="pt") as file:
        query, output = file.get_tensor(name.format("q")), file.get_tensor(name.format("o"))
        moment = file.get_tensor("optimizer" + name.format("k")[5:] + ".exp_avg")
    assert torch.equal(query, saved[name.format("q")].whole()[64:])
    assert torch.equal(output, saved[name.format("o")].whole()[:, 64:])
    key = "optimizer" + name.format("k")[5:] + ".exp_avg"
    assert torch.equal(moment, saved[key].whole()[32:])


@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 2), (3, 2), (1, 4)])
@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_are_cut_inside_each_expert_and_put_together_again(
    tmp_path: Path, kind: str, dp: int, tp: int
) -> None:
    trained_experts(tmp_path, kind)
    first = tmp_path / "checkpoint"
    Resharding(first, dp=dp, tp=tp).run(tmp_path / "there")
    assert_same_tensors(tmp_path / "there", first)
    Resharding(tmp_path / "there", dp=1, tp=1).run(tmp_path / "back")
    assert noted(tmp_path / "back").tensors == noted(first).tensors
    if dp > 1:
        return
    saved = read_checkpoint(first).tensors
    width = 16 // tp
    for prefix, suffix in (("model", ""), ("optimizer", ".exp_avg_sq")):
        name = f"{prefix}.language.model.layers.1.mlp.experts.{{}}_proj{suffix}"
        with safe_open(tmp_path / "there" / f"rank_1_of_{tp}.safetensors", framework="pt") as file:
            gate_up, down = (file.get_tensor(name.format(one)) for one in ("gate_up", "down"))
        gate, up = saved[name.format("gate_up")].whole().chunk(2, dim=1)
        mine = slice(width, 2 * width)
        assert torch.equal(gate_up, torch.cat([gate[:, mine], up[:, mine]], dim=1))
        assert torch.equal(down, saved[name.format("down")].whole()[:, :, mine])
        assert gate_up.any()


def test_training_goes_on_from_a_checkpoint_of_any_strategy(model: Path, tmp_path: Path) -> None:
    trainer = trained(model, tmp_path / "whole")
    expected = [step(trainer, number) for number in (2, 3)]
    Resharding(tmp_path / "whole", dp=2, tp=2).run(tmp_path / "four")
    resumed = trainer_of(model)
    assert resumed.load_checkpoint(tmp_path / "four") == [{"position": 7}]
    assert [step(resumed, number) for number in (2, 3)] == expected
    assert resumed.version == 1


def take_and_save(rank: int, world_size: int, folder: Path) -> None:
    manager = set_up(config("fsdp2"), world_size, rank)
    extras = manager.load_checkpoint(folder / "two")
    manager.save_checkpoint(folder / "saved")
    save_result(folder, rank, extras)


def test_two_ranks_take_what_was_cut_for_two_and_write_the_same(tmp_path: Path) -> None:
    manager = set_up(config("fsdp2"))
    manager.save_checkpoint(tmp_path / "one", {"rank": 0})
    Resharding(tmp_path / "one", dp=2, tp=1).run(tmp_path / "two")
    in_processes(take_and_save, 2, tmp_path)
    assert load_result(tmp_path, 1) == [{"rank": 0}]
    assert_same_tensors(tmp_path / "saved", tmp_path / "one")


def test_a_size_that_does_not_divide_is_named_with_the_nearest_that_does(checkpoint: Path) -> None:
    with pytest.raises(StrategyError, match=r"tp=3 does not divide 4 heads; nearest that does: 2"):
        Resharding(checkpoint, dp=1, tp=3)


def test_a_policy_has_no_tensor_parallel_ranks(tmp_path: Path) -> None:
    set_up(config("fsdp2")).save_checkpoint(tmp_path / "robot")
    with pytest.raises(CheckpointError, match="does not say which language model it holds"):
        Resharding(tmp_path / "robot", dp=1, tp=2)


def with_config(checkpoint: Path, folder: Path, **changes: object) -> Path:
    """The same folder with another config.json."""
    Resharding(checkpoint, dp=1, tp=1).run(folder)
    path = folder / "model" / "config.json"
    known = msgspec.json.decode(path.read_bytes())
    path.write_bytes(msgspec.json.encode(known | changes))
    note = noted(folder)
    changed = FileRecord("model/config.json", path.stat().st_size, checksum(path))
    model = tuple(changed if one.name == changed.name else one for one in note.model)
    (folder / "metadata.json").write_bytes(encode(msgspec.structs.replace(note, model=model)))
    return folder


def test_names_that_the_architecture_does_not_have_are_named(
    checkpoint: Path, tmp_path: Path
) -> None:
    other = with_config(checkpoint, tmp_path / "other", model_type="llama")
    with pytest.raises(ValueError, match=r"unknown 'model\.layers\.0\.self_attn\.k_norm\.weight'"):
        Resharding(other, dp=1, tp=2)


def test_an_architecture_without_a_name_map_keeps_one_tensor_parallel_rank(
    checkpoint: Path, tmp_path: Path
) -> None:
    other = with_config(checkpoint, tmp_path / "other", model_type="gpt2")
    with pytest.raises(CheckpointError, match=r"no name map to cut model_type 'gpt2'.*use tp=1"):
        Resharding(other, dp=1, tp=2)
    Resharding(other, dp=2, tp=1).run(tmp_path / "two")
    assert_same_tensors(tmp_path / "two", checkpoint)


def flip(folder: Path) -> None:
    target = folder / "rank_1_of_2.safetensors"
    content = bytearray(target.read_bytes())
    content[-9] ^= 1
    target.write_bytes(content)


def lose(folder: Path) -> None:
    (folder / "rank_0_of_2.safetensors").unlink()


def lose_the_model(folder: Path) -> None:
    (folder / "model" / "config.json").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip, r"rank_1_of_2\.safetensors is damaged: its checksum"),
        (lose, r"rank_0_of_2\.safetensors is missing"),
        (lose_the_model, r"model/config\.json is missing"),
    ],
)
def test_a_damaged_folder_is_named_before_anything_is_written(
    checkpoint: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    Resharding(checkpoint, dp=2, tp=1).run(tmp_path / "two")
    damage(tmp_path / "two")
    with pytest.raises(CheckpointError, match=message):
        Resharding(tmp_path / "two", dp=1, tp=1)
    assert [one.name for one in tmp_path.iterdir()] == ["two"]


def test_what_fails_in_the_middle_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Resharding(checkpoint, dp=2, tp=1).run(tmp_path / "two", stop)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "two").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        Resharding(checkpoint, dp=2, tp=1).run(tmp_path / "two")


def test_who_comes_to_write_the_same_folder_meanwhile_is_told_and_harms_nothing(
    checkpoint: Path, tmp_path: Path
) -> None:
    said: list[str] = []

    def come(_: int) -> None:
        if not said:
            with pytest.raises(CheckpointError) as caught:
                Resharding(checkpoint, dp=3, tp=1).run(tmp_path / "two")
            said.append(str(caught.value))
            clean(tmp_path)  # as a run does that starts beside it

    Resharding(checkpoint, dp=2, tp=1).run(tmp_path / "two", come)
    assert "two is being written by another process: wait for that" in said[0]
    assert [one.name for one in tmp_path.iterdir()] == ["two"]
    assert_same_tensors(tmp_path / "two", checkpoint)


def test_no_more_than_one_tensor_is_in_memory(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    make = Cutting._make

    def watched(one: Cutting, entry: TensorEntry) -> torch.Tensor:
        alive.append(sum(tensor() is not None for tensor in made))
        tensor = make(one, entry)
        made.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(Cutting, "_make", watched)
    Resharding(checkpoint, dp=2, tp=1).run(tmp_path / "two")
    assert len(made) > 50
    assert set(alive) == {0}
