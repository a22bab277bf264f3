"""What importing megatron-core changes in a process, and what it must not."""

from __future__ import annotations

from pathlib import PosixPath

import torch

from rlinf_async.backends.megatron.library import of_megatron


def test_checkpoints_hold_no_more_kinds_of_objects_once_megatron_is_imported() -> None:
    assert of_megatron("safe_globals").SAFE_GLOBALS
    assert PosixPath not in torch.serialization.get_safe_globals()
