"""Everything that can change between a run and its resume: refused, or named."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from rlinf_async.cli import main
from rlinf_async.config import Document, UsageError
from rlinf_async.episodes.endpoint import EndpointConfig
from rlinf_async.runtime.jobs.config import FILE, Inputs, _code, check_resumed, imported_beside
from rlinf_async.runtime.jobs.language.config import MAY_DIFFER, LanguageConfig, ModelConfig
from rlinf_async.runtime.jobs.language.model import make_model_folder
from tests.jobs.language.kit import TOY, Job

VERIFIER = (
    "import beside\n\ndef score(answer):\n    return float(answer.text == answer.reference)\n"
)
ARGUMENTS = (
    *("--data.verifier", "mine.py:score", "--data.chat_template", "template.jinja"),
    *("--data.chat", "true"),
)
TWO = ("--training.iterations", "2")
HEAD, _, REST = TOY.partition("[model]")
TEXT = HEAD + '[model]\npath = "model"\n\n[data]' + REST.partition("[data]")[2]
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with a model, a verifier, a template, and a run of two iterations."""
    folder = tmp_path_factory.mktemp("begun")
    config = {
        "model_type": "qwen3",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    make_model_folder(ModelConfig(config=config, tokenizer="arithmetic"), folder / "model")
    save_file({"a": np.zeros(3 * 2**20, np.float32)}, folder / "model" / WEIGHTS)
    (folder / "mine.py").write_text(VERIFIER)
    (folder / "beside.py").write_text("one = 1")
    (folder / "template.jinja").write_text("{{ messages[0].content }}")
    lines = [f'{{"prompt": "{a}+{a + 1}=", "answer": "{2 * a + 1}"}}' for a in range(24)]
    (folder / "sums.jsonl").write_text("\n".join(lines))
    (folder / "run.toml").write_text(TEXT.format(data="sums.jsonl"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        assert main(["train", "run.toml", "--out", "run", *ARGUMENTS, *TWO]) == 0
    return folder


@pytest.fixture
def job(
    begun: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Job:
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    job = Job(tmp_path, capsys)
    shutil.copy(begun / "run.toml", job.file)
    shutil.copy(begun / "sums.jsonl", tmp_path)
    return job


def damage(path: str) -> Callable[[pathlib.Path], None]:
    """Change one byte in the middle of a file."""

    def change(folder: pathlib.Path) -> None:
        file = folder / path
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)

    return change


def replace(path: str, old: str, new: str) -> Callable[[pathlib.Path], None]:
    def change(folder: pathlib.Path) -> None:
        file = folder / path
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))

    return change


def add(path: str) -> Callable[[pathlib.Path], None]:
    def change(folder: pathlib.Path) -> None:
        (folder / path).write_text("{}")

    return change


def other_package(folder: pathlib.Path) -> None:
    file = folder / "run" / FILE
    inputs = msgspec.json.decode(file.read_bytes(), type=Inputs)
    inputs.packages |= {"torch": "1.0"}
    file.write_bytes(msgspec.json.encode(inputs))


def as_before(folder: pathlib.Path) -> None:
    """As a version left it that did not record what it read."""
    (folder / "run" / FILE).unlink()


def nothing(_: pathlib.Path) -> None:
    pass


REFUSED = {
    "an answer": (replace("sums.jsonl", '"answer": "47"', '"answer": "48"'), (), "content of the"),
    "weights": (damage(f"model/{WEIGHTS}"), (), f"model.path: {WEIGHTS} differs"),
    "tokenizer": (
        replace("model/tokenizer_config.json", "{", "{ "),
        (),
        "tokenizer_config.json differs",
    ),
    "a template of the tokenizer": (
        add("model/chat_template.jinja"),
        (),
        "model.path: chat_template.jinja differs",
    ),
    "generation": (
        add("model/generation_config.json"),
        (),
        "model.path: generation_config.json is new",
    ),
    "a template": (
        replace("template.jinja", "{{", "{{ "),
        (),
        "data.chat_template: template.jinja differs",
    ),
    "a seed": (nothing, ("--data.seed", 5), "data.seed (0 in the run, 5 now)"),
    "sampling": (nothing, ("--rollout.sampling.top_k", 3), "rollout.sampling.top_k"),
}
NAMED = {
    "a verifier": (replace("mine.py", "==", "!="), (), "other code than before: mine.py differs"),
    "what a verifier imports": (replace("beside.py", "1", "2"), (), "beside.py differs"),
    "a package": (other_package, (), "other packages than before: torch 1.0 -> "),
    "a setting": (nothing, ("--evaluation.samples", 2), "evaluation.samples (4 in the run, 2 now)"),
    "another verifier": (nothing, ("--data.verifier", "numeric"), "mine.py is gone"),
    "a run of before": (as_before, (), f"has no {FILE}: whether model, demonstrations"),
}


@pytest.mark.parametrize("what", [*REFUSED, *NAMED])
def test_a_resume_refuses_or_names_what_is_another_one(
    job: Job, tmp_path: pathlib.Path, what: str
) -> None:
    change, arguments, text = (REFUSED | NAMED)[what]
    before = (tmp_path / "run" / FILE).read_bytes()
    change(tmp_path)
    ended = job.train(*ARGUMENTS, "--training.iterations", 4, *arguments, "--resume")
    assert text in ended.err
    assert ended.code == (2 if what in REFUSED else 0), ended.err
    if what in REFUSED:
        assert (tmp_path / "run" / FILE).read_bytes() == before  # the old files are still known
    else:
        assert job.summary.iterations == 4


def test_a_resume_with_the_same_files_elsewhere_says_nothing_of_them(
    job: Job, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "model").rename(tmp_path / "moved")
    ended = job.train(*ARGUMENTS, "--training.iterations", 4, "--resume", "--model.path", "moved")
    assert ended.code == 0, ended.err
    assert "differs" not in ended.err
    assert "than before: model.path (model in the run, moved now)" in ended.err


@pytest.mark.parametrize("name", ["of_a_run:make", "of_a_run:Reach-v0", "of_a_run.py:make"])
def test_code_that_only_other_processes_import_is_compared(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = []
    for text in ("a = 1", "a = 2"):
        (tmp_path / "of_a_run.py").write_text(text)
        found.append(
            _code(ModelConfig(path="model"), [name, "no_such_module:make", "json.nothing:make"])
        )
    assert [list(one) for one in found] == [[name.partition(":")[0]]] * 2
    assert found[0] != found[1]


IMPORTS = {
    "import near": {"sub/near.py"},
    "import top.inner": {"top/__init__.py", "top/inner.py", "far.py"},
    "from top import inner": {"top/__init__.py", "top/inner.py", "far.py"},
    "from top.inner import one": {"top/__init__.py", "top/inner.py", "far.py"},
    "from . import near": {"sub/near.py"},
    "from .near import one": {"sub/near.py"},
    "def later():\n    import far": {"far.py"},
    "import mine, broken": {"broken.py"},
    "import numpy, json, rlinf_async, nothing.there": set(),
    "import importlib; importlib.import_module('near')": set(),
}
"""what a file in ``sub`` says, and what of the folder is then compared"""


@pytest.mark.parametrize("said", IMPORTS)
def test_what_named_files_import_from_their_own_folders_is_compared(
    said: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {
        "sub/mine.py": said,
        "sub/near.py": "one = 1",
        "far.py": "import sub.mine",
        "top/__init__.py": "",
        "top/inner.py": "import far\nfrom . import inner",
        "broken.py": "import (",
        "rlinf_async/__init__.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = imported_beside([pathlib.Path("sub/mine.py")])
    assert {str(one) for one in found} == IMPORTS[said]


class Given(msgspec.Struct):
    """Settings of an environment."""

    env: dict[str, dict[str, object]]


def test_files_that_an_environment_is_given_are_compared(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scene.xml").write_text("<scene/>")
    kwargs: dict[str, object] = {"scenes": ["scene.xml", "none.xml"], "size": 3, "name": "a\0b"}
    assert list(_code(Given(env={"kwargs": kwargs}), [])) == ["scene.xml"]


@pytest.mark.parametrize(
    ("settings", "may"),
    [
        ({"seconds": 5.0, "concurrent": 3, "sticky": False}, True),
        ({"endpoint": EndpointConfig(interface="127.0.0.2", port=8000)}, True),
        ({"max_turns": 3}, False),
        ({"run": "other.py:run"}, False),
    ],
)
def test_a_resume_may_have_episodes_elsewhere_but_no_others(
    tmp_path: pathlib.Path, settings: dict[str, Any], may: bool
) -> None:
    started = tmp_path / "config.toml"
    started.write_text(TOY.format(data="questions.jsonl") + '[episode]\nrun = "mine.py:run"\n')
    before = Document.read(started).to(LanguageConfig)
    episode = msgspec.structs.replace(before.episode, **settings)
    now = msgspec.structs.replace(before, episode=episode)
    with contextlib.nullcontext() if may else pytest.raises(UsageError, match="cannot go on"):
        assert len(check_resumed(now, started, MAY_DIFFER)) >= len(settings)
