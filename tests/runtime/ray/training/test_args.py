"""What a training group is told: refused early, and translated for our trainers."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rlinf_async.runtime.ray.training import TrainArgs
from rlinf_async.runtime.ray.training.args import (
    TrainingStart,
    batches,
    start_of,
    trainer_config,
    write_tracker,
)
from rlinf_async.runtime.ray.training.group import NOSET_VISIBLE_DEVICES, environment
from rlinf_async.runtime.ray.training.worker import load_function
from tests.runtime.ray.training.kit import args


def namespace(**fields: Any) -> argparse.Namespace:
    given = {"model_config": {"model_type": "qwen3"}, "rollout_batch_size": 4}
    return argparse.Namespace(**(given | fields))


def test_a_namespace_may_have_more_names_and_leave_some_out_by_none() -> None:
    found = TrainArgs.of(namespace(lr=1, load=None, clip_grad=None, num_gpus=8, save="there"))
    assert (found.lr, found.load, found.clip_grad, found.save) == (1.0, None, None, "there")
    assert TrainArgs.of(found) is found


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"train_backend": "jax"}, r"Invalid enum value 'jax' - at `\$.train_backend`"),
        (
            {"use_tis": True, "use_rollout_logprobs": True},
            "which use_rollout_logprobs takes for the actor's: each weight is 1",
        ),
        (
            {"tensor_model_parallel_size": 2},
            "tensor_model_parallel_size is 2, but train_backend 'fsdp' does not cut a model so",
        ),
        (
            {"train_backend": "megatron", "pipeline_model_parallel_size": 0},
            "pipeline_model_parallel_size is 0; it must be at least 1",
        ),
        (
            {"train_backend": "megatron", "context_parallel_size": 2},
            "context_parallel_size is 2; only 1 is possible so far",
        ),
        (
            {"train_backend": "megatron", "precision": "float16"},
            "precision is 'float16'; megatron has 'float32' and 'bfloat16'",
        ),
        ({"lr": "fast"}, r"args of the training group: Expected `float`, got `str` - at `\$.lr`"),
        ({"hf_checkpoint": "folder"}, "either hf_checkpoint .* and not both of them"),
        ({"model_config": {}}, "either hf_checkpoint .* and not none of them"),
        ({"rollout_batch_size": 0}, "rollout_batch_size is 0; it must be at least 1"),
        ({"global_batch_size": 3}, "global_batch_size is 3; it must divide the 4 samples"),
        (
            {"global_batch_size": 2, "num_steps_per_rollout": 4},
            "num_steps_per_rollout 4 x global_batch_size 2 is not the 4 samples",
        ),
        ({"rollout_temperature": 0.0}, "rollout_temperature is 0.0; it must be above 0"),
        ({"lr": 0.0}, "lr is 0.0; it must be above 0"),
        ({"rollout_batch_size": None}, "missing required field `rollout_batch_size`"),
    ],
)
def test_wrong_arguments_are_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainArgs.of(namespace(**wrong))


def test_a_critic_has_its_own_load_save_lr_and_warm_up() -> None:
    given = args(load="a", save="b", lr=1e-3, lr_warmup_iters=3, save_hf="c")
    given = TrainArgs.of(given).for_role("critic")
    assert (given.load, given.save, given.save_hf, given.lr) == (None, None, None, 1e-3)
    own = args(critic_load="c", critic_save="d", critic_lr=1e-2, critic_lr_warmup_iters=5)
    config = trainer_config(own.for_role("critic"), critic=True, reference=False, device="cpu")
    assert (config.fsdp.optimizer.lr, config.fsdp.scheduler.warmup_steps) == (1e-2, 5)
    assert (own.for_role("critic").load, own.for_role("critic").save) == ("c", "d")


def test_our_trainer_is_told_what_the_arguments_say() -> None:
    given = args(
        advantage_estimator="gspo",
        use_kl_loss=True,
        kl_loss_coef=0.1,
        kl_loss_type="low_var_kl",
        eps_clip_high=0.3,
        use_tis=True,
        use_rollout_logprobs=False,
        min_lr=1e-4,
        num_steps_per_rollout=None,
        global_batch_size=4,
    )
    config = trainer_config(given, critic=False, reference=True, device="cpu")
    loss = config.loss
    assert (loss.name, loss.kl_coefficient, loss.kl_estimator) == ("gspo", 0.1, "k3")
    assert (loss.clip_low, loss.clip_high, loss.off_policy) == (0.2, 0.3, "truncated")
    assert (config.advantage.name, config.reference) == ("grpo", True)
    assert config.fsdp.scheduler.min_factor == pytest.approx(0.1)
    assert (batches(given).samples, batches(given).optimizer_steps) == (16, 4)


def test_the_environment_of_the_actors() -> None:
    given = args(use_routing_replay=True, train_env_vars={"MINE": "1", "NCCL_CUMEM_ENABLE": "1"})
    actor, critic = (environment(given, role, gpu=False) for role in ("actor", "critic"))
    assert all(actor[name] == "1" for name in NOSET_VISIBLE_DEVICES)
    assert (actor["ENABLE_ROUTING_REPLAY"], actor["MINE"]) == ("1", "1")
    assert actor["NCCL_CUMEM_ENABLE"] == "1"
    assert "ENABLE_ROUTING_REPLAY" not in critic


def test_a_memory_saver_is_loaded_first_where_the_package_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = args(offload_train=True)
    assert "LD_PRELOAD" not in environment(given, "actor", gpu=True)
    package = tmp_path / "torch_memory_saver"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert "LD_PRELOAD" not in environment(given, "actor", gpu=True)  # a build without the library
    library = tmp_path / "torch_memory_saver_hook_mode_preload.abi3.so"
    library.touch()
    assert environment(given, "actor", gpu=True)["LD_PRELOAD"] == str(library)
    assert "LD_PRELOAD" not in environment(given, "actor", gpu=False)
    assert "LD_PRELOAD" not in environment(args(), "actor", gpu=True)


def test_training_goes_on_after_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert start_of(args()) == TrainingStart(0, None)
    assert start_of(args(load=folder, save=folder)) == TrainingStart(0, None)
    with pytest.raises(ValueError, match="no checkpoint was completed there"):
        start_of(args(load=folder))
    write_tracker(folder, 11)
    with pytest.raises(ValueError, match="names rollout 11, but there is no"):
        start_of(args(load=folder))
    (tmp_path / "iter_0000011").mkdir()
    assert start_of(args(load=folder)) == TrainingStart(12, tmp_path / "iter_0000011")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    with pytest.raises(ValueError, match="says 'release'; it must be the number of a rollout"):
        start_of(args(load=folder))


def test_a_hook_is_loaded_by_its_path() -> None:
    assert load_function("os.path.join") is load_function("os.path:join")
    with pytest.raises(ValueError, match=r"the function 'os.path.nothing' cannot be loaded"):
        load_function("os.path.nothing")


def test_the_page_has_every_argument_and_its_default() -> None:
    page = (Path(__file__).parents[4] / "docs" / "ray-train-group.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", page, re.MULTILINE))
    wanted = {}
    for field in msgspec.structs.fields(TrainArgs):
        default = {} if field.default_factory is dict else field.default
        wanted[field.name] = "required" if field.required else default
    written = {"none": None, "required": "required"}
    found = {
        name: written[cell] if cell in written else msgspec.json.decode(cell)
        for name, cell in rows.items()
        if name in wanted
    }
    assert found == wanted
