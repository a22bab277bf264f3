"""The vision-language-action policy: what acts is what is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf_async.backends.base import LoraConfig
from rlinf_async.backends.building import building
from rlinf_async.backends.fsdp.embodied import EmbodiedTrainer
from rlinf_async.backends.policies.base import to_tensors
from rlinf_async.backends.policies.serving import PolicyServer
from rlinf_async.backends.policies.vision_language.policy import (
    VisionLanguageActionPolicy,
    decode,
    encode,
)
from rlinf_async.messages.spaces import ObservationPart, ObservationSpec, choices
from tests.backends.vision_language.kit import (
    EXECUTED,
    NUMBERS,
    SIZES,
    config,
    observations,
    seeded,
    trainer_config,
    trajectory,
)

CPU = torch.device("cpu")
DECODINGS = ["parallel", "autoregressive"]


def build(**fields: Any) -> VisionLanguageActionPolicy:
    with building(0):
        return VisionLanguageActionPolicy(config(**fields))


@given(bins=st.integers(2, 300), token=st.integers(0, 299))
def test_a_bin_is_decoded_to_a_number_that_lies_in_it(bins: int, token: int) -> None:
    tokens = torch.tensor([token % bins])
    number = decode(tokens, bins)
    assert -1.0 < float(number) < 1.0
    assert torch.equal(encode(number, bins), tokens)


def test_numbers_outside_the_bounds_are_in_the_outer_bins() -> None:
    assert encode(torch.tensor([-7.0, -1.0, 1.0, 7.0]), 5).tolist() == [0, 0, 4, 4]


@pytest.mark.parametrize("decoding", DECODINGS)
@pytest.mark.parametrize("chunk", [0, 2 * EXECUTED])
def test_log_probs_of_rollout_and_actor_agree(decoding: str, chunk: int) -> None:
    policy = build(decoding=decoding, chunk=chunk)
    seen = to_tensors(observations(9), CPU)
    assert isinstance(seen, dict)
    step = policy.act(seen, seeded())
    evaluation = policy.evaluate(seen, step.action)
    assert step.action.shape == step.log_prob.shape == (9, EXECUTED * NUMBERS)
    assert step.value.shape == (9, EXECUTED)
    torch.testing.assert_close(step.log_prob, evaluation.log_prob, atol=1e-5, rtol=0)
    torch.testing.assert_close(step.value, evaluation.value, atol=1e-5, rtol=0)
    torch.testing.assert_close(step.value, policy.value(seen), atol=1e-5, rtol=0)


@pytest.mark.parametrize("decoding", DECODINGS)
@pytest.mark.parametrize("chunk", [0, 2 * EXECUTED])
def test_values_of_tokens_are_those_of_the_actor_and_know_the_tokens_before(
    decoding: str, chunk: int
) -> None:
    policy = build(decoding=decoding, chunk=chunk, token_values=True)
    seen = to_tensors(observations(9), CPU)
    assert isinstance(seen, dict)
    step = policy.act(seen, seeded())
    value = policy.evaluate(seen, step.action).value
    assert step.value.shape == value.shape == (9, EXECUTED * NUMBERS)
    torch.testing.assert_close(step.value, value, atol=1e-5, rtol=0)
    torch.testing.assert_close(step.value[:, :1], policy.value(seen)[:, :1], atol=1e-5, rtol=0)
    other = policy.evaluate(seen, torch.cat([-step.action[:, :1], step.action[:, 1:]], 1)).value
    changed = ((other - value).abs() > 1e-7).any(0).tolist()
    after = decoding == "autoregressive"
    assert changed == [False, *[after] * (EXECUTED * NUMBERS - 1)]


@pytest.mark.parametrize("decoding", DECODINGS)
def test_the_likeliest_action_has_the_largest_log_prob(decoding: str) -> None:
    policy = build(decoding=decoding)
    seen = to_tensors(observations(5), CPU)
    assert isinstance(seen, dict)
    first = policy.mode(seen)[:, 0]
    for token in range(SIZES["bins"]):
        other = decode(torch.full((5, 1), token), SIZES["bins"])
        likely = policy.evaluate(seen, first[:, None]).log_prob
        assert (policy.evaluate(seen, other).log_prob <= likely + 1e-5).all()


def test_an_observation_alone_gives_what_it_gives_in_a_batch() -> None:
    policy, seen = build(), observations(4)
    together = policy.evaluate(to_tensors(seen, CPU), torch.zeros(4, 6)).log_prob  # type: ignore[arg-type]
    alone = policy.evaluate(to_tensors(seen[2:3], CPU), torch.zeros(1, 6)).log_prob  # type: ignore[arg-type]
    torch.testing.assert_close(together[2:3], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("field", ["image", "instruction", "state"])
def test_every_part_of_the_observation_matters(field: str) -> None:
    policy, seen, other = build(), observations(3), observations(3, seed=1)
    changed = seen.copy()
    changed[field] = other[field][[1, 2, 0]]
    before = policy.evaluate(to_tensors(seen, CPU), torch.zeros(3, 6)).log_prob  # type: ignore[arg-type]
    after = policy.evaluate(to_tensors(changed, CPU), torch.zeros(3, 6)).log_prob  # type: ignore[arg-type]
    assert ((before - after).abs().amax(1) > 1e-4).all()


def test_a_trained_policy_is_published_to_rollout_workers() -> None:
    trainer = EmbodiedTrainer(trainer_config(), 1, 0)
    metrics = trainer.train([trajectory(0), trajectory(1)])
    server = PolicyServer(config(), seed=3)
    server.load(trainer.publish())
    seen = observations(6)
    answer = server.act(seen)
    tensors = to_tensors(seen, CPU)
    with torch.no_grad():
        log_prob = trainer._policy.evaluate(tensors, torch.from_numpy(answer.action)).log_prob
    assert np.abs(answer.log_prob - log_prob.numpy()).max() < 1e-4
    assert metrics["skipped_updates"] == 0.0


def test_adapters_are_all_that_is_trained_of_the_language_model() -> None:
    pytest.importorskip("peft")
    policy = build(lora=LoraConfig(rank=2))
    trained = {name for name, one in policy.named_parameters() if one.requires_grad}
    inside = {name for name in trained if name.startswith("backbone.")}
    assert inside
    assert all("lora_" in name for name in inside)
    assert {"slots", "critic.0.weight", "state.weight"} <= trained
    seen = to_tensors(observations(3), CPU)
    assert isinstance(seen, dict)
    assert policy.act(seen, seeded()).action.shape == (3, 6)


def misfit(**fields: Any) -> str:
    spec = fields.pop("spec", None)
    acts = fields.pop("acts", None)
    made = config(**fields)
    changed = {"observation": spec} if spec else {"action": acts} if acts else {}
    return VisionLanguageActionPolicy.misfit(msgspec.structs.replace(made, **changed))


def image(*shape: int) -> ObservationSpec:
    return ObservationSpec((ObservationPart(name="view", kind="image", shape=shape),))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"spec": ObservationSpec((ObservationPart(name="state", kind="state", shape=(3,)),))},
            "at least one image",
        ),
        ({"spec": image(8, 6, 3)}, "image 'view' has shape [8, 6, 3]; images must be square"),
        ({"spec": image(12, 12, 3)}, "images of 12 x 12 pixels cannot be cut"),
        ({"acts": choices(3)}, "its actions are vectors of numbers (Box)"),
        ({"chunk": 4}, "chunk = 4 actions, of which env.action_chunk = 3 are executed"),
        ({"folder": "nowhere"}, "folder is 'nowhere': its config.json cannot be read"),
    ],
)
def test_what_does_not_fit_is_said(fields: dict[str, Any], message: str) -> None:
    assert message in misfit(**fields)


def test_a_language_model_is_no_vision_language_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "smolvlm"}')
    assert "it has no weights (*.safetensors, " in misfit(folder=str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert "holds a model of type 'qwen3', which is no vision-language" in misfit(
        folder=str(tmp_path)
    )


def test_what_fits_has_no_misfit() -> None:
    assert misfit() == ""


def test_a_model_is_loaded_from_a_folder_and_images_are_scaled_to_its_own(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    build().backbone.model.save_pretrained(tmp_path)
    words = Tokenizer(WordLevel({"[UNK]": 0, "red": 1, "green": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    loaded = build(folder=str(tmp_path))
    seen = to_tensors(observations(3), CPU)
    assert isinstance(seen, dict)
    seen["image"] = seen["image"][:, :1, :1].expand(-1, 8, 8, -1)  # of one colour each
    large = {**seen, "image": seen["image"].repeat(1, 2, 2, 1)}
    assert misfit(folder=str(tmp_path)) == ""
    torch.testing.assert_close(
        loaded.backbone.embed_image(large["image"]),
        build().backbone.embed_image(seen["image"]),
        atol=1e-5,
        rtol=0,
    )
    assert loaded.act(large, seeded()).action.shape == (3, 6)
    tokens, mask = loaded.backbone._tokenizer(seen["instruction"])
    assert tokens[:2, 0].tolist() == [1, 2]
    assert mask[:, 0].all()
