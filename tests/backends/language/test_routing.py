"""Routing replay: a policy is trained through the experts that its engine went through."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rlinf_async.algorithms.config import LanguageLossConfig
from rlinf_async.backends.language import FAMILIES as ALL_FAMILIES
from rlinf_async.backends.language import EngineDisagrees, MicroBatch
from rlinf_async.backends.language_training.config import PublishedAdapterConfig
from rlinf_async.backends.transformers.engine import TransformersEngine
from rlinf_async.backends.transformers.routing import routers_of
from rlinf_async.episodes.conversation import Conversation, joined
from rlinf_async.messages.language import Branch, Generated, Request, Sample, TrainingSample
from rlinf_async.messages.stopping import cut_at
from rlinf_async.parallel import Strategy
from rlinf_async.workers.inference import with_log_probs
from tests.backends.distributions import by_hand, computed, trained_on
from tests.backends.fsdp_helpers import in_processes, save_result
from tests.backends.language.kit import micro_batches, whole_gradients
from tests.backends.language.routed import (
    FAMILIES,
    LAYERS,
    TOKENS,
    asked,
    generated,
    make,
    saved,
    started,
    trainer_of,
)

WITHIN = 1e-5
ROUTED = LAYERS - 1
"""layers of the Qwen3 model that have experts"""


class Made(NamedTuple):
    model: nn.Module
    path: str
    samples: list[Sample]
    """by an engine that chooses other experts; the last one is an episode of two branches"""


async def episode_of(engine: TransformersEngine) -> Sample:
    """Three turns, the third one in a branch which leaves after the first one."""
    [task] = asked(1, max_tokens=5)
    chat = Conversation(task.prompt.token_ids)

    async def turn(one: Conversation) -> None:
        one.answer(await engine.generate(prompted(task, one.tokens)))

    await turn(chat)
    branch = chat.fork()
    for one, given in ((chat, [9, 8, 7]), (branch, [7])):
        one.give(np.array(given, np.int32))
        await turn(one)
    parts = [chat.response(), branch.response()]
    return Sample(
        request=msgspec.structs.replace(task, group=90),
        generated=joined(parts),
        text="",
        rollout_rank=0,
        branches=(Branch(prompt_ids=branch.prompt, start=len(parts[0].token_ids)),),
    )


def prompted(task: Request, tokens: Any) -> Request:
    prompt = msgspec.structs.replace(task.prompt, token_ids=tokens)
    return msgspec.structs.replace(task, prompt=prompt, index=len(tokens))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    model = make()
    path = saved(tmp_path_factory.mktemp("model"), model)

    async def episode() -> Sample:
        engine = await started(path)
        try:
            return await episode_of(engine)
        finally:
            await engine.close()

    # Settings that keep a part of the vocabulary travel beside it.
    every = [*asked(3), *asked(4, top_k=20, temperature=0.7)[3:]]
    return Made(model, path, [*generated(path, every), asyncio.run(episode())])


def chosen(model: nn.Module, tokens: Sequence[int]) -> Any:
    """What the routers of a model choose for these tokens, ``[tokens, layers, k]``."""
    found: list[Tensor] = []
    hooks = [
        one.register_forward_hook(lambda *of_pass: found.append(of_pass[2][2]))
        for one in routers_of(model)
    ]
    model(input_ids=torch.tensor([[*tokens]]))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1).numpy()


def test_an_engine_tells_the_experts_of_each_token_but_the_last(made: Made) -> None:
    for one in generated(made.path, asked(), disturbed=False):
        routes, tokens = one.generated.routes, one.generated.token_ids
        assert routes is not None
        assert routes.dtype == np.uint8
        read = [*one.request.prompt.token_ids.tolist(), *tokens.tolist()][:-1]
        assert routes.shape == (len(read), ROUTED, 2)
        np.testing.assert_array_equal(routes, chosen(made.model, read))
    for one in generated(made.path, asked(routing_replay=False), disturbed=False):
        assert one.generated.routes is None


def test_what_is_trained_is_what_was_sampled_where_routers_would_choose_otherwise(
    made: Made,
) -> None:
    """Micro-batches of one sample, and one of all, in which one sample has no routes."""
    trainer = trainer_of(made.path)
    found = computed(trainer, made.samples)
    batch = trained_on(made.samples)
    tokens = sum(int(one.loss_mask.sum()) for one in batch)
    for at, one in enumerate(batch):
        for name in ("log_prob", "prev"):
            np.testing.assert_allclose(found[name][at], one.log_prob, atol=WITHIN, rtol=1e-6)
        # The reference chooses its own experts.
        np.testing.assert_allclose(found["ref"][at], by_hand(made.model, one)[0], atol=WITHIN)
        assert np.abs(np.subtract(found["ref"][at], one.log_prob)).max() > 1e-2
    for step in found["steps"]:
        assert step["ratio"] == pytest.approx(1.0, abs=WITHIN)
        assert step["clip_fraction"] == 0.0
        assert step["engine_actor_difference"] < WITHIN
        assert step["engine_actor_tokens"] == tokens
        assert 0.1 < step["routing_changed"] < 1.0
    ours, mixed = trained_on(made.samples, 1.0), trained_on(made.samples, 1.0)
    mixed[1].routes = None
    together, apart = trainer.log_probs(ours), trainer.log_probs(mixed)
    for at in range(len(ours)):
        np.testing.assert_allclose(together[at], found["log_prob"][at], atol=WITHIN)
        own = at == 1
        assert (np.abs(together[at] - apart[at]).max() > 1e-2) == own
    np.testing.assert_allclose(apart[1], by_hand(made.model, mixed[1])[0], atol=WITHIN)


def test_without_replay_another_network_would_be_trained(made: Made) -> None:
    loss = LanguageLossConfig()
    trainer = trainer_of(made.path, replay=False, loss=loss, engine_tolerance=1e-3)
    with pytest.raises(EngineDisagrees, match="differ from the actor's"):
        trainer.training_step([MicroBatch(trained_on(made.samples, 1.0), True)])
    trainer = trainer_of(made.path, loss=loss, engine_tolerance=1e-3)
    trainer.training_step([MicroBatch(trained_on(made.samples, 1.0), True)])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_of_the_table(tmp_path: Path, family: str) -> None:
    path = saved(tmp_path, make(family, 1))
    samples = generated(path, asked(3))
    trainer, own = trainer_of(path), trainer_of(path, replay=False)
    batch = trained_on(samples)
    for one, found, other in zip(
        batch, trainer.log_probs(batch), own.log_probs(batch), strict=True
    ):
        np.testing.assert_allclose(found, one.log_prob, atol=WITHIN, rtol=1e-6)
        assert np.abs(other - one.log_prob).max() > 1e-3
    assert {name for name, one in ALL_FAMILIES.items() if one.routes} == {
        name.partition(",")[0] for name in FAMILIES
    }


class GivenExperts(TorchFunctionMode):
    """Top-k of routers, one after the other, is what is given."""

    def __init__(self, routes: Any) -> None:
        super().__init__()
        self._given: Iterator[Tensor] = iter(torch.from_numpy(routes.astype(np.int64)).unbind(1))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.topk:
            ids = next(self._given)
            return args[0].gather(-1, ids), ids
        return func(*args, **(kwargs or {}))


def gradients_by_hand(model: Any, batch: Sequence[TrainingSample]) -> dict[str, Tensor]:
    """Gradients of the mean log-prob of all tokens, by the library's own forward pass."""
    model.requires_grad_(True)
    model.zero_grad()
    total, count = torch.zeros(()), 0
    for one in batch:
        start = 0
        for prompt, part in one.sequences:
            ids = torch.from_numpy(np.concatenate([prompt, one.response_ids[part]])).long()
            rows = len(ids) - 1
            assert one.routes is not None
            with GivenExperts(one.routes[start : start + rows]):
                logits = model(input_ids=ids[None, :-1]).logits[0, len(prompt) - 1 :]
            start += rows
            drawn = torch.from_numpy(one.drawn_mask[part])
            picked = (logits / one.temperature).log_softmax(-1)
            picked = picked.gather(1, ids[len(prompt) :, None])[:, 0]
            total, count = total - picked[drawn].sum(), count + int(drawn.sum())
    (total / count).backward()  # type: ignore[no-untyped-call]
    return {name: one.grad.clone() for name, one in model.named_parameters()}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_go_through_the_experts_that_are_given_and_into_the_routers(
    made: Made, checkpointing: bool
) -> None:
    whole = [one for one in made.samples if one.generated.kept is None]
    batch = trained_on(whole, 1.0)
    loss = LanguageLossConfig(name="reinforce", proximal="current")
    trainer = trainer_of(made.path, loss=loss, checkpointing=checkpointing)
    found = whole_gradients(trainer, batch, len(batch))
    by_name = gradients_by_hand(make(), batch)
    seen = 0
    for name, expected in by_name.items():
        own = found.get(name)
        if own is None:  # fused experts, which checkpoints have apart
            continue
        seen += "gate.weight" in name
        torch.testing.assert_close(own, expected, atol=1e-6, rtol=1e-4, msg=name)
    assert seen == ROUTED
    assert all(by_name[name].abs().max() > 1e-4 for name in by_name if "gate.weight" in name)


def test_new_weights_in_the_middle_bring_the_experts_of_the_recomputed_cache(
    made: Made, tmp_path: Path
) -> None:
    """Tokens of the newest weights were drawn behind a cache that these have computed."""
    newer = make(seed=0)
    with torch.no_grad():
        for parameter in newer.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.manual_seed(5)))
    trainer = trainer_of(saved(tmp_path, newer), loss=LanguageLossConfig(), engine_tolerance=1e-3)
    trainer.end_iteration()
    update, long = trainer.publish(), asked(2, max_tokens=60)
    assert update.version == 1

    async def updated() -> list[Generated]:
        engine, other = await started(made.path), await started(made.path)
        try:
            answers = [asyncio.ensure_future(engine.generate(one)) for one in long]
            made_so_far = 0
            while made_so_far < 4:
                await asyncio.sleep(0)
                assert not any(one.done() for one in answers)
                found = [len(one.token_ids) for one in (await engine.so_far()).values()]
                made_so_far = min(found) if len(found) == 2 else 0
            await engine.load(update)
            await engine.abort([long[1].name])
            # The second one goes on elsewhere, under the same weights: nothing is told anew.
            partial = await answers[1]
            assert partial.finish == "abort"
            await other.load(update)
            going_on = msgspec.structs.replace(long[1], partial=partial)
            return [await answers[0], await other.generate(going_on)]
        finally:
            await engine.close()
            await other.close()

    samples = [
        Sample(request=one, generated=got, text="", rollout_rank=0)
        for one, got in zip(long, asyncio.run(updated()), strict=True)
    ]
    for one, now in zip(samples, trainer.log_probs(trained_on(samples)), strict=True):
        made_by = one.generated.version
        assert set(made_by.tolist()) == {0, 1}
        new = made_by == 1
        np.testing.assert_allclose(now[new], one.generated.log_prob[new], atol=WITHIN, rtol=1e-6)
        assert np.abs(now - one.generated.log_prob)[~new].max() > 1e-2  # of other weights
    step = trainer.training_step([MicroBatch(trained_on(samples, 1.0), True)])
    assert step["engine_actor_difference"] < WITHIN


def test_an_adapter_is_served_and_trained_through_the_same_experts(
    made: Made, tmp_path: Path
) -> None:
    lora = PublishedAdapterConfig(rank=2, alpha=4.0, publish="adapter")
    loss = LanguageLossConfig(name="reinforce", proximal="current")
    trainer = trainer_of(made.path, loss=loss, lora=lora)
    for group in trainer.manager.optimizer.param_groups:
        group["lr"] = 0.05
    trainer.training_step([MicroBatch(trained_on(made.samples, 1.0), True)])
    trainer.end_iteration()
    update = trainer.publish()

    async def serve() -> list[Sample]:
        engine = await started(made.path, weights="adapter")
        try:
            await engine.load(update)
            got = [await engine.generate(one) for one in asked(2)]
        finally:
            await engine.close()
        return [
            Sample(request=one, generated=each, text="", rollout_rank=0)
            for one, each in zip(asked(2), got, strict=True)
        ]

    samples = asyncio.run(serve())
    moved = 0.0
    bare = trained_on(samples)
    for one, found, ref in zip(
        bare, trainer.log_probs(bare), trainer.log_probs(bare, reference=True), strict=True
    ):
        np.testing.assert_allclose(found, one.log_prob, atol=WITHIN, rtol=1e-6)
        moved = max(moved, float(np.abs(found - ref).max()))
    assert moved > 1e-3


def ranks(rank: int, world_size: int, folder: Path, path: str) -> None:
    """Every strategy; the second rank has samples without routes alone in its first step."""
    samples = torch.load(folder / "samples", weights_only=False)
    found: dict[str, Any] = {}
    for strategy in ("fsdp2", "fsdp1"):
        trainer = trainer_of(path, ranks=(world_size, rank), strategy=strategy)
        share = samples[rank::world_size]
        answered = with_log_probs(trainer, share, reference=True)
        steps = []
        for bare in (False, True):
            batch = trained_on(answered, 1.0)
            for one in batch if bare and rank else ():
                one.routes = None
            steps.append(dict(trainer.training_step(micro_batches(batch, 1))))
            trainer._stepped = False  # the rate is 1e-9
        if strategy == "fsdp2":
            trainer.rescale(Strategy(dp=1), timeout=60.0, bucket_bytes=1 << 13)
            if rank == 0:
                batch = trained_on(answered, 1.0)
                steps.append(dict(trainer.training_step(micro_batches(batch, 2))))
            trainer.rescale(Strategy(dp=2), timeout=60.0, bucket_bytes=1 << 13)
        told = [one.prev_log_prob for one in answered]
        log_probs = [one.tolist() for one in told if one is not None]
        found[strategy] = {"steps": steps, "log_probs": log_probs}
    save_result(folder, rank, found)


def test_two_ranks_and_one_after_them(made: Made, tmp_path: Path) -> None:
    torch.save(made.samples[:4], tmp_path / "samples")
    results = in_processes(ranks, 2, tmp_path, made.path)
    for strategy in ("fsdp2", "fsdp1"):
        for rank in range(2):
            for one, found in zip(
                made.samples[:4][rank::2], results[rank][strategy]["log_probs"], strict=True
            ):
                np.testing.assert_allclose(found, one.generated.log_prob, atol=WITHIN, rtol=1e-6)
        whole, half, *alone = results[0][strategy]["steps"]
        assert whole["ratio"] == pytest.approx(1.0, abs=WITHIN)
        assert whole["engine_actor_difference"] < WITHIN
        assert half["engine_actor_difference"] > 1e-3
        assert 0.0 < half["routing_changed"] < whole["routing_changed"]
        for step in alone:
            assert step["engine_actor_difference"] < WITHIN
            assert step["routing_changed"] > 0.1
    assert len(results[0]["fsdp2"]["steps"]) == 3


def test_experts_of_another_model_or_of_other_tokens_are_named(made: Made) -> None:
    trainer = trainer_of(made.path)
    [one] = trained_on(made.samples[:1])
    assert one.routes is not None
    whole = one.routes
    one.routes = whole[:-1]
    with pytest.raises(ValueError, match=r"sample 0/0 has experts of 11 tokens, but 12 go thro"):
        trainer.log_probs([one])
    one.routes = whole[:, :1]
    with pytest.raises(ValueError, match=r"in 1 layers, but the model has .* 2 of them, which cho"):
        trainer.log_probs([one])
    one.routes = whole + np.uint8(200)
    with pytest.raises(ValueError, match=r"the engine serves another model than is trained"):
        trainer.log_probs([one])


def test_a_response_that_is_cut_has_the_experts_of_what_is_left(made: Made) -> None:
    drawn = made.samples[2].generated
    assert drawn.routes is not None

    def decode(tokens: Any) -> str:
        return "".join(f"w{one} " for one in tokens.tolist())

    cut, _ = cut_at(drawn, [f"w{drawn.token_ids[4]} "], decode)
    assert len(cut.token_ids) <= 5
    assert cut.routes is not None
    assert len(cut.routes) == len(drawn.routes) - (TOKENS - len(cut.token_ids))
    np.testing.assert_array_equal(cut.routes, drawn.routes[: len(cut.routes)])


def test_a_conversation_has_the_experts_of_the_first_reading_by_the_newest_weights() -> None:
    chat = Conversation(np.arange(3, dtype=np.int32))

    def answer(version: int, mark: int, before: int) -> None:
        chat.answer(
            Generated(
                token_ids=np.zeros(2, np.int32),
                log_prob=np.zeros(2, np.float32),
                version=np.full(2, version, np.int32),
                finish="stop",
                routes=np.full((before + 1, 1, 1), mark, np.uint8),
            )
        )

    def marks() -> list[int]:
        routes = chat.response().routes
        assert routes is not None
        return list(routes[:, 0, 0].tolist())

    answer(4, 1, 3)
    assert marks() == [1] * 4
    chat.give(np.zeros(3, np.int32))
    answer(4, 2, 8)
    assert marks() == [1] * 4 + [2] * 5
    answer(3, 3, 10)  # by a worker that lags behind
    assert marks() == [1] * 4 + [2] * 5 + [3] * 2
    answer(5, 4, 12)
    assert marks() == [4] * 13
    chat.give(np.zeros(1, np.int32))
    assert marks() == [4] * 13
