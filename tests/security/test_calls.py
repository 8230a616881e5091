"""Attacks on functional cases: answers that try to pass calls without computing the results. All fail with every mechanism."""

from __future__ import annotations

from mtpctl.sandbox.sandbox import Sandbox
from mtpctl.sandbox.session import Judgement, Limits
from tests.fakes.attacks import FORGE, SOURCE, sections, successful
from tests.sandbox.conftest import mechanism, sandbox  # noqa: F401

CASES = [([1], [9137]), ([2], [[9138], 9138])]
ATTACKS = sections(
    r"""
## leaves at once
import os
os._exit(0)
## exits at once
raise SystemExit(0)
## writes verdicts at once
exec(FORGE)
## writes verdicts within a call
def f(x): exec(FORGE)
## leaves within a call
import os
def f(x): os._exit(0)
## returns source code
def f(x): return SOURCE
## returns a built-in
class Solution:
    f = lambda self, x: eval
## is a built-in
f = eval
## raises StopIteration
def f(x): raise StopIteration
## raises StopIteration when it is made
class Solution:
    def __init__(self): raise StopIteration
    def f(self, x): return 9137
## returns what is equal to everything
class Any:
    __eq__ = lambda s, o: True
    __ne__ = lambda s, o: False
def f(x): return Any()
## returns a number that is equal to everything
class Any(int):
    __eq__ = lambda s, o: True
def f(x): return Any(0)
## returns a list that is equal to everything
class Any(list):
    __eq__ = lambda s, o: True
    __iter__ = lambda s: iter([0])
def f(x): return [Any(), Any([Any()])][x - 1]
## has every method
class Any:
    __getattr__ = lambda s, n: lambda *a: s
    __eq__ = lambda s, o: True
class Solution(Any): pass
## replies before it is asked
import os
for reply in (b'{"error": ""}', b'{"objects": {"f": true}}', b'{"value": true}'):
    os.write(5, len(reply).to_bytes(4, 'big') + reply)
    os.write(5, len(reply).to_bytes(4, 'big') + reply)
## does not define it
count = 1
"""
)


def test_no_attack_passes_a_case(sandbox: Sandbox) -> None:  # noqa: F811
    def judge(attack: str) -> Judgement:
        code = f"FORGE = {FORGE!r}\nSOURCE = {SOURCE!r}\n{attack}"
        return sandbox.judge_calls(code, "f", CASES, limits=Limits(cpu_s=1.0, wall_s=10.0))

    assert len(ATTACKS) == 16
    assert successful(ATTACKS, judge, tests=len(CASES)) == {}
