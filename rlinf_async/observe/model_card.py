"""The card of a trained model: ``README.md`` beside its weights, as Hugging Face's Hub shows it.

::

    config.toml, summary.json, metrics.csv, inputs.json  (of a run)  --`model_card`-->  README.md

It says what the model began with, what it was trained for and how, what it has reached, and by
which versions. Of files of the run's machine only the last part of the name is told.
"""

from __future__ import annotations

import csv
import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from rlinf_async.observe.files import RunFolderError, explaining

CARD: Final = "README.md"
SETTINGS: Final = {
    "advantage": "actor.advantage.name",
    "loss": "actor.loss.name",
    "recipe": "actor.recipe",
    "iterations": "training.iterations",
    "optimizer steps": "training.steps",
    "epochs": "training.epochs",
    "batch size": "training.batch_size",
    "prompts of an iteration": "training.prompts",
    "samples of a prompt": "training.group_size",
    "optimizer steps of an iteration": "actor.global_batches",
    "passes over the samples of an iteration": "actor.epochs",
    "most versions that a token is behind": "training.max_staleness",
    "learning rate": "actor.optimizer.lr",
    "KL to the first weights": "actor.loss.kl_coefficient",
    "precision of the arithmetic": "actor.precision",
    "most tokens of a response": "rollout.sampling.max_tokens",
    "temperature": "rollout.sampling.temperature",
    "top-k": "rollout.sampling.top_k",
    "top-p": "rollout.sampling.top_p",
    "min-p": "rollout.sampling.min_p",
    "stops": "rollout.sampling.stop",
    "data": "data.path",
    "verifier": "data.verifier",
    "episodes": "episode.run",
    "seed": "seed",
}
"""settings of a run that its card tells, where it has them"""
OFF: Final = {"top-k": 0, "top-p": 1.0, "min-p": 0.0, "KL to the first weights": 0.0}
"""values of these that say nothing"""
RESULTS: Final = {
    "accuracy": ("eval_accuracy_before", "eval_accuracy"),
    "mean reward": ("eval_reward_before", "eval_reward"),
    "loss": ("eval_loss_before", "eval_loss"),
    "accuracy of the implicit reward": ("", "eval_reward_accuracy"),
}
"""figures of a summary, before the training and after it, by what they are of held-out records"""
_HUB_NAME: Final = re.compile(r"[\w.-]+/[\w.-]+")
_CACHED: Final = re.compile(r"models--(?P<owner>[\w.-]+?)--(?P<name>[\w.-]+)")
"""folder of the Hub's cache that holds a model"""

USE: Final = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

place = "."  # this folder, or the name of the model on the Hub
tokenizer = AutoTokenizer.from_pretrained(place)
model = AutoModelForCausalLM.from_pretrained(place, dtype="auto")
{prompt}
answer = model.generate(**prompt, max_new_tokens={tokens})
print(tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
```
"""
CHAT: Final = """\
prompt = tokenizer.apply_chat_template(
    [{"role": "user", "content": "..."}],
    add_generation_prompt=True,
    return_tensors="pt",
    return_dict=True,
)"""
SEEING: Final = """\
```python
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

place = "."  # this folder, or the name of the model on the Hub
processor = AutoProcessor.from_pretrained(place)
model = AutoModelForImageTextToText.from_pretrained(place, dtype="auto")
content = [{"type": "image"}, {"type": "text", "text": "..."}]
text = processor.apply_chat_template(
    [{"role": "user", "content": content}], add_generation_prompt=True
)
prompt = processor(
    text=text, images=[Image.open("...")], add_special_tokens=False, return_tensors="pt"
)
answer = model.generate(**prompt, max_new_tokens={tokens})
print(processor.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
```
"""
PLAIN: Final = 'prompt = tokenizer("...", return_tensors="pt")'


class Result(NamedTuple):
    """A figure that the model has reached."""

    name: str
    before: float | None
    """before the training"""
    now: float


def model_card(run: Path, model: Path, *, version: int | None = None) -> str:
    """Return the card of a model that a run has trained.

    Args:
        run: the run's folder.
        model: folder of the model: its configuration and tokenizer.
        version: version of the weights; None: those of the run's end.

    Raises `RunFolderError` where the run's configuration cannot be read.
    """
    config = _config(run)
    summary = _json(run / "summary.json")
    whole = version is None or version == summary.get("iterations")
    results = list(_results(summary) if whole else _results_of_version(run, version))
    name, base = str(config.get("name", run.name)), _base(config)
    parts = [
        _front_matter(config, name, base, results, sees=_sees(model)),
        f"# {name}\n",
        _origin(config, base, version if not whole else None),
        _held_out(config, summary, results),
        "## Training\n",
        _table(("setting", "value"), _settings(config)),
        "## Use\n",
        _use(config, model),
        "## Versions\n",
        _table(("package", "version"), _versions(run)),
    ]
    return "\n".join(part for part in parts if part)


def write_card(run: Path, model: Path, *, version: int | None = None) -> None:
    """Write the card of a model beside it. Raises `RunFolderError`."""
    text = model_card(run, model, version=version)
    with explaining("write the model's card", model):
        (model / CARD).write_text(text, encoding="utf-8")


def _config(run: Path) -> dict[str, Any]:
    path = run / "config.toml"
    with explaining("read", path):
        content = path.read_text(encoding="utf-8")
    try:
        return tomllib.loads(content)
    except tomllib.TOMLDecodeError as error:
        raise RunFolderError(f"{path} is damaged: {error}") from error


def _json(path: Path) -> dict[str, Any]:
    """Content of a file of a run that may not be there, or be damaged: then a card tells less."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _setting(config: Mapping[str, Any], path: str) -> Any:
    found: Any = config
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _base(config: Mapping[str, Any]) -> str:
    """Name on the Hub of the model that it began with; empty where that is not known."""
    path = _setting(config, "model.path")
    if not isinstance(path, str) or not path:
        return ""
    cached = [_CACHED.fullmatch(part) for part in Path(path).parts]
    for one in cached:
        if one is not None:
            return f"{one['owner']}/{one['name']}"
    named = _json(Path(path).expanduser() / "config.json").get("_name_or_path", "")
    known = isinstance(named, str) and _HUB_NAME.fullmatch(named) and not Path(named).exists()
    return str(named) if known else ""


def _front_matter(
    config: Mapping[str, Any], name: str, base: str, results: list[Result], *, sees: bool
) -> str:
    """YAML, whose texts are written as JSON has them."""
    text, kind = json.dumps, "image-text-to-text" if sees else "text-generation"
    tags = ["rlinf-async", str(config.get("job", "")).replace("_", "-")]
    tags += [str(one) for one in [_setting(config, "actor.advantage.name")] if one]
    lines = ["---", "library_name: transformers", f"pipeline_tag: {kind}"]
    lines += [f"base_model: {text(base)}"] if base else []
    lines += ["tags:", *(f"- {text(one)}" for one in tags if one)]
    data = Path(str(_setting(config, "data.path") or "")).name
    if results and data:
        lines += ["model-index:", f"- name: {text(name)}", "  results:"]
        lines += ["  - task:", f"      type: {kind}"]
        lines += ["    dataset:", f"      name: {text(data)}", f"      type: {text(data)}"]
        lines += ["    metrics:"]
        for one in results:
            lines += [f"    - type: {text(one.name)}", f"      value: {one.now}"]
    return "\n".join([*lines, "---", ""])


def _origin(config: Mapping[str, Any], base: str, version: int | None) -> str:
    path = _setting(config, "model.path")
    kind = _setting(config, "model.config.model_type")
    began = f"`{base or Path(str(path)).name}`" if path else f"random weights of a `{kind}`"
    said = f"Trained from {began} by the job `{config.get('job')}` of rlinf-async."
    if version is not None:
        said += f" The weights are those of version {version}, from the middle of a run."
    return said + "\n"


def _results(summary: Mapping[str, Any]) -> Iterator[Result]:
    for name, (before, now) in RESULTS.items():
        value, first = _number(summary.get(now)), _number(summary.get(before))
        if value is not None:
            yield Result(name, first, value)


def _results_of_version(run: Path, version: int | None) -> Iterator[Result]:
    """Figures of the evaluation of a version, if there was one."""
    try:
        with (run / "metrics.csv").open(newline="", encoding="utf-8") as file:
            rows = [one for one in csv.DictReader(file) if _number(one.get("version")) == version]
    except OSError:
        return
    for name, (_, column) in RESULTS.items():
        found = [_number(one.get(column)) for one in rows]
        known = [one for one in found if one is not None]
        if known:
            yield Result(name, None, known[-1])


def _number(value: object) -> float | None:
    """A finite number, or the text of one; None for anything else."""
    if not isinstance(value, int | float | str) or value == "":
        return None
    try:
        found = float(value)
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def _held_out(config: Mapping[str, Any], summary: Mapping[str, Any], results: list[Result]) -> str:
    """What the model has reached."""
    if not results:
        return "It was not evaluated.\n"
    count = summary.get("evaluation_samples") or summary.get("evaluation_examples")
    data = Path(str(_setting(config, "data.path") or "its data")).name
    rows = [
        (one.name, "" if one.before is None else f"{one.before:.4g}", f"{one.now:.4g}")
        for one in results
    ]
    records = "held-out records" if count is None else f"{count} held-out records"
    return "\n".join(
        [
            "## Results\n",
            _table(("figure", "before", "after"), rows),
            f"On {records} of `{data}`, judged as in training: this says nothing of other tasks.\n",
        ]
    )


def _settings(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, path in SETTINGS.items():
        value = _setting(config, path)
        if value is None or value in ("", "none", []) or OFF.get(name) == value:
            continue
        if isinstance(value, str) and name in ("data", "verifier", "episodes"):
            value = Path(value).name  # of a path, which is nobody's business
        yield name, f"`{value}`".replace("|", "\\|")


def _use(config: Mapping[str, Any], model: Path) -> str:
    described = _json(model / "tokenizer_config.json")
    chat = (model / "chat_template.jinja").is_file() or bool(described.get("chat_template"))
    tokens = _setting(config, "rollout.sampling.max_tokens") or 128
    if _sees(model):
        return SEEING.replace("{tokens}", str(tokens))
    return USE.replace("{prompt}", CHAT if chat else PLAIN).replace("{tokens}", str(tokens))


def _sees(model: Path) -> bool:
    """Whether prompts of a model may have images."""
    return any(model.glob("*processor_config.json"))


def _versions(run: Path) -> Iterator[tuple[str, str]]:
    packages = _json(run / "inputs.json").get("packages", {})
    if isinstance(packages, Mapping):
        yield from ((name, str(version)) for name, version in sorted(packages.items()))


def _table(head: tuple[str, ...], rows: Any) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(one)} |" for one in lines) + "\n"
