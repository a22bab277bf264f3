"""What the device does in how long: ``python -m tests.gpu.figures [NAME ...]``.

Models have the shape of Qwen3-0.6B (its layers, and a vocabulary of their own) and random weights;
nothing is downloaded. Each figure is printed as it is known; a part that fails does not keep the
others from being measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rlinf_async as ra
from rlinf_async.backends.fsdp.language.trainer import PolicyTrainer
from rlinf_async.backends.transformers.config import TransformersEngineConfig
from rlinf_async.backends.transformers.engine import TransformersEngine
from rlinf_async.cli import main as command
from rlinf_async.messages.language import TrainingSample
from rlinf_async.observe.trace import read_perfetto
from tests.backends.language.kit import micro_batches, trainer_config
from tests.backends.models import endless, make_model, publish, qwen3, save_folder
from tests.backends.requests import request
from tests.channels.wire.harness import remote_pair
from tests.gpu.kit import DEVICE, held

SHAPE: dict[str, Any] = {
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
JOB = """\
job = "language_rl"
name = "figures"

[model]
tokenizer = "arithmetic"
config = {{ model_type = "qwen3", {shape}, max_position_embeddings = 512 }}

[data]
path = "{data}"
verifier = "numeric"
held_out = 16

[training]
iterations = 3
prompts = 32
group_size = 8
checkpoint_every = 0
check_weights_every = 1
export = false
metrics = []

[rollout.sampling]
max_tokens = 128

[rollout.transformers]
dtype = "bfloat16"
max_concurrent = 256

[actor]
backend = "{backend}"
precision = "bfloat16"
publish_precision = "bfloat16"
max_tokens = 16384
global_batches = 2

[evaluation]
samples = 16
"""


def say(what: str, figure: float, unit: str) -> None:
    print(f"{what:60} {figure:12.3f} {unit}", flush=True)


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    torch.cuda.synchronize()
    start = time.perf_counter()
    yield
    torch.cuda.synchronize()
    say(what, time.perf_counter() - start, "s")


def channels() -> None:
    """Tensors of 64 MiB from one process to another, here in one loop."""

    async def run(device: str) -> None:
        count, one = 16, torch.rand(16 << 20, device=device)
        async with remote_pair(ra.Channel(torch.Tensor, name="tensors")) as (sender, receiver):
            for turn in range(2):
                start = time.perf_counter()
                for _ in range(count):
                    await sender.put(one)
                    await receiver.get()
                if turn:
                    rate = count * one.nbytes / (time.perf_counter() - start) / 1e9
                    say(f"channel, tensors of 64 MiB from {device}", rate, "GB/s")

    for device in (DEVICE, "cpu"):
        asyncio.run(run(device))
    one = torch.rand(16 << 20, device=DEVICE)
    pinned = torch.empty(one.shape, pin_memory=True)
    ways: dict[str, Callable[[], object]] = {
        "pageable": lambda: one.cpu(),
        "pinned": lambda: pinned.copy_(one),
    }
    for name, copy in ways.items():
        copy()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(8):
            copy()
        torch.cuda.synchronize()
        rate = 8 * one.nbytes / (time.perf_counter() - start) / 1e9
        say(f"copy of 64 MiB to the CPU, {name}", rate, "GB/s")


def engine() -> None:
    """Tokens of the transformers engine, with weights of 0.6 billion parameters and of few."""

    async def run(name: str, model: Any, rows: int, tokens: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = save_folder(Path(folder), model.config)
            config = TransformersEngineConfig(model=path, dtype="bfloat16", max_concurrent=rows)
            made = TransformersEngine(config, device=DEVICE)
            await made.start()
            update = publish(model, 0)
            start = time.perf_counter()
            await made.load(update)
            size = sum(bucket.data.nbytes for bucket in update.buckets) / 1e9
            say(f"{name}: load of {size:.2f} GB", time.perf_counter() - start, "s")
            for turn in range(2):
                asked = [request(i, (5, 6, 7 + i % 9), max_tokens=tokens) for i in range(rows)]
                start = time.perf_counter()
                got = await asyncio.gather(*(made.generate(one) for one in asked))
                seconds = time.perf_counter() - start
                made_tokens = sum(len(one.token_ids) for one in got)
                if turn:
                    say(f"{name}: {rows} rows x {tokens} tokens", made_tokens / seconds, "tokens/s")
            for doing, call in (("offload", made.offload), ("onload", made.onload)):
                start = time.perf_counter()
                await call()
                torch.cuda.synchronize()
                say(f"{name}: {doing}", time.perf_counter() - start, "s")
            await made.close()

    fields = {name: SHAPE[name] for name in ("intermediate_size", "num_attention_heads",
              "num_key_value_heads", "head_dim")}  # fmt: skip
    large = endless(
        make_model(qwen3(hidden=1024, layers=28, vocab_size=32_000, **fields), sharpness=0.02)
    )
    for rows in (1, 64, 256):
        asyncio.run(run("engine, 0.6 B, bfloat16", large, rows, 128))
    asyncio.run(run("engine, 0.2 M, bfloat16", endless(make_model(qwen3())), 256, 128))


def samples(count: int, tokens: int, vocabulary: int) -> list[TrainingSample]:
    random = np.random.default_rng(0)
    return [
        TrainingSample(
            group=number // 8,
            index=number % 8,
            prompt_ids=random.integers(0, vocabulary, 32).astype(np.int32),
            response_ids=random.integers(0, vocabulary, tokens).astype(np.int32),
            loss_mask=np.ones(tokens, np.bool_),
            log_prob=np.full(tokens, -10.0, np.float32),
            version=np.zeros(tokens, np.int32),
            temperature=1.0,
            reward=float(number % 2),
            scored=True,
            prev_log_prob=np.full(tokens, -10.0, np.float32),
        )
        for number in range(count)
    ]


def trainer(backend: str) -> None:
    """Steps, turns, published weights and checkpoints of 0.6 billion parameters."""
    described = SHAPE | {"model_type": "qwen3", "vocab_size": 32_000, "tie_word_embeddings": True,
                         "max_position_embeddings": 1024}  # fmt: skip
    fsdp = trainer_config(described, fsdp={"device": DEVICE, "precision": "bfloat16"})
    made: Any
    if backend == "fsdp":
        made = PolicyTrainer(fsdp, 1, 0)
    else:
        from rlinf_async.backends.megatron.config import MegatronConfig, MegatronTrainerConfig
        from rlinf_async.backends.megatron.trainer import MegatronTrainer

        config = MegatronConfig(
            model=fsdp.fsdp.model, device=DEVICE, precision="bfloat16",
            optimizer=fsdp.fsdp.optimizer,
        )  # fmt: skip
        made = MegatronTrainer(MegatronTrainerConfig(megatron=config), 1, 0)
    name = f"{backend}, 0.6 B, bfloat16"
    batch = made.compute_advantages(samples(64, 480, 32_000))
    for turn in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        made.training_step(iter(micro_batches(batch, 16)))
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        if turn == 2:
            say(f"{name}: step of 64 samples of 512 tokens", seconds, "s")
            say(f"{name}: trained", 64 * 512 / seconds, "tokens/s")
    made.end_iteration()
    say(f"{name}: peak memory", torch.cuda.max_memory_allocated() / 1e9, "GB")
    made.log_probs(batch)
    with timed(f"{name}: log-probs of the same"):
        made.log_probs(batch)
    for which in ("first", "second"):
        before = held()
        with timed(f"{name}: offload, {which}"):
            made.offload()
        after = torch.cuda.memory_reserved()
        say(f"{name}: memory before, and what is kept", before / 1e9, "GB")
        say(f"{name}: kept after offload", after / 1e9, "GB")
        with timed(f"{name}: onload, {which}"):
            made.onload()
    for which in ("first", "second"):
        with timed(f"{name}: publish, {which}"):
            made.publish()
        made.training_step(iter(micro_batches(batch[:8], 8)))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for which in ("first", "second"):
            torch.cuda.synchronize()
            start = time.perf_counter()
            written = made.begin_checkpoint(Path(folder) / which)
            say(f"{name}: checkpoint, {which}: training waits", time.perf_counter() - start, "s")
            written.result(300)
            say(f"{name}: checkpoint, {which}: on disk", time.perf_counter() - start, "s")


def job(backend: str) -> None:
    """The whole language job, actor and engine in turns on one device."""
    with tempfile.TemporaryDirectory() as folder:
        data, file = Path(folder) / "sums.jsonl", Path(folder) / "run.toml"
        lines = [f'{{"prompt": "{a}+{a + 1}=", "answer": "{2 * a + 1}"}}' for a in range(96)]
        data.write_text("\n".join(lines) + "\n")
        shape = ", ".join(f"{name} = {value}" for name, value in SHAPE.items())
        file.write_text(JOB.format(data=data, shape=shape, backend=backend))
        used = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        watch = subprocess.Popen([*used, "-lms", "100"], stdout=subprocess.PIPE, text=True)
        try:
            code = command(["train", str(file), "--out", f"{folder}/run"])
        finally:
            watch.terminate()
            memory = [int(line) for line in watch.communicate()[0].split() if line.isdigit()]
        say(f"job, {backend}: exit code", code, "")
        runs: list[list[int]] = []  # of equal numbers, as the memory at each turn
        for one in memory:
            if not runs or abs(one - runs[-1][0]) > 256:
                runs.append([one, 0])
            runs[-1][1] += 1
        print("memory (MiB x 0.1 s):", " ".join(f"{size}x{count}" for size, count in runs))
        print((Path(folder) / "run" / "metrics.csv").read_text())
        print((Path(folder) / "run" / "summary.json").read_text())
        spans = defaultdict[tuple[str, str], list[float]](list)
        for span in read_perfetto(Path(folder) / "run" / "trace.json.gz"):
            spans[span.worker, span.name].append(span.duration / 1e9)
        for (worker, name), seconds in sorted(spans.items()):
            if len(seconds) <= 64:
                print(f"{worker:20} {name:20}", " ".join(f"{one:.3g}" for one in seconds[:12]))


PARTS: dict[str, Callable[[], None]] = {
    "channels": channels,
    "engine": engine,
    "fsdp": lambda: trainer("fsdp"),
    "megatron": lambda: trainer("megatron"),
    "job": lambda: job("fsdp"),
    "job-megatron": lambda: job("megatron"),
}


def main() -> int:
    names = sys.argv[1:] or [*PARTS]
    failed = 0
    for name in names:
        print(f"== {name}", flush=True)
        try:
            PARTS[name]()
        except Exception:
            traceback.print_exc()
            failed += 1
        held()
    return failed


if __name__ == "__main__":
    sys.exit(main())
