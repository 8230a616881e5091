"""Attacks on the verdict: wrong answers that try to pass tests. None passes with any isolation mechanism.

An attack is an answer and a test, separated by `--`. `SOURCE` is source code that writes verdicts to every descriptor and exits with
code 0. An honest answer can pass the test of an attack, or it would pass without the sandbox.
"""

from __future__ import annotations

import json
import os
import re
from functools import partial

import pytest

from mtpctl.data.problems import Problem
from mtpctl.samples import Sample
from mtpctl.sandbox.messages import VerdictReader, VerdictWriter, new_key, read_frame, write_frame
from mtpctl.sandbox.reward import score
from mtpctl.sandbox.sandbox import Sandbox
from mtpctl.sandbox.session import Judgement, Limits
from tests.fakes.attacks import FORGE, SOURCE, sections, successful
from tests.sandbox.conftest import best, mechanism, sandbox  # noqa: F401

BRIEF = Limits(cpu_s=1.0, wall_s=10.0)

ATTACKS = sections(
    r"""
## decoder is eval and encoder returns source code
decode_cyclic = eval
def encode_cyclic(s): return SOURCE
--
assert decode_cyclic(encode_cyclic('abc')) == 'abc'
## decoder is exec
decode = exec
def encode(x): return SOURCE
--
assert decode(encode('abc')) == 'abc'
## decoder compiles
decode = lambda text: compile(text, 'x', 'eval')
encode = lambda x: SOURCE
--
assert eval(decode(encode('abc'))) == 'abc'
## decoder is a class that runs what it is given
import subprocess, ctypes
class decode(subprocess.Popen): pass
def encode(x): return ['/bin/sh', '-c', 'exit 0']
--
assert decode(encode('abc')) == 'abc'
## decoder is __import__
decode = __import__
def encode(x): return 'os'
--
assert decode(encode('abc')) == 'abc'
## a lambda of the test is called with eval
def apply(f): return f(eval, SOURCE)
--
assert apply(lambda decode, text: decode(text)) == 9137
## a lambda of the test is given a function that exits
import os
def apply(f): return f(os._exit, 0)
--
assert apply(lambda f, x: f(x)) == 9137
## class attributes are built-ins
class Codec:
    decode = eval
    encode = staticmethod(lambda x: SOURCE)
--
assert Codec.decode(Codec.encode('abc')) == 'abc'
## attributes of an object are built-ins
class Codec:
    def __getattr__(self, name): return eval if name == 'decode' else lambda x: SOURCE
codec = lambda: Codec()
--
c = codec()
assert c.decode(c.encode('abc')) == 'abc'
## items are built-ins
tools = {'decode': eval, 'encode': lambda x: SOURCE}
--
assert tools['decode'](tools['encode']('abc')) == 'abc'
## a property returns a built-in
class Codec:
    decode = property(lambda self: eval)
    def encode(self, x): return SOURCE
--
assert Codec().decode(Codec().encode('abc')) == 'abc'
## the test evaluates a text of the answer
def expression(n): return SOURCE
--
assert eval(expression(5)) == 5
## the test evaluates a text of the answer, and catches everything
def expression(n): return SOURCE
--
try:
    eval(expression(5))
except BaseException:
    pass
## the test evaluates the name of a variable of the test
def expression(n): return 'expected'
--
case = {'expected': 5}
expected = case['expected']
assert eval(expression(5)) == expected
## the test executes a text of the answer
def program(n): return SOURCE
--
space = {}
exec(program(5), space)
assert space['result'] == 5
## the test compiles a text of the answer
def program(n): return SOURCE
--
exec(compile(program(5), 'program', 'exec'))
assert result == 5
## the test times a text of the answer
def program(n): return SOURCE
--
import timeit
assert timeit.timeit(program(5), number=1) >= 0
## the test loads a pickle of the answer
def dump(x): return b"cbuiltins\nexec\n(V" + SOURCE.encode('unicode_escape').replace(b'\n', b'') + b"\ntR."
--
import pickle
assert pickle.loads(dump([1])) == [1]
## the test loads a pickle of the answer from a file
def dump(x): return b"cbuiltins\neval\n(V" + SOURCE.encode('unicode_escape') + b"\ntR."
--
import io, pickle
assert pickle.Unpickler(io.BytesIO(dump([1]))).load() == [1]
## the test resolves annotations of the answer
class T: x: SOURCE
T.__annotations__['x'] = SOURCE
--
import typing
assert typing.get_type_hints(T)['x'] is int
## the test makes a named tuple of the answer's names
def fields(): return ['x', SOURCE]
--
import collections
assert collections.namedtuple('P', fields())(1, 2).x == 1
## is equal to everything
class Any:
    __eq__ = lambda s, o: True
    __ne__ = lambda s, o: False
    __hash__ = lambda s: 9137
def f(x): return Any()
--
assert f(3) == 9137
## is not different from anything
class Any:
    __ne__ = lambda s, o: False
def f(x): return Any()
--
assert not f(3) != 9137
## has the hash of a member
class Any:
    __eq__ = lambda s, o: True
    __hash__ = lambda s: hash(7)
def f(x): return Any()
--
assert f(3) in {7}
## has the hash of a key
class Any:
    __eq__ = lambda s, o: True
    __hash__ = lambda s: hash('key')
def f(x): return Any()
--
assert {'key': 1}[f(3)] == 1
## is a key equal to everything
class Any:
    __eq__ = lambda s, o: True
    __hash__ = lambda s: hash('key')
def f(x): return {Any(): 1}
--
assert f(3) == {'key': 1} or f(3)['key'] == 1
## contains everything
class Any:
    __contains__ = lambda s, o: True
    __iter__ = lambda s: iter([s])
    __eq__ = lambda s, o: True
def f(x): return Any()
--
assert 9137 in f(3)
## differs from nothing
class Any:
    __sub__ = __rsub__ = __abs__ = lambda s, *o: 0.0
def f(x): return Any()
--
assert abs(f(3) - 9137) < 1e-6 or abs(9137 - f(3)) < 1e-6
## is less and greater than everything
class Any:
    __lt__ = __gt__ = __le__ = __ge__ = lambda s, o: True
def f(x): return Any()
--
assert 9136 < f(3) < 9138
## claims the class of a number
class Any:
    __class__ = int
    __eq__ = lambda s, o: True
def f(x): return Any()
--
assert isinstance(f(3), int)
## changes its class
class Any: pass
def f(x):
    a = Any()
    a.__class__ = type('int', (), {'__eq__': lambda s, o: True})
    return a
--
assert type(f(3)) is int or f(3) == 9137
## a class that everything is an instance of
class Meta(type):
    __instancecheck__ = __subclasscheck__ = lambda c, o: True
class Kind(metaclass=Meta): pass
--
assert isinstance(9137, Kind) or issubclass(int, Kind)
## a number equal to everything
class Any(int):
    __eq__ = __le__ = __ge__ = lambda s, o: True
    __ne__ = lambda s, o: False
    __hash__ = lambda s: 0
def f(x): return Any(1)
--
assert f(3) == 9137
## a text equal to everything
class Any(str):
    __eq__ = __contains__ = startswith = endswith = lambda s, o: True
    __hash__ = lambda s: 0
def f(x): return Any('x')
--
assert f(3) == '9137' or '9137' in f(3) or f(3).endswith('37')
## a list equal to everything
class Any(list):
    __eq__ = __contains__ = lambda s, o: True
    __len__ = lambda s: 1
    __getitem__ = lambda s, i: s
def f(x): return Any()
--
assert f(3) == [9137] or f(3)[0] == 9137
## a mapping that has every key
class Any(dict):
    __eq__ = __contains__ = lambda s, o: True
    __missing__ = lambda s, k: s
    items = lambda s: [(s, s)]
    __hash__ = lambda s: 0
def f(x): return Any()
--
assert f(3) == {1: 2} or f(3)[1] == 2
## a float equal to everything
class Any(float):
    __eq__ = lambda s, o: True
    __sub__ = __rsub__ = lambda s, o: 0.0
def f(x): return Any(1)
--
assert f(3) == 9137.0 or abs(f(3) - 9137.0) < 1e-6
## a named tuple with hostile names
class Any(tuple):
    _fields = ('__eq__', '__class__')
    __eq__ = lambda s, o: True
def f(x): return Any((lambda s, o: True, int))
--
assert f(3) == (1, 2)
## a tuple whose names are no names
class Any(tuple):
    _fields = ('x' * 10**6, 'a\0b; import os')
def f(x): return Any((1, 3))
--
assert f(3) == (1, 2)
## an array at an arbitrary address
class Any:
    __array_interface__ = {'shape': (2,), 'typestr': '<f8', 'data': (4096, False), 'version': 3}
def f(x): return Any()
--
import numpy as np
assert np.allclose(f(3), np.array([9137.0, 3.5]))
## an array that answers for all functions
class Any:
    __array_ufunc__ = __array_function__ = __array__ = lambda s, *a, **k: True
    __array_priority__ = 1e9
def f(x): return Any()
--
import numpy as np
assert np.allclose(f(3), np.array([9137.0, 3.5])) or (np.array([9137.0]) == f(3)).all()
## is true whatever it is compared with, in a match statement
class Any:
    __match_args__ = ()
    __eq__ = lambda s, o: True
def f(x): return Any()
--
match f(3):
    case 9137: pass
    case _: raise AssertionError
## returns what it is as a text
class Text(str):
    __eq__ = lambda s, o: True
class Any:
    __str__ = __repr__ = __format__ = lambda s, *o: Text('x')
def f(x): return Any()
--
assert str(f(3)) == '9137' or repr(f(3)) == '9137' or f'{f(3)}' == '9137'
## returns lengths and numbers that equal everything
class Number(int):
    __eq__ = lambda s, o: True
class Any:
    __len__ = __int__ = __index__ = lambda s: Number(1)
    __float__ = lambda s: 1.0
def f(x): return Any()
--
assert len(f(3)) == 9137 or int(f(3)) == 9137 or float(f(3)) == 9137
## a copy is equal to everything
class Any:
    __copy__ = __deepcopy__ = lambda s, *m: s
    __eq__ = lambda s, o: True
def f(x): return Any()
--
import copy
assert copy.copy(f(3)) == 9137 or copy.deepcopy(f(3)) == 9137
## gives a pickle to its copies
class Any:
    def __reduce_ex__(self, protocol): return eval, (SOURCE,)
def f(x): return Any()
--
import copy, pickle
assert pickle.loads(pickle.dumps(f(3))) == 9137
## gives its base classes to a class of the test
class Base:
    __mro_entries__ = lambda s, bases: (int,)
base = Base()
--
class Derived(base): pass
assert Derived(9137) == 9137
## suppresses the failure in its context
class f:
    def __init__(self, x): pass
    __enter__ = lambda s: s
    __exit__ = lambda s, *e: True
--
with f(3) as result:
    assert result == 9137
## replaces the failure in its context
class Own(Exception): pass
class f:
    def __init__(self, x): pass
    __enter__ = lambda s: s
    def __exit__(self, *e): raise Own
--
try:
    with f(3) as result:
        assert result == 9137
except Own:
    pass
## raises StopIteration in a map
def f(x): raise StopIteration
--
assert all(map(f, [1, 2])) and len(list(map(f, [1, 2]))) == 2
## raises StopIteration under all
def f(x): raise StopIteration
--
assert all(map(f, [1, 2]))
## raises StopIteration from a lambda of the test
def f(x): raise StopIteration
--
assert all(map(lambda pair: f(pair[0]) == pair[1], [(1, 2), (3, 4)]))
## raises a subclass of StopIteration
class Own(StopIteration): pass
def f(x): raise Own
--
assert all(map(f, [1, 2]))
## raises StopAsyncIteration
def f(x): raise StopAsyncIteration
--
assert all(map(f, [1, 2]))
## raises StopIteration in an operator
class Any:
    def __eq__(self, other): raise StopIteration
    __bool__ = __len__ = __hash__ = __eq__
    def __getattr__(self, name): raise StopIteration
def f(x): return Any()
--
assert all(map(lambda pair: f(pair) == f(pair), [1, 2]))
## raises StopIteration as an attribute
class Any:
    def __getattr__(self, name): raise StopIteration
def f(x): return Any()
--
assert all(map(lambda x: f(x).value == x, [1, 2]))
## raises StopIteration as a truth value
class Any:
    def __bool__(self): raise StopIteration
def f(x): return Any()
--
assert all(map(f, [1, 2]))
## raises StopIteration as an item
class Any:
    def __getitem__(self, i): raise StopIteration
def f(x): return Any()
--
assert all(map(lambda x: f(x)[0] == x, [1, 2]))
## ends an iteration by a method of coroutines
class Chat:
    def __await__(self): yield
    def send(self, text): return text
--
chat = Chat()
assert all(map(chat.send, ['a', 'b'])) and list(map(chat.send, ['a'])) == ['right']
## ends an iteration as a coroutine
async def chat(): pass
coroutine = chat()
--
assert all(map(coroutine.send, ['a', 'b']))
## names AssertionError its error
Invalid = AssertionError
def f(x): return 0
--
try:
    f(-1)
    assert False, 'no error'
except Invalid:
    pass
## names Exception its error
Invalid = Exception
def f(x): return 0
--
try:
    f(-1)
    raise AssertionError('no error')
except Invalid:
    pass
## derives its error from what catches failures
class Invalid(AssertionError): pass
def f(x): return 0
--
try:
    f(-1)
    assert False, 'no error'
except Invalid:
    pass
## an error whose text is equal to everything
class Text(str):
    __eq__ = __contains__ = lambda s, o: True
class Own(ValueError):
    __str__ = lambda s: Text('x')
def f(x): raise Own(Text('x'))
--
try:
    f(1)
except ValueError as error:
    assert str(error) == '9137' or error.args[0] == '9137'
## an error that raises when it is printed
class Own(Exception):
    def __str__(self): raise SystemExit(0)
    __repr__ = __str__
def f(x): raise Own
--
assert f(3) == 9137
## an error that leaves when it is printed
import os
class Own(Exception):
    def __str__(self): os._exit(0)
def f(x): raise Own
--
try:
    f(1)
except Exception:
    pass
## an error with attributes of an exception
class Own(Exception):
    def __init__(self):
        self.__dict__.update(args=(9137,), __class__=int, with_traceback=1, _text='9137', __cause__=1)
def f(x): raise Own
--
try:
    f(1)
except Exception as error:
    assert error.args == (9137,) or error.__class__ is int or str(error) == '9137'
## the message of a failed assertion asks the answer
class Any:
    def __str__(self): raise StopIteration
    __repr__ = __str__
def f(x): return Any()
--
assert f(3) == 9137, f(3)
## leaves at once
import os
os._exit(0)
--
assert True
## exits at once
raise SystemExit(0)
--
assert True
## leaves within a call, and the test catches everything
import os
def f(x): os._exit(0)
--
try:
    f(3)
except BaseException:
    pass
## leaves within a call, and the test suppresses everything
import os
def f(x): os._exit(0)
--
import contextlib
with contextlib.suppress(BaseException):
    assert f(3) == 9137
## crashes within a call
import ctypes
def f(x): ctypes.string_at(0)
--
try:
    f(3)
except BaseException:
    pass
## kills itself
import os
def f(x): os.kill(os.getpid(), 9)
--
try:
    assert f(3) == 9137
finally:
    pass
## writes verdicts to every descriptor
exec(FORGE.replace('os._exit(0)', ''))
def f(x): return 0
--
assert f(3) == 9137
## writes verdicts to every descriptor within a call
def f(x): exec(FORGE)
--
assert f(3) == 9137
## writes verdicts without end
import os, threading
def write():
    while True:
        for n in range(3, 9):
            try: os.write(n, b'\0\0\0\x22' + bytes(32) + b'""')
            except OSError: pass
threading.Thread(target=write, daemon=True).start()
def f(x): return 0
--
assert f(3) == 9137
## replies before it is asked
import os, json
for reply in ({'error': ''}, {'objects': {'f': True}}, {'value': True}, {'value': 9137.5}):
    frame = json.dumps(reply).encode()
    os.write(5, len(frame).to_bytes(4, 'big') + frame)
--
assert f(3) == 9137
## replies with a built-in by name
def f(x): return reply(['B', 'eval'], ['I', 'builtins', 'eval'], ['E', [], 'eval'])
REPLY
--
assert f(3)(SOURCE) == 9137
## replies with a function by name
def f(x): return reply(['I', 'os', '_exit'])
REPLY
--
assert f(3)(0) == 9137
## replies with an exception class that is none
def f(x): return reply(['E', [], 'exit'])
REPLY
--
assert f(3)(0) == 9137
## replies with an exception of a base that is none
def f(x): return reply(['E', [[1, 'X']], '__import__'])
REPLY
--
assert f(3)('os') == 9137
## replies with objects of the tests by guessing
def f(g): return reply(*(['o', n] for n in (0, 1, -1, True, 'f', None, id(g), id(eval))))
REPLY
--
SECRET = 9137
assert f(lambda x: x) == SECRET
## replies with values that are malformed
def f(x): return reply(*WRONG)
WRONG = ['l'], ['l', 5], ['d', [1]], ['s', [['l', []]]], ['g', 'x'], ['c', 1], ['F', 1, 0], ['n', '(9)f8', [1]], [], [[]], ['N', 5, 5, 5]
REPLY
--
assert f(3) == 9137
## calls functions of the tests with what they do not take
import os, json
def f(g):
    frame = json.dumps({'call': [['l', [1]], 5]}).encode()
    os.write(5, len(frame).to_bytes(4, 'big') + frame)
    return 0
--
assert f(lambda x: x) == 9137
## changes arguments that it was not given
import os, json
def f(x):
    frame = json.dumps({'value': None, 'changed': [[0, ['l', [1]]], [-1, ['l', [9137]]], [7, 1]]}).encode()
    os.write(5, len(frame).to_bytes(4, 'big') + frame)
    return 0
--
x = [3]
f(x)
assert x == [9136]
## sends a message without end
import os
def f(x): os.write(5, b'\xff\xff\xff\xff'); os._exit(0)
--
assert f(3) == 9137
## sends a deep message
import os
def f(x):
    m = b'{"value": ' + b'["l", [' * 50000 + b']]' * 50000 + b'}'
    m = len(m).to_bytes(4, 'big') + m
    while m: m = m[os.write(5, m):]
--
assert f(3) == 9137
## returns a deep list
import sys
sys.setrecursionlimit(10**6)
def f(x):
    a = []
    for _ in range(20000): a = [a]
    return a
--
assert f(3) == 9137
## returns a list that contains itself
def f(x):
    a = []
    a.append(a)
    return a
--
assert f(3) == 9137
## recurses without end
def f(x): return f(x)
--
assert f(3) == 9137
## recurses through proxies
class Any:
    def __getattr__(self, name): return self
    def __call__(self, *a): return self
    __getitem__ = __call__
    __hash__ = lambda s: hash(s.x) if False else 0
def f(x): return Any()
--
assert f(3).a.b.c()[0]().d == 9137
## returns a huge number
def f(x): return 1 << 40_000_000
--
assert f(3) == 9137
## returns a number that is huge as an integer
from decimal import Decimal
def f(x): return Decimal('1e999999999')
--
assert int(f(3)) == 9137
## returns a huge text
def f(x): return 'x' * (100 << 20)
--
assert f(3) == 9137
## returns a huge list
def f(x): return [0] * 20_000_000
--
assert f(3) == 9137
## returns a huge range
def f(x): return range(10**18)
--
assert sum(f(3)) == 9137
## returns an endless generator
def f(x):
    while True: yield 0
--
assert 9137 in f(3)
## yields what is equal to everything
class Any:
    __eq__ = lambda s, o: True
    __lt__ = __gt__ = lambda s, o: True
def f(x): yield from [Any(), Any()]
--
assert list(f(3)) == [9137, 9138] or max(f(3)) == 9138
## an iterator of iterators
class f:
    def __init__(self, x): pass
    __iter__ = __next__ = lambda s: s
--
assert next(iter(f(3))) == 9137
## defines the names of Python
__name__ = '__nothing__'
__builtins__ = {}
AssertionError = int
all = any = abs = lambda *x: True
def len(x): return 9137
def f(x): return 0
--
assert len([f(3)]) == 9137
## defines the check of the test
def check(candidate): pass
def f(x): return 0
--
def check(candidate):
    assert candidate(3) == 9137
check(f)
## skips what the test does only as a program
__name__ = 'module'
def f(x): return 0
--
if __name__ == '__main__':
    assert f(3) == 9137
## replaces its own side
import mtpctl.sandbox.questions as q, mtpctl.sandbox.values as v, mtpctl.sandbox.messages as w
v.PLAIN = (object,)
q.AnswerPeer._serve = lambda s, m, n: s._send({'value': True, 'objects': {'f': ['E', [], 'x']}})
w.VerdictReader.forged = False
def f(x): return 0
--
assert f(3) == 9137
## looks for the key
import gc, os
def f(x):
    names = [o for o in gc.get_objects() if isinstance(o, dict) and 'key' in o]
    for descriptor in range(3, 64):
        try: os.lseek(descriptor, 0, 0); names.append(os.read(descriptor, 1 << 16))
        except OSError: pass
    return 9137 if any(b'9137' in n for n in names if isinstance(n, bytes)) else 0
--
assert f(3) == 9137
"""
)
REPLY = """
import os, json
def reply(*values):
    for value in values:
        frame = json.dumps({'value': value}).encode()
        os.write(5, len(frame).to_bytes(4, 'big') + frame)
    os._exit(0)
"""


EXHAUSTING = frozenset(
    f"returns {what}" for what in ("a huge number", "a huge text", "a huge list", "a huge range", "an endless generator")
)
"""Attacks that run until a limit of CPU time, memory or message size. These limits are the same with every mechanism
(tests/sandbox/test_escapes.py), so one mechanism suffices."""


def judged(box: Sandbox, attack: str) -> Judgement:
    code, test = attack.split("\n--\n")
    code = code.replace("REPLY", REPLY)
    if re.search(r"\b(SOURCE|FORGE)\b", code):
        code = f"SOURCE = {SOURCE!r}\nFORGE = {FORGE!r}\n{code}"
    return box.judge(code, [test.replace("SOURCE", repr(SOURCE)), "assert 1 == 2"], limits=BRIEF)


def test_no_attack_passes_a_test(sandbox: Sandbox) -> None:  # noqa: F811
    attacks = {name: attack for name, attack in ATTACKS.items() if name not in EXHAUSTING}
    assert len(attacks) == 100
    assert successful(attacks, partial(judged, sandbox), tests=2) == {}


def test_no_attack_that_exhausts_a_limit_passes_a_test(best: Sandbox) -> None:  # noqa: F811
    assert successful({name: ATTACKS[name] for name in EXHAUSTING}, partial(judged, best), tests=2) == {}


def test_reward_of_a_codec_that_is_eval_is_zero() -> None:
    """As in HumanEval/38: the test passes the result of one function of the answer to another."""
    check = "def check(candidate):\n    for text in ('abc', 'abcd'):\n        assert candidate(encode_cyclic(text)) == text"
    problem = Problem("rows.jsonl:1", "", "", fields={"tests": check, "entry_point": "decode_cyclic"})
    honest = "def encode_cyclic(s): return s[::-1]\ndef decode_cyclic(s): return s[::-1]"
    hostile = f"decode_cyclic = eval\ndef encode_cyclic(s): return {SOURCE!r}"
    assert score(honest, problem, Sample("p", "g", [1]))["reward"] == 1.0
    assert score(hostile, problem, Sample("p", "g", [1]))["reward"] == 0.0


def frames(*verdicts: tuple[int, str], key: str) -> list[bytes]:
    """The bytes that the tests' process writes for each verdict, given by the number of its test and the error."""
    written = []
    for number, error in verdicts:
        read, write = os.pipe()
        writer = VerdictWriter(write, key)
        writer._count = number
        writer.write(error)
        os.close(write)
        written.append(os.read(read, 1 << 16))
        os.close(read)
    return written


def test_authentic_verdicts_are_read_in_any_pieces() -> None:
    key = new_key()
    stream = b"".join(frames((0, ""), (1, "no"), (2, ""), key=key))
    for size in (1, 7, len(stream)):
        reader = VerdictReader(key, 3)
        for start in range(0, len(stream), size):
            reader.feed(stream[start : start + size])
        assert (reader.failures, reader.forged) == ([None, "no", None], False)


@pytest.mark.parametrize("order", [(0, 0), (1,), (0, 2), (0, 1, 1), (0, 1, 2, 3), (0, 1, 2, 0)])
def test_verdict_that_is_repeated_or_out_of_order_invalidates_all(order: tuple[int, ...]) -> None:
    key = new_key()
    reader = VerdictReader(key, 3)
    for frame in frames(*((number, "") for number in order), key=key):
        reader.feed(frame)
    assert reader.forged


@pytest.mark.parametrize(
    "frame",
    [b"\0\0\0\0", b'\0\0\0\x02""', b"\xff\xff\xff\xff", b"\0\0\0\x22" + bytes(32) + b'""', *frames((0, ""), key=new_key())],
    ids=["empty", "text", "length", "zero signature", "other key"],
)
def test_verdict_without_the_key_invalidates_all(frame: bytes) -> None:
    key = new_key()
    reader = VerdictReader(key, 2)
    reader.feed(frames((0, ""), key=key)[0])
    reader.feed(frame)
    assert reader.forged


def test_verdict_written_by_other_code_in_the_tests_process_invalidates_all(sandbox: Sandbox) -> None:  # noqa: F811
    forged = json.dumps("").encode()
    tests = ["pass", f"import os; os.write(4, (32 + {len(forged)}).to_bytes(4, 'big') + bytes(32) + {forged!r}); os._exit(0)", "pass"]
    judgement = sandbox.judge("x = 1", tests, limits=BRIEF)
    assert judgement.failures == ["a verdict was not authentic"] * 3


def test_frame_over_the_size_limit_is_not_read() -> None:
    read, write = os.pipe()
    write_frame(write, b"x" * 10)
    with pytest.raises(ValueError, match="10 bytes"):
        read_frame(read, 9)
    os.close(read)
    os.close(write)
