"""Encodes plain data as JSON, with an allow-list of types, to transfer values between an answer and its tests.

`encode` and `decode` support these types only. For an object of another type, `encode` calls `refer`, which returns a numbered reference,
and `decode` passes the reference to `resolve`. Decoding calls nothing that the sender names: every constructor is in `_DECODERS`.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from operator import itemgetter
from typing import Any, NoReturn

PLAIN = frozenset((bool, int, float, str, type(None)))
"""Types that JSON supports directly."""
PLAIN_CLASSES: dict[str, type] = {
    kind.__name__: kind
    for kind in (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range, type(None), object)
}
"""Classes that a test may compare with a class that the answer returns."""

_NUMPY_KINDS = ("b", "i", "u", "f", "c")
_ARRAY = re.compile("[<>|=][biufc][0-9]{1,2}", re.ASCII)

Refer = Callable[[object], list[object]]
Resolve = Callable[[str, list[Any]], object]


def encode(value: object, refer: Refer) -> object:
    """The value as JSON; an instance of a subclass is encoded as its base class."""
    kind = type(value)
    if kind in PLAIN:
        return value
    encoder = _ENCODERS.get(kind)
    if encoder is not None:
        return encoder(value, refer)
    if isinstance(value, type):
        return refer(value)
    for base, encoder in _BASES:
        if isinstance(value, base):
            return encoder(value, refer)
    if kind.__module__ == "numpy" and getattr(getattr(value, "dtype", None), "kind", "") in _NUMPY_KINDS:
        items = value.tolist()  # type: ignore[attr-defined]
        return ["n", value.dtype.str, items] if value.shape else encode(items, refer)  # type: ignore[attr-defined]
    return refer(value)


def decode(coded: Any, resolve: Resolve) -> Any:
    """Inverse of `encode`. Raises ValueError, TypeError, IndexError or OverflowError if the input was not written by `encode`."""
    if type(coded) in PLAIN:
        return coded
    kind, *rest = coded
    decoder = _DECODERS.get(kind) if type(kind) is str else None
    return resolve(kind, rest) if decoder is None else decoder(rest, resolve)


def no_references(*value: object) -> NoReturn:
    """`refer` and `resolve` for data without references. Raises ValueError."""
    raise ValueError(f"not plain data: {value}")


def _encode_items(mark: str) -> Callable[[Any, Refer], object]:
    def encode_items(values: Iterable[object], refer: Refer) -> object:
        return [mark, [each if type(each) in PLAIN else encode(each, refer) for each in values]]

    return encode_items


def _encode_pairs(mark: str) -> Callable[[Any, Refer], object]:
    return lambda value, refer: [mark, [[encode(key, refer), encode(each, refer)] for key, each in value.items()]]


def _encode_tuple(value: tuple[object, ...], refer: Refer) -> object:
    """A tuple, or a named tuple with its field names."""
    names = getattr(value, "_fields", None)
    if type(value) is not tuple and isinstance(names, tuple) and len(names) == len(value):
        return ["N", type(value).__name__, list(names), [encode(each, refer) for each in value]]
    return ["t", [encode(each, refer) for each in value]]


_encode_dict = _encode_pairs("d")
_encode_list = _encode_items("l")
_ENCODERS: dict[type, Callable[[Any, Refer], object]] = {
    list: _encode_list,
    tuple: _encode_tuple,
    dict: _encode_dict,
    set: _encode_items("s"),
    frozenset: _encode_items("f"),
    deque: lambda value, refer: ["q", _encode_list(value, refer)[1], value.maxlen],  # type: ignore[index]
    Counter: _encode_pairs("C"),
    OrderedDict: _encode_pairs("O"),
    defaultdict: _encode_pairs("D"),
    range: lambda value, refer: ["g", value.start, value.stop, value.step],
    bytes: lambda value, refer: ["b", value.hex()],
    bytearray: lambda value, refer: ["a", value.hex()],
    complex: lambda value, refer: ["c", value.real, value.imag],
    Fraction: lambda value, refer: ["F", value.numerator, value.denominator],
    Decimal: lambda value, refer: ["M", str(value)],
    datetime: lambda value, refer: ["w", value.isoformat()],
    date: lambda value, refer: ["y", value.isoformat()],
    time: lambda value, refer: ["i", value.isoformat()],
    timedelta: lambda value, refer: ["e", value.days, value.seconds, value.microseconds],
}
_BASES: tuple[tuple[type, Callable[[Any, Refer], object]], ...] = (
    *_ENCODERS.items(),
    (int, lambda value, refer: int(value)),
    (str, lambda value, refer: str.__str__(value)),
    (float, lambda value, refer: float.__float__(value)),
)


def _items(rest: list[Any], resolve: Resolve) -> list[Any]:
    if type(rest[0]) is not list:
        raise TypeError("items must be a list")
    return [each if type(each) in PLAIN else decode(each, resolve) for each in rest[0]]


def _pairs(rest: list[Any], resolve: Resolve) -> list[tuple[Any, Any]]:
    return [(decode(key, resolve), decode(value, resolve)) for key, value in rest[0]]


def _whole(*values: Any) -> tuple[int, ...]:
    """Return the values. Raises TypeError unless all are integers."""
    if any(type(each) is not int for each in values):
        raise TypeError("not an integer")
    return values


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError("not a text")
    return value


def _complex(rest: list[Any], resolve: Resolve) -> object:
    real, imaginary = rest
    if type(real) is not float or type(imaginary) is not float:
        raise TypeError("not a number")
    return complex(real, imaginary)


def _named_tuple(rest: list[Any], resolve: Resolve) -> object:
    """A tuple with attributes. `collections.namedtuple` would compile source code with the names in it."""
    name, fields, coded = rest
    values = _items([coded], resolve)
    if len(fields) != len(values):
        raise ValueError("each field must have one name")
    names = [_text(field) for field in fields]
    attributes: dict[str, object] = {
        field: property(itemgetter(index)) for index, field in enumerate(names) if field.isidentifier() and not field.startswith("_")
    }
    attributes |= {"__slots__": (), "_fields": tuple(names), "_asdict": lambda self: dict(zip(names, self, strict=True))}
    return type(_text(name), (tuple,), attributes)(values)


def _array(rest: list[Any], resolve: Resolve) -> object:
    kind, values = _text(rest[0]), rest[1]
    if not _ARRAY.fullmatch(kind):
        raise TypeError("unsupported array type")
    import numpy

    return numpy.array(values, dtype=kind)


_DECODERS: dict[str, Callable[[list[Any], Resolve], object]] = {
    "l": _items,
    "t": lambda rest, resolve: tuple(_items(rest, resolve)),
    "s": lambda rest, resolve: set(_items(rest, resolve)),
    "f": lambda rest, resolve: frozenset(_items(rest, resolve)),
    "q": lambda rest, resolve: deque(_items(rest, resolve), None if rest[1] is None else _whole(rest[1])[0]),
    "d": lambda rest, resolve: dict(_pairs(rest, resolve)),
    "C": lambda rest, resolve: Counter(dict(_pairs(rest, resolve))),
    "O": lambda rest, resolve: OrderedDict(_pairs(rest, resolve)),
    "D": lambda rest, resolve: defaultdict(None, _pairs(rest, resolve)),
    "g": lambda rest, resolve: range(*_whole(*rest)),
    "b": lambda rest, resolve: bytes.fromhex(_text(rest[0])),
    "a": lambda rest, resolve: bytearray.fromhex(_text(rest[0])),
    "c": _complex,
    "F": lambda rest, resolve: Fraction(*_whole(*rest)),
    "M": lambda rest, resolve: Decimal(_text(rest[0])),
    "w": lambda rest, resolve: datetime.fromisoformat(_text(rest[0])),
    "y": lambda rest, resolve: date.fromisoformat(_text(rest[0])),
    "i": lambda rest, resolve: time.fromisoformat(_text(rest[0])),
    "e": lambda rest, resolve: timedelta(*_whole(*rest)),
    "N": _named_tuple,
    "n": _array,
}
