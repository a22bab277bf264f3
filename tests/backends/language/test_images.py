"""Prompts with images: engine, trainer and the plain model of transformers, alone and sharded."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from rlinf_async.backends.fsdp.language.trainer import CriticTrainer, PolicyTrainer
from rlinf_async.backends.language import (
    SEEING,
    MicroBatch,
    UnsupportedModel,
    check_family,
    model_factory,
)
from rlinf_async.backends.language_training.objective import pack_responses
from rlinf_async.backends.transformers.config import TransformersEngineConfig
from rlinf_async.backends.transformers.engine import TransformersEngine
from rlinf_async.data.images import ImageProcessor
from rlinf_async.messages.language import (
    Generated,
    Prompt,
    Request,
    Sample,
    Sampling,
    TrainingSample,
)
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.weights.pack import unpack
from rlinf_async.workers.inference import as_bare, with_log_probs
from tests.backends.fsdp_helpers import in_processes, load_result, save_result
from tests.backends.seeing import prompts, seeing_folder, seeing_trainer


class Drawn:
    """Samples that an engine has drawn under a trainer's second version."""

    def __init__(self, folder: Path, family: str) -> None:
        self.family = family
        self.model = seeing_folder(folder, family)
        self.prompts = prompts(folder, self.model, 50 if family == "idefics3" else 22)
        self.trainer = PolicyTrainer(seeing_trainer(self.model), 1, 0)
        first = self.trainer.publish()
        with torch.no_grad():
            for parameter in self.trainer.manager.model.parameters():
                parameter.mul_(1.1)
        self.trainer.end_iteration()
        self.second = self.trainer.publish()
        self.samples = asyncio.run(drawn(self.model, self.prompts, first, self.second))


def asked(prompt: Prompt, group: int, index: int) -> Request:
    return Request(
        group=group,
        index=index,
        group_size=2,
        iteration=0,
        min_version=0,
        prompt=prompt,
        sampling=Sampling(max_tokens=24),
        seed=10 * group + index,
    )


async def drawn(
    model: Path, given: Sequence[Prompt], first: WeightUpdate, second: WeightUpdate
) -> list[Sample]:
    """Two samples of each prompt, of which some go on from the first version to the second."""
    engine = TransformersEngine(TransformersEngineConfig(model=str(model)))
    await engine.start()
    try:
        await engine.load(first)
        early = asyncio.create_task(engine.generate(asked(given[0], 9, 0)))
        await asyncio.sleep(0)
        await engine.load(second)
        begun = await early
        requests = [
            asked(one, group, index) for group, one in enumerate(given) for index in range(2)
        ]
        found = await asyncio.gather(*map(engine.generate, requests))
    finally:
        await engine.close()
    assert begun.version[-1] == 1
    return [
        Sample(request=one, generated=made, text="", rollout_rank=0)
        for one, made in zip(requests, found, strict=True)
    ]


@pytest.fixture(scope="module", params=SEEING)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    return Drawn(tmp_path_factory.mktemp("seen"), request.param)


def plain_model(folder: Path, state: dict[str, Tensor]) -> Any:
    """The model of transformers, with published weights, which have the names of checkpoints."""
    from safetensors.torch import save_file
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    with tempfile.TemporaryDirectory() as into:
        config.save_pretrained(into)
        save_file(state, Path(into, "model.safetensors"), {"format": "pt"})
        model, report = model_factory(config.model_type).from_pretrained(
            into, attn_implementation="eager", output_loading_info=True
        )
    assert not any(report.values()), report
    return model


def plain_log_prob(model: Any, processor: ImageProcessor, prompt: Prompt, ids: Any) -> Tensor:
    """Log-probs of a response by the model alone: one sample, in the two passes that ``generate``
    would make, as a response may have image tokens of its own."""
    seen = [processor.pixels(one) for one in prompt.images]
    inputs = {
        name: torch.from_numpy(np.concatenate([one[name] for one in seen]))
        for name in (seen[0] if seen else ())
    }
    asked, answer = (
        torch.from_numpy(one.astype(np.int64))[None] for one in (prompt.token_ids, ids)
    )
    if "image_grid_thw" not in inputs:
        inputs = {name: one[None] for name, one in inputs.items()}
    else:
        inputs["mm_token_type_ids"] = (asked == processor.image_token_id).int()
    model.model.rope_deltas = None  # the model would keep those of the sample before
    first = model(input_ids=asked, **inputs, use_cache=True)
    rest = model(input_ids=answer, past_key_values=first.past_key_values, use_cache=True)
    logits = torch.cat([first.logits[0, -1:], rest.logits[0, :-1]]).float()
    return logits.log_softmax(-1).gather(-1, answer[0, :, None])[:, 0]


def test_processor_and_placeholders(case: Drawn) -> None:
    two, first, second, none = case.prompts
    token = ImageProcessor(case.model).image_token_id
    # Of Qwen: images of 8 x 8 patches, and one of 6 x 12 which was scaled to 4 x 12 or so.
    expected = [40, 20, 20, 0] if case.family == "idefics3" else [28, 16, 16, 0]
    assert [int((one.token_ids == token).sum()) for one in case.prompts] == expected
    image = "<image>"
    if case.family != "idefics3":
        image = "<|vision_start|><|image_pad|><|vision_end|>"
    assert first.text == second.text == f"<user>{image}How many?<assistant>"
    assert two.text == f"<user>{image}Which?{image}!<assistant>"
    assert (len(two.images), first.images != second.images, none.images) == (2, True, ())


def test_engine_trainer_and_plain_model_have_the_same_log_probs(case: Drawn) -> None:
    """Packed beside others, as an inference worker packs them; decoded beside others."""
    plain = plain_model(case.model, unpack(case.second))
    processor = ImageProcessor(case.model)
    found = with_log_probs(case.trainer, case.samples, reference=False, previous=True)
    for one in found:
        made = one.generated
        assert one.prev_log_prob is not None
        np.testing.assert_allclose(one.prev_log_prob, made.log_prob, atol=1e-5)
        with torch.no_grad():
            own = plain_log_prob(plain, processor, one.request.prompt, made.token_ids)
        np.testing.assert_allclose(own.numpy(), made.log_prob, atol=1e-5)
    other = case.samples[2].generated.log_prob[0], case.samples[4].generated.log_prob[0]
    assert abs(float(other[0] - other[1])) > 1e-3  # the same text, another image


def test_what_a_row_gets_does_not_depend_on_the_rows_beside_it(case: Drawn) -> None:
    [alone] = asyncio.run(drawn_alone(case, case.samples[2].request))
    beside: Generated = case.samples[2].generated
    np.testing.assert_array_equal(alone.token_ids, beside.token_ids)
    np.testing.assert_array_equal(alone.log_prob, beside.log_prob)


async def drawn_alone(case: Drawn, request: Request) -> list[Generated]:
    engine = TransformersEngine(TransformersEngineConfig(model=str(case.model)))
    await engine.start()
    try:
        await engine.load(case.second)
        return [await engine.generate(request)]
    finally:
        await engine.close()


def test_gradients_of_text_and_vision_are_those_of_the_plain_model(case: Drawn) -> None:
    plain = plain_model(case.model, unpack(case.second))
    processor = ImageProcessor(case.model)
    for one in case.samples:
        ids = one.generated.token_ids
        total: Any = plain_log_prob(plain, processor, one.request.prompt, ids).sum()
        total.backward()
    bare = [as_bare(one) for one in case.samples]
    language: Any = case.trainer.language
    packed = pack_responses(bare, torch.device("cpu"), processor)
    assert packed.images is not None
    # Four images of five parts each (or of their patches), once and not for each sample.
    parts = 4 * 5 if case.family == "idefics3" else 4 * (28 + 2 * 16)
    assert len(packed.images.pixels["pixel_values"]) == parts
    total = case.trainer.manager.model(packed).log_prob.sum()
    total.backward()
    expected = dict(plain.named_parameters())
    seen = 0
    for name, parameter in language.named_parameters():
        torch.testing.assert_close(
            parameter.grad, expected[name].grad, atol=1e-4, rtol=1e-4, msg=name
        )
        seen += ("vision_model" in name or "visual" in name) and bool(
            parameter.grad.abs().max() > 1e-6
        )
    language.zero_grad()
    assert seen > 20


def test_images_without_a_processor_are_an_error(case: Drawn) -> None:
    bare = as_bare(case.samples[0])
    with pytest.raises(ValueError, match="the model takes none"):
        pack_responses([bare], torch.device("cpu"))


def test_other_vision_language_families_are_refused_by_name() -> None:
    for kind in ("qwen3_vl", "smolvlm", "llava"):
        with pytest.raises(UnsupportedModel, match=f"'{kind}' cannot be trained: of vision-lang"):
            check_family({"model_type": kind})


def ready(case_samples: list[Sample]) -> list[TrainingSample]:
    """Samples to train on: groups 0 and 1 have images, the last one has none."""
    found = []
    for at, one in enumerate(case_samples):
        made, random = one.generated, np.random.default_rng(at)
        found.append(
            msgspec.structs.replace(
                as_bare(one),
                loss_mask=np.ones(len(made.token_ids), np.bool_),
                log_prob=made.log_prob,
                version=made.version,
                reward=float(random.normal()),
                scored=True,
                value=random.normal(size=len(made.token_ids)).astype(np.float32),
            )
        )
    return found


async def cut_and_resumed(
    model: Path, given: Sequence[Prompt], weights: WeightUpdate
) -> list[Sample]:
    """Samples whose answers were interrupted, and went on in an engine that was started anew."""
    found: list[Sample] = []
    begun: dict[str, Generated] = {}
    for last in (False, True):
        engine = TransformersEngine(TransformersEngineConfig(model=str(model)))
        await engine.start()
        try:
            await engine.load(weights)
            requests = [
                msgspec.structs.replace(one, partial=begun.get(one.name))
                for one in (asked(prompt, group, 0) for group, prompt in enumerate(given))
            ]
            tasks = [asyncio.create_task(engine.generate(one)) for one in requests]
            if not last:
                least = 0
                while least < 3 and not any(one.done() for one in tasks):
                    await asyncio.sleep(0)
                    made = await engine.so_far()
                    least = min(
                        len(made[one.name].token_ids) if one.name in made else 0 for one in requests
                    )
                await engine.abort()
            ended = await asyncio.gather(*tasks)
            begun = {one.name: made for one, made in zip(requests, ended, strict=True)}
            found = [
                Sample(request=one, generated=made, text="", rollout_rank=0)
                for one, made in zip(requests, ended, strict=True)
            ]
        finally:
            await engine.close()
    assert {one.request.partial.finish for one in found if one.request.partial} >= {"abort"}
    return found


def test_an_answer_that_was_interrupted_goes_on_as_if_it_had_not_been(case: Drawn) -> None:
    """By its last bit; and the trainer computes the same log-probs, with and without images."""
    samples = asyncio.run(cut_and_resumed(case.model, case.prompts, case.second))
    for one, whole in zip(samples, case.samples[::2], strict=True):
        np.testing.assert_array_equal(one.generated.token_ids, whole.generated.token_ids)
        np.testing.assert_allclose(one.generated.log_prob, whole.generated.log_prob, atol=1e-6)


@pytest.mark.parametrize("case", ["qwen2_5_vl"], indirect=True)
@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("mini_batches", [1, 2])
def test_packing_mixes_no_samples(case: Drawn, epochs: int, mini_batches: int) -> None:
    """Several images, one and none: all in one row, in pairs, or each in a row of its own."""
    batch = ready(case.samples)
    size = len(batch) // mini_batches
    order = [0, 6, 2, 4, 1, 7, 3, 5]  # of groups of two: each mini-batch has all kinds of prompts
    states, log_probs = [], []
    for packed in (size, 2, 1):
        trainer = PolicyTrainer(seeing_trainer(case.model), 1, 0)
        trained = trainer.compute_advantages(batch)
        for epoch in range(epochs):
            for first in range(0, len(batch), size):
                chosen = [trained[at] for at in order[first : first + size]][:: 1 - 2 * epoch]
                rows = [
                    MicroBatch(chosen[at : at + packed], at + packed == size)
                    for at in range(0, size, packed)
                ]
                assert trainer.training_step(rows)["grad_norm"] > 0.0
        states.append(unpack(trainer.publish()))
        log_probs.append(trainer.log_probs(batch))
    for state, found in zip(states[:-1], log_probs[:-1], strict=True):
        for name, alone in states[-1].items():
            torch.testing.assert_close(state[name], alone, atol=1e-4, rtol=0.0, msg=name)
        for one, other in zip(found, log_probs[-1], strict=True):
            np.testing.assert_allclose(one, other, atol=2e-4)


def train(rank: int, world_size: int, folder: Path, model: Path, encoded: bytes) -> None:
    """A step, and log-probs; of two ranks the second one has no image in one of its passes."""
    batch = ready(msgspec.msgpack.decode(encoded, type=list[Sample], dec_hook=decoded))
    mine = batch if world_size == 1 else [batch[:4], batch[4:]][rank]
    trainer = PolicyTrainer(seeing_trainer(model), world_size, rank)
    trained = trainer.compute_advantages(mine)
    batches = [
        MicroBatch(trained[at : at + 2], at + 2 == len(mine)) for at in range(0, len(mine), 2)
    ]
    metrics = dict(trainer.training_step(batches))
    log_probs = [torch.from_numpy(one) for one in trainer.log_probs(mine)]
    critic = CriticTrainer(seeing_trainer(model), world_size, rank)
    values = [torch.from_numpy(one) for one in critic.values(mine)]
    state = unpack(trainer.publish())
    save_result(
        folder,
        rank,
        {"metrics": metrics, "log_probs": log_probs, "values": values, "state": state},
    )


def encoded(thing: Any) -> Any:
    return (thing.dtype.str, thing.shape, thing.tobytes())


def decoded(kind: Any, thing: Any) -> Any:
    dtype, shape, content = thing
    return np.frombuffer(content, dtype).reshape(shape).copy()


@pytest.mark.parametrize("case", ["idefics3", "qwen2_5_vl"], indirect=True)
def test_two_ranks_train_like_one_where_one_of_them_has_no_image(
    case: Drawn, tmp_path: Path
) -> None:
    whole = msgspec.msgpack.encode(case.samples, enc_hook=encoded)
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    train(0, 1, tmp_path / "one", case.model, whole)
    alone = load_result(tmp_path / "one", 0)
    ranks = in_processes(train, 2, tmp_path / "two", case.model, whole)
    for name in ("log_probs", "values"):
        together = [*ranks[0][name], *ranks[1][name]]
        for one, expected in zip(together, alone[name], strict=True):
            torch.testing.assert_close(one, expected, atol=1e-5, rtol=1e-5)
    for name in ("policy_loss", "grad_norm"):
        assert ranks[1]["metrics"][name] == pytest.approx(alone["metrics"][name], rel=1e-4)
    for name, tensor in alone["state"].items():
        torch.testing.assert_close(ranks[0]["state"][name], tensor, atol=1e-5, rtol=0.0, msg=name)
