"""Frozen dataclasses as JSON and back: a message enters and a value of lists, dicts and scalars leaves, or the reverse.

Called by `pdjax.eventlog`. Generic: what a class looks like is read from its annotations, so a new field or message
needs nothing here. Fields that have their default value are left out, so a log stays short, and one that was written
before a field existed can still be read.
"""

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable
from reprlib import repr as short  # bad data may be as long as its line
from typing import Any, Literal, TypeVar

Json = Any
T = TypeVar("T")


def encode(value: Any) -> Json:
    """JSON of a dataclass, enum, tuple, frozenset or scalar. Floats survive exactly.

    Raises:
        TypeError: the value is, or holds, something else.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if dataclasses.is_dataclass(value):
        kind: Any = type(value)
        # A field without a default has `MISSING`, which nothing equals.
        return {name: encode(held) for name, default in _defaults(kind) if (held := getattr(value, name)) != default}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if isinstance(value, frozenset):
        return sorted(encode(item) for item in value)
    raise TypeError(f"{value!r} is no message: a {type(value).__name__} has no JSON here")


def decode(kind: type[T], data: Json) -> T:
    """The value of type `kind` that `encode` made `data` of.

    Raises:
        ValueError: `data` is no such value; the message names the field.
    """
    hint: Any = kind
    value: T = _reader(hint)(data, kind.__name__)
    return value


def encode_tagged(value: Any) -> Json:
    """One of several classes: its name and its JSON."""
    return {type(value).__name__: encode(value)}


def decode_tagged(union: Any, data: Json) -> Any:
    """A value of one of the dataclasses of `union`. Raises ValueError as `decode` does, and for an unknown name."""
    kinds = {kind.__name__: kind for kind in typing.get_args(union)}
    if not isinstance(data, dict) or len(data) != 1 or (name := next(iter(data))) not in kinds:
        raise ValueError(f"message is {short(data)}; allowed: one of {', '.join(kinds)} with its fields")
    return decode(kinds[name], data[name])


_Read = Callable[[Json, str], Any]  # JSON and where it stood


@functools.cache
def _defaults(kind: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((field.name, field.default) for field in dataclasses.fields(kind))


@functools.cache
def _reader(hint: Any) -> _Read:
    """What reads a value of an annotated type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _fields_reader(hint)
    if origin in (typing.Union, types.UnionType):
        kinds = [arg for arg in args if arg is not type(None)]
        if len(kinds) > 1:
            return lambda data, at: decode_tagged(hint, data)
        inner = _reader(kinds[0])
        return lambda data, at: None if data is None else inner(data, at)
    if origin is tuple and args[-1] is Ellipsis:
        item = _reader(args[0])
        return lambda data, at: tuple(item(entry, at) for entry in _listed(data, at))
    if origin is tuple:
        items = tuple(_reader(arg) for arg in args)
        return lambda data, at: (
            tuple(read(entry, at) for read, entry in zip(items, data, strict=True))
            if len(_listed(data, at)) == len(items)
            else _refuse(data, at, f"a list of {len(items)}")
        )
    if origin is frozenset:
        item = _reader(args[0])
        return lambda data, at: frozenset(item(entry, at) for entry in _listed(data, at))
    if origin is Literal:
        return lambda data, at: data if data in args else _refuse(data, at, f"one of {args}")
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        values = {member.value: member for member in hint}
        return lambda data, at: (
            values[data] if isinstance(data, str) and data in values else _refuse(data, at, f"one of {list(values)}")
        )
    if hint is float:
        return _float
    if hint in (int, str, bool):
        return lambda data, at: data if type(data) is hint else _refuse(data, at, f"of type {hint.__name__}")
    raise TypeError(f"{hint!r} has no JSON here")


def _fields_reader(kind: Any) -> _Read:
    hints = typing.get_type_hints(kind)
    readers: dict[str, _Read] = {}
    required = {field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING}

    def read(data: Json, at: str) -> Any:
        if not readers:  # made when first needed: classes may hold themselves
            readers.update({field.name: _reader(hints[field.name]) for field in dataclasses.fields(kind)})
        if not isinstance(data, dict) or not required <= data.keys() <= readers.keys():
            return _refuse(data, at, f"the fields {', '.join(sorted(readers))}, with {', '.join(sorted(required))}")
        return kind(**{name: readers[name](value, f"{at}.{name}") for name, value in data.items()})

    return read


def _float(data: Json, at: str) -> float:
    try:
        return float(data) if type(data) in (int, float) else _refuse(data, at, "a number")
    except OverflowError:
        return _refuse(data, at, "a number that a float can hold")


def _listed(data: Json, at: str) -> list[Json]:
    return data if isinstance(data, list) else _refuse(data, at, "a list")


def _refuse(data: Json, at: str, allowed: str) -> Any:
    raise ValueError(f"{at} is {short(data)}; allowed: {allowed}")
