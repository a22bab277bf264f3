"""A policy that has left the framework acts as the trained one did: kind of policy x form."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from rlinf_async.backends.policies.base import to_tensors
from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.backends.policies.leaving import write_policy
from rlinf_async.backends.policies.left import ACTION, FILES, Form, Note, PolicyFolderError
from rlinf_async.backends.policies.serving import PolicyServer, serve_policy
from rlinf_async.config import UsageError
from rlinf_async.messages.converting import ActionReader, ObservationWriter
from rlinf_async.messages.described import (
    BoxSpace,
    DictSpace,
    DiscreteSpace,
    MultiBinarySpace,
    MultiDiscreteSpace,
    Space,
    Spaces,
    TextSpace,
    TupleSpace,
    zero_of,
)
from rlinf_async.messages.spaces import ObservationArray
from rlinf_async.policy import ObservationError, Policy

VECTOR = BoxSpace((3,), "float32")
IMAGE = BoxSpace((8, 8, 3), "uint8", 0, 255)
ARM = DictSpace((("camera", IMAGE), ("joints", VECTOR)))
REACH = BoxSpace((2,), "float32", -2.0, 1.0)
NUMBERS = DictSpace((("goal", DiscreteSpace(3, start=1)), ("joints", VECTOR)))


class Kind(NamedTuple):
    """A built-in policy with spaces that it has."""

    name: str
    sees: Space
    takes: Space
    actions: Any = "clip"
    chunk: int = 1


KINDS = (
    Kind("mlp_gaussian", NUMBERS, BoxSpace((2,), "float64", (-2.0, None), (0.1, 3.0))),
    Kind("mlp_gaussian", VECTOR, BoxSpace((4, 2), "float32", -2.0, 1.0), "rescale", 4),
    Kind("mlp_categorical", VECTOR, DiscreteSpace(4, start=-1)),
    Kind(
        "mlp_factored",
        VECTOR,
        TupleSpace(
            (
                BoxSpace((2,), "int32", -3, 5),
                DiscreteSpace(3, start=2),
                MultiDiscreteSpace((2,), (2, 3), (0, 5)),
            )
        ),
        "rescale",
    ),
    Kind("mlp_factored", VECTOR, MultiBinarySpace((3,))),
    Kind("cnn", ARM, REACH),
    Kind("gru", VECTOR, DiscreteSpace(3)),
    Kind("mlp_squashed_gaussian", VECTOR, REACH, "rescale"),
    Kind("cnn_squashed_gaussian", IMAGE, REACH, "rescale"),
    Kind("mlp_soft_categorical", NUMBERS, DiscreteSpace(4, start=-1)),
    Kind("cnn_soft_categorical", ARM, DiscreteSpace(3)),
    Kind("flow_action", ARM, BoxSpace((3, 2), "float32", -2.0, 1.0), "rescale", 3),
)


class Trained(NamedTuple):
    """A policy with weights and statistics of some training."""

    kind: Kind
    config: PolicyConfig
    server: Any

    def write(self, folder: Path, form: Form) -> Path:
        folder.mkdir(exist_ok=True)
        spaces = Spaces(self.kind.sees, self.kind.takes)
        note = Note(
            form=form,
            made_by="tests",
            env="Arm",
            version=3,
            actions=self.kind.actions,
            spaces=spaces,
            policy=self.config,
        )
        write_policy(self.server.policy, note, folder)
        return folder

    def load(self, folder: Path, form: Form, seed: int = 0) -> Policy:
        return Policy.load(self.write(folder, form), seed=seed)


def trained(kind: Kind) -> Trained:
    writer = ObservationWriter(kind.sees, "Arm")
    reader = ActionReader(kind.takes, "Arm", kind.actions)
    config = PolicyConfig(
        name=kind.name,
        observation_size=writer.size,
        action_size=reader.size,
        observation=writer.spec,
        action=reader.spec,
        hidden_sizes=(8,),
        channels=(4,),
        memory_size=5,
        action_chunk=kind.chunk,
    )
    torch.manual_seed(0)
    server = serve_policy(config)
    policy: Any = server.policy
    if policy.normalizes and writer.size:
        policy.observation_normalizer.update(2.0 * torch.randn(50, writer.size) + 1.0)
    elif not policy.normalizes:
        policy.uniform.fill_(False)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return Trained(kind, config, server)


def rows_of(server: PolicyServer, config: PolicyConfig, count: int = 16) -> ObservationArray:
    random = np.random.default_rng(0)
    rows = config.sees.empty(count)
    for part in config.sees.parts:
        place = rows if rows.dtype.names is None else rows[part.name]
        drawn = random.integers(0, 256, place.shape)
        place[...] = 3.0 * random.standard_normal(place.shape) if part.kind == "state" else drawn
    return rows


def flat(action: Any) -> list[float]:
    """All numbers of an action."""
    if isinstance(action, dict):
        return [number for part in action.values() for number in flat(part)]
    if isinstance(action, tuple):
        return [number for part in action for number in flat(part)]
    numbers: list[float] = np.asarray(action, np.float64).reshape(-1).tolist()
    return numbers


def form_ids(forms: tuple[Form, ...]) -> list[Any]:
    return [pytest.param(form, id=form) for form in forms]


def every_kind_and_form() -> list[Any]:
    """Each policy in each form; of those that are there twice, the second in the quick forms."""
    quick: tuple[Form, ...] = ("folder", "torchscript")
    found, seen = list[Any](), set[str]()
    for kind in KINDS:
        # A folder of lerobot's is for policies that it defines itself: `backends/expert_flow`.
        every = tuple(form for form in get_args(Form) if form != "lerobot")
        forms = quick if kind.name in seen else every
        seen.add(kind.name)
        found += [pytest.param(kind, form, id=f"{kind.name}-{form}") for form in forms]
    return found


@pytest.mark.parametrize(("kind", "form"), every_kind_and_form())
def test_a_policy_acts_as_the_trained_one(kind: Kind, form: Form, tmp_path: Path) -> None:
    if form == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    known = trained(kind)
    policy = known.load(tmp_path, form)
    rows = rows_of(known.server, known.config)
    wanted = known.server.mode(rows)
    np.testing.assert_allclose(policy.answers(rows), wanted, rtol=1e-5, atol=1e-5)
    # In the environment's form, one and many, and what the graph alone says of it.
    reader = ActionReader(kind.takes, "Arm", kind.actions)
    zero = zero_of(kind.sees)
    row = known.config.sees.empty(1)
    ObservationWriter(kind.sees, "Arm").write(zero, row[0])
    [action] = reader.read(known.server.mode(row), 1)
    np.testing.assert_allclose(flat(policy.act(zero)), flat(action), rtol=1e-5, atol=1e-5)
    assert type(policy.act(zero)) is type(action)
    policy.begin()
    if policy.note.inputs:
        feeds = policy._engine.feeds(rows, None, deterministic=True)  # type: ignore[attr-defined]
        graph_action, *_ = policy._engine.run(feeds)  # type: ignore[attr-defined]
        each = [flat(one) for one in reader.read(wanted, len(rows))]
        found = graph_action.reshape(len(rows), -1)
        np.testing.assert_allclose(found, each, rtol=1e-5, atol=1e-5)
        assert policy.note.outputs[0].name == ACTION


@pytest.mark.parametrize("form", form_ids(("folder", "torchscript")))
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_samples_have_the_distribution_of_the_trained_policy(
    kind: Kind, form: Form, tmp_path: Path
) -> None:
    """Means of many samples of one observation, against those of the trained policy."""
    known = trained(kind)
    if kind.name == "flow_action" and form != "folder":
        pytest.skip("its graph has no noise in the steps: the test below")
    policy = known.load(tmp_path, form, seed=3)
    rows = np.repeat(rows_of(known.server, known.config, 1), 20_000, 0)
    sampled, _ = policy._engine.answer(rows, None, deterministic=False)
    wanted = known.server.act(rows).action
    spread = np.std(wanted, 0) + 1e-3
    assert np.abs(sampled.mean(0) - wanted.mean(0)).max() < 0.08 * spread.max()
    assert np.std(sampled, 0) + 1e-3 == pytest.approx(spread, rel=0.08, abs=0.01)


def test_samples_of_a_flow_in_a_graph_are_integrated_without_noise_from_noise(
    tmp_path: Path,
) -> None:
    [kind] = [one for one in KINDS if one.name == "flow_action"]
    known = trained(kind)
    policy: Any = known.load(tmp_path, "torchscript", seed=3)
    rows = rows_of(known.server, known.config)
    feeds = policy._engine.feeds(rows, None, deterministic=False)
    assert np.abs(feeds["noise"]).min() > 0.0
    own: Any = known.server.policy
    with torch.no_grad():
        features = own.features(own.normalized(to_tensors(rows, torch.device("cpu"))))
        wanted = own.draw(features, torch.from_numpy(feeds["noise"]))
    np.testing.assert_allclose(policy._engine.run(feeds)[1], wanted, rtol=1e-5, atol=1e-5)


def test_a_flow_over_a_vision_language_model_leaves_as_a_folder_alone(tmp_path: Path) -> None:
    from tests.backends.flow_action import kit

    config = kit.config(trunk="text")
    image, text = BoxSpace((8, 8, 3), "uint8", 0, 255), TextSpace(6)
    sees = DictSpace(
        (("image", image), ("instruction", text), ("joints", BoxSpace((5,), "float32")))
    )
    kind = Kind("flow_action", sees, BoxSpace((3, 2), "float32", -2.0, 1.0), "rescale")
    known = Trained(kind, config, serve_policy(config))
    with pytest.raises(UsageError, match="model reads its observations"):
        known.write(tmp_path / "graph", "onnx")
    policy = known.load(tmp_path / "out", "folder")
    rows = kit.observations(config.sees, 4)
    np.testing.assert_array_equal(policy.answers(rows), known.server.mode(rows))


@pytest.mark.parametrize("loaded", [False, True], ids=["new", "loaded"])
def test_a_vision_language_policy_leaves_with_the_files_of_its_model(
    loaded: bool, tmp_path: Path
) -> None:
    """With autoregressive decoding; the model's first folder is gone when it is loaded again."""
    from tests.backends.vision_language import kit

    config = kit.config(decoding="autoregressive")
    if loaded:
        first: Any = serve_policy(config).policy
        first.backbone.model.save_pretrained(tmp_path / "first")
        words = Tokenizer(WordLevel({"[UNK]": 0, "red": 1}, "[UNK]"))
        tokenizer: Any = PreTrainedTokenizerFast
        tokenizer(tokenizer_object=words).save_pretrained(tmp_path / "first")
        config = kit.config(decoding="autoregressive", folder=str(tmp_path / "first"))
    image, text = BoxSpace((8, 8, 3), "uint8", 0, 255), TextSpace(6)
    sees = DictSpace(
        (("image", image), ("instruction", text), ("joints", BoxSpace((2,), "float32")))
    )
    kind = Kind("vision_language_action", sees, BoxSpace((3, 2), "float32", -2.0, 1.0), "rescale")
    known = Trained(kind, config, serve_policy(config))
    with torch.no_grad():
        for parameter in known.server.policy.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    with pytest.raises(UsageError, match="cannot be one graph, as --to onnx writes it"):
        known.write(tmp_path / "graph", "onnx")
    folder = known.write(tmp_path / "out", "folder")
    if loaded:
        shutil.rmtree(tmp_path / "first")
    policy = Policy.load(folder.rename(tmp_path / "moved"))
    rows = kit.observations(4)
    np.testing.assert_array_equal(policy.answers(rows), known.server.mode(rows))
    observation = {key: rows[0][key] for key in ("image",)} | {"instruction": "red"}
    chunk = policy.act(observation | {"joints": rows[0]["state"]})
    assert (chunk.shape, policy.chunk) == ((3, 2), kit.EXECUTED)
    assert (np.abs(chunk + 0.5) <= 1.5).all()


def test_a_memory_is_kept_until_an_episode_begins(tmp_path: Path) -> None:
    known = trained(Kind("gru", VECTOR, BoxSpace((2,), "float32", -9.0, 9.0)))
    rows = rows_of(known.server, known.config, 6).reshape(3, 2, 3)
    for form in ("folder", "torchscript"):
        policy = known.load(tmp_path / form, form)
        memory = np.zeros((2, 5), np.float32)
        for step in rows:
            wanted, memory = known.server.mode_from(step, memory)
            np.testing.assert_allclose(policy.act_all(step), wanted, atol=1e-5)
        policy.begin([True, False])
        memory[0] = 0.0
        wanted, _ = known.server.mode_from(rows[0], memory)
        np.testing.assert_allclose(policy.act_all(rows[0]), wanted, atol=1e-5)
        with pytest.raises(ObservationError, match=r"3 observations, but 2 before.*call begin"):
            policy.act_all(np.zeros((3, 3), np.float32))
        assert policy.recurrent


@pytest.fixture
def arm(tmp_path: Path) -> Path:
    """The folder of a policy of images and joints."""
    return trained(Kind("cnn", ARM, REACH)).write(tmp_path / "arm", "folder")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"joints": np.zeros(4)}, r"Arm: 'joints': an observation of shape \(4,\), the space has"),
        ({"camera": np.zeros((8, 8, 3))}, r"'camera': an image of shape \(8, 8, 3\) and dtype flo"),
        ({"joints": None}, r"without 'joints'; the policy takes state 'state' \[3\], image"),
        ({"joints": np.full(3, np.nan)}, "an observation has NaN or infinity"),
    ],
)
def test_an_observation_that_does_not_fit_is_named(
    arm: Path, change: dict[str, Any], said: str
) -> None:
    observation = zero_of(ARM) | change
    observation = {key: one for key, one in observation.items() if one is not None}
    with pytest.raises(ObservationError, match=said):
        Policy.load(arm).act(observation)


def test_many_observations_that_do_not_fit_are_named(arm: Path) -> None:
    policy = Policy.load(arm)
    with pytest.raises(ObservationError, match=r"shape \(2, 4\)"):
        policy.act_all({"camera": np.zeros((2, 8, 8, 3), np.uint8), "joints": np.zeros((2, 4))})
    with pytest.raises(ObservationError, match="no 'joints'"):
        policy.act_all({"camera": np.zeros((2, 8, 8, 3), np.uint8)})
    with pytest.raises(ObservationError, match="for one, call act"):
        policy.act_all(3.0)


def test_what_is_no_policy_is_named(arm: Path, tmp_path: Path) -> None:
    def refused(said: str, folder: Path = arm) -> None:
        with pytest.raises(PolicyFolderError, match=said):
            Policy.load(folder)

    weights = arm / FILES["folder"]
    tensors = load_file(weights)
    save_file({k: v for k, v in tensors.items() if "normalizer.mean" not in k}, weights)
    refused("lacks 'observation_normalizer.mean': without the statistics")
    save_file({k: v for k, v in tensors.items() if k != "actor.0.weight"}, weights)
    refused(r"does not hold the policy that policy\.json describes: it lacks 'actor\.0\.weight'")
    save_file(tensors | {"log_std": torch.zeros(9)}, weights)
    refused("'log_std' is of another")
    weights.write_bytes(b"damaged")
    refused("cannot be loaded: SafetensorError")
    weights.unlink()
    refused(r"has no policy\.safetensors.*copy the whole folder")
    note = arm / "policy.json"
    known = json.loads(note.read_text())
    note.write_text(json.dumps(known | {"format": 7}))
    refused("has format 7, this version of rlinf_async reads 1")
    note.write_text(json.dumps(known | {"actions": "squeeze"}))
    refused("is damaged: Invalid enum value 'squeeze'")
    note.unlink()
    refused(r"holds no policy: it has no policy\.json")
    (arm / "config.json").write_text("{}")
    refused("holds a model of Hugging Face")
    (arm / "metadata.json").write_text("{}")
    refused("is a checkpoint: write its policy by rlinf-async export")
    (arm / "run.json").write_text("{}")
    refused("is a run: write its policy by rlinf-async export")
    refused("there is no such folder", tmp_path / "nowhere")


def test_what_cannot_be_one_graph_is_refused(tmp_path: Path) -> None:
    known = trained(Kind("cnn", DictSpace((("noise", IMAGE),)), REACH))
    with pytest.raises(UsageError, match="shows a part 'noise', which is an input of a graph"):
        known.write(tmp_path / "noise", "torchscript")
    known.load(tmp_path / "noise", "folder").act({"noise": np.zeros((8, 8, 3), np.uint8)})
    graph = trained(KINDS[2]).write(tmp_path / "graph", "torchscript")
    with pytest.raises(UsageError, match=r"device is 'cuda', but a graph \('torchscript'\)"):
        Policy.load(graph, device="cuda")


def test_spaces_come_back_from_their_text() -> None:
    """Bounds that are none, one for all, and the largest integers."""
    import msgspec

    space = DictSpace(
        (
            ("a", BoxSpace((2,), "float32", (None, -1.5), None)),
            ("b", BoxSpace((1,), "int64", -(2**63), 2**63 - 1)),
            ("c", TextSpace(9)),
        )
    )
    again = msgspec.json.decode(msgspec.json.encode(space), type=DictSpace)
    assert again == space
    low, high = again.parts[1][1].ends  # type: ignore[union-attr]
    assert (low[0], high[0], low.dtype) == (-(2**63), 2**63 - 1, np.int64)
    low, high = again.parts[0][1].ends  # type: ignore[union-attr]
    assert low.tolist() == [-np.inf, -1.5]
    assert high.tolist() == [np.inf, np.inf]
