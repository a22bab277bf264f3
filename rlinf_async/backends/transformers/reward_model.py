"""A reward model: a classifier of conversations from a Hugging Face folder, with one label.

::

    messages of the prompt, answer --its own chat template, tokenizer--> token ids
         --with others that wait, longest first, up to so many tokens--> forward --> logit

The score is the logit that ``AutoModelForSequenceClassification`` gives the conversation. Rows are
padded at their right; a model without a padding token gets them one by one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from rlinf_async.config import ConfigError
from rlinf_async.config.registry import needed, raised
from rlinf_async.data import DataError, load_tokenizer

PATH: Final = ("reward", "model")
HEAD: Final = "ForSequenceClassification"
"""end of the names of classes that are reward models"""
Precision = Literal["float32", "bfloat16", "float16"]


def check_reward_model(path: str) -> None:
    """Refuse a folder that holds no reward model, without reading its weights.

    Raises:
        ConfigError: with the folder, and what is wrong with it.
        MissingExtra: transformers is not installed.
    """
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder} has no config.json: give a Hugging Face checkpoint on this disk", path=PATH
        )
    if not any((*folder.glob("*.safetensors"), *folder.glob("*.bin"))):
        raise ConfigError(f"{folder} has no weights (*.safetensors or *.bin)", path=PATH)
    library = needed("transformers", extra="llm", needed_for="reward.model")
    try:
        config = library.AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # transformers raises errors of many types
        raise ConfigError(f"{folder}/config.json: {raised(error)}", path=PATH) from error
    names = list(config.architectures or [])
    if not any(name.endswith(HEAD) for name in names):
        raise ConfigError(
            f"{folder} holds {names[0] if names else 'a model of no name'}, which gives no score: "
            f"a reward model's config.json names a class that ends with {HEAD}",
            path=PATH,
        )
    if config.num_labels != 1:
        raise ConfigError(
            f"{folder} has {config.num_labels} labels, and a reward model has one, its score: ask "
            "this one in a verifier of your own",
            path=PATH,
        )
    try:
        tokenizer = load_tokenizer(folder)
    except DataError as error:
        raise ConfigError(str(error), path=PATH) from error
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            f"the tokenizer in {folder} has no chat template, by which it would read a prompt and "
            "its answer: put the one that it was trained with there, as chat_template.jinja",
            path=PATH,
        )


class RewardModel:
    """A reward model on one device. Used in one thread at a time.

    Args:
        path: its folder.
        device: device of the model, as torch names it.
        precision: dtype of its weights.
        most_tokens: tokens of a forward pass, padding included; a longer conversation is alone.

    Raises:
        ConfigError: as `check_reward_model`; a weight of it is missing.
    """

    def __init__(self, path: str, device: str, precision: Precision, most_tokens: int) -> None:
        check_reward_model(path)
        self._torch = needed("torch", extra="llm", needed_for="reward.model")
        from rlinf_async.backends.building import one_at_a_time

        library = needed("transformers", extra="llm", needed_for="reward.model")
        folder = str(Path(path).expanduser())
        self._tokenizer: Any = load_tokenizer(folder)
        try:
            with one_at_a_time:
                self._model, found = library.AutoModelForSequenceClassification.from_pretrained(
                    folder,
                    dtype=getattr(self._torch, precision),
                    local_files_only=True,
                    output_loading_info=True,
                )
        except Exception as error:  # transformers raises errors of many types
            raise ConfigError(f"{folder} cannot be loaded: {raised(error)}", path=PATH) from error
        if missing := sorted(found["missing_keys"]):
            raise ConfigError(
                f"{folder} lacks {len(missing)} weights of {type(self._model).__name__}, the first "
                f"{missing[0]!r}: they would be random",
                path=PATH,
            )
        self._model.eval().to(device)
        self._device, self._most = device, most_tokens
        described = self._model.config.get_text_config()
        self._pad: int | None = described.pad_token_id
        self._context: int | None = getattr(described, "max_position_embeddings", None)

    def token_ids(self, messages: Sequence[Mapping[str, Any]], answer: str) -> list[int] | str:
        """Return the tokens of a conversation that ends with this answer; a text: why it has no
        score, as the chat template refuses it or it is longer than the model reads."""
        conversation = [*messages, {"role": "assistant", "content": answer}]
        try:
            text = self._tokenizer.apply_chat_template(conversation, tokenize=False)
        except Exception as error:  # a template may raise anything
            return f"its chat template refuses the answer: {raised(error)}"
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if self._context is not None and len(ids) > self._context:
            return f"prompt and answer are {len(ids)} of its tokens, and it reads {self._context}"
        return ids

    def scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Return the score of each conversation, given as its tokens."""
        found = [0.0] * len(rows)
        for places in self._batches([len(one) for one in rows]):
            scores = self._forward([rows[at] for at in places])
            for at, score in zip(places, scores, strict=True):
                found[at] = score
        return found

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Yield the places of the rows of each forward pass, the longest rows first."""
        batch: list[int] = []
        for at in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
            full = batch and lengths[batch[0]] * (len(batch) + 1) > self._most
            if full or (batch and self._pad is None):
                yield batch
                batch = []
            batch.append(at)
        if batch:
            yield batch

    def _forward(self, rows: Sequence[Sequence[int]]) -> list[float]:
        torch, longest = self._torch, max(len(one) for one in rows)
        ids = torch.full((len(rows), longest), self._pad or 0)
        mask = torch.zeros_like(ids)
        for at, row in enumerate(rows):
            ids[at, : len(row)] = torch.tensor(row)
            mask[at, : len(row)] = 1
        with torch.inference_mode():
            said = self._model(
                input_ids=ids.to(self._device),
                attention_mask=mask.to(self._device),
                use_cache=False,
            )
        scores: list[float] = said.logits[:, 0].float().tolist()
        return scores


class Asked(NamedTuple):
    """A conversation that waits for its score."""

    token_ids: list[int]
    score: asyncio.Future[float]


class BatchedModel:
    """A reward model that many tasks ask at a time: whoever waits goes into the next forward pass.

    Args:
        model: the model.
        compute: runs blocking work, and returns what it does.
    """

    def __init__(self, model: RewardModel, compute: Callable[..., Awaitable[Any]]) -> None:
        self._model, self._compute = model, compute
        self._waiting: list[Asked] = []
        self._asking: asyncio.Task[None] | None = None

    async def score(self, messages: Sequence[Mapping[str, Any]], answer: str) -> float | str:
        """Return the score of an answer to these messages; a text: why it has none."""
        token_ids = self._model.token_ids(messages, answer)
        if isinstance(token_ids, str):
            return token_ids
        loop = asyncio.get_running_loop()
        asked = Asked(token_ids, loop.create_future())
        self._waiting.append(asked)
        if self._asking is None:
            self._asking = loop.create_task(self._ask())
        return await asked.score

    async def _ask(self) -> None:
        """Ask the model until nobody waits."""
        await asyncio.sleep(0)  # others who are about to ask
        while waiting := [one for one in self._waiting if not one.score.done()]:
            self._waiting = []
            try:
                scores: list[float] = await self._compute(
                    self._model.scores, [one.token_ids for one in waiting]
                )
            except BaseException as error:
                for one in waiting:
                    if not one.score.done():
                        one.score.set_exception(error)
                if not isinstance(error, Exception):
                    raise
                continue
            for one, score in zip(waiting, scores, strict=True):
                if not one.score.done():
                    one.score.set_result(score)
        self._waiting, self._asking = [], None

    def close(self) -> None:
        """Ask no more."""
        if self._asking is not None:
            self._asking.cancel()
