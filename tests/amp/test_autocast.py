"""The dtype of every op under autocast: against torch.autocast, eagerly and in traces."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import graphwright as gw
from graphwright import amp
from graphwright.array import bfloat16, from_numpy
from graphwright.autograd import Parameter, Tensor, autocast_dtype
from graphwright.errors import DTypeError
from graphwright.nn import functional
from graphwright.ops import call
from values import grad_of


def t(*shape: int) -> Tensor:
    return Tensor(from_numpy(np.random.default_rng(0).normal(size=shape).astype(np.float32)))


CASTS = {
    "linear": (lambda x: call("linear", x, x), lambda x: F.linear(x, x)),
    "matmul": (lambda x: x @ x, lambda x: x @ x),
    "softmax": (lambda x: (x @ x).softmax(), lambda x: (x @ x).softmax(-1)),
    "sum": (lambda x: (x @ x).sum(), lambda x: (x @ x).sum()),
    "exp": (lambda x: (x @ x).exp(), lambda x: (x @ x).exp()),
    "silu": (lambda x: call("silu", x @ x), lambda x: F.silu(x @ x)),
    "add": (lambda x: (x @ x) + x, lambda x: (x @ x) + x),
    "mul": (lambda x: (x @ x) * (x @ x), lambda x: (x @ x) * (x @ x)),
    "tanh": (lambda x: x.tanh(), lambda x: x.tanh()),
}


WIDE = {"softmax", "sum", "exp"}
"""In float32 as torch has them on CUDA; its list for CPUs leaves them in 16 bits."""


@pytest.mark.parametrize("name", CASTS)
def test_result_dtypes_match_torch(name):
    mine, theirs = CASTS[name]
    x = t(4, 4)
    with amp.autocast(), torch.autocast("cpu", torch.bfloat16):
        a, b = mine(x), theirs(torch.from_numpy(x.numpy().copy()))
    assert f"torch.{a.dtype.name}" == ("torch.float32" if name in WIDE else str(b.dtype))
    np.testing.assert_allclose(a.data.to_numpy("float32"), b.float().numpy(), rtol=0.02, atol=0.05)


def test_norms_keep_the_dtype_of_their_input():  # torch.autocast widens them
    with amp.autocast():
        x = t(4, 4) @ t(4, 4)
        assert call("rms_norm", x, Parameter(from_numpy(np.ones(4, np.float32)))).dtype.name == "bfloat16"


def test_losses_are_float32():
    ids = Tensor(from_numpy(np.array([0, 1, 2, 3])))
    with amp.autocast():
        assert functional.cross_entropy(t(4, 4) @ t(4, 4), ids).dtype.name == "float32"


def casts(enabled: bool) -> list[str]:
    w = Parameter(from_numpy(np.ones((4, 4), np.float32)), name="w")

    def step(x):
        with amp.autocast(enabled=enabled):
            h = call("silu", call("linear", x, w))
            return (call("linear", h, w).softmax()).sum()

    p = gw.trace(step, t(2, 4))
    return [f"{p.spec(p.operands(n)[0])} -> {p.spec(n)}" for n in p.order() if p.op(n) == "cast"]


def test_a_trace_has_the_expected_casts():
    assert casts(True) == [
        "f32[2, 4] -> bf16[2, 4]",
        "f32[4, 4] -> bf16[4, 4]",
        "f32[4, 4] -> bf16[4, 4]",
        "bf16[2, 4] -> f32[2, 4]",
    ]
    assert casts(False) == []


def test_modes_nest_and_are_restored():
    with amp.autocast():
        with amp.autocast(enabled=False):
            assert (t(2, 2) @ t(2, 2)).dtype.name == "float32"
        assert (t(2, 2) @ t(2, 2)).dtype.name == "bfloat16"
        with pytest.raises(KeyError), amp.autocast("float16"):
            raise KeyError
        assert autocast_dtype() is bfloat16
    assert autocast_dtype() is None


def test_autocast_does_not_reach_another_thread():
    seen = []
    with amp.autocast():
        worker = threading.Thread(target=lambda: seen.append(autocast_dtype()))
        worker.start()
        worker.join()
    assert seen == [None]


def test_a_weight_changed_inside_autocast_is_cast_again():
    w, x = Parameter(from_numpy(np.ones((2, 2), np.float32))), t(2, 2)
    with amp.autocast():
        before = call("linear", x, w).data.to_numpy("float32")
        w.assign(Tensor(from_numpy(np.full((2, 2), 2.0, np.float32))))
        after = call("linear", x, w).data.to_numpy("float32")
    np.testing.assert_array_equal(after, 2 * before)


def test_gradients_have_the_dtype_of_the_weight():
    w = Parameter(from_numpy(np.ones((2, 2), np.float32)))
    with amp.autocast():
        loss = call("linear", t(3, 2), w).sum()
    loss.backward()
    assert grad_of(w).dtype.name == "float32"


@pytest.mark.parametrize("wrong", ["float32", "int64"])
def test_autocast_refuses_other_dtypes(wrong):
    with pytest.raises(DTypeError), amp.autocast(wrong):
        pass
