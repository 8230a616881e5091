"""How values pass between the process of an answer and that of its tests: plain data as JSON, other objects as proxies.

`encode` and `decode` support an allow-list of types. For an object of another type, `encode` calls `refer`, which returns a numbered
reference, and `decode` passes it to `resolve`. Decoding calls nothing that the sender names: every constructor is in `_DECODERS`.

Tests use other objects of the answer by proxies (`Remote`). A proxy has the special methods of its object's class, so that `callable`,
`iter` and `bool` treat it like the object. Attributes with two underscores are not forwarded, except those in `_FORWARDED`, because some
give access to memory: numpy would read the address in `__array_interface__`.

An operator is forwarded between two proxies only. Forwarding data of the tests could reveal the expected value. Therefore
`proxy == data` is False, except for a built-in class that the proxy stands for, and other operators raise TypeError.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from functools import cache
from operator import itemgetter
from typing import Any, NoReturn, Protocol

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


def _integers(*values: Any) -> tuple[int, ...]:
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
    "q": lambda rest, resolve: deque(_items(rest, resolve), None if rest[1] is None else _integers(rest[1])[0]),
    "d": lambda rest, resolve: dict(_pairs(rest, resolve)),
    "C": lambda rest, resolve: Counter(dict(_pairs(rest, resolve))),
    "O": lambda rest, resolve: OrderedDict(_pairs(rest, resolve)),
    "D": lambda rest, resolve: defaultdict(None, _pairs(rest, resolve)),
    "g": lambda rest, resolve: range(*_integers(*rest)),
    "b": lambda rest, resolve: bytes.fromhex(_text(rest[0])),
    "a": lambda rest, resolve: bytearray.fromhex(_text(rest[0])),
    "c": _complex,
    "F": lambda rest, resolve: Fraction(*_integers(*rest)),
    "M": lambda rest, resolve: Decimal(_text(rest[0])),
    "w": lambda rest, resolve: datetime.fromisoformat(_text(rest[0])),
    "y": lambda rest, resolve: date.fromisoformat(_text(rest[0])),
    "i": lambda rest, resolve: time.fromisoformat(_text(rest[0])),
    "e": lambda rest, resolve: timedelta(*_integers(*rest)),
    "N": _named_tuple,
    "n": _array,
}


UNARY = ("neg", "pos", "abs", "invert")
BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_FORWARDED = frozenset(("__name__", "__qualname__", "__module__", "__doc__", "__dict__", "__wrapped__", "__annotations__", "__slots__"))


class Conversation(Protocol):
    """The connection that a proxy uses."""

    def ask(self, operation: str, *arguments: object, **named: object) -> Any: ...


class Remote:
    """An object of the other process."""

    __slots__ = ("_conversation", "_number", "_plain")
    _conversation: Conversation
    _number: int
    _plain: type | None

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__" == name[-2:] and name not in _FORWARDED:
            raise AttributeError(f"{name} of an object of the answer is not available to tests")
        return _ask(self, "getattr", name)

    def __setattr__(self, name: str, value: object) -> None:
        _ask(self, "setattr", name, value)

    def __delattr__(self, name: str) -> None:
        _ask(self, "delattr", name)

    def __dir__(self) -> list[str]:
        return [str(each) for each in _ask(self, "dir")]

    def __hash__(self) -> int:
        return hash(plain) if (plain := plain_of(self)) else _typed(self, "hash", int)

    def __str__(self) -> str:
        return _typed(self, "str", str)

    def __repr__(self) -> str:
        return _typed(self, "repr", str)

    def __format__(self, spec: str) -> str:
        return _typed(self, "format", str, spec)

    def __copy__(self) -> Any:
        return _ask(self, "copy")

    def __deepcopy__(self, memo: object) -> Any:
        return _ask(self, "deepcopy")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("an object of the answer cannot be pickled by tests")

    def __mro_entries__(self, bases: object) -> NoReturn:
        raise TypeError("tests cannot derive from a class of the answer")

    def __instancecheck__(self, value: object) -> bool:
        if plain := plain_of(self):
            return isinstance(value, plain)
        return isinstance(value, Remote) and _ask(self, "instance", value) is True

    def __subclasscheck__(self, value: object) -> bool:
        return isinstance(value, Remote) and _ask(self, "subclass", value) is True


_CONVERSATION, _NUMBER, _PLAIN = (Remote.__dict__[name] for name in Remote.__slots__)
for _name in Remote.__slots__:
    delattr(Remote, _name)  # the object may have attributes with these names


def number_of(remote: Remote) -> int:
    """The number that identifies the object in the other process."""
    number: int = _NUMBER.__get__(remote)
    return number


def plain_of(remote: Remote) -> type | None:
    """The built-in class that the proxy stands for (`PLAIN_CLASSES`); None for other objects."""
    plain: type | None = _PLAIN.__get__(remote)
    return plain


def remote(conversation: Conversation, number: int, features: int, plain: type | None = None) -> Remote:
    """A proxy with the special methods that `features` names (`features_of`)."""
    new = object.__new__(_class(features & _ALL_FEATURES))
    _CONVERSATION.__set__(new, conversation)
    _NUMBER.__set__(new, number)
    _PLAIN.__set__(new, plain)
    return new


def features_of(kind: type[Any]) -> int:
    """The special methods of a class, a bit for each of `_FEATURES`."""
    if kind not in _KNOWN:
        defined = {name for base in reversed(kind.__mro__) for name, method in vars(base).items() if method is not None}
        _KNOWN[kind] = sum(1 << bit for bit, (needed, _) in enumerate(_FEATURES) if not defined.isdisjoint(needed))
    return _KNOWN[kind]


@cache
def _class(features: int) -> type[Remote]:
    methods: dict[str, object] = {"__slots__": ()}
    for bit, (_, added) in enumerate(_FEATURES):
        if features >> bit & 1:
            methods |= added
    return type("Remote", (Remote,), methods)


def _ask(self: Remote, operation: str, *arguments: object, **named: object) -> Any:
    conversation: Conversation = _CONVERSATION.__get__(self)
    return conversation.ask(operation, self, *arguments, **named)


def _typed(self: Remote, operation: str, kind: type, *arguments: object) -> Any:
    """The result of an operation. Raises TypeError unless its class is `kind`."""
    value = _ask(self, operation, *arguments)
    if type(value) is not kind:
        raise TypeError(f"{operation} returned no {kind.__name__}")
    return value


def _call(self: Remote, *arguments: object, **named: object) -> Any:
    return _ask(self, "call", *arguments, **named)


def _iter(self: Remote) -> Iterator[Any]:
    iterator = _ask(self, "iter")
    while True:
        try:
            item = _ask(iterator, "next") if isinstance(iterator, Remote) else next(iterator)
        except StopIteration:
            return
        yield item


def _send(self: Remote, value: object) -> NoReturn:
    """Run the whole coroutine in its process. As with a new coroutine, only None starts it: otherwise `map(x.send, …)` would end early."""
    if value is not None:
        raise TypeError("can't send non-None value to a just-started coroutine")
    raise StopIteration(_ask(self, "await"))


def _await(self: Remote) -> Generator[None, None, Any]:
    return _ask(self, "await")
    yield


def _exit(self: Remote, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
    """Leave the context. An exception of the test always propagates: the answer could suppress a failed assertion."""
    try:
        _ask(self, "exit", *([] if kind is None else [next(each.__name__ for each in kind.__mro__ if each.__module__ == "builtins")]))
    except Exception:
        if kind is None:
            raise
    return False


def _forwarded(name: str, kind: type | None = None) -> Callable[..., Any]:
    if kind is not None:
        return lambda self: _typed(self, name, kind)
    return lambda self, *arguments: _ask(self, name, *arguments)


def _between_two(name: str) -> Callable[..., Any]:
    def ask(self: Remote, other: object) -> Any:
        if isinstance(other, Remote):
            return _ask(self, name, other)
        if name in ("eq", "ne"):
            return (plain_of(self) is other and plain_of(self) is not None) == (name == "eq")
        return NotImplemented

    return ask


for _name in UNARY:
    setattr(Remote, f"__{_name}__", _forwarded(_name))
for _name in (*BINARY, *COMPARISONS):
    setattr(Remote, f"__{_name}__", _between_two(_name))

_FEATURES: tuple[tuple[tuple[str, ...], dict[str, object]], ...] = (
    (("__call__",), {"__call__": _call}),
    (("__iter__", "__getitem__"), {"__iter__": _iter}),
    (("__next__",), {"__next__": _forwarded("next")}),
    (("__len__",), {"__len__": _forwarded("len", int)}),
    (("__bool__", "__len__"), {"__bool__": _forwarded("bool", bool)}),
    (("__getitem__",), {"__getitem__": _forwarded("getitem")}),
    (("__setitem__",), {"__setitem__": _forwarded("setitem")}),
    (("__delitem__",), {"__delitem__": _forwarded("delitem")}),
    (("__int__",), {"__int__": _forwarded("int", int)}),
    (("__float__",), {"__float__": _forwarded("float", float)}),
    (("__index__",), {"__index__": _forwarded("index", int)}),
    (("__await__",), {"__await__": _await}),
    (("cr_await",), {"send": _send, "throw": _forwarded("throw"), "close": _forwarded("close")}),
    (("__enter__",), {"__enter__": _forwarded("enter"), "__exit__": _exit}),
)
_KNOWN: dict[type[Any], int] = {}
_ALL_FEATURES = (1 << len(_FEATURES)) - 1
