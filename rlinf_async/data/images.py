"""Images of prompts: files and bytes that records hold, and a model's processor.

::

    column of a record --read_images--> encoded images (PNG, ...)     they travel with a prompt
    text, encoded images --ImageProcessor.tokens--> token ids          once, with the data
    encoded image --ImageProcessor.pixels--> what the model reads      engine, trainer

Encoded images are what messages hold, as they are 10 to 1000 times smaller than pixels. A process
prepares the pixels of an image once, however many samples have it, until others take their room.
Invariant: pixels of an image depend on its bytes and on the processor's files alone. So they are
the same in engine and trainer; the processor's implementation by Pillow is used wherever there are
several.
"""

from __future__ import annotations

import io
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from rlinf_async.config import needed
from rlinf_async.data.config import DataError
from rlinf_async.messages.language import Images, Tokens

PROCESSOR_FILES: Final = ("processor_config.json", "preprocessor_config.json")
"""files of a model's folder of which one describes how images are prepared"""
GRID: Final = "image_grid_thw"
"""patches of an image along time, height and width ``[1, 3]``, where images are of many sizes"""
PIXELS: Final = ("pixel_values", "pixel_attention_mask", GRID)
"""what a vision tower reads, by the names of transformers"""
REMEMBERED: Final = 256 * 1024 * 1024
"""bytes of pixels that a process keeps"""

Pixels = Mapping[str, NDArray[Any]]
"""`PIXELS` of one image, ``[parts, ...]``: a processor may cut it into several; the parts of an
image with a grid are its patches"""


def has_processor(folder: Path) -> bool:
    """Whether a model's folder says how images are prepared."""
    return any((folder / name).is_file() for name in PROCESSOR_FILES)


def read_images(given: Sequence[object], base: Path, where: str) -> Images:
    """Return the encoded images of a record.

    Args:
        given: images: each is the path of a file, its bytes, or a table with ``bytes`` or ``path``,
            as Hugging Face datasets have it.
        base: folder that relative paths begin from.
        where: place of the record, for errors.

    Raises:
        DataError: an image is of another kind, or cannot be read.
    """
    found = []
    for at, one in enumerate(given, 1):
        content, name = _content(one, base, f"{where}: image {at}")
        _check(content, f"{where}: image {at}{name}")
        found.append(content)
    return tuple(found)


def _content(given: object, base: Path, where: str) -> tuple[bytes, str]:
    """Return the bytes of an image, and its path in parentheses, where it has one."""
    name: object = given
    if isinstance(given, Mapping):
        held, name = given.get("bytes"), given.get("path")
        if held is not None:
            # A reader of tables takes bytes that happen to be UTF-8 for text.
            given = held.encode() if isinstance(held, str) else held
    if isinstance(given, bytes):
        return given, ""
    if not isinstance(name, str) or not name:
        raise DataError(
            f"{where} must be the path of a file, its bytes, or a table with bytes or path, not "
            f"{given!r:.200}"
        )
    path = base / Path(name).expanduser()
    try:
        return path.read_bytes(), f" ({path})"
    except OSError as error:
        raise DataError(f"{where} ({path}) cannot be read: {error.strerror}") from error


def _check(content: bytes, where: str) -> None:
    """Raise `DataError` unless all of an image can be decoded."""
    try:
        _decoded(content)
    except Exception as error:  # Pillow raises errors of many types
        raise DataError(f"{where} cannot be read as an image: {error}") from error


def _decoded(content: bytes) -> Any:
    from PIL import Image  # takes a while to import

    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        with Image.open(io.BytesIO(content)) as opened:
            return opened.convert("RGB")


def identity(text: str, images: Sequence[bytes]) -> str:
    """Return what tells prompts apart: the text, with a digest of the images where it has any."""
    if not images:
        return text
    return "\0".join([text, *(xxhash.xxh3_128_hexdigest(one) for one in images)])


class ImageProcessor:
    """The processor of a vision-language model.

    Args:
        folder: folder with the processor's files and the tokenizer's.

    Raises:
        DataError: there is none, or it cannot be loaded.
        MissingExtra: transformers is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder).expanduser()
        if not has_processor(path):
            raise DataError(
                f"{path} does not say how images are prepared: neither of "
                f"{', '.join(PROCESSOR_FILES)} is there; copy it from the model's folder"
            )
        library = needed("transformers", extra="llm", needed_for=f"the processor in {path}")
        try:
            self._processor: Any = _loaded(library, path)
            self.image_token: str = self._processor.image_token
            """placeholder of an image in a text"""
            self.image_token_id: int = self._processor.image_token_id
            """token in the place of which a vector of an image is read"""
            self.special_ids: Mapping[str, int] = getattr(
                self._processor, "special_ids", {"image_token_id": self.image_token_id}
            )
            """tokens around and of images, by their names in a config.json"""
        except Exception as error:  # transformers raises errors of many types
            raise DataError(f"the processor in {path} cannot be loaded: {error}") from error
        self._known: OrderedDict[bytes, Pixels] = OrderedDict()
        self._bytes = 0

    def tokens(
        self, text: str, images: Sequence[bytes], where: str, *, special: bool = False
    ) -> Tokens:
        """Return the tokens ``[P]`` of a text, each placeholder expanded to those of its image.

        Args:
            text: text with a placeholder for each image.
            images: encoded images.
            where: place of the record, for errors.
            special: whether the tokenizer adds its own tokens at the ends.

        Raises `DataError`.
        """
        there = text.count(self.image_token)
        if there != len(images):
            raise DataError(
                f"{where}: the prompt has {there} placeholders ({self.image_token}, which the chat "
                f"template writes for each image of the messages) for {len(images)} images"
            )
        try:
            found = self._processor(
                text=[text],
                images=[[_decoded(one) for one in images]] if images else None,
                add_special_tokens=special,
            )
        except Exception as error:  # processors raise errors of many types, as for tiny images
            raise DataError(f"{where}: the processor refuses it: {error}") from error
        token_ids = np.asarray(found["input_ids"][0], np.int32)
        if len(token_ids) and token_ids[-1] == self.image_token_id:
            raise DataError(f"{where}: the prompt ends in an image: put a text behind it")
        return token_ids

    @property
    def has_grids(self) -> bool:
        """Whether tokens of an image have positions in a grid (M-RoPE)."""
        return isinstance(self._processor, _GridProcessor)

    def positions(self, token_ids: Tokens, images: Sequence[bytes]) -> NDArray[np.int64]:
        """Return the positions ``[3, P]`` of a prompt's tokens along time, height and width.

        Those of a text are one after another; those of an image are its rows and columns, behind
        what is before it; what follows goes on behind the largest of them. An answer goes on behind
        the largest of all.
        """
        found, merge = np.empty((3, len(token_ids)), np.int64), self._processor.merge_size
        places = np.flatnonzero(token_ids == self.image_token_id)
        done = seen = following = 0
        for image in images:
            time, height, width = self.pixels(image)[GRID][0].tolist()
            cells = np.indices((time, height // merge, width // merge)).reshape(3, -1)
            first = int(places[seen])
            found[:, done:first] = following + np.arange(first - done)
            following += first - done
            seen += cells.shape[1]
            done = first + cells.shape[1]
            found[:, first:done] = following + cells
            following += max(height, width) // merge
        found[:, done:] = following + np.arange(len(token_ids) - done)
        return found

    def pixels(self, image: bytes) -> Pixels:
        """Return what the vision tower reads of an image."""
        found = self._known.get(image)
        if found is not None:
            self._known.move_to_end(image)
            return found
        made = self._processor.image_processor([[_decoded(image)]], return_tensors="np")
        # Patches of all images are in one row; else images are stacked by prompts.
        found = {
            name: np.asarray(made[name]) if GRID in made else np.asarray(made[name])[0]
            for name in PIXELS
            if name in made
        }
        self._known[image] = found
        self._bytes += _size(found)
        while self._bytes > REMEMBERED and len(self._known) > 1:
            _, forgotten = self._known.popitem(last=False)
            self._bytes -= _size(forgotten)
        return found


def _loaded(library: Any, path: Path) -> Any:
    """Return the processor of a folder."""
    images = library.AutoImageProcessor.from_pretrained(
        str(path), local_files_only=True, trust_remote_code=False, backend="pil"
    )
    if GRID in images.model_input_names:
        return _GridProcessor(
            images, library.AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        )
    return library.AutoProcessor.from_pretrained(
        str(path), local_files_only=True, trust_remote_code=False, backend="pil"
    )


class _GridProcessor:
    """What the processor of Qwen2-VL does with text and images. That one reads videos too, for
    which it needs torchvision."""

    def __init__(self, images: Any, tokenizer: Any) -> None:
        self.image_processor, self._tokenizer = images, tokenizer
        self.merge_size = int(images.merge_size)
        self.image_token = getattr(tokenizer, "image_token", None) or "<|image_pad|>"
        known, vocabulary = tokenizer.get_vocab(), ("vision_start", "vision_end", "video_pad")
        if self.image_token not in known:
            raise ValueError(f"the tokenizer has no {self.image_token}, the placeholder of images")
        self.image_token_id = int(known[self.image_token])
        names = {name: f"{name.removesuffix('_pad')}_token_id" for name in vocabulary}
        self.special_ids = {"image_token_id": self.image_token_id} | {
            names[name]: int(known[f"<|{name}|>"]) for name in vocabulary if f"<|{name}|>" in known
        }

    def __call__(
        self, text: list[str], images: list[list[Any]] | None, *, add_special_tokens: bool
    ) -> Any:
        """Return the tokens of one text, a placeholder for each vector of an image."""
        first, *behind = text[0].split(self.image_token)
        grids = self.image_processor(images)[GRID] if images else []
        for grid, part in zip(grids, behind, strict=True):
            first += self.image_token * int(np.prod(grid) // self.merge_size**2) + part
        return self._tokenizer([first], add_special_tokens=add_special_tokens)


def _size(pixels: Pixels) -> int:
    return sum(one.nbytes for one in pixels.values())
