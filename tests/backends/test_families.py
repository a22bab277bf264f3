"""Families of models: what is published, which engines agree with the trainer, what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_async.backends.fsdp.language.trainer import PolicyTrainer
from rlinf_async.backends.language import FAMILIES, REFUSED, UnsupportedModel, check_family
from rlinf_async.backends.transformers.tensors import ModelTensors, model_without_memory
from rlinf_async.weights.pack import unpack
from tests.backends.families import TIED, TINY, TOLERANCE, published_difference, tiny
from tests.backends.language.kit import trainer_config
from tests.docs.pages import ROOT

ROW = re.compile(r"^\| `(\w+)` \| yes \| (.+?) \|$", re.MULTILINE)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_transformers_engine_computes_what_the_trainer_does(
    family: str, tmp_path: Path
) -> None:
    assert published_difference("transformers", tiny(family), tmp_path) < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_tied_weights_are_served_as_well(family: str, tmp_path: Path) -> None:
    assert published_difference("transformers", tiny(family, **TIED), tmp_path) < TOLERANCE


@pytest.mark.parametrize("family", sorted(TINY))
def test_published_names_and_values_are_those_that_transformers_saves(
    family: str, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    trainer = PolicyTrainer(trainer_config(tiny(family)), 1, 0)
    published = unpack(trainer.publish())
    language: Any = trainer.language
    language.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert published.keys() == saved.keys()
    for name, tensor in published.items():
        assert torch.equal(tensor, saved[name]), name


def test_names_do_not_depend_on_the_files_that_a_model_was_loaded_from(tmp_path: Path) -> None:
    """A checkpoint may have been written with experts fused."""
    from transformers import AutoModelForCausalLM

    factory: Any = AutoModelForCausalLM
    trainer = PolicyTrainer(trainer_config(tiny("qwen3_moe")), 1, 0)
    language: Any = trainer.language
    language.save_pretrained(tmp_path, save_original_format=False)
    loaded = factory.from_pretrained(tmp_path)
    assert ModelTensors(loaded).published() == ModelTensors(tiny("qwen3_moe")).published()


@pytest.mark.parametrize("family", ["gpt_neox", "mixtral"])
def test_a_single_rank_loads_what_another_trainer_published(family: str) -> None:
    source = PolicyTrainer(trainer_config(tiny(family), seed=1), 1, 0)
    target = PolicyTrainer(trainer_config(tiny(family), seed=2), 1, 0)
    target.load(source.publish())
    expected = source.manager.model.state_dict()
    for name, tensor in target.manager.model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_a_checkpoint_that_is_no_slice_of_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import core_model_loading

    def joined(_: object, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"both": torch.cat(list(state.values())[:1] * 2)}

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", joined)
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM have a tensor 'both' that is put tog"):
        ModelTensors(model_without_memory(tiny("qwen3")))


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("falcon", "its attention in transformers cannot be replaced"),
        ("llama4_text", "layers of kind chunked_attention"),
        ("mamba", "a recurrent state is carried from token to token"),
        *((name, reason) for name, reason in REFUSED.items()),
    ],
)
def test_a_family_that_cannot_be_trained_is_refused_with_the_reason_and_what_can_be(
    family: str, reason: str
) -> None:
    with pytest.raises(UnsupportedModel) as raised:
        check_family({"model_type": family})
    message = str(raised.value)
    assert f"{family!r} cannot be trained: {reason}" in message
    assert "Supported are" in message
    assert "qwen3" in message
    with pytest.raises(UnsupportedModel):
        PolicyTrainer(trainer_config({"model_type": family}), 1, 0)


def test_a_family_that_an_engine_does_not_serve_is_refused_with_that_engine_alone() -> None:
    family = next(name for name, one in FAMILIES.items() if one.vllm == "no")
    check_family({"model_type": family})
    check_family({"model_type": family}, "transformers")
    with pytest.raises(UnsupportedModel, match=r"set rollout\.backend to 'transformers'"):
        check_family({"model_type": family}, "vllm")


def test_the_table_of_the_page_is_the_list_of_the_code() -> None:
    page = (ROOT / "docs" / "language-training.md").read_text(encoding="utf-8")
    section = page.partition("## Model families")[2].partition("\n## ")[0]
    assert dict(ROW.findall(section)) == {name: one.vllm for name, one in FAMILIES.items()}
    for name in REFUSED:
        assert f"`{name}`" in section
    assert FAMILIES.keys() == TINY.keys()
