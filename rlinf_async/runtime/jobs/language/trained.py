"""The trained model as a folder of its own, which transformers and vLLM load.

Invariant: the folder is whole. It is written under another name, and takes the place of an earlier
one in the end.
"""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from rlinf_async.observe.files import explaining
from rlinf_async.runtime.jobs.language.model_folder import copy_tokenizer


async def export(write: Callable[[Path], Awaitable[None]], model: Path, into: Path) -> None:
    """Write the trained model, and beside it the tokenizer that it began with.

    Args:
        write: writes configuration and weights.
        model: the folder that the run began with.
        into: where the new one goes.

    Raises:
        RunFolderError: it cannot be written.
    """
    staging = into.with_name(f".{into.name}")
    with explaining("write the trained model", into):
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
    await write(staging)
    with explaining("write the trained model", into):
        copy_tokenizer(model, staging)
        shutil.rmtree(into, ignore_errors=True)
        staging.rename(into)
