"""How tests ask an answer that runs in another process, so that no line of the answer runs where it is judged.

The tests hold a `Remote` for each function and class of the answer. A call sends the arguments as data, and what comes back is data too: a
new list or number of this process, with Python's own `==`. So an answer can return what it likes, and no more: it sees neither tests nor
expected values, cannot end their process, and can patch none but its own.

Objects that are no data stay in the answer's process: `Remote` forwards attributes, calls, indexing, iteration, and operators between two
such objects. Between one of them and data of the tests no operator is forwarded, since an object could claim to equal any value: the two
are unequal, and other operators are a TypeError.

The answer can call functions of the tests that it is given, and do nothing else with them. A list, dict or set that it changes is changed
for the tests when the call returns. Exceptions arrive as the built-in class that they derive from; exception classes of the answer have a
namesake here.
"""

from __future__ import annotations

import builtins
import json
import operator
from collections import deque
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any, NoReturn

from mtpctl.sandbox.frames import read_frame, write_frame

_PLAIN = (bool, int, float, str, type(None))
_ITEMS: dict[str, Callable[[list[Any]], object]] = {"l": list, "t": tuple, "s": set, "f": frozenset, "q": deque}
_NAMED: dict[str, Callable[[str], object]] = {"F": Fraction, "D": Decimal, "b": bytes.fromhex, "a": bytearray.fromhex}
_UNARY = ["neg", "pos", "abs", "invert"]
_BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift"]
_COMPARISONS = ["lt", "le", "gt", "ge", "eq", "ne"]
_OPERATIONS: dict[str, Callable[..., object]] = {
    **{name: getattr(operator, f"__{name}__") for name in _UNARY + _BINARY + _COMPARISONS},
    **{each.__name__: each for each in (len, bool, str, repr, int, float, iter, next, hash, isinstance, getattr, setattr)},
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "call": lambda function, *arguments, **named: function(*arguments, **named),
}


class PeerGone(BaseException):
    """The other process has ended. No Exception, so that no test catches it."""


class Peer:
    """One end of the stream between tests (`trusted`) and answer.

    The trusted end lets the other one call functions that it has been given, and refuses all else.
    """

    def __init__(self, descriptor: int, *, trusted: bool) -> None:
        self._descriptor, self._trusted = descriptor, trusted
        self._given: dict[int, object] = {}
        self._classes: dict[str, type[BaseException]] = {}

    # the tests' end

    def begin(self) -> str:
        """Wait until the answer's code has run: the error that it ended with, or an empty text. Raises PeerGone."""
        return str(self._receive()["error"])[:500]

    def fetch(self, names: list[str]) -> dict[str, object]:
        """What the answer calls so; names that it does not have are left out."""
        found = self._request("names", names)
        return {name: self._decoded(value) for name, value in found.items() if name in names}

    def ask(self, operation: str, *arguments: object, **named: object) -> Any:
        """The result of an operation on the answer's objects. Raises what it raised."""
        sent = [self._encoded(each) for each in arguments]
        reply = self._request("do", operation, sent, {name: self._encoded(each) for name, each in named.items()})
        for place, changed in reply.get("changed", ()):
            _become(arguments[place], self._decoded(changed))
        if "raised" in reply:
            self._raise(*reply["raised"])
        return self._decoded(reply["value"])

    # the answer's end

    def answer(self, space: dict[str, object], error: str) -> None:
        """Say that the code has run, and do what the tests ask until they are done."""
        self._send({"error": error})
        try:
            while True:
                self._serve(self._receive(), space)
        except PeerGone:
            return

    def _serve(self, message: dict[str, Any], space: dict[str, object]) -> None:
        if message["kind"] == "names":
            (names,) = message["with"]
            self._send({name: self._encoded(space[name]) for name in names if name in space})
            return
        operation, sent, named = message["with"]
        reply: dict[str, object] = {}
        try:
            arguments = [self._decoded(each) for each in sent]
            reply["value"] = self._encoded(_OPERATIONS[operation](*arguments, **{k: self._decoded(v) for k, v in named.items()}))
            after = [(place, self._encoded(each)) for place, each in enumerate(arguments) if type(each) in (list, dict, set, bytearray)]
            reply["changed"] = [(place, each) for place, each in after if each != sent[place]]
        except BaseException as raised:
            reply = {"raised": self._described(raised)}
        self._send(reply)

    # both

    def _request(self, kind: str, *arguments: object) -> dict[str, Any]:
        """Send a message and return the reply. Meanwhile the other end may call functions that it was given."""
        self._send({"kind": kind, "with": arguments})
        while "kind" in (message := self._receive()):
            if self._trusted:
                self._call_back(message)
            else:
                self._serve(message, {})
        return message

    def _call_back(self, message: dict[str, Any]) -> None:
        operation, sent, named = message["with"]
        try:
            function, *arguments = (self._decoded(each) for each in sent)
            if operation != "call" or named or sent[0][0] != "o":
                raise TypeError("functions of the tests can be called, and no more")
            self._send({"value": self._encoded(function(*arguments))})
        except Exception as raised:
            self._send({"raised": self._described(raised)})

    def _send(self, message: object) -> None:
        try:
            write_frame(self._descriptor, json.dumps(message).encode())
        except OSError as error:
            raise PeerGone("the other process has ended") from error

    def _receive(self) -> dict[str, Any]:
        try:
            frame = read_frame(self._descriptor)
        except OSError:
            frame = None
        if frame is None:
            raise PeerGone("the answer's process ended")
        message = json.loads(frame)
        if not isinstance(message, dict):
            raise PeerGone("the answer's process sent something else")
        return message

    def _encoded(self, value: object) -> object:
        """A value as JSON. What is no data becomes a number by which the other end can ask for it."""
        if type(value) in _PLAIN:
            return value
        if isinstance(value, Remote):
            return ["o", object.__getattribute__(value, "_number")]
        if isinstance(value, type) and issubclass(value, BaseException) and not self._trusted:
            return ["E", value.__name__, _bases(value)]
        name = getattr(value, "__name__", None) if callable(value) else None
        if isinstance(name, str) and getattr(builtins, name, None) is value:
            return ["B", name]
        for kind, data in _DATA:
            if isinstance(value, kind):
                return data(self, value)
        if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            return ["n", value.dtype.str, value.tolist()] if getattr(value, "shape", ()) else self._encoded(value.tolist())  # type: ignore[attr-defined]
        if self._trusted and not callable(value):
            raise TypeError(f"a {type(value).__name__} of the tests cannot be given to the answer")
        self._given[id(value)] = value
        return ["r", id(value)]

    def _decoded(self, coded: Any) -> Any:
        if type(coded) in _PLAIN:
            return coded
        kind, *rest = coded
        if kind in _ITEMS:
            return _ITEMS[kind]([self._decoded(each) for each in rest[0]])
        if kind == "d":
            return {self._decoded(key): self._decoded(value) for key, value in rest[0]}
        if kind in _NAMED:
            return _NAMED[kind](str(rest[0]))
        if kind == "c":
            return complex(*rest)
        if kind == "g":
            return range(*rest)
        if kind == "o":
            return self._given[rest[0]]
        if kind == "B":
            return getattr(builtins, rest[0])
        if kind == "E":
            return self._namesake(*rest)
        if kind == "n":
            return _array(*rest)
        return Remote(self, rest[0])

    def _described(self, raised: BaseException) -> list[object]:
        arguments = [each for each in raised.args if type(each) in _PLAIN]
        return [type(raised).__name__, _bases(type(raised)), arguments]

    def _raise(self, name: str, bases: list[str], arguments: list[object]) -> NoReturn:
        raise self._namesake(name, bases)(*arguments)

    def _namesake(self, name: str, bases: list[str]) -> type[BaseException]:
        """The exception of that name: Python's, or one that stands for the answer's."""
        known = [getattr(builtins, base, None) for base in bases]
        base = next((each for each in known if isinstance(each, type) and issubclass(each, Exception)), Exception)
        if base.__name__ == name:
            return base
        # Some of Python's own take arguments of their own kind; the namesake takes any.
        body = {"__init__": lambda self, *arguments: Exception.__init__(self, *arguments)}
        return self._classes.setdefault(f"{name}({base.__name__})", type(name, (base,), body))


class Remote:
    """An object of the answer, which stays in its process."""

    __slots__ = ("_number", "_peer")

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def _ask(self, operation: str, *arguments: object, **named: object) -> Any:
        peer: Peer = object.__getattribute__(self, "_peer")
        return peer.ask(operation, self, *arguments, **named)

    def __call__(self, *arguments: object, **named: object) -> Any:
        return self._ask("call", *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return self._ask("getattr", name)

    def __setattr__(self, name: str, value: object) -> None:
        self._ask("setattr", name, value)

    def __iter__(self) -> Iterator[Any]:
        ours = self._ask("iter")
        while True:
            try:
                yield ours._ask("next")
            except StopIteration:
                return

    def __next__(self) -> Any:
        return self._ask("next")

    def __bool__(self) -> bool:
        return bool(self._ask("bool"))

    def __instancecheck__(self, value: object) -> bool:
        peer: Peer = object.__getattribute__(self, "_peer")
        return peer.ask("isinstance", value, self) is True

    def __hash__(self) -> int:
        return int(self._ask("hash"))


def _forwarded(name: str) -> Callable[..., Any]:
    def ask(self: Remote, *arguments: object) -> Any:
        return self._ask(name, *arguments)

    return ask


def _between_two(name: str) -> Callable[..., Any]:
    """An operator between two objects of the answer. One of its objects and data would hand over what may be the expected value."""

    def ask(self: Remote, other: object) -> Any:
        if isinstance(other, Remote):
            return self._ask(name, other)
        if name in ("eq", "ne"):
            return name == "ne"
        return NotImplemented

    return ask


for _name in (*_UNARY, "len", "str", "repr", "int", "float", "getitem", "setitem", "delitem"):
    setattr(Remote, f"__{_name}__", _forwarded(_name))
for _name in (*_BINARY, *_COMPARISONS):
    setattr(Remote, f"__{_name}__", _between_two(_name))


def _bases(kind: type[BaseException]) -> list[str]:
    return [each.__name__ for each in kind.__mro__ if getattr(builtins, each.__name__, None) is each]


def _become(ours: Any, changed: Any) -> None:
    """Give a container of the tests the content that the answer has left in it."""
    if type(ours) is not type(changed):
        return
    if isinstance(ours, list | bytearray):
        ours[:] = changed
    elif isinstance(ours, dict | set):
        ours.clear()
        ours.update(changed)


def _array(kind: str, values: object) -> object:
    import numpy

    if numpy.dtype(kind).kind not in "biufc":
        raise TypeError(f"an array of {kind}")
    return numpy.array(values, dtype=kind)


def _items(mark: str) -> Callable[[Peer, Any], object]:
    return lambda peer, value: [mark, [peer._encoded(each) for each in value]]


_DATA: tuple[tuple[type, Callable[[Peer, Any], object]], ...] = (
    (list, _items("l")),
    (tuple, _items("t")),
    (dict, lambda peer, value: ["d", [[peer._encoded(key), peer._encoded(each)] for key, each in value.items()]]),
    (set, _items("s")),
    (frozenset, _items("f")),
    (deque, _items("q")),
    (range, lambda peer, value: ["g", value.start, value.stop, value.step]),
    (bytes, lambda peer, value: ["b", value.hex()]),
    (bytearray, lambda peer, value: ["a", value.hex()]),
    (complex, lambda peer, value: ["c", value.real, value.imag]),
    (Fraction, lambda peer, value: ["F", str(value)]),
    (Decimal, lambda peer, value: ["D", str(value)]),
    (int, lambda peer, value: int(value)),
    (str, lambda peer, value: str.__str__(value)),
    (float, lambda peer, value: float.__float__(value)),
)
"""Types that cross as data, also what is derived from them, with how: an enum's number, a named tuple as a tuple."""
