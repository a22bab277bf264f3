"""Checks the arguments of a call against the method's annotations, before anything is sent.

Annotations are used twice: here, so that a wrong end or a wrong argument is an error where the
graph is built, and on the wire, where arguments and results are decoded by them alone.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

from rlinf_async.channels import LatestReceiver, LatestSender, Receiver, Sender
from rlinf_async.channels.encoded import members, runtime_classes, type_name
from rlinf_async.channels.ends import End
from rlinf_async.channels.errors import WrongItemType
from rlinf_async.channels.items import ItemRule, decodes_alike, value_rule
from rlinf_async.workers.base import BuildError, Worker

END_KINDS: tuple[type, ...] = (Sender, Receiver, LatestSender, LatestReceiver)
CONTAINERS: tuple[type, ...] = (list, tuple, dict)
"""types of arguments that may contain ends"""
AnyEnd = End | LatestSender[Any] | LatestReceiver[Any]


class Method:
    """One async method of a worker class: its name, its signature, its types."""

    def __init__(self, cls: type[Worker], function: Callable[..., Any]) -> None:
        self.name = _own_name(cls, function)
        self.label = f"{cls.__name__}.{self.name}"
        real = getattr(cls, self.name)
        hints = _resolved(real, self.label)
        self.returns = hints.pop("return", Any)
        signature = inspect.signature(real)
        parameters = list(signature.parameters.values())[1:]
        self.signature = signature.replace(parameters=parameters)
        if any(p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters):
            raise BuildError(
                f"{self.label}: a method that is called from outside takes plain named parameters, "
                f"not {signature}"
            )
        self.types: dict[str, Any] = {p.name: hints.get(p.name, Any) for p in parameters}

        plain = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
        self._by_place = tuple(self.types) if plain else ()
        self._rules = {
            name: self._rule(kind, name, f": parameter {name!r} wants", END_KINDS)
            for name, kind in self.types.items()
        }
        self._result = self._rule(self.returns, "what it returns", " returns")

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """The checked arguments by name, and whether channel ends are among them.

        Raises:
            BuildError: wrong number, wrong end, wrong type; names both sides.
        """
        if not kwargs and len(args) == len(self._by_place):
            arguments = dict(zip(self._by_place, args, strict=True))
        else:
            arguments = self._bound(args, kwargs)
        has_ends = False
        for name, value in arguments.items():
            if not self._rules[name].fits(value):
                has_ends |= self._check(name, value)
        return arguments, has_ends

    def check_result(self, value: Any) -> None:
        """Refuse a result that would not arrive as what it is.

        Raises:
            WrongItemType: naming the method, the place in the result, and what is there.
        """
        self._result.check(value)

    def _rule(self, kind: Any, what: str, said: str, ends: tuple[type, ...] = ()) -> ItemRule:
        try:
            return value_rule(kind, f"{self.label}{said} {describe(kind)}", ends)
        except TypeError as error:
            raise BuildError(
                f"{self.label} cannot be called from outside: {what}: {error}"
            ) from error

    def _bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return self.signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise BuildError(f"{self.label}: {error}") from None

    def _check(self, name: str, value: Any) -> bool:
        """Check an argument, and return whether it contains ends."""
        try:
            if not holds_ends(value):
                self._rules[name].check(value)
                return False
            problem = mismatch(self.types[name], value)
            if problem:
                raise BuildError(f"{self.label}: parameter {name!r} {problem}")
            self._check_beside_ends(name, self.types[name], value)
        except WrongItemType as error:
            raise BuildError(str(error)) from error
        return True

    def _check_beside_ends(self, name: str, wanted: Any, value: Any) -> None:
        """Check what stands beside ends in a list, tuple or dict, by the rule for any argument."""
        what = f": parameter {name!r} wants, beside ends of channels,"
        if not holds_ends(value):
            self._rule(wanted, name, what, END_KINDS).check(value)
        elif type(value) in CONTAINERS:
            choices = get_args(wanted) if get_origin(wanted) in (Union, UnionType) else (wanted,)
            fitting = next(one for one in choices if not _first_mismatch(one, value))
            if type(value) is dict:
                of: Any = dict
                of_keys, _ = get_args(fitting) or (Any, Any)
                self._rule(of[of_keys, None], name, what).check(dict.fromkeys(value))
            for kind, part in _inside(fitting, value):
                self._check_beside_ends(name, kind, part)


def _own_name(cls: type[Worker], function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", "")
    owners = [base for base in cls.__mro__ if vars(base).get(name) is function]
    if name and not owners and hasattr(cls, name):
        given = getattr(function, "__qualname__", repr(function))
        raise BuildError(
            f"{cls.__name__} is called with {given}, which is not a method of {cls.__name__} or of "
            f"a class it derives from: pass {cls.__name__}.{name}"
        )
    if not owners or not inspect.iscoroutinefunction(getattr(cls, name)):
        raise BuildError(
            f"{cls.__name__} has no async method {name or function!r}: "
            f"pass a method of the class, like {cls.__name__}.run"
        )
    return name


def _resolved(function: Callable[..., Any], label: str) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except (NameError, AttributeError) as error:
        raise BuildError(
            f"{label}: its annotations cannot be resolved ({error}): types of messages "
            "must be importable at run time, not only under TYPE_CHECKING"
        ) from None


_methods: dict[tuple[type[Worker], object], Method] = {}


def method_of(cls: type[Worker], function: Callable[..., Any]) -> Method:
    """The method of a class; where a subclass overrides ``function``, the subclass's version."""
    found = _methods.get((cls, function))
    if found is None:
        found = _methods[cls, function] = Method(cls, function)
    return found


def mismatch(wanted: Any, value: Any) -> str:
    """Return why a value does not fit an annotation, ends inside lists and dicts included; empty
    where it does."""
    if not holds_ends(value):
        return argument_mismatch(wanted, value)
    choices = get_args(wanted) if get_origin(wanted) in (Union, UnionType) else (wanted,)
    problems = [_first_mismatch(one, value) for one in choices]
    return "" if "" in problems else problems[0]


def _first_mismatch(wanted: Any, value: Any) -> str:
    if isinstance(value, END_KINDS):
        return end_mismatch(wanted, value)
    found = (mismatch(of, part) for of, part in _inside(wanted, value))
    return next(filter(None, found), "") or argument_mismatch(wanted, value)


def holds_ends(value: Any) -> bool:
    """Whether a value is an end of a channel, or a list, tuple or dict that contains one."""
    if type(value) in CONTAINERS:
        return any(holds_ends(part) for _, part in _inside(Any, value))
    return isinstance(value, END_KINDS)


def _inside(wanted: Any, value: Any) -> list[tuple[Any, Any]]:
    """Each value inside a list, tuple or dict, with its annotation."""
    types = get_args(wanted)
    if type(value) is dict:
        return [(types[-1] if types else Any, part) for part in value.values()]
    if get_origin(wanted) is tuple and len(types) == len(value) and Ellipsis not in types:
        return list(zip(types, value, strict=True))
    return [(types[0] if types else Any, part) for part in value]


def end_mismatch(wanted: Any, end: Any) -> str:
    """Return why a channel end does not fit an annotation; empty where it does."""
    kind = _kind(end)
    given = f"{kind.__name__}[{describe(end.item_type)}] of channel {end.channel_name!r}"
    if wanted is Any:
        return (
            f"is given a {given}, but is not annotated: write {kind.__name__}[...] there, "
            "items are decoded by it"
        )
    if wanted is kind:
        return f"is a bare {kind.__name__}: write {kind.__name__}[{type_name(end.item_type)}]"
    if get_origin(wanted) is not kind:
        return f"wants {describe(wanted)}, but is given a {given}"
    (item_type,) = get_args(wanted)
    sends = kind in (Sender, LatestSender)
    narrow, wide = (item_type, end.item_type) if sends else (end.item_type, item_type)
    too_wide = sends and _is_untyped(narrow) and not _is_untyped(wide)
    if is_subtype(narrow, wide) and not too_wide:
        return ""
    return f"wants {describe(wanted)}, but is given a {given}{_hint(item_type, end, kind)}"


def _hint(wanted: Any, end: Any, kind: type) -> str:
    """What to do where one side does not declare the type of its items."""
    found = describe(end.item_type)
    if _is_untyped(wanted):
        why = (
            "that channel takes nothing else"
            if kind in (Sender, LatestSender)
            else "what is no plain value would arrive as a dict or a list"
        )
        return f": {why}; write {kind.__name__}[{found}] there"
    if _is_untyped(end.item_type):
        return f", which carries plain values only: make it a channel of {describe(wanted)}"
    return ""


def argument_mismatch(wanted: Any, value: Any) -> str:
    """Return why a value beside ends does not fit its annotation; empty where it does."""
    if isinstance(value, runtime_classes(wanted)):
        return ""
    return f"wants {describe(wanted)}, not {type(value).__name__} (got {value!r:.80})"


def is_subtype(narrow: Any, wide: Any) -> bool:
    """Whether items of one type are accepted as the other: each member of a union."""
    if narrow == wide:
        return True
    if _is_untyped(wide):
        return decodes_alike(narrow)
    if _is_untyped(narrow):
        return decodes_alike(wide)
    return all(any(_fits(one, other) for other in members(wide)) for one in members(narrow))


def _fits(narrow: Any, wide: Any) -> bool:
    """Whether what is put as one type is the same as the other: a message would arrive as one of
    another class."""
    if narrow == wide:
        return True
    if not (isinstance(narrow, type) and isinstance(wide, type) and issubclass(narrow, wide)):
        return False
    has_fields = issubclass(narrow, msgspec.Struct) or dataclasses.is_dataclass(narrow)
    return not has_fields and narrow is not bool


def _is_untyped(item_type: Any) -> bool:
    return item_type is Any or item_type is object


def describe(annotation: Any) -> str:
    """An annotation as a person writes it: ``Receiver[Number]``."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return " | ".join(map(describe, args))
    if origin is None or not args:
        return type_name(annotation)
    return f"{type_name(origin)}[{', '.join(describe(part) for part in args)}]"


def _kind(end: Any) -> type:
    return next(kind for kind in END_KINDS if isinstance(end, kind))
