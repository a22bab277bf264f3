"""Prompts with images: what records may hold, what is told apart, and what is refused."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlinf_async.data import DataConfig, DataError, Prompts, PromptsTooLong, load_tokenizer
from rlinf_async.data.images import REMEMBERED, ImageProcessor
from tests.backends.seeing import example, picture

PLACE = {"type": "image"}


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processor")
    example().processor().save_pretrained(folder)
    return folder


def config(path: str | Path, **fields: Any) -> DataConfig:
    given: dict[str, Any] = {"verifier": "exact", "image_column": "image", "shuffle": False}
    return DataConfig(path=str(path), **(given | fields))


def opened(processor: Path, path: str | Path, **fields: Any) -> Prompts:
    seen = ImageProcessor(processor)
    return Prompts(config(path, **fields), load_tokenizer(processor), processor=seen)


def lines(folder: Path, *records: dict[str, Any]) -> Path:
    (folder / "one.png").write_bytes(picture(1))
    (folder / "two.webp").write_bytes(picture(2, "WEBP"))
    file = folder / "seen.jsonl"
    file.write_text("".join(f"{json.dumps({'answer': '1'} | one)}\n" for one in records))
    return file


def user(*parts: object) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


def test_images_of_datasets_are_those_of_files(processor: Path, tmp_path: Path) -> None:
    """As features of Hugging Face datasets: in a saved dataset, in Parquet, in lists, as bytes."""
    datasets = importlib.import_module("datasets")

    encoded = [picture(seed, side=40 + seed) for seed in range(3)]
    rows = [{"prompt": f"{at}?", "answer": "1", "image": one} for at, one in enumerate(encoded)]
    table = datasets.Dataset.from_list([one | {"image": {"bytes": one["image"]}} for one in rows])
    table = table.cast_column("image", datasets.Image())
    table.save_to_disk(str(tmp_path / "saved"))
    table.to_parquet(str(tmp_path / "one.parquet"))
    several = datasets.Dataset.from_list([one | {"image": [one["image"]]} for one in rows])
    several.to_parquet(str(tmp_path / "lists.parquet"))
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "bytes.parquet"))
    for name in ("saved", "one.parquet", "lists.parquet", "bytes.parquet"):
        found = opened(processor, tmp_path / name)
        assert [next(found).images for _ in rows] == [(one,) for one in encoded], name


def test_placeholders_take_the_images_in_their_order(processor: Path, tmp_path: Path) -> None:
    places = user(text("a"), PLACE, text("b"), PLACE, text("c"))
    both = ["one.png", {"bytes": None, "path": "two.webp"}]
    file = lines(
        tmp_path,
        {"prompt": places, "image": both},
        {"prompt": "d", "image": both},
        {"prompt": [{"role": "system", "content": "s"}, *user(text("e"))], "image": "one.png"},
        {"prompt": "f", "image": None},
    )
    found = opened(processor, file)
    first, second, third, none = (next(found) for _ in range(4))
    assert first.text == "<user>a<image>b<image>c<assistant>"
    assert first.images == second.images == (picture(1), (tmp_path / "two.webp").read_bytes())
    assert second.text == "<user><image><image>d<assistant>"
    assert third.text == "<system>s<user><image>e<assistant>"
    assert (none.text, none.images) == ("<user>f<assistant>", ())
    raw = lines(tmp_path, {"prompt": "<image>g", "image": "one.png"})
    assert next(opened(processor, raw, chat=False)).text == "<image>g"


def test_prompts_with_other_images_are_other_prompts(processor: Path, tmp_path: Path) -> None:
    """A held-out question is trained on about another image, and not about the same one."""
    names = [*["one.png"] * 3, "two.webp"]
    file = lines(tmp_path, *({"prompt": "?", "image": one} for one in names))
    prompts = opened(processor, file, held_out=1, epochs=1, seed=1)
    [kept] = prompts.held_out
    learnt = list(prompts)
    assert kept.images not in [one.images for one in learnt]
    assert (len(learnt), prompts.usable) in ((1, 1), (3, 3))
    assert prompts.like_held_out == 3 - len(learnt)
    assert prompts.known([kept, *learnt]) == 1 + len(learnt)


@pytest.mark.parametrize(
    ("record", "fields", "message"),
    [
        ({"prompt": "?", "image": "no.png"}, {}, ":1: image 1 (FOLDER/no.png) cannot be read: No"),
        ({"prompt": "?", "image": 7}, {}, ":1: image 1 must be the path of a file, its bytes, or"),
        (
            {"prompt": "?", "image": "seen.jsonl"},
            {},
            "(FOLDER/seen.jsonl) cannot be read as an ima",
        ),
        ({"prompt": "?"}, {}, ":1: column 'image' is missing"),
        (
            {"prompt": user(PLACE, text("?"), PLACE), "image": "one.png"},
            {},
            (
                ":1: the prompt has 2 placeholders (<image>, which the chat template writes for "
                "each image of the messages) for 1 images"
            ),
        ),
        ({"prompt": "a<image>?", "image": "one.png"}, {}, ":1: the prompt has 2 placeholders"),
        (
            {"prompt": user({"type": "image", "url": "x"}), "image": "one.png"},
            {},
            ":1: a part of a message must be a text",
        ),
        (
            {"prompt": user(PLACE, text("?")), "image": "one.png"},
            {"image_column": ""},
            "a list of texts and images needs an image_column",
        ),
        (
            {"prompt": "?", "image": "one.png"},
            {"max_prompt_tokens": 8},
            "1 prompt is longer than max_prompt_tokens = 8: FOLDER/seen.jsonl:1 (10 tokens)",
        ),
    ],
)
def test_what_cannot_be_read_is_named(
    record: dict[str, Any], fields: dict[str, Any], message: str, processor: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as raised:
        opened(processor, lines(tmp_path, record), **fields)
    assert message.replace("FOLDER", str(tmp_path)) in str(raised.value)
    assert isinstance(raised.value, PromptsTooLong) == ("max_prompt_tokens" in fields)


def test_a_model_without_a_processor_takes_no_images(processor: Path, tmp_path: Path) -> None:
    file = lines(tmp_path, {"prompt": "?", "image": "one.png"})
    with pytest.raises(DataError, match="image_column is 'image', but the model takes no images"):
        Prompts(config(file), load_tokenizer(processor))
    with pytest.raises(ValueError, match="image_column is 'image', but tasks have no images"):
        DataConfig(tasks=("chain_sum",), image_column="image")
    with pytest.raises(DataError, match="does not say how images are prepared"):
        ImageProcessor(tmp_path)


def test_pixels_are_prepared_once_while_there_is_room(
    processor: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = ImageProcessor(processor)
    first = seen.pixels(picture(1))
    assert seen.pixels(picture(1)) is first
    assert sum(one.nbytes for one in first.values()) < REMEMBERED
    monkeypatch.setattr("rlinf_async.data.images.REMEMBERED", 1)
    second = seen.pixels(picture(2))
    assert seen.pixels(picture(2)) is second
    again = seen.pixels(picture(1))
    assert again is not first
    np.testing.assert_array_equal(again["pixel_values"], first["pixel_values"])
