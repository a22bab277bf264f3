"""The rollout worker over real engines, in processes of their own.

The tests run on a plain loop: what they compare with is computed on it, and takes its time.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray
from torch import nn

import rlinf_async as ra
from rlinf_async.backends.transformers.config import TransformersEngineConfig
from rlinf_async.backends.vllm.config import VllmEngineConfig
from rlinf_async.backends.vllm.engine import VllmEngine
from rlinf_async.channels import LatestSender
from rlinf_async.channels.wire import shared_bytes
from rlinf_async.messages.language import Sample
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.weights.pack import pack, unpack
from rlinf_async.workers.rollout.language import LanguageRolloutWorker
from tests.backends.models import log_probs, make_model, publish, qwen3, save_folder
from tests.backends.requests import request
from tests.workers.rollout.language_kit import Channels


class VllmRollout(LanguageRolloutWorker):
    """Tells what the test has to kill."""

    async def process_ids(self) -> list[int]:
        """This process, then those of the engine."""
        engine = self._live.engine
        assert isinstance(engine, VllmEngine)
        return [os.getpid(), *engine.process_ids]


class DyingActor(ra.Worker):
    """Publishes a model from shared memory, and is killed before or just after it is out."""

    async def publish(self, seed: int, weights: LatestSender[WeightUpdate], *, whole: bool) -> None:
        """Publish the model of this seed, as that version."""
        made = 0

        def allocate(size: int) -> NDArray[np.uint8] | None:
            nonlocal made
            made += 1
            if made == 3 and not whole:
                os.kill(os.getpid(), signal.SIGKILL)
            return shared_bytes(size)

        tensors = unpack(publish(make_model(qwen3(), seed), seed))
        await weights.publish(pack(tensors, seed, bucket_bytes=100_000, allocate=allocate))
        os.kill(os.getpid(), signal.SIGKILL)


def right(sample: Sample, model: nn.Module, version: int) -> None:
    """The sample's log-probs are the model's."""
    got, prompt = sample.generated, sample.request.prompt.token_ids
    assert set(got.version.tolist()) == {version}
    expected = log_probs(model, prompt, got.token_ids)
    np.testing.assert_allclose(got.log_prob, expected.numpy(), atol=1e-4, rtol=0)
    assert sample.text.split() == [f"w{token}" for token in got.token_ids if token > 1]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A model without weights, written outside of a test's loop."""
    return save_folder(tmp_path, qwen3())


def test_samples_of_the_transformers_engine_are_the_published_models(folder: str) -> None:
    ra.run(_two_versions_and_a_broken_one(folder))


async def _two_versions_and_a_broken_one(folder: str) -> None:
    models = [make_model(qwen3(), seed) for seed in (1, 2)]
    config = TransformersEngineConfig(model=folder)
    async with ra.Cluster.process() as cluster:
        channels = Channels(cluster)
        rollout = await cluster.launch(LanguageRolloutWorker, config, count=2)
        serving = channels.serve(rollout, [0, 1])
        for version, model in enumerate(models):
            await channels.weights.sender.publish(publish(model, version))
            asked = [request(i, group=version, min_version=version) for i in range(12)]
            await channels.ask(*asked)
            for sample in (await channels.collect(12)).values():
                right(sample, model, version)
        broken = make_model(qwen3())
        broken.get_parameter("model.norm.weight").fill_(float("nan"))
        await channels.weights.sender.publish(publish(broken, 2))
        await channels.ask(request(group=3, min_version=2))
        with pytest.raises(ra.WorkerError, match=r"ModelOutputError: request 3/0 \(prompt 3\)"):
            await serving


def test_what_a_dying_actor_published_is_served_and_what_it_did_not_is_not(folder: str) -> None:
    ra.run(_actors_die_while_they_publish(folder))


async def _actors_die_while_they_publish(folder: str) -> None:
    config = TransformersEngineConfig(model=folder)
    async with ra.Cluster.process() as cluster:
        channels = Channels(cluster)
        rollout = await cluster.launch(LanguageRolloutWorker, config)
        actors = await cluster.launch(DyingActor, count=2)
        serving = channels.serve(rollout)
        await channels.weights.sender.publish(publish(make_model(qwen3(), 0), 0))
        for seed, whole, served in [(1, False, 0), (2, True, 2)]:
            with pytest.raises(ra.WorkerDied):
                await actors[seed - 1].call(
                    DyingActor.publish, seed, channels.weights.sender, whole=whole
                )
            asked = [request(i, group=seed, min_version=served) for i in range(4)]
            await channels.ask(*asked)
            for sample in (await channels.collect(4)).values():
                right(sample, make_model(qwen3(), served), served)
        channels.requests.close()
        [report] = await serving
        assert (report.samples, report.version, report.engine_restarts) == (8, 2, 0)


def test_samples_of_vllm_are_the_published_models_and_no_engine_outlives_its_worker(
    folder: str,
) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed: make test installs it")
    ra.run(_a_worker_is_killed_while_its_engine_answers(folder))


async def _a_worker_is_killed_while_its_engine_answers(folder: str) -> None:
    model = make_model(qwen3(), 3)
    engine = VllmEngineConfig(model=folder, kv_cache_bytes=32 * 2**20, max_concurrent=16)
    async with ra.Cluster.process() as cluster:
        channels = Channels(cluster)
        rollout = await cluster.launch(VllmRollout, engine, backend="vllm")
        serving = channels.serve(rollout)
        await channels.weights.sender.publish(publish(model, 4))
        taken = await channels.taken.receiver.get()
        assert (taken.version, taken.checksum) == (4, publish(model, 4).checksum)
        await channels.ask(*(request(i, max_tokens=200) for i in range(12)))
        for sample in (await channels.collect(12)).values():
            right(sample, model, 4)
        worker, core = await rollout[0].call(VllmRollout.process_ids)
        await channels.ask(*(request(i, max_tokens=200) for i in range(12, 24)))
        await channels.samples.receiver.get()
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(ra.WorkerDied):
            await serving
        await asyncio.to_thread(psutil.wait_procs, _alive(core), 60)
        assert not _alive(core)


def _alive(pid: int) -> list[psutil.Process]:
    try:
        return [psutil.Process(pid)]
    except psutil.NoSuchProcess:
        return []
