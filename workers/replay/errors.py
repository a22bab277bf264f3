"""Errors of a replay worker."""

from __future__ import annotations


class ReplayError(Exception):
    """The files of a store are missing, damaged, or of another run."""
