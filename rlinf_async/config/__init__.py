"""Configuration: TOML files and command-line overrides, read strictly into typed Structs.

A Struct stands beside the code that it configures; nothing here knows any of them::

    class Optimizer(msgspec.Struct, kw_only=True, frozen=True):
        lr: float = 3e-4

    class Run(msgspec.Struct, kw_only=True, frozen=True):
        optimizer: Optimizer = Optimizer()

    run = load("run.toml", {"optimizer.lr": "1e-5"}, Run)
"""

from rlinf_async.config.dump import to_toml
from rlinf_async.config.load import Document, load
from rlinf_async.config.registry import (
    ConfigError,
    MissingDevice,
    MissingExtra,
    UsageError,
    needed,
)

__all__ = [
    "ConfigError",
    "Document",
    "MissingDevice",
    "MissingExtra",
    "UsageError",
    "load",
    "needed",
    "to_toml",
]
