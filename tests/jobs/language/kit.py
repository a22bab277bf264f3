"""Small runs of the language job, by the command line's own `main`, in this process."""

from __future__ import annotations

import csv
import pathlib

import pytest

from rlinf_async.cli import main
from rlinf_async.observe.summary import LanguageSummary, read_summary
from tests.jobs.embodied.kit import Ended

TOY = """\
job = "language_rl"
name = "toys"

[model]
tokenizer = "arithmetic"

[model.config]
model_type = "qwen3"
hidden_size = 32
num_hidden_layers = 1
intermediate_size = 64
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 16

[data]
path = "{data}"
verifier = "numeric"
held_out = 4

[training]
iterations = 4
prompts = 4
group_size = 2
checkpoint_every = 2
metrics = []

[rollout]
backend = "toy"

[rollout.sampling]
max_tokens = 8

[rollout.toy]
seconds_per_step = 0.001
mean_tokens = 4

[actor]
backend = "toy"
toy = {{ seconds_per_token = 0.0, seconds_per_step = 0.0 }}

[evaluation]
samples = 4

[cluster]
backend = "local"
"""

TINY = (
    TOY.replace('name = "toys"', 'name = "tiny"')
    .replace(
        'backend = "toy"\n\n[rollout.sampling]', 'backend = "transformers"\n\n[rollout.sampling]'
    )
    .replace('[actor]\nbackend = "toy"\n', "[actor]\nmicro_batch_size = 4\n")
)
"""The same with a real model of random weights."""


class Job:
    """One configuration file and one run folder."""

    def __init__(
        self, folder: pathlib.Path, capture: pytest.CaptureFixture[str], text: str = TOY
    ) -> None:
        data = folder / "sums.jsonl"
        lines = [f'{{"prompt": "{a}+{a + 1}=", "answer": "{2 * a + 1}"}}' for a in range(24)]
        data.write_text("\n".join(lines) + "\n")
        self.file = folder / "run.toml"
        self.file.write_text(text.format(data=data), encoding="utf-8")
        self.out = folder / "run"
        self._capture = capture

    def train(self, *arguments: object) -> Ended:
        """``rlinf-async train run.toml --out run ...``."""
        return self.command("train", self.file, "--out", self.out, *arguments)

    def command(self, *arguments: object) -> Ended:
        self._capture.readouterr()
        code = main([str(argument) for argument in arguments])
        printed = self._capture.readouterr()
        return Ended(code, printed.out, printed.err)

    def succeed(self, *arguments: object) -> LanguageSummary:
        """Train, and expect it to end well."""
        ended = self.train(*arguments)
        assert ended.code == 0, ended.err
        return self.summary

    @property
    def summary(self) -> LanguageSummary:
        return read_summary(self.out / "summary.json", LanguageSummary)

    @property
    def iterations(self) -> list[dict[str, str]]:
        """The rows of ``metrics.csv`` that tell of an iteration."""
        with (self.out / "metrics.csv").open(newline="") as file:
            return [row for row in csv.DictReader(file) if row["iteration"]]

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.out / "checkpoints").glob("version-*"))
