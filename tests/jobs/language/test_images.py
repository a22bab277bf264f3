"""Language runs whose prompts have images, and what is refused of them."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import msgspec
import pytest

from tests.backends.seeing import TINY as FAMILIES
from tests.backends.seeing import picture, save_processor
from tests.jobs.language.kit import TINY, Job

SEEING = (
    TINY.replace('tokenizer = "arithmetic"', 'tokenizer = "{folder}/processor"')
    .replace('verifier = "numeric"', 'image_column = "images"\nverifier = "exact"')
    .replace("iterations = 4", "iterations = 2")
)
MODEL = re.compile(r"\[model\.config\].*?(?=\[data\])", re.DOTALL)
VARIED = "def score(answer):\n    return sum(map(ord, answer.text)) % 97 / 97\n"
WARM = ("--warm_start.steps", 2, "--warm_start.batch_size", 8)
INFERENCE = ("--cluster.inference_workers", 1, "--actor.loss.kl_coefficient", 0.01)


def described(config: dict[str, Any], at: str = "model.config") -> str:
    """The tables of a model's configuration."""
    parts = {name: one for name, one in config.items() if isinstance(one, dict)}
    own = "".join(
        f"{name} = {json.dumps(one)}\n" for name, one in config.items() if name not in parts
    )
    tables = (described(one, f"{at}.{name}") for name, one in parts.items())
    return f"[{at}]\n{own}\n" + "".join(tables)


class SeeingJob(Job):
    """A run over the same question about 24 images."""

    def __init__(
        self, folder: pathlib.Path, capture: pytest.CaptureFixture[str], family: str = "idefics3"
    ) -> None:
        save_processor(family, folder / "processor")
        config = MODEL.sub(lambda _: described(FAMILIES[family]), SEEING)
        super().__init__(folder, capture, config.replace("{folder}", str(folder)))
        records = []
        for at in range(24):
            (folder / f"{at}.png").write_bytes(picture(at, height=16 if at % 2 else 32))
            image, text = {"type": "image"}, {"type": "text", "text": "?"}
            seen = at % 4 if family != "idefics3" else 1  # of Qwen: none to three
            asked = [{"role": "user", "content": [*[image] * seen, text]}]
            images = [f"{one}.png" for one in range(at, at - seen, -1)]
            records.append({"prompt": asked, "images": images, "answer": str(at % 5)})
        write(folder / "sums.jsonl", records)

    def vary(self) -> None:
        """Reward answers differently, so that there is something to learn."""
        score = self.file.with_name("score.py")
        score.write_text(VARIED)
        self.file.write_text(self.file.read_text().replace('"exact"', f'"{score}:score"'))


def write(file: pathlib.Path, records: list[dict[str, Any]]) -> None:
    file.write_text("".join(f"{json.dumps(one)}\n" for one in records))


@pytest.fixture
def seeing(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> SeeingJob:
    return SeeingJob(tmp_path, capsys)


def test_a_run_learns_from_images_goes_on_and_is_evaluated_again(seeing: SeeingJob) -> None:
    """With a warm start, log-probs of an inference worker, a recording, and a resume."""
    seeing.vary()
    options = (*WARM, *INFERENCE, "--record", "scored,groups")
    seeing.succeed(*options, "--training.iterations", 2)
    assert all(float(row["engine_actor_difference"]) < 1e-5 for row in seeing.iterations)
    summary = seeing.succeed(*options, "--training.iterations", 3, "--resume")
    assert [float(row["engine_actor_difference"]) < 1e-5 for row in seeing.iterations] == [True] * 3
    assert all(float(row["grad_norm"]) > 0.0 for row in seeing.iterations)
    ended = seeing.command("evaluate", seeing.out, "--checkpoint", "trained", "--json")
    assert ended.code == 0, ended.err
    found = msgspec.json.decode(ended.out)["sets"]["held_out"]
    assert found["accuracy"] == msgspec.to_builtins(summary.evaluations["held_out"].accuracy)
    other = seeing.file.parent / "other.jsonl"  # of other data the run's column is read, too
    write(other, [{"prompt": "?", "images": ["gone.png"], "answer": "1"}])
    ended = seeing.command("evaluate", seeing.out, "--data.path", other)
    assert ended.code == 2, ended.out
    assert "gone.png" in ended.err
    trained = seeing.out / "trained"
    assert (trained / "processor_config.json").is_file()

    from transformers import AutoModelForImageTextToText, AutoProcessor

    loaded: Any = AutoProcessor
    assert loaded.from_pretrained(trained).image_token == "<image>"
    model: Any = AutoModelForImageTextToText.from_pretrained(trained)
    assert model.config.image_token_id == 103
    assert "AutoModelForImageTextToText" in (trained / "README.md").read_text()


def test_a_model_with_positions_in_grids_learns_goes_on_and_is_loaded_again(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two mini-batches, two epochs, a resume; then a run that begins in the exported folder."""
    job = SeeingJob(tmp_path, capsys, "qwen2_5_vl")
    job.vary()
    options = (*INFERENCE, "--actor.global_batches", 2, "--actor.epochs", 2)
    job.succeed(*options, "--training.iterations", 1)
    job.succeed(*options, "--training.iterations", 2, "--resume")
    assert [float(row["engine_actor_difference"]) < 1e-5 for row in job.iterations] == [True] * 2
    assert all(float(row["grad_norm"]) > 0.0 for row in job.iterations)
    trained = job.out / "trained"
    assert (trained / "preprocessor_config.json").is_file()

    from transformers import AutoModelForImageTextToText

    factory: Any = AutoModelForImageTextToText
    _, report = factory.from_pretrained(trained, output_loading_info=True)
    assert not any(report.values())
    model = f'[model]\npath = "{trained}"\n\n'
    text = re.sub(r"\[model\].*?(?=\[data\])", model, job.file.read_text(), flags=re.DOTALL)
    job.file.write_text(text)
    job.out = tmp_path / "again"
    job.succeed(*INFERENCE, "--training.iterations", 1)
    assert float(job.iterations[0]["engine_actor_difference"]) < 1e-5


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--actor.backend", "megatron"), "'megatron' does not train models that see images"),
        (("--rollout.backend", "toy", "--actor.backend", "toy"), "data.image_column: prompts have"),
        (("--actor.lora.rank", 4), "actor.lora.rank: this was not made for models that see"),
        (("--scheduler.policy", "tail"), "scheduler.policy"),
        (("--data.image_column", "pictures"), "sums.jsonl:1: column 'pictures' is missing"),
        (("--data.image_column", ""), "a list of texts and images needs an image_column"),
        (("--data.max_prompt_tokens", 8), "24 prompts are longer than max_prompt_tokens = 8"),
        (("--model.tokenizer", "arithmetic"), "does not say how images are prepared"),
        (
            ("--model.config.scale_factor", 4),
            "the vision tower makes 1 vectors of images that have",
        ),
        (("--model.config.model_type", "qwen3_vl"), "a model of the family 'qwen3_vl' takes none"),
    ],
)
def test_what_was_not_made_for_images_is_refused(
    arguments: tuple[object, ...], message: str, seeing: SeeingJob
) -> None:
    ended = seeing.train(*arguments)
    assert ended.code == 2, ended.err
    assert message in ended.err
    assert not seeing.out.exists()


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_vllm_is_refused_where_its_model_needs_torchvision(
    family: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = SeeingJob(tmp_path, capsys, family)
    ended = job.train("--rollout.backend", "vllm")
    assert ended.code == 2
    assert "model.config.model_type: models of the family" in ended.err
    assert "torchvision" in ended.err
    assert "set rollout.backend to 'transformers'" in ended.err
    assert not job.out.exists()


@pytest.mark.usefixtures("no_cluster")
def test_a_model_of_text_takes_no_images(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(tmp_path, capsys, TINY)
    ended = job.train("--data.image_column", "images")
    assert ended.code == 2
    assert "a model of the family 'qwen3' takes none: leave it out, or give a" in ended.err
    assert not job.out.exists()


@pytest.mark.usefixtures("no_cluster")
def test_an_image_that_cannot_be_read_is_named_with_its_line(seeing: SeeingJob) -> None:
    folder = seeing.file.parent
    (folder / "7.png").write_bytes(picture(7)[:60])
    ended = seeing.train()
    assert ended.code == 2
    assert f"sums.jsonl:8: image 1 ({folder}/7.png) cannot be read as an image" in ended.err
    (folder / "7.png").unlink()
    assert "sums.jsonl:8: image 1" in seeing.train().err
