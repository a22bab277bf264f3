"""Cannot be imported."""

from __future__ import annotations

raise RuntimeError("no key in the environment")
