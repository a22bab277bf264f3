"""Prompts: read, split, shuffled, rendered, and their position saved and restored.

::

    config.py           settings, and what is wrong with them
    records.py          what records are; JSON lines, folders, Parquet, Arrow, reasoning-gym tasks
    prompts.py          `Prompts`: which record comes when, a function of seed and epoch; its tokens
    examples.py         `Examples`: answers to learn, and pairs of them: their tokens, their order
    demonstrations.py   episodes to clone, for robots
    lerobot.py          the same in LeRobot's format
    lerobot_export.py   and how they are written so
    rlds.py             episodes in RLDS, as TensorFlow Datasets keeps them

Nothing here imports torch, datasets or transformers before data that need them are opened.
"""

from rlinf_async.data.config import DataChanged, DataConfig, DataError, PromptsTooLong
from rlinf_async.data.prompts import DataState, Prompts, Tokenizer, load_tokenizer

__all__ = [
    "DataChanged",
    "DataConfig",
    "DataError",
    "DataState",
    "Prompts",
    "PromptsTooLong",
    "Tokenizer",
    "load_tokenizer",
]
