"""What a call may be given, by the method's annotations, checked before anything is sent.

Annotations decide twice: here, so that a wrong end or a wrong argument is an error where the graph
is built, and on the wire, where arguments and results are decoded by them and by nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_args, get_origin, get_type_hints

from rlinf_async.channels import LatestReceiver, LatestSender, Receiver, Sender
from rlinf_async.channels.ends import End
from rlinf_async.channels.itemtypes import runtime_class, type_name
from rlinf_async.workers.base import Worker
from rlinf_async.workers.errors import BuildError

END_KINDS: tuple[type, ...] = (Sender, Receiver, LatestSender, LatestReceiver)
AnyEnd = End | LatestSender[Any] | LatestReceiver[Any]


class Method:
    """One async method of a worker class: its name, its signature, its types."""

    def __init__(self, cls: type[Worker], function: Callable[..., Any]) -> None:
        name = getattr(function, "__name__", "")
        if getattr(cls, name, None) is None or not inspect.iscoroutinefunction(getattr(cls, name)):
            raise BuildError(
                f"{cls.__name__} has no async method {name or function!r}: "
                f"pass a method of the class, like {cls.__name__}.run"
            )
        self.name = name
        self.label = f"{cls.__name__}.{name}"
        real = getattr(cls, name)
        try:
            hints = get_type_hints(real)
        except NameError as error:
            raise BuildError(
                f"{self.label}: its annotations cannot be resolved ({error}): types of messages "
                "must be importable at run time, not only under TYPE_CHECKING"
            ) from None
        self.returns = hints.pop("return", Any)
        signature = inspect.signature(real)
        parameters = list(signature.parameters.values())[1:]
        self.signature = signature.replace(parameters=parameters)
        variadic = [p for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        if variadic or any(p.kind is p.POSITIONAL_ONLY for p in parameters):
            raise BuildError(
                f"{self.label}: a method that is called from outside takes plain named parameters, "
                f"not {signature}"
            )
        self.types: dict[str, Any] = {p.name: hints.get(p.name, Any) for p in parameters}

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by name, checked against the annotations.

        Raises:
            BuildError: wrong number, wrong end, wrong type; names both sides.
        """
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise BuildError(f"{self.label}: {error}") from None
        for name, value in bound.arguments.items():
            self._check(name, value)
        return dict(bound.arguments)

    def _check(self, name: str, value: Any) -> None:
        wanted = self.types[name]
        if isinstance(value, END_KINDS):
            problem = end_mismatch(wanted, value)
        else:
            problem = argument_mismatch(wanted, value)
        if problem:
            raise BuildError(f"{self.label}: parameter {name!r} {problem}")


_methods: dict[tuple[type[Worker], object], Method] = {}


def method_of(cls: type[Worker], function: Callable[..., Any]) -> Method:
    """The method of this class by this name; a subclass's own version is what counts."""
    found = _methods.get((cls, function))
    if found is None:
        found = _methods[cls, function] = Method(cls, function)
    return found


def end_mismatch(wanted: Any, end: Any) -> str:
    """Why this end does not fit this annotation; empty where it does."""
    kind = _kind(end)
    said = f"{kind.__name__}[{type_name(end.item_type)}] of channel {end.channel_name!r}"
    if wanted is Any:
        return (
            f"is given a {said}, but is not annotated: write {kind.__name__}[...] there, "
            "items are decoded by it"
        )
    if get_origin(wanted) is not kind:
        return f"wants {describe(wanted)}, but is given a {said}"
    (item_type,) = get_args(wanted)
    sends = kind in (Sender, LatestSender)
    narrow, wide = (item_type, end.item_type) if sends else (end.item_type, item_type)
    if not is_subtype(narrow, wide):
        return f"wants {describe(wanted)}, but is given a {said}"
    return ""


def argument_mismatch(wanted: Any, value: Any) -> str:
    """Why this plain argument does not fit this annotation; empty where it does, or nobody can
    tell."""
    if get_origin(wanted) in END_KINDS:
        return f"wants {describe(wanted)}, but is given {type(value).__name__}"
    try:
        classes = runtime_class(wanted)
    except TypeError:
        return ""
    if isinstance(value, classes):
        return ""
    return f"wants {describe(wanted)}, but is given {type(value).__name__} {value!r:.80}"


def is_subtype(narrow: Any, wide: Any) -> bool:
    """Whether items of one type may stand where the other is due."""
    if wide is Any or narrow is Any or narrow == wide:
        return True
    return isinstance(narrow, type) and isinstance(wide, type) and issubclass(narrow, wide)


def describe(annotation: Any) -> str:
    """An annotation as a person writes it: ``Receiver[Number]``."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is None or not args:
        return type_name(annotation)
    return f"{type_name(origin)}[{', '.join(describe(part) for part in args)}]"


def _kind(end: Any) -> type:
    return next(kind for kind in END_KINDS if isinstance(end, kind))
