"""Lifetime of saved values and operands, and the report of `memory`."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from graphwright.autograd import (
    Tensor,
    memory,
    no_grad,
    tensor,
)
from graphwright.ops import OPS, call
from values import array_of, grad_of, source_at

pytestmark = pytest.mark.usefixtures("young_heap")


def leaf(*values: float) -> Tensor:
    return tensor(np.array(values), requires_grad=True)


def test_saved_values_are_freed_without_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        for name in ("tanh", "mul", "softmax", "matmul", "cross_entropy", "sdpa"):
            inputs, attrs = OPS[name].sample(np.random.default_rng(0))
            given = [tensor(x, requires_grad=np.asarray(x).dtype == np.float64) for x in inputs]
            out = call(name, *given, **attrs)
            first = out[0] if isinstance(out, tuple) else out
            refs = [weakref.ref(t) for t in (first, first.node, first.data, *given, *(t.data for t in given))]
            first.sum().backward()
            del out, first, given
            assert [r() for r in refs] == [None] * len(refs), f"{name} holds a cycle"
    finally:
        gc.enable()


def test_unsaved_operands_are_freed_after_forward() -> None:
    gc.disable()
    try:
        x = tensor(np.ones((2, 3)), requires_grad=True)
        inner = x * 2.0
        held = weakref.ref(inner.data)
        out = call("exp", inner)  # saves its result only
        del inner
        assert held() is None
        out.sum().backward()
        assert np.allclose(grad_of(x).numpy(), 2 * np.exp(2))
    finally:
        gc.enable()


def test_memory_reports_bytes_per_operation() -> None:
    rng = np.random.default_rng(0)
    x, w = tensor(rng.normal(size=(5, 4))), tensor(rng.normal(size=(6, 4)), requires_grad=True)
    h = call("linear", x, w)  # keeps x; w is a leaf
    y = h.tanh()  # keeps its result
    z = y * y  # keeps y, which tanh holds already
    loss = (z.reshape(30) + 1.0).sum()  # keep nothing
    kept = memory(loss)
    assert [(k.op, k.nbytes) for k in kept if k.nbytes] == [("linear", 5 * 4 * 8), ("tanh", 5 * 6 * 8)]
    assert [k.op for k in kept] == ["linear", "tanh", "mul", "reshape", "add", "sum"]
    assert source_at(kept[1].line).startswith("y = h.tanh()")
    loss.backward()
    assert sum(k.nbytes for k in memory(loss)) == 0
    with no_grad():
        assert memory((w * w).sum()) == []


def test_saved_values_are_freed_as_backward_proceeds() -> None:
    x = leaf(0.5)
    below = x.tanh()
    held = weakref.ref(array_of(below))
    above = below.exp()
    del below
    gone = []
    above.register_hook(lambda g: gone.append(held() is None))
    x.register_hook(lambda g: gone.append(held() is None))
    above.sum().backward()
    assert gone == [False, True]
