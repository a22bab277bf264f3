"""The policy that sees images: it is chosen by itself, and what acts is what is trained."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import Tensor

from rlinf_async.backends.building import building
from rlinf_async.backends.policies.base import find_policy
from rlinf_async.backends.policies.config import PolicyConfig, cnn_misfit, policy_for
from rlinf_async.backends.policies.images import CnnPolicy
from rlinf_async.backends.policies.mlp import MlpGaussianPolicy
from rlinf_async.messages.spaces import (
    ActionSpec,
    Factor,
    ObservationPart,
    ObservationSpec,
    choices,
    continuous,
    flat_spec,
)

STATE = ObservationPart(name="state", kind="state", shape=(2,))
CAMERA = ObservationPart(name="camera", kind="image", shape=(12, 10, 3))
DEPTH = ObservationPart(name="depth", kind="image", shape=(9, 9))
WORDS = ObservationPart(name="words", kind="text", shape=(5,))
MIXED = ActionSpec((Factor("continuous", 2), Factor("choice", 3)))


def config(*parts: ObservationPart, action: ActionSpec) -> PolicyConfig:
    seen = ObservationSpec(parts)
    return PolicyConfig(
        observation=seen,
        observation_size=seen.state_size,
        action=action,
        action_size=action.outputs,
        hidden_sizes=(8,),
        channels=(4, 6),
    )


def observations(*parts: ObservationPart, count: int = 7) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        part.name: torch.randn(count, *part.shape, generator=generator)
        if part.kind == "state"
        else torch.randint(0, 256, (count, *part.shape), generator=generator, dtype=torch.uint8)
        for part in parts
    }


@pytest.mark.parametrize("parts", [(CAMERA,), (STATE, CAMERA, DEPTH)])
@pytest.mark.parametrize("action", [continuous(3), choices(4), MIXED])
def test_acting_and_evaluating_agree(
    parts: tuple[ObservationPart, ...], action: ActionSpec
) -> None:
    with building(0):
        policy = find_policy("auto")(config(*parts, action=action))
    assert isinstance(policy, CnnPolicy)
    seen = observations(*parts)
    step = policy.act(seen, torch.Generator().manual_seed(1))
    evaluation = policy.evaluate(seen, step.action)
    assert step.action.shape == (7, *action.shape)
    torch.testing.assert_close(step.log_prob, evaluation.log_prob, atol=1e-5, rtol=0)
    torch.testing.assert_close(step.value, evaluation.value, atol=1e-5, rtol=0)
    torch.testing.assert_close(step.value, policy.value(seen), atol=1e-5, rtol=0)


def test_every_image_matters() -> None:
    with building(0):
        policy = CnnPolicy(config(STATE, CAMERA, DEPTH, action=continuous(2)))
    seen = observations(STATE, CAMERA, DEPTH)
    for name in seen:
        changed = {**seen, name: seen[name].flip(0)}
        assert (policy.value(changed) - policy.value(seen)).abs().max() > 1e-4


def test_the_spaces_choose_the_policy() -> None:
    assert policy_for(config(CAMERA, action=continuous(1))) == "cnn"
    numbers = PolicyConfig(observation_size=3, action_size=2)
    assert isinstance(find_policy(numbers.name)(numbers), MlpGaussianPolicy)
    assert policy_for(msgspec.structs.replace(numbers, action=choices(2))) == "mlp_categorical"


def test_what_does_not_fit_is_said() -> None:
    assert cnn_misfit(config(CAMERA, action=choices(2))) == ""
    text = cnn_misfit(config(CAMERA, WORDS, action=choices(2)))
    assert text.startswith("a CNN reads no text, but the environment shows image 'camera'")
    assert "'vision_language_action'" in text
    flat = PolicyConfig(observation=flat_spec(3), observation_size=3, action_size=1)
    assert cnn_misfit(flat) == "a CNN takes images, but the environment shows state 'state' [3]"


def test_channels_first_are_not_taken_for_rows() -> None:
    stacked = ObservationPart(name="camera", kind="image", shape=(4, 84, 84))
    assert "[4, 84, 84], which has its channels first" in cnn_misfit(
        config(stacked, action=choices(2))
    )
    flat = ObservationPart(name="camera", kind="image", shape=(3, 32, 3))
    assert cnn_misfit(config(flat, action=choices(2))) == ""
