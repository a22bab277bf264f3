"""Weights & Biases: each row as a step of one run, online or in files that are synced later."""

from __future__ import annotations

import netrc
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Final, Literal
from urllib.parse import urlsplit

import msgspec

from rlinf_async.config.registry import ConfigError, needed
from rlinf_async.observe.sinks.part import Outcome, Row, SinkPart, SinkRun

EXIT_CODES: Final[dict[Outcome, int]] = {"finished": 0, "failed": 1, "stopped": 255, "killed": 255}
OPEN_SECONDS: Final = 30
"""seconds that a server has to begin the run"""


class WandbConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of ``wandb``."""

    project: str = "rlinf-async"
    entity: str = ""
    """user or team that the run belongs to; empty: that of the key"""
    name: str = ""
    """name of the run; empty: that of its folder"""
    group: str = ""
    mode: Literal["online", "offline"] = "online"
    """``offline``: into ``sinks/wandb`` of the run folder, for ``wandb sync``"""
    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.project or set(self.project) & set("/\\#?%:"):
            raise ValueError(
                f"project is {self.project!r}; it must be a name without any of /\\#?%:"
            )
        for tag in self.tags:
            if not 1 <= len(tag) <= 64:
                raise ValueError(f"the tag {tag!r} has {len(tag)} characters; it must have 1 to 64")


class WandbSink(SinkPart):
    """See the module."""

    Config = WandbConfig
    library = extra = "wandb"
    factory = "rlinf_async.observe.sinks.wandb:WandbClient"
    environment: ClassVar[Mapping[str, str]] = {
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_SILENT": "true",
    }

    def check(self, settings: WandbConfig, where: tuple[str, ...]) -> None:
        """Refuse to send rows without a key: the library would ask for it, and nobody answers."""
        if settings.mode == "online" and not _has_key():
            raise ConfigError(
                "'online' needs a key, and there is none in WANDB_API_KEY, nor in ~/.netrc for "
                f"{_host()}: run `wandb login`, or set it to 'offline' and use `wandb sync` later",
                path=(*where, "mode"),
            )


class WandbClient:
    """A run of wandb; it keeps its id."""

    def __init__(self, settings: WandbConfig, run: SinkRun, kept: dict[str, str]) -> None:
        wandb = needed("wandb", extra="wandb", needed_for="the metrics sink 'wandb'")
        run_id = kept.get("id") or secrets.token_hex(8)
        self._run: Any = wandb.init(
            project=settings.project,
            entity=settings.entity or None,
            name=settings.name or run.name,
            group=settings.group or None,
            tags=list(settings.tags) or None,
            id=run_id,
            resume="allow",
            mode=settings.mode,
            dir=str(run.files),
            config=run.config,
            allow_val_change=True,
            settings=wandb.Settings(
                init_timeout=OPEN_SECONDS,
                console="off",
                disable_code=True,
                disable_git=True,
                x_disable_machine_info=True,
                x_disable_meta=True,
                x_disable_stats=True,
            ),
        )
        where = self._run.url or str(Path(self._run.dir).parent)
        self.kept = {"id": run_id, "where": where}

    def write(self, rows: Sequence[Row]) -> None:
        """Log rows under their own steps."""
        for row in rows:
            self._run.log({**row.metrics, "_timestamp": row.time}, step=row.step)

    def close(self, outcome: Outcome) -> None:
        """Finish the run; one that did not come to its end is a failed one there."""
        self._run.summary["outcome"] = outcome
        self._run.finish(exit_code=EXIT_CODES[outcome])


def _host() -> str:
    return urlsplit(os.environ.get("WANDB_BASE_URL", "")).hostname or "api.wandb.ai"


def _has_key() -> bool:
    """Whether the library would find a key, or a token, where it looks for one."""
    if any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")):
        return True
    named = os.environ.get("NETRC")
    for file in [named] if named else ["~/.netrc", "~/_netrc"]:
        with suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(os.path.expanduser(file)).authenticators(_host()):
                return True
    return False
