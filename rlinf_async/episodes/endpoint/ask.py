"""What an agent asks and is answered, whatever interface it speaks.

::

    body (JSON) --read-->  Ask     --`Record`-->  Answers  --reply--> body (JSON)
                  |                                          `-events--> server-sent events
                  `--what cannot be honoured--> Refused, or a warning

What is trained is what was sampled, so an agent does not choose how tokens are drawn: the sampling
settings are the run's.

::

    temperature, top_p, top_k, min_p,     the run's are used; one warning where they differ
    repetition_penalty, effort
    stop, max_tokens, n, seed             honoured
    tool_choice                           "auto" and "none"; else as an unknown field
    logit_bias, stop_token_ids            the run's own are accepted; others as an unknown field
    formats of output, other penalties    as an unknown field
    user, metadata, cache keys            nothing that would change an answer: left out
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, Protocol, TypeVar

import msgspec

from rlinf_async.episodes.template import Message, ToolSchema
from rlinf_async.messages.language import Generated, Sampling

logger = logging.getLogger(__name__)

Kind = Literal["invalid", "key", "turns", "context", "missing", "method", "too large", "failed"]
"""Kind of a refusal; each interface has its own word and status for it"""

STATUS: Final[Mapping[Kind, int]] = {
    "invalid": 400,
    "context": 400,
    "key": 401,
    "turns": 403,
    "missing": 404,
    "method": 405,
    "too large": 413,
    "failed": 500,
}
"""HTTP status. Clients repeat a request after 408, 409, 429 and 5xx: none but the last is one"""

T = TypeVar("T")


class Refused(Exception):
    """The request is answered with an error. ``field``: name of the one at fault, if there is."""

    def __init__(self, text: str, kind: Kind = "invalid", field: str = "") -> None:
        super().__init__(text)
        self.kind: Kind = kind
        self.field = field


class Ask(msgspec.Struct, kw_only=True):
    """A question to the model."""

    model: str
    messages: list[Message]
    """as templates read them; arguments of calls are objects"""
    tools: list[ToolSchema] = []
    calls: bool = True
    """whether calls of tools are read; else they are text"""
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: bool = False
    thoughts: bool = True
    """whether thoughts are told"""
    stream: bool = False
    usage: bool = True
    """whether a stream tells numbers of tokens"""
    previous: str = ""
    """identifier of the response that this goes on from"""
    kept: bool = False
    """whether `previous` may name the response later"""
    instructions: bool = False
    """whether the first message holds for this response alone"""


class Answer(msgspec.Struct, kw_only=True):
    """One answer of the model, as an agent is told it."""

    text: str
    thoughts: str
    calls: Sequence[Mapping[str, Any]]
    """``id``, and ``function`` with ``name`` and ``arguments``, an object"""
    drawn: Generated
    stopped: str
    """stop sequence that ended it; empty: none"""
    tokens: Sequence[str]
    """text of each token, where log-probs are asked for"""

    @property
    def cut(self) -> bool:
        """Whether it was longer than it could be."""
        return self.drawn.finish == "length"


class Answers(msgspec.Struct, kw_only=True):
    """What a request is answered with."""

    id: str
    """unique; letters and digits"""
    created: int
    """time in seconds since 1970"""
    model: str
    """name that the agent asked for"""
    choices: list[Answer]
    prompt_tokens: int
    temperature: float
    top_p: float

    @property
    def drawn_tokens(self) -> int:
        """Number of tokens that the model drew, in all choices."""
        return sum(len(one.drawn.token_ids) for one in self.choices)


class Api(Protocol):
    """An interface that agents speak."""

    def read(self, body: Mapping[str, Any], policy: Policy) -> Ask:
        """Return what a request asks; raises `Refused`."""
        ...

    def reply(self, ask: Ask, answers: Answers) -> Any:
        """Return the body of a response, as JSON has it."""
        ...

    def events(self, ask: Ask, answers: Answers) -> Iterator[tuple[str, Any]]:
        """Yield the events of a stream: their name, or an empty text, and their data."""
        ...

    def refusal(self, refused: Refused) -> Any:
        """Return the body of an error."""
        ...


class Policy:
    """What becomes of fields that cannot be honoured.

    Args:
        sampling: the run's, of this episode.
        models: names that may be asked for; empty: any.
        refuses: whether fields that are unknown are refused; else they are warned of.
        warned: warnings that were given, to which more are added.
    """

    def __init__(
        self, sampling: Sampling, models: Sequence[str], *, refuses: bool, warned: set[str]
    ) -> None:
        self.sampling = sampling
        self._models = models
        self._refuses = refuses
        self._warned = warned

    def unknown(self, field: str, why: str) -> None:
        """Refuse a field, or warn of it."""
        if self._refuses:
            raise Refused(
                f"{field}: {why}; leave it out, or set unknown = 'warn' for the endpoint, which "
                "leaves it out for you",
                field=field,
            )
        self.warn(f"{field}: {why}; it is left out")

    def sampled(self, field: str, asked: object, used: object) -> None:
        """Warn of a sampling setting that is not the run's."""
        if asked is not None and asked != used:
            instead = "changes nothing" if used is None else f"the run's {used!r} is used"
            self.warn(
                f"{field} = {asked!r} is asked for, and {instead}: what is trained has to be what "
                "was sampled",
                once=field,
            )

    def own(self, field: str, asked: object, used: object) -> None:
        """Accept what the run has itself; what else is asked for is as an unknown field."""
        if asked and asked != used:
            has = repr(used) if used else "none"
            self.unknown(field, f"{asked!r:.80} is asked for, and the run has {has:.80}")

    def warn(self, text: str, once: str = "") -> None:
        """Log a warning, once of each text, or of what ``once`` names."""
        if (once or text) not in self._warned:
            self._warned.add(once or text)
            logger.warning("an agent's request: %s", text)

    def model(self, name: str) -> str:
        """Return the name of a model, if it may be asked for."""
        if self._models and name not in self._models:
            known = ", ".join(self._models)
            raise Refused(f"there is no model {name!r} (there are: {known})", "missing", "model")
        return name

    def fields(
        self,
        body: Mapping[str, Any],
        shape: type[T],
        *,
        harmless: frozenset[str],
        neutral: Mapping[str, Sequence[Any]],
    ) -> T:
        """Return the fields of a request.

        Args:
            body: the request.
            shape: a Struct of those that are understood.
            harmless: names of those that do not change an answer.
            neutral: values of others that ask for nothing.
        """
        for name in body.keys() - _names(shape) - harmless:
            if body[name] is not None and body[name] not in neutral.get(name, ()):
                self.unknown(name, "it is not known here, or cannot be honoured")
        return converted(body, shape)

    def parts(self, given: object, shape: type, harmless: Collection[str], where: str) -> None:
        """Warn of fields of messages, parts of them, or tools that are not known: they are left
        out. Those that have a ``content`` are looked into."""
        known = _names(shape) | frozenset(harmless)
        for one in given if isinstance(given, list) else ():
            if not isinstance(one, Mapping):
                continue
            for name in one.keys() - known:
                if one[name]:
                    field = f"{where}.{name}"
                    self.warn(f"{field}: it is not known here, and is left out", once=field)
            self.parts(one.get("content"), Part, PART, f"{where}.content[]")


class Part(msgspec.Struct):
    """A part of a message, with the fields of all interfaces that are understood."""

    type: str
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: Any = None
    tool_use_id: str = ""
    content: Any = None
    is_error: bool | None = None


PART: Final = frozenset(
    {"cache_control", "annotations", "logprobs", "signature", "caller", "citations"}
)
"""fields of parts that do not change what the model reads"""


def converted(given: object, shape: type[T], where: str = "") -> T:
    """Return JSON as a Struct; `Refused` names what does not fit."""
    try:
        return msgspec.convert(given, shape)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        path = path.rstrip("`")
        field = where + path if where else path.lstrip(".")
        at = f"{field}: " if field else ""
        raise Refused(at + text, field=field) from None


def _names(shape: type) -> frozenset[str]:
    found = _known.get(shape)
    if found is None:
        found = _known[shape] = frozenset(one.encode_name for one in msgspec.structs.fields(shape))
    return found


_known: dict[type, frozenset[str]] = {}


def sampled(policy: Policy, **asked: float | None) -> None:
    """Warn of sampling settings, by their names in `Sampling`, that are not the run's."""
    for name, value in asked.items():
        policy.sampled(name, value, getattr(policy.sampling, name))


def choice_of_tools(choice: object, policy: Policy) -> bool:
    """Return whether the model may call tools; which ones it has to cannot be honoured."""
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    if kind not in (None, "auto", "none"):
        policy.unknown(
            "tool_choice",
            f"{choice!r} would have the model call a tool, and it answers as it is: 'auto' and "
            "'none' can be chosen",
        )
    return kind != "none"


def at_least_one(count: int | None, field: str) -> int | None:
    """Return a count that is given; `Refused` below 1."""
    if count is not None and count < 1:
        raise Refused(f"{field} is {count}; it must be at least 1", field=field)
    return count


def stops(given: str | Sequence[str] | None, field: str) -> tuple[str, ...]:
    """Return stop sequences; one that is empty is refused."""
    found = () if given is None else (given,) if isinstance(given, str) else tuple(given)
    if "" in found:
        raise Refused(f"{field}: a stop sequence is empty", field=field)
    return found


def text_of(content: object, where: str, kinds: Sequence[str]) -> str:
    """Return the text of a message: a text, or a list of parts of these types."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refused(f"{where}: it must be text or a list of parts", field=where)
    return "\n".join(_part(one, f"{where}[{at}]", kinds) for at, one in enumerate(content))


def _part(part: object, where: str, kinds: Sequence[str]) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind in kinds and isinstance(text, str):
        return text
    if isinstance(kind, str) and kind not in kinds:
        raise Refused(
            f"{where}: a part of type {kind!r} cannot be given to the model, which reads text "
            f"({', '.join(kinds)})",
            field=where,
        )
    raise Refused(f"{where}: a part must have a type and a text", field=where)


def arguments_of(written: object, where: str) -> dict[str, Any]:
    """Return the arguments of a call: an object, or JSON of one. What is no JSON is kept as it is
    under an empty name: the agent tells what it was told."""
    if isinstance(written, Mapping):
        return dict(written)
    if not isinstance(written, str):
        raise Refused(f"{where}: arguments must be JSON", field=where)
    try:
        found = msgspec.json.decode(written) if written.strip() else {}
    except (msgspec.DecodeError, RecursionError):
        return {"": written}
    return found if isinstance(found, dict) else {"": written}


def schema_of(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> Any:
    """Return a tool as OpenAI's chat completions describe it."""
    function: dict[str, Any] = {"name": name, "description": description or ""}
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


class Said:
    """A list of messages that is put together, neighbours of one answer as one message."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._answer: dict[str, Any] | None = None

    def say(self, role: str, content: str) -> None:
        """Append a message that is no answer."""
        self._answer = None
        self.messages.append({"role": role, "content": content})

    def result(self, call_id: str, content: str) -> None:
        """Append what a tool said."""
        self._answer = None
        self.messages.append({"role": "tool", "content": content, "tool_call_id": call_id})

    def answer(
        self, text: str = "", thoughts: str = "", calls: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Append a part of an answer."""
        if self._answer is None:
            self._answer = {"role": "assistant", "content": ""}
            self.messages.append(self._answer)
        for field, more in (("content", text), ("reasoning_content", thoughts)):
            if more:
                before = self._answer.get(field, "")
                self._answer[field] = f"{before}\n{more}" if before else more
        if calls:
            self._answer.setdefault("tool_calls", []).extend(calls)
