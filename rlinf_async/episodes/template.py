"""What a chat template puts between the turns of a conversation, as tokens.

::

    opening    system, user, tools  -> tokens before the first answer
    following  tool, user           -> tokens between two answers: end of the turn, messages,
                                       begin of the next

Only what is new is ever rendered and encoded. What the model drew before stays as it is, so a
template that writes earlier messages otherwise once there are later ones (some leave earlier
thoughts out) does not fit: `following` says so, and the episode goes on in a branch, or ends.

How the text between two turns is found, without knowing the template: it is rendered twice, around
an answer that stands for the real one::

    before  ... <|assistant|>ANSWER<|end|>
    after   ... <|assistant|>ANSWER<|end|><|tool|>42<|end|><|assistant|>
                                   ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^ following
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from rlinf_async.data.config import DataError
from rlinf_async.data.prompts import Tokenizer
from rlinf_async.episodes.parsing import thoughts_and_rest
from rlinf_async.messages.language import Tokens

Message = Mapping[str, Any]
"""``role``, ``content``, and what else the template knows"""
ToolSchema = Mapping[str, Any]
"""A tool as OpenAI's chat completions describe it"""

ANSWER: Final = "@@answer@@"
"""stands for an answer in a rendering"""
_QUESTION: Final = {"role": "user", "content": "question"}
_CALL: Final = {
    "id": "call00000",
    "type": "function",
    "function": {"name": "tool", "arguments": {}},
}


class TemplateError(DataError):
    """The chat template cannot render this."""


class Rewrites(TemplateError):
    """The template writes what came before otherwise, once there is more."""


class ChatTemplate:
    """A chat template with its tokenizer.

    Args:
        tokenizer: of the model.
        template: Jinja; None: the tokenizer's own.
        options: variables of the template, as ``enable_thinking``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._options = dict(options or {})
        self._tails: dict[str, str] = {}
        if template is None and not tokenizer.chat_template:
            raise TemplateError("the tokenizer has no chat template, and episodes need one")

    def opening(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> Tokens:
        """Return the tokens of a conversation up to where the model answers.

        Raises:
            TemplateError: the template refuses a message, or leaves the tools out.
        """
        text = self._render(messages, tools, ask=True)
        if tools and text == self._render(messages, (), ask=True):
            raise TemplateError(
                "the chat template leaves tools out: the model would not know of them; choose a "
                "template that has them, or describe them in a message and pass none"
            )
        return self._encode(text)

    def following(
        self,
        answer: str,
        drawn: Tokens,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        called: bool = False,
    ) -> Tokens:
        """Return the tokens between an answer and the next one.

        Args:
            answer: text of the answer, special tokens of its end left out.
            drawn: its tokens; an end of turn that the model drew itself is not given again.
            messages: what is said to it.
            tools: those that the conversation began with.
            called: whether the answer calls tools.

        Raises:
            Rewrites: the template does not leave the answer as it is.
            TemplateError: the template refuses a message.
        """
        thoughts, _ = thoughts_and_rest(answer)
        stands_for = f"<think>\n{ANSWER}\n</think>\n\n{ANSWER}" if thoughts else ANSWER
        history: list[Message] = [_QUESTION, _assistant(stands_for, called=called)]
        before = self._render(history, tools)
        after = self._render([*history, *messages], tools, ask=True)
        if not after.startswith(before):
            raise Rewrites(
                "the chat template writes an earlier answer otherwise once "
                f"{' and '.join(sorted({str(one['role']) for one in messages}))} messages follow "
                "it (some leave out earlier thoughts): what was drawn could not stay as it is"
            )
        token_ids = self._encode(self._tail(stands_for, tools) + after[len(before) :])
        if len(drawn) and len(token_ids) and drawn[-1] == token_ids[0]:
            return token_ids[1:]
        return token_ids

    def _tail(self, answer: str, tools: Sequence[ToolSchema]) -> str:
        """Return what the template writes behind an answer: the end of the turn."""
        key = msgspec.json.encode((answer, list(tools))).decode()
        if key not in self._tails:
            text = self._render([_QUESTION, _assistant(answer, called=False)], tools)
            _, found, tail = text.rpartition(ANSWER)
            if not found:
                raise TemplateError("the chat template leaves the content of an answer out")
            self._tails[key] = tail
        return self._tails[key]

    def _render(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, ask: bool = False
    ) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(one) for one in messages],
                chat_template=self._template,
                tools=[dict(one) for one in tools] or None,
                add_generation_prompt=ask,
                tokenize=False,
                **self._options,
            )
        except Exception as error:  # templates raise errors of any type, as for an unknown role
            roles = ", ".join(str(one.get("role")) for one in messages)
            raise TemplateError(
                f"the chat template refuses messages of {roles}: {error}"
            ) from error
        return text

    def _encode(self, text: str) -> Tokens:
        ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return np.asarray(ids, np.int32)


def _assistant(content: str, *, called: bool) -> Message:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if called:
        message["tool_calls"] = [_CALL]
    return message
