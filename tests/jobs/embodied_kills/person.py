"""A person who acts in a pendulum now and then."""

from __future__ import annotations

from typing import Any

import numpy as np


def holds_up(observation: Any, proposed: Any) -> Any:
    """Holds the pendulum where it is nearly up, by its angle and speed; else leaves it alone."""
    up, angle, speed = observation
    return np.clip([-8.0 * angle - 1.5 * speed], -2.0, 2.0) / 2.0 if up > 0.9 else None
