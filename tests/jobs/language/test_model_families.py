"""Models that cannot be trained: refused by ``check`` and ``train`` with one message, exit 2."""

from __future__ import annotations

import json
import pathlib

import pytest

from tests.jobs.language.kit import Job

pytestmark = pytest.mark.usefixtures("no_cluster")


@pytest.mark.parametrize("command", ["check", "train"])
@pytest.mark.parametrize("family", ["falcon", "llama4_text", "mamba"])
def test_an_unsupported_family_is_refused_with_what_is_supported(
    tiny: Job, command: str, family: str
) -> None:
    config = f'model_type = "{family}"\n'
    head, _, rest = tiny.file.read_text().partition("[model.config]")
    tiny.file.write_text(f"{head}[model.config]\n{config}\n[data]{rest.partition('[data]')[2]}")
    ended = tiny.train() if command == "train" else tiny.command("check", tiny.file)
    assert ended.code == 2
    assert f"models of the family {family!r} cannot be trained: " in ended.err
    assert "Supported are " in ended.err
    assert len(ended.err.splitlines()) == 1
    assert not tiny.out.exists()


def test_the_folder_of_an_unsupported_model_is_named_by_its_setting(
    tiny: Job, tmp_path: pathlib.Path
) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name in ("pytorch_model.bin", "tokenizer.json"):
        (folder / name).touch()
    (folder / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    head, _, rest = tiny.file.read_text().partition("[model]")
    model = f"[model]\npath = '{folder}'\n\n[data]"
    tiny.file.write_text(head + model + rest.partition("[data]")[2])
    ended = tiny.command("check", tiny.file)
    assert ended.code == 2
    assert "model.path: models of the family 'mamba' cannot be trained" in ended.err
