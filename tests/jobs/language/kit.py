"""Small runs of the language job, by the command line's own `main`, in this process."""

from __future__ import annotations

import pathlib

import pytest

from rlinf_async.observe.summary import LanguageSummary
from tests.jobs import kit as jobs

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

[observe]
sinks = []

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
LOSSES = ("policy_loss", "grad_norm", "reward", "response_tokens", "behaviour_log_prob")
"""metrics that say whether two runs trained on the same samples, to the same weights"""


class Job(jobs.Job[LanguageSummary]):
    """One configuration file and one run folder."""

    def __init__(
        self, folder: pathlib.Path, capture: pytest.CaptureFixture[str], text: str = TOY
    ) -> None:
        data = folder / "sums.jsonl"
        lines = [f'{{"prompt": "{a}+{a + 1}=", "answer": "{2 * a + 1}"}}' for a in range(24)]
        data.write_text("\n".join(lines) + "\n")
        super().__init__(folder / "run.toml", text.format(data=data), capture, LanguageSummary)
