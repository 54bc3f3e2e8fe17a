"""What a run says of itself."""

from __future__ import annotations

import re

import numpy as np
from program_samples import tiny

import graphwright as gw

X = np.ones((2, 3), "f4")


def test_a_run_tells_what_it_kept():
    p = tiny()
    kinds = {}
    for keep, capture in (("all", ()), ("outputs", ()), ("outputs", ["h"]), (["h"], ())):
        run = p.run(x=X, keep=keep, capture=capture)
        told = r"Run\('tiny' version 0, keep='\w+': \d values, [\d,]+ bytes, [\d.e+-]+ ms, outputs y\)"
        assert re.fullmatch(told, repr(run))
        kinds[run.keep, len(run.values)] = run.nbytes
    # x: 24 bytes; h, j, r: 16 each, in memory of their own
    assert kinds == {("all", 5): 24 + 3 * 16, ("outputs", 1): 16, ("some", 2): 32}
    assert 0 < run.seconds < 10


def test_the_repr_of_a_run_reads_no_weight():
    p = gw.open("bundled").program
    run = p.run(ids=np.array([[84]]), positions=np.array([[0]]), keep="outputs")
    fresh = gw.open("bundled").program
    repr([fresh, fresh.weights, run, *fresh.weights.values(), *(v.data for v in fresh.weights.values())])
    assert not any(v.data.storage.touched for v in fresh.weights.values() if v.data.storage.readonly)
