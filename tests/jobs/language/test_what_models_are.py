"""A model's folder that cannot be trained is named before a worker starts; `trained/` has all."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.jobs.language.checkpoints import save_checkpoint
from tests.jobs.language.kit import Job

LETTERS = ("--data.verifier", "tests.jobs.language.verifiers:letters", "--training.iterations", 1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A small checkpoint with the arithmetic tokenizer."""
    pytest.importorskip("transformers")
    return save_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "qwen3")


@pytest.fixture
def checkpoint(trained: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for path in trained.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def change(file: pathlib.Path, **settings: Any) -> None:
    if file.is_file():
        file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def with_a_nan(folder: pathlib.Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def with_more_tokens(folder: pathlib.Path) -> None:
    from rlinf_async.data.prompts import arithmetic_tokenizer

    made = arithmetic_tokenizer()
    made.add_tokens(["one", "two", "three"])
    made.save_pretrained(folder)


def without_an_end(folder: pathlib.Path) -> None:
    change(folder / "tokenizer_config.json", eos_token=None)
    for name in ("config.json", "generation_config.json"):
        change(folder / name, eos_token_id=None)


def with_half_of_its_settings(folder: pathlib.Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": ')


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (with_a_nan, "model.norm.weight holds numbers that are NaN or infinite"),
        (with_more_tokens, "the tokenizer has tokens up to 104, but the model has embeddings for"),
        (without_an_end, "there is no end-of-sequence token"),
        (with_half_of_its_settings, "checkpoint cannot be read: "),
    ],
)
def test_check_and_run_name_what_is_wrong_with_a_model(
    tiny: Job, checkpoint: pathlib.Path, damage: Any, said: str
) -> None:
    damage(checkpoint)
    text = tiny.file.read_text()
    start, _, rest = text.partition("[model]")
    tiny.file.write_text(
        f'{start}[model]\npath = "{checkpoint}"\n\n[data]' + rest.partition("[data]")[2]
    )
    for ended in (tiny.command("check", tiny.file), tiny.train()):
        assert ended.code == 2, ended.err
        assert "model.path: " in ended.err
        assert said in ended.err


def test_the_trained_folder_has_the_template_that_it_was_trained_with(
    tiny: Job, checkpoint: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    transformers = pytest.importorskip("transformers")
    template = tmp_path / "mine.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}!")
    tiny.succeed(*LETTERS, "--evaluation.samples", 0, "--data.chat_template", template)
    kept = transformers.AutoTokenizer.from_pretrained(tiny.out / "trained")
    assert kept.chat_template == template.read_text()
    assert kept.eos_token == "<eos>"
    made = transformers.AutoConfig.from_pretrained(tiny.out / "trained")
    assert made.eos_token_id == kept.eos_token_id

    text = tiny.file.read_text()  # the same for a checkpoint of one's own, whose folder stays
    start, _, rest = text.partition("[model]")
    tiny.file.write_text(
        f'{start}[model]\npath = "{checkpoint}"\n\n[data]' + rest.partition("[data]")[2]
    )
    tiny.out = tmp_path / "other"
    tiny.succeed(*LETTERS, "--evaluation.samples", 0, "--data.chat_template", template)
    kept = transformers.AutoTokenizer.from_pretrained(tiny.out / "trained")
    assert kept.chat_template == template.read_text()
    own = transformers.AutoTokenizer.from_pretrained(checkpoint)
    assert own.chat_template != template.read_text()
