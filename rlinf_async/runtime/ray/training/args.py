"""`TrainArgs`: what a training group is told, under the names that users of slime know.

Names and defaults are listed in docs/ray-train-group.md. No torch, no Ray.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

MISSING = object()

ROLES = ("actor", "critic")
BACKENDS = ("fsdp", "megatron")

ESTIMATORS = {
    "grpo": "grpo",
    "gspo": "grpo",
    "rloo": "rloo",
    "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": "reinforce++_baseline",
    "ppo": "gae",
}
"""advantage estimators by the names of slime; others are names of our own advantages"""


class TrainArgs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a training group is told. Exactly one of ``hf_checkpoint`` and ``model_config`` is set.

    Raises `ValueError`, with the field and what it must be.
    """

    # -- the model --
    train_backend: Literal["fsdp", "megatron"] = "fsdp"
    """what trains: ``fsdp`` or ``megatron``"""
    hf_checkpoint: str | None = None
    """folder of a Hugging Face model: config, weights, tokenizer. Nothing is downloaded"""
    model_config: dict[str, Any] = {}
    """a Hugging Face configuration with its ``model_type``; weights are then random"""
    ref_load: str | None = None
    """folder of the reference model; the weights that training begins with where left out"""
    seed: int = 0
    """of random weights"""

    # -- checkpoints --
    load: str | None = None
    """folder of checkpoints to go on from; may be empty only if it is ``save`` too"""
    save: str | None = None
    """folder of the checkpoints that ``save_model`` writes: ``iter_0000007``"""
    save_hf: str | None = None
    """folder of a Hugging Face model that ``save_model`` writes too; may have ``{rollout_id}``"""
    critic_load: str | None = None
    """``load`` of a critic"""
    critic_save: str | None = None
    """``save`` of a critic"""

    # -- how it is sharded --
    fsdp_strategy: Literal["fsdp1", "fsdp2"] = "fsdp2"
    """fsdp"""
    tensor_model_parallel_size: int = 1
    """megatron: ranks that share each layer"""
    pipeline_model_parallel_size: int = 1
    """megatron: pipeline stages, which share the layers"""
    context_parallel_size: int = 1
    """megatron: only 1 so far"""
    expert_model_parallel_size: int = 1
    """megatron: only 1 so far"""
    sequence_parallel: bool = False
    """megatron: ranks that share layers share the tokens between them, too"""
    use_distributed_optimizer: bool = True
    """megatron: data ranks share the optimizer's state, instead of having copies of it"""
    overlap_grad_reduce: bool = False
    """megatron: reduce gradients, and gather parameters, while others are computed"""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """of the arithmetic (megatron: of the weights too, and not ``float16``); optimizer and
    gradients, and parameters of fsdp, stay float32"""
    gradient_checkpointing: bool = False
    """compute each layer again in the backward pass instead of keeping what it computed"""

    # -- the optimizer --
    lr: float = 1e-6
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    lr_warmup_iters: int = 0
    """optimizer steps until the learning rate is reached"""
    lr_decay_iters: int | None = None
    """optimizer steps until ``min_lr`` is reached: linear and cosine"""
    min_lr: float = 0.0
    critic_lr: float | None = None
    """``lr`` of a critic; the actor's where left out"""
    critic_lr_warmup_iters: int = 0
    """``lr_warmup_iters`` of a critic"""
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    clip_grad: float | None = 1.0
    """largest gradient norm; None: gradients are not clipped"""

    # -- batches --
    rollout_batch_size: int
    """prompts of one rollout, over all ranks"""
    n_samples_per_prompt: int = 1
    """samples of one prompt, which stay on one rank"""
    global_batch_size: int | None = None
    """samples of one optimizer step, over all ranks; all of a rollout where left out"""
    num_steps_per_rollout: int | None = None
    """optimizer steps of one rollout, instead of ``global_batch_size``"""
    micro_batch_size: int | None = None
    """samples of one forward and backward pass"""
    max_tokens_per_gpu: int | None = None
    """tokens of one forward and backward pass, instead; 16384 where neither is given"""

    # -- advantages and loss --
    advantage_estimator: str = "grpo"
    """``grpo``, ``gspo``, ``rloo``, ``reinforce_plus_plus``, ``reinforce_plus_plus_baseline``,
    ``ppo`` (GAE with a critic), or a registered advantage"""
    grpo_std_normalization: bool = True
    """grpo: divide by the standard deviation of the group"""
    normalize_advantages: bool = False
    """over the tokens of the global batch; some estimators always do"""
    gamma: float = 1.0
    lambd: float = 1.0
    """lambda of GAE"""
    kl_coef: float = 0.0
    """of the KL to the reference that is subtracted from the rewards"""
    use_kl_loss: bool = False
    """add ``kl_loss_coef`` times the KL to the reference to the loss"""
    kl_loss_coef: float = 0.0
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "k1"
    """estimator of the KL; ``low_var_kl`` is k3"""
    eps_clip: float = 0.2
    eps_clip_high: float | None = None
    """upper clip; ``eps_clip`` where left out"""
    eps_clip_c: float | None = None
    """dual clip, above 1"""
    value_clip: float | None = 0.2
    """critic: new values are held this near to the old ones"""
    entropy_coef: float = 0.0
    calculate_per_token_loss: bool = False
    """mean over tokens; else over samples of their means"""
    use_rollout_logprobs: bool = False
    """the ratio is to the log-probs of the rollout; else the actor computes them once more"""
    use_tis: bool = False
    """truncated importance sampling: weights of what the rollout sampled otherwise"""
    tis_clip: float = 2.0
    """largest of these weights"""
    rollout_temperature: float = 1.0
    """by which the logits were divided when the samples were drawn"""
    rollout_top_p: float = 1.0
    """probability mass that the samples were drawn from; below 1 they bring ``rollout_kept``"""
    rollout_top_k: int = -1
    """number of most likely tokens that the samples were drawn from; above 0 they bring
    ``rollout_kept``"""
    max_staleness: int | None = None
    """versions that a token's weights may be behind those that are trained; None: any"""

    # -- weights on the CPU, and their way to the engines --
    keep_old_actor: bool = False
    """the log-probs that the ratio is to are those of the weights that the engines have, or had"""
    update_weights_interval: int = 1
    """rollouts between two calls of ``update_weights``"""
    ref_update_interval: int | None = None
    """rollouts after which the reference becomes what was trained"""
    colocate: bool = False
    """engines are on the trainers' hosts, and are handed the tensors; else weights are published"""
    publish_precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """what the engines compute in"""
    update_weight_buffer_size: int = 32 * 1024 * 1024
    """bytes of a bucket of weights"""
    offload_train: bool = False
    """weights and optimizer are on the device only while they are used"""

    # -- critic, hooks, debugging --
    num_critic_only_steps: int = 0
    """rollouts at the beginning that the critic trains alone"""
    rollout_data_postprocess_path: str | None = None
    """a function, ``module.name`` or ``module:name``: ``(args, samples) -> samples or None``"""
    train_env_vars: dict[str, str] = {}
    """of the actors' processes"""
    use_routing_replay: bool = False
    """sets ENABLE_ROUTING_REPLAY=1 in actors (not in critics), for code that reads it; neither
    backend replays routing"""
    debug_train_only: bool = False
    """there are no engines: ``update_weights`` does nothing"""
    debug_rollout_only: bool = False
    """nothing is trained, and no model is built"""

    def __post_init__(self) -> None:
        self._check_backend()
        if (self.hf_checkpoint is None) == (not self.model_config):
            raise ValueError(
                "give either hf_checkpoint (a folder) or model_config (a table with model_type), "
                f"and not {'none' if self.hf_checkpoint is None else 'both'} of them"
            )
        for name in ("rollout_batch_size", "n_samples_per_prompt", "update_weights_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("ref_update_interval", "global_batch_size", "num_steps_per_rollout"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ValueError(f"{name} is {number}; it must be at least 1, or left out")
        for name in ("rollout_temperature", "rollout_top_p", "lr", "tis_clip"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        if self.use_tis and self.use_rollout_logprobs:
            raise ValueError(
                "use_tis weights tokens by the actor's log-probs over those of the rollout, which "
                "use_rollout_logprobs takes for the actor's: each weight is 1; leave one out"
            )
        self._check_steps()

    def _check_backend(self) -> None:
        """Refuse what the backend does not have, instead of leaving it out."""
        if self.train_backend not in BACKENDS:
            raise ValueError(
                f"train_backend is {self.train_backend!r}; it must be one of {', '.join(BACKENDS)}"
            )
        for name in ("context_parallel_size", "expert_model_parallel_size"):
            if getattr(self, name) != 1:
                raise ValueError(f"{name} is {getattr(self, name)}; only 1 is possible so far")
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
            number = getattr(self, name)
            if number < 1:
                raise ValueError(f"{name} is {number}; it must be at least 1")
            if number > 1 and self.train_backend != "megatron":
                raise ValueError(
                    f"{name} is {number}, but train_backend {self.train_backend!r} does not cut a "
                    "model so: set train_backend to 'megatron', or leave it out"
                )
        if self.train_backend == "megatron" and self.precision == "float16":
            raise ValueError("precision is 'float16'; megatron has 'float32' and 'bfloat16'")

    def _check_steps(self) -> None:
        samples, size = self.rollout_samples, self.global_batch_size
        if size is not None and samples % size:
            raise ValueError(
                f"global_batch_size is {size}; it must divide the {samples} samples of a rollout "
                f"(rollout_batch_size {self.rollout_batch_size} x n_samples_per_prompt "
                f"{self.n_samples_per_prompt})"
            )
        steps = self.num_steps_per_rollout
        if steps is not None and size is not None and steps * size != samples:
            raise ValueError(
                f"num_steps_per_rollout {steps} x global_batch_size {size} is not the {samples} "
                "samples of a rollout: leave one of the two out"
            )

    @classmethod
    def of(cls, args: Any) -> TrainArgs:
        """Return typed arguments of any object that has some of them as attributes.

        Attributes of other names are ignored, as a namespace has many; one that is None counts as
        left out. Raises `ValueError`.
        """
        if isinstance(args, cls):
            return args
        found = {name: getattr(args, name, None) for name in cls.__struct_fields__}
        given = {name: value for name, value in found.items() if value is not None}
        # None is a value of its own where the default is another one.
        given |= {
            name: None
            for name in ("clip_grad", "value_clip")
            if getattr(args, name, MISSING) is None
        }
        try:
            return msgspec.convert(given, cls, strict=False)
        except msgspec.ValidationError as error:
            raise ValueError(f"args of the training group: {error}") from error

    @property
    def rollout_samples(self) -> int:
        """Samples of one rollout, over all ranks."""
        return self.rollout_batch_size * self.n_samples_per_prompt

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of one rollout."""
        if self.num_steps_per_rollout is not None:
            return self.num_steps_per_rollout
        return self.rollout_samples // (self.global_batch_size or self.rollout_samples)

    @property
    def truncates(self) -> bool:
        """Whether samples were drawn from a part of the vocabulary."""
        return self.rollout_top_p < 1.0 or self.rollout_top_k > 0

    @property
    def needs_reference(self) -> bool:
        """Whether the loss or the rewards have a KL to the reference."""
        return self.kl_coef > 0.0 or (self.use_kl_loss and self.kl_loss_coef > 0.0)

    @property
    def needs_values(self) -> bool:
        """Whether advantages are computed from the values of a critic."""
        return ESTIMATORS.get(self.advantage_estimator, self.advantage_estimator) == "gae"

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model between them, and train on the same samples."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    def data_ranks(self, world_size: int) -> int:
        """Return between how many ranks a rollout is divided.

        Raises `ValueError` where so many ranks do not hold whole copies of the model.
        """
        if world_size % self.model_ranks:
            raise ValueError(
                f"{world_size} ranks are no multiple of tensor_model_parallel_size "
                f"{self.tensor_model_parallel_size} x pipeline_model_parallel_size "
                f"{self.pipeline_model_parallel_size} = {self.model_ranks}, which hold one copy of "
                "the model"
            )
        return world_size // self.model_ranks

    def for_role(self, role: str) -> TrainArgs:
        """Return the arguments of a role: a critic has its own load, save, lr and warm-up.

        Raises `ValueError` for another role.
        """
        if role not in ROLES:
            raise ValueError(f"role is {role!r}; it must be one of {', '.join(ROLES)}")
        if role == "actor":
            return self
        return msgspec.structs.replace(
            self,
            load=self.critic_load,
            save=self.critic_save,
            save_hf=None,
            lr=self.critic_lr or self.lr,
            lr_warmup_iters=self.critic_lr_warmup_iters,
        )
