"""Images of prompts on their way into a vision-language model.

::

    encoded images --ImageProcessor--> pixels --vision tower--> vectors --> in the places that the
                                                                            image tokens keep

An image that several prompts have goes through the vision tower once. Only tokens of prompts are
places: a model may draw an image token itself, which is then read as any other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlinf_async.backends.language import sees_images
from rlinf_async.data.images import GRID, ImageProcessor, has_processor
from rlinf_async.messages.language import Images, Tokens


def processor_in(folder: Path) -> ImageProcessor | None:
    """Return the processor in a model's folder; None: the model takes no images, or the folder does
    not say how they are prepared."""
    described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return ImageProcessor(folder) if sees_images(described) and has_processor(folder) else None


class ImageInputs(NamedTuple):
    """Images of prompts that go through a model together."""

    pixels: Mapping[str, Tensor]
    """what the vision tower reads, ``[parts, ...]`` of all images"""
    vectors: int
    """number of vectors that it has to make of them"""
    places: Tensor
    """``[M]``: positions of image tokens in the row of all prompts"""
    source: Tensor
    """``[M]``: the vector that is in each place"""


class SeeingPrompt(NamedTuple):
    """A prompt in a row of tokens."""

    start: int
    """position of its first token"""
    token_ids: Tokens
    """``[P]``"""
    images: Images


def image_inputs(
    prompts: Sequence[SeeingPrompt], processor: ImageProcessor | None, device: torch.device
) -> ImageInputs | None:
    """Return the images of prompts; None where there are none.

    Raises:
        ValueError: there are images, and no processor.
    """
    seeing = [one for one in prompts if one.images]
    if not seeing:
        return None
    if processor is None:
        raise ValueError("a prompt has images, but the model takes none")
    first: dict[Images, int] = {}
    places, source, vectors = [], [], 0
    for start, token_ids, images in seeing:
        own = np.flatnonzero(token_ids == processor.image_token_id)
        if images not in first:
            first[images] = vectors
            vectors += len(own)
        places.append(start + own)
        source.append(first[images] + np.arange(len(own)))
    found = [processor.pixels(image) for images in first for image in images]
    pixels = {name: np.concatenate([one[name] for one in found]) for name in found[0]}
    return ImageInputs(
        {name: torch.from_numpy(one).to(device) for name, one in pixels.items()},
        vectors,
        torch.from_numpy(np.concatenate(places)).to(device),
        torch.from_numpy(np.concatenate(source)).to(device),
    )


def prompt_positions(
    prompt: SeeingPrompt, processor: ImageProcessor | None
) -> NDArray[np.int64] | None:
    """Return the positions ``[3, P]`` of a prompt's tokens; None where a model has no others than
    their order."""
    if processor is None or not processor.has_grids:
        return None
    return processor.positions(prompt.token_ids, prompt.images)


def with_answer(positions: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Return the positions ``[3, length]`` of a prompt and its answer: the first of them."""
    prompt = positions.shape[1]
    after = positions.max() + 1 + np.arange(max(length - prompt, 0))
    whole: NDArray[np.int64] = np.concatenate([positions, np.tile(after, (3, 1))], 1)
    return whole[:, :length]


def vain_vectors(model: Any) -> Tensor:
    """Return the vectors of a white image, as small as one may be."""
    config = model.config.vision_config
    first = next(model.parameters())
    if hasattr(config, "spatial_merge_size"):
        side = config.spatial_merge_size
        size = config.in_channels * config.temporal_patch_size * config.patch_size**2
        grid = torch.tensor([[1, side, side]], device=first.device)
        pixels = {"pixel_values": torch.ones(side**2, size, device=first.device), GRID: grid}
    else:
        side = config.image_size
        pixels = {"pixel_values": torch.ones(1, 3, side, side, device=first.device)}
    return _vectors(model, pixels)


def image_vectors(model: Any, images: ImageInputs) -> Tensor:
    """Return the vectors ``[M, hidden]`` for the places of image tokens.

    Raises:
        ValueError: images have another number of vectors than tokens.
    """
    vectors = _vectors(model, images.pixels)
    if len(vectors) != images.vectors:
        raise ValueError(
            f"the vision tower makes {len(vectors)} vectors of images that have {images.vectors} "
            "tokens: the sizes in the processor's files are not those of config.json"
        )
    return vectors.index_select(0, images.source)


def _vectors(model: Any, pixels: Mapping[str, Tensor]) -> Tensor:
    """Return all vectors ``[vectors, hidden]`` that the vision tower makes."""
    if GRID in pixels:
        return torch.cat(model.get_image_features(**pixels).pooler_output)
    inputs = {name: one[None] for name, one in pixels.items()}
    vectors: Tensor = model.get_image_features(**inputs).pooler_output.flatten(0, -2)
    return vectors
