"""What a chat template puts between the turns of a conversation, as tokens.

::

    opening     system, user, tools  -> tokens before the first answer
    following   tool, user           -> tokens between two answers: end of the turn, messages,
                                        begin of the next

Only what is new is ever encoded. How the text between two answers is found, without knowing the
template: the whole conversation is rendered with a mark in the place of each answer, at each turn::

    so far   <|user|>2 + 2?<|end|><|assistant|>
    now      <|user|>2 + 2?<|end|><|assistant|>MARK<|end|><|tool|>4<|end|><|assistant|>
                                                   ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^ following

What was rendered so far must stand there unchanged. A template that writes earlier messages
otherwise once there are later ones (some leave earlier thoughts out, some move the tools or the
system's message to the last question) does not: `Rewrites`. What answers say never reaches the
template, and what was drawn is never encoded, so neither can change what is trained.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec
import numpy as np

from rlinf_async.data.config import DataError
from rlinf_async.data.prompts import Tokenizer, end_tokens, load_tokenizer
from rlinf_async.messages.language import Tokens

Message = Mapping[str, Any]
"""``role``, ``content``, and what else the template knows"""
ToolSchema = Mapping[str, Any]
"""A tool as OpenAI's chat completions describe it"""

_MARK: Final = uuid.uuid4().hex
"""what nobody else writes: it stands for answers in renderings, and for nothing in tokens"""
_QUESTION: Final = {"role": "user", "content": "1"}
_NAME: Final = re.compile(r"[\w.-]{1,64}", re.ASCII)
CHECKED: Final = 4096
"""openings of a conversation that are remembered to have been checked"""
_SHOWN: Final = 40
"""characters on each side of a difference that an error shows"""
_WHAT_TO_DO: Final = (
    "What was drawn could not stay as it is: choose a template that leaves it, or say in "
    "on_rewrite what is to be done: 'keep' (the model goes on from what it has read) or 'branch' "
    "(it reads the conversation anew, and what it drew before is trained by itself)"
)


class TemplateError(DataError):
    """The chat template cannot render this."""


class Rewrites(TemplateError):
    """The template writes what came before otherwise, once there is more."""


class Called(NamedTuple):
    """A call of a tool, as far as what follows it depends on it."""

    id: str
    """what its result has as ``tool_call_id``"""
    name: str


class Answered(NamedTuple):
    """What an answer is made of, as far as its place in a rendering depends on it."""

    thoughts: Literal["none", "empty", "some"] = "none"
    """whether thoughts come first"""
    text: bool = True
    """whether it says something; an answer that calls nothing always does"""
    calls: tuple[Called, ...] = ()


class Calls(NamedTuple):
    """How a template takes the calls of an answer."""

    most: int | None
    """number in one answer; None: any. 0: it knows none, and they are part of the text"""
    as_text: bool
    """whether arguments are JSON, not an object"""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What the model has read of a conversation so far, as the template writes it.

    Made by `ChatTemplate.read`; it goes on in another one, so that a conversation can fork.
    """

    template: ChatTemplate
    messages: tuple[Message, ...]
    """what was said, and stand-ins for answers"""
    tools: tuple[ToolSchema, ...]
    length: int
    """number of characters of all of it, up to where the model answers, with marks in the place of
    answers"""
    hash: int
    """of these characters"""
    given: Tokens
    """tokens to give to the model: of an opening, or those between the last two answers"""
    answers: int = 0
    """number of answers in it"""

    def followed_by(
        self, answer: Answered, drawn: Tokens, messages: Sequence[Message], *, keep: bool = False
    ) -> Reading:
        """Return what it has read after an answer and what is said to it.

        Args:
            answer: what it is made of.
            drawn: its tokens; an end of turn among them is not given again, whichever of the
                model's end tokens it is.
            messages: what is said to it: at least one.
            keep: leave what came before as it is, though the template would write it otherwise.

        Raises:
            Rewrites: the template does not leave what came before as it is.
            TemplateError: the template refuses a message, or leaves it out.
        """
        template = self.template
        template.check_roles({str(one["role"]) for one in messages})
        answer = template.as_written(answer)
        said = (
            *self.messages,
            stand_in(self.answers, answer, template.calls),
            *template.as_taken(messages),
        )
        text = template.render(said, self.tools, ask=True)
        end = template.end_of_answer(text, self.answers, answer)
        if not keep:
            start = self._unchanged(text, messages)
            check_answer(text[start:end], self.answers, answer)
        if _MARK in text[end:]:
            raise TemplateError(
                "the chat template repeats an answer in what follows it, which nobody can write "
                "but the model"
            )
        return Reading(
            template=template,
            messages=said,
            tools=self.tools,
            length=len(text),
            hash=hash(text),
            given=template.between(text[end:], drawn),
            answers=self.answers + 1,
        )

    def _unchanged(self, text: str, messages: Sequence[Message]) -> int:
        """Return the length of what came before, which begins this text."""
        if hash(text[: self.length]) == self.hash:
            return self.length
        # A template may write the time of day: it may be another by now.
        before = self.template.render(self.messages, self.tools, ask=True)
        if text.startswith(before):
            return len(before)
        roles = " and ".join(sorted({str(one["role"]) for one in messages}))
        raise Rewrites(
            f"the chat template writes what came before otherwise once messages of {roles} follow: "
            f"{_difference(before, text)}. {_WHAT_TO_DO}"
        )


class ChatTemplate:
    """A chat template with its tokenizer.

    Args:
        tokenizer: of the model.
        template: Jinja; None: the tokenizer's own.
        options: variables of the template, as ``enable_thinking``.
        ends: tokens at which the engine ends an answer; None: the tokenizer's, and the one that
            the template writes.

    Raises:
        TemplateError: there is no template, it leaves answers out, it ends them with a token at
            which the engine does not, or the tokenizer does not give its text back.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None = None,
        options: Mapping[str, Any] | None = None,
        ends: Collection[int] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._options = dict(options or {})
        if template is None and not tokenizer.chat_template:
            raise TemplateError("the tokenizer has no chat template, and episodes need one")
        self._roles: dict[str, bool] = {}
        self._checked: set[bytes] = set()
        """digests of tools and roles that were checked, the newest ones"""
        own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        self.ends = frozenset(own if ends is None else ends)
        """tokens that end an answer"""
        end = self._find_end(given=ends is not None)
        self.ends |= set() if end is None else {end}
        self._ends = {self._decode(np.array([one], np.int32)) for one in self.ends} - {""}

    def opening(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> Tokens:
        """Return the tokens of a conversation up to where the model answers. Raises like `read`."""
        return self.read(messages, tools).given

    def read(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> Reading:
        """Return a conversation up to where the model answers first.

        Raises:
            TemplateError: the template refuses a message, or leaves messages or the tools out.
        """
        if not messages:
            raise TemplateError("a conversation begins with at least one message")
        messages = self.as_taken(messages)
        text = self.render(messages, tools, ask=True)
        self._check_opening(messages, tools, text)
        return Reading(
            template=self,
            messages=messages,
            tools=tuple(tools),
            length=len(text),
            hash=hash(text),
            given=self._encode(text),
        )

    def decode(self, drawn: Tokens) -> str:
        """Return the text of an answer: the token of its end left out, others as they are."""
        return self._decode(drawn[:-1] if self._ended(drawn) else drawn)

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, ask: bool = False
    ) -> str:
        """Return a conversation as text; ``ask``: up to where the model answers.

        Raises:
            TemplateError: the template refuses it.
        """
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

    @cached_property
    def calls(self) -> Calls:
        """How it takes the calls of an answer, found by trying."""
        for as_text in (False, True):
            for count in (2, 1):
                calls = [
                    _call(_id(at), "a", "a", _mark("call", at), as_text=as_text)
                    for at in range(count)
                ]
                messages: list[Message] = [
                    _QUESTION,
                    {"role": "assistant", "content": "", "tool_calls": calls},
                    *(_result(at, "a") for at in range(count)),
                ]
                try:
                    text = self.render(messages, ())
                except TemplateError:
                    continue
                if all(_mark("call", at) in text for at in range(count)):
                    return Calls(None if count > 1 else 1, as_text)
        return Calls(0, as_text=False)

    def as_written(self, answer: Answered) -> Answered:
        """Return what an answer is made of for this template: calls that it does not know, or
        no more than one at once, are told to it as text, or as one."""
        if not answer.calls or self.calls.most is None:
            return answer
        if not self.calls.most:
            return Answered(answer.thoughts)
        return answer._replace(calls=answer.calls[: self.calls.most])

    def as_taken(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Return messages with the arguments of their calls as the template takes them: OpenAI's
        clients send them as JSON, and most templates want an object."""
        return tuple(
            _with_arguments(one, as_text=self.calls.as_text) if one.get("tool_calls") else one
            for one in messages
        )

    def end_of_answer(self, text: str, number: int, answer: Answered) -> int:
        """Return the position in a rendering at which an answer has ended.

        Raises:
            Rewrites: the answer is not there.
            TemplateError: its end cannot be told.
        """
        # Where it stands first: a template may repeat it in what follows.
        last = len(answer.calls) - 1
        mark = _mark(f"call{last}_" if answer.calls else "text", number)
        at = text.find(mark)
        if at < 0:
            raise Rewrites("the chat template leaves an answer out once more is said")
        at += len(mark)
        if not answer.calls:
            return at
        # What closes a call is part of the answer, up to the end of the turn.
        end, _ = self._next_end(text, at)
        if end < 0:
            raise TemplateError(
                "the chat template has no token at the end of an answer, so what closes a call of "
                "a tool cannot be told from what follows it"
            )
        return end

    def between(self, text: str, drawn: Tokens) -> Tokens:
        """Return the tokens of what follows an answer, without an end that was drawn."""
        at, end = self._next_end(text, 0)
        if at >= 0 and not text[:at].strip() and self._ended(drawn):
            text = text[at + len(end) :]
        # Behind a token that ends an answer, as tokenizers look at what is before: SentencePiece
        # begins each text with a space.
        end = end or min(self._ends, default="")
        before, whole = self._encode(end), self._encode(end + text)
        apart = np.array_equal(whole[: len(before)], before)
        return whole[len(before) :] if apart else self._encode(text)

    def _next_end(self, text: str, start: int) -> tuple[int, str]:
        """Return where the first token that ends an answer is, and its text; -1: nowhere."""
        found = [(text.find(one, start), one) for one in self._ends]
        return min((one for one in found if one[0] >= 0), default=(-1, ""))

    def check_roles(self, roles: Collection[str]) -> None:
        """Check that messages of these roles are written where they follow an answer.

        Raises:
            TemplateError: they are left out.
        """
        for role in sorted(roles):
            if role not in self._roles:
                self._roles[role] = self._writes(role)
            if not self._roles[role]:
                raise _left_out(role)

    def _writes(self, role: str) -> bool:
        """Return whether a message of this role is written; one that is refused says so itself."""
        call = Answered(text=False, calls=(Called(_id(0), "a"),))
        answer = self.as_written(call if role == "tool" else Answered())
        message = {**_result(0, _mark("said", 0)), "role": role}
        try:
            text = self.render([_QUESTION, stand_in(0, answer, self.calls), message], ())
        except TemplateError:
            return True
        said = text.rfind(_mark("said", 0))
        if 0 <= said < self.end_of_answer(text, 0, answer):
            raise TemplateError(
                "the chat template ends an answer that calls tools with another token than one "
                "that does not, and the model does not stop there: add it to eos_token_id in its "
                "generation_config.json"
            )
        return said >= 0

    def _check_opening(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], text: str
    ) -> None:
        """Check that nothing is left out: once for the same tools and order of roles."""
        roles = [str(one["role"]) for one in messages]
        written = msgspec.json.encode((roles, list(tools)))
        key = hashlib.blake2b(written, digest_size=16).digest()
        if key in self._checked:
            return
        if tools and text == self.render(messages, (), ask=True):
            raise TemplateError(
                "the chat template leaves tools out: the model would not know of them; choose a "
                "template that has them, or describe them in a message and pass none"
            )
        checked = [
            {**one, "content": _mark("said", at)}
            if one["role"] != "assistant" and isinstance(one.get("content"), str)
            else one
            for at, one in enumerate(messages)
        ]
        marked = self.render(checked, tools, ask=True)
        for at, one in enumerate(checked):
            if one.get("content") == _mark("said", at) and _mark("said", at) not in marked:
                raise _left_out(roles[at])
        if len(self._checked) >= CHECKED:  # tools may be other ones in each episode
            self._checked.clear()
        self._checked.add(key)

    def _find_end(self, *, given: bool) -> int | None:
        """Return the token that the template writes at the end of an answer; None: it has none.

        Raises:
            TemplateError: see the class.
        """
        answer = stand_in(0, Answered(), Calls(0, as_text=False))
        question = {"role": "user", "content": _mark("said", 0)}
        whole = self.render([_QUESTION, answer, question], (), ask=True)
        _, found, after = whole.partition(_mark("text", 0))
        if not found:
            raise TemplateError("the chat template leaves the content of an answer out")
        for part in after.split(_mark("said", 0)):
            back = self._decode(self._encode(part))
            if back != part:
                raise TemplateError(
                    f"the tokenizer does not give back what the chat template writes: {part!r} "
                    f"becomes {back!r}"
                )
        first = self._encode(after.lstrip())[:1]
        if not len(first) or not (int(first[0]) in self.ends or self._special(first)):
            return None
        end = int(first[0])
        if given and end not in self.ends:
            raise TemplateError(
                f"the chat template ends an answer with {self._decode(first)!r} (token {end}), "
                "and the model does not stop there: add it to eos_token_id in its "
                "generation_config.json, or choose the template that the model was trained with"
            )
        return end

    def _ended(self, drawn: Tokens) -> bool:
        return bool(len(drawn)) and int(drawn[-1]) in self.ends

    def _special(self, token_ids: Tokens) -> bool:
        return not self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def _encode(self, text: str) -> Tokens:
        ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return np.asarray(ids, np.int32)

    def _decode(self, token_ids: Tokens) -> str:
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text


def load_template(
    model: str | Path,
    options: Mapping[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
) -> ChatTemplate:
    """Return the chat template of a model's folder.

    Args:
        model: the folder.
        options: variables of the template.
        tokenizer: the model's, where it is loaded already.

    Raises:
        DataError: tokenizer or end tokens cannot be read.
        TemplateError: see `ChatTemplate`.
    """
    if tokenizer is None:
        tokenizer = load_tokenizer(model)
    return ChatTemplate(tokenizer, options=options, ends=end_tokens(model, tokenizer) or None)


def stand_in(number: int, answer: Answered, calls: Calls) -> Message:
    """Return a message that stands for an answer of this number."""
    content = _mark("text", number) if answer.text or not answer.calls else ""
    if answer.thoughts != "none":
        thoughts = _mark("thoughts", number) if answer.thoughts == "some" else ""
        content = f"<think>\n{thoughts}\n</think>\n\n{content}"
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if answer.calls:
        # Results may repeat the name; one that is none could end the answer before its end.
        names = [one.name if _NAME.fullmatch(one.name) else "unknown" for one in answer.calls]
        marks = [_mark(f"call{at}_", number) for at in range(len(names))]
        message["tool_calls"] = [
            _call(one.id, name, mark, mark, as_text=calls.as_text)
            for one, name, mark in zip(answer.calls, names, marks, strict=True)
        ]
    return message


def check_answer(written: str, number: int, answer: Answered) -> None:
    """Check that a template writes an answer whole, and adds nothing to it.

    Raises:
        Rewrites: it does not.
    """
    thinks, says = answer.thoughts == "some", answer.text or not answer.calls
    for there, what in ((thinks, "thoughts"), (says, "text")):
        if there and _mark(what, number) not in written:
            raise Rewrites(
                f"the chat template leaves the {what} of an answer out once more is said. "
                + _WHAT_TO_DO
            )
    if answer.thoughts == "empty" and "</think>" not in written:
        raise Rewrites(
            "the chat template leaves <think> </think> without thoughts out once more is said. "
            + _WHAT_TO_DO
        )
    if answer.calls and not thinks:
        return  # before a call there is what opens it
    added, _, rest = written.partition(_mark("thoughts" if thinks else "text", number))
    if answer.thoughts == "empty":
        added = "".join(added.split()).removesuffix("</think>")
    if added.strip() not in ("", "<think>"):
        raise Rewrites(
            f"the chat template puts {added[:_SHOWN]!r} before an answer, where nothing was drawn. "
            + _WHAT_TO_DO
        )
    if thinks and not rest.lstrip().startswith("</think>"):
        raise Rewrites(
            f"the chat template writes {rest[:_SHOWN]!r} after thoughts, not </think>. "
            + _WHAT_TO_DO
        )


def _left_out(role: str) -> TemplateError:
    return TemplateError(
        f"the chat template leaves messages of {role} out: the model would not read them; say it "
        "in a message of user, or choose another template"
    )


def _mark(what: str, number: int) -> str:
    return f"{what}{number}x{_MARK}"


def as_call(call_id: str, name: str, arguments: Mapping[str, Any] | str) -> Message:
    """Return a call of a tool as templates read it."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def as_answer(text: str, thoughts: str = "", calls: Sequence[Message] = ()) -> Message:
    """Return an answer as templates read it."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = list(calls)
    return message


def _call(call_id: str, name: str, key: str, value: str, *, as_text: bool) -> Message:
    arguments = {key: value}
    return as_call(call_id, name, json.dumps(arguments) if as_text else arguments)


def _with_arguments(message: Message, *, as_text: bool) -> Message:
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        arguments = function.get("arguments", {})
        if as_text and not isinstance(arguments, str):
            function["arguments"] = json.dumps(arguments)
        elif isinstance(arguments, str) and not as_text:
            with contextlib.suppress(ValueError):
                function["arguments"] = json.loads(arguments)
        calls.append({**call, "function": function})
    return {**message, "content": message.get("content") or "", "tool_calls": calls}


def _result(at: int, content: str) -> Message:
    return {"role": "tool", "name": "a", "tool_call_id": _id(at), "content": content}


def _id(at: int) -> str:
    return f"call{at:05d}"  # some templates want nine letters


def _difference(before: str, after: str) -> str:
    """Return the place at which two renderings part, for a person."""
    at = next(
        (at for at, (a, b) in enumerate(zip(before, after, strict=False)) if a != b),
        min(len(before), len(after)),
    )
    shown = [
        re.sub(rf"(text|call|thoughts)(?:\d+_)?(\d+)x{_MARK}", r"<\1 of answer \2>", one)
        for one in (before[max(at - _SHOWN, 0) :], after[max(at - _SHOWN, 0) :])
    ]
    return " became ".join(repr(one[: 3 * _SHOWN]) for one in shown)
