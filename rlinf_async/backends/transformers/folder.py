"""A folder with a Hugging Face language model: its configuration, tokenizer and limits."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, NamedTuple

from rlinf_async.backends.language import PromptTooLong, sees_images
from rlinf_async.data import DataError
from rlinf_async.data.prompts import end_tokens
from rlinf_async.messages.language import Request, Sampling, Tokens
from rlinf_async.messages.stopping import StopTexts

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")


class ModelFolderError(ValueError):
    """The folder does not hold what is needed; the message says what is missing."""


class ModelFolder(NamedTuple):
    """Configuration, tokenizer and limits of a model, known before its weights."""

    path: str
    config: Any
    """``PretrainedConfig``: the text part, where the model has several"""
    tokenizer: Any
    """``PreTrainedTokenizerBase``"""
    stop_token_ids: frozenset[int]
    """tokens that end a response"""
    context: int
    """tokens of a prompt and its response"""
    known_stops: dict[tuple[str, ...], StopTexts]
    """those that were asked for, by their texts"""
    whole: Any
    """``PretrainedConfig`` of all parts"""

    @property
    def described(self) -> Any:
        """The configuration of the model that is built: of its text alone, unless it sees images
        here."""
        return self.whole if self.sees else self.config

    @property
    def sees(self) -> bool:
        """Whether prompts may have images."""
        return sees_images({"model_type": self.whole.model_type})

    def stop_texts(self, sampling: Sampling) -> StopTexts | None:
        """Return what tells that a response has a stop text; None where there is none."""
        if not sampling.stop:
            return None
        found = self.known_stops.get(sampling.stop)
        if found is None:
            found = self.known_stops[sampling.stop] = StopTexts(sampling.stop, self.decode)
        return found

    def decode(self, token_ids: Tokens) -> str:
        """Return the text of these tokens, special ones left out."""
        text: str = self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=True)
        return text

    def check_fits(self, request: Request) -> None:
        """Check that the model can take this prompt.

        Raises:
            PromptTooLong: it and ``max_tokens`` are over the context.
            ValueError: it is empty, or holds tokens that the model does not have.
        """
        prompt = len(request.prompt.token_ids)
        size = int(self.config.vocab_size)
        if (
            not prompt
            or not 0 <= request.prompt.token_ids.min() <= request.prompt.token_ids.max() < size
        ):
            raise ValueError(
                f"prompt {request.prompt.index} is empty or holds tokens that the model in "
                f"{self.path} does not have (they must lie in 0 .. {size - 1}): was it made with "
                "the tokenizer of another model?"
            )
        needed = prompt + request.sampling.max_tokens
        if needed > self.context:
            raise PromptTooLong(
                f"prompt {request.prompt.index} has {prompt} tokens; with max_tokens "
                f"{request.sampling.max_tokens} that is {needed}, over the context of "
                f"{self.context} of the model in {self.path}: lower max_tokens, or leave long "
                "prompts out of the data"
            )


def open_folder(
    path: str, *, context: int | None = None, needs_weights: bool = False
) -> ModelFolder:
    """Read configuration and tokenizer.

    Args:
        path: the folder.
        context: a limit below the model's own.
        needs_weights: the folder must hold weights, too.

    Raises:
        ModelFolderError: something is missing or damaged, or ``context`` is over the model's own.
        ModuleNotFoundError: the package ``transformers`` is not installed.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ModelFolderError(f"model is {path!r}: there is no such folder")
    if not (folder / "config.json").is_file():
        raise ModelFolderError(f"model is {path!r}: there is no config.json in that folder")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelFolderError(
            f"model is {path!r}: there is no tokenizer in that folder ({TOKENIZER_FILES[0]} or "
            f"{TOKENIZER_FILES[1]}); save it beside the model with "
            "tokenizer.save_pretrained(folder)"
        )
    if needs_weights and not any(any(folder.glob(name)) for name in WEIGHT_FILES):
        raise ModelFolderError(
            f"model is {path!r}: there are no weights in that folder ({WEIGHT_FILES[0]}); give a "
            "folder that has them, or set weights = 'update' to get the actor's"
        )
    transformers = _import()
    whole = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    config = whole.get_text_config(decoder=True)
    own = int(getattr(config, "max_position_embeddings", 0) or 0)
    if context is not None and own and context > own:
        raise ModelFolderError(
            f"context is {context}, but the model in {path!r} was made for {own} tokens "
            "(max_position_embeddings)"
        )
    try:
        stops = end_tokens(folder, tokenizer, config)
    except DataError as error:
        raise ModelFolderError(str(error)) from error
    return ModelFolder(path, config, tokenizer, stops, context or own or 2**31, {}, whole)


def _import() -> Any:
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a language model needs the package 'transformers', which is not installed: "
            "pip install transformers"
        ) from error
