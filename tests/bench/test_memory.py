"""Peak memory over a tree of processes."""

import os
import subprocess
import sys
import time

import pytest

from cloudsched.bench.memory import PROC, PeakMemory, tree_mb

pytestmark = pytest.mark.skipif(not (PROC / "self/smaps_rollup").exists(), reason="Linux alone")

HOARD = "x = bytearray(b'x') * 80_000_000; input()"
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def test_memory_of_a_grandchild_counts_while_it_lives():
    own_mb = tree_mb(os.getpid())
    with PeakMemory() as memory:
        parent = subprocess.Popen([sys.executable, "-c", PARENT, HOARD], stdin=subprocess.PIPE)
        deadline = time.monotonic() + 20.0
        while memory.peak_mb < own_mb + 80.0 and time.monotonic() < deadline:
            pass
        parent.communicate(b"\n")
    assert 80.0 < memory.peak_mb - own_mb < 200.0
    assert tree_mb(os.getpid()) < own_mb + 40.0
