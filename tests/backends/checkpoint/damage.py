"""Damaged checkpoints: files as a disk or a defective program leaves them, and files whose headers
say something else than was written, with checksums that fit them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from hypothesis import strategies as st

from rlinf_async.backends.checkpoint.folders import METADATA, FileRecord, encode
from rlinf_async.backends.checkpoint.tensor_file import LAYOUT, checksum
from tests.backends.checkpoint.kit import noted

Header = dict[str, Any]
"""names of tensors, `LAYOUT` among its ``__metadata__``"""
Damage = Callable[[Path], str]
"""damages a folder; returns what it did"""


# ---- files: checksums stay as they were


def flip(folder: Path, file: Path, at: int, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[at % len(content)] ^= 1 << bit
    file.write_bytes(content)


def shorten(folder: Path, file: Path, at: int, bit: int) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: at % len(content)])


def lengthen(folder: Path, file: Path, at: int, bit: int) -> None:
    file.write_bytes(file.read_bytes() + bytes([bit]) * (1 + at % 20))


def lose(folder: Path, file: Path, at: int, bit: int) -> None:
    file.unlink()


def swap(folder: Path, file: Path, at: int, bit: int) -> None:
    """With the next file of its kind."""
    alike = sorted(folder.glob(f"**/*{file.suffix}"))
    other = alike[(alike.index(file) + 1) % len(alike)]
    first, second = file.read_bytes(), other.read_bytes()
    file.write_bytes(second)
    other.write_bytes(first)


FILES: Final = (flip, shorten, lengthen, lose, swap)


# ---- headers: sizes and checksums are those of the damaged file


def move(boxes: list[Any], box: list[Any], dim: int, by: int, shapes: dict[str, Any]) -> None:
    if box[1]:
        box[1][dim % len(box[1])] += by


def resize(boxes: list[Any], box: list[Any], dim: int, by: int, shapes: dict[str, Any]) -> None:
    if box[2]:
        box[2][dim % len(box[2])] += by


def grow_and_shrink(
    boxes: list[Any], box: list[Any], dim: int, by: int, shapes: dict[str, Any]
) -> None:
    """As many elements in another box."""
    box[2].reverse()


def shift(boxes: list[Any], box: list[Any], dim: int, by: int, shapes: dict[str, Any]) -> None:
    box[3] += by


def double(boxes: list[Any], box: list[Any], dim: int, by: int, shapes: dict[str, Any]) -> None:
    boxes.append(list(box))


def drop(boxes: list[Any], box: list[Any], dim: int, by: int, shapes: dict[str, Any]) -> None:
    boxes.remove(box)


def rename(boxes: list[Any], box: list[Any], dim: int, by: int, shapes: dict[str, Any]) -> None:
    """Say that it is of another tensor of this shape."""
    alike = sorted(name for name, shape in shapes.items() if shape == shapes[box[0]])
    box[0] = alike[(alike.index(box[0]) + by) % len(alike)]


def reshape(boxes: list[Any], box: list[Any], dim: int, by: int, shapes: dict[str, Any]) -> None:
    shape = list(shapes[box[0]])
    if shape:
        shape[dim % len(shape)] += by
    shapes[box[0]] = shape


BOXES: Final = (move, resize, grow_and_shrink, shift, double, drop, rename, reshape)


def read(file: Path) -> tuple[Header, dict[str, Any], bytes]:
    """The header of a file of tensors, its boxes, and the bytes behind it."""
    content = file.read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")
    header = msgspec.json.decode(content[8:size])
    return header, msgspec.json.decode(header["__metadata__"][LAYOUT]), content[size:]


def write(file: Path, header: Header, layout: dict[str, Any], data: bytes) -> None:
    header["__metadata__"][LAYOUT] = msgspec.json.encode(layout).decode()
    content = msgspec.json.encode(header)
    content += b" " * (-len(content) % 8)
    file.write_bytes(len(content).to_bytes(8, "little") + content + data)


def again_elsewhere(source: Path, target: Path, name: str, *, changed: bool) -> None:
    """Store a tensor of a file in another one too, or with a bit that differs."""
    header, layout, data = read(source)
    low, high = header[name]["data_offsets"]
    copy = bytearray(data[low:high])
    if changed:
        copy[len(copy) // 2] ^= 4
    to, into, rest = read(target)
    new = f"{name} again"
    to[new] = header[name] | {"data_offsets": [len(rest), len(rest) + len(copy)]}
    into["boxes"][new] = layout["boxes"][name]
    into["shapes"] |= {box[0]: layout["shapes"][box[0]] for box in layout["boxes"][name]}
    write(target, to, into, rest + copy)


def sign(folder: Path) -> None:
    """Make sizes and checksums those of the files as they are."""
    known = noted(folder)

    def now(record: FileRecord) -> FileRecord:
        path = folder / record.name
        return FileRecord(record.name, path.stat().st_size, checksum(path))

    files = {kind: tuple(now(one) for one in getattr(known, kind)) for kind in ("tensors", "own")}
    (folder / METADATA).write_bytes(encode(msgspec.structs.replace(known, **files)))


KINDS: Final = ("file", "box", "again", "other content")
OF_A_MODEL: Final = (*KINDS, "dtype")
"""which can be known only where the model is"""
NUDGES: Final = st.sampled_from((-1000, -3, -1, 1, 2, 8, 1000))


@st.composite
def damages(draw: st.DrawFn, kinds: Sequence[str] = KINDS) -> Damage:
    """A damage to a copy of a checkpoint."""
    which, at, by = draw(st.integers(0, 99)), draw(st.integers(0, 1 << 20)), draw(NUDGES)
    bit, dim = draw(st.integers(0, 7)), draw(st.integers(0, 1))
    kind = draw(st.sampled_from(kinds))
    to_file, to_box = draw(st.sampled_from(FILES)), draw(st.sampled_from(BOXES))

    def to_a_file(folder: Path) -> str:
        files = sorted(one for one in folder.glob("**/*") if one.is_file())
        file = files[which % len(files)]
        to_file(folder, file, at, bit)
        return f"{to_file.__name__} {file.name} at {at}, bit {bit}"

    def to_a_header(folder: Path) -> str:
        files = sorted(folder.glob("*.safetensors"))
        file = files[which % len(files)]
        header, layout, data = read(file)
        name = sorted(layout["boxes"])[at % len(layout["boxes"])]
        if kind == "box":
            boxes = layout["boxes"][name]
            to_box(boxes, boxes[bit % len(boxes)], dim, by, layout["shapes"])
            write(file, header, layout, data)
            done = f"{to_box.__name__} a box of {name} in {file.name}, dimension {dim}, by {by}"
        elif kind == "dtype":
            header[name]["dtype"] = "I32"
            write(file, header, layout, data)
            done = f"{name} in {file.name} is int32"
        else:
            other = files[(which + 1) % len(files)]
            again_elsewhere(file, other, name, changed=kind == "other content")
            done = f"{kind}: {name} of {file.name} in {other.name}"
        sign(folder)
        return done

    return to_a_file if kind == "file" else to_a_header


def copied(folder: Path, to: Path) -> Path:
    """A copy of a checkpoint, in place of the one before."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(folder, to)
    return to
