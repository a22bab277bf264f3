"""Checkpoints and live trainers as Hugging Face folders: the same log-probs wherever they load."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlinf_async.backends.checkpoint.exporting import Export, Resharding
from rlinf_async.backends.checkpoint.folders import CheckpointError
from rlinf_async.backends.fsdp.language.trainer import CriticTrainer
from tests.backends.checkpoint.kit import (
    EXPERTS,
    PROMPT,
    RESPONSE,
    model_folder,
    own_log_probs,
    trained,
    trained_experts,
)
from tests.backends.fsdp_helpers import set_up
from tests.backends.language.kit import trainer_config
from tests.backends.models import log_probs
from tests.backends.test_fsdp_sharded import config

_Model: Any = AutoModelForCausalLM
_Tokenizer: Any = AutoTokenizer


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A trainer and its checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    model = model_folder(folder / "model", tied=request.param)
    return trained(model, folder / "version-000001"), folder / "version-000001"


def test_transformers_computes_the_same_from_an_exported_checkpoint(
    run: Any, tmp_path: Path
) -> None:
    trainer, checkpoint = run
    Resharding(checkpoint, dp=2, tp=2).run(tmp_path / "four")
    for source in (checkpoint, tmp_path / "four"):
        out = tmp_path / f"out of {source.name}"
        Export(source).run(out)
        model = _Model.from_pretrained(out, dtype="auto")
        assert model.dtype == torch.float32
        found = log_probs(model, PROMPT, RESPONSE)
        torch.testing.assert_close(found, own_log_probs(trainer), atol=1e-5, rtol=1e-5)
        assert _Tokenizer.from_pretrained(out)("w5 w6")["input_ids"] == [5, 6]


def test_a_live_trainer_writes_the_same_with_its_tokenizer(run: Any, tmp_path: Path) -> None:
    trainer, checkpoint = run
    trainer.save_pretrained(tmp_path / "live")
    Export(checkpoint).run(tmp_path / "offline")
    live, offline = (_Model.from_pretrained(tmp_path / name) for name in ("live", "offline"))
    for name, one in live.state_dict().items():
        assert torch.equal(one, offline.state_dict()[name]), name
    assert _Tokenizer.from_pretrained(tmp_path / "live")("w5")["input_ids"] == [5]


def test_large_models_are_cut_into_files_with_an_index(run: Any, tmp_path: Path) -> None:
    trainer, checkpoint = run
    made = Export(checkpoint, dtype=torch.bfloat16, shard_bytes=60_000)
    told: list[int] = []
    done = made.run(tmp_path / "out", told.append)
    assert sum(told) == done.bytes == made.total_bytes
    files = sorted(tmp_path.glob("out/*.safetensors"))
    assert len(files) > 2
    index = msgspec.json.decode((tmp_path / "out" / "model.safetensors.index.json").read_bytes())
    named = set(index["weight_map"].values())
    assert named == {one.name for one in files}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            names = opened.keys()
            assert all(index["weight_map"][name] == file.name for name in names)
    model = _Model.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.bfloat16
    expected = trainer.language.state_dict()
    for name, one in model.state_dict().items():
        assert torch.equal(one, expected[name].to(torch.bfloat16)), name


def test_every_file_is_on_the_disk_before_the_folder_has_its_name(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[str] = set()
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        if not (tmp_path / "out").exists():
            synced.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    monkeypatch.setattr(os, "fsync", noted)
    Export(run[1], shard_bytes=60_000).run(tmp_path / "out")
    assert {one.name for one in (tmp_path / "out").iterdir()} <= synced
    assert ".out.partial" in synced


@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_get_the_names_that_checkpoints_of_their_architecture_have(
    tmp_path: Path, kind: str
) -> None:
    trainer = trained_experts(tmp_path, kind)
    Resharding(tmp_path / "checkpoint", dp=2, tp=2).run(tmp_path / "four")
    for source in ("checkpoint", "four"):
        out = tmp_path / f"out of {source}"
        Export(tmp_path / source).run(out)
        with safe_open(out / "model.safetensors", framework="pt") as file:
            assert EXPERTS[kind] in file.keys()  # noqa: SIM118
        model = _Model.from_pretrained(out)
        for name, one in trainer.language.state_dict().items():
            assert torch.equal(one, model.state_dict()[name]), name
        with torch.no_grad():
            ids = torch.arange(3, 19)[None]
            logits = trainer.language(input_ids=ids, use_cache=False).logits
            assert torch.equal(model(input_ids=ids, use_cache=False).logits, logits)


def test_what_is_no_language_model_is_refused_and_named(tmp_path: Path) -> None:
    set_up(config("fsdp2")).save_checkpoint(tmp_path / "robot")
    with pytest.raises(CheckpointError, match=r"does not say which language model.*--model"):
        Export(tmp_path / "robot")
    critic = CriticTrainer(trainer_config(), 1, 0)
    critic.save_checkpoint(tmp_path / "critic")
    with pytest.raises(CheckpointError, match=r"'value_head\.(bias|weight)', which is no part"):
        Export(tmp_path / "critic")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        Export(tmp_path / "nowhere")
