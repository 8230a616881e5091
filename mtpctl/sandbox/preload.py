"""What the zygote imports for the runs: modules of the standard library that answers use, and that need no file any more then."""

from __future__ import annotations

import importlib

# fmt: off
MODULES = (
    "abc", "array", "ast", "asyncio", "atexit", "base64", "binascii", "bisect", "bz2", "calendar", "cmath", "cmd", "code", "codecs",
    "collections", "collections.abc", "colorsys", "concurrent.futures", "concurrent.futures.thread", "contextlib", "contextvars", "copy",
    "csv", "ctypes", "dataclasses", "datetime", "decimal", "difflib", "dis", "doctest", "encodings.ascii", "encodings.idna",
    "encodings.latin_1", "encodings.utf_16", "encodings.utf_8_sig", "enum", "errno", "fcntl", "fileinput", "fnmatch", "fractions",
    "functools", "gc", "getopt", "graphlib", "hashlib", "heapq", "hmac", "html", "html.parser", "inspect", "io", "ipaddress", "itertools",
    "json", "keyword", "linecache", "locale", "logging", "lzma", "marshal", "math", "mmap", "numbers", "opcode", "operator", "os",
    "pathlib", "pickle", "platform", "pprint", "queue", "random", "re", "reprlib", "resource", "sched", "secrets", "select", "shlex",
    "shutil", "signal", "socket", "statistics", "string", "stringprep", "struct", "subprocess", "symtable", "sys", "tempfile", "textwrap",
    "threading", "time", "timeit", "token", "tokenize", "traceback", "types", "typing", "unicodedata", "unittest", "unittest.mock",
    "urllib.parse", "uuid", "warnings", "weakref", "xml.etree.ElementTree", "zlib", "zoneinfo", "_strptime", "_pydecimal",
)
# fmt: on


def preload() -> None:
    """Import them all. Those that this interpreter was built without are left out."""
    for name in MODULES:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
