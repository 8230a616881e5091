"""Extraction of code from a response."""

from __future__ import annotations

import sys
from types import FrameType

import pytest

from mtpctl.sandbox.fences import extract_code, parse_blocks, strip_fence

F = "```"
DOCUMENTED = f"def f():\n    '''\n    {F}\n    f()\n    {F}\n    '''\n"
METHOD = "class Solution:\n    def g(self): 1\n"


@pytest.mark.parametrize(
    ("response", "code"),
    [
        (f"Text.\n{F}python\nx = 1\n{F}\nend", "x = 1\n"),
        (f"{F}Python3\nx = 1\n{F}", "x = 1\n"),
        (f"{F}python3.12\nx = 1\n{F}", "x = 1\n"),
        (f'{F}python title="a b.py" {{1,3}}\nx = 1\n{F}', "x = 1\n"),
        (f'{F}title="my file" python\nx = 1\n{F}', "x = 1\n"),
        (f"{F}python:main.py\nx = 1\n{F}", "x = 1\n"),
        (f"{F}main.py\nx = 1\n{F}", "x = 1\n"),
        (f"{F}python{{1,3}}\nx = 1\n{F}", "x = 1\n"),
        (f"{F}{{.python .numberLines}}\nx = 1\n{F}", "x = 1\n"),
        (f"{F} {{#solution .python}}\nx = 1\n{F}", "x = 1\n"),
        (f"{F}{{python}}\nx = 1\n{F}", "x = 1\n"),
        ("~~~python\nx = 1\n~~~", "x = 1\n"),
        (f"~~~~ py\nx = '''\n~~~\n{F}\n'''\n~~~~", f"x = '''\n~~~\n{F}\n'''\n"),
        (f"{F}`python\nx = '''\n{F}\n'''\n{F}`", f"x = '''\n{F}\n'''\n"),
        (f"  {F}python\n  def f():\n    return 1\n  {F}", "def f():\n  return 1\n"),
        (f"1. Text:\n   {F}python\n   def f():\n       return 1\n\n   {F}", "def f():\n    return 1\n\n"),
        (f"- {F}python\n  def f():\n      return 1\n  {F}", "def f():\n    return 1\n"),
        (f"\t{F}python\n\tdef f():\n\t\treturn 1\n\t{F}", "def f():\n\treturn 1\n"),
        (f"> {F}python\n> def f():\n>     return 1\n> {F}", "def f():\n    return 1\n"),
        (f"{F}python\n    def f():\n        return 1\n{F}", "def f():\n    return 1\n"),
        (f"   {F}python\ndef f():\n    return 1\n   {F}", "def f():\n    return 1\n"),
        (f"Text.\r\n{F}python\r\nx = 1\r\ny = 2\r\n{F}\r\n", "x = 1\ny = 2\n"),
        (f"{F}python\n{DOCUMENTED}{F}", DOCUMENTED),
        (f"{F}python\nx = 1\n        {F}\nText.", "x = 1\n"),
        (f"cut off\n{F}python\nx = 1\ny = 2", "x = 1\ny = 2"),
        (f"{F}python\nx = 1\n{F}\nText\n{F}", "x = 1\n"),
        (f"{F}python\nx = 1\n{F}\nagain\n{F}python\n", "x = 1\n"),
        ("x = 1", "x = 1"),
        (f"{F}text\n1\n{F}", f"{F}text\n1\n{F}"),
        (f"`{F}python` is how a block begins", f"`{F}python` is how a block begins"),
    ],
)
def test_code_is_the_content_of_its_fence(response: str, code: str) -> None:
    assert extract_code(response) == code


@pytest.mark.parametrize(
    ("response", "names", "code"),
    [
        (f"{F}python\nx = 1\n{F}\nbetter\n{F}py\nx = 2\n{F}\nend", (), "x = 2\n"),
        (f"{F}\nx = 1\n{F}\nprints\n{F}text\n1\n{F}", (), "x = 1\n"),
        (f"{F}text\n1\n{F}\nthen\n{F}python\nx = 1\n{F}", (), "x = 1\n"),
        (f"{F}python\nx = 1\n{F}\nprints\n{F}\n1\n{F}", (), "x = 1\n"),
        (f"{F}bash\npip\n{F}\n~~~python\nx = 1\n~~~\n{F}json\n[]\n{F}", (), "x = 1\n"),
        (f"{F}python\ndef f(): return 1\n{F}\nUse it:\n{F}python\nprint(f())\n{F}", ("f",), "def f(): return 1\n"),
        (f"{F}python\ndef f(): return 1\n{F}\nBetter:\n{F}python\ndef f(): return 2\n{F}", ("f",), "def f(): return 2\n"),
        (f"{F}python\ndef e(): 1\n{F}\nand\n{F}python\ndef d(): 2\n{F}", ("e", "d"), "def e(): 1\n\ndef d(): 2\n"),
        (f"{F}python\n{METHOD}{F}\n{F}python\nx = Solution().g()\n{F}", ("Solution", "g"), METHOD),
        (f"{F}python\nf = lambda: 1\n{F}\n{F}python\nassert f() == 1\n{F}", ("f",), "f = lambda: 1\n"),
    ],
)
def test_code_of_several_blocks_is_the_answer(response: str, names: tuple[str, ...], code: str) -> None:
    assert extract_code(response, names) == code


def test_blocks_name_their_languages() -> None:
    text = f"{F}\n{F}\n~~~ C++ x=1\n~~~\n{F}Python\n{F}\n{F}pycon\n{F}"
    assert [block.language for block in parse_blocks(text)] == ["", "c++", "python", "pycon"]


def test_text_that_is_one_fenced_block_loses_its_fence() -> None:
    assert strip_fence(f"\n{F}python\nx\ny\n{F}\n") == "x\ny"
    assert strip_fence(f"{F}\nx{F}") == "x"
    for text in ("x", f"{F}python", f"{F}python\nx", f"a\n{F}\nx\n{F}"):
        assert strip_fence(text) == text


HOSTILE = [
    *(f"{F}python\n", f"{F}\n", f"{F}python\nx\n        {F}\n", "~~~\n", f"{F}x\n~~~\n", f"{F}python\n\n"),
    *("`", " ", "- ", "\t", "a=" * 3, f" > {F} a=b\n"),
]


def executed_lines(text: str) -> int:
    """Number of lines of Python that `extract_code` and `strip_fence` execute for a text."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> object:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        extract_code(text)
        strip_fence(text)
    finally:
        sys.settrace(None)
    return count


@pytest.mark.parametrize("part", HOSTILE)
def test_work_grows_linearly_with_the_text(part: str) -> None:
    small, large = (executed_lines(part * repeats) for repeats in (200, 2000))
    assert large <= 12 * small


@pytest.mark.parametrize("part", HOSTILE)
def test_megabyte_of_fences_is_parsed(part: str) -> None:
    """A regular expression with quadratic work would exceed the time limit of the test."""
    text = part * ((1 << 20) // len(part))
    extract_code(text)
    strip_fence(f"{F}{text}")
