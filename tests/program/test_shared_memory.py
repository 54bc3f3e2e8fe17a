"""Weights that a fork or an undo entry shares: no write through a view or an array reaches the other holder."""

import numpy as np
import pytest

import graphwright as gw
from graphwright.array import ReadOnlyArray
from graphwright.autograd import ViewModified

ONES = np.ones((2, 3), np.float32)


def program() -> gw.Program:
    b = gw.Builder("one matrix")
    b.output(b.linear(b.input("x", ("N", 3)), b.param("w", ONES)), "y")
    return b.build()


WRITES = {
    "a row": lambda w: w[0].add_(1.0),
    "detached": lambda w: w.detach().mul_(2.0),
    "transposed": lambda w: w.T.fill_(3.0),
    "its array": lambda w: w.data.__setitem__(0, 4.0),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_views_of_shared_weights_refuse_writes(write) -> None:
    p = program()
    twin, w = p.fork(), p.weights["w"]
    with gw.no_grad(), pytest.raises((ViewModified, ReadOnlyArray)):
        write(w)
    assert np.array_equal(twin.weights["w"], ONES)
    assert np.array_equal(w, ONES)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_redo_returns_the_value_that_an_edit_set(write) -> None:
    p = program()
    with p.edit("zeros") as e:
        e.set_weight("w", np.zeros_like(ONES))
    with gw.no_grad(), pytest.raises((ViewModified, ReadOnlyArray)):
        write(p.weights["w"])
    p.undo()
    p.redo()
    assert not np.asarray(p.weights["w"]).any()


def test_writes_to_the_weight_itself_copy_it_first() -> None:
    p = program()
    twin, w = p.fork(), p.weights["w"]
    with gw.no_grad():
        w[0] = 2.0
        w[1] += 3.0
        w *= 2.0
    assert w is p.weights["w"]
    assert w.tolist() == [[4, 4, 4], [8, 8, 8]]
    assert np.array_equal(twin.weights["w"], ONES)
    with gw.no_grad():
        w[0].add_(1.0)  # now the memory is its own
    assert w.tolist() == [[5, 5, 5], [8, 8, 8]]
