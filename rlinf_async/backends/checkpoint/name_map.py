"""How tensor-parallel ranks cut a trainer's tensors: the name map of their decoder.

::

    config.json -> decoder -> its parameters, and those of their moments that are stored
    other tensors (a critic's value head) -> whole on every tensor rank

The map has a name for each expert; transformers 5 and checkpoints have them fused,
``[experts, ...]``. `Named.places` holds the place of each in the fused tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from rlinf_async.backends.checkpoint.errors import CheckpointError
from rlinf_async.backends.checkpoint.language_model import (
    CONFIG,
    KINDS,
    LANGUAGE,
    MOMENTS,
    OF_WEIGHTS,
    WEIGHTS,
    decoder_of,
    foreign,
    read_config,
)
from rlinf_async.backends.checkpoint.metadata import MODEL_FOLDER
from rlinf_async.backends.checkpoint.reading import Saved
from rlinf_async.backends.checkpoint.tensor_file import Box
from rlinf_async.parallel import GlobalTensor, Model, Parameter, Piece, Strategy, layout
from rlinf_async.parallel.decoders import ARCHITECTURES, Decoder, huggingface
from rlinf_async.parallel.errors import nearest_names

HEAD = "lm_head.weight"


class Place(NamedTuple):
    """Where a tensor of the map lies in the checkpoint: a box of a stored tensor."""

    tensor: str
    start: tuple[int, ...]

    def box(self, piece: Piece) -> Box:
        """Return a piece of the tensor as a box of the stored one."""
        missing = len(self.start) - len(piece.start)
        start = (0,) * missing + piece.start
        size = (1,) * missing + piece.size
        moved = tuple(a + b for a, b in zip(self.start, start, strict=True))
        return Box(self.tensor, moved, size, piece.offset)


class Named(NamedTuple):
    """A checkpoint's tensors as parameters that can be cut."""

    model: Model
    places: Mapping[str, Place] = {}
    """places of the tensors that are stored under another name"""
    aliases: Mapping[str, str] = {}
    """tied tensors that were stored twice: name -> the name that is kept"""

    def box(self, piece: Piece) -> Box:
        """Return a piece of a tensor as a box of a stored one."""
        place = self.places.get(piece.tensor)
        return Box(*piece) if place is None else place.box(piece)


def by_name_map(saved: Saved, files: Mapping[str, Path]) -> Named:
    """Return the parameters of a language model's trainer: a policy's or a critic's.

    Args:
        saved: the checkpoint.
        files: its configuration and tokenizer, by name.

    Raises:
        CheckpointError: there is no name map for it.
        ModelMismatch: its tensors do not match its configuration.
    """
    decoder, kind = _decoder(saved, files)
    base = huggingface(decoder)
    names = {name for name, one in saved.tensors.items() if one.shape}
    critic = bool(foreign(names))
    aliases = dict(_tied_copies(decoder, names))
    names -= aliases.keys()
    _check_shapes(saved, base, names, without={HEAD} if critic else set())
    parameters: list[Parameter] = []
    places: dict[str, Place] = {}
    for one in KINDS:
        held = {inner for name in names if (inner := one.inner(name)) is not None}
        mine = Model(tuple(part for part in base.parameters if part.name in held), base.layers)
        parameters += [_renamed(part, one.outer) for part in mine.parameters]
        places |= {
            one.outer(name): place._replace(tensor=one.outer(place.tensor))
            for name, place in _fused(mine).items()
        }
    parameters += [
        Parameter(name=name, tensors=(GlobalTensor(name, saved.tensors[name].shape),))
        for name in sorted(names)
        if critic and not name.startswith((WEIGHTS + LANGUAGE, MOMENTS + LANGUAGE))
    ]
    unknown = names - {one.name for one in parameters}
    if unknown:
        name = min(unknown)
        near = nearest_names(name, [one.name for one in parameters])
        raise CheckpointError(
            f"{saved.folder} holds {name!r}, which is not in the name map of {kind}{near}: use tp=1"
        )
    return Named(Model(tuple(parameters), base.layers), places, aliases)


def _decoder(saved: Saved, files: Mapping[str, Path]) -> tuple[Decoder, str]:
    if CONFIG not in files:
        raise CheckpointError(
            f"{saved.folder} does not say which language model it holds (no {MODEL_FOLDER}/"
            f"{CONFIG}), and only the name map of a decoder says how tensor-parallel ranks cut it: "
            "use tp=1"
        )
    config = read_config(files[CONFIG])
    kind = str(config.get("model_type"))
    decoder = decoder_of(config)
    if decoder is None:
        raise CheckpointError(
            f"there is no name map to cut model_type {kind!r} of {saved.folder} over "
            f"tensor-parallel ranks; there are for {', '.join(ARCHITECTURES)}: use tp=1"
        )
    return decoder, kind


def _tied_copies(decoder: Decoder, names: set[str]) -> Iterator[tuple[str, str]]:
    """Output layers that are tied to the embedding and were stored all the same."""
    if decoder.tied:
        for kind in KINDS:
            if kind.outer(HEAD) in names:
                yield kind.outer(HEAD), kind.outer("model.embed_tokens.weight")


def _check_shapes(saved: Saved, base: Model, names: set[str], without: set[str]) -> None:
    """Compare the weights with those of the decoder, experts fused."""
    stored = {one.name: one.shape for one in layout(base, Strategy()).of_rank(0)}
    expected = {name: shape for name, shape in stored.items() if name not in without}
    held = {inner for name in names if (inner := OF_WEIGHTS.inner(name)) is not None}
    Model.of(expected).check_shapes(
        {name: saved.tensors[OF_WEIGHTS.outer(name)].shape for name in held}
    )


def _fused(model: Model) -> dict[str, Place]:
    """The places of the tensors that share a parameter with others."""
    found: dict[str, Place] = {}
    for buffer in layout(model, Strategy()).of_rank(0):
        for piece in buffer.pieces:
            if piece.tensor != buffer.name:
                start = np.unravel_index(piece.offset, buffer.shape)
                found[piece.tensor] = Place(buffer.name, tuple(map(int, start)))
    return found


def _renamed(one: Parameter, outer: Callable[[str], str]) -> Parameter:
    tensors = tuple(msgspec.structs.replace(part, name=outer(part.name)) for part in one.tensors)
    return msgspec.structs.replace(one, name=outer(one.name), tensors=tensors, tied_to=None)
