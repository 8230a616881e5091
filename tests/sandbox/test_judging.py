"""Tests of answers: features that correct answers may use, and tricks of wrong answers that must not pass."""

from __future__ import annotations

import pytest

from mtpctl.sandbox.sandbox import Sandbox
from mtpctl.sandbox.session import Judgement, Limits
from tests.fakes.attacks import sections, successful

BRIEF = Limits(cpu_s=2.0, wall_s=10.0)


CORRECT = sections(
    """
## numbers, texts and containers
def same(x): return x
--
assert same([1, (2.5, None), {'a': {3}}, 'ü', True, b'x', 2**4000]) == [1, (2.5, None), {'a': {3}}, 'ü', True, b'x', 2**4000]
## types are kept
def same(x): return x
--
for x in ((), [], {}, set(), frozenset(), range(3), 1j, 1.0, True): assert type(same(x)) is type(x)
## what the answer changes is changed
def sort(x): x.sort()
--
x = [3, 1, 2]; assert sort(x) is None; assert x == [1, 2, 3]
## exceptions
class Own(ValueError): pass
def fail(own):
    raise Own('why') if own else KeyError('k')
--
import contextlib
with contextlib.suppress(KeyError): fail(False); assert 0
with contextlib.suppress(Own): fail(True); assert 0
with contextlib.suppress(ValueError): fail(True); assert 0
## objects of the answer
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x)
    def __len__(self): return len(self.items)
    def __getitem__(self, i): return self.items[i]
--
s = Stack(); s.push(3); assert len(s) == 1 and s.items == [3] and s[0] == 3
assert isinstance(s, Stack) and not isinstance(3, Stack) and 3 in s and 4 not in s
## operators between objects of the answer
class V:
    def __init__(self, x): self.x = x
    def __add__(self, o): return V(self.x + o.x)
    def __eq__(self, o): return self.x == o.x
--
assert (V(1) + V(2)).x == 3
assert V(1) == V(1) and V(1) != V(2)
## generators
def count(n): yield from range(n)
--
assert list(count(3)) == [0, 1, 2]
assert sum(x for x in count(4)) == 6
## functions of the tests
def twice(f, x): return f(f(x))
--
assert twice(lambda x: x + 3, 1) == 7
assert twice(str.upper, 'a') == 'A'
## a function of a test that raises
def tried(f):
    try: return f()
    except ZeroDivisionError: return 'caught'
--
assert tried(lambda: 1 / 0) == 'caught'
## Python's own types as arguments
def cast(kind, x): return kind(x)
--
assert cast(int, '3') == 3 and cast(float, '2') == 2.0
## functions that return functions
def add(x): return lambda y: x + y
--
assert add(1)(2) == 3
## constants
LIMIT = 7
--
assert LIMIT == 7
## modules that only the answer imports
import math
def area(r): return math.pi * r * r
--
assert math.isclose(area(1), 3.141592653589793)
## subclasses of containers
from collections import Counter, defaultdict, namedtuple
P = namedtuple('P', 'x y')
def f(): return Counter('aab'), defaultdict(int, {1: 2}), P(1, 2)
--
assert f() == ({'a': 2, 'b': 1}, {1: 2}, (1, 2))
## recursion, printing and threads
import threading
def f(n):
    print('x')
    t = threading.Thread(target=print)
    t.start(); t.join()
    return n and f(n - 1)
--
assert f(20) == 0
## dates, counters and named tuples
from collections import Counter, OrderedDict, namedtuple
from datetime import date, datetime, timedelta
P = namedtuple('P', 'x y')
def f(day): return day + timedelta(days=1), Counter('aab'), P(1, 2), OrderedDict(a=1)
--
from datetime import date
day, counter, p, ordered = f(date(2024, 2, 28))
assert day == date(2024, 2, 29) and counter.most_common(1) == [('a', 2)] and counter['z'] == 0
assert (p.x, p.y, p) == (1, 2, (1, 2)) and list(ordered) == ['a']
## objects have the abilities of their class and no others
class Plain: pass
class Queue:
    def __iter__(self): return iter([1, 2])
def make(kind): return {'plain': Plain(), 'queue': Queue(), 'function': len, 'class': Plain}[kind]
--
from collections.abc import Iterable
assert [callable(make(each)) for each in ('plain', 'queue', 'function', 'class')] == [False, False, True, True]
assert isinstance(make('queue'), Iterable) and not isinstance(make('plain'), Iterable) and bool(make('plain'))
## objects keep their identity
class Config:
    one = None
    def __new__(cls):
        cls.one = cls.one or super().__new__(cls)
        return cls.one
--
assert Config() is Config() and len({Config(), Config()}) == 1
## copies
class Box:
    def __init__(self): self.items = [1]
--
import copy
a = Box(); b = copy.deepcopy(a); c = copy.copy(a)
a.items.append(2)
a.items = [5]
assert b.items == [1] and c.items == [1] and a.items == [5]
## contexts
class Open:
    def __init__(self): self.log = []
    def __enter__(self): self.log.append('in'); return self
    def __exit__(self, kind, *rest): self.log.append(kind and kind.__name__)
--
with Open() as first: pass
second = Open()
try:
    with second: {}['k']
except KeyError: second.log_seen = True
assert first.log == ['in', None] and second.log == ['in', 'KeyError'] and second.log_seen
## decorators
import functools
def memo(f):
    @functools.wraps(f)
    def call(x):
        if (f, x) not in values: values[f, x] = f(x)
        return values[f, x]
    return call
values = {}
--
calls = []
@memo
def slow(x): calls.append(x); return 2 * x
assert [slow(3), slow(3), slow(4)] == [6, 6, 8] and calls == [3, 4]
## errors with attributes, classes above them and texts
class Error(Exception): pass
class Short(Error):
    def __init__(self, missing): self.missing = missing
    def __str__(self): return f'{self.missing} short'
Alias = ValueError
def pay(n): raise Short(n) if n else Alias('none')
--
import unittest
case = unittest.TestCase()
with case.assertRaises(Error) as caught: pay(3)
assert caught.exception.missing == 3 and str(caught.exception) == '3 short'
with case.assertRaises(Alias): pay(0)
with case.assertRaises(ValueError): pay(0)
## iterators that end
class Count:
    def __init__(self, n): self.n = n
    def __iter__(self): return self
    def __next__(self):
        if not self.n: raise StopIteration
        self.n -= 1
        return self.n
--
it = iter(Count(2))
assert (next(it), next(it), next(it, 'end')) == (1, 0, 'end') and all(x < 3 for x in Count(3))
try: it.__next__(); assert 0
except StopIteration: pass
## classes of plain data
def kind(x): return type(x)
--
assert kind(3) == int and kind('') == str and kind(3) != str and isinstance(5, kind(3)) and not isinstance('', kind(3))
assert {int: 'number'}[kind(3)] == 'number'
## text that tests evaluate
def double(x): return 2 * x
def literal(x): return '[1, 2 + %d]' % x
--
assert double(2) == 4
assert eval('double(3)') == 6 and eval(literal(3)) == [1, 5]
exec('y = double(4)')
assert y == 8
import ast, collections, dataclasses
assert ast.literal_eval(literal(1)[:3] + ']') == [1]
@dataclasses.dataclass
class Case: x: int
P = collections.namedtuple('P', 'a')
assert double(Case(4).x) == double(P(4).a)
## pickles of plain data
import pickle
def dump(x): return pickle.dumps(x)
--
import pickle
x = {'a': [1, 2.5, {3}], 'b': (None, b'x')}
assert pickle.loads(dump(x)) == x
## threads of the tests
class Counter:
    def __init__(self): self.n = 0
    def add(self): self.n += 1
--
from concurrent.futures import ThreadPoolExecutor
c = Counter()
with ThreadPoolExecutor(4) as pool:
    for each in [pool.submit(c.add) for _ in range(40)]: each.result()
assert c.n == 40
## coroutines
import asyncio
async def double(x):
    await asyncio.sleep(0)
    return 2 * x
async def fail(): raise KeyError('k')
--
import asyncio
assert asyncio.run(double(3)) == 6
async def both(): return await asyncio.gather(double(1), double(2)), await double(4)
assert asyncio.run(both()) == ([2, 4], 8)
try: asyncio.run(fail()); assert 0
except KeyError: pass
## enumerations
import enum
class Color(enum.Enum):
    RED = 1
    BLUE = 2
--
assert Color.RED is Color.RED and Color.RED != Color.BLUE and [c.name for c in Color] == ['RED', 'BLUE'] and Color(2) == Color.BLUE
## methods that tests pass
def each(f, xs):
    for x in xs: f(x)
def root(f, x): return f(x)
--
import math
items = []
each(items.append, [1, 2])
assert items == [1, 2] and root(math.sqrt, 9.0) == 3.0 and root(sorted, [2, 1]) == [1, 2]
## numpy
import numpy as np
def f(n): return np.arange(n)
--
assert (f(3) == np.array([0, 1, 2])).all() and f(4).sum() == 6
"""
)


@pytest.mark.parametrize("name", CORRECT)
def test_correct_answer_passes(best: Sandbox, name: str) -> None:
    code, _, tests = CORRECT[name].partition("\n--\n")
    judgement = best.judge(code, [tests], limits=Limits(memory_mb=2048))
    assert judgement.failures == [None], judgement


def test_correct_answers_pass_with_every_mechanism(sandbox: Sandbox) -> None:
    code, _, tests = CORRECT["exceptions"].partition("\n--\n")
    assert sandbox.judge(code, [tests]).passed == 1.0


HIDDEN = [
    "assert f(3) == 9137",
    "assert sorted(f(4)) == [1]",
    "assert abs(f(5) - 3.5) < 1e-6",
    "assert f(6) in (8, 9)",
    "assert not f(7) != 77",
    "assert 7.0 - f(8) == 0",
    "assert 9 in f(9)",
]
"""Tests that an answer passes only if it knows the values."""

WRONG = sections(
    r"""
## is equal to everything
class Any:
    __eq__ = __le__ = __ge__ = __lt__ = __contains__ = lambda s, o: True
    __ne__ = lambda s, o: False
    __sub__ = __abs__ = __iter__ = lambda s, *o: s
    __hash__ = lambda s: 0
def f(x): return Any()
## takes what it is compared with for its answer
class Any:
    __sub__ = __rsub__ = __mod__ = __xor__ = lambda s, o: 0
    __contains__ = lambda s, o: True
    __iter__ = lambda s: iter([])
def f(x): return Any()
## holds what is equal to everything
class Any:
    __eq__ = lambda s, o: True
    __hash__ = lambda s: 0
def f(x): return [Any()]
## is itself a class
class f:
    def __init__(self, x): pass
    def __eq__(self, other): return True
    def __sub__(self, other): return 0.0
## exits within a test
def f(x): raise SystemExit(0)
## replaces AssertionError
import builtins
class Never(Exception): pass
builtins.AssertionError = Never
def f(x): return 0
## replaces built-ins
import builtins
builtins.abs = builtins.sorted = builtins.len = lambda *a: 0
def abs(x): return 0
def sorted(x): return [1]
def f(x): return 0
## looks for the tests
import gc, sys
def f(x):
    frame = sys._getframe()
    while frame:
        for each in list(frame.f_locals.values()) + gc.get_objects():
            if isinstance(each, str) and 'assert' in each and str(9130 + 7) in each: return 9137
        frame = frame.f_back
    return 0
## prints what tests would
print('OK', '1 passed', '{"passed": true}', flush=True)
def f(x): return None
## closes everything
import os
os.closerange(0, 99)
def f(x): return 1
## sends nonsense
import os
def f(x): os.write(5, b'\0\0\0\4null' * 3)
## is stuck
def f(x):
    while True: pass
## is no Python
def f(x: return
## fails
raise ValueError
## does not define it
x = 1
"""
)


def test_no_wrong_answer_passes_a_test(sandbox: Sandbox) -> None:
    assert len(WRONG) == 15
    assert successful(WRONG, lambda code: sandbox.judge(code, HIDDEN, limits=Limits(cpu_s=1.0, wall_s=10.0)), tests=len(HIDDEN)) == {}


def test_answer_can_only_call_functions_of_the_tests(best: Sandbox) -> None:
    """The answer requests the globals of a function of the tests, with messages that its own end would not send."""
    code = """
import json, os
from mtpctl.sandbox.values import remote_id
def apply(function, x):
    reference, replies = ["o", remote_id(function)], []
    for message in ({"call": [["l", []], "__globals__"]}, {"call": [["d", []]]}):
        text = json.dumps(message).encode()
        os.write(5, len(text).to_bytes(4, "big") + text)
        length = int.from_bytes(os.read(5, 4), "big")
        replies.append(os.read(5, length).decode())
    try: function.__globals__
    except AttributeError: replies.append("TypeError")
    return replies
"""
    tests = [
        "SECRET = 9137\nreplies = apply(lambda x: x, 1)\nassert len(replies) == 3 and all('TypeError' in each for each in replies), replies"
    ]
    judgement = best.judge(code, tests, limits=BRIEF)
    assert judgement.failures == [None], judgement


def test_failures_are_reported_for_each_test(best: Sandbox) -> None:
    judgement = best.judge("def f(x): return x", ["assert f(1) == 1", "assert f(1) == 2, 'not two'", "f()", "g()"])
    assert judgement.passed == 0.25
    none, two, missing, name = judgement.failures
    assert (none, two) == (None, "AssertionError: not two")
    assert missing is not None and missing.startswith("TypeError") and name is not None and name.startswith("NameError")


def test_passed_tests_count_if_a_later_one_hangs(best: Sandbox) -> None:
    code = "def f(x):\n    while x: pass\n    return 0"
    judgement: Judgement = best.judge(code, ["assert f(0) == 0", "f(1)", "assert f(0) == 0"], limits=Limits(cpu_s=30, wall_s=1.5))
    assert judgement.timed_out and judgement.failures == [None, "not ended in time", "not ended in time"]


def test_entry_point_may_have_the_name_of_a_built_in(best: Sandbox) -> None:
    code = "def sum(x): return 'own'"
    assert best.judge(code, ["assert sum([1]) == 'own'"], entry_point="sum").passed == 1.0
    assert best.judge(code, ["assert sum([1]) == 1"]).passed == 1.0
