"""User-defined code in a recipe, such as a reward, an environment or a loss: `FILE.py:NAME` or `MODULE:NAME`.

Every process that needs the object loads it from this reference. Errors are `UserError`s that name the recipe field and, for errors in the
user's code, its file and line.
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

_MIN_SIMILARITY = 0.7
"""Minimum similarity of suggested names, from 0 to 1."""
_MAX_DEFAULT_CHARACTERS = 40
"""Maximum number of characters of a default in messages."""


def is_code_reference(text: str) -> bool:
    """Whether `text` names a user-defined object. Names of built-in objects have no colon."""
    return ":" in text


def load(text: str, field: str) -> object:
    """Load the object that `text` names. `field`: the recipe field, for errors.

    The folder of a file is appended to `sys.path`, so that the file can import modules next to it. Raises UserError if the reference is
    invalid, if the file or module cannot be imported, or if it does not define the name.
    """
    source, _, name = text.rpartition(":")
    if not source or not name.isidentifier():
        raise UserError(f"{field}: {text!r} is neither FILE.py:NAME nor MODULE:NAME")
    module = _from_file(Path(source).expanduser(), field) if source.endswith(".py") else _from_module(source, field)
    if not hasattr(module, name):
        raise UserError(f"{field}: {source} defines no {name}; {_missing_name_hint(module, name)}")
    value: object = getattr(module, name)
    return value


def missing_file(text: str) -> str:
    """An error message, with the closest match, if `text` names a file that does not exist; else an empty string."""
    source = text.rpartition(":")[0]
    path = Path(source).expanduser()
    if not source.endswith(".py") or path.is_file():
        return ""
    if path.is_dir():
        return f"{path} is a folder; name a file"
    nearest = nearest_file(path, (".py",))
    return f"there is no file {path}" + (f"; did you mean {nearest}?" if nearest else f" in {path.parent.resolve()}")


def nearest_file(path: Path, suffixes: Collection[str]) -> Path | None:
    """The file next to the missing `path` with one of these suffixes and the most similar stem; None if none is similar."""
    by_stem = {file.stem: file for file in sorted(path.parent.glob("*"), reverse=True) if file.suffix in suffixes}
    matches = difflib.get_close_matches(path.stem, by_stem, 1, _MIN_SIMILARITY)
    return path.with_name(by_stem[matches[0]].name) if matches else None


def from_environment(args: Mapping[str, object], field: str) -> dict[str, object]:
    """Replace each string `env:NAME` in the arguments, at any depth, by that environment variable. Raises UserError if it is not set."""

    def read(value: object, path: str) -> object:
        if isinstance(value, str) and value.startswith("env:"):
            name = value.removeprefix("env:")
            if name not in os.environ:
                raise UserError(f"{path}: {name} is not set in the environment; export it")
            return os.environ[name]
        if isinstance(value, Mapping):
            return {key: read(item, f"{path}.{key}") for key, item in value.items()}
        if isinstance(value, list):
            return [read(item, f"{path}.{index}") for index, item in enumerate(value)]
        return value

    return {key: read(value, f"{field}.{key}") for key, value in args.items()}


def check_call(
    function: Callable[..., object], positional: tuple[str, ...], options: Mapping[str, object], field: str, *, partly: bool = False
) -> None:
    """Raise UserError if the signature of a user-defined function or class does not accept these arguments.

    `positional`: names of the positional arguments. `options`: keyword arguments. `partly`: further arguments are passed later.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # Implemented in C, without a signature.
        return
    try:
        (signature.bind_partial if partly else signature.bind)(*positional, **options)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        arguments = ", ".join([*positional, *(f"{key}={value!r}" for key, value in options.items())])
        unknown = next((key for key in options if key not in signature.parameters), "")
        matches = difflib.get_close_matches(unknown, signature.parameters, 1, _MIN_SIMILARITY)
        hint = f"; did you mean {matches[0]}?" if matches else ""
        raise UserError(f"{field}: {name}{_short(signature)} cannot be called as {name}({arguments}): {error}{hint}") from error


def _short(signature: inspect.Signature) -> str:
    """A signature without annotations, and with `…` for long defaults."""
    parameters = []
    for parameter in signature.parameters.values():
        default = parameter.default
        if default is not parameter.empty and len(repr(default)) > _MAX_DEFAULT_CHARACTERS:
            default = _Ellipsis()
        parameters.append(parameter.replace(annotation=parameter.empty, default=default))
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))


class _Ellipsis:
    """Placeholder of a long default."""

    def __repr__(self) -> str:
        return "…"


def _missing_name_hint(module: ModuleType, name: str) -> str:
    """Hint for a missing `name`: suggests the closest match, or lists the module's own functions and classes."""
    public_names = [each for each in vars(module) if not each.startswith("_")]
    if matches := difflib.get_close_matches(name, public_names, 1, _MIN_SIMILARITY):
        return f"did you mean {matches[0]}?"
    defined = [each for each in public_names if getattr(vars(module)[each], "__module__", None) == module.__name__]
    return f"it defines {', '.join(defined[:8])}{', …' if len(defined) > 8 else ''}" if defined else "it defines no function and no class"


def describe_error(error: BaseException, text: str) -> str:
    """Format an error raised by the object that `text` names, with the innermost line in its file: `judge.py:12: ValueError: …`."""
    source = text.rpartition(":")[0]
    file = os.path.expanduser(source) if source.endswith(".py") else getattr(sys.modules.get(source), "__file__", None)
    location = innermost([(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)], file)
    return f"{location}{': ' if location else ''}{type(error).__name__}: {' '.join(str(error).split())[:300]}".rstrip(": ")


def innermost(frames: Sequence[tuple[str, int]], own: str | None) -> str:
    """The innermost frame in the file `own`, as `judge.py:12`. Falls back to the innermost of all frames; empty without frames.

    `frames`: file and line of each frame, the innermost last.
    """
    if own:
        frames = [frame for frame in frames if os.path.realpath(frame[0]) == os.path.realpath(own)] or frames
    return f"{Path(frames[-1][0]).name}:{frames[-1][1]}" if frames else ""


def location_of(value: object) -> str:
    """The location of a user's function or class, as `judge.py:12`; its name if the location is unknown."""
    function = inspect.unwrap(value) if callable(value) else value
    try:
        file, (_, line) = inspect.getsourcefile(function), inspect.getsourcelines(function)  # type: ignore[arg-type]
    except (TypeError, OSError):
        return str(getattr(value, "__name__", type(value).__name__))
    return f"{Path(file or '').name}:{line}"


def _from_file(path: Path, field: str) -> ModuleType:
    if problem := missing_file(f"{path}:"):
        raise UserError(f"{field}: {problem}")
    path = path.resolve()
    # The hash distinguishes files with the same name. The module is registered in `sys.modules` so that its classes can be pickled.
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
