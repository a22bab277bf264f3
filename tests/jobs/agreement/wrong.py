"""Configurations that cannot be carried out, each wrong in one place.

Each is a file of ``examples/`` or one of `BASES` with one setting changed, and perhaps a file of
its user's. `named` is what the refusal has to name: the setting or the file at fault.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from tests.jobs.language.checkpoints import save_checkpoint

Prepare = Callable[[pathlib.Path], None]
"""Writes what a user would have in the folder that settings call ``{folder}``."""

EXAMPLES: Final = "examples/"
SUMS: Final = EXAMPLES + "grpo_arithmetic.toml"
MEGATRON: Final = EXAMPLES + "grpo_megatron.toml"
CRITIC: Final = EXAMPLES + "ppo_arithmetic.toml"
MODEL_FOLDER: Final = EXAMPLES + "grpo_hf_checkpoint.toml"
POLE: Final = EXAMPLES + "cartpole_ppo.toml"
ARM: Final = EXAMPLES + "fetch_reach_ppo.toml"
PENDULUM: Final = EXAMPLES + "sac_pendulum.toml"
CLONING: Final = EXAMPLES + "vla_reach.toml"


class Wrong(NamedTuple):
    """A configuration with one mistake."""

    name: str
    base: str
    """The example that it changes."""
    settings: Mapping[str, object]
    """By their paths; ``{folder}`` in a text is the folder of `prepare`."""
    named: str
    """What the refusal has to contain."""
    prepare: Prepare | None = None

    def arguments(self, folder: pathlib.Path) -> list[str]:
        """The base and the settings as the command line takes them."""
        words = [self.base]
        for name, value in self.settings.items():
            words += [f"--{name}", _shown(value).replace("{folder}", str(folder))]
        return words


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _text(name: str, content: str) -> Prepare:
    return lambda folder: _write(folder / name, content)


def _write(path: pathlib.Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")


def _records(*records: Mapping[str, object], copies: int = 300) -> Prepare:
    lines = [json.dumps(record) for record in records] * copies
    return _text("data.jsonl", "\n".join(lines) + "\n")


def _sums(*others: Mapping[str, object]) -> Prepare:
    """Different sums, and these records."""
    sums = [
        {"prompt": f"{one}+{two}=", "answer": str(one + two)}
        for one in range(20)
        for two in range(20)
    ]
    return _records(*sums, *others, copies=1)


def _model(**fields: object) -> Prepare:
    return lambda folder: _saved(folder, **fields)


def _saved(folder: pathlib.Path, **fields: object) -> None:
    save_checkpoint(folder / "model", "qwen3", **{"max_position_embeddings": 2048} | fields)


def _with_nan(folder: pathlib.Path) -> None:
    from safetensors.torch import load_file, save_file

    _saved(folder)
    file = folder / "model" / "model.safetensors"
    state = load_file(file)
    state["model.norm.weight"][0] = float("nan")
    save_file(state, file, metadata={"format": "pt"})


def _of_another_shape(folder: pathlib.Path) -> None:
    _saved(folder)
    file = folder / "model" / "config.json"
    described = json.loads(file.read_text())
    described["intermediate_size"] *= 2
    file.write_text(json.dumps(described))


def _without_weights(folder: pathlib.Path) -> None:
    _saved(folder)
    (folder / "model" / "model.safetensors").unlink()


def _without_an_end(folder: pathlib.Path) -> None:
    """No end-of-sequence token: not in the model's files, not in the tokenizer's."""
    _saved(folder)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        file = folder / "model" / name
        if file.is_file():
            fields = json.loads(file.read_text())
            file.write_text(json.dumps({k: v for k, v in fields.items() if "eos" not in k}))
    (folder / "model" / "special_tokens_map.json").unlink(missing_ok=True)


ENVIRONMENT = """
import gymnasium, numpy as np
class Env(gymnasium.Env):
    def __init__(self, size=3, **kwargs):
        self.observation_space = gymnasium.spaces.Box(-1, 1, (size,), np.float32)
        self.action_space = {actions}
        {made}
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {{}}
    def step(self, action):
        return np.zeros(3, np.float32), 0.0, False, True, {{}}
"""
HANDLER = "import signal; signal.signal(signal.SIGUSR2, lambda *_: None)"
BOX = "gymnasium.spaces.Box(-1, 1, (2,), np.float32)"
FIVE = "gymnasium.spaces.Discrete(5)"


def _environment(actions: str = BOX, made: str = "pass") -> Prepare:
    return _text("env.py", ENVIRONMENT.format(actions=actions, made=made))


def _own(**settings: object) -> dict[str, object]:
    """Settings of `ARM` with the environment of `_environment` instead."""
    chosen = {"env.id": "", "env.entry_point": "{folder}/env.py:Env"}
    return {**chosen, "evaluation.target_success_rate": "none", **settings}


def _unreadable(reference: str) -> Prepare:
    """Sums whose references are all this text."""
    return _records(
        *(
            {"prompt": f"{one}+{two}=", "answer": reference}
            for one in range(20)
            for two in range(20)
        ),
        copies=1,
    )


SCORE_ONE = "def score(answer):\n    return 1.0\n"
SCORE = "def score(prompt, answer, reference):\n    return 1.0\n"
DATA = {"data.path": "{folder}/data.jsonl", "warm_start.steps": 0}
ANSWER = {"prompt": "1+1=", "answer": "2"}

LANGUAGE: Final = [
    Wrong("data that is not there", SUMS, {"data.path": "nothing.jsonl"}, "data.path"),
    Wrong("empty data", SUMS, DATA, "data", _text("data.jsonl", "")),
    Wrong("data that is no JSON", SUMS, DATA, "data.jsonl", _text("data.jsonl", "one\ntwo\n")),
    Wrong("no such prompt column", SUMS, {"data.prompt_column": "question"}, "question"),
    Wrong("no such answer column", SUMS, {"data.reference_column": "label"}, "label"),
    Wrong("a prompt that is no text", SUMS, DATA, "data", _records({"prompt": 5, "answer": "1"})),
    Wrong(
        "an empty prompt",
        SUMS,
        {**DATA, "data.chat": False},
        "the prompt is empty",
        _sums({"prompt": "", "answer": "1"}),
    ),
    Wrong("all records held out", SUMS, {"data.held_out": 100_000}, "held_out"),
    Wrong("a prompt beyond the limit", SUMS, {"data.max_prompt_tokens": 2}, "token"),
    Wrong("no room for an answer", SUMS, {"rollout.sampling.max_tokens": 64}, "max_tokens"),
    Wrong("an unknown verifier", SUMS, {"data.verifier": "exakt"}, "exact"),
    Wrong("no verifier's file", SUMS, {"data.verifier": "{folder}/mine.py:score"}, "mine.py"),
    Wrong(
        "no verifier in its file",
        SUMS,
        {"data.verifier": "{folder}/mine.py:skore"},
        "skore",
        _text("mine.py", SCORE),
    ),
    Wrong(
        "a verifier whose file raises",
        SUMS,
        {"data.verifier": "{folder}/mine.py:score"},
        "mine.py",
        _text("mine.py", "import nothing_like_it\n" + SCORE),
    ),
    Wrong(
        "a verifier that is no function",
        SUMS,
        {"data.verifier": "{folder}/mine.py:score"},
        "mine.py",
        _text("mine.py", "score = 3\n"),
    ),
    Wrong(
        "a verifier of no arguments",
        SUMS,
        {"data.verifier": "{folder}/mine.py:score"},
        "score",
        _text("mine.py", "def score():\n    return 1.0\n"),
    ),
    Wrong(
        "an unknown module to preload", SUMS, {"reward.preload": '["nothing_like_it"]'}, "nothing"
    ),
    Wrong("no scoring process", SUMS, {"reward.processes": 0}, "reward.processes"),
    Wrong("no time to score", SUMS, {"reward.time_limit": 0}, "reward.time_limit"),
    Wrong("no reward worker", SUMS, {"cluster.reward_workers": 0}, "reward_workers"),
    Wrong(
        "heads that do not divide", SUMS, {"model.config.num_attention_heads": 3}, "model.config"
    ),
    Wrong("an unknown family", SUMS, {"model.config.model_type": "qwen33"}, "model_type"),
    Wrong("more tokens than embeddings", SUMS, {"model.config.vocab_size": 5}, "vocab_size"),
    Wrong("an unknown tokenizer", SUMS, {"model.tokenizer": "arithmetik"}, "model.tokenizer"),
    Wrong("no model folder", MODEL_FOLDER, {"model.path": "{folder}/model"}, "model.path"),
    Wrong(
        "a model folder without a model",
        MODEL_FOLDER,
        {"model.path": "{folder}/model"},
        "config.json",
        _text("model/readme.txt", "soon"),
    ),
    Wrong(
        "weights of another shape",
        MODEL_FOLDER,
        {"model.path": "{folder}/model"},
        "config.json",
        _of_another_shape,
    ),
    Wrong(
        "no weights", MODEL_FOLDER, {"model.path": "{folder}/model"}, "weights", _without_weights
    ),
    Wrong("weights of NaN", MODEL_FOLDER, {"model.path": "{folder}/model"}, "NaN", _with_nan),
    Wrong(
        "fewer embeddings than tokens",
        MODEL_FOLDER,
        {"model.path": "{folder}/model"},
        "vocab_size",
        _model(vocab_size=5),
    ),
    Wrong(
        "no token that ends an answer",
        MODEL_FOLDER,
        {"model.path": "{folder}/model"},
        "end-of-sequence",
        _without_an_end,
    ),
    Wrong("an unknown engine", SUMS, {"rollout.backend": "transformer"}, "transformers"),
    Wrong("an unknown trainer", SUMS, {"actor.backend": "fsdpp"}, "fsdp"),
    Wrong("no temperature", SUMS, {"rollout.sampling.temperature": 0}, "temperature"),
    Wrong("a negative temperature", SUMS, {"rollout.sampling.temperature": -1}, "temperature"),
    Wrong("top_p of nothing", SUMS, {"rollout.sampling.top_p": 0}, "top_p"),
    Wrong("top_p beyond all", SUMS, {"rollout.sampling.top_p": 1.5}, "top_p"),
    Wrong("a negative top_k", SUMS, {"rollout.sampling.top_k": -1}, "top_k"),
    Wrong("answers of no token", SUMS, {"rollout.sampling.max_tokens": 0}, "max_tokens"),
    Wrong(
        "groups of one",
        SUMS,
        {"training.group_size": 1, "actor.micro_batch_size": 16},
        "group_size",
    ),
    Wrong("no iteration", SUMS, {"training.iterations": 0}, "training.iterations"),
    Wrong("a negative staleness", SUMS, {"training.max_staleness": -1}, "max_staleness"),
    Wrong("batches that do not divide", SUMS, {"actor.global_batches": 5}, "global_batches"),
    Wrong("micro-batches that do not divide", SUMS, {"actor.micro_batch_size": 60}, "micro_batch"),
    Wrong("micro-batches of none", SUMS, {"actor.micro_batch_size": 0}, "micro_batch_size"),
    Wrong("an unknown loss", SUMS, {"actor.loss.name": "ppoo"}, "actor.loss.name"),
    Wrong("no loss's file", SUMS, {"actor.loss.name": "{folder}/mine.py:loss"}, "actor.loss.name"),
    Wrong("an unknown advantage", SUMS, {"actor.advantage.name": "gripo"}, "grpo"),
    Wrong("gae without a critic", SUMS, {"actor.advantage.name": "gae"}, "critic"),
    Wrong("a critic for nothing", SUMS, {"cluster.critics": 1}, "critic"),
    Wrong("a correction of nothing", SUMS, {"actor.loss.off_policy": "truncated"}, "off_policy"),
    Wrong("a learning rate below 0", SUMS, {"actor.optimizer.lr": -1e-3}, "lr"),
    Wrong("a learning rate of NaN", SUMS, {"actor.optimizer.lr": "nan"}, "lr"),
    Wrong("an infinite learning rate", SUMS, {"actor.optimizer.lr": "inf"}, "lr"),
    Wrong("moments beyond 1", SUMS, {"actor.optimizer.betas": "[1.5, 0.9]"}, "betas"),
    Wrong("clipping of nothing", SUMS, {"actor.optimizer.max_grad_norm": 0}, "max_grad_norm"),
    Wrong("a schedule without an end", SUMS, {"actor.scheduler.kind": "linear"}, "total_steps"),
    Wrong("an unknown precision", SUMS, {"actor.precision": "float8"}, "actor.precision"),
    Wrong("an engine's unknown dtype", SUMS, {"rollout.transformers.dtype": "int3"}, "dtype"),
    Wrong("tensor parallel FSDP", SUMS, {"actor.tp": 2}, "actor.tp"),
    Wrong("more stages than layers", MEGATRON, {"actor.tp": 1, "actor.pp": 3}, "pp"),
    Wrong("heads over three ranks", MEGATRON, {"actor.tp": 3}, "tp"),
    Wrong("a device that is not there", SUMS, {"cluster.placement.actor": "7"}, "placement"),
    Wrong("metrics to nowhere", SUMS, {"observe.sinks": '["wandbb"]'}, "observe.sinks"),
    Wrong("a template that is none", SUMS, {"data.chat_template": "{% if %}"}, "chat_template"),
    Wrong(
        "no template's file", SUMS, {"data.chat_template": "{folder}/none.jinja"}, "chat_template"
    ),
    Wrong("an evaluation of nothing", SUMS, {"data.held_out": 0}, "held_out"),
    Wrong("a target beyond all", SUMS, {"evaluation.target_accuracy": 1.5}, "target_accuracy"),
    Wrong("a scheduling policy", SUMS, {"scheduler.policy": "stattic"}, "static"),
    Wrong("warm start from nowhere", SUMS, {"warm_start.data.path": "none.jsonl"}, "warm_start"),
    Wrong(
        "an engine's unknown option",
        SUMS,
        {"rollout.backend": "vllm", "rollout.vllm.extra.enforce_eagre": True},
        "enforce_eager",
    ),
    Wrong(
        "an epoch more than there is",
        SUMS,
        {"data.epochs": 1, "training.iterations": 100_000},
        "epochs",
    ),
    Wrong("an unknown section", SUMS, {"actr.lr": 1}, "actor"),
    Wrong("a critic's micro-batches", CRITIC, {"critic.micro_batch_size": 100}, "micro_batch_size"),
    Wrong("a critic from nowhere", CRITIC, {"critic.path": "{folder}/none"}, "critic.path"),
    Wrong("no address of Ray", SUMS, {"cluster.backend": "rayy"}, "ray"),
    Wrong(
        "references that are no numbers",
        SUMS,
        {**DATA, "data.verifier": "numeric"},
        "'abc' holds no number",
        _unreadable("abc"),
    ),
    Wrong(
        "references that are no mathematics",
        SUMS,
        {**DATA, "data.verifier": "math"},
        "data.verifier",
        _unreadable(""),
    ),
    Wrong(
        "references of other tasks",
        SUMS,
        {**DATA, "data.verifier": "reasoning_gym"},
        "reference_column",
        _unreadable("abc"),
    ),
    Wrong(
        "a template of one prompt",
        SUMS,
        {"data.chat_template": "{folder}/one.jinja", "warm_start.steps": 0},
        "chat template",
        _text("one.jinja", "Hello."),
    ),
    Wrong(
        "repeated prompts that epochs count",
        SUMS,
        {**DATA, "data.epochs": 1, "data.held_out": 1, "training.iterations": 2},
        "epochs",
        _records({"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": "3"}, copies=40),
    ),
    Wrong(
        "a verifier that finds its key in the driver alone",
        SUMS,
        {"data.verifier": "{folder}/mine.py:score", "warm_start.steps": 0},
        "mine.py",
        _text("mine.py", "import os\nos.environ['PYTEST_CURRENT_TEST']\n" + SCORE_ONE),
    ),
    Wrong(
        "no memory for a verifier",
        SUMS,
        {"data.verifier": "math", "reward.memory_limit_mib": 1, "warm_start.steps": 0},
        "memory_limit_mib",
    ),
    Wrong("a split of one file", SUMS, {"data.split": "test"}, "split"),
    Wrong("a million threads", SUMS, {"rollout.transformers.threads": 10**8}, "threads"),
    Wrong("a million processes", SUMS, {"reward.processes": 10**6}, "processes"),
    Wrong(
        "threads of vLLM",
        SUMS,
        {"rollout.backend": "vllm", "rollout.vllm.threads": 10**8},
        "threads",
    ),
    Wrong("a seed beyond 64 bits", SUMS, {"seed": 2**70}, "64 bits"),
    Wrong("an engine's seed beyond 64 bits", SUMS, {"rollout.serving.seed": -(2**70)}, "64 bits"),
    Wrong("another job", SUMS, {"job": "embodied_ppo"}, "language_rl"),
    Wrong("a heartbeat that none keeps", SUMS, {"cluster.heartbeat_limit": 0.01}, "heartbeat"),
    Wrong("a constant schedule that ends", SUMS, {"actor.scheduler.total_steps": 9}, "total_steps"),
    Wrong("context parallel FSDP", SUMS, {"actor.megatron.cp": 2}, "actor.megatron.cp"),
    Wrong(
        "sequence parallel FSDP",
        SUMS,
        {"actor.megatron.sequence_parallel": True},
        "actor.megatron.sequence_parallel",
    ),
    Wrong("an actor that never trains", CRITIC, {"critic.warmup_iterations": 10**6}, "iterations"),
    Wrong("an unknown activation", SUMS, {"model.config.hidden_act": "relou"}, "relou"),
    Wrong("a model's unknown dtype", SUMS, {"model.config.dtype": "float99"}, "float99"),
    Wrong("unknown layers", SUMS, {"model.config.layer_types": '["x"]'}, "layer_type"),
    Wrong("padding beyond the tokens", SUMS, {"model.config.pad_token_id": 10**6}, "padding"),
    Wrong("a family that is a number", SUMS, {"model.config.model_type": 5}, "model_type"),
    Wrong("a model of NaN", SUMS, {"model.config.rms_norm_eps": "nan"}, "nan"),
    Wrong("weights drawn from NaN", SUMS, {"model.config.initializer_range": "nan"}, "nan"),
    Wrong("a model that sees the future", SUMS, {"model.config.model_type": "bert"}, "Bert"),
    Wrong("a misspelled size", SUMS, {"model.config.hidden_sizee": 12}, "'hidden_size'"),
]

EMBODIED: Final = [
    Wrong("an unknown environment", POLE, {"env.id": "CartPol-v1"}, "env.id"),
    Wrong("an unknown version", POLE, {"env.id": "CartPole-v77"}, "env.id"),
    Wrong("a keyword that is none", POLE, {"env.kwargs.gravitas": 9}, "gravitas"),
    Wrong("no environment's file", ARM, _own(), "env.py"),
    Wrong(
        "no environment in its file",
        ARM,
        _own(**{"env.entry_point": "{folder}/env.py:Environment"}),
        "Environment",
        _environment(),
    ),
    Wrong(
        "a constructor that raises",
        ARM,
        _own(),
        "no robot",
        _environment(made="raise OSError('no robot')"),
    ),
    Wrong(
        "a constructor that leaves",
        ARM,
        _own(),
        "env.entry_point",
        _environment(made="import os; os._exit(7)"),
    ),
    Wrong(
        "a constructor that crashes",
        ARM,
        _own(),
        "env.entry_point",
        _environment(made="import ctypes; ctypes.string_at(0)"),
    ),
    Wrong(
        "a class that is no environment",
        ARM,
        _own(),
        "env.entry_point",
        _text("env.py", "class Env:\n    pass\n"),
    ),
    Wrong(
        "a policy of categories",
        ARM,
        _own(**{"actor.fsdp.policy.name": "mlp_categorical"}),
        "mlp_categorical",
        _environment(),
    ),
    Wrong(
        "a policy of Gaussians", POLE, {"actor.fsdp.policy.name": "mlp_gaussian"}, "mlp_gaussian"
    ),
    Wrong("an unknown policy", POLE, {"actor.fsdp.policy.name": "mlp_gausian"}, "mlp_gaussian"),
    Wrong("rescaled categories", POLE, {"env.actions": "rescale"}, "env.actions"),
    Wrong(
        "a language policy without words",
        POLE,
        {"actor.fsdp.policy.name": "vision_language"},
        "vision_language",
    ),
    Wrong(
        "another observation size",
        POLE,
        {"actor.fsdp.policy.observation_size": 7},
        "observation_size",
    ),
    Wrong(
        "a mini-batch larger than all",
        POLE,
        {"actor.ppo.minibatch_size": 100_000},
        "minibatch_size",
    ),
    Wrong("no environment at all", POLE, {"env.envs": 0}, "env.envs"),
    Wrong("more stages than environments", POLE, {"env.stages": 9}, "env.stages"),
    Wrong("no step", POLE, {"training.steps_per_iteration": 0}, "steps_per_iteration"),
    Wrong("an unknown simulator", POLE, {"env.simulator": "vektor"}, "vector"),
    Wrong("more ready than there are", ARM, {"env.simulator": "pool", "env.ready": 99}, "ready"),
    Wrong(
        "a success beyond all", ARM, {"evaluation.target_success_rate": 2.0}, "target_success_rate"
    ),
    Wrong("two targets of nothing", ARM, {"evaluation.episodes": 0}, "evaluation"),
    Wrong(
        "demonstrations that are not there",
        CLONING,
        {"actor.cloning.demonstrations": "{folder}/none", "demonstrations.policy": ""},
        "demonstrations",
    ),
    Wrong("a discount beyond 1", POLE, {"actor.advantage.gamma": 1.5}, "gamma"),
    Wrong("a lambda below 0", POLE, {"actor.advantage.gae_lambda": -0.1}, "gae_lambda"),
    Wrong("groups of one pole", POLE, {"actor.advantage.name": "grpo"}, "group_size"),
    Wrong("rollout workers below 0", POLE, {"cluster.rollout_workers": -1}, "rollout_workers"),
    Wrong("a device that is no device", POLE, {"actor.fsdp.device": "cuda"}, "device"),
    Wrong("samples beyond the memory", PENDULUM, {"replay.batch_size": 100_000}, "batch_size"),
    Wrong(
        "learning starts after the end",
        PENDULUM,
        {"training.learning_starts": 20_000},
        "learning_starts",
    ),
    Wrong("soft actor-critic of categories", PENDULUM, {"env.id": "CartPole-v1"}, "actions"),
    Wrong("a learning rate that is a word", POLE, {"actor.fsdp.optimizer.lr": "small"}, "lr"),
    Wrong("threads of a forward pass", POLE, {"rollout.torch_threads": 10**8}, "torch_threads"),
    Wrong(
        "a chunk that is the environment's",
        POLE,
        {"actor.fsdp.policy.action_chunk": 3},
        "action_chunk",
    ),
    Wrong(
        "values of tokens that are none",
        POLE,
        {"actor.fsdp.policy.token_values": True},
        "token_values",
    ),
    Wrong(
        "values that learn to be wrong",
        POLE,
        {"actor.ppo.loss.value_coefficient": -1},
        "value_coeff",
    ),
    Wrong(
        "a constructor for the main thread",
        ARM,
        _own(),
        "main thread",
        _environment(made=HANDLER),
    ),
    Wrong(
        "a constructor for the main thread of one process",
        ARM,
        _own(**{"cluster.backend": "local"}),
        "main thread",
        _environment(made=HANDLER),
    ),
    Wrong(
        "an error without a text",
        ARM,
        _own(),
        "Bad",
        _environment(made="raise type('Bad', (Exception,), {'__str__': lambda s: 1 / 0})"),
    ),
    Wrong(
        "an unknown precision of a policy", POLE, {"actor.fsdp.precision": "float8"}, "precision"
    ),
]

WRONG: Final = [*LANGUAGE, *EMBODIED]
