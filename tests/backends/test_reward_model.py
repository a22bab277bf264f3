"""A reward model gives each conversation the logit that transformers gives it alone."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from rlinf_async.backends.transformers.reward_model import (
    BatchedModel,
    RewardModel,
    check_reward_model,
)
from rlinf_async.config import ConfigError
from tests.backends.classifiers import LETTERS, OneByOne, save_classifier


def conversations(count: int, seed: int) -> list[tuple[list[dict[str, str]], str]]:
    choice = random.Random(seed)

    def text(most: int) -> str:
        return "".join(choice.choice(LETTERS) for _ in range(choice.randrange(most)))

    return [([{"role": "user", "content": text(20)}], text(60)) for _ in range(count)]


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("qwen3", {}),
        ("llama", {}),
        ("qwen3", {"pad_token_id": None}),
        ("llama", {"pad_token_id": 7}),
    ],
)
def test_scores_are_the_logits_of_transformers_one_by_one(
    tmp_path: Path, kind: str, fields: dict[str, Any]
) -> None:
    """To 1e-6 in float32, whatever else is in the batch: ``AutoModelForSequenceClassification``."""
    folder = save_classifier(tmp_path / "rm", kind, **fields)
    asked, alone = conversations(24, seed=1), OneByOne(folder)
    expected = [alone.score(*one) for one in asked]
    assert len({round(one, 3) for one in expected}) > 20
    model = RewardModel(str(folder), "cpu", "float32", 200)
    rows = [row for one in asked if isinstance(row := model.token_ids(*one), list)]
    lengths = [len(row) for row in rows]
    batches = list(model._batches(lengths))
    assert sorted(at for batch in batches for at in batch) == list(range(24))
    padded = [len(batch) * max(lengths[at] for at in batch) for batch in batches]
    assert max(padded) <= 200
    if fields.get("pad_token_id", 0) is None:
        assert all(len(batch) == 1 for batch in batches)
    else:
        assert len(batches) < 15
    assert model.scores(rows) == pytest.approx(expected, abs=1e-6)


async def test_whoever_waits_goes_into_the_next_batch(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path / "rm")
    asked, alone = conversations(12, seed=2), OneByOne(folder)
    model, sizes = RewardModel(str(folder), "cpu", "float32", 10_000), list[int]()

    async def compute(scores: Any, rows: list[list[int]]) -> list[float]:
        sizes.append(len(rows))
        if len(sizes) == 2:
            raise RuntimeError("out of memory")
        found: list[float] = scores(rows)
        return found

    batched = BatchedModel(model, compute)
    found = await asyncio.gather(*(batched.score(*one) for one in asked))
    assert found == pytest.approx([alone.score(*one) for one in asked], abs=1e-6)
    assert sizes == [12]
    with pytest.raises(RuntimeError, match="out of memory"):
        await batched.score(*asked[0])
    assert await batched.score(*asked[0]) == pytest.approx(found[0], abs=1e-6)
    given_up = asyncio.create_task(batched.score(*asked[1]))
    await asyncio.sleep(0)
    given_up.cancel()
    assert await batched.score(*asked[2]) == pytest.approx(found[2], abs=1e-6)


def test_what_it_cannot_read_has_a_reason(tmp_path: Path) -> None:
    refuses = "{{ raise_exception('no system') if messages[0].role == 'system' }}"
    folder = save_classifier(tmp_path / "rm", template=refuses + "{{ messages[-1].content }}")
    model = RewardModel(str(folder), "cpu", "float32", 100)
    user, system = {"role": "user", "content": "?"}, {"role": "system", "content": "!"}
    assert isinstance(model.token_ids([user], "a" * 256), list)
    assert model.token_ids([user], "a" * 257) == (
        "prompt and answer are 257 of its tokens, and it reads 256"
    )
    assert "its chat template refuses the answer" in str(model.token_ids([system, user], "a"))


def edited(folder: Path, **fields: Any) -> Path:
    """The folder with another config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


@pytest.mark.parametrize("wrong", ["none", "weights", "policy", "labels", "tokenizer", "template"])
def test_a_folder_without_a_reward_model_is_refused(tmp_path: Path, wrong: str) -> None:
    folder = tmp_path / "rm"
    if wrong != "none":
        template = "" if wrong == "template" else "{{ messages }}"
        save_classifier(folder, template=template, num_labels=3 if wrong == "labels" else 1)
    if wrong == "weights":
        (folder / "model.safetensors").unlink()
    if wrong == "policy":
        edited(folder, architectures=["Qwen3ForCausalLM"])
    if wrong == "tokenizer":
        for file in folder.glob("token*"):
            file.unlink()
    said = {
        "none": "has no config.json",
        "weights": "has no weights",
        "policy": "holds Qwen3ForCausalLM, which gives no score",
        "labels": "has 3 labels, and a reward model has one",
        "tokenizer": "holds no tokenizer",
        "template": "has no chat template",
    }[wrong]
    with pytest.raises(ConfigError, match=said) as caught:
        check_reward_model(str(folder))
    assert caught.value.path == ("reward", "model")


def test_a_head_without_weights_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_classifier(tmp_path / "rm")
    file = folder / "model.safetensors"
    kept = {name: one for name, one in load_file(file).items() if "score" not in name}
    save_file(kept, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 weights of .*'score.weight'"):
        RewardModel(str(folder), "cpu", "float32", 100)
