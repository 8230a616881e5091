"""Code of the user's own that a recipe names, such as a reward, an environment or a loss: `FILE.py:NAME` or `MODULE:NAME`.

Every process that needs the object loads it by the same text. Mistakes are reported as `UserError` with the recipe field and, where the
user's code itself is at fault, with its file and line.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from mtpctl.errors import UserError

_NEAR = 0.7
"""How like two names are, from 0 to 1, of which one may be meant by the other."""
_LONGEST_DEFAULT = 40
"""Characters of a default that a message still shows."""


def is_reference(text: str) -> bool:
    """Whether `text` names an object of the user's own, and not one that comes with mtpctl: those have no colon."""
    return ":" in text


def load(text: str, field: str) -> object:
    """The object that `text` names, for the recipe field `field`.

    The folder of a file is put at the end of `sys.path`, so that the file can import its neighbours. Raises UserError for a text of
    another form, a file or module that is missing or cannot be imported, and a name that it does not define.
    """
    source, _, name = text.rpartition(":")
    if not source or not name.isidentifier():
        raise UserError(f"{field}: {text!r} is neither FILE.py:NAME nor MODULE:NAME")
    module = _from_file(Path(source).expanduser(), field) if source.endswith(".py") else _from_module(source, field)
    if not hasattr(module, name):
        raise UserError(f"{field}: {source} defines no {name}; {_defined(module, name)}")
    found: object = getattr(module, name)
    return found


def missing_file(text: str) -> str:
    """Say that the file of `text` is not there, with the nearest name; empty where it is there, and for a module. Loads nothing."""
    source = text.rpartition(":")[0]
    path = Path(source).expanduser()
    if not source.endswith(".py") or path.is_file():
        return ""
    if path.is_dir():
        return f"{path} is a folder; name a file"
    near = nearest_file(path, (".py",))
    return f"there is no file {path}; " + (f"did you mean {near}?" if near else f"it was looked for in {path.parent.resolve()}")


def nearest_file(path: Path, suffixes: Collection[str]) -> Path | None:
    """The file of these suffixes beside `path`, which is not there, whose name is nearest to its own; None where none is near.

    Stems are compared alone: by their suffix all files of a kind are alike.
    """
    beside = {each.stem: each for each in sorted(path.parent.glob("*"), reverse=True) if each.suffix in suffixes}
    near = difflib.get_close_matches(path.stem, beside, 1, _NEAR)
    return path.with_name(beside[near[0]].name) if near else None


def from_environment(args: Mapping[str, object], field: str) -> dict[str, object]:
    """The arguments with each text `env:NAME`, at any depth, replaced by that variable's value. Raises UserError if it is not set."""

    def read(value: object, at: str) -> object:
        if isinstance(value, str) and value.startswith("env:"):
            name = value.removeprefix("env:")
            if name not in os.environ:
                raise UserError(f"{at}: {name} is not set in the environment; export it")
            return os.environ[name]
        if isinstance(value, Mapping):
            return {key: read(item, f"{at}.{key}") for key, item in value.items()}
        if isinstance(value, list):
            return [read(item, f"{at}.{number}") for number, item in enumerate(value)]
        return value

    return {key: read(value, f"{field}.{key}") for key, value in args.items()}


def check_call(
    function: Callable[..., object], positional: tuple[str, ...], options: Mapping[str, object], field: str, *, partly: bool = False
) -> None:
    """Raise UserError where `function` cannot be called with these positional arguments and with `options` as keyword arguments.

    `positional` are the names under which the message lists them. `partly`: further arguments may be missing.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # built in C: its arguments cannot be known
        return
    try:
        (signature.bind_partial if partly else signature.bind)(*positional, **options)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        called = ", ".join([*positional, *(f"{key}={value!r}" for key, value in options.items())])
        unknown = next((key for key in options if key not in signature.parameters), "")
        near = difflib.get_close_matches(unknown, signature.parameters, 1, _NEAR)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"{field}: {name}{_short(signature)} cannot be called as {name}({called}): {error}{hint}") from error


def _short(signature: inspect.Signature) -> str:
    """A signature in one line that can be read: without types, and with `…` for a default that is long."""
    shown = []
    for parameter in signature.parameters.values():
        default = parameter.default
        if default is not parameter.empty and len(repr(default)) > _LONGEST_DEFAULT:
            default = _Ellipsis()
        shown.append(parameter.replace(annotation=parameter.empty, default=default))
    return str(signature.replace(parameters=shown, return_annotation=signature.empty))


class _Ellipsis:
    """What stands for a default that is too long to be shown."""

    def __repr__(self) -> str:
        return "…"


def _defined(module: ModuleType, name: str) -> str:
    """The mend where a module defines no `name`: the nearest name that it has, or the functions and classes that are its own."""
    known = [each for each in vars(module) if not each.startswith("_")]
    if near := difflib.get_close_matches(name, known, 1, _NEAR):
        return f"did you mean {near[0]}?"
    own = [each for each in known if getattr(vars(module)[each], "__module__", None) == module.__name__]
    return f"it defines {', '.join(own[:8])}{', …' if len(own) > 8 else ''}" if own else "it defines no function and no class"


def describe_error(error: BaseException, text: str) -> str:
    """`judge.py:12: ValueError: …`: an error that the object named `text` raised, at the innermost line of its own file."""
    source = text.rpartition(":")[0]
    own = os.path.expanduser(source) if source.endswith(".py") else getattr(sys.modules.get(source), "__file__", None)
    where = innermost([(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)], own)
    return f"{where}{': ' if where else ''}{type(error).__name__}: {' '.join(str(error).split())[:300]}".rstrip(": ")


def innermost(frames: Sequence[tuple[str, int]], own: str | None) -> str:
    """`judge.py:12`: the innermost of `frames` (file and line, the outermost first) that is in the file `own`; of all, where none is.

    Empty without frames.
    """
    inside = [frame for frame in frames if own and os.path.realpath(frame[0]) == os.path.realpath(own)] or frames
    return f"{Path(inside[-1][0]).name}:{inside[-1][1]}" if inside else ""


def place_of(found: object) -> str:
    """`judge.py:12`: the line at which a function or class of the user's own begins; its name where Python does not know the line."""
    function = inspect.unwrap(found) if callable(found) else found
    try:
        file, (_, line) = inspect.getsourcefile(function), inspect.getsourcelines(function)  # type: ignore[arg-type]
    except (TypeError, OSError):
        return str(getattr(found, "__name__", type(found).__name__))
    return f"{Path(file or '').name}:{line}"


def _from_file(path: Path, field: str) -> ModuleType:
    if told := missing_file(f"{path}:"):
        raise UserError(f"{field}: {told}")
    path = path.resolve()
    # Under a name of its own, so that two files of one name stay apart; registered, so that its classes can be pickled.
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "the suffix is .py"
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UserError(f"{field}: {_import_error(error, path)}") from error
    return module


def _from_module(source: str, field: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name and (source == error.name or source.startswith(f"{error.name}.")):
            raise UserError(f"{field}: there is no module {error.name}; install it, or name a file as FILE.py:NAME") from error
        raise UserError(f"{field}: {describe_error(error, f'{source}:')}") from error
    except (Exception, SystemExit) as error:
        raise UserError(f"{field}: importing {source}: {describe_error(error, f'{source}:')}") from error


def _import_error(error: BaseException, path: Path) -> str:
    if isinstance(error, SyntaxError):
        return f"{Path(error.filename or path).name}:{error.lineno}: {error.msg}"
    return describe_error(error, f"{path}:")
