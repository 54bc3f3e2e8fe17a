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


def doubled(x: gw.Tensor) -> gw.Tensor:
    return x * 2.0 + 1.0


def halve_in_place(p: gw.Program) -> None:
    with gw.no_grad():
        for variable in p.weights.values():
            variable.mul_(0.5)


def set_in_place(p: gw.Program) -> None:
    with p.edit("halve") as e:
        for key in p.weights:
            e.set_weight(key, lambda v: v / 2, inplace=True)


@pytest.mark.parametrize("write", [halve_in_place, set_in_place])
@pytest.mark.parametrize("kind", ["trace", "tape"])
def test_writing_a_number_of_one_program_changes_no_other_code(kind: str, write) -> None:
    x = gw.tensor([0.0, 1.0], requires_grad=True)
    p = gw.trace(doubled, x) if kind == "trace" else gw.tape(doubled(x))
    write(p)
    assert sorted(v.item() for v in p.weights.values() if not v.shape)[-1] == 1.0
    assert doubled(gw.tensor([0.0, 1.0])).tolist() == [1.0, 3.0]
    assert gw.trace(doubled, x).run(x=np.zeros(2, np.float32))["out"].to_numpy().tolist() == [1.0, 1.0]


def test_writing_a_const_of_a_stack_leaves_the_members_alone() -> None:
    b = gw.Builder("member")
    b.output(b.add(b.mul(b.input("x", (2,)), b.param("w", np.ones(2, "f4"))), b.const("c", np.ones(2, "f4"))), "y")
    p = b.build()
    whole = gw.program.stack([p, p.fork()])
    with gw.no_grad():
        whole.weights["c"].mul_(3.0)
        assert p.weights["c"].tolist() == [1.0, 1.0]
        p.weights["c"].mul_(5.0)
    assert whole.weights["c"].tolist() == [3.0, 3.0]
