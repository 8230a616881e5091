"""Encodes values for transfer between an answer's process and that of its tests: plain data as JSON, other objects as proxies.

`encode` and `decode` support an allow-list of types. For an object of another type, `encode` calls `refer`, which returns a numbered
reference, and `decode` passes it to `resolve`. Decoding calls nothing that the sender names: every constructor is in `_DECODERS`.

Tests use other objects of the answer through proxies (`Remote`). A proxy has the special methods of its object's class, so that `callable`,
`iter` and `bool` treat it like the object. Attributes with two underscores are not forwarded, except those in `_FORWARDED_ATTRIBUTES`,
because some give access to memory: numpy would read the address in `__array_interface__`.

An operator is forwarded between two proxies only. Forwarding data of the tests could reveal the expected value. Therefore
`proxy == data` is False, unless the proxy represents the built-in class `data`. Other operators between a proxy and data raise TypeError.
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
_ARRAY_TYPE = re.compile("[<>|=][biufc][0-9]{1,2}", re.ASCII)

Refer = Callable[[object], list[object]]
Resolve = Callable[[str, list[Any]], object]


def encode(value: object, refer: Refer) -> object:
    """Encode a value as JSON. An instance of a subclass is encoded as an instance of its base class."""
    cls = type(value)
    if cls in PLAIN:
        return value
    encoder = _ENCODERS.get(cls)
    if encoder is not None:
        return encoder(value, refer)
    if isinstance(value, type):
        return refer(value)
    for base, encoder in _BASE_ENCODERS:
        if isinstance(value, base):
            return encoder(value, refer)
    if cls.__module__ == "numpy" and getattr(getattr(value, "dtype", None), "kind", "") in _NUMPY_KINDS:
        items = value.tolist()  # type: ignore[attr-defined]
        return ["n", value.dtype.str, items] if value.shape else encode(items, refer)  # type: ignore[attr-defined]
    return refer(value)


def decode(encoded: Any, resolve: Resolve) -> Any:
    """Inverse of `encode`. May raise ValueError, TypeError, IndexError or OverflowError for input that `encode` did not write."""
    if type(encoded) in PLAIN:
        return encoded
    tag, *fields = encoded
    decoder = _DECODERS.get(tag) if type(tag) is str else None
    return resolve(tag, fields) if decoder is None else decoder(fields, resolve)


def reject_references(*value: object) -> NoReturn:
    """The arguments `refer` and `resolve` for data without references. Raises ValueError."""
    raise ValueError(f"not plain data: {value}")


def _encode_items(tag: str) -> Callable[[Any, Refer], object]:
    def encode_items(values: Iterable[object], refer: Refer) -> object:
        return [tag, [item if type(item) in PLAIN else encode(item, refer) for item in values]]

    return encode_items


def _encode_pairs(tag: str) -> Callable[[Any, Refer], object]:
    return lambda value, refer: [tag, [[encode(key, refer), encode(item, refer)] for key, item in value.items()]]


def _encode_tuple(value: tuple[object, ...], refer: Refer) -> object:
    """A tuple, or a named tuple with its field names."""
    names = getattr(value, "_fields", None)
    if type(value) is not tuple and isinstance(names, tuple) and len(names) == len(value):
        return ["N", type(value).__name__, list(names), [encode(item, refer) for item in value]]
    return ["t", [encode(item, refer) for item in value]]


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
_BASE_ENCODERS: tuple[tuple[type, Callable[[Any, Refer], object]], ...] = (
    *_ENCODERS.items(),
    (int, lambda value, refer: int(value)),
    (str, lambda value, refer: str.__str__(value)),
    (float, lambda value, refer: float.__float__(value)),
)


def _decode_items(fields: list[Any], resolve: Resolve) -> list[Any]:
    if type(fields[0]) is not list:
        raise TypeError("items must be a list")
    return [item if type(item) in PLAIN else decode(item, resolve) for item in fields[0]]


def _decode_pairs(fields: list[Any], resolve: Resolve) -> list[tuple[Any, Any]]:
    return [(decode(key, resolve), decode(value, resolve)) for key, value in fields[0]]


def _require_integers(*values: Any) -> tuple[int, ...]:
    """Return the values. Raises TypeError unless all are integers."""
    if any(type(value) is not int for value in values):
        raise TypeError("not an integer")
    return values


def _require_text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError("not a text")
    return value


def _decode_complex(fields: list[Any], resolve: Resolve) -> object:
    real, imaginary = fields
    if type(real) is not float or type(imaginary) is not float:
        raise TypeError("not a number")
    return complex(real, imaginary)


def _decode_named_tuple(parts: list[Any], resolve: Resolve) -> object:
    """Decode to a tuple with attributes. `collections.namedtuple` is avoided: it compiles source code that contains the names."""
    name, fields, encoded_items = parts
    values = _decode_items([encoded_items], resolve)
    if len(fields) != len(values):
        raise ValueError("each field must have one name")
    names = [_require_text(field) for field in fields]
    attributes: dict[str, object] = {
        field: property(itemgetter(index)) for index, field in enumerate(names) if field.isidentifier() and not field.startswith("_")
    }
    attributes |= {"__slots__": (), "_fields": tuple(names), "_asdict": lambda self: dict(zip(names, self, strict=True))}
    return type(_require_text(name), (tuple,), attributes)(values)


def _decode_array(fields: list[Any], resolve: Resolve) -> object:
    dtype, values = _require_text(fields[0]), fields[1]
    if not _ARRAY_TYPE.fullmatch(dtype):
        raise TypeError("unsupported array type")
    import numpy

    return numpy.array(values, dtype=dtype)


_DECODERS: dict[str, Callable[[list[Any], Resolve], object]] = {
    "l": _decode_items,
    "t": lambda fields, resolve: tuple(_decode_items(fields, resolve)),
    "s": lambda fields, resolve: set(_decode_items(fields, resolve)),
    "f": lambda fields, resolve: frozenset(_decode_items(fields, resolve)),
    "q": lambda fields, resolve: deque(_decode_items(fields, resolve), None if fields[1] is None else _require_integers(fields[1])[0]),
    "d": lambda fields, resolve: dict(_decode_pairs(fields, resolve)),
    "C": lambda fields, resolve: Counter(dict(_decode_pairs(fields, resolve))),
    "O": lambda fields, resolve: OrderedDict(_decode_pairs(fields, resolve)),
    "D": lambda fields, resolve: defaultdict(None, _decode_pairs(fields, resolve)),
    "g": lambda fields, resolve: range(*_require_integers(*fields)),
    "b": lambda fields, resolve: bytes.fromhex(_require_text(fields[0])),
    "a": lambda fields, resolve: bytearray.fromhex(_require_text(fields[0])),
    "c": _decode_complex,
    "F": lambda fields, resolve: Fraction(*_require_integers(*fields)),
    "M": lambda fields, resolve: Decimal(_require_text(fields[0])),
    "w": lambda fields, resolve: datetime.fromisoformat(_require_text(fields[0])),
    "y": lambda fields, resolve: date.fromisoformat(_require_text(fields[0])),
    "i": lambda fields, resolve: time.fromisoformat(_require_text(fields[0])),
    "e": lambda fields, resolve: timedelta(*_require_integers(*fields)),
    "N": _decode_named_tuple,
    "n": _decode_array,
}


UNARY = ("neg", "pos", "abs", "invert")
BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_FORWARDED_ATTRIBUTES = frozenset(
    ("__name__", "__qualname__", "__module__", "__doc__", "__dict__", "__wrapped__", "__annotations__", "__slots__")
)


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
        if name[:2] == "__" == name[-2:] and name not in _FORWARDED_ATTRIBUTES:
            raise AttributeError(f"{name} of an object of the answer is not available to tests")
        return _ask(self, "getattr", name)

    def __setattr__(self, name: str, value: object) -> None:
        _ask(self, "setattr", name, value)

    def __delattr__(self, name: str) -> None:
        _ask(self, "delattr", name)

    def __dir__(self) -> list[str]:
        return [str(name) for name in _ask(self, "dir")]

    def __hash__(self) -> int:
        return hash(builtin_class) if (builtin_class := builtin_class_of(self)) else _ask_typed(self, "hash", int)

    def __str__(self) -> str:
        return _ask_typed(self, "str", str)

    def __repr__(self) -> str:
        return _ask_typed(self, "repr", str)

    def __format__(self, spec: str) -> str:
        return _ask_typed(self, "format", str, spec)

    def __copy__(self) -> Any:
        return _ask(self, "copy")

    def __deepcopy__(self, memo: object) -> Any:
        return _ask(self, "deepcopy")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("an object of the answer cannot be pickled by tests")

    def __mro_entries__(self, bases: object) -> NoReturn:
        raise TypeError("tests cannot derive from a class of the answer")

    def __instancecheck__(self, value: object) -> bool:
        if builtin_class := builtin_class_of(self):
            return isinstance(value, builtin_class)
        return isinstance(value, Remote) and _ask(self, "instance", value) is True

    def __subclasscheck__(self, value: object) -> bool:
        return isinstance(value, Remote) and _ask(self, "subclass", value) is True


_CONVERSATION, _NUMBER, _PLAIN = (Remote.__dict__[name] for name in Remote.__slots__)
for _name in Remote.__slots__:
    delattr(Remote, _name)  # the object may have attributes with these names


def remote_id(proxy: Remote) -> int:
    """The number that identifies the object in the other process."""
    object_id: int = _NUMBER.__get__(proxy)
    return object_id


def builtin_class_of(proxy: Remote) -> type | None:
    """The built-in class that the proxy represents (`PLAIN_CLASSES`); None for other objects."""
    builtin_class: type | None = _PLAIN.__get__(proxy)
    return builtin_class


def make_remote(conversation: Conversation, object_id: int, special_methods: int, builtin_class: type | None = None) -> Remote:
    """A proxy with the special methods that `special_methods` names (`special_method_bits`)."""
    proxy = object.__new__(_proxy_class(special_methods & _ALL_FEATURES))
    _CONVERSATION.__set__(proxy, conversation)
    _NUMBER.__set__(proxy, object_id)
    _PLAIN.__set__(proxy, builtin_class)
    return proxy


def special_method_bits(cls: type[Any]) -> int:
    """The special methods of a class, a bit for each of `_FEATURES`."""
    if cls not in _SPECIAL_METHOD_CACHE:
        defined = {name for base in reversed(cls.__mro__) for name, method in vars(base).items() if method is not None}
        _SPECIAL_METHOD_CACHE[cls] = sum(
            1 << bit for bit, (method_names, _) in enumerate(_FEATURES) if not defined.isdisjoint(method_names)
        )
    return _SPECIAL_METHOD_CACHE[cls]


@cache
def _proxy_class(special_methods: int) -> type[Remote]:
    methods: dict[str, object] = {"__slots__": ()}
    for bit, (_, methods_to_add) in enumerate(_FEATURES):
        if special_methods >> bit & 1:
            methods |= methods_to_add
    return type("Remote", (Remote,), methods)


def _ask(self: Remote, operation: str, *arguments: object, **keywords: object) -> Any:
    conversation: Conversation = _CONVERSATION.__get__(self)
    return conversation.ask(operation, self, *arguments, **keywords)


def _ask_typed(self: Remote, operation: str, expected_type: type, *arguments: object) -> Any:
    """The result of an operation. Raises TypeError unless its class is `expected_type`."""
    value = _ask(self, operation, *arguments)
    if type(value) is not expected_type:
        raise TypeError(f"{operation} returned no {expected_type.__name__}")
    return value


def _call(self: Remote, *arguments: object, **keywords: object) -> Any:
    return _ask(self, "call", *arguments, **keywords)


def _iter(self: Remote) -> Iterator[Any]:
    iterator = _ask(self, "iter")
    while True:
        try:
            item = _ask(iterator, "next") if isinstance(iterator, Remote) else next(iterator)
        except StopIteration:
            return
        yield item


def _send(self: Remote, value: object) -> NoReturn:
    """Run the coroutine to its end in its process. As in Python, only None starts a coroutine; else `map(x.send, …)` would end early."""
    if value is not None:
        raise TypeError("can't send non-None value to a just-started coroutine")
    raise StopIteration(_ask(self, "await"))


def _await(self: Remote) -> Generator[None, None, Any]:
    return _ask(self, "await")
    yield


def _exit(self: Remote, error_class: type[BaseException] | None, error: BaseException | None, traceback: object) -> bool:
    """Leave the context. Exceptions of the test always propagate, so that the answer cannot suppress a failed assertion."""
    try:
        _ask(
            self,
            "exit",
            *([] if error_class is None else [next(cls.__name__ for cls in error_class.__mro__ if cls.__module__ == "builtins")]),
        )
    except Exception:
        if error_class is None:
            raise
    return False


def _forward(name: str, result_type: type | None = None) -> Callable[..., Any]:
    if result_type is not None:
        return lambda self: _ask_typed(self, name, result_type)
    return lambda self, *arguments: _ask(self, name, *arguments)


def _forward_between_proxies(name: str) -> Callable[..., Any]:
    def ask(self: Remote, other: object) -> Any:
        if isinstance(other, Remote):
            return _ask(self, name, other)
        if name in ("eq", "ne"):
            return (builtin_class_of(self) is other and builtin_class_of(self) is not None) == (name == "eq")
        return NotImplemented

    return ask


for _name in UNARY:
    setattr(Remote, f"__{_name}__", _forward(_name))
for _name in (*BINARY, *COMPARISONS):
    setattr(Remote, f"__{_name}__", _forward_between_proxies(_name))

_FEATURES: tuple[tuple[tuple[str, ...], dict[str, object]], ...] = (
    (("__call__",), {"__call__": _call}),
    (("__iter__", "__getitem__"), {"__iter__": _iter}),
    (("__next__",), {"__next__": _forward("next")}),
    (("__len__",), {"__len__": _forward("len", int)}),
    (("__bool__", "__len__"), {"__bool__": _forward("bool", bool)}),
    (("__getitem__",), {"__getitem__": _forward("getitem")}),
    (("__setitem__",), {"__setitem__": _forward("setitem")}),
    (("__delitem__",), {"__delitem__": _forward("delitem")}),
    (("__int__",), {"__int__": _forward("int", int)}),
    (("__float__",), {"__float__": _forward("float", float)}),
    (("__index__",), {"__index__": _forward("index", int)}),
    (("__await__",), {"__await__": _await}),
    (("cr_await",), {"send": _send, "throw": _forward("throw"), "close": _forward("close")}),
    (("__enter__",), {"__enter__": _forward("enter"), "__exit__": _exit}),
)
_SPECIAL_METHOD_CACHE: dict[type[Any], int] = {}
_ALL_FEATURES = (1 << len(_FEATURES)) - 1
