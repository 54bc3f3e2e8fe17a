"""no_grad and enable_grad: nesting, decorators, generators, threads, exceptions; autocast restores itself."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

import graphwright as gw
from graphwright import nn
from graphwright.array import bfloat16, float16, float32, float64
from graphwright.autograd import (
    Parameter,
    autocast_dtype,
    autocast_to,
    enable_grad,
    grad,
    is_grad_enabled,
    mode,
    no_grad,
    set_grad_enabled,
    tensor,
    training,
)
from graphwright.errors import DTypeError, UsageError
from graphwright.ops import OPS, call
from values import array_of, grad_of


@pytest.mark.parametrize("outer", [no_grad, enable_grad])
@pytest.mark.parametrize("inner", [no_grad, enable_grad])
def test_gradient_modes_nest_and_are_restored(outer, inner) -> None:
    with outer():
        with inner():
            assert is_grad_enabled() is (inner is enable_grad)
        assert is_grad_enabled() is (outer is enable_grad)
    assert is_grad_enabled()


def test_a_mode_object_is_reentrant() -> None:
    mode = no_grad()
    with mode, mode:
        assert not is_grad_enabled()
    with mode:
        assert not is_grad_enabled()
    assert is_grad_enabled()


def test_an_exception_restores_the_mode() -> None:
    with pytest.raises(KeyError), no_grad():
        raise KeyError
    assert is_grad_enabled()
    with pytest.raises(KeyError), autocast_to(bfloat16):
        raise KeyError
    assert autocast_dtype() is None


def test_decorated_functions_run_in_their_mode() -> None:
    @no_grad()
    def inside() -> bool:
        return is_grad_enabled()

    assert inside() is False
    assert is_grad_enabled()


def test_a_decorated_generator_does_not_leak_its_mode() -> None:
    """Between two values the caller's mode holds; inside, the generator's own, also for send, throw and close."""
    closed = []

    @no_grad()
    def values():
        try:
            got = yield is_grad_enabled()
            while True:
                try:
                    got = yield (is_grad_enabled(), got)
                except ValueError:
                    got = "thrown"
        finally:
            closed.append(is_grad_enabled())

    it = values()
    assert next(it) is False
    assert is_grad_enabled()
    with enable_grad():
        assert it.send(5) == (False, 5)
        assert is_grad_enabled()
    assert it.throw(ValueError()) == (False, "thrown")
    assert is_grad_enabled()
    it.close()
    assert closed == [False]
    assert is_grad_enabled()


def test_a_decorated_generator_forwards_returns_and_exceptions() -> None:
    @no_grad()
    def inner(broken: bool):
        yield 1
        if broken:
            raise KeyError("broken")
        return is_grad_enabled()

    def outer(broken: bool):
        yield (yield from inner(broken))

    assert list(outer(broken=False)) == [1, False]
    with pytest.raises(KeyError, match="broken"):
        list(outer(broken=True))
    assert is_grad_enabled()


def test_threads_start_with_their_own_mode() -> None:
    seen = {}

    def work() -> None:
        seen["start"] = is_grad_enabled()
        with no_grad():
            barrier.wait(5)
            seen["inside"] = is_grad_enabled()

    barrier = threading.Barrier(2)
    with no_grad():
        thread = threading.Thread(target=work)
        thread.start()
        barrier.wait(5)
        thread.join(5)
    assert seen == {"start": True, "inside": False}
    assert is_grad_enabled()


def test_no_grad_saves_nothing() -> None:
    x = tensor(np.ones(4), requires_grad=True)
    with no_grad():
        y = (x * x).tanh()
    assert y.node is None
    assert not y.requires_grad
    with no_grad(), enable_grad():
        assert (x * 2.0).requires_grad


def test_set_grad_enabled_acts_at_once_as_in_torch() -> None:
    for library in (gw, torch):
        x = library.tensor([1.0], requires_grad=True)
        with library.enable_grad():
            library.set_grad_enabled(False)
            assert not library.is_grad_enabled()
            assert not (x * 2.0).requires_grad
            library.set_grad_enabled(mode=True)
            assert library.is_grad_enabled()
            with library.set_grad_enabled(False):
                assert not library.is_grad_enabled()
            assert library.is_grad_enabled()
            untaped = library.set_grad_enabled(False)(library.is_grad_enabled)
            assert library.is_grad_enabled()
            assert not untaped()
            with library.no_grad():
                library.set_grad_enabled(True)
            assert library.is_grad_enabled()


def test_set_grad_enabled_and_decorators_without_parentheses() -> None:
    for value in (True, False):
        with set_grad_enabled(value):
            assert is_grad_enabled() is value
        assert set_grad_enabled(value)(is_grad_enabled)() is value
    assert no_grad(is_grad_enabled)() is False
    with no_grad():
        assert enable_grad(is_grad_enabled)() is True

    @no_grad
    def values():
        yield is_grad_enabled()

    assert list(values()) == [False]


@pytest.mark.parametrize(
    ("name", "trains", "tapes"), [("train", True, True), ("eval", False, False), ("eval_grad", False, True)]
)
def test_mode_sets_training_and_the_tape(name: str, trains: bool, tapes: bool) -> None:
    for outer in (no_grad, enable_grad):
        with outer():
            with mode(name):
                assert (training(True), training(False), is_grad_enabled()) == (trains, trains, tapes)
                with pytest.raises(KeyError), mode("train"):
                    raise KeyError
                assert (training(True), is_grad_enabled()) == (trains, tapes)
            assert is_grad_enabled() is (outer is enable_grad)
    assert (training(True), training(False), training()) == (True, False, None)
    with pytest.raises(UsageError, match="eval_grad"), mode("test"):
        pass


class Noisy(nn.Module):
    """Scales by 2 while it trains: a layer with two ways to act."""

    def __init__(self) -> None:
        self.training = True
        self.weight = Parameter(array_of(tensor(np.array([3.0]))))

    def forward(self, x):
        return x * self.weight * (2.0 if training(self.training) else 1.0)


def test_gradients_flow_through_a_layer_in_eval() -> None:
    layer = Noisy()
    x = tensor(np.array([1.0]), requires_grad=True)
    layer.training = False
    layer(x).sum().backward()  # the module's own flag cuts nothing
    assert (grad_of(x).tolist(), grad_of(layer.weight).tolist()) == ([3.0], [1.0])
    layer.training = True
    with mode("eval_grad"):  # a saliency map
        assert grad(layer(x).sum(), x)[0].tolist() == [3.0]
    with mode("eval"):
        assert (layer(x).node, layer(x).tolist()) == (None, [3.0])
    assert layer(x).tolist() == [6.0]
    step = gw.compile(layer)
    assert step(x).tolist() == [6.0]
    with mode("eval"):
        assert step(x).tolist() == [3.0]
    assert step(x).tolist() == [6.0]


LOW = {"matmul", "linear", "linear_int8", "sdpa", "conv", "conv_transpose", "conv_weight"}
LOW |= {"grouped_matmul", "expert_mlp", "routed_attention", "grouped_outer", "block_sdpa", "sdpa_selected"}
F32 = {
    *("exp", "expm1", "log", "log1p", "pow", "rsqrt", "reciprocal"),
    *("log2", "log10", "exp2", "lgamma", "digamma"),
    *("sum", "mean", "prod", "cumsum", "logsumexp", "softmax", "log_softmax"),
    *("cross_entropy", "bce", "bce_with_logits", "rope", "solve", "linear_scan"),
}
KEEP = {"rms_norm", "tanh", "silu", "relu", "gelu", "amax", "reshape", "permute", "copy"}
"""What each op computes in under autocast, as the list in the spec has it: matrix products low, statistics f32."""


@pytest.mark.parametrize("low", [bfloat16, float16], ids=str)
@pytest.mark.parametrize("kind", [float32, bfloat16], ids=str)
@pytest.mark.parametrize("name", sorted(LOW | F32 | KEEP))
def test_autocast_runs_each_class_in_its_dtype(name: str, kind, low) -> None:
    inputs, attrs = OPS[name].sample(np.random.default_rng(0))
    given = [tensor(x, kind) if np.asarray(x).dtype == np.float64 else tensor(x) for x in inputs]
    with autocast_to(low):
        out = call(name, *given, **attrs)
    first = out[0] if isinstance(out, tuple) else out
    assert first.dtype is (low if name in LOW else float32 if name in F32 else kind)
    plain = call(name, *given, **attrs)
    assert (plain[0] if isinstance(plain, tuple) else plain).dtype is (float32 if name == "cross_entropy" else kind)


def test_every_amp_class_is_listed_or_promotes() -> None:
    for name, row in OPS.items():
        if row.traits.amp in ("low", "f32") and not name.endswith("_backward"):
            assert name in LOW | F32, f"{name} changes dtype under autocast and is in no list here"


def test_autocast_keeps_float64_and_its_casts_are_visible() -> None:
    x, w = tensor(np.ones((2, 3)), requires_grad=True), tensor(np.ones((4, 3)))
    with autocast_to(bfloat16):
        y = call("linear", x.float(), w.float())
        assert call("sum", x, axes=(0,)).dtype is float64
        with autocast_to(None):
            assert call("linear", x.float(), w.float()).dtype is float32
    assert [e[0].op.name for e in y.node.edges if e] == ["cast"]
    y.float().sum().backward()
    assert grad_of(x).dtype is float64


def test_autocast_does_not_cast_integers() -> None:
    x, ids = tensor(np.ones((2, 3), np.float32)), tensor([[1, 2, 3]])
    with autocast_to(bfloat16), pytest.raises(DTypeError):  # not cast in silence
        call("linear", x, ids)


def test_no_weight_cast_is_cached() -> None:
    x, w = tensor(np.ones((1, 2), np.float32)), tensor(np.ones((1, 2), np.float32))
    with autocast_to(bfloat16):
        before = call("linear", x, w).item()
        array_of(w).copy_from(array_of(tensor(np.full((1, 2), 3.0, np.float32))))
        assert (before, call("linear", x, w).item()) == (2.0, 6.0)
