"""Soft actor-critic on images: what trains the encoder, and what acts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlinf_async.backends.fsdp.sac import SacModel, SacTrainer
from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.backends.policies.images import random_shift
from rlinf_async.backends.policies.serving import PolicyServer
from rlinf_async.backends.sac_config import SacLossConfig, SacTrainerConfig
from rlinf_async.messages.embodied import ReplayBatch
from rlinf_async.messages.spaces import (
    ObservationArray,
    ObservationPart,
    ObservationSpec,
    continuous,
)
from tests.backends.test_sac_trainer import SIZE, batch, parameters

CAMERA = ObservationPart(name="camera", kind="image", shape=(12, 10, 3))
DEPTH = ObservationPart(name="depth", kind="image", shape=(9, 9))
STATE = ObservationPart(name="state", kind="state", shape=(2,))
SEES = ObservationSpec((CAMERA, DEPTH, STATE))
IMAGES = PolicyConfig(
    name="cnn_squashed_gaussian",
    observation=SEES,
    observation_size=2,
    action=continuous(2),
    action_size=2,
    hidden_sizes=(8,),
    channels=(4, 6),
)


DEFAULT = SacLossConfig()


def seen(number: int, count: int = SIZE) -> ObservationArray:
    random = np.random.default_rng(1000 + number)
    rows = SEES.empty(count)
    for part in SEES.parts:
        shape = (count, *part.shape)
        if part.kind == "state":
            rows[part.name] = random.standard_normal(shape)
        else:
            rows[part.name] = random.integers(0, 256, shape)
    return rows


def image_batch(number: int = 0) -> ReplayBatch:
    one = batch(number)
    one.observation, one.next_observation = seen(2 * number), seen(2 * number + 1)
    return one


def trainer(sac: SacLossConfig = DEFAULT) -> SacTrainer:
    return SacTrainer(SacTrainerConfig(sac=sac), IMAGES)


def test_the_critics_loss_alone_trains_the_encoder() -> None:
    one = trainer(SacLossConfig(entropy_coefficient=0.2))
    model = one.manager.model
    assert isinstance(model, SacModel)
    for weight, trained in ((0.0, False), (1.0, True)):
        share = image_batch()
        share.weight[:] = weight  # 0: nothing is left of the critics' loss
        one.manager.zero_grad()
        torch.autograd.backward(model(one._share(share)).total)
        found = {name: value.grad for name, value in model.named_parameters()}
        moved = {name for name, one in found.items() if one is not None and bool(one.any())}
        of_policy = {name for name in found if name.startswith(("policy.actor", "policy.head"))}
        assert of_policy <= moved
        assert moved - of_policy == (model.value_parameter_names() if trained else set())
    assert any(name.startswith("policy.encoder.") for name in model.value_parameter_names())


def test_targets_have_a_head_of_their_own_which_follows_that_of_the_critics() -> None:
    one = trainer(SacLossConfig(tau=0.25))
    before = parameters(one)
    one.step(image_batch())
    after = parameters(one)
    followed = [name for name in after if name.startswith("target.head.")]
    assert followed
    for name in followed:
        source = after[name.replace("target.", "critic.")]
        torch.testing.assert_close(after[name], before[name].lerp(source, 0.25))


def test_what_acts_is_what_is_trained() -> None:
    one = trainer()
    one.step(image_batch())
    served = PolicyServer(IMAGES, seed=1)
    served.load(one.publish())
    policy = one._model.policy
    observed = one._share(image_batch(3)).observation  # shifted: others are compared
    assert not isinstance(observed, torch.Tensor)
    rows = SEES.empty(SIZE)
    for name, field in observed.items():
        rows[name] = field.numpy()
    np.testing.assert_allclose(served.mode(rows), policy.mode(observed).numpy(), rtol=1e-6)


@pytest.mark.parametrize("shape", [(5, 4), (5, 4, 3)])
def test_an_image_is_shifted_and_its_edges_are_repeated(shape: tuple[int, ...]) -> None:
    image = torch.arange(2 * int(np.prod(shape)), dtype=torch.uint8).view(2, *shape)
    down, still = random_shift(image, torch.tensor([[2, -1], [0, 0]]))
    torch.testing.assert_close(still, image[1])
    torch.testing.assert_close(down[:3, 1:], image[0, 2:, :-1])
    torch.testing.assert_close(down[3:, 1:], image[0, -1:, :-1].expand(2, *down[0, 1:].shape))
    torch.testing.assert_close(down[:, 0], down[:, 1])


def test_images_are_shifted_by_as_much_as_is_allowed() -> None:
    still = trainer(SacLossConfig(image_shift=0))._share(image_batch()).observation
    moved = trainer(SacLossConfig(image_shift=1))._share(image_batch()).observation
    assert not isinstance(still, torch.Tensor)
    assert not isinstance(moved, torch.Tensor)
    torch.testing.assert_close(still["camera"], torch.from_numpy(seen(0)["camera"].copy()))
    torch.testing.assert_close(still["state"], moved["state"])
    assert not torch.equal(still["camera"], moved["camera"])
