"""A trained policy leaves the framework: its weights, or one graph with everything in it.

::

    inputs                       graph                                           outputs
    state [N, D]   --normalise-->
    images, uint8  ------------->  features --> draw --> answer --bounds--> action   [N, columns]
    memory [N, H]  ------------->                          |                answer   before bounds
    noise [N, O]   ---------------------------^            +------------->  memory   [N, H]

``noise`` of zeros gives the most likely action; of standard normal numbers (of choices: standard
Gumbel ones) a sample. Of a flow policy it is the noise where integration begins. ``action`` is in
the environment's units; one choice alone is ``[N]``.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn

from rlinf_async.backends.policies.base import Drawing, Policy
from rlinf_async.backends.policies.left import (
    ACTION,
    ANSWER,
    FILES,
    MEMORY,
    MODEL,
    NOISE,
    Note,
    Port,
    write_note,
)
from rlinf_async.config import UsageError, needed
from rlinf_async.messages.converting import middle_and_half
from rlinf_async.messages.described import (
    BoxSpace,
    DiscreteSpace,
    MultiDiscreteSpace,
    Space,
    leaves,
)
from rlinf_async.messages.spaces import STATE

TRACED = 2
"""observations of the example by which a graph is traced; it then takes any number"""


@runtime_checkable
class OfLerobot(Protocol):
    """A policy that LeRobot defines, too."""

    def write_lerobot(self, folder: Path) -> dict[str, Tensor]:
        """Write the folder that LeRobot loads; return the tensors that have no place in it."""
        ...


def write_policy(policy: Policy[Any], note: Note, folder: Path) -> Note:
    """Write a policy into an empty folder, in the form that the note names; return the note.

    Raises:
        UsageError: the policy cannot have this form.
        MissingExtra: a package that writes it is not installed.
    """
    if note.form == "folder":
        note = _write_weights(policy, note, folder)
    elif note.form == "lerobot":
        note = _write_lerobot(policy, note, folder)
    else:
        graph, inputs = _graph(policy, note)
        note = msgspec.structs.replace(note, inputs=graph.inputs, outputs=graph.outputs)
        with torch.no_grad(), _quiet():
            _WRITERS[note.form](graph, inputs, _file(note, folder))
    write_note(folder, note)
    return note


def _write_weights(policy: Policy[Any], note: Note, folder: Path) -> Note:
    tensors = {name: one.detach().cpu().clone() for name, one in policy.state_dict().items()}
    save_file(tensors, folder / FILES["folder"])
    model = note.policy.vision_language.folder
    if not model:
        return note
    shutil.copytree(model, folder / MODEL, ignore=shutil.ignore_patterns(".*"))
    own = msgspec.structs.replace(note.policy.vision_language, folder=MODEL)
    return msgspec.structs.replace(
        note, policy=msgspec.structs.replace(note.policy, vision_language=own)
    )


def _write_lerobot(policy: Policy[Any], note: Note, folder: Path) -> Note:
    if not isinstance(policy, OfLerobot):
        raise UsageError(
            f"--to lerobot: lerobot loads only the policies that it defines itself, of which "
            f"{note.policy.name!r} is none: take --to folder, onnx, pt2 or torchscript, and call "
            "Policy.load in its control loop"
        )
    rest = policy.write_lerobot(folder)
    save_file({name: one.detach().cpu().clone() for name, one in rest.items()}, _file(note, folder))
    loaded = type(note.policy.vision_language)(folder=".")  # adapters are merged
    return msgspec.structs.replace(
        note, policy=msgspec.structs.replace(note.policy, vision_language=loaded)
    )


def _file(note: Note, folder: Path) -> Path:
    return folder / FILES[note.form]


def _graph(policy: Policy[Any], note: Note) -> tuple[ActingGraph, tuple[Tensor, ...]]:
    drawing = isinstance(policy, Drawing)
    problem = policy.graph_misfit() if drawing else "it has no methods features() and draw()"
    if problem or not isinstance(policy, Drawing):
        raise UsageError(
            f"policy {note.policy.name!r} cannot be one graph, as --to {note.form} writes it: "
            f"{problem}. Take --to folder"
        )
    for part in note.policy.sees.parts:
        if part.name in (NOISE, MEMORY):
            raise UsageError(
                f"{note.env} shows a part {part.name!r}, which is an input of a graph already, as "
                f"--to {note.form} writes it: take --to folder, or let the environment call it "
                "otherwise"
            )
    graph = ActingGraph(policy, policy, note).eval()
    inputs = tuple(
        torch.zeros(TRACED, *one.shape, dtype=getattr(torch, one.dtype)) for one in graph.inputs
    )
    return graph, inputs


class ActingGraph(nn.Module):
    """Observations and noise -> actions. ``drawing`` is the same as ``policy``."""

    def __init__(self, policy: Policy[Any], drawing: Drawing, note: Note) -> None:
        super().__init__()
        self._policy, self._drawing = policy, drawing
        config, acts = note.policy, note.policy.acts
        self._recurrent, self._flat = policy.recurrent, config.sees.flat
        normalizer = policy.observation_normalizer
        self._clip = normalizer.clip if policy.normalizes else None
        self.register_buffer("_mean", normalizer.mean.to(torch.float32))
        self.register_buffer("_scale", normalizer.scale())
        self._choices_only = not acts.numbers
        bounds = _bounds_of(note.spaces.action, rescaled=note.actions == "rescale")
        self._rescaled = note.actions == "rescale"
        for name, values in bounds.items():
            self.register_buffer(f"_{name}", torch.from_numpy(values))
        seen = [Port(one.name, np.dtype(one.dtype).name, one.shape) for one in config.sees.parts]
        memory = [Port(MEMORY, "float32", (config.memory_size,))] if self._recurrent else []
        noise = Port(NOISE, "float32", (acts.outputs,))
        dtype = "int64" if self._choices_only else "float32"
        actions = [Port(name, dtype, acts.shape) for name in (ACTION, ANSWER)]
        self.inputs, self.outputs = (*seen, *memory, noise), (*actions, *memory)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return what ``outputs`` lists, of what ``inputs`` lists."""
        fields = {one.name: given for one, given in zip(self.inputs, inputs, strict=True)}
        noise = fields.pop(NOISE)
        if STATE in fields and self._clip is not None:
            state = (fields[STATE] - self._buffer("mean")) * self._buffer("scale")
            fields[STATE] = state.clamp(-self._clip, self._clip)
        features = self._drawing.features(
            fields[STATE] if self._flat and not self._recurrent else fields
        )
        answer = self._drawing.draw(features, noise)
        outputs = (self._bounded(answer), answer)
        return (*outputs, features) if self._recurrent else outputs

    def _bounded(self, answer: Tensor) -> Tensor:
        """The actions in the environment's units."""
        first = self._buffer("first")
        if self._choices_only:
            return answer + (first.long()[0] if answer.ndim == 1 else first.long())
        choice = self._buffer("choice")
        action = torch.where(choice, answer + first, answer)
        if self._rescaled:
            stretched = self._buffer("middle") + answer.clamp(-1.0, 1.0) * self._buffer("half")
            action = torch.where(choice, action, stretched)
        action = torch.where(self._buffer("whole"), action.round(), action)
        return torch.minimum(torch.maximum(action, self._buffer("low")), self._buffer("high"))

    def _buffer(self, name: str) -> Tensor:
        return self.get_buffer(f"_{name}")


def _bounds_of(space: Space, *, rescaled: bool) -> dict[str, NDArray[Any]]:
    """Return what is done to each column of an answer, ``[columns]`` each: ``choice``, ``whole``
    (numbers of integers), ``first`` (of choices), ``low``, ``high``, ``middle`` and ``half``."""
    parts = [_bounds_of_leaf(leaf, rescaled=rescaled) for leaf in leaves(space)]
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    with np.errstate(over="ignore"):  # what is no float32 is no bound of one
        return {
            name: values if values.dtype == np.bool_ else values.astype(np.float32)
            for name, values in joined.items()
        }


def _bounds_of_leaf(space: Space, *, rescaled: bool) -> dict[str, NDArray[Any]]:
    if isinstance(space, BoxSpace):
        low, high = space.ends
        middle, half = middle_and_half(space) if rescaled else (low, low)
        whole = np.full(space.size, low.dtype.kind != "f")
        choice, first = np.zeros(space.size, np.bool_), np.zeros(space.size)
    else:
        first, counts = _first_and_counts(space)
        low, high = first, first + counts - 1
        middle, half = first, first
        whole = choice = np.ones(len(first), np.bool_)
    return {
        **{"choice": choice, "whole": whole, "first": first},
        **{"low": low, "high": high, "middle": middle, "half": half},
    }


def _first_and_counts(space: Space) -> tuple[NDArray[Any], NDArray[Any]]:
    if isinstance(space, DiscreteSpace):
        return np.array([space.start]), np.array([space.n])
    if isinstance(space, MultiDiscreteSpace):
        return np.array(space.starts), np.array(space.counts)
    size = int(np.prod(getattr(space, "shape", ())))
    return np.zeros(size, np.int64), np.full(size, 2)


def _write_torchscript(graph: ActingGraph, inputs: tuple[Tensor, ...], file: Path) -> None:
    trace: Any = torch.jit.trace
    trace(graph, inputs, check_trace=False).save(str(file))


def _write_pt2(graph: ActingGraph, inputs: tuple[Tensor, ...], file: Path) -> None:
    torch.export.save(_program(graph, inputs), file)


def _write_onnx(graph: ActingGraph, inputs: tuple[Tensor, ...], file: Path) -> None:
    for module in ("onnx", "onnxscript"):
        needed(module, extra="deploy", needed_for="--to onnx")
    torch.onnx.export(
        _program(graph, inputs),
        (),
        str(file),
        input_names=[one.name for one in graph.inputs],
        output_names=[_after(one.name) for one in graph.outputs],
        external_data=False,
        verbose=False,
    )


def _after(name: str) -> str:
    """The name of an output: in a graph it is another one than that of an input."""
    return f"{name}_after" if name == MEMORY else name


def _program(graph: ActingGraph, inputs: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    batch = {0: torch.export.Dim("batch")}
    return torch.export.export(graph, inputs, dynamic_shapes=(tuple(batch for _ in inputs),))


_WRITERS = {"torchscript": _write_torchscript, "pt2": _write_pt2, "onnx": _write_onnx}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch and onnx say of themselves while they write a graph."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
