"""Messages between tests and an answer that runs in another process, so that the tests' process runs no code of the answer.

`TestsPeer` is trusted. `AnswerPeer` is not: it runs in the answer's process, and code of the answer may overwrite it. Tests receive plain
data or proxies (`values`), never functions or classes. Names that the answer chose are looked up only in the allow-lists of exception
classes (`_EXCEPTIONS`) and of built-in types. Exception classes of the answer are replaced by stand-ins. A call that raises StopIteration
raises RuntimeError in the tests, as in a generator (PEP 479); otherwise `all(map(f, xs))` would stop at the first call and pass.

The answer can call functions that tests pass to it. If it changes a list, dict, set or bytearray of the tests, the change is copied to the
tests when the call returns.
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
from types import FunctionType
from typing import Any

from mtpctl.sandbox import values
from mtpctl.sandbox.messages import read_frame, write_frame
from mtpctl.sandbox.values import Remote

MAX_FRAME_BYTES = 1 << 26
"""Maximum size of a message to the tests, in bytes."""
_STOP_ITERATIONS = (StopIteration, StopAsyncIteration)
_EXCEPTIONS: dict[str, type[Exception]] = {
    kind.__name__: RuntimeError if issubclass(kind, _STOP_ITERATIONS) else kind
    for kind in vars(builtins).values()
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, BaseExceptionGroup)
}
_MUTABLE = (list, dict, set, bytearray)
_OF_RECEIVER, _OF_SENDER, _EXCEPTION_CLASS, _IMPORTABLE = "o", "r", "E", "I"
"""Tags of references. OF_RECEIVER: an object of the receiving process, by its number, or a built-in class, by its name. OF_SENDER: an
object of the sending process, for which the receiver makes a proxy. EXCEPTION_CLASS: an exception class of the answer. IMPORTABLE: a
function or class that the answer imports, by module and name."""


class PeerGone(BaseException):
    """The other process has ended, or sent an invalid message. Not an Exception, so that no test catches it."""


class _Peer:
    """One of the two processes that exchange messages."""

    def __init__(self, descriptor: int, max_frame: int) -> None:
        self._descriptor, self._max_frame = descriptor, max_frame
        self._referenced: dict[int, object] = {}
        self._lock = threading.RLock()

    def _encode(self, value: object) -> object:
        return values.encode(
            value, lambda item: [_OF_RECEIVER, values.remote_id(item)] if isinstance(item, Remote) else self._reference(item)
        )

    def _decode(self, coded: Any) -> Any:
        return values.decode(coded, self._resolve)

    def _reference(self, value: object) -> list[object]:
        """Encode an object of this process that is not plain data."""
        raise NotImplementedError

    def _resolve(self, kind: str, fields: list[Any]) -> object:
        """Decode a reference."""
        raise NotImplementedError

    def _register(self, value: object) -> int:
        """Keep an object of this process. Returns its number in references."""
        self._referenced[id(value)] = value
        return id(value)

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


class TestsPeer(_Peer):
    """The tests' process.

    Attributes:
        gone: why the answer is no longer available; empty while it is.
        received: whether data of the answer was received. None, booleans and proxies do not count, because they contain no text to run.
    """

    __test__ = False

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, MAX_FRAME_BYTES)
        self.gone = ""
        self.received = False
        self._silenced = False
        self._remotes: dict[int, Remote] = {}
        self._stand_ins: dict[object, type[Exception]] = {}
        self._class_ids: dict[type, int | str] = {}

    def begin(self) -> str:
        """Wait until the answer's code has run. Returns its error, or an empty string. Raises PeerGone."""
        with self._fail_on_invalid_message():
            return str(self._receive()["error"])[:500]

    def fetch(self, names: list[str]) -> dict[str, object]:
        """The answer's objects with these names. Names that the answer does not define are omitted. Raises PeerGone."""
        with self._lock, self._fail_on_invalid_message():
            self._send(["names", names])
            objects = self._receive_reply()["objects"]
            return {name: self._decode(objects[name]) for name in names if name in objects}

    def ask(self, operation: str, *arguments: object, **keywords: object) -> Any:
        """Execute an operation on the answer's objects and return its result. Raises the exception of the operation, or PeerGone."""
        if self.gone or self._silenced:
            raise PeerGone(self.gone or "the test has ended")
        with self._lock:
            encoded = [self._encode(item) for item in arguments]
            keywords = {name: self._encode(item) for name, item in keywords.items()}
            with self._fail_on_invalid_message():
                self._send([operation, encoded, keywords])
                reply = self._receive_reply()
                for index, content in reply.get("changed", ()):
                    _copy_content(arguments[index], self._decode(content))
                if "raised" not in reply:
                    return self._decode(reply["value"])
                error = self._decode_exception(operation, reply["raised"])
            raise error

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Send no requests to the answer while the block runs."""
        self._silenced = True
        try:
            yield
        finally:
            self._silenced = False

    @contextmanager
    def _fail_on_invalid_message(self) -> Iterator[None]:
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

    def _receive_reply(self) -> dict[str, Any]:
        """Wait for the next reply, and meanwhile serve the answer's calls of functions of the tests."""
        while "call" in (message := self._receive()):
            self._serve_callback(message["call"])
        if not isinstance(message, dict):
            raise TypeError("a reply must be a mapping")
        return message

    def _serve_callback(self, encoded: list[Any]) -> None:
        function, *arguments = (self._decode(item) for item in encoded)
        self.received = True
        if encoded[0][0] != _OF_RECEIVER or isinstance(function, Remote):
            reply: dict[str, object] = {"raised": ["TypeError", "functions of the tests support calls only"]}
        else:
            try:
                reply = {"value": self._encode(function(*arguments))}
            except Exception as error:
                reply = {"raised": [type(error).__name__, *(item for item in error.args if type(item) in values.PLAIN)]}
        self._send(reply)

    def _reference(self, value: object) -> list[object]:
        if isinstance(value, type) and value in self._class_ids:
            return [_OF_RECEIVER, self._class_ids[value]]
        if not callable(value):
            raise TypeError(f"a {type(value).__name__} of the tests cannot be passed to the answer")
        name = _importable_name(value)
        return [_IMPORTABLE, *name] if name else [_OF_SENDER, self._register(value)]

    def _decode(self, coded: Any) -> Any:
        value = super()._decode(coded)
        self.received |= not (value is None or isinstance(value, bool | Remote))
        return value

    def _resolve(self, kind: str, fields: list[Any]) -> object:
        """The proxy of an object of the answer, the stand-in for its exception class, or a function of the tests."""
        object_id = fields[0]
        if kind == _OF_RECEIVER:
            return self._referenced[object_id]
        if kind == _EXCEPTION_CLASS:
            answer_classes, base = fields
            stand_in = self._stand_in_class(answer_classes, base)
            self._class_ids[stand_in] = answer_classes[0][0] if answer_classes else base
            return stand_in
        special_methods, builtin_name = fields[1:]
        if kind != _OF_SENDER or type(object_id) is not int or type(special_methods) is not int:
            raise TypeError("no reference")
        if object_id not in self._remotes:
            self._remotes[object_id] = values.make_remote(self, object_id, special_methods, values.PLAIN_CLASSES.get(builtin_name))
        return self._remotes[object_id]

    def _stand_in_class(self, answer_classes: list[list[Any]], base: str) -> type[Exception]:
        """The stand-in for an exception class of the answer. `answer_classes`, `base`: see `AnswerPeer._answer_classes`.

        If `answer_classes` is empty, the stand-in is for the built-in class `base`, which is identified by its name instead of a number.

        The stand-in is always a new class. If it were the built-in AssertionError, an `except` for the answer's exception would also catch
        failed assertions of the tests.
        """
        stand_in = _EXCEPTIONS.get(base, Exception)
        for class_id, name in reversed(answer_classes or [[base, base]]):
            if class_id not in self._stand_ins:
                self._stand_ins[class_id] = type(str(name), (stand_in,), {"__init__": _init_stand_in, "__str__": _str_stand_in})
            stand_in = self._stand_ins[class_id]
        return stand_in

    def _decode_exception(self, operation: str, encoded: list[Any]) -> Exception:
        answer_classes, base, arguments, text, attributes = encoded
        self.received = True
        decoded_arguments = [self._decode(item) for item in arguments]
        if base == "StopIteration" and not answer_classes:
            if operation == "next":
                return StopIteration(*decoded_arguments)
            decoded_arguments = decoded_arguments or ["the answer raised StopIteration"]
        known_class = self._stand_ins.get(base) or _EXCEPTIONS.get(base)
        error_class = known_class if known_class and not answer_classes else self._stand_in_class(answer_classes, base)
        try:
            error = error_class(*decoded_arguments)
        except TypeError:  # the built-in class requires other arguments; a stand-in directly below Exception accepts any
            error = self._stand_in_class([[f"any {base}", base]], base)(*decoded_arguments)
        if hasattr(error, "_text"):
            error._text = str(text)
        for name, value in attributes.items():
            if name.isidentifier() and not name.startswith("_") and not hasattr(error, name):
                error.__dict__[name] = self._decode(value)
        return error


class AnswerPeer(_Peer):
    """The answer's process: executes the requests of the tests."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, sys.maxsize)

    def answer(self, namespace: dict[str, object], error: str) -> None:
        """Report that the code has run, and execute requests of the tests until they end. `namespace`: the variables of the code."""
        with suppress(PeerGone):
            self._send({"error": error})
            while True:
                self._serve(self._receive(), namespace)

    def ask(self, operation: str, *arguments: object, **keywords: object) -> Any:
        """Call a function of the tests, or execute one of `_LOCAL_OPERATIONS` on it. No other operation is supported."""
        function, *call_arguments = arguments
        if operation in _LOCAL_OPERATIONS:
            return _LOCAL_OPERATIONS[operation](*map(_number_or_value, arguments))
        if operation == "getattr":
            raise AttributeError("a function of the tests has no attributes")
        if operation != "call" or keywords:
            raise TypeError("a function of the tests supports positional arguments only")
        with self._lock:
            self._send({"call": [self._encode(function), *(self._encode(item) for item in call_arguments)]})
            while type(message := self._receive()) is list:
                self._serve(message, {})
        if "raised" in message:
            name, *error_arguments = message["raised"]
            raise _EXCEPTIONS.get(name, Exception)(*error_arguments)
        return self._decode(message["value"])

    def _serve(self, message: list[Any], namespace: dict[str, object]) -> None:
        if message[0] == "names":
            objects: dict[str, object] = {}
            for name in message[1]:
                with suppress(KeyError, RecursionError):
                    objects[name] = self._encode(namespace[name])
            self._send({"objects": objects})
            return
        operation, encoded, keywords = message
        reply: dict[str, object] = {}
        try:
            arguments = [self._decode(item) for item in encoded]
            value = _OPERATIONS[operation](*arguments, **{name: self._decode(item) for name, item in keywords.items()})
            reply["value"] = self._encode(value)
            encoded_after = [(index, self._encode(item)) for index, item in enumerate(arguments) if type(item) in _MUTABLE]
            reply["changed"] = [(index, item) for index, item in encoded_after if item != encoded[index]]
        except PeerGone:
            raise
        except BaseException as error:
            reply = {"raised": self._encode_exception(error)}
        self._send(reply)

    def _reference(self, value: object) -> list[object]:
        if isinstance(value, type) and issubclass(value, Exception):
            return [_EXCEPTION_CLASS, *self._answer_classes(value)]
        builtin_name = value.__name__ if isinstance(value, type) and values.PLAIN_CLASSES.get(value.__name__) is value else None
        return [_OF_SENDER, self._register(value), values.special_method_bits(type(value)), builtin_name]

    def _resolve(self, kind: str, fields: list[Any]) -> object:
        if kind == _OF_RECEIVER:
            return self._referenced[fields[0]] if type(fields[0]) is int else getattr(builtins, fields[0])
        if kind == _IMPORTABLE:
            module, name = fields
            return reduce(getattr, name.split("."), importlib.import_module(module))
        return values.make_remote(self, fields[0], values.special_method_bits(FunctionType))

    def _answer_classes(self, error_class: type[BaseException]) -> tuple[list[list[object]], str]:
        """Number and name of each class in the MRO of `error_class` that is not built in, and the name of the first built-in one."""
        user_classes = [cls for cls in error_class.__mro__ if getattr(builtins, cls.__name__, None) is not cls]
        base = next(cls.__name__ for cls in error_class.__mro__ if cls not in user_classes)
        return [[self._register(cls), cls.__name__] for cls in user_classes], base

    def _encode_exception(self, error: BaseException) -> list[object]:
        answer_classes, base = self._answer_classes(type(error))
        text, arguments, attributes = "", [], {}
        with suppress(Exception):
            arguments = [self._encode(item) for item in error.args]
            text = str(error)
            attributes = {name: self._encode(item) for name, item in vars(error).items()}
        return [answer_classes, base, arguments, text, attributes]


def _number_or_value(value: object) -> object:
    return values.remote_id(value) if isinstance(value, Remote) else value


def _importable_name(value: Any) -> tuple[str, str] | None:
    """Module and name of a function or class that the answer can import itself; None if the tests define it."""
    module = getattr(value, "__module__", None) or getattr(getattr(value, "__objclass__", None), "__module__", None)
    name = getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module not in sys.modules:
        return None
    try:
        return (module, name) if reduce(getattr, name.split("."), sys.modules[module]) is value else None
    except AttributeError:
        return None


def _init_stand_in(self: Exception, *arguments: object) -> None:
    Exception.__init__(self, *arguments)
    self._text = None  # type: ignore[attr-defined]


def _str_stand_in(self: Exception) -> str:
    return Exception.__str__(self) if self._text is None else self._text  # type: ignore[attr-defined,no-any-return]


def _copy_content(target: Any, content: Any) -> None:
    """Copy `content`, the container as the answer left it, to `target`, the container of the tests."""
    if type(target) is not type(content):
        return
    if isinstance(target, list | bytearray):
        target[:] = content
    elif isinstance(target, dict | set):
        target.clear()
        target.update(content)


def _exit(context_manager: Any, error_name: str = "") -> object:
    error_class = getattr(builtins, error_name) if error_name else None
    return type(context_manager).__exit__(context_manager, error_class, error_class() if error_class else None, None)


async def _await_object(awaitable: Any) -> object:
    return await awaitable


_LOCAL_OPERATIONS: dict[str, Callable[..., object]] = {
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
    "await": lambda awaitable: asyncio.run(_await_object(awaitable)),
    "throw": lambda coroutine, *error: coroutine.close(),  # "await" runs a coroutine to its end, so this one has not started
    "close": lambda coroutine: coroutine.close(),
    "enter": lambda manager: type(manager).__enter__(manager),
    "exit": _exit,
}
