"""A bar of progress in a notebook: needs no widgets, and stays in the notebook as it was last."""

from __future__ import annotations

import html
import importlib
from typing import Any

from rlinf_async.observe.progress import ProgressState


class ProgressBar:
    """Shown where it is made, and changed there.

    Args:
        where: the run's folder.
    """

    def __init__(self, where: str) -> None:
        display: Any = importlib.import_module("IPython.display").display
        self._where = where
        self._state: ProgressState | None = None
        self._handle: Any = display(self._bundle("starting"), raw=True, display_id=True)

    def update(self, state: ProgressState) -> None:
        """Show how far it is."""
        self._state = state
        self._handle.update(self._bundle(state.note), raw=True)

    def end(self, note: str) -> None:
        """Show how it has ended."""
        self._handle.update(self._bundle(note), raw=True)

    def _bundle(self, note: str) -> dict[str, str]:
        state = self._state
        done, of = (0, None) if state is None else (state.iteration, state.iterations)
        figures = [] if state is None else [f"{name} {value}" for name, value in state.figures]
        count = f"{done}/{of}" if of else f"{done}"
        text = " | ".join(part for part in (f"iteration {count}", *figures, note) if part)
        most = f' max="{of}"' if of else ""
        return {
            "text/plain": f"{self._where}: {text}",
            "text/html": (
                f'<progress value="{done}"{most} style="width: 20em"></progress> '
                f"<code>{html.escape(text)}</code><br><small>{html.escape(self._where)}</small>"
            ),
        }
