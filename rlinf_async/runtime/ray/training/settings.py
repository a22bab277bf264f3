"""Arguments of a training group as the settings of our language trainers."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from rlinf_async.algorithms.language.config import (
    Aggregation,
    LanguageAdvantageConfig,
    LanguageLossConfig,
)
from rlinf_async.backends.fsdp.language.config import LanguageFSDPConfig, LanguageTrainerConfig
from rlinf_async.backends.language_training.config import LanguageModelConfig
from rlinf_async.backends.megatron.config import MegatronConfig, MegatronTrainerConfig
from rlinf_async.backends.optimizer_config import OptimizerConfig, SchedulerConfig
from rlinf_async.parallel import Strategy, StrategyError
from rlinf_async.runtime.ray.training.args import ESTIMATORS, TrainArgs
from rlinf_async.workers.actor.config import LanguageBatches


def backend(args: TrainArgs, *, critic: bool) -> str:
    """Return the registered name of what trains."""
    return f"{args.train_backend}_critic" if critic else args.train_backend


def trainer_config(args: TrainArgs, *, critic: bool, reference: bool, device: str) -> Any:
    """Return the settings of one rank's trainer, its backend's own Struct; ``args`` are those of
    its role.

    Raises `ValueError` for numbers that make no sense.
    """
    shared: dict[str, Any] = {
        "advantage": advantage_config(args),
        "loss": loss_config(args, critic=critic),
        "value_clip": args.value_clip if critic else None,
        "reference": reference,
        "bucket_bytes": args.update_weight_buffer_size,
        "publish_precision": args.publish_precision,
        "seed": args.seed,
    }
    if args.train_backend == "megatron":
        return MegatronTrainerConfig(megatron=_megatron(args, device), **shared)
    return LanguageTrainerConfig(fsdp=_fsdp(args, device), **shared)


def check_megatron(args: TrainArgs) -> None:
    """Refuse what Megatron cannot train, or not cut so, before a rank is started.

    Raises:
        ValueError: naming the model's part that does not fit.
        MegatronUnavailable: megatron-core is not installed, or in another version.
    """
    from rlinf_async.backends.megatron.architecture import architecture_of, layout_of
    from rlinf_async.backends.megatron.library import check_installed

    check_installed()
    folder = args.hf_checkpoint
    if folder is not None and not (Path(folder) / "config.json").is_file():
        return  # the ranks' hosts may have it
    strategy = Strategy(tp=args.tensor_model_parallel_size, pp=args.pipeline_model_parallel_size)
    architecture = architecture_of(hugging_face_config(args).to_dict())
    try:
        layout_of(architecture, strategy)
    except StrategyError as error:
        raise ValueError(
            f"tensor_model_parallel_size {strategy.tp} and pipeline_model_parallel_size "
            f"{strategy.pp} do not divide the model: {error}"
        ) from error


def hugging_face_config(args: TrainArgs) -> Any:
    """Return the Hugging Face configuration of the model."""
    automatic = importlib.import_module("transformers").AutoConfig
    if args.hf_checkpoint is not None:
        return automatic.from_pretrained(args.hf_checkpoint, local_files_only=True)
    fields = {name: one for name, one in args.model_config.items() if name != "model_type"}
    return automatic.for_model(args.model_config["model_type"], **fields)


def _fsdp(args: TrainArgs, device: str) -> LanguageFSDPConfig:
    return LanguageFSDPConfig(
        model=_model(args),
        strategy=args.fsdp_strategy,
        precision=args.precision,
        optimizer=_optimizer(args),
        scheduler=_scheduler(args),
        device=device,
    )


def _megatron(args: TrainArgs, device: str) -> MegatronConfig:
    assert args.precision != "float16"  # refused before
    return MegatronConfig(
        model=_model(args),
        precision=args.precision,
        optimizer=_optimizer(args),
        scheduler=_scheduler(args),
        device=device,
        tp=args.tensor_model_parallel_size,
        pp=args.pipeline_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
        distributed_optimizer=args.use_distributed_optimizer,
        overlap=args.overlap_grad_reduce,
    )


def _model(args: TrainArgs) -> LanguageModelConfig:
    return LanguageModelConfig(
        path=args.hf_checkpoint,
        config=args.model_config,
        activation_checkpointing=args.gradient_checkpointing,
    )


def _optimizer(args: TrainArgs) -> OptimizerConfig:
    return OptimizerConfig(
        lr=args.lr,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_eps,
        weight_decay=args.weight_decay,
        max_grad_norm=args.clip_grad,
    )


def _scheduler(args: TrainArgs) -> SchedulerConfig:
    return SchedulerConfig(
        kind=args.lr_decay_style,
        warmup_steps=args.lr_warmup_iters,
        total_steps=args.lr_decay_iters or 0,
        min_factor=args.min_lr / args.lr,
    )


def advantage_config(args: TrainArgs) -> LanguageAdvantageConfig:
    """Return which advantage; its name is checked when the first one is computed."""
    return LanguageAdvantageConfig(
        name=ESTIMATORS.get(args.advantage_estimator, args.advantage_estimator),
        divide_by_std=args.grpo_std_normalization,
        normalize="batch" if args.normalize_advantages else "auto",
        gamma=args.gamma,
        gae_lambda=args.lambd,
        kl_coefficient=args.kl_coef,
    )


def loss_config(args: TrainArgs, *, critic: bool) -> LanguageLossConfig:
    """Return which loss; of a critic only the way in which tokens are averaged."""
    aggregation: Aggregation = "sequence-mean-token-mean"
    if args.calculate_per_token_loss:
        aggregation = "token-mean"
    if critic:
        return LanguageLossConfig(aggregation=aggregation)
    estimator = "k3" if args.kl_loss_type == "low_var_kl" else args.kl_loss_type
    return LanguageLossConfig(
        name="gspo" if args.advantage_estimator == "gspo" else "ppo",
        clip_low=args.eps_clip,
        clip_high=args.eps_clip if args.eps_clip_high is None else args.eps_clip_high,
        dual_clip=args.eps_clip_c,
        proximal="behaviour" if args.use_rollout_logprobs else "auto",
        off_policy="truncated" if args.use_tis else "none",
        off_policy_cap=args.tis_clip,
        kl_coefficient=args.kl_loss_coef if args.use_kl_loss else 0.0,
        kl_estimator=estimator,
        entropy_coefficient=args.entropy_coef,
        aggregation=aggregation,
    )


def batches(args: TrainArgs) -> LanguageBatches:
    """Return the sizes of one rollout's training."""
    return LanguageBatches(
        samples=args.rollout_samples,
        group_size=args.n_samples_per_prompt,
        optimizer_steps=args.optimizer_steps,
        micro_batch_size=args.micro_batch_size,
        max_tokens_per_micro_batch=args.max_tokens_per_gpu,
    )
