"""Configuration of the data, which they are and how they become prompts, and errors about data.

::

    UsageError
    +-- DataError            a file, a record, a template or a tokenizer: names the place
        +-- DataChanged      a position was saved over other data
        +-- PromptsTooLong   prompts have more tokens than they may
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import msgspec

from rlinf_async.config import UsageError
from rlinf_async.config.counts import check_bounds

NO_VERIFIER = "none"
"""verifier that judges nothing, and needs no reference"""
_RESERVED = {"add_generation_prompt", "chat_template", "continue_final_message", "tokenize"}


class DataConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prompts from a file, from a folder, or from generated tasks."""

    path: str = ""
    """a ``.jsonl``, ``.parquet`` or ``.arrow`` file, or a folder of a Hugging Face dataset"""
    split: str = "train"
    """name of the split, in a folder that has several"""
    tasks: tuple[str, ...] = ()
    """names of reasoning-gym tasks, taken in turn; instead of ``path``"""
    task_options: dict[str, dict[str, Any]] = {}
    """options of each task, by its name"""
    task_size: int = 10_000
    """number of different entries, over all tasks"""
    environment_tasks: int = 0
    """number of tasks that the environment of ``episode.run`` makes itself, from their number;
    instead of ``path``"""
    prompt_column: str = "prompt"
    """column with text or a list of chat messages; a dot leads into a nested column"""
    image_column: str = ""
    """column with an image, or a list of images, of a prompt for a vision-language model"""
    reference_column: str = "answer"
    """column that the verifier compares with; values other than text are passed on as JSON"""
    verifier: str = ""
    """name or import path; where it is left out, tasks use their own (``reasoning_gym``)"""
    verifier_column: str = ""
    """column with the name of each record's verifier; instead of ``verifier``"""
    chat: bool = True
    """whether prompts go through a chat template"""
    chat_template: str = ""
    """path of a Jinja file; instead of the tokenizer's template"""
    chat_options: dict[str, Any] = {}
    """further variables of the template, such as ``enable_thinking``"""
    system_prompt: str = ""
    """system message for prompts that have none"""
    max_prompt_tokens: int = 1024
    too_long: Literal["error", "skip"] = "error"
    """treatment of longer prompts; skipped ones are counted"""
    shuffle: bool = True
    """whether each epoch has an order of its own"""
    seed: int = 0
    """seed of the order, the choice of held-out records, and the tasks"""
    held_out: int = 0
    """number of records kept for evaluation; their prompts are not trained on"""
    epochs: int = 0
    """number of passes over the records; 0: no limit"""

    def __post_init__(self) -> None:
        if bool(self.path) + bool(self.tasks) + bool(self.environment_tasks) != 1:
            raise ValueError(
                'which data? give one of path, as in path = "train.jsonl", tasks, as in '
                'tasks = ["chain_sum"], and environment_tasks, as in environment_tasks = 1000'
            )
        if self.verifier and self.verifier_column:
            raise ValueError(
                f"verifier is {self.verifier!r} and verifier_column is {self.verifier_column!r}; "
                "give one of them"
            )
        if self.path and not (self.verifier or self.verifier_column):
            raise ValueError(
                'what scores the answers? give verifier, as in verifier = "exact" (or "numeric", '
                '"math", "my_rewards.py:score"), or verifier_column'
            )
        if self.tasks and self.verifier_column:
            raise ValueError(
                "tasks have no verifier_column: give verifier, or leave it to the tasks' own"
            )
        if self.environment_tasks and (self.verifier or self.verifier_column):
            raise ValueError(
                "an environment scores its own tasks: leave verifier and verifier_column out"
            )
        if self.image_column and not self.path:
            raise ValueError(
                f"image_column is {self.image_column!r}, but tasks have no images: leave it out"
            )
        if strange := sorted(set(self.task_options) - set(self.tasks)):
            raise ValueError(
                f"task_options has {strange[0]!r}, which is not among tasks = {list(self.tasks)}"
            )
        check_bounds(self, "max_prompt_tokens", "task_size", least=1)
        check_bounds(self, "held_out", "epochs", "seed", "environment_tasks", least=0)
        check_chat(self)

    @property
    def name(self) -> str:
        """The name of the data in reports."""
        return self.path or ", ".join(self.tasks) or f"{self.environment_tasks} environment tasks"


class Rendered(Protocol):
    """Settings of data that may go through a chat template."""

    @property
    def chat(self) -> bool: ...
    @property
    def chat_template(self) -> str: ...
    @property
    def chat_options(self) -> dict[str, Any]: ...
    @property
    def system_prompt(self) -> str: ...


def check_chat(config: Rendered) -> None:
    """Raise `ValueError` for settings of a chat template that have no use, or are the job's."""
    if not config.chat and (config.chat_template or config.chat_options or config.system_prompt):
        raise ValueError(
            "chat is false, so chat_template, chat_options and system_prompt have no use: "
            "leave them out"
        )
    if reserved := sorted(_RESERVED & set(config.chat_options)):
        raise ValueError(
            f"chat_options has {reserved[0]!r}, which the job sets itself: leave it out"
        )


class DataError(UsageError):
    """The data cannot be used as asked; the text names file and line, or record."""


class DataChanged(DataError):
    """A saved position does not belong to these data."""


class PromptsTooLong(DataError):
    """Prompts are longer than ``max_prompt_tokens``; the text names the first ones."""
