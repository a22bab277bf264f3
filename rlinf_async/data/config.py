"""Which data, and how they become prompts."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

_TAKEN = {"add_generation_prompt", "chat_template", "continue_final_message", "tokenize"}


class DataConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prompts from a file, a folder, or tasks that are made up."""

    path: str = ""
    """a ``.jsonl``, ``.parquet`` or ``.arrow`` file, or a folder of a Hugging Face dataset"""
    split: str = "train"
    """which part of a folder that has several"""
    tasks: tuple[str, ...] = ()
    """names of reasoning-gym tasks, taken in turn; instead of ``path``"""
    task_options: dict[str, dict[str, Any]] = {}
    """settings of a task, by its name"""
    task_size: int = 10_000
    """different entries of all tasks together"""
    prompt_column: str = "prompt"
    """text, or a list of chat messages; a dot leads into a nested column"""
    reference_column: str = "answer"
    """what the verifier compares with; what is no text is handed on as JSON"""
    verifier: str = ""
    """by name or import path; tasks score themselves (``reasoning_gym``) where it is left out"""
    verifier_column: str = ""
    """where each record names its own; instead of ``verifier``"""
    chat: bool = True
    """whether prompts go through a chat template"""
    chat_template: str = ""
    """a Jinja file instead of the tokenizer's template"""
    chat_options: dict[str, Any] = {}
    """what else the template knows, such as ``enable_thinking``"""
    system_prompt: str = ""
    """put before prompts that have no system message"""
    max_prompt_tokens: int = 1024
    too_long: Literal["error", "skip"] = "error"
    """what happens to longer prompts; skipped ones are counted"""
    shuffle: bool = True
    """another order in each epoch"""
    seed: int = 0
    """of the order, the choice of held-out records, and the tasks"""
    held_out: int = 0
    """records that are kept for evaluation, and whose prompts are not trained on"""
    epochs: int = 0
    """times that the records are gone through; 0: on and on"""

    def __post_init__(self) -> None:
        if bool(self.path) == bool(self.tasks):
            raise ValueError(
                'which data? give either path, as in path = "train.jsonl", or tasks, as in '
                'tasks = ["chain_sum"]'
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
        if strange := sorted(set(self.task_options) - set(self.tasks)):
            raise ValueError(
                f"task_options has {strange[0]!r}, which is not among tasks = {list(self.tasks)}"
            )
        if self.max_prompt_tokens < 1 or self.task_size < 1:
            raise ValueError(
                f"max_prompt_tokens is {self.max_prompt_tokens}, task_size is {self.task_size}; "
                "both must be at least 1"
            )
        if self.held_out < 0 or self.epochs < 0 or self.seed < 0:
            raise ValueError(
                f"held_out is {self.held_out}, epochs is {self.epochs}, seed is {self.seed}; they "
                "must be at least 0"
            )
        if not self.chat and (self.chat_template or self.chat_options or self.system_prompt):
            raise ValueError(
                "chat is false, so chat_template, chat_options and system_prompt have no use: "
                "leave them out"
            )
        if taken := sorted(_TAKEN & set(self.chat_options)):
            raise ValueError(f"chat_options has {taken[0]!r}, which is given already")

    @property
    def name(self) -> str:
        """What reports call the data."""
        return self.path or ", ".join(self.tasks)
