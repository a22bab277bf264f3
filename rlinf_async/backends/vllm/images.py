"""Prompts with images, as vLLM's engine takes them once they are prepared.

::

    token ids, encoded images --ImageProcessor--> pixels, places --engine_input--> vLLM

vLLM's own preparation would expand the placeholders of a text itself, and so make other tokens of
those that are expanded: it is passed over, and the vision tower reads the trainer's pixels.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch
import xxhash

from rlinf_async.data.images import ImageProcessor
from rlinf_async.messages.language import Prompt


def engine_input(prompt: Prompt, token_ids: list[int], processor: ImageProcessor | None) -> Any:
    """Return what vLLM's ``generate`` takes.

    Args:
        prompt: tokens and images.
        token_ids: tokens of the prompt, and of what was answered so far.
        processor: of a model that sees images; None: it does not.

    Raises:
        ValueError: there are images, and no processor; or they have another number of tokens than
            the prompt keeps for them.
    """
    if not prompt.images:
        return {"prompt_token_ids": token_ids}
    if processor is None:
        raise ValueError("a prompt has images, but the model takes none")
    inputs: Any = importlib.import_module("vllm.multimodal.inputs")
    given: Any = importlib.import_module("vllm.inputs.engine")
    pixels = [processor.pixels(one) for one in prompt.images]
    parts = np.array([len(one["pixel_values"]) for one in pixels])
    places = np.flatnonzero(prompt.token_ids == processor.image_token_id)
    each, rest = divmod(len(places), int(parts.sum()))
    if rest:
        raise ValueError(
            f"prompt {prompt.index} has {len(places)} tokens of images that have {parts.sum()} "
            "parts: was it made with the processor of another model?"
        )
    sizes = torch.from_numpy(parts)
    field = inputs.MultiModalFieldConfig
    fields = {name: field.flat_from_sizes("image", sizes) for name in pixels[0]}
    data = {
        name: torch.from_numpy(np.concatenate([one[name] for one in pixels])) for name in pixels[0]
    }
    items = inputs.MultiModalKwargsItems.from_hf_inputs(
        data | {"num_patches": sizes},
        fields | {"num_patches": field.batched("image", keep_on_cpu=True)},
    )
    ranges = []
    for own in np.split(places, np.cumsum(parts * each)[:-1]):
        among = np.zeros(own[-1] + 1 - own[0], np.bool_)  # others stand between an image's parts
        among[own - own[0]] = True
        ranges.append(inputs.PlaceholderRange(int(own[0]), len(among), torch.from_numpy(among)))
    names = [xxhash.xxh3_128_hexdigest(one) for one in prompt.images]
    return given.mm_input(token_ids, items, {"image": names}, {"image": ranges})
