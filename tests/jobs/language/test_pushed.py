"""A trained model with its card, in the precision and the files that were asked for, on a Hub."""

from __future__ import annotations

import base64
import importlib
import json
import pathlib
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.jobs.language.kit import Job

yaml: Any = importlib.import_module("yaml")

TOKEN = "hf_thisIsSecretAndIsToldToNobody"


class Hub:
    """The part of the Hub's interface that a push uses; it keeps what it gets."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[tuple[str, Any]] = []
        self.tokens: set[str] = set()
        self.answers: dict[str, tuple[int, Mapping[str, Any]]] = {}
        """answers instead of the usual ones, by a part of the path"""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                hub.tokens.add(self.headers["Authorization"])
                lines = [json.loads(line) for line in body.splitlines()]
                status, answer = hub.answer(self.path, lines)
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def answer(self, path: str, lines: list[Any]) -> tuple[int, Mapping[str, Any]]:
        self.asked.append((path, lines))
        for part, answer in self.answers.items():
            if part in path:
                return answer
        if path == "/api/repos/create":
            return 200, {"url": f"{self.endpoint}/{lines[0]['organization']}/{lines[0]['name']}"}
        if "/preupload/" in path:
            modes = [
                {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                for one in lines[0]["files"]
            ]
            return 200, {"files": modes}
        if "/commit/" in path:
            for one in lines[1:]:
                content = base64.b64decode(one["value"]["content"])
                self.files[one["value"]["path"]] = content
            return 200, {"commitUrl": f"{self.endpoint}/me/sums/commit/1", "commitOid": "1"}
        return 200, {}

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def hub(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    made = Hub()
    monkeypatch.setenv("HF_ENDPOINT", made.endpoint)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    try:
        yield made
    finally:
        made.close()


def front_matter(card: str) -> dict[str, Any]:
    _, front, _ = card.split("---\n", 2)
    found: dict[str, Any] = yaml.safe_load(front)
    return found


def written_below(folder: pathlib.Path) -> Iterator[bytes]:
    return (one.read_bytes() for one in folder.rglob("*") if one.is_file())


def test_a_trained_model_is_pushed_whole_with_its_card(
    tiny: Job, hub: Hub, tmp_path: pathlib.Path
) -> None:
    tiny.succeed(
        *("--training.iterations", 1, "--training.export_precision", "bfloat16"),
        *("--training.export_shard_gb", 2e-5, "--rollout.sampling.top_k", 12),
    )
    trained = tiny.out / "trained"
    card = (trained / "README.md").read_text()
    known = front_matter(card)
    assert known["library_name"] == "transformers"
    assert known["tags"] == ["rlinf-async", "language-rl", "grpo"]
    [result] = known["model-index"][0]["results"]
    assert result["dataset"]["name"] == "sums.jsonl"
    accuracy = tiny.summary.eval_accuracy
    assert {"type": "accuracy", "value": accuracy} in result["metrics"]
    for line in (
        "Trained from random weights of a `qwen3` by the job `language_rl` of rlinf-async.",
        "On 4 held-out records of `sums.jsonl`",
        "| top-k | `12` |",
        "| verifier | `numeric` |",
        "| torch | ",
        "apply_chat_template",
    ):
        assert line in card
    assert str(tmp_path) not in card
    check_weights(trained)
    planned = tiny.command("push", tiny.out, "me/sums", "--dry-run")
    assert planned.code == 0
    assert "files would go to me/sums" in planned.out
    assert not hub.asked
    (trained / ".hidden").write_text("nobody's")
    done = tiny.command("push", tiny.out, "me/sums", "--revision", "first", "--message", "Sums")
    assert done.code == 0, done.err
    assert f"-> {hub.endpoint}/me/sums/commit/1" in done.out
    theirs = {one.name: one.read_bytes() for one in trained.iterdir() if one.name[0] != "."}
    assert hub.files == theirs
    assert {"README.md", "tokenizer.json", "generation_config.json"} <= theirs.keys()
    assert hub.asked[0][1][0]["visibility"] == "private"
    assert [path for path, _ in hub.asked][1] == "/api/models/me/sums/branch/first"
    assert hub.asked[-1][0] == "/api/models/me/sums/commit/first"
    assert hub.asked[-1][1][0]["value"]["summary"] == "Sums"
    assert hub.tokens == {f"Bearer {TOKEN}"}
    assert TOKEN not in done.out + done.err
    assert not any(TOKEN.encode() in content for content in written_below(tmp_path))
    check_refusals(tiny, hub)


def check_weights(trained: pathlib.Path) -> None:
    """They are bfloat16, in several files, and the library loads them so."""
    shards = sorted(trained.glob("*.safetensors"))
    assert len(shards) > 1
    index = json.loads((trained / "model.safetensors.index.json").read_text())
    assert {one.name for one in shards} == set(index["weight_map"].values())
    for one in shards:
        assert {tensor.dtype for tensor in load_file(one).values()} == {torch.bfloat16}
    assert json.loads((trained / "config.json").read_text())["dtype"] == "bfloat16"
    auto: Any = AutoModelForCausalLM
    assert auto.from_pretrained(trained, dtype="auto").dtype == torch.bfloat16
    tokenizer: Any = AutoTokenizer
    assert tokenizer.from_pretrained(trained).chat_template


def check_refusals(tiny: Job, hub: Hub) -> None:
    """Each is a line that says what to do, without the token."""
    refused: list[tuple[str, int, Mapping[str, Any], str]] = [
        ("/create", 401, {"error": "Invalid token"}, "the Hub does not accept the token: run 'hf"),
        ("/create", 403, {"error": f"no right for {TOKEN}"}, "it needs the right to write"),
        ("/preupload/", 404, {"error": "gone"}, "there is no such repository or branch"),
        ("/validate-yaml", 400, {"errors": [{"message": "bad tags"}]}, "- bad tags"),
        ("/commit/", 500, {"error": "full"}, "500: full"),
    ]
    for part, status, answer, words in refused:
        hub.answers = {part: (status, answer)}
        ended = tiny.command("push", tiny.out, "me/sums")
        assert ended.code == 1, part
        assert "error: me/sums was not pushed: " in ended.err
        assert words in ended.err
        assert TOKEN not in ended.err


def test_what_cannot_be_pushed_is_said_before_anything_is_sent(
    tiny: Job, hub: Hub, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(*arguments: object) -> str:
        ended = tiny.command("push", *arguments)
        assert ended.code == 2, ended.err
        return ended.err

    (tmp_path / "empty").mkdir()
    assert "there is no such folder" in said(tmp_path / "none", "me/sums")
    assert "is neither the folder of a run nor of a model" in said(tmp_path / "empty", "me/sums")
    (tmp_path / "empty" / "config.json").write_text("{}")
    assert "holds no weights (*.safetensors)" in said(tmp_path / "empty", "me/sums")
    assert "'me/su ms' is no name of a repository" in said(tmp_path / "empty", "me/su ms")
    tiny.succeed("--training.iterations", 1, "--training.export", "false")
    assert "has no trained/, which a run writes at its end" in said(tiny.out, "me/sums")
    exported = tmp_path / "exported"
    assert tiny.command("export", tiny.out, exported, "--dtype", "bfloat16").code == 0
    assert "by the job `language_rl`" in (exported / "README.md").read_text()
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert "run 'hf auth login', or set HF_TOKEN" in said(exported, "me/sums")
    assert not hub.asked
    for setting, value in (("export_precision", "bfloat16"), ("export_shard_gb", 1)):
        ended = tiny.train("--training.export", "false", f"--training.{setting}", value)
        assert ended.code == 2
        assert f"{setting} is" in ended.err


def test_a_hub_that_cannot_be_reached_is_named(
    tmp_path: pathlib.Path, tiny: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    ended = tiny.command("push", tmp_path, "me/sums")
    assert ended.code == 1
    assert "http://127.0.0.1:1 cannot be reached" in ended.err
    assert TOKEN not in ended.err
