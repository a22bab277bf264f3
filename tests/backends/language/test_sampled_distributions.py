"""Every sampling setting is trained as it was sampled: engine x setting x trainer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from torch import nn

from rlinf_async.algorithms.config import LanguageLossConfig
from rlinf_async.backends.fsdp.language.config import LanguageFSDPConfig, LanguageTrainerConfig
from rlinf_async.backends.fsdp.language.trainer import PolicyTrainer
from rlinf_async.backends.language import EngineDisagrees, MicroBatch
from rlinf_async.backends.megatron.config import MegatronConfig, MegatronTrainerConfig
from rlinf_async.backends.megatron.feed import decode, encode
from rlinf_async.backends.transformers.config import TransformersEngineConfig
from rlinf_async.backends.transformers.engine import TransformersEngine
from rlinf_async.messages.language import Kept, Sample
from tests.backends.distributions import (
    BAR,
    LOSS,
    PROXIMAL,
    RULES,
    asked,
    check_computed,
    check_each_token_is_trained,
    check_kept,
    computed,
    episode_of,
    fields_of,
    sample_of,
    save_with_defaults,
    trained_on,
    twin_model,
)
from tests.backends.fsdp_helpers import in_processes, save_result
from tests.backends.transformers.kit import generate_all


class Made(NamedTuple):
    """Samples of every setting, by the transformers engine; the last one is an episode."""

    model: nn.Module
    path: str
    samples: dict[str, list[Sample]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    model = twin_model()
    path = save_with_defaults(tmp_path_factory.mktemp("model"), model)

    async def generate() -> dict[str, list[Sample]]:
        engine = TransformersEngine(TransformersEngineConfig(model=path, weights="folder"))
        await engine.start()
        try:
            # All at once: rows of other settings are beside each.
            every = {rule: asked(rule) for rule in RULES}
            found = await asyncio.gather(*(generate_all(engine, each) for each in every.values()))
            episodes = [await episode_of(engine.generate, rule) for rule in RULES]
        finally:
            await engine.close()
        return {
            rule: [*(sample_of(one, got) for one, got in zip(each, all_of, strict=True)), episode]
            for (rule, each), all_of, episode in zip(every.items(), found, episodes, strict=True)
        }

    return Made(model, path, asyncio.run(generate()))


def fsdp(path: str, **fields: Any) -> PolicyTrainer:
    given: dict[str, Any] = {"loss": LOSS, "reference": True} | fields
    config = LanguageTrainerConfig(fsdp=LanguageFSDPConfig(**fields_of(path)), **given)
    return PolicyTrainer(config, 1, 0)


@pytest.fixture(scope="module")
def trainer(made: Made) -> PolicyTrainer:
    return fsdp(made.path)


@pytest.mark.parametrize("rule", RULES)
def test_fsdp_trains_what_was_sampled(made: Made, trainer: PolicyTrainer, rule: str) -> None:
    for one in made.samples[rule]:
        check_kept(rule, one.generated)
    check_computed(made.model, made.samples[rule], computed(trainer, made.samples[rule]))


@pytest.mark.parametrize("proximal", PROXIMAL)
def test_no_token_of_a_negative_advantage_is_silenced(made: Made, proximal: str) -> None:
    trainer = fsdp(made.path, loss=PROXIMAL[proximal])
    for rule in BAR:
        check_each_token_is_trained(trainer, made.samples[rule])


def test_settings_do_not_mix_in_a_micro_batch(made: Made) -> None:
    mixed = [made.samples[rule][0] for rule in RULES]
    check_computed(made.model, mixed, computed(fsdp(made.path, logit_chunk_bytes=4096), mixed))


def by_megatron(rank: int, world_size: int, folder: Path, path: str, tp: int) -> None:
    from rlinf_async.backends.megatron.trainer import MegatronTrainer

    config = MegatronTrainerConfig(
        megatron=MegatronConfig(tp=tp, **fields_of(path)), loss=LOSS, reference=True
    )
    trainer = MegatronTrainer(config, world_size, rank)
    samples = decode((folder / "samples").read_bytes(), dict[str, list[Sample]])
    save_result(folder, rank, {rule: computed(trainer, each) for rule, each in samples.items()})


@pytest.mark.parametrize("tp", [1, 2])
def test_megatron_trains_what_was_sampled(made: Made, tmp_path: Path, tp: int) -> None:
    pytest.importorskip("megatron.core")
    (tmp_path / "samples").write_bytes(encode(made.samples))
    found, *_ = in_processes(by_megatron, tp, tmp_path, made.path, tp)
    for rule, samples in made.samples.items():
        check_computed(made.model, samples, found[rule])


def test_another_distribution_than_was_sampled_ends_the_run_by_name(made: Made) -> None:
    trainer = fsdp(made.path, loss=LanguageLossConfig(), engine_tolerance=1e-3)
    lost = trained_on(made.samples["two"], 1.0)
    for one in lost:
        one.kept = None
    before = trainer.publish().checksum
    with pytest.raises(EngineDisagrees, match=r"version 0: .* of the \d+ tokens .*allowed 1e-03"):
        trainer.training_step([MicroBatch(lost, True)])
    assert trainer.publish().checksum == before
    trainer.training_step([MicroBatch(trained_on(made.samples["two"], 1.0), True)])
    # Behind the first step of an iteration the weights are of no version: nothing is compared.
    assert "engine_actor_tokens" not in trainer.training_step([MicroBatch(lost, True)])
    trainer.end_iteration()
    found = trainer.training_step([MicroBatch(lost, True)])  # of version 0, and this is 1
    assert found["engine_actor_tokens"] == 0.0
    assert "engine_actor_difference" not in found


def test_only_tokens_of_the_trained_version_are_compared(made: Made) -> None:
    trainer = fsdp(made.path, loss=LanguageLossConfig())
    batch = trained_on(made.samples["plain"], 1.0)
    batch[0].version = batch[0].version - 1
    batch[0].log_prob = batch[0].log_prob - np.float32(1.0)
    found = trainer.training_step([MicroBatch(batch, True)])
    assert found["engine_actor_tokens"] == sum(int(one.loss_mask.sum()) for one in batch[1:])
    assert found["engine_actor_difference"] < 1e-5


def test_a_token_that_was_not_kept_is_named(made: Made, trainer: PolicyTrainer) -> None:
    [one] = trained_on(made.samples["two"][2:3])
    sets = [each.tolist() for each in one.kept.sets()] if one.kept else []
    sets[4] = [(int(one.response_ids[4]) + 1) % 256]
    one.kept = Kept.of(sets)
    with pytest.raises(ValueError, match=r"sample 2/2: token 4 \(\d+\) is 0 times among the 1"):
        trainer.log_probs([one])
