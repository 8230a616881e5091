"""The collector of a settled process looks at what came since, and at nothing else."""

from __future__ import annotations

import subprocess
import sys

SETTLE = """
import gc, weakref
import mtpctl.recipe.schema
from mtpctl.cluster.process import settle_heap

class Node: pass

def circle():
    made = Node()
    made.self = made
    return weakref.ref(made)

gc.disable()
loaded = [Node() for _ in range(1000)]
before, alive = circle(), len(gc.get_objects())
settle_heap()
assert before() is None, "what nobody holds is not kept for good"
seen = gc.get_objects()
assert alive > 10_000 > len(seen) and not any(isinstance(each, Node) for each in seen), "what was loaded is looked at again"
after = circle()
assert after() is not None
gc.collect()
assert after() is None, "what came since is collected"
"""


def test_what_is_loaded_is_left_alone_and_what_comes_after_is_not() -> None:
    subprocess.run([sys.executable, "-c", SETTLE], check=True, timeout=60)


IMPORT = """
import gc
from mtpctl.cluster.process import importing

class Node: pass

with importing():
    assert not gc.isenabled()
    loaded = Node()
assert gc.isenabled() and not any(isinstance(each, Node) for each in gc.get_objects()), "what was imported is looked at again"
gc.disable()
try:
    with importing():
        raise ImportError
except ImportError:
    assert not gc.isenabled(), "it is left as it was"
"""


def test_the_collector_rests_while_modules_are_imported_and_leaves_them_alone() -> None:
    subprocess.run([sys.executable, "-c", IMPORT], check=True, timeout=60)
