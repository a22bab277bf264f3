"""Whether an episode succeeded, as its environment says, and the share of those that did.

An environment says so by ``is_success`` or ``success`` in the info of the last step: True or False,
or 1 or 0. Anything else (nothing at all, None, NaN, 0.7) is no word. Where an environment reports
success in some episodes, those of which it says nothing count as not succeeded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

SUCCESS: Final = ("is_success", "success")
"""Keys of info; the first that says something counts."""


def success_of(info: Any) -> bool | None:
    """Return whether the episode succeeded of whose last step this is the info; None: no word."""
    if not isinstance(info, Mapping):
        return None
    said = (_truth(info[name]) for name in SUCCESS if name in info)
    return next((one for one in said if one is not None), None)


def success_at(infos: Any, place: int) -> bool | None:
    """`success_of` one of many environments that are stepped in one call.

    ``infos`` are a dict of arrays, where ``_is_success`` says which of them mean something
    (`gymnasium.vector.VectorEnv`), or a dict for each environment (Gymnasium before 1.0).
    """
    if not isinstance(infos, Mapping):
        return success_of(infos[place])
    known = {
        name: infos[name][place]
        for name in SUCCESS
        if name in infos and (f"_{name}" not in infos or infos[f"_{name}"][place])
    }
    return success_of(known)


def success_rate(said: Sequence[bool | None], *, reports: bool = False) -> float | None:
    """Return the share of episodes that succeeded; None where there are none, or none of them says.

    ``reports``: whether the environment has said it of others, so that silence is no success.
    """
    if not said or not (reports or any(one is not None for one in said)):
        return None
    return sum(one is True for one in said) / len(said)


def _truth(value: Any) -> bool | None:
    """The value as a bool: of a number, an array of one element, a tensor on any device."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "biuf":
        return None
    return bool(array.item()) if array.item() in (0, 1) else None
