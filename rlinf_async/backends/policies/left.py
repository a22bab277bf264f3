"""The note of a policy that has left the framework, ``policy.json``. Needs no torch.

::

    out/arm/
      policy.json          this note: spaces, action post-processing, the policy's settings
      policy.safetensors   "folder": weights and statistics
      policy.onnx          "onnx"
      policy.pt2           "pt2": a program of torch.export
      policy.pt            "torchscript"
      model/               "folder", of a vision-language model that was loaded: its own files
      config.json, ...     "lerobot": what lerobot reads; policy.safetensors has the rest
      README.md

A graph (all but ``folder`` and ``lerobot``) has the inputs and outputs that the note lists.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.config import UsageError
from rlinf_async.messages.described import Spaces

Form = Literal["folder", "torchscript", "pt2", "onnx", "lerobot"]
FILES: Final[dict[Form, str]] = {
    "folder": "policy.safetensors",
    "torchscript": "policy.pt",
    "pt2": "policy.pt2",
    "onnx": "policy.onnx",
    "lerobot": "policy.safetensors",
}
"""the file that each form has"""
WEIGHTS: Final = ("folder", "lerobot")
"""forms that are weights, and no graph"""
NOTE: Final = "policy.json"
MODEL: Final = "model"
FORMAT: Final = 1
NOISE: Final = "noise"
MEMORY: Final = "memory"
ACTION: Final = "action"
ANSWER: Final = "answer"


class PolicyFolderError(UsageError):
    """A folder holds no policy that can be loaded; the text says why, and what to do."""


class Port(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An input or output of a graph."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """without the first dimension, of any size: observations"""


class Note(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands in ``policy.json``."""

    format: int = FORMAT
    form: Form
    made_by: str
    """name and version of the package"""
    env: str
    """name of the environment"""
    version: int
    """version of the weights: iterations that trained them"""
    actions: Literal["clip", "rescale"]
    """what is done to continuous actions, as in ``env.actions``"""
    spaces: Spaces
    policy: PolicyConfig
    inputs: tuple[Port, ...] = ()
    outputs: tuple[Port, ...] = ()

    @property
    def memory_size(self) -> int:
        """Numbers that a recurrent policy remembers, as its graph says; 0: of others."""
        return next((one.shape[0] for one in self.inputs if one.name == MEMORY), 0)


def write_note(folder: Path, note: Note) -> None:
    """Write the note. Infinity, which JSON has no word for, is ``"inf"``."""
    text = json.dumps(_spelled(msgspec.to_builtins(note)), indent=1)
    (folder / NOTE).write_text(text + "\n", encoding="utf-8")


def read_note(folder: Path) -> Note:
    """Read the note of a folder.

    Raises:
        PolicyFolderError: there is none, or of another format; or a file is not there.
    """
    try:
        found: Any = json.loads((folder / NOTE).read_bytes())
    except FileNotFoundError:
        raise PolicyFolderError(_no_policy(folder)) from None
    except (OSError, ValueError) as error:
        raise PolicyFolderError(f"{folder / NOTE} cannot be read: {error}") from error
    wanted = found.get("format") if isinstance(found, dict) else None
    if wanted != FORMAT:
        raise PolicyFolderError(
            f"{folder / NOTE} has format {wanted}, this version of rlinf_async reads {FORMAT}: "
            "export the policy again, or take the version that wrote it"
        )
    try:
        note = msgspec.convert(found, Note, strict=False)
    except msgspec.ValidationError as error:
        raise PolicyFolderError(f"{folder / NOTE} is damaged: {error}") from error
    if not (folder / FILES[note.form]).is_file():
        raise PolicyFolderError(
            f"{folder} has no {FILES[note.form]}, which its {NOTE} names: copy the whole folder"
        )
    return note


def _no_policy(folder: Path) -> str:
    """Why there is no policy in a folder."""
    if not folder.is_dir():
        return f"{folder}: there is no such folder"
    if (folder / "run.json").is_file():
        return (
            f"{folder} is a run: write its policy by rlinf-async export {folder} OUT, and load OUT"
        )
    if (folder / "metadata.json").is_file():
        return f"{folder} is a checkpoint: write its policy by rlinf-async export {folder} OUT"
    if (folder / "config.json").is_file():
        return (
            f"{folder} holds a model of Hugging Face, not a policy: load it by transformers, or "
            "name the folder that rlinf-async export has written of a run in environments"
        )
    return f"{folder} holds no policy: it has no {NOTE}, which rlinf-async export writes"


def _spelled(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _spelled(one) for key, one in value.items()}
    return [_spelled(one) for one in value] if isinstance(value, (list, tuple)) else value
