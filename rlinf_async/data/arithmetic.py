"""A tokenizer of single characters, for models that are trained from scratch.

Every printable ASCII character is a token, each digit included, and so are the roles of a chat:
102 tokens. A model of some hundred thousand parameters learns arithmetic with it. Saved to a
folder, it is an ordinary Hugging Face tokenizer, which transformers and vLLM load.
"""

from __future__ import annotations

import importlib
import string
from pathlib import Path
from typing import Any, Final

from rlinf_async.config import MissingExtra

PAD, END, UNKNOWN = "<pad>", "<eos>", "<unk>"
ROLES: Final = ("<system>", "<user>", "<assistant>")
CHARACTERS: Final = "\n " + string.digits + string.punctuation + string.ascii_letters

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<' + message['role'] + '>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
"""``<user>12+30=<assistant>42<eos>``"""


def arithmetic_tokenizer() -> Any:
    """The tokenizer, as a `transformers.PreTrainedTokenizerFast`. Raises `MissingExtra`."""
    try:
        tokenizers = importlib.import_module("tokenizers")
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        missing = error.name or "transformers"
        raise MissingExtra(missing, extra="llm", needed_for="the arithmetic tokenizer") from error
    special = (PAD, END, UNKNOWN, *ROLES)
    words = {word: at for at, word in enumerate((*special, *CHARACTERS))}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=UNKNOWN))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    made.add_special_tokens(list(special))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1_000_000,
    )


def save_arithmetic_tokenizer(folder: str | Path) -> None:
    """Save the tokenizer to a folder, beside a model's own files."""
    arithmetic_tokenizer().save_pretrained(str(folder))
