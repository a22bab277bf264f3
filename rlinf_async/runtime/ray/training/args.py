"""What a training group is told, under the names that users of slime know.

::

    TrainArgs      any namespace --> checked fields --> settings of our language trainers
    RolloutData    columns, or a list of samples --this rank's prompts--> SampleGroup
    start_of       SAVE/iter_0000007/ and SAVE/latest_checkpointed_iteration.txt --> next rollout

Names and defaults are listed in docs/ray-train-group.md. Samples of one prompt are next to each
other, or say their prompt by ``group_indices``. Prompts go round the ranks in the order in which
they come: the k-th one to rank ``k % ranks``. No torch, no Ray.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlinf_async.algorithms.config import Aggregation, LanguageAdvantageConfig, LanguageLossConfig
from rlinf_async.backends.base import OptimizerConfig, SchedulerConfig
from rlinf_async.backends.fsdp.language.config import LanguageFSDPConfig, LanguageTrainerConfig
from rlinf_async.backends.language_training.config import LanguageModelConfig
from rlinf_async.backends.megatron.config import MegatronConfig, MegatronTrainerConfig
from rlinf_async.config.counts import check_bounds
from rlinf_async.messages.language import Kept, SampleGroup, TrainingSample
from rlinf_async.observe.files import atomic_write
from rlinf_async.parallel import Strategy, StrategyError
from rlinf_async.runtime.ray.session import of_ray
from rlinf_async.workers.actor.language import LanguageBatches

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
    """Arguments of a training group. Exactly one of ``hf_checkpoint`` and ``model_config`` is set.

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
    """seed of random weights"""

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
    """dtype of the arithmetic (megatron: of the weights too, and not ``float16``); optimizer and
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
    """whether to normalize advantages over the tokens of the global batch; some estimators always
    do"""
    gamma: float = 1.0
    lambd: float = 1.0
    """lambda of GAE"""
    kl_coef: float = 0.0
    """coefficient of the KL to the reference that is subtracted from the rewards"""
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
    """temperature by which the logits were divided when the samples were drawn"""
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
    """environment variables of the actors' processes"""
    use_routing_replay: bool = False
    """sets ENABLE_ROUTING_REPLAY=1 in actors (not in critics), for code that reads it; neither
    backend replays routing"""
    debug_train_only: bool = False
    """whether there are no engines: ``update_weights`` does nothing"""
    debug_rollout_only: bool = False
    """whether nothing is trained, and no model is built"""

    def __post_init__(self) -> None:
        self._check_backend()
        if (self.hf_checkpoint is None) == (not self.model_config):
            raise ValueError(
                "give either hf_checkpoint (a folder) or model_config (a table with model_type), "
                f"and not {'none' if self.hf_checkpoint is None else 'both'} of them"
            )
        counts = ("rollout_batch_size", "n_samples_per_prompt", "update_weights_interval")
        check_bounds(self, *counts, least=1)
        steps = ("ref_update_interval", "global_batch_size", "num_steps_per_rollout")
        check_bounds(self, *steps, least=1)
        check_bounds(self, "rollout_temperature", "rollout_top_p", "lr", "tis_clip", above=0)
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


SINGULAR = {
    "tokens": "tokens",
    "response_lengths": "response_length",
    "rewards": "reward",
    "loss_masks": "loss_mask",
    "rollout_log_probs": "rollout_log_probs",
    "rollout_kept": "rollout_kept",
    "log_probs": "log_probs",
    "ref_log_probs": "ref_log_probs",
    "values": "values",
    "advantages": "advantages",
    "returns": "returns",
    "group_indices": "group_index",
    "weight_versions": "weight_version",
}
"""the columns, and what each is called in a single sample"""

REQUIRED = ("tokens", "response_lengths", "rewards")


class RolloutDataError(ValueError):
    """Rollout data cannot be trained on; the message names column, sample and numbers."""


class RolloutData(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of one rollout, by columns of one entry for each sample; ``R``: response tokens."""

    tokens: Sequence[Any]
    """token ids ``[P + R]``: prompt and response"""
    response_lengths: Sequence[int]
    """``R``"""
    rewards: Sequence[float | None]
    """reward of each sample; None or NaN: not scored, which trains nothing"""
    loss_masks: Sequence[Any] | None = None
    """``[R]``: 1 for tokens in the loss; all where left out"""
    rollout_log_probs: Sequence[Any] | None = None
    """``[R]``: of the engine; computed by the actor where left out"""
    rollout_kept: Sequence[Any] | None = None
    """``[R]`` lists of token ids: what each token was drawn from, with ``rollout_top_p`` or
    ``rollout_top_k``; an empty one is the whole vocabulary"""
    log_probs: Sequence[Any] | None = None
    """``[R]``: that the ratio is to, where they were computed already"""
    ref_log_probs: Sequence[Any] | None = None
    values: Sequence[Any] | None = None
    advantages: Sequence[Any] | None = None
    returns: Sequence[Any] | None = None
    group_indices: Sequence[int] | None = None
    """number of each sample's prompt; ``n_samples_per_prompt`` samples in a row share one where
    left out"""
    weight_versions: Sequence[Any] | None = None
    """version of the weights that made the response: one number, or ``[R]``; the present one where
    left out"""

    @classmethod
    def of(cls, data: Any) -> RolloutData:
        """Return the columns of a mapping, or of a list of samples (mappings or objects).

        Further columns are ignored. Raises `RolloutDataError`.
        """
        if isinstance(data, cls):
            return data
        if isinstance(data, Mapping):
            columns = {name: data[name] for name in SINGULAR if data.get(name) is not None}
        elif isinstance(data, Sequence) and not isinstance(data, str | bytes):
            columns = _columns(data)
        else:
            raise RolloutDataError(
                f"rollout data is a {type(data).__name__}; it must be a dict of columns, a list of "
                "samples, or a reference to one of them (ray.put)"
            )
        missing = [name for name in REQUIRED if name not in columns]
        if missing:
            raise RolloutDataError(
                f"rollout data has no {', '.join(missing)} (there is: "
                f"{', '.join(columns) or 'nothing'})"
            )
        return cls(**columns)

    def groups(
        self, args: TrainArgs, *, rollout_id: int, version: int, rank: int = 0, ranks: int = 1
    ) -> list[SampleGroup]:
        """Return the prompts of a rank, with all their samples.

        Args:
            args: arguments of the group.
            rollout_id: number of the rollout.
            version: version of the weights, for samples that do not say theirs.
            rank: rank that trains these prompts.
            ranks: between which they are divided.

        Raises:
            RolloutDataError: the data is not as `args` say, or columns do not fit each other.
        """
        size = len(self.tokens)
        self._check_sizes(size)
        found: dict[int, list[TrainingSample]] = {}
        for at in range(size):
            group = at // args.n_samples_per_prompt
            if self.group_indices is not None:
                group = int(self.group_indices[at])
            members = found.setdefault(group, [])
            members.append(self._sample(at, group, len(members), version, args))
        wrong = [one for one, samples in found.items() if len(samples) != args.n_samples_per_prompt]
        if wrong:
            raise RolloutDataError(
                f"prompt {wrong[0]} has {len(found[wrong[0]])} samples; n_samples_per_prompt is "
                f"{args.n_samples_per_prompt}"
            )
        return [
            SampleGroup(iteration=rollout_id, group=group, samples=samples)
            for at, (group, samples) in enumerate(found.items())
            if at % ranks == rank
        ]

    def _check_sizes(self, size: int) -> None:
        for name in SINGULAR:
            column = getattr(self, name)
            if column is not None and len(column) != size:
                raise RolloutDataError(
                    f"{name} has {len(column)} entries, but tokens has {size}: one for each sample"
                )

    def _sample(
        self, at: int, group: int, index: int, version: int, args: TrainArgs
    ) -> TrainingSample:
        tokens = _vector("tokens", at, self.tokens[at], np.int32)
        response = int(self.response_lengths[at])
        if not 0 < response < len(tokens):
            raise RolloutDataError(
                f"response_lengths[{at}] is {response}, of {len(tokens)} tokens: prompt and "
                "response must have at least one token each"
            )
        if tokens.min() < 0:
            raise RolloutDataError(f"tokens[{at}] has the token {tokens.min()}, below 0")

        def column(name: str) -> Any:
            given = getattr(self, name)
            if given is None or given[at] is None:
                return None
            return _vector(name, at, given[at], np.float32, response)

        reward = self.rewards[at]
        reward = math.nan if reward is None else _number(at, reward)
        mask = np.ones(response, np.bool_)
        if self.loss_masks is not None:
            mask = _vector("loss_masks", at, self.loss_masks[at], np.bool_, response)
        log_prob = column("rollout_log_probs")
        kept = None if self.rollout_kept is None else self.rollout_kept[at]
        if args.truncates and kept is None:
            raise RolloutDataError(
                f"rollout_kept[{at}] is missing: with rollout_top_p = {args.rollout_top_p} and "
                f"rollout_top_k = {args.rollout_top_k} tokens were drawn from a part of the "
                "vocabulary. Log-probs over all of it, those that the actor computes too, are of a "
                "distribution that nothing was drawn from: say which token ids were kept for each "
                "token, or draw from all"
            )
        if kept is not None and len(kept) != response:
            raise RolloutDataError(
                f"rollout_kept[{at}] has {len(kept)} entries, but the response has {response} "
                "tokens: one list of token ids for each"
            )
        made_by = version if self.weight_versions is None else self.weight_versions[at]
        return TrainingSample(
            group=group,
            index=index,
            prompt_ids=tokens[:-response],
            response_ids=tokens[-response:],
            loss_mask=mask if math.isfinite(reward) else np.zeros_like(mask),
            # Without it, the actor fills it in: see `GroupActor.train_rollout`.
            log_prob=np.full(response, np.nan, np.float32) if log_prob is None else log_prob,
            version=np.broadcast_to(np.asarray(made_by, np.int32), response).copy(),
            temperature=args.rollout_temperature,
            kept=None if kept is None else _kept(at, kept),
            reward=reward,
            scored=math.isfinite(reward),
            prev_log_prob=column("log_probs"),
            ref_log_prob=column("ref_log_probs"),
            value=column("values"),
            advantage=column("advantages"),
            returns=column("returns"),
        )


def _kept(at: int, sets: Any) -> Kept:
    try:
        return Kept.of(sets)
    except (ValueError, TypeError) as error:
        raise RolloutDataError(
            f"rollout_kept[{at}] has to be lists of token ids: {error}"
        ) from error


def _columns(samples: Sequence[Any]) -> dict[str, list[Any]]:
    """Return the columns that any of the samples has."""

    def entry(sample: Any, name: str) -> Any:
        return sample.get(name) if isinstance(sample, Mapping) else getattr(sample, name, None)

    found = {}
    for name, one in SINGULAR.items():
        column = [entry(sample, one) for sample in samples]
        if any(value is not None for value in column):
            absent = [at for at, value in enumerate(column) if value is None]
            if absent and name != "rewards":
                raise RolloutDataError(f"sample {absent[0]} has no {one}, but others have")
            found[name] = column
    return found


def _vector(name: str, at: int, given: Any, dtype: Any, size: int | None = None) -> NDArray[Any]:
    try:
        vector = np.asarray(given)
        vector = vector.astype(dtype) if len(vector) else np.zeros(0, dtype)
    except (TypeError, ValueError) as error:
        raise RolloutDataError(f"{name}[{at}] holds no numbers: {error}") from error
    if vector.ndim != 1 or (size is not None and len(vector) != size):
        wanted = "a list of token ids" if size is None else f"one number for each of {size} tokens"
        raise RolloutDataError(
            f"{name}[{at}] has the shape {list(vector.shape)}; it must be {wanted} of the response"
        )
    return vector


def _number(at: int, reward: Any) -> float:
    try:
        return float(reward)
    except (TypeError, ValueError):
        raise RolloutDataError(
            f"rewards[{at}] is {reward!r}; it must be a number, or None where there is none"
        ) from None


def fetched(given: Any, rank: int, ranks: int) -> tuple[Any, bool]:
    """Return rollout data that may be behind references, and whether it is this rank's share alone.

    Args:
        given: the data, a reference to it, or a list of references: one for each rank, or one for
            all. What has a reference as ``inner`` (a box of slime) counts as one.
        rank: this one.
        ranks: number of ranks.

    Raises:
        RolloutDataError: there are as many references as neither.
    """
    ray = of_ray()

    def is_reference(one: Any) -> bool:
        return isinstance(getattr(one, "inner", one), ray.ObjectRef)

    def get(one: Any) -> Any:
        return ray.get(getattr(one, "inner", one))

    if is_reference(given):
        return get(given), False
    if not (isinstance(given, list | tuple) and given and all(map(is_reference, given))):
        return given, False
    if len(given) == 1:
        return get(given[0]), ranks == 1
    if len(given) != ranks:
        raise RolloutDataError(
            f"rollout_data_ref has {len(given)} references; give one for all ranks, or one for "
            f"each of the {ranks}"
        )
    return get(given[rank]), True


def backend(args: TrainArgs, *, critic: bool) -> str:
    """Return the registered name of what trains."""
    return f"{args.train_backend}_critic" if critic else args.train_backend


def trainer_config(args: TrainArgs, *, critic: bool, reference: bool, device: str) -> Any:
    """Return the settings of one rank's trainer, its backend's own Struct; ``args`` are those of
    its role.

    Raises `ValueError` for numbers that make no sense.
    """
    of_group: dict[str, Any] = {
        "advantage": advantage_config(args),
        "loss": loss_config(args, critic=critic),
        "value_clip": args.value_clip if critic else None,
        "reference": reference,
        "bucket_bytes": args.update_weight_buffer_size,
        "publish_precision": args.publish_precision,
        "seed": args.seed,
    }
    of_model: dict[str, Any] = {
        "model": LanguageModelConfig(
            path=args.hf_checkpoint,
            config=args.model_config,
            activation_checkpointing=args.gradient_checkpointing,
        ),
        "precision": args.precision,
        "optimizer": OptimizerConfig(
            lr=args.lr,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_eps,
            weight_decay=args.weight_decay,
            max_grad_norm=args.clip_grad,
        ),
        "scheduler": SchedulerConfig(
            kind=args.lr_decay_style,
            warmup_steps=args.lr_warmup_iters,
            total_steps=args.lr_decay_iters or 0,
            min_factor=args.min_lr / args.lr,
        ),
        "device": device,
    }
    if args.train_backend == "fsdp":
        fsdp = LanguageFSDPConfig(strategy=args.fsdp_strategy, **of_model)
        return LanguageTrainerConfig(fsdp=fsdp, **of_group)
    megatron = MegatronConfig(
        tp=args.tensor_model_parallel_size,
        pp=args.pipeline_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
        distributed_optimizer=args.use_distributed_optimizer,
        overlap=args.overlap_grad_reduce,
        **of_model,
    )
    return MegatronTrainerConfig(megatron=megatron, **of_group)


def check_megatron(args: TrainArgs) -> None:
    """Refuse what Megatron cannot train, or not cut so, before a rank is started.

    Raises:
        ValueError: naming the model's part that does not fit.
        MegatronUnavailable: megatron-core is not installed, or in another version.
    """
    from rlinf_async.backends.megatron.config import architecture_of, layout_of
    from rlinf_async.backends.megatron.cpu import check_installed

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
    library = importlib.import_module("transformers")
    if args.hf_checkpoint is not None:
        return library.AutoConfig.from_pretrained(args.hf_checkpoint, local_files_only=True)
    fields = {name: one for name, one in args.model_config.items() if name != "model_type"}
    return library.AutoConfig.for_model(args.model_config["model_type"], **fields)


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


TRACKER: Final = "latest_checkpointed_iteration.txt"


class TrainingStart(NamedTuple):
    """Point at which training begins."""

    rollout_id: int
    """the next rollout"""
    checkpoint: Path | None
    """checkpoint to go on from"""


def start_of(args: TrainArgs) -> TrainingStart:
    """Return where training goes on; at rollout 0 where there is nothing to load.

    Raises `ValueError` for a folder to load from without a checkpoint, unless it is the folder to
    save to as well, which has none at first.
    """
    if args.load is None:
        return TrainingStart(0, None)
    tracker = Path(args.load) / TRACKER
    if not tracker.is_file():
        if args.load == args.save:
            return TrainingStart(0, None)
        raise ValueError(
            f"load is {args.load!r}, but there is no {tracker}: no checkpoint was completed there. "
            "Leave load out to begin anew, or set it to the folder of save to go on if there is one"
        )
    text = tracker.read_text(encoding="utf-8").strip()
    if not re.fullmatch(r"\d+", text):
        raise ValueError(f"{tracker} says {text[:40]!r}; it must be the number of a rollout")
    folder = checkpoint_folder(args.load, int(text))
    if not folder.is_dir():
        raise ValueError(f"{tracker} names rollout {text}, but there is no {folder}")
    return TrainingStart(int(text) + 1, folder)


def checkpoint_folder(folder: str, rollout_id: int) -> Path:
    """Return the folder of the checkpoint after a rollout."""
    return Path(folder) / f"iter_{rollout_id:07d}"


def write_tracker(folder: str, rollout_id: int) -> None:
    """Record, atomically, that the checkpoint after this rollout is complete."""
    atomic_write(Path(folder) / TRACKER, f"{rollout_id}\n".encode())
