"""Engines serve the weights of a training group, by tensors and by channel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlinf_async.backends.transformers.config import TransformersEngineConfig
from rlinf_async.messages.language import Generated, Prompt, Request, Sampling
from rlinf_async.runtime.ray.session import of_ray
from rlinf_async.runtime.ray.training import (
    RayTrainGroup,
    RolloutEngineActor,
    TrainArgs,
    create_placement_group,
)
from tests.jobs.language.checkpoints import save_checkpoint
from tests.runtime.ray.training.kit import GROUP, PROMPTS, args

pytestmark = pytest.mark.xdist_group("ray")


class Manager(RolloutEngineActor):
    """A rollout manager that is its own engine."""

    config: dict[str, int]

    async def set_train_parallel_config(self, config: dict[str, int]) -> None:
        self.config = config

    async def parallel_config(self) -> dict[str, int]:
        return self.config

    async def get_rollout_engines(self) -> list[Any]:
        context: Any = of_ray().get_runtime_context()
        return [context.current_actor]


def requests() -> list[Request]:
    random = np.random.default_rng(0)
    found = []
    for group in range(PROMPTS):
        tokens = random.integers(10, 20, 3).astype(np.int32)
        prompt = Prompt(index=group, text="", token_ids=tokens, verifier="", reference="")
        found += [
            Request(
                group=group,
                index=index,
                group_size=GROUP,
                iteration=0,
                min_version=0,
                prompt=prompt,
                sampling=Sampling(max_tokens=6),
                seed=10 * group + index,
            )
            for index in range(GROUP)
        ]
    return found


def rollout(ray: Any, engine: Any) -> dict[str, Any]:
    asked = requests()
    made: list[Generated] = ray.get(engine.generate.remote(asked))
    return {
        "tokens": [[*r.prompt.token_ids, *g.token_ids] for r, g in zip(asked, made, strict=True)],
        "response_lengths": [len(one.token_ids) for one in made],
        "rewards": [float(at % 3) for at in range(len(made))],
        "rollout_log_probs": [one.log_prob for one in made],
        "weight_versions": [one.version for one in made],
    }


@pytest.mark.parametrize(("colocate", "ranks"), [(False, 2), (True, 1)])
def test_an_engine_samples_from_the_weights_that_were_trained(
    ray: Any, tmp_path: Path, colocate: bool, ranks: int
) -> None:
    folder = str(save_checkpoint(tmp_path / "model", "qwen3"))
    given: TrainArgs = args(
        hf_checkpoint=folder,
        model_config={},
        save=str(tmp_path / "save"),
        save_hf=str(tmp_path / "hf-{rollout_id}"),
        num_steps_per_rollout=1,
        colocate=colocate,
        offload_train=True,
        debug_train_only=False,
    )
    group = RayTrainGroup(given, 1, ranks, create_placement_group(ranks), num_gpus_per_actor=0.5)
    engine: Any = ray.remote(Manager).options(num_cpus=0)
    engine = engine.remote(TransformersEngineConfig(model=folder))
    try:
        ray.get([*group.async_init(), engine.start.remote()])
        read = lambda one: (one.hf_config.model_type, one.tokenizer.eos_token)  # noqa: E731
        found = ray.get([actor.__ray_call__.remote(read) for actor in group.actors])
        assert found == [("qwen3", "<eos>")] * ranks
        with pytest.raises(RuntimeError, match="needs a rollout manager: call set_rollout_manager"):
            group.update_weights()
        group.set_rollout_manager(engine)
        assert ray.get(engine.parallel_config.remote()) == {"dp_size": ranks}
        for version in range(3):
            group.update_weights()  # asleep before and after
            group.update_weights()  # once more is harmless
            assert ray.get(engine.version.remote()) == version
            report = ray.get(group.async_train(version, rollout(ray, engine)))[0]
            assert (report.lag_max, report.version) == (0, version + 1)
            # The first step of a rollout is made from the weights that it was sampled from.
            assert report.metrics["ratio"] == pytest.approx(1.0, abs=1e-4)
            assert report.metrics["approx_kl"] == pytest.approx(0.0, abs=1e-6)
            group.offload()
        group.save_model(2)
        assert (tmp_path / "hf-2" / "model.safetensors").is_file()
        assert (tmp_path / "hf-2" / "tokenizer.json").is_file()
    finally:
        group.shutdown()
        ray.kill(engine)
