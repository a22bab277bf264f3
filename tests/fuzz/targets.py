"""The targets by name, and their corpus: inputs that once reached something new."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.fuzz import pure
from tests.fuzz.live import Live

CORPUS: Final = Path(__file__).parent / "corpus"
PURE: Final[dict[str, Callable[[bytes], None]]] = {
    "frames": pure.frames,
    "items": pure.items,
    "parts": pure.parts,
    "handshake": pure.handshake,
    "memory": pure.memory,
}
TARGETS: Final = (*PURE, "live")


@contextmanager
def ready(name: str) -> Iterator[Callable[[bytes], None]]:
    """The target of this name."""
    if name in PURE:
        yield PURE[name]
        return
    live = Live()
    logging.disable()  # every refused frame is logged
    try:
        yield live.hear
    finally:
        logging.disable(logging.NOTSET)
        live.close()
