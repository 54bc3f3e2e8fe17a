"""Variables: copied before the first write if shared; updates equal when traced."""

from __future__ import annotations

import numpy as np
import pytest

import graphwright as gw
from graphwright.array import from_numpy
from graphwright.autograd import Parameter, Tensor, TraceError, Variable, grad, tensor, update
from graphwright.errors import DTypeError, ShapeError
from graphwright.ops import OPS


def _mapped(values: np.ndarray) -> np.ndarray:
    host = values.copy()
    host.flags.writeable = False
    return host


def test_a_read_only_array_is_copied_before_the_first_write() -> None:
    host = _mapped(np.ones(3))
    v = Variable(from_numpy(host))
    v.assign(tensor(np.full(3, 2.0)))
    assert host.tolist() == [1, 1, 1]
    assert v.tolist() == [2, 2, 2]
    memory = v.data
    v.assign(tensor(np.full(3, 4.0)))
    assert v.data is memory


def test_a_shared_array_is_copied_once() -> None:
    array = from_numpy(np.ones(3))
    a, b = Variable(array), Variable(array)
    a.shared = b.shared = True
    a.assign(tensor(np.zeros(3)))
    assert b.tolist() == [1, 1, 1]
    assert not a.shared
    assert b.data is array


def test_assign_refuses_another_spec() -> None:
    v = Variable(from_numpy(np.ones(3)), name="running.mean")
    with pytest.raises(ShapeError, match=r"running\.mean"):
        v.assign(tensor(np.ones(2)))


def _adamw(w: Parameter, m: Variable, v: Variable, step: Variable, lr: Tensor, g: Tensor) -> None:
    update([w, m, v, step], "adamw_step", lr, tensor(np.float32(0)), g, w, m, v, step)


def _state(kind: str = "f4") -> tuple[Parameter, Variable, Variable, Variable]:
    rng = np.random.default_rng(0)
    w = Parameter(from_numpy(rng.normal(size=(4, 3)).astype(kind)), name="w")
    m, v = (Variable(from_numpy(np.zeros((4, 3), kind)), name=n) for n in "mv")
    return w, m, v, Variable(from_numpy(np.zeros((), "f4")), name="step")


def test_an_update_is_in_place() -> None:
    w, m, v, step = _state()
    before = [t.data for t in (w, m, v)]
    _adamw(w, m, v, step, tensor(np.float64(0.1)), tensor(np.ones((4, 3), np.float32)))
    assert [t.data for t in (w, m, v)] == before
    assert step.item() == 1


def test_eager_equals_traced_bit_for_bit() -> None:
    x = np.random.default_rng(1).normal(size=(5, 3)).astype("f4")
    lr = tensor(np.float64(0.05))
    results = []
    for compiled in (False, True):
        w, m, v, step = _state()

        def train(x: Tensor, w=w, m=m, v=v, step=step) -> Tensor:
            loss = ((x @ w.T).tanh() * 0.5).sum()
            _adamw(w, m, v, step, lr, grad(loss, w)[0])
            return loss

        run = gw.compile(train, executor="aten") if compiled else train
        losses = [run(tensor(x)).numpy().tobytes() for _ in range(20)]
        results.append((losses, *(t.numpy().tobytes() for t in (w, m, v, step))))
    assert results[0] == results[1]


@pytest.mark.parametrize("name", ["matmul", "add", "mul", "softmax", "where", "copy", "cast"])
def test_update_by_any_op_writes_its_results(name: str) -> None:
    """Also where the op cannot run over its own operand: then the result is made aside and copied."""
    rng = np.random.default_rng(0)
    host = rng.normal(size=(4, 4)).astype("f4")
    w = Variable(from_numpy(host.copy()))
    other = tensor(rng.normal(size=(4, 4)).astype("f4"))
    operands: list = {
        "matmul": [w, w],
        "where": [tensor(host > 0), w, other],
        "softmax": [w],
        "copy": [w.T],
        "cast": [w.T],
    }.get(name, [w, other])
    attrs = {"dtype": w.dtype} if name == "cast" else {}
    from graphwright.ops import compute

    expected = compute(OPS[name], [o.data.copy() for o in operands], OPS[name].complete(attrs))[0].to_numpy()
    memory = w.data
    update([w], name, *operands, **attrs)
    assert np.array_equal(w.numpy(), expected)
    assert w.data is memory


def test_two_variables_can_be_swapped() -> None:
    a, b = Variable(from_numpy(np.zeros(2))), Variable(from_numpy(np.ones(2)))
    old = a.clone()
    a.assign(b)
    b.assign(old)
    assert (a.tolist(), b.tolist()) == ([1, 1], [0, 0])


def test_reading_a_value_in_a_trace_is_refused_at_that_line() -> None:
    w = Parameter(from_numpy(np.ones(2)))
    for ask in (
        lambda x: float(x.sum()),
        lambda x: x.numpy(),
        lambda x: bool(x.sum() > 0),
        lambda x: w.sum().item(),
        lambda x: np.sin(x),
    ):
        with pytest.raises((TraceError, TypeError)):
            gw.trace(lambda x, ask=ask: (ask(x), x)[1], np.ones(2, np.float32))


def test_a_parameter_copies_a_numpy_array():
    host = np.array([1.0, 2.0], np.float32)
    made = gw.Parameter(host)
    host[0] = 9
    assert made.tolist() == [1.0, 2.0]
    assert made.requires_grad
    with pytest.raises(DTypeError, match="floating"):
        gw.Parameter(np.array([1, 2]))
