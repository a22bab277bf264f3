"""The weights of another run, or of an exported policy, with which a run begins: ``[model] path``.

::

    folder --source--> policy, actions, files --agree--> tensors that fit --actors--> version 0

It is no resume: optimizer, iteration and version begin at 0, of the other run only weights and
statistics are taken. What an actor takes is decided here, once, before anything starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

import msgspec

from rlinf_async.backends.base import FirstWeights
from rlinf_async.backends.policies.config import MLPS, PolicyConfig
from rlinf_async.config import ConfigError, Document, UsageError
from rlinf_async.observe.run_folder import MARKER
from rlinf_async.runtime.jobs.checkpoints import checkpoint_of, folder_of
from rlinf_async.runtime.jobs.config import differences
from rlinf_async.runtime.jobs.embodied.playing import PlayingJob
from rlinf_async.runtime.jobs.embodied.settings import EnvironmentSettings, ModelConfig
from rlinf_async.runtime.jobs.targets import BEST

if TYPE_CHECKING:
    from torch import nn

    from rlinf_async.backends.policies.left import Note

PATH: Final = ("model", "path")
SECTIONS: Final = ("model", "residual")
"""sections that name a folder with weights, where a job has them"""
POLICY: Final = ("actor", "fsdp", "policy")
SHOWN: Final = 4
"""tensors that a text names; the rest is counted"""
OF_LEROBOT: Final = (
    "name it in actor.fsdp.policy.vision_language.folder, and its family in "
    "actor.fsdp.policy.name (smolvla, pi0)"
)
SHAPING: Final = ("hidden_sizes", "channels", "memory_size", "vision_language")
"""settings of a policy that say which tensors it has, or what they mean"""
PARTLY: Final = "set model.partial = true to begin anew with what does not fit"


class Origin(NamedTuple):
    """What a run begins with."""

    folder: Path
    """checkpoint, or exported policy"""
    policy: PolicyConfig
    """fitted to the environment that it was trained in"""
    actions: str
    """``env.actions`` there"""
    config: EnvironmentSettings | None
    """configuration of the run; None: of an exported policy"""
    files: list[Path]
    checkpoint: str = ""
    """name of the checkpoint; empty: it is an exported policy"""


class Beginning(NamedTuple):
    """Weights with which a run begins."""

    origin: Origin
    first: FirstWeights
    said: str
    """what was taken and what begins anew, for the user"""
    section: str = "model"
    """the settings that name the folder"""


SettingsT = TypeVar("SettingsT", bound=EnvironmentSettings)


def begins_with(
    full: EnvironmentSettings,
    job: PlayingJob,
    make_model: Callable[[], nn.Module],
    *,
    prefix: str = "",
    starts: bool = False,
) -> Beginning | None:
    """What a run begins with; None: with new weights.

    Args:
        full: the run's configuration, fitted to its environment.
        job: its job: a run of another one is refused.
        make_model: makes the model that is trained.
        prefix: what the names of the policy's tensors have before them in the model.
        starts: the run starts now: nothing is read again that was just checked.

    Raises:
        ConfigError: there is nothing to begin with, or it does not fit, with the setting or tensor.
    """
    if not full.model.path:
        return None
    checked = [one for env, model, one in _checked if (env, model) == (full.env, full.model)]
    _checked.clear()
    if starts and checked:
        return checked[0]
    from rlinf_async.backends.checkpoint.folders import CheckpointError
    from rlinf_async.backends.fsdp.beginning import compare

    origin = _origin(full, job)
    _check_family(full, origin)
    other_actions = _check_actions(full, origin)
    module = make_model()
    policy: Any = getattr(module, "policy", module)
    anew = policy.action_parameter_names() if other_actions else set()
    try:
        found = compare(module, origin.folder, prefix=prefix, anew=anew)
    except CheckpointError as error:
        raise ConfigError(str(error), path=PATH) from error
    misfits = [*found.misfits, *found.unused]
    _check_tensors(full, origin, found.tensors, misfits)
    _check_used(full, origin, policy, found.tensors)
    first = FirstWeights(folder=str(origin.folder.resolve()), tensors=found.tensors)
    made = Beginning(origin, first, _said(origin, found.tensors, misfits))
    _checked.append((full.env, full.model, made))
    return made


_checked: list[tuple[object, ModelConfig, Beginning]] = []
"""what was checked last, for the run that follows"""


def pinned(config: SettingsT, out: Path | None, *, resume: bool) -> SettingsT:
    """The configuration of a resumed run, with the checkpoint that it has begun with: that is not
    the newest any more where the other run has gone on."""
    started = None if out is None else out / "config.toml"
    if not resume or started is None or not started.is_file():
        return config
    for section in SECTIONS:
        asked: Named | None = getattr(config, section, None)
        if asked is None or not asked.path:
            continue
        before = Document.read(started).tables.get(section, {}).get("checkpoint", "")
        named = asked.checkpoint
        full_name = folder_of(int(named)) if named.isdecimal() else named
        if named in ("", BEST) or full_name == before:
            config = _with_checkpoint(config, section, before)
    return config


def as_begun(config: SettingsT, beginning: Beginning | None) -> SettingsT:
    """The configuration as it is kept: with the name of the checkpoint that the run begins with,
    and the folder by a path that leads there from anywhere, since it is read again."""
    if beginning is None:
        return config
    section = beginning.section
    named: Any = getattr(config, section)
    checkpoint = named.checkpoint
    if Path(named.path).parent.name != "checkpoints":
        checkpoint = beginning.origin.checkpoint
    path = str(Path(named.path).expanduser().resolve())
    replace = msgspec.structs.replace
    return replace(config, **{section: replace(named, path=path, checkpoint=checkpoint)})


def _with_checkpoint(config: SettingsT, section: str, checkpoint: str) -> SettingsT:
    replace = msgspec.structs.replace
    named = replace(getattr(config, section), checkpoint=checkpoint)
    return replace(config, **{section: named})


def files_of(beginning: Beginning | None) -> dict[str, tuple[Path, list[Path]]]:
    """The files that a run reads for it, by setting: see `check_inputs`."""
    if beginning is None:
        return {}
    return {f"{beginning.section}.path": (beginning.origin.folder, beginning.origin.files)}


# ---- where it comes from


class Named(Protocol):
    """A section that names a folder with weights."""

    @property
    def path(self) -> str:
        """A run, a checkpoint of one, or an exported policy."""
        ...

    @property
    def checkpoint(self) -> str:
        """Checkpoint of the run; empty: the newest."""
        ...


class Source(NamedTuple):
    """A folder with weights, whose settings were read."""

    asked: Named
    section: str
    run: Path
    """the run, or the exported policy"""
    document: Document | None
    """configuration of the run; None: of an exported policy"""
    note: Note | None
    """what an exported policy says of itself; None: of a run"""

    @property
    def where(self) -> tuple[str, ...]:
        """The setting that names the folder."""
        return self.section, "path"

    @property
    def job(self) -> str:
        """Name of the run's job; empty: of an exported policy."""
        return "" if self.document is None else str(self.document.tables.get("job"))

    def origin(self, policy: PolicyConfig, actions: str, config: Any) -> Origin:
        """What its newest checkpoint, or the one asked for, holds.

        Raises:
            ConfigError: there is no such checkpoint.
        """
        from rlinf_async.backends.fsdp.beginning import weight_files

        if self.document is None:
            return Origin(self.run, policy, actions, None, weight_files(self.run))
        path = Path(self.asked.path).expanduser()
        single, named = path.parent.name == "checkpoints", self.asked.checkpoint
        if single and named:
            raise ConfigError(
                f"{named!r} was given, but {self.section}.path is a checkpoint already: leave it "
                "out",
                path=(self.section, "checkpoint"),
            )
        with _located((self.section, "checkpoint") if named else self.where):
            folder = checkpoint_of(
                self.run, path.name if single else named or None, to="begin with"
            )
        return Origin(folder, policy, actions, config, weight_files(folder), folder.name)

    def trained_by(
        self, job: PlayingJob | None
    ) -> tuple[PolicyConfig, str, EnvironmentSettings | None]:
        """Return the policy, fitted to the environment that it was trained in, ``env.actions``
        there, and the configuration of its run.

        Raises:
            ConfigError: the environment of the run cannot be had.
        """
        if self.note is not None:
            return self.note.policy, self.note.actions, None
        if self.document is None or job is None:
            raise TypeError("the configuration of a run, and its job, were expected")
        try:
            config: Any = self.document.to(job.config_type)
            full = job.trained(config).config
        except ConfigError as error:
            raise ConfigError(
                f"what {self.run} has trained cannot be told: {self.document.located(error)}. "
                f"Where its environment can be had, rlinf-async export {self.run} OUT writes a "
                "folder that says so",
                path=self.where,
            ) from error
        return full.acting_policy, full.env.actions, full


def source_of(asked: Named, section: str, *, use: str) -> Source:
    """Read what the folder says that a section names; ``use`` is what a graph is of no use for.

    Raises:
        ConfigError: it has no weights of a policy.
    """
    path = Path(asked.path).expanduser()
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    if not (run / MARKER).is_file():
        return Source(asked, section, path, None, _note(asked, path, section, use))
    with _located((section, "path")):
        return Source(asked, section, run, Document.read(str(run / "config.toml")), None)


def _origin(ours: EnvironmentSettings, job: PlayingJob) -> Origin:
    source = source_of(ours.model, "model", use="trained")
    if source.job not in ("", ours.job):
        raise ConfigError(
            f"{ours.model.path} is a run of {source.job!r}; its weights are of another family than "
            f"those of {ours.job!r}: begin with a run of that",
            path=PATH,
        )
    return source.origin(*source.trained_by(job))


def _note(asked: Named, path: Path, section: str, use: str) -> Note:
    from rlinf_async.backends.policies.left import NOTE, read_note

    where = (section, "path")
    if not (path / NOTE).is_file():
        what = "there is no such folder"
        if path.is_dir():
            what = "neither a run, nor a checkpoint of one, nor a policy that was exported"
            if (path / "policy_preprocessor.json").is_file():
                what = f"a policy of lerobot: {OF_LEROBOT}"
        elif path.exists():
            what = "a file, not a folder"
        raise ConfigError(f"{asked.path!r}: {what}", path=where)
    with _located(where):
        note = read_note(path)
    if note.form == "lerobot":
        raise ConfigError(f"{asked.path!r} is in lerobot's form: {OF_LEROBOT}", path=where)
    if note.form != "folder":
        raise ConfigError(
            f"{asked.path!r} holds a graph ({note.form}), which cannot be {use}: name its run, or "
            "export that with --to folder",
            path=where,
        )
    if asked.checkpoint:
        raise ConfigError(
            f"{asked.checkpoint!r} was given, but {asked.path} holds one policy: leave it out",
            path=(section, "checkpoint"),
        )
    return note


@contextmanager
def _located(path: tuple[str, ...]) -> Iterator[None]:
    """Raise the errors of a folder as those of a setting."""
    try:
        yield
    except UsageError as error:
        text = str(error)
        _, named, rest = text.partition(": ")
        given = text.startswith("--checkpoint ") and named
        raise ConfigError(rest if given else text, path=path) from error


# ---- whether it fits


def _family(name: str) -> str:
    return "mlp" if name in MLPS else name


def _check_family(full: EnvironmentSettings, origin: Origin) -> None:
    """Refuse a policy of another family, and settings by which its tensors mean something else."""
    ours, theirs = full.acting_policy, origin.policy
    if _family(ours.name) != _family(theirs.name):
        raise ConfigError(
            f"{full.model.path!r} holds a policy {theirs.name!r}, and this run trains "
            f"{ours.name!r}, which is of another family: begin with a run of that, or set "
            "actor.fsdp.policy.name",
            path=PATH,
        )
    if full.model.partial:
        return
    for path, there, here in differences(theirs, ours):
        if path.partition(".")[0] in SHAPING and path != "vision_language.folder":
            shown = list(there) if isinstance(there, tuple) else there
            raise ConfigError(
                f"{list(here) if isinstance(here, tuple) else here!r}, but the policy in "
                f"{full.model.path} has {shown!r}: take that",
                path=(*POLICY, *path.split(".")),
            )


def _check_actions(full: EnvironmentSettings, origin: Origin) -> bool:
    """Whether the policy's actions are others here; refused unless that is asked for."""
    ours, theirs = full.acting_policy, origin.policy
    if ours.acts != theirs.acts:
        if not full.model.partial:
            raise ConfigError(
                f"the policy in {full.model.path} answers with {theirs.acts}, and "
                f"{full.env.name} takes {ours.acts}: {PARTLY}",
                path=PATH,
            )
        return True
    if ours.acts.numbers and full.env.actions != origin.actions:
        if not full.model.partial:
            raise ConfigError(
                f"{full.env.actions!r}, but the policy in {full.model.path} was trained with "
                f"{origin.actions!r}, and its numbers mean that: take it, or {PARTLY}",
                path=("env", "actions"),
            )
        return True
    return False


def _check_tensors(
    full: EnvironmentSettings, origin: Origin, taken: dict[str, str], misfits: list[str]
) -> None:
    if not taken:
        raise ConfigError(
            f"nothing in {origin.folder} fits the policy of this run: {some_of(misfits)}", path=PATH
        )
    if misfits and not full.model.partial:
        raise ConfigError(f"{origin.folder} does not fit: {some_of(misfits)}: {PARTLY}", path=PATH)


def _check_used(
    full: EnvironmentSettings, origin: Origin, policy: Any, taken: dict[str, str]
) -> None:
    """Refuse settings that would have no effect, or change what the weights were trained with."""
    ours, theirs = full.acting_policy, origin.policy
    deviations = any(name.rpartition(".")[2] == "log_std" for name in taken)
    if deviations and ours.initial_log_std != theirs.initial_log_std:
        raise ConfigError(
            f"{ours.initial_log_std} would have no effect: the deviations are those of "
            f"{full.model.path}, which began with {theirs.initial_log_std}: leave it out",
            path=(*POLICY, "initial_log_std"),
        )
    statistics = next((one for one in taken if one.endswith("observation_normalizer.count")), None)
    if not (policy.normalizes and ours.observation_size and statistics):
        return
    normalized = _has_statistics(origin.folder, taken[statistics])
    wanted: bool = getattr(getattr(full, "actor", None), "normalize_observation", normalized)
    if wanted != normalized:
        how = "normalised observations" if normalized else "observations as they are"
        raise ConfigError(
            f"{str(wanted).lower()}, but the policy in {full.model.path} was trained on {how}: set "
            f"it to {str(normalized).lower()}",
            path=("actor", "normalize_observation"),
        )


def _has_statistics(folder: Path, count: str) -> bool:
    from rlinf_async.backends.fsdp.beginning import number_in

    return number_in(folder, count) > 0


def some_of(texts: list[str]) -> str:
    """The first few of some texts, as one; the rest is counted."""
    more = len(texts) - SHOWN
    return "; ".join(texts[:SHOWN]) + (f"; and {more} more" if more > 0 else "")


def _said(origin: Origin, taken: dict[str, str], misfits: list[str]) -> str:
    text = f"begins with {len(taken)} tensors of {origin.folder}"
    return f"{text}; anew: {some_of(misfits)}" if misfits else text
