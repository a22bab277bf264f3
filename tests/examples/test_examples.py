"""Every file in ``examples/`` runs as its first lines say."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from typing import Any, cast

import pytest

from benchmarks.harness.peers import PeerMissing, default_store
from rlinf_async.cli import main
from rlinf_async.config.registry import load_entry_point
from rlinf_async.observe.metrics import read_columns
from rlinf_async.observe.summary import (
    EmbodiedSummary,
    LanguageSummary,
    SupervisedSummary,
    read_summary,
)
from tests.episodes.endpoint.programs import PACKAGES
from tests.jobs.language.checkpoints import save_checkpoint

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


EXECUTE = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], 4)
nbclient.NotebookClient(notebook, timeout=None).execute()
nbformat.write(notebook, sys.argv[1])
"""


def run(*command: object, folder: pathlib.Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run ``python ...`` in the repository's root, or elsewhere, as a reader would."""
    words = [sys.executable, *(str(word) for word in command)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)


SUFFIXES = (".ipynb", ".py", ".toml")
ELSEWHERE = {
    "llm_judge.py": "examples/test_llm_judge.py",
    "mjx_reacher.py": "workers/env/test_mjx.py",
    "program_output.py": "rewards/test_isolation.py",
}
"""Examples that the tests of what they show run."""


def test_every_example_is_run_here_or_where_it_is_said() -> None:
    names = {path.name for path in EXAMPLES.iterdir() if path.suffix in SUFFIXES}
    source = pathlib.Path(__file__).read_text(encoding="utf-8")
    assert {name for name in names if f'"{name}"' not in source} == set()
    for example, test in ELSEWHERE.items():
        module = f"from examples.{example.removesuffix('.py')} import"
        assert module in (ROOT / "tests" / test).read_text(encoding="utf-8")


def test_the_custom_workers_find_every_prime() -> None:
    done = run(EXAMPLES / "custom_worker.py")
    assert (done.returncode, done.stderr) == (0, "")
    tested, primes = (
        ast.literal_eval(line.partition(": ")[2]) for line in done.stdout.splitlines()
    )
    assert sum(tested) == 1998
    assert sum(primes.values()) == 303


def test_a_run_from_python_learns_to_say_digits(tmp_path: pathlib.Path) -> None:
    script = shutil.copy(EXAMPLES / "train_from_python.py", tmp_path)
    done = run(script, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    *rows, answers, end = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in rows] == [f"iteration {n}" for n in (4, 9, 14, 19)]
    assert float(rows[-1].rpartition(" ")[2]) > 0.8
    assert answers.startswith("best answer at first: ")
    assert end.startswith(f"finished, everything is in {tmp_path}/runs/digits-")


def test_the_notebook_shows_a_bar_and_what_the_model_said(tmp_path: pathlib.Path) -> None:
    notebook = shutil.copy(EXAMPLES / "train_from_python.ipynb", tmp_path)
    done = run("-W", "ignore", "-c", EXECUTE, notebook, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    cells = json.loads(pathlib.Path(notebook).read_text(encoding="utf-8"))["cells"]
    outputs = [one for cell in cells for one in cell.get("outputs", ())]
    [bar] = [one for one in outputs if one["output_type"] == "display_data"]
    assert '<progress value="20" max="20"' in "".join(bar["data"]["text/html"])
    assert "| finished: " in "".join(bar["data"]["text/plain"])
    printed = "".join("".join(one["text"]) for one in outputs if one["output_type"] == "stream")
    assert "iteration 19: reward " in printed
    assert len(re.findall(r"^(?:0|19) <user>", printed, re.MULTILINE)) == 6


def test_the_custom_worker_brings_in_no_torch() -> None:
    script = "import runpy, sys; runpy.run_path(sys.argv[1]); print('torch' in sys.modules)"
    done = run("-c", script, EXAMPLES / "custom_worker.py")
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_the_deadlock_is_reported_with_who_waits_where_and_how_long() -> None:
    done = run(EXAMPLES / "deadlock.py")
    assert done.returncode == 1
    assert done.stderr.startswith("Deadlock: every worker waits for another")
    for name in ("Polite[0].converse", "Shy[0].converse", "'to polite'", "'to shy'", " s"):
        assert name in done.stderr
    assert "Traceback" not in done.stderr


def test_the_arm_in_real_time_moves_and_says_what_was_missed() -> None:
    done = run(EXAMPLES / "real_time_arm.py", "--seconds", 2)
    assert (done.returncode, done.stderr) == (0, "")
    away, counted = done.stdout.splitlines()
    assert int(away.split()[-2]) >= 100
    missed, *_, clipped = (int(word) for word in counted.split() if word.isdigit())
    assert missed >= 0 < clipped


def test_the_custom_environment_trains(tmp_path: pathlib.Path) -> None:
    done = run(EXAMPLES / "custom_env.py", "--steps", 3840, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    summary = read_summary(tmp_path / "run" / "summary.json", EmbodiedSummary)
    assert (summary.iterations, summary.env_steps) == (2, 3840)
    assert summary.success_rate is not None


@pytest.mark.parametrize("example", ["fetch_reach_ppo.toml", "fetch_reach_pipelined.toml"])
def test_the_robot_arm_trains_and_is_filmed(tmp_path: pathlib.Path, example: str) -> None:
    done = run(
        *("-m", "rlinf_async", "train", EXAMPLES / example),
        *("--out", tmp_path / "run", "--training.total_steps", 1600),
        *("--evaluation.episodes", 4, "--evaluation.video_episodes", 1),
    )
    assert (done.returncode, done.stderr) == (1, "")  # 1600 steps do not reach the target
    summary = read_summary(tmp_path / "run" / "summary.json", EmbodiedSummary)
    assert (summary.outcome, summary.iterations, summary.env_steps) == ("fell short", 2, 1600)
    assert summary.extra == {}
    assert (tmp_path / "run" / "video.mp4").stat().st_size > 1000


@pytest.mark.parametrize(
    ("example", "module"),
    [
        ("cartpole_ppo.toml", "gymnasium"),
        ("point_maze_ppo.toml", "gymnasium_robotics"),
        ("adroit_pen_ppo.toml", "gymnasium_robotics"),
        ("metaworld_reach_ppo.toml", "metaworld"),
        ("maniskill_push_ppo.toml", "mani_skill"),
        ("robosuite_lift_ppo.toml", "robosuite"),
        ("libero_vla_ppo.toml", "libero"),
        ("mjx_reacher.toml", "mujoco.mjx"),
    ],
)
def test_known_simulators_are_trained_in(
    tmp_path: pathlib.Path, example: str, module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: starting one takes longer than the training."""
    here = importlib.util.find_spec(module) is not None
    words = [
        *("train", EXAMPLES / example, "--cluster.backend", "local", "--out", tmp_path / "run"),
        *("--training.steps_per_iteration", 50, "--training.total_steps", 400, "--env.envs", 8),
        *("--actor.ppo.epochs", 1, "--evaluation.episodes", 1, "--evaluation.video_episodes", 0),
    ]
    code = main([str(word) for word in words])
    said = capsys.readouterr().err
    if not here:
        assert code == 2
        assert "pip install 'rlinf-async[" in said
        return
    assert (code, said) == (1, "")  # so few steps do not reach the target
    summary = read_summary(tmp_path / "run" / "summary.json", EmbodiedSummary)
    assert (summary.outcome, summary.iterations) == ("fell short", 1)
    assert 380 < summary.env_steps <= 400  # a step that begins an episode is no sample


def test_a_policy_is_trained_in_a_model_and_judged_in_reality(tmp_path: pathlib.Path) -> None:
    made = run(
        *("-m", "rlinf_async", "train", EXAMPLES / "world_reach.toml", "--out", tmp_path / "world"),
        *("--demonstrations.episodes", 30, "--data.held_out", 5, "--cluster.backend", "local"),
        *("--training.steps", 20, "--training.steps_per_iteration", 10),
    )
    assert (made.returncode, made.stderr) == (0, "")
    assert "model and reality after 1 step: state off by" in made.stdout
    done = run(
        *("-m", "rlinf_async", "train", EXAMPLES / "imagined_reach.toml"),
        *("--env.kwargs.model", tmp_path / "world" / "world_model.safetensors"),
        *("--out", tmp_path / "run", "--cluster.backend", "local"),
        *("--training.total_steps", 2048, "--evaluation.episodes", 4),
    )
    assert done.returncode in (0, 1), done.stderr  # the target is reached, or not
    summary = read_summary(tmp_path / "run" / "summary.json", EmbodiedSummary)
    assert (summary.env_steps, summary.evaluation_episodes) == (2048, 4)
    assert summary.return_in_training is not None


@pytest.mark.parametrize(
    ("policy", "memory_size", "least", "most"),
    [("gru", 32, 0.95, 1), ("mlp_categorical", 64, 0, 0.8)],
)
def test_a_cue_is_remembered_with_a_memory_and_not_without(
    tmp_path: pathlib.Path, policy: str, memory_size: int, least: float, most: float
) -> None:
    """In the environment of "remember_cue.py", with shorter episodes. A policy without a memory
    is refused with another size of it than the default."""
    done = run(
        *("-m", "rlinf_async", "train", EXAMPLES / "remember_cue.toml"),
        *("--out", tmp_path / "run", "--actor.fsdp.policy.name", policy),
        *("--actor.fsdp.policy.memory_size", memory_size),
        *("--env.kwargs.length", 4, "--training.steps_per_iteration", 16),
        *("--training.total_steps", 6400, "--actor.ppo.minibatch_size", 64),
        *("--actor.fsdp.optimizer.lr", 0.005, "--cluster.backend", "local"),
    )
    assert done.stderr == ""
    summary = read_summary(tmp_path / "run" / "summary.json", EmbodiedSummary)
    assert summary.success_rate is not None
    assert least <= summary.success_rate <= most


@pytest.mark.parametrize("example", ["sac_pendulum.toml", "sac_pixel_reach.toml"])
def test_replayed_transitions_are_learnt_from(tmp_path: pathlib.Path, example: str) -> None:
    done = run(
        *("-m", "rlinf_async", "train", EXAMPLES / example, "--out", tmp_path / "run"),
        *("--training.total_steps", 320, "--training.learning_starts", 240),
        *("--training.updates_per_step", 1, "--evaluation.episodes", 2),
    )
    assert (done.returncode, done.stderr) == (1, "")  # too few steps for the target
    summary = read_summary(tmp_path / "run" / "summary.json", EmbodiedSummary)
    assert (summary.outcome, summary.env_steps) == ("fell short", 320)
    assert summary.extra == {"gradient steps": 80}


def falls_short(
    words: list[Any], out: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> EmbodiedSummary:
    """What a run comes to whose steps are too few to reach its target."""
    code = main([str(word) for word in words])
    assert (code, capsys.readouterr().err) == (1, "")
    return read_summary(out / "summary.json", EmbodiedSummary)


def test_demonstrations_are_learnt_from_beside_own_experience(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which takes the script of "fetch_expert.py"."""
    words = [
        *("train", EXAMPLES / "rlpd_fetch_reach.toml", "--out", tmp_path / "run"),
        *("--demonstrations.policy", f"{EXAMPLES / 'fetch_expert.py'}:reach"),
        *("--demonstrations.episodes", 2, "--evaluation.episodes", 2),
        *("--training.total_steps", 200, "--training.learning_starts", 180),
        *("--cluster.backend", "local"),
    ]
    summary = falls_short(words, tmp_path / "run", capsys)
    assert (summary.outcome, summary.env_steps) == ("fell short", 200)
    assert summary.extra == {"gradient steps": 40}
    shares = read_columns(tmp_path / "run" / "metrics.csv")["demonstrations_share"]
    assert 0.5 in shares


def test_goals_are_exchanged_in_hindsight(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        *("train", EXAMPLES / "her_fetch_reach.toml", "--out", tmp_path / "run"),
        *("--training.total_steps", 200, "--training.learning_starts", 180),
        *("--evaluation.episodes", 2, "--cluster.backend", "local"),
    ]
    summary = falls_short(words, tmp_path / "run", capsys)
    assert (summary.outcome, summary.env_steps) == ("fell short", 200)
    assert summary.extra == {"gradient steps": 20}


def test_a_policy_learns_from_data_alone(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which takes the script of "fetch_expert.py"."""
    words = [
        *("train", EXAMPLES / "iql_fetch_reach.toml", "--out", tmp_path / "run"),
        *("--demonstrations.policy", f"{EXAMPLES / 'fetch_expert.py'}:undecided"),
        *("--demonstrations.episodes", 2, "--evaluation.episodes", 2, "--cluster.backend", "local"),
        *("--training.total_steps", 20, "--training.steps_per_iteration", 10),
    ]
    summary = falls_short(words, tmp_path / "run", capsys)
    assert (summary.outcome, summary.env_steps) == ("fell short", 0)
    assert summary.extra == {"gradient steps": 20}


def test_a_frozen_policy_is_corrected(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        *("train", EXAMPLES / "iql_fetch_reach.toml", "--out", tmp_path / "base"),
        *("--demonstrations.policy", f"{EXAMPLES / 'fetch_expert.py'}:aside"),
        *("--demonstrations.episodes", 2, "--evaluation.episodes", 1, "--cluster.backend", "local"),
        *("--training.total_steps", 20, "--training.steps_per_iteration", 10),
        *("--actor.offline.inverse_temperature", 0),
    ]
    falls_short(words, tmp_path / "base", capsys)
    words = [
        *("train", EXAMPLES / "residual_fetch_reach.toml", "--out", tmp_path / "run"),
        *("--residual.path", tmp_path / "base", "--cluster.backend", "local"),
        *("--training.total_steps", 200, "--training.learning_starts", 180),
        *("--evaluation.episodes", 1),
    ]
    summary = falls_short(words, tmp_path / "run", capsys)
    assert (summary.extra["gradient steps"], summary.success_rate_before) == (20, 0.0)


def test_a_person_who_steps_in_is_learnt_from(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which takes the person of "fetch_expert.py"."""
    words = [
        *("train", EXAMPLES / "hg_dagger_fetch_reach.toml", "--out", tmp_path / "run"),
        *("--intervention.person", f"{EXAMPLES / 'fetch_expert.py'}:steps_in"),
        *("--intervention.deadline", 60, "--evaluation.episodes", 2, "--training.total_steps", 200),
        *("--training.learning_starts", 180, "--cluster.backend", "local"),
    ]
    falls_short(words, tmp_path / "run", capsys)
    columns = read_columns(tmp_path / "run" / "metrics.csv")
    assert columns["intervention_share"][0] > 0.5
    assert 0.8984375 in columns["demonstrations_share"]


def test_a_block_is_pushed_by_a_person_who_steps_in(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which takes the environment and the person of "push_t.py"."""
    pytest.importorskip("gym_pusht")
    words = [
        *("train", EXAMPLES / "hg_dagger_push_t.toml", "--out", tmp_path / "run"),
        *("--env.entry_point", f"{EXAMPLES / 'push_t.py'}:make"),
        *("--intervention.person", f"{EXAMPLES / 'push_t.py'}:steps_in"),
        *("--intervention.deadline", 60, "--evaluation.episodes", 1, "--env.envs", 2),
        *("--training.total_steps", 400, "--training.learning_starts", 300),
        *("--cluster.backend", "local"),
    ]
    falls_short(words, tmp_path / "run", capsys)
    assert read_columns(tmp_path / "run" / "metrics.csv")["intervention_share"][0] > 0.5


def test_who_pushes_the_block_solves_it_alone() -> None:
    pytest.importorskip("gym_pusht")
    done = run(EXAMPLES / "push_t.py", "--episodes", 3)
    assert (done.returncode, done.stderr) == (0, "")
    assert "solved 1.00, 3 episodes" in done.stdout


@pytest.mark.parametrize("example", ["vla_reach.toml", "flow_reach.toml"])
def test_a_policy_is_cloned_and_trained(tmp_path: pathlib.Path, example: str) -> None:
    """Which takes the environment and the script of "reach_env.py"."""
    done = run(
        *("-m", "rlinf_async", "train", EXAMPLES / example),
        *("--out", tmp_path / "run", "--training.total_steps", 2048, "--env.envs", 32),
        *("--actor.cloning.steps", 5, "--demonstrations.episodes", 5),
        *("--evaluation.episodes", 4, "--evaluation.video_episodes", 1),
    )
    assert (done.returncode, done.stderr) == (1, "")  # 2048 steps do not reach the target
    summary = read_summary(tmp_path / "run" / "summary.json", EmbodiedSummary)
    assert (summary.outcome, summary.iterations, summary.env_steps) == ("fell short", 2, 2048)
    assert summary.success_rate_before is not None
    assert (tmp_path / "run" / "video.mp4").stat().st_size > 1000


def test_the_policy_that_sees_pixels_alone_trains(tmp_path: pathlib.Path) -> None:
    done = run(
        *("-m", "rlinf_async", "train", EXAMPLES / "pixel_reach.toml"),
        *("--out", tmp_path / "run", "--training.total_steps", 2048),
        *("--evaluation.episodes", 4, "--evaluation.video_episodes", 0, "--actor.ppo.epochs", 1),
    )
    assert (done.returncode, done.stderr) == (1, "")  # 2048 steps do not reach the target
    summary = read_summary(tmp_path / "run" / "summary.json", EmbodiedSummary)
    assert (summary.outcome, summary.iterations, summary.env_steps) == ("fell short", 1, 2048)


@pytest.mark.parametrize("example", ["simulated_long_reasoning.toml", "simulated_1024.toml"])
def test_a_cluster_is_simulated(example: str) -> None:
    done = run(
        *("-m", "rlinf_async", "simulate", EXAMPLES / example, "--devices", 16),
        *("--work.iterations", 1, "--hardware.actor_devices", 8),
    )
    assert (done.returncode, done.stderr.strip()) == (0, "")
    assert "tail" in done.stdout


def says_nothing_but_that_it_knows_nothing_yet(stderr: str) -> None:
    """A model that was hardly taught gets every task wrong, which is said once."""
    said = stderr.splitlines()
    assert len(said) <= 1, stderr
    assert all("there was nothing to learn from" in line for line in said), stderr


def test_answers_are_imitated_then_preferences_are_learnt(tmp_path: pathlib.Path) -> None:
    """The second example goes on from the model that the first one left."""
    settings: dict[str, tuple[object, ...]] = {
        "sft_arithmetic.toml": (
            *("--training.steps", 40, "--training.evaluate_every", 0),
            *("--actor.scheduler.total_steps", 40),
        ),
        "dpo_arithmetic.toml": (
            *("--training.steps", 5, "--training.evaluate_every", 0),
            *("--model.path", tmp_path / "sft_arithmetic.toml" / "trained"),
        ),
    }
    for example, shorter in settings.items():
        out = tmp_path / example
        done = run("-m", "rlinf_async", "train", EXAMPLES / example, *shorter, "--out", out)
        assert (done.returncode, done.stderr) == (0, "")
        summary = read_summary(out / "summary.json", SupervisedSummary)
        assert summary.evaluation_examples == 200
        assert summary.eval_loss is not None
        assert summary.eval_loss_before is not None
        assert summary.eval_loss < summary.eval_loss_before


def test_a_careless_model_learns_from_a_teacher(tmp_path: pathlib.Path) -> None:
    """Both are left by the example of sft."""
    shorter = (
        *("--training.evaluate_every", 0, "--actor.scheduler.total_steps", 20),
        *("--actor.scheduler.warmup_steps", 2),
    )
    for name, data in (("model", "careless"), ("teacher", "addition")):
        done = run(
            *("-m", "rlinf_async", "train", EXAMPLES / "sft_arithmetic.toml", *shorter),
            *("--training.steps", 20, "--out", tmp_path / name, "--data.held_out", 20),
            *("--data.path", EXAMPLES / "arithmetic" / f"{data}.jsonl"),
        )
        assert (done.returncode, done.stderr) == (0, "")
    done = run(
        *("-m", "rlinf_async", "train", EXAMPLES / "distill_arithmetic.toml"),
        *("--model.path", tmp_path / "model" / "trained", "--training.iterations", 3),
        *("--teacher.path", tmp_path / "teacher" / "trained", "--evaluation.samples", 20),
        *("--out", tmp_path / "run"),
    )
    assert done.returncode == 0, done.stderr
    summary = read_summary(tmp_path / "run" / "summary.json", LanguageSummary)
    assert (summary.iterations, summary.samples) == (3, 192)
    columns = read_columns(tmp_path / "run" / "metrics.csv")
    assert columns["teacher_divergence"][1] > 0.0


@pytest.mark.parametrize(
    "example",
    ["grpo_arithmetic.toml", "grpo_megatron.toml", "lora_arithmetic.toml", "ppo_arithmetic.toml"],
)
def test_the_language_model_is_warmed_up_and_trained(tmp_path: pathlib.Path, example: str) -> None:
    critic = ("--critic.warmup_iterations", 1) if example.startswith("ppo") else ()
    done = run(
        *("-m", "rlinf_async", "train", EXAMPLES / example, *critic),
        *("--out", tmp_path / "run", "--warm_start.steps", 20, "--training.iterations", 2),
        *("--evaluation.samples", 40),
    )
    assert done.returncode == 1  # two iterations do not reach the target
    says_nothing_but_that_it_knows_nothing_yet(done.stderr)
    assert "warm start of 20 steps" in done.stdout
    summary = read_summary(tmp_path / "run" / "summary.json", LanguageSummary)
    assert (summary.outcome, summary.iterations, summary.samples) == ("fell short", 2, 512)
    assert summary.eval_accuracy is not None
    assert summary.outcomes == {"scored": 512}


def test_a_model_that_sees_is_warmed_up_and_trained(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "examples"
    folder.mkdir()
    for name in ("vlm_counting.py", "vlm_counting.toml"):
        shutil.copy(EXAMPLES / name, folder)
    assert run(folder / "vlm_counting.py", folder=tmp_path).returncode == 0
    done = run(
        *("-m", "rlinf_async", "train", folder / "vlm_counting.toml"),
        *("--out", tmp_path / "run", "--warm_start.steps", 20, "--training.iterations", 2),
        *("--evaluation.samples", 40),
        folder=tmp_path,
    )
    assert done.returncode == 1  # two iterations do not reach the target
    # transformers says this of its own default Idefics3Config, with which it compares others.
    said = [line for line in done.stderr.splitlines() if "pad_token_id must be" not in line]
    says_nothing_but_that_it_knows_nothing_yet("\n".join(said))
    summary = read_summary(tmp_path / "run" / "summary.json", LanguageSummary)
    assert (summary.outcome, summary.iterations, summary.samples) == ("fell short", 2, 512)
    assert summary.outcomes == {"scored": 512}


def test_a_model_with_a_calculator_is_warmed_up_and_trained(tmp_path: pathlib.Path) -> None:
    done = run(
        *("-m", "rlinf_async", "train", EXAMPLES / "calculator_agent.toml"),
        *("--out", tmp_path / "run", "--warm_start.steps", 20, "--training.iterations", 2),
        *("--evaluation.samples", 40),
    )
    assert done.returncode == 1  # two iterations do not reach the target
    says_nothing_but_that_it_knows_nothing_yet(done.stderr)
    summary = read_summary(tmp_path / "run" / "summary.json", LanguageSummary)
    assert (summary.outcome, summary.iterations, summary.samples) == ("fell short", 2, 256)
    assert summary.outcomes == {"scored": 256}
    assert "episode_with_calculator" in (tmp_path / "run" / "metrics.csv").read_text()


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("3456*7891", "27271296"),
        ("12+3*4", "24"),
        ("2**99", "error: ValueError: 2 ** 99 is no arithmetic expression"),
        ("exit()", "error: ValueError: exit() is no arithmetic expression"),
        ("3456*", "error: SyntaxError: "),
    ],
)
async def test_the_calculator_evaluates_what_it_should_and_nothing_else(
    expression: str, told: str
) -> None:
    example = EXAMPLES / "calculator_agent.py"
    parse, calc = (load_entry_point(f"{example}:{name}") for name in ("parse", "calc"))
    [call] = parse(f"calc({expression})").tool_calls
    result = await cast(Any, calc).run(call)
    assert result.text.startswith(told)


def test_a_checkpoint_of_ones_own_is_trained(tmp_path: pathlib.Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "checkpoint", "qwen3", max_position_embeddings=2048)
    done = run(
        *("-m", "rlinf_async", "train", EXAMPLES / "grpo_hf_checkpoint.toml"),
        *("--model.path", checkpoint, "--out", tmp_path / "run", "--training.iterations", 2),
        *("--training.prompts", 4, "--training.group_size", 2, "--evaluation.samples", 4),
        *("--rollout.sampling.max_tokens", 8),
    )
    assert done.returncode == 0
    says_nothing_but_that_it_knows_nothing_yet(done.stderr)
    summary = read_summary(tmp_path / "run" / "summary.json", LanguageSummary)
    assert (summary.outcome, summary.iterations, summary.samples) == ("finished", 2, 16)
    assert (tmp_path / "run" / "trained" / "model.safetensors").is_file()


@pytest.mark.xdist_group("ray")
def test_the_training_group_of_ray_learns_to_answer_with_digits(tmp_path: pathlib.Path) -> None:
    done = run(EXAMPLES / "ray_train_group.py", "--out", tmp_path / "run", "--rollouts", 6)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    rewards = [float(line.split("reward ")[1].split(",")[0]) for line in lines[:-1]]
    assert len(rewards) == 6
    assert max(rewards) > 2 * rewards[0]
    assert lines[-1] == f"trained 6 rollouts; {tmp_path}/run/actor has the last"
    for role in ("actor", "critic"):
        assert (tmp_path / "run" / role / "iter_0000005").is_dir()


@pytest.mark.xdist_group("ray")
def test_the_training_group_of_ray_runs_over_megatron_with_two_tensor_ranks(
    tmp_path: pathlib.Path,
) -> None:
    pytest.importorskip("megatron.core")
    options = ("--train-backend", "megatron", "--ranks", 2, "--tp", 2, "--rollouts", 2)
    done = run(EXAMPLES / "ray_train_group.py", "--out", tmp_path / "run", *options)
    assert done.returncode == 0, done.stderr
    *rollouts, last = done.stdout.splitlines()
    assert [line.rpartition(" ")[2] for line in rollouts] == ["1", "2"]  # versions
    assert last == f"trained 2 rollouts; {tmp_path}/run/actor has the last"
    assert (tmp_path / "run" / "critic" / "iter_0000001").is_dir()


def test_an_agent_of_others_that_is_not_installed_is_named(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--episode.run", "command: .agents/bin/python examples/black_box_agent.py")
    words = ["check", EXAMPLES / "black_box_agent.toml", *options]
    assert main([str(word) for word in words]) == 2
    assert "there is no program '.agents/bin/python'" in capsys.readouterr().err


@pytest.mark.slow
def test_an_unchanged_agent_of_others_is_trained(tmp_path: pathlib.Path) -> None:
    try:
        python = default_store().python(PACKAGES["openai-agents"])
    except PeerMissing as missing:
        pytest.skip(str(missing))
    agent = EXAMPLES / "black_box_agent.py"
    done = run(
        *("-m", "rlinf_async", "train", EXAMPLES / "black_box_agent.toml"),
        *("--episode.run", f"command: {python} {agent}"),
        *("--out", tmp_path / "run", "--training.iterations", 2, "--warm_start.steps", 300),
    )
    assert done.returncode == 0, done.stderr
    summary = read_summary(tmp_path / "run" / "summary.json", LanguageSummary)
    assert (summary.outcome, summary.iterations) == ("finished", 2)
    assert summary.outcomes == {"scored": summary.samples}  # whether it learns is another matter


TASK = """
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 6}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
"""a task of lm-eval"""


@pytest.mark.slow
def test_a_task_of_lm_eval_has_the_score_of_the_models_own_answers(tmp_path: pathlib.Path) -> None:
    """Two of six references are what transformers generates greedily: the score is a third."""
    try:
        python = default_store().python(PACKAGES["lm-eval"])
    except PeerMissing as missing:
        pytest.skip(str(missing))
    model = save_checkpoint(tmp_path / "model", "qwen3")
    asked = [f"{number}+{number + 1}=" for number in range(6)]
    right = [answer if at % 3 == 0 else "no" for at, answer in enumerate(said(model, asked))]
    rows = [{"question": one, "answer": answer} for one, answer in zip(asked, right, strict=True)]
    data, tasks = tmp_path / "sums.jsonl", tmp_path / "tasks"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    tasks.mkdir()
    (tasks / "sums.yaml").write_text(TASK.format(data=data))
    named = tmp_path / "tasks.jsonl"
    named.write_text('{"prompt": "sums", "answer": ""}\n')
    program = EXAMPLES / "lm_eval_task.py"
    command = f"{python} {program} exact_match,none {tasks}"
    done = run(
        *("-m", "rlinf_async", "evaluate", model, "--data.path", named, "--data.verifier", "exact"),
        *("--episode.run", f"command: {command}", "--episode.max_turns", 100, "--json"),
        *("--episode.max_tokens", 64, "--temperature", 0, "--cluster.backend", "local"),
    )
    assert done.returncode == 0, done.stderr
    [found] = json.loads(done.stdout)["sets"].values()
    assert found["reward"] == {"value": pytest.approx(1 / 3), "low": None, "high": None}


def said(model: pathlib.Path, asked: list[str]) -> list[str]:
    """Six tokens of greedy answers, by transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    words: Any = AutoTokenizer.from_pretrained(model)
    policy: Any = AutoModelForCausalLM.from_pretrained(model)
    found = []
    for one in asked:
        chat = [{"role": "user", "content": one}]
        given = words.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
        given = getattr(given, "input_ids", given)
        tokens = policy.generate(given, max_new_tokens=6, do_sample=False)[0, given.shape[1] :]
        found.append(words.decode(tokens, skip_special_tokens=True).partition("\n")[0])
    return found
