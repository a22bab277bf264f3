"""OpenGL contexts of robosuite's simulations, of which a process may have several.

robosuite makes a context the current one only as it is created, so everything after that is drawn,
and deleted, in the newest of the thread, whosever it is. Objects of two contexts have the same
numbers: an environment that lets go of its own deletes those of another, whose pictures are noise
from then on, without an error. So an adapter says which context is meant, before it draws and when
one is let go of. Afterwards none is current, and the next may draw in another thread: a worker
makes environments in one and may step them in another.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def drawing(simulation: Any) -> Iterator[None]:
    """Within, this thread draws in the context of this simulation, if it has one."""
    context = _context_of(simulation)
    if context is None:
        yield
        return
    context.gl_ctx.make_current()
    try:
        yield
    finally:
        _clear_context()


@contextlib.contextmanager
def replacing_context(task: Any) -> Iterator[None]:
    """Draw in the task's context, as `drawing` does, while the task may get a new simulation or let
    go of its own: the old context's objects are then deleted in that context, and nowhere else."""
    old = _context_of(task.sim)
    with drawing(task.sim):
        yield
    new = _context_of(getattr(task, "sim", None))
    if old is not None and new is not old:
        old.gl_ctx.make_current()
        old.con.free()
        old.gl_ctx.free()
        _clear_context()


def _context_of(simulation: Any) -> Any:
    return getattr(simulation, "_render_context_offscreen", None)


def _clear_context() -> None:
    """Leave this thread without a context."""
    if os.environ.get("MUJOCO_GL") == "egl":
        importlib.import_module("OpenGL.EGL").eglReleaseThread()
