"""Messages between tests and an answer that runs in another process, so that no code of the answer runs where it is judged.

`TestsPeer` is trusted. `AnswerPeer` shares its process with the answer, which may replace it. Tests receive plain data or
proxies (`values`), never functions or classes. Names that the answer chose are looked up only in the allow-lists of exception classes
(`_EXCEPTIONS`) and of built-in types. Exception classes of the answer are replaced by stand-ins. A call that raises StopIteration raises
RuntimeError in the tests, as in a generator (PEP 479); otherwise `all(map(f, xs))` would stop at the first call and pass.

The answer can call functions that tests pass to it. A list, dict or set that it changes is changed for the tests when the call returns.
"""

from __future__ import annotations

import asyncio
import builtins
import copy
import importlib
import json
import operator
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import reduce
from typing import Any

from mtpctl.sandbox import values
from mtpctl.sandbox.messages import read_frame, write_frame
from mtpctl.sandbox.values import Remote

MAX_FRAME = 1 << 26
"""Maximum size of a message to the tests, in bytes."""
_STOPS = (StopIteration, StopAsyncIteration)
_EXCEPTIONS: dict[str, type[Exception]] = {
    kind.__name__: RuntimeError if issubclass(kind, _STOPS) else kind
    for kind in vars(builtins).values()
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, BaseExceptionGroup)
}
_MUTABLE = (list, dict, set, bytearray)


class PeerGone(BaseException):
    """The other process has ended, or sent an invalid message. Not an Exception, so that no test catches it."""


class _End:
    """One end of the stream."""

    def __init__(self, descriptor: int, max_frame: int) -> None:
        self._descriptor, self._max_frame = descriptor, max_frame
        self._referenced: dict[int, object] = {}
        self._lock = threading.RLock()

    def _encode(self, value: object) -> object:
        return values.encode(value, lambda each: ["o", values.number_of(each)] if isinstance(each, Remote) else self._reference(each))

    def _decode(self, coded: Any) -> Any:
        return values.decode(coded, self._resolve)

    def _reference(self, value: object) -> list[object]:
        """Encode an object of this end that is not plain data."""
        raise NotImplementedError

    def _resolve(self, kind: str, rest: list[Any]) -> object:
        """Decode a reference."""
        raise NotImplementedError

    def _refer(self, mark: str, value: object, *rest: object) -> list[object]:
        self._referenced[id(value)] = value
        return [mark, id(value), *rest]

    def _send(self, message: object) -> None:
        try:
            write_frame(self._descriptor, json.dumps(message).encode())
        except OSError as error:
            raise PeerGone("the answer's process ended") from error

    def _receive(self) -> Any:
        try:
            frame = read_frame(self._descriptor, self._max_frame)
        except OSError:
            frame = None
        if frame is None:
            raise PeerGone("the answer's process ended")
        return json.loads(frame)


class TestsPeer(_End):
    """The tests' end. `gone`: why the answer is no longer available. `received`: whether this process has data of the answer."""

    __test__ = False

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, MAX_FRAME)
        self.gone = ""
        self.received = False
        self._silent = False
        self._remotes: dict[int, Remote] = {}
        self._classes: dict[object, type[Exception]] = {}
        self._numbers: dict[type, int | str] = {}

    def begin(self) -> str:
        """Wait until the answer's code has run. Returns its error, or an empty string. Raises PeerGone."""
        with self._strict():
            return str(self._receive()["error"])[:500]

    def fetch(self, names: list[str]) -> dict[str, object]:
        """The answer's objects with these names. Names that the answer does not define are omitted. Raises PeerGone."""
        with self._lock, self._strict():
            self._send(["names", names])
            objects = self._reply()["objects"]
            return {name: self._decode(objects[name]) for name in names if name in objects}

    def ask(self, operation: str, *arguments: object, **named: object) -> Any:
        """Execute an operation on the answer's objects and return its result. Raises the exception of the operation, or PeerGone."""
        if self.gone or self._silent:
            raise PeerGone(self.gone or "the test has ended")
        with self._lock:
            sent = [self._encode(each) for each in arguments]
            named = {name: self._encode(each) for name, each in named.items()}
            with self._strict():
                self._send([operation, sent, named])
                reply = self._reply()
                for index, changed in reply.get("changed", ()):
                    _assign(arguments[index], self._decode(changed))
                if "raised" not in reply:
                    return self._decode(reply["value"])
                error = self._exception(operation, reply["raised"])
            raise error

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Send no requests to the answer while the block runs."""
        self._silent = True
        try:
            yield
        finally:
            self._silent = False

    @contextmanager
    def _strict(self) -> Iterator[None]:
        """End the conversation if the block receives a message that `AnswerPeer` would not send."""
        try:
            yield
        except PeerGone as error:
            self.gone = self.gone or str(error)
            raise
        except RecursionError:  # the message was read completely, so the stream is intact
            raise
        except Exception as error:
            self.gone = "the answer's process sent an invalid reply"
            raise PeerGone(self.gone) from error

    def _reply(self) -> dict[str, Any]:
        """Wait for the next reply. Meanwhile the answer may call functions that tests passed to it."""
        while "call" in (message := self._receive()):
            self._call_back(message["call"])
        if not isinstance(message, dict):
            raise TypeError("a reply must be a mapping")
        return message

    def _call_back(self, sent: list[Any]) -> None:
        function, *arguments = (self._decode(each) for each in sent)
        self.received = True
        if sent[0][0] != "o" or isinstance(function, Remote):
            reply: dict[str, object] = {"raised": ["TypeError", "functions of the tests support calls only"]}
        else:
            try:
                reply = {"value": self._encode(function(*arguments))}
            except Exception as raised:
                reply = {"raised": [type(raised).__name__, *(each for each in raised.args if type(each) in values.PLAIN)]}
        self._send(reply)

    def _reference(self, value: object) -> list[object]:
        if isinstance(value, type) and value in self._numbers:
            return ["o", self._numbers[value]]
        if not callable(value):
            raise TypeError(f"a {type(value).__name__} of the tests cannot be passed to the answer")
        return ["I", *name] if (name := _importable(value)) else self._refer("r", value)

    def _decode(self, coded: Any) -> Any:
        value = super()._decode(coded)
        self.received |= not (value is None or isinstance(value, bool | Remote))
        return value

    def _resolve(self, kind: str, rest: list[Any]) -> object:
        """The proxy of an object of the answer, the stand-in for its exception class, or a function of the tests."""
        number = rest[0]
        if kind == "o":
            return self._referenced[number]
        if kind == "E":
            chain, base = rest
            stand_in = self._stand_in(chain or [[base, base]], base)
            self._numbers[stand_in] = chain[0][0] if chain else base
            return stand_in
        features, plain = rest[1:]
        if kind != "r" or type(number) is not int or type(features) is not int:
            raise TypeError("no reference")
        if number not in self._remotes:
            self._remotes[number] = values.remote(self, number, features, values.PLAIN_CLASSES.get(plain))
        return self._remotes[number]

    def _stand_in(self, chain: list[list[Any]], base: str) -> type[Exception]:
        """The stand-in for an exception class of the answer. `chain`: number and name of each class above the built-in `base`.

        It is never a built-in class, which would catch failed assertions of the tests.
        """
        kind = _EXCEPTIONS.get(base, Exception)
        for number, name in reversed(chain):
            if number not in self._classes:
                self._classes[number] = type(str(name), (kind,), {"__init__": _init, "__str__": _str})
            kind = self._classes[number]
        return kind

    def _exception(self, operation: str, raised: list[Any]) -> Exception:
        chain, base, arguments, text, attributes = raised
        self.received = True
        passed = [self._decode(each) for each in arguments]
        if base == "StopIteration" and not chain:
            if operation == "next":
                return StopIteration(*passed)
            passed = passed or ["the answer raised StopIteration"]
        known = self._classes.get(base) or _EXCEPTIONS.get(base)
        kind = known if known and not chain else self._stand_in(chain or [[base, base]], base)
        try:
            error = kind(*passed)
        except TypeError:  # some built-in exceptions require special arguments
            error = self._stand_in([[f"any {base}", base]], base)(*passed)
        if hasattr(error, "_text"):
            error._text = str(text)
        for name, value in attributes.items():
            if name.isidentifier() and not name.startswith("_") and not hasattr(error, name):
                error.__dict__[name] = self._decode(value)
        return error


class AnswerPeer(_End):
    """The answer's end: executes the requests of the tests."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, sys.maxsize)

    def answer(self, space: dict[str, object], error: str) -> None:
        """Report that the code has run, and execute requests of the tests until they end."""
        with suppress(PeerGone):
            self._send({"error": error})
            while True:
                self._serve(self._receive(), space)

    def ask(self, operation: str, *arguments: object, **named: object) -> Any:
        """Call a function of the tests."""
        function, *passed = arguments
        if operation in _LOCAL:
            return _LOCAL[operation](*map(_number, arguments))
        if operation == "getattr":
            raise AttributeError("a function of the tests has no attributes")
        if operation != "call" or named:
            raise TypeError("a function of the tests supports positional arguments only")
        with self._lock:
            self._send({"call": [self._encode(function), *(self._encode(each) for each in passed)]})
            while type(message := self._receive()) is list:
                self._serve(message, {})
        if "raised" in message:
            name, *rest = message["raised"]
            raise _EXCEPTIONS.get(name, Exception)(*rest)
        return self._decode(message["value"])

    def _serve(self, message: list[Any], space: dict[str, object]) -> None:
        if message[0] == "names":
            objects: dict[str, object] = {}
            for name in message[1]:
                with suppress(KeyError, RecursionError):
                    objects[name] = self._encode(space[name])
            self._send({"objects": objects})
            return
        operation, sent, named = message
        reply: dict[str, object] = {}
        try:
            arguments = [self._decode(each) for each in sent]
            value = _OPERATIONS[operation](*arguments, **{name: self._decode(each) for name, each in named.items()})
            reply["value"] = self._encode(value)
            after = [(index, self._encode(each)) for index, each in enumerate(arguments) if type(each) in _MUTABLE]
            reply["changed"] = [(index, each) for index, each in after if each != sent[index]]
        except PeerGone:
            raise
        except BaseException as raised:
            reply = {"raised": self._described(raised)}
        self._send(reply)

    def _reference(self, value: object) -> list[object]:
        if isinstance(value, type) and issubclass(value, Exception):
            return ["E", *self._chain(value)]
        plain = value.__name__ if isinstance(value, type) and values.PLAIN_CLASSES.get(value.__name__) is value else None
        return self._refer("r", value, values.features_of(type(value)), plain)

    def _resolve(self, kind: str, rest: list[Any]) -> object:
        if kind == "o":
            return self._referenced[rest[0]] if type(rest[0]) is int else getattr(builtins, rest[0])
        if kind == "I":
            module, name = rest
            return reduce(getattr, name.split("."), importlib.import_module(module))
        return values.remote(self, rest[0], values.features_of(type(_number)))

    def _chain(self, kind: type[BaseException]) -> tuple[list[list[object]], str]:
        own = [each for each in kind.__mro__ if getattr(builtins, each.__name__, None) is not each]
        base = next(each.__name__ for each in kind.__mro__ if each not in own)
        return [[self._refer("", each)[1], each.__name__] for each in own], base

    def _described(self, raised: BaseException) -> list[object]:
        chain, base = self._chain(type(raised))
        text, arguments, attributes = "", [], {}
        with suppress(Exception):
            arguments = [self._encode(each) for each in raised.args]
            text = str(raised)
            attributes = {name: self._encode(each) for name, each in vars(raised).items()}
        return [chain, base, arguments, text, attributes]


def _number(value: object) -> object:
    return values.number_of(value) if isinstance(value, Remote) else value


def _importable(value: Any) -> tuple[str, str] | None:
    """Module and name of a function or class that the answer can import itself; None if the tests define it."""
    module = getattr(value, "__module__", None) or getattr(getattr(value, "__objclass__", None), "__module__", None)
    name = getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module not in sys.modules:
        return None
    try:
        return (module, name) if reduce(getattr, name.split("."), sys.modules[module]) is value else None
    except AttributeError:
        return None


def _init(self: Exception, *arguments: object) -> None:
    Exception.__init__(self, *arguments)
    self._text = None  # type: ignore[attr-defined]


def _str(self: Exception) -> str:
    return Exception.__str__(self) if self._text is None else self._text  # type: ignore[attr-defined,no-any-return]


def _assign(own: Any, changed: Any) -> None:
    """Copy the content that the answer left in a container to `own`, the container of the tests."""
    if type(own) is not type(changed):
        return
    if isinstance(own, list | bytearray):
        own[:] = changed
    elif isinstance(own, dict | set):
        own.clear()
        own.update(changed)


def _exit(manager: Any, error: str = "") -> object:
    kind = getattr(builtins, error) if error else None
    return type(manager).__exit__(manager, kind, kind() if kind else None, None)


async def _awaited(awaitable: Any) -> object:
    return await awaitable


_LOCAL: dict[str, Callable[..., object]] = {
    "hash": hash,
    "eq": operator.eq,
    "ne": operator.ne,
    "str": lambda number: "<function of the tests>",
    "repr": lambda number: "<function of the tests>",
}
"""Operations on a function of the tests that the answer's process executes itself. The function is identified by its number."""
_OPERATIONS: dict[str, Callable[..., object]] = {
    **{name: getattr(operator, f"__{name}__") for name in (*values.UNARY, *values.BINARY, *values.COMPARISONS)},
    **{each.__name__: each for each in (len, bool, str, repr, int, float, iter, next, hash, format, getattr, setattr, delattr, dir)},
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "index": operator.index,
    "call": lambda function, *arguments, **named: function(*arguments, **named),
    "instance": lambda kind, value: isinstance(value, kind),
    "subclass": lambda kind, other: issubclass(other, kind),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "await": lambda awaitable: asyncio.run(_awaited(awaitable)),
    "throw": lambda coroutine, *error: coroutine.close(),
    "close": lambda coroutine: coroutine.close(),
    "enter": lambda manager: type(manager).__enter__(manager),
    "exit": _exit,
}
