"""The overlap bench: its real backends in the small mode, and its toys' bound."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from benchmarks.harness.run import BENCHMARKS
from benchmarks.overlap import toys
from rlinf_async.messages.language import Prompt, Request, Sampling


def test_the_bound_is_the_last_arrival_and_what_can_only_be_trained_after_it(
    tmp_path: pathlib.Path,
) -> None:
    config = toys.configured(0.0, True, tmp_path / "none.jsonl")
    prompt = Prompt(
        index=0, text="", token_ids=np.zeros(10, np.int32), verifier="exact", reference=""
    )
    asked = [
        Request(
            group=group,
            index=0,
            group_size=1,
            iteration=0,
            min_version=0,
            prompt=prompt,
            sampling=Sampling(max_tokens=1000),
            seed=group,
        )
        for group in range(4)
    ]
    # Without a tail all arrive together, so nothing can overlap.
    overlapped, turns = toys.bounds(config, asked)
    generation = toys.MEAN_TOKENS * toys.STEP
    training = 4 * (10 + toys.MEAN_TOKENS) * toys.TOKEN
    assert turns == pytest.approx(generation + training + toys.UPDATE + toys.LOAD)
    assert overlapped == pytest.approx(turns)


@pytest.mark.slow
def test_vllm_and_fsdp_train_both_ways_in_the_small_mode(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("vllm")
    script = BENCHMARKS / "overlap" / "real.py"
    command = [sys.executable, str(script), "--size", "small", "--pairs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-1000:]
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["speedup"] > 0.0
    assert measured["generation_seconds"] > 0.0 < measured["training_seconds"]
