"""The policy of LeRobot's folder: its numbers, log-probs, cloning, adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor

pytest.importorskip("transformers")

from rlinf_async.backends.base import LoraConfig
from rlinf_async.backends.policies.base import find_policy, to_tensors
from rlinf_async.backends.policies.expert_flow.folder import FolderSettings, misfit
from rlinf_async.backends.policies.expert_flow.pi0 import Pi0Settings
from rlinf_async.backends.policies.expert_flow.smolvla import SmolVlaSettings
from rlinf_async.messages.spaces import ObservationPart, ObservationSpec, continuous
from tests.backends.expert_flow import pi0, smolvla
from tests.backends.expert_flow.kit import (
    CHUNK,
    EXECUTED,
    NUMBERS,
    PADDED_ACTION,
    SPEC,
    STEPS,
    config,
    noise,
    observations,
    statistics,
)

COUNT = 3
SIZE = EXECUTED * NUMBERS
FAMILIES: dict[str, Any] = {"smolvla": smolvla, "pi0": pi0}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of each family, whose name it has."""
    made: Path = FAMILIES[request.param].write_folder(tmp_path_factory.mktemp("f") / request.param)
    return made


@pytest.fixture
def reference(folder: Path) -> dict[str, Tensor]:
    """What LeRobot 0.4.4 computed."""
    found = json.loads((Path(__file__).parent / f"{folder.name}.json").read_text())
    return {name: torch.tensor(found[name]) for name in ("actions", "losses")}


def build(folder: Path, noise: str = "network", **fields: Any) -> Any:
    torch.manual_seed(0)
    name = str(json.loads((folder / "config.json").read_bytes())["type"])
    return find_policy(name)(config(folder, noise, name, **fields))


def seen(count: int = COUNT) -> Any:
    return to_tensors(observations(count), torch.device("cpu"))


def demonstrated() -> Tensor:
    drawn = np.random.default_rng(2).normal(size=(COUNT, CHUNK, NUMBERS))
    return torch.from_numpy(drawn.astype(np.float32)).flatten(1)


def at(times: list[float]) -> Tensor:
    """Points of `Policy.demonstrated` at LeRobot's times."""
    time = 1.0 - torch.tensor(times).unsqueeze(1)
    return torch.cat([torch.from_numpy(noise(COUNT)).flatten(1), time], 1)


def test_actions_for_given_noise_are_those_of_lerobot(
    folder: Path, reference: dict[str, Tensor]
) -> None:
    policy = build(folder)
    with torch.no_grad():
        features = policy.features(policy.normalized(seen()))
        drawn = torch.from_numpy(noise(COUNT)).flatten(1)
        found = policy.predict(features, drawn)
        executed = policy.draw(features, drawn)
    assert float((found - reference["actions"]).abs().max()) < 1e-5
    assert torch.equal(executed, found[:, :EXECUTED].flatten(1))
    with torch.no_grad():  # the others of a batch, and how far it is padded, change nothing
        alone = {name: field[1:2] for name, field in seen().items()}
        single = policy.predict(policy.features(policy.normalized(alone)), drawn[1:2])
    assert float((single - reference["actions"][1:2]).abs().max()) < 1e-5


def test_the_loss_of_flow_matching_is_that_of_lerobot(
    folder: Path, reference: dict[str, Tensor]
) -> None:
    policy = build(folder)
    found = policy(policy.normalized(seen()), demonstrated(), at([0.25, 0.875, 0.0625]))
    losses = -found.log_prob.view(COUNT, CHUNK, NUMBERS)
    torch.testing.assert_close(losses, reference["losses"], rtol=1e-5, atol=1e-5)
    losses.mean().backward()
    trained = {name for name, one in policy.named_parameters() if one.grad is not None}
    # As the folder says: the expert alone (train_expert_only), and what leads to it.
    assert not any(name.startswith("model.trunk.") for name in trained)
    assert {"model.state_proj.weight", "model.expert.layers.0.mlp.up_proj.weight"} <= trained


@pytest.mark.parametrize("kind", ["network", "sde"])
@pytest.mark.parametrize("token_values", [False, True])
def test_log_probs_are_those_of_the_steps_of_the_chain(
    folder: Path, kind: str, *, token_values: bool
) -> None:
    policy = build(folder, kind, token_values=token_values)
    step = policy.act(seen(), torch.Generator().manual_seed(3))
    assert step.chain.shape == (COUNT, (STEPS + 1) * SIZE + CHUNK * PADDED_ACTION - SIZE)
    assert step.value.shape == (COUNT, SIZE if token_values else EXECUTED)
    mean, deviation = (torch.from_numpy(statistics()[f"action.{one}"]) for one in ("mean", "std"))
    last = step.chain[:, STEPS * SIZE : (STEPS + 1) * SIZE].view(COUNT, EXECUTED, NUMBERS)
    torch.testing.assert_close(step.action, (last * deviation + mean).flatten(1))
    found = policy.evaluate(seen(), step.chain)
    expected = by_hand(policy, step.chain, kind)
    torch.testing.assert_close(found.log_prob, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.log_prob, step.log_prob)
    torch.testing.assert_close(found.value, step.value)
    gradients = []
    for one in (found.log_prob, expected):
        policy.zero_grad()
        one.sum().backward()
        gradients.append(
            torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
        )
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def by_hand(policy: Any, chain: Tensor, kind: str) -> Tensor:
    """The log-prob of a chain, of `torch.distributions`, one step after the other."""
    rows = chain[:, : (STEPS + 1) * SIZE].view(COUNT, STEPS + 1, EXECUTED, NUMBERS)
    executed = torch.zeros(CHUNK, PADDED_ACTION, dtype=torch.bool)
    executed[:EXECUTED, :NUMBERS] = True
    x = torch.zeros(COUNT, CHUNK, PADDED_ACTION)
    x[:, ~executed] = chain[:, (STEPS + 1) * SIZE :]
    features = policy.features(policy.normalized(seen()))
    total = torch.zeros(COUNT, SIZE)
    for index in range(STEPS):
        time = index / STEPS
        x = x.clone()
        x[:, :EXECUTED, :NUMBERS] = rows[:, index]
        velocity, hidden = policy.model(features, x, time)
        drift = velocity[:, :EXECUTED, :NUMBERS]
        if kind == "network":
            said = hidden[:, :EXECUTED]
            for layer in policy.deviation:
                said = layer(said)
            low, high = np.log(0.05), np.log(0.4)
            deviation = (low + (0.5 + 0.5 * said.tanh()) * (high - low)).exp()
        else:
            late = max(time, 1 / STEPS)
            deviation = torch.tensor(0.6 * ((1 - time) / late / STEPS) ** 0.5)
            drift = drift - 0.36 / (2 * late) * (rows[:, index] - time * drift)
        steps: Any = torch.distributions.Normal(rows[:, index] + drift / STEPS, deviation)
        total = total + steps.log_prob(rows[:, index + 1]).flatten(1)
        x = x + velocity / STEPS
    return total


def test_the_most_likely_actions_begin_at_zero(folder: Path) -> None:
    policy = build(folder)
    with torch.no_grad():
        features = policy.features(policy.normalized(seen()))
        zeros = torch.zeros(COUNT, CHUNK * PADDED_ACTION)
        assert torch.equal(policy.mode(seen()), policy.draw(features, zeros))


def test_adapters_change_nothing_at_first_and_are_trained_alone(folder: Path) -> None:
    policy = build(folder, lora=LoraConfig(rank=2))
    plain = build(folder)
    assert torch.equal(policy.mode(seen()), plain.mode(seen()))
    trained = {name for name, one in policy.named_parameters() if one.requires_grad}
    inner = {name for name in trained if name.startswith(("model.trunk.", "model.expert."))}
    assert inner
    assert all(".lora_" in name for name in inner)
    assert "model.action_out_proj.weight" in trained
    step = policy.act(seen())
    policy.evaluate(seen(), step.chain).log_prob.sum().backward()
    grads = [one.grad for name, one in policy.named_parameters() if "lora_B" in name]
    assert all(one is not None and bool(one.any()) for one in grads)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_camera_that_may_be_missing_is_left_out(tmp_path: Path, family: str) -> None:
    made = FAMILIES[family].write_folder(tmp_path / "folder", empty_cameras=1)
    policy = build(made, observation=without("wrist"))
    assert policy.mode(seen()).shape == (COUNT, SIZE)


def test_a_pi0_is_trained_as_its_folder_says_and_written_as_it_was_read(tmp_path: Path) -> None:
    made = pi0.write_folder(tmp_path / "own", train_expert_only=False, freeze_vision_encoder=True)
    # As openpi's converter names them, with the embeddings' other name.
    tensors = {
        name.replace(pi0.HEAD_NAME, pi0.EMBEDDINGS).removeprefix("model."): one
        for name, one in load_file(made / "model.safetensors").items()
    }
    save_file(tensors, made / "model.safetensors")
    policy = build(made)
    before = policy.mode(seen())
    policy.evaluate(seen(), policy.act(seen()).chain).log_prob.sum().backward()
    with torch.no_grad():
        for name, one in policy.named_parameters():
            assert one.requires_grad == ("vision_model" not in name), name
            if one.grad is not None:
                one.sub_(0.1 * one.grad.sign())
    trained = policy.mode(seen())
    assert float((trained - before).abs().max()) > 0.01
    left = tmp_path / "left"
    left.mkdir()
    assert all(not name.startswith("model.") for name in policy.write_lerobot(left))
    assert torch.equal(build(left).mode(seen()), trained)
    written = load_file(left / "model.safetensors")
    assert written.keys() == tensors.keys()
    embeddings = pi0.EMBEDDINGS.removeprefix("model.")
    assert not np.array_equal(written[embeddings], tensors[embeddings])
    said = json.loads((left / "config.json").read_bytes())
    assert (said["num_inference_steps"], said["n_action_steps"]) == (STEPS, EXECUTED)


def without(name: str) -> ObservationSpec:
    return ObservationSpec(tuple(one for one in SPEC.parts if one.name != name))


def with_image(name: str, height: int, width: int) -> ObservationSpec:
    image = ObservationPart(name=name, kind="image", shape=(height, width, 3))
    return ObservationSpec((*without(name).parts, image))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"type": "pi0"},
            "it holds a policy of the family 'pi0': set actor.fsdp.policy.name = 'pi",
        ),
        ({"type": "act"}, "the family 'act'; the families that are read are 'smolvla' and 'pi0'"),
        ({"type": None, "model_type": "llama"}, "it holds a model of type 'llama', and no policy"),
        ({"chunk_size": "many"}, "its config.json is damaged: Expected `int`, got `str`"),
        ({"chunk_size": 2}, "it predicts chunk_size = 2 actions at once, but env.action_chunk is"),
        ({"vlm_model_name": "nobody/none"}, "vlm_model_name = 'nobody/none', is neither a folder"),
        ({"num_expert_layers": 1}, "num_expert_layers is neither -1 nor num_vlm_layers: as many"),
        ({"n_obs_steps": 2}, "n_obs_steps is 2; 1 is read"),
        ({"adapt_to_pi_aloha": True}, "adapt_to_pi_aloha is true, which is not read"),
        ({"use_peft": True}, "use_peft is true: merge the adapter into the weights"),
        (
            {"normalization_mapping": {"STATE": "MIN_MAX", "ACTION": "MEAN_STD"}},
            "the statistics observation.state.min are missing from the state of normalizer_pro",
        ),
        (
            {"normalization_mapping": {"STATE": "LOG", "ACTION": "MEAN_STD"}},
            "it normalises STATE by 'LOG'; MEAN_STD, MIN_MAX, QUANTILES, QUANTILE10 are read",
        ),
    ],
)
def test_a_folder_that_does_not_fit_is_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = smolvla.write_folder(tmp_path / "folder", **changes)
    assert message in misfit(config(folder), SmolVlaSettings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type": "pi05"}, "the family 'pi05'; the families that are read are 'smolvla' and 'pi0'"),
        ({"type": "pi0_fast"}, "a policy of the family 'pi0_fast'; the families that are read ar"),
        ({"type": "smolvla"}, "family 'smolvla': set actor.fsdp.policy.name = 'smolvla'"),
        ({"image_resolution": [16, 12]}, "image_resolution is 16 x 12: PaliGemma takes squares"),
        ({"chunk_size": 2}, "it predicts chunk_size = 2 actions at once, but env.action_chunk is"),
        ({"max_action_dim": 1}, "max_action_dim is 1, which is less than the 2 of an action"),
        ({"max_state_dim": 1}, "max_state_dim is 1, which is less than the 3 of a state"),
    ],
)
def test_a_folder_of_pi0_that_does_not_fit_is_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = pi0.write_folder(tmp_path / "folder", **changes)
    assert message in misfit(config(folder, name="pi0"), Pi0Settings)


def test_a_pi0_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    folder = pi0.write_folder(tmp_path / "folder")
    (folder / "vlm/tokenizer.json").unlink()
    found = misfit(config(folder, name="pi0"), Pi0Settings)
    assert "tokenizer_name = 'vlm', is neither a folder with its tokenizer.json, nor in H" in found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"action_size": 9, "action": continuous(9)}, "its actions have 2 numbers, those of the e"),
        ({"observation": without("state")}, "its observation.state has 3 numbers, the state of th"),
        ({"observation": without("wrist")}, "it needs the cameras front, wrist, and the environme"),
        ({"observation": without("task")}, "it reads one instruction (a Text space); the envir"),
        (
            {"observation": with_image("wrist", 8, 9)},
            "its camera 'wrist' has pictures of [8, 8, 3]",
        ),
        (
            {"observation": with_image("top", 8, 8)},
            "but the environment shows an image 'top': ",
        ),
    ],
)
def test_an_environment_that_does_not_fit_is_named(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    kind: type[FolderSettings] = SmolVlaSettings if folder.name == "smolvla" else Pi0Settings
    assert message in misfit(config(folder, name=folder.name, **changes), kind)


def test_missing_files_are_named(tmp_path: Path) -> None:
    folder = smolvla.write_folder(tmp_path / "folder")
    found = config(folder)
    for name, message in {
        "policy_preprocessor_step_5_normalizer_processor.safetensors": "cannot be read",
        "policy_postprocessor.json": "its policy_postprocessor.json cannot be read",
        "model.safetensors": "it has no model.safetensors",
        "config.json": "its config.json cannot be read",
    }.items():
        (folder / name).unlink()
        assert message in misfit(found, SmolVlaSettings), name
    own = msgspec.structs.replace(found.vision_language, folder="")
    assert "it is loaded from a folder" in misfit(
        msgspec.structs.replace(found, vision_language=own), SmolVlaSettings
    )


def test_weights_of_another_shape_are_named(tmp_path: Path) -> None:
    folder = smolvla.write_folder(tmp_path / "folder", expert_width_multiplier=0.5)
    with pytest.raises(ValueError, match=r"model\.vlm_with_expert\.lm_expert\.\S+ has shape"):
        build(folder)
    folder = pi0.write_folder(tmp_path / "pi0", image_resolution=[12, 12])
    with pytest.raises(ValueError, match=r"embeddings\.position_embedding\.weight has shape"):
        build(folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.paligemma_with_expert.gemma_expert.model.layers.0.mlp.gate_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"expert\.model\.layers\.0\.mlp\.gate_proj\.weight is m"):
        build(folder)
