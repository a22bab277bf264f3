"""Prompts: read, split, shuffled, rendered, and their position saved and restored.

::

    records.py      what records are
      files.py      JSON lines, dataset folders, Parquet and Arrow files
      tasks.py      entries of reasoning-gym tasks      values.py   values as they were written
    rendering.py    record -> text -> tokens        tokenizer.py   a checkpoint folder's
    prompts.py      `Prompts`: which record comes when, a function of seed and epoch
    arithmetic.py   a tokenizer of single characters
    demonstrations.py   episodes to clone, for robots      lerobot.py   those in LeRobot's format

Nothing here imports torch, datasets or transformers before data that need them are opened.
"""

from rlinf_async.data.config import DataConfig
from rlinf_async.data.errors import DataChanged, DataError, PromptTooLong
from rlinf_async.data.prompts import DataState, Prompts
from rlinf_async.data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "DataChanged",
    "DataConfig",
    "DataError",
    "DataState",
    "PromptTooLong",
    "Prompts",
    "Tokenizer",
    "load_tokenizer",
]
