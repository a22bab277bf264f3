"""Arguments of a training group as the settings of our language trainers."""

from __future__ import annotations

from rlinf_async.algorithms.language.config import (
    Aggregation,
    LanguageAdvantageConfig,
    LanguageLossConfig,
)
from rlinf_async.backends.fsdp.language.config import LanguageFSDPConfig, LanguageTrainerConfig
from rlinf_async.backends.language_training.config import LanguageModelConfig
from rlinf_async.backends.optimizer_config import OptimizerConfig, SchedulerConfig
from rlinf_async.runtime.ray.training.args import ESTIMATORS, TrainArgs
from rlinf_async.workers.actor.config import LanguageBatches


def trainer_config(
    args: TrainArgs, *, critic: bool, reference: bool, device: str
) -> LanguageTrainerConfig:
    """Return the settings of one rank's trainer; ``args`` are those of its role.

    Raises `ValueError` for numbers that make no sense.
    """
    return LanguageTrainerConfig(
        fsdp=LanguageFSDPConfig(
            model=LanguageModelConfig(
                path=args.hf_checkpoint,
                config=args.model_config,
                activation_checkpointing=args.gradient_checkpointing,
            ),
            strategy=args.fsdp_strategy,
            precision=args.precision,
            optimizer=OptimizerConfig(
                lr=args.lr,
                betas=(args.adam_beta1, args.adam_beta2),
                eps=args.adam_eps,
                weight_decay=args.weight_decay,
                max_grad_norm=args.clip_grad,
            ),
            scheduler=SchedulerConfig(
                kind=args.lr_decay_style,
                warmup_steps=args.lr_warmup_iters,
                total_steps=args.lr_decay_iters or 0,
                min_factor=args.min_lr / args.lr,
            ),
            device=device,
        ),
        advantage=advantage_config(args),
        loss=loss_config(args, critic=critic),
        value_clip=args.value_clip if critic else None,
        reference=reference,
        bucket_bytes=args.update_weight_buffer_size,
        publish_precision=args.publish_precision,
        seed=args.seed,
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
