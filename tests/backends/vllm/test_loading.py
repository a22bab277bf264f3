"""vLLM's parameters out of a checkpoint's tensors: every rank its own, and no byte more."""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from rlinf_async.backends.transformers.folder import ModelFolderError, open_folder
from rlinf_async.backends.vllm.config import VllmEngineConfig
from rlinf_async.backends.vllm.library import _set_environment, start_llm, starting_alone
from rlinf_async.backends.vllm.loading import Unknown, shards
from rlinf_async.weights.pack import pack, unpack
from tests.backends.models import make_model, publish, qwen3, save_folder

pytestmark = [  # of what vLLM imports
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def whole(**options: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = qwen3(**options)
    return config.to_dict(), unpack(pack(unpack(publish(make_model(config), 1)), 1))


def reads(data: Tensor, tensors: dict[str, Tensor]) -> bool:
    """Whether this is a part of the tensors as they lie."""
    return data.untyped_storage().data_ptr() in {
        one.untyped_storage().data_ptr() for one in tensors.values()
    }


def test_one_rank_keeps_views_of_what_came() -> None:
    config, tensors = whole()
    found = {shard.name: shard for shard in shards(config, tensors, 1, 0)}
    fused = found["model.layers.0.self_attn.qkv_proj.weight"]
    names = [f"model.layers.0.self_attn.{one}_proj.weight" for one in "qkv"]
    assert torch.equal(fused.data, torch.cat([tensors[name] for name in names]))
    assert fused.tensors == set(names)
    assert all(reads(shard.data, tensors) for shard in found.values())


def test_what_lies_apart_is_put_together() -> None:
    config, tensors = whole()
    apart = unpack(pack(dict(reversed(tensors.items())), 1, bucket_bytes=1))
    together = {shard.name: shard.data for shard in shards(config, tensors, 1, 0)}
    for shard in shards(config, apart, 1, 0):
        assert torch.equal(shard.data, together[shard.name])


@pytest.mark.parametrize("tied", [True, False])
def test_tensor_ranks_keep_all_of_the_model_between_them(tied: bool) -> None:
    config, tensors = whole(tied=tied)
    one = {shard.name: shard.data for shard in shards(config, tensors, 1, 0)}
    ranks = [{s.name: s.data for s in shards(config, tensors, 2, rank)} for rank in range(2)]
    for name in ("self_attn.o_proj", "mlp.down_proj"):  # cut by columns
        full = f"model.layers.1.{name}.weight"
        assert torch.equal(torch.cat([rank[full] for rank in ranks], dim=1), one[full])
    full = "model.embed_tokens.weight"
    assert torch.equal(torch.cat([rank[full] for rank in ranks]), one[full])
    gate_up = [rank["model.layers.0.mlp.gate_up_proj.weight"].chunk(2) for rank in ranks]
    halves = [torch.cat([rank[part] for rank in gate_up]) for part in range(2)]
    assert torch.equal(torch.cat(halves), one["model.layers.0.mlp.gate_up_proj.weight"])
    sizes = [sum(data.numel() for data in rank.values()) for rank in ranks]
    shared = sum(data.numel() for name, data in one.items() if name.endswith("norm.weight"))
    assert sum(sizes) == sum(data.numel() for data in one.values()) + shared


def test_a_model_without_a_layout_and_a_missing_tensor_go_another_way() -> None:
    config, tensors = whole()
    with pytest.raises(Unknown, match="'mamba' has no name map"):
        list(shards(config | {"model_type": "mamba"}, tensors, 1, 0))
    del tensors["model.norm.weight"]
    with pytest.raises(Unknown, match=r"model\.norm\.weight"):
        list(shards(config, tensors, 1, 0))


def test_engines_on_the_same_devices_start_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    started = [threading.Event(), threading.Event()]

    def start(devices: str, number: int) -> None:
        with starting_alone(devices):
            started[number].set()

    with starting_alone("GPU-a"):
        same, other = (
            threading.Thread(target=start, args=one, daemon=True)
            for one in (("GPU-a", 0), ("GPU-b", 1))
        )
        same.start()
        other.start()
        assert started[1].wait(60.0)
        [file] = tmp_path.glob("*GPU-a*")
        with file.open() as opened, pytest.raises(BlockingIOError):
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert not started[0].is_set()
    assert started[0].wait(60.0)
    same.join(60.0)
    other.join(60.0)
    assert list(tmp_path.iterdir()) == []


def test_heads_that_vllm_has_no_attention_for_are_named_before_it_starts(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    path = save_folder(tmp_path, qwen3(head_dim=16))
    with pytest.raises(
        ModelFolderError,
        match=r"attention heads of 16 \(head_dim in config\.json\).*32, 64.*'transformers'",
    ):
        start_llm(VllmEngineConfig(model=path), open_folder(path), 0, "cpu")


@pytest.mark.parametrize(
    ("dtype", "on_cpu", "precision"),
    [("float32", False, "ieee"), ("bfloat16", False, None), ("float32", True, None)],
)
def test_float32_on_a_gpu_is_not_rounded_to_tf32_by_the_attention(
    dtype: Any, on_cpu: bool, precision: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environment)
    _set_environment(VllmEngineConfig(dtype=dtype), on_cpu)
    assert environment.get("TRITON_F32_DEFAULT") == precision
