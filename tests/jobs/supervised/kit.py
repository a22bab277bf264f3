"""Small runs of the jobs that learn from examples, by the command line's own `main`."""

from __future__ import annotations

import json
import pathlib

import pytest

from rlinf_async.observe.summary import SupervisedSummary
from tests.jobs import kit as jobs
from tests.jobs.language.checkpoints import save_checkpoint

SFT = """\
job = "sft"
name = "tiny"

[model]
tokenizer = "arithmetic"

[model.config]
model_type = "qwen3"
hidden_size = 32
num_hidden_layers = 2
intermediate_size = 64
num_attention_heads = 2
num_key_value_heads = 2
head_dim = 16
max_position_embeddings = 64
initializer_range = 0.1

[data]
path = "{folder}/sums.jsonl"
held_out = 4

[training]
steps = 5
batch_size = 4
evaluate_every = 2
checkpoint_every = 2

[actor]
micro_batch_size = 2

[actor.optimizer]
lr = 3e-3

[observe]
sinks = []

[cluster]
backend = "local"
"""
DISTILL = SFT.replace('"sft"', '"distill"').replace(
    "[training]", '[teacher]\npath = "{folder}/teacher"\ntop_k = 6\n\n[training]'
)
DPO = SFT.replace('"sft"', '"dpo"').replace("sums.jsonl", "pairs.jsonl")


class Job(jobs.Job[SupervisedSummary]):
    """One configuration file and one run folder."""

    def __init__(
        self, folder: pathlib.Path, capture: pytest.CaptureFixture[str], text: str = SFT
    ) -> None:
        folder.mkdir(exist_ok=True)
        sums = [(a, a + 1, 2 * a + 1) for a in range(24)]
        answers = [{"prompt": f"{a}+{b}=", "completion": str(c)} for a, b, c in sums]
        pairs = [
            {"prompt": f"{a}+{b}=", "chosen": str(c), "rejected": f"{c}{c + 1}"} for a, b, c in sums
        ]
        for name, records in (("sums", answers), ("pairs", pairs)):
            lines = "".join(json.dumps(one) + "\n" for one in records)
            (folder / f"{name}.jsonl").write_text(lines)
        if "[teacher]" in text:
            save_checkpoint(folder / "teacher", "qwen3")
        super().__init__(
            folder / "run.toml", text.format(folder=folder), capture, SupervisedSummary
        )
