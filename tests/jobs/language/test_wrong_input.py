"""What a new user gets wrong: one clear message and exit code 2, before any worker starts."""

from __future__ import annotations

import json
import os
import pathlib
import socket

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.backends.models import make_model, qwen3, save_folder
from tests.jobs.language.kit import TOY, Job

pytestmark = pytest.mark.usefixtures("no_cluster")


def said(job: Job, *arguments: object) -> str:
    """The one line that the user sees."""
    ended = job.train(*arguments)
    assert ended.code == 2, ended.err
    assert ended.out == ""
    [line] = ended.err.splitlines()
    assert line.startswith("error: ")
    assert len(line) < 600
    assert not job.out.exists()  # the next try may take the same folder
    return line


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("actor.loss.name", "pppo", "no loss of a language model is called 'pppo'; did you mean"),
        ("actor.advantage.name", "grop", "no advantage of a language model is called 'grop'; did"),
        ("actor.advantage.name", "gae", "gae needs the values of a critic: set cluster.critics to"),
        ("actor.advantage.name", "turn_grpo", "turn_grpo gives credit to the turns of an episode"),
        ("cluster.critics", "1", "grpo does not use values: set cluster.critics to 0"),
        ("critic.warmup_iterations", "2", "there is no critic to warm up"),
        ("actor.epochs", "0", "epochs is 0; it must be at least 1"),
        ("actor.global_batches", "3", "an actor gets 4 groups of 2 samples in an iteration (4 "),
        ("actor.micro_batch_size", "3", "8 samples on each actor, which micro_batch_size = 3 does"),
        ("actor.micro_batch_size", "3", "does not divide: use 2 or 4"),
        ("actor.micro_batch_size", "64", "does not divide: use 8"),
        ("actor.global_batches", "3", "of whole groups: use a divisor of 4"),
        ("actor.balance_window", "3", "on each actor, which balance_window = 3 does not divide"),
        ("warm_start.steps", "1", "a toy actor has no weights to warm up: set it to 0"),
        ("actor.backend", "fsdp", "a toy has no weights: set both to 'toy', or neither"),
        ("training.group_size", "0", "group_size is 0; it must be at least 1"),
        ("data.verifier", "numerc", "no verifier is called 'numerc'; did you mean 'numeric'?"),
        ("data.verifier", "no_such_module:score", "data.verifier: 'no_such_module:score': 'no"),
        ("data.verifier", "tests.jobs.language.verifiers:none", "has no function 'none'"),
        ("data.verifier", "rewards.py", "'rewards.py' must be 'module:function' or 'file.py:funct"),
        ("data.verifier", "tests.jobs.language.broken_verifiers:score", "RuntimeError: no key"),
        ("data.held_out", "24", "held_out = 24 are kept back: none is left to train on"),
        ("data.held_out", "0", "evaluation.samples is 4, but no record is held out"),
        ("evaluation.every", "-1", "every is -1; it must be at least 0"),
        ("data.prompt_column", "question", "sums.jsonl:1: column 'question' is missing (columns"),
        ("data.max_prompt_tokens", "5", "24 prompts are longer than max_prompt_tokens = 5"),
        ("rollout.backend", "vlm", "rollout.backend"),
        ("rollout.sampling.temperature", "0", "at temperature 0 the most likely token is taken"),
        ("rollout.sampling.temperature", "0.001", "it must be a number from 0.01 on, or 0"),
        ("rollout.sampling.temperature", "inf", "temperature is inf; it must be a finite number"),
        ("rollout.sampling.min_p", "1.5", "min_p is 1.5; it must lie between 0 and 1"),
        ("rollout.sampling.min_p", "0.1", "the engine 'toy' does not say that it honours min_p"),
        ("rollout.sampling.min_p", "0.1", "rollout.backend to one that does (transformers, vllm)"),
        ("rollout.sampling.repetition_penalty", "0", "it must be a number above 0 (1: off)"),
        ("rollout.sampling.logit_bias", "[[-7, 1]]", "logit_bias has -7, which is no token id"),
        ("rollout.sampling.logit_bias", "[[7, 1], [7, 2]]", "logit_bias has a token twice"),
        ("rollout.sampling.logit_bias", "[[7, 101]]", "it must lie between -100 and 100"),
        ("rollout.sampling.logit_bias", "[[7, 1]]", "'toy' does not say that it honours logit_b"),
        ("rollout.sampling.stop", '[""]', "an empty text, which would end every response"),
        ("rollout.sampling.stop_token_ids", "[-1]", "stop_token_ids has -1, which is no token"),
        ("rollout.sampling.include_stop", "true", "there is neither stop nor stop_token_ids"),
        ("rollout.toy.context", "13", "24 prompts are longer than max_prompt_tokens = 5"),
        ("rollout.toy.context", "13", "a context of 13 tokens less max_tokens = 8 leaves 5"),
        ("rollout.toy.context", "8", "max_tokens is 8, but prompt and response have to fit the"),
        ("cluster.inference_workers", "-1", "inference_workers is -1; it must be at least 0"),
        ("actor.loss.kl_coefficient", "0.1", "needs reference log-probs: set cluster.inference_"),
        ("evaluation.target_accuracy", "90", "it must lie between 0 and 1"),
    ],
)
def test_a_wrong_setting_is_named_with_what_to_do(
    job: Job, setting: str, value: str, message: str
) -> None:
    assert message in said(job, f"--{setting}", value)


AGENTS = "tests.jobs.language.agents"
PROCESS = ("--cluster.backend", "process")
TALKS = ("--episode.run", f"{AGENTS}:talks", "--cluster.episode_workers", 1)
WORLD = "tests.episodes.environments.worlds:Guess-v0"
GUESSES = (*TALKS[2:], "--episode.run", "gymnasium", "--episode.environment.id", WORLD)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (TALKS[:2], "episode_workers: nobody would run 'tests.jobs.language.agents:talks': set"),
        (TALKS[2:], "cluster.episode_workers: there are 1 episode workers, but each sample is one"),
        (("--episode.max_turns", 3), "episode.max_turns: each sample is one answer, so that this"),
        ((*TALKS, "--episode.max_turns", 0), "max_turns is 0; it must be at least 1"),
        ((*TALKS, "--actor.max_tokens", 2047), "actor.max_tokens: a micro-batch has at most 2047"),
        ((*TALKS, "--episode.max_tokens", 16_385), "a micro-batch has at most 16384 tokens, but a"),
        ((*TALKS, "--episode.max_tokens", 1), "max_tokens is 1; it must be at least 2"),
        ((*TALKS, "--episode.concurrent", 0), "concurrent is 0; it must be at least 1"),
        ((*TALKS, "--episode.seconds", 0), "seconds is 0.0; it must be a number of seconds above"),
        ((*TALKS, "--episode.on_timeout", "skip"), "episode.on_timeout"),
        ((*TALKS, "--episode.tools", "hermez"), "no format of tool calls is called 'hermez'; did"),
        ((*TALKS, "--episode.tools", "none.py:parse"), "episode.tools: 'none.py:parse': 'none.py'"),
        ((*TALKS, "--rollout.toy.context", 2000), "max_tokens is 2048, but an episode has to fit"),
        (
            (*TALKS, "--episode.max_tokens", 6),
            "(episode.max_tokens = 6 leaves 5: raise it for longer prompts)",
        ),
        ((*TALKS, "--data.chat", "false"), "data.chat: an episode is a conversation, whose"),
        (
            (*TALKS, "--episode.run", "talks"),
            "no coroutine or environment of an episode is called 'talks' (known: 'gymnasium', ",
        ),
        (
            (*TALKS, "--cluster.placement.episode.python", "/no/python"),
            "cluster.placement.episode.python: with cluster.backend = 'local' all workers are in",
        ),
        (
            (*TALKS, *PROCESS, "--cluster.placement.episode.python", "/no/python"),
            "cluster.placement.episode.python: '/no/python': it cannot be run: [Errno 2]",
        ),
        (
            (*TALKS, "--episode.endpoint.port", 8000, "--cluster.episode_workers", 2),
            "episode.endpoint.port: 2 episode workers of this host cannot listen on one port",
        ),
        (
            (*TALKS, "--episode.endpoint.interface", "eth99"),
            "episode.endpoint.interface: the endpoint cannot listen on eth99",
        ),
        (
            (*TALKS, "--episode.endpoint.interface", "0.0.0.0"),
            "interface is '0.0.0.0', which no agent can call: name the interface by which",
        ),
        (
            (*TALKS, "--episode.run", "command: python none.py"),
            "episode.run: command 'python none.py': there is no file 'none.py' in ",
        ),
        ((*TALKS, "--episode.environment.id", "Wordle-v0"), "is no environment, so that this has"),
        (
            (*GUESSES, "--episode.on_timeout", "score"),
            "episode.on_timeout: the environment 'gymnasium' scores its own episodes, and has none",
        ),
        (
            (*TALKS, "--episode.run", "openenv", "--episode.environment.url", "http://127.0.0.1:9"),
            "episode.environment.sessions: environment at 127.0.0.1:9 has 1 session(s), but",
        ),
        ((*TALKS, "--episode.run", "none.py:run"), "episode.run: 'none.py:run': 'none.py' cannot"),
        ((*TALKS, "--episode.run", f"{AGENTS}:nobody"), "has no function 'nobody'"),
        ((*TALKS, "--episode.run", f"{AGENTS}:at_once"), "is no coroutine function: an episode is"),
        (
            (*TALKS, "--episode.run", f"{AGENTS}:streams"),
            "is an async generator: an episode is `as",
        ),
        (
            (*TALKS, "--episode.run", f"{AGENTS}:of_two"),
            "a coroutine of an episode is called with episode",
        ),
    ],
)
@pytest.mark.parametrize("command", ["train", "check"])
def test_episodes_that_could_not_be_run_are_refused(
    job: Job, command: str, settings: tuple[object, ...], message: str
) -> None:
    if command == "train":
        assert message in said(job, *settings)
        return
    checked = job.command("check", job.file, *settings)
    assert checked.code == 2
    assert message in checked.err


@pytest.mark.parametrize("command", ["train", "check"])
def test_a_port_of_the_endpoint_that_is_taken_is_named(job: Job, command: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = job.command(command, job.file, *TALKS, "--episode.endpoint.port", port)
    assert found.code == 2
    assert (
        f"episode.endpoint.port: the endpoint cannot listen on 127.0.0.1 port {port}" in found.err
    )
    assert "with port = 0 any that is free is taken" in found.err


@pytest.mark.parametrize("command", ["train", "check"])
def test_references_of_which_none_is_the_number_of_a_task_are_refused(
    job: Job, command: str
) -> None:
    words = ("--data.reference_column", "prompt", "--data.verifier", "exact")
    refused = (
        "data.reference_column: a task of the environment 'gymnasium' is a number from 0, its "
        "reference, but no record has one (the first has "
    )
    if command == "train":
        assert refused in said(job, *GUESSES, *words)
        return
    checked = job.command("check", job.file, *GUESSES, *words)
    assert checked.code == 2
    assert refused in checked.err
    assert job.command("check", job.file, *GUESSES).code == 0


@pytest.mark.parametrize("command", ["train", "check"])
def test_a_template_in_which_no_episode_could_go_on_is_refused(
    job: Job, command: str, tmp_path: pathlib.Path
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content if m.role == 'user' }}{% endfor %}")
    settings = (*TALKS, "--data.chat_template", template)
    words = "data: the chat template leaves the content of an answer out"
    if command == "train":
        assert words in said(job, *settings)
        return
    checked = job.command("check", job.file, *settings)
    assert (checked.code, words in checked.err) == (2, True), checked.err


def test_prompts_that_cannot_be_divided_among_actors_are_refused_with_what_would_do(
    job: Job,
) -> None:
    two = ("--cluster.actors", 2, "--cluster.backend", "process")
    line = said(job, *two, "--training.prompts", 5)
    assert "5 prompts cannot be divided among 2 actors: use 4 or 6" in line


def test_a_missing_file_is_not_blamed_on_the_length_of_prompts(job: Job) -> None:
    line = said(job, "--data.path", "none.jsonl", "--rollout.toy.context", 100)
    assert "(--data.path): data.path: there is no file or folder 'none.jsonl'" in line
    checked = job.command("check", job.file, "--data.path", "none.jsonl")
    assert checked.code == 2
    folder = said(job, "--data.path", job.file.parent, "--rollout.toy.context", 100)
    assert "holds no data" in folder
    assert "max_tokens" not in folder


def test_micro_batches_of_a_fixed_size_have_no_token_limit_and_are_not_balanced(job: Job) -> None:
    two = ("--actor.micro_batch_size", 2)
    assert "a limit of tokens (64): leave one of them out" in said(
        job, *two, "--actor.max_tokens", 64
    )
    assert "2 samples each are not balanced: leave it out" in said(
        job, *two, "--actor.balance_window", 4
    )


def test_critics_that_cannot_be_paired_with_the_actors_are_refused(job: Job) -> None:
    two = ("--cluster.critics", 2, "--cluster.actors", 1)
    line = said(job, "--actor.advantage.name", "gae", *two)
    assert "2 critics cannot be paired with 1 actors, each with the one of its rank: set it" in line


def test_micro_batches_of_a_critic_that_do_not_divide_are_refused_with_what_would_do(
    job: Job,
) -> None:
    gae = ("--actor.advantage.name", "gae", "--cluster.critics", 1)
    line = said(job, *gae, "--critic.micro_batch_size", 3)
    assert (
        "8 samples on each critic, which micro_batch_size = 3 does not divide: use 2 or 4" in line
    )
    assert "micro_batch_size is 0; it must be at least 1" in said(
        job, *gae, "--critic.micro_batch_size", 0
    )


def test_fewer_prompts_than_the_run_needs_are_found_before_it(job: Job) -> None:
    line = said(job, "--data.epochs", 1, "--training.iterations", 6)
    assert "20 records x 1 epochs are 20 prompts, but 6 iterations of 4 need 24" in line


def test_a_prompt_longer_than_the_models_context_is_refused_with_both_numbers(tiny: Job) -> None:
    text = tiny.file.read_text()
    tiny.file.write_text(text.replace("head_dim = 16", "head_dim = 16\nmax_position_embeddings=12"))
    line = said(tiny)
    assert "24 prompts are longer than max_prompt_tokens = 4" in line
    assert "a context of 12 tokens less max_tokens = 8 leaves 4" in line


@pytest.mark.parametrize(
    ("model_type", "message"),
    [("qwen33", "did you mean 'qwen3'?"), ("t5", "no causal language model of model_type 't5'")],
)
def test_an_unknown_architecture_is_named_with_the_nearest(
    job: Job, model_type: str, message: str
) -> None:
    job.file.write_text(job.file.read_text().replace("qwen3", model_type))
    assert message in said(job)


CHECKPOINT = TOY.partition("[model]")[0] + "[model]\npath = '{model}'\n\n[data]"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "is not there: give a Hugging Face checkpoint on this disk"),
        ([], "has no config.json: it is not a Hugging Face checkpoint"),
        (["config.json"], "has no weights (*.safetensors)"),
        (["config.json", "pytorch_model.bin"], "holds no tokenizer (none of tokenizer.json"),
        (["config.json", "pytorch_model.bin", "tokenizer.json"], "cannot be loaded"),
    ],
)
def test_a_checkpoint_folder_that_lacks_something_is_named_with_what_to_do(
    job: Job, tmp_path: pathlib.Path, files: list[str] | None, message: str
) -> None:
    folder = tmp_path / "checkpoint"
    if files is not None:
        folder.mkdir()
        for name in files:
            (folder / name).write_text(json.dumps({"model_type": "qwen3"}))
    rest = job.file.read_text().partition("[data]")[2]
    job.file.write_text(CHECKPOINT.format(model=folder) + rest)
    line = said(job)
    assert message in line
    assert str(folder) in line


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_damaged_file_of_a_checkpoint_is_named(
    job: Job, tmp_path: pathlib.Path, name: str
) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for file in ("config.json", "tokenizer.json"):
        (folder / file).write_text(json.dumps({"model_type": "qwen3"}))
    save_file({"weight": np.zeros((8, 8), np.float32)}, folder / "model.safetensors")
    os.truncate(folder / name, (folder / name).stat().st_size - 4)
    rest = job.file.read_text().partition("[data]")[2]
    job.file.write_text(CHECKPOINT.format(model=folder) + rest)
    assert f"model.path: {folder / name} is damaged" in said(job)


@pytest.mark.parametrize("section", ["model", "critic"])
def test_a_checkpoint_whose_config_is_that_of_another_size_is_told_with_a_tensor_and_both_shapes(
    tiny: Job, tmp_path: pathlib.Path, section: str
) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    config = qwen3(layers=1, vocab_size=102)
    save_folder(folder, config, make_model(config))
    described = json.loads((folder / "config.json").read_text())
    described["intermediate_size"] *= 2
    (folder / "config.json").write_text(json.dumps(described))
    if section == "model":
        head, _, rest = tiny.file.read_text().partition("[model]")
        rest = rest.partition("[data]")[2]
        model = f"[model]\npath = '{folder}'\ntokenizer = 'arithmetic'\n\n[data]"
        tiny.file.write_text(head + model + rest)
        line = said(tiny)
    else:
        critic = ("--cluster.critics", 1, "--actor.advantage.name", "gae")
        line = said(tiny, *critic, "--critic.path", folder)
    assert f"{section}.path: {folder}: 3 tensors" in line
    assert (
        "model.layers.0.mlp.down_proj.weight is [64, 128] in model.safetensors and [64, 256] "
        in line
    )


def test_too_few_examples_for_a_batch_of_the_warm_start_are_refused_with_both_numbers(
    tiny: Job,
) -> None:
    line = said(tiny, "--warm_start.steps", 2, "--warm_start.batch_size", 21)
    assert "warm_start.batch_size: there are 20 examples, fewer than a batch of 21" in line


def test_a_batch_of_the_warm_start_that_actors_cannot_share_is_told_with_what_would_do(
    tiny: Job,
) -> None:
    two = ("--cluster.actors", 2, "--cluster.backend", "process")
    line = said(tiny, *two, "--warm_start.steps", 2, "--warm_start.batch_size", 5)
    assert "a batch of 5 examples cannot be divided among 2 actors: use 4 or 6" in line


def test_a_missing_shard_of_a_checkpoint_is_named(job: Job, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index = {"weight_map": {"a": shards[0], "b": shards[1]}}
    for name, content in {
        "config.json": {"model_type": "qwen3"},
        "tokenizer.json": {},
        "model.safetensors.index.json": index,
    }.items():
        (folder / name).write_text(json.dumps(content))
    save_file({"a": np.zeros((8, 8), np.float32)}, folder / shards[0])
    rest = job.file.read_text().partition("[data]")[2]
    job.file.write_text(CHECKPOINT.format(model=folder) + rest)
    assert f"lacks {shards[1]}, which model.safetensors.index.json lists" in said(job)


def test_a_supervised_phase_of_a_checkpoint_is_refused_and_not_left_out_in_silence(
    job: Job, tmp_path: pathlib.Path
) -> None:
    rest = job.file.read_text().partition("[data]")[2]
    job.file.write_text(CHECKPOINT.format(model=tmp_path / "checkpoint") + rest)
    assert "warm_start.steps: a warm start is for" in said(job, "--warm_start.steps", 5)


def test_a_checkpoint_and_a_config_together_are_refused(job: Job) -> None:
    job.file.write_text(job.file.read_text().replace("[model]", "[model]\npath = 'somewhere'"))
    assert "give either path (a Hugging Face folder) or config" in said(job)


def test_a_mass_that_vllm_cannot_tell_of_is_refused_with_what_to_set(tiny: Job) -> None:
    pytest.importorskip("vllm", exc_type=ImportError)
    mass = ("--rollout.backend", "vllm", "--rollout.sampling.top_p", 0.9)
    line = said(tiny, *mass)
    assert "rollout.sampling.top_p: with top_p = 0.9 alone vLLM may keep any number" in line
    assert "set top_k (at most 1024) as well" in line
    line = said(tiny, *mass, "--rollout.sampling.top_k", 2000)
    assert "rollout.sampling.top_k: vLLM tells which tokens it kept for at most 1024" in line
    line = said(tiny, "--rollout.backend", "vllm", "--rollout.sampling.min_p", 0.1)
    assert "rollout.sampling.min_p: with min_p = 0.1 alone vLLM may keep any number" in line


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"rollout.sampling.repetition_penalty": 1.2},
            "repetition_penalty changes what a token is drawn from, which the trainer 'fsdp' does",
        ),
        (
            {"rollout.sampling.logit_bias": "[[9999, 1]]"},
            "rollout.sampling.logit_bias: there is no token 9999: the model has tokens 0 .. ",
        ),
        (
            {"rollout.sampling.stop_token_ids": "[9999]"},
            "rollout.sampling.stop_token_ids: there is no token 9999",
        ),
        (
            {"evaluation.sets.more.min_p": 0.1, "evaluation.sets.more.data.tasks": '["chain_sum"]'},
            "evaluation.sets.more: min_p is 0.1, but at temperature 0 the most likely token",
        ),
    ],
)
def test_a_sampling_setting_that_cannot_be_is_refused_where_it_stands(
    tiny: Job, settings: dict[str, object], message: str
) -> None:
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    assert message in said(tiny, *words)
