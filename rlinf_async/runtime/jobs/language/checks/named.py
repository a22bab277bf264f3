"""What several checks share: the names of settings, and what a folder says of its model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rlinf_async.backends.language import (
    UnsupportedModel,
    sees_images,
)
from rlinf_async.config import ConfigError
from rlinf_async.data import (
    DataConfig,
)
from rlinf_async.messages.language import Sampling
from rlinf_async.runtime.jobs.language.config import LanguageConfig

Setting = tuple[str, ...]
"""path of a setting or a section"""


SETS = ("evaluation", "sets")


OF_TRAINING = ("rollout", "sampling", "max_tokens")


def check_reads_text(model: dict[str, Any], where: Setting, role: str) -> None:
    """Refuse a model that sees images in a role that was not made for one."""
    if sees_images(model):
        raise ConfigError(
            f"it holds a {model['model_type']} model, which sees images: a {role} in a folder of "
            "its own has to be a model of text",
            path=where,
        )


@contextlib.contextmanager
def at_setting(where: tuple[str, ...]) -> Iterator[None]:
    """Say by which setting a model came that is refused."""
    try:
        yield
    except UnsupportedModel as error:
        raise ConfigError(str(error), path=where) from error


def config_of(folder: str) -> dict[str, Any]:
    """A folder's ``config.json``; empty where it cannot be read, which is reported by whoever needs
    the whole folder."""
    try:
        content = (Path(folder).expanduser() / "config.json").read_bytes()
        return msgspec.json.decode(content, type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return {}


def samplings(config: LanguageConfig) -> dict[tuple[str, ...], Sampling]:
    """How samples of training and of evaluations are drawn, by their settings."""
    found: dict[tuple[str, ...], Sampling] = {("rollout", "sampling"): config.rollout.sampling}
    for name, one in config.evaluation.sets.items():
        found[(*SETS, name)] = one.sampling(config.rollout.sampling)
    return found


def data_sections(config: LanguageConfig) -> list[tuple[DataConfig, Setting]]:
    """The data whose answers are scored, each with its section."""
    sets = config.evaluation.sets.items()
    return [(config.data, ("data",)), *((one.data, (*SETS, name, "data")) for name, one in sets)]


def text_of(model: Path) -> dict[str, Any]:
    """The Hugging Face configuration of the text model."""
    described: dict[str, Any] = msgspec.json.decode((model / "config.json").read_bytes())
    text: dict[str, Any] = described.get("text_config") or described
    return text
