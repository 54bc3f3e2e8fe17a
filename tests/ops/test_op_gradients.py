"""Gradients of every op: difference quotients, every mask of wanted gradients against torch, second order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from op_cases import DRAWS, differentiable, draws
from torch_ops import TORCH, torch_grads

from graphwright.array import float32, from_numpy
from graphwright.autograd import Parameter, Tensor, grad, tensor
from graphwright.autograd.apply import apply
from graphwright.errors import ComputeError
from graphwright.ops import OPS, call
from graphwright.plan import compile
from graphwright.testing.gradcheck import check_masks, gradcheck, gradgradcheck
from graphwright.testing.oracle import assert_close
from seeds import deep
from values import grad_of

SCALED = "scale_gradient"  # its gradient is on purpose not that of its value


@pytest.mark.parametrize("name", [n for n in differentiable() if n != SCALED])
def test_gradients_match_finite_differences(name: str) -> None:
    for k, (inputs, attrs) in enumerate(draws(name, deep(DRAWS, 2))):  # the next test but one has all, against torch
        gradcheck(lambda *xs, a=attrs: apply(OPS[name], xs, a), inputs, seed=k, wrt=_wrt(name, inputs))


ONCE = ("gate", "block_sdpa", "block_entropy")  # their gradients are ops without a gradient
MANY_OPERANDS = ("routed_attention", "expert_mlp", "sdpa_selected")  # 2 ** operands subsets, each with a torch backward
LOW = [n for n in differentiable() if n not in ("rope", "copy", "cast", "sdpa_backward")]


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", LOW)
def test_gradients_in_16_bits_equal_rounded_float64_gradients(name: str, kind: str) -> None:
    """As torch in float64 gives from the same 16-bit operands; each step of a vjp may round once."""
    bits = 8 if kind == "bfloat16" else 11
    for k, (inputs, attrs) in enumerate(draws(name, 2)):
        floats = [x.dtype == np.float64 for x in inputs]
        low = [tensor(x).to(kind) if f else tensor(x) for x, f in zip(inputs, floats, strict=True)]
        if name == "cross_entropy_backward":  # its statistics stay in float32
            low[2], low[3] = (tensor(inputs[i]).to(float32) for i in (2, 3))
        for t, f in zip(low, floats, strict=True):
            t.requires_grad = f
        outs = apply(OPS[name], low, attrs)
        outs = outs if isinstance(outs, tuple) else (outs,)
        rng = np.random.default_rng(k)
        seeds = [tensor(rng.normal(size=o.shape)).to(o.dtype) for o in outs if o.requires_grad]
        ours = grad([o for o in outs if o.requires_grad], [t for t in low if t.requires_grad], seeds, allow_unused=True)
        exact = [t.numpy("float64") if f else x for t, x, f in zip(low, inputs, floats, strict=True)]
        theirs = torch_grads(name, exact, attrs, [s.numpy("float64") for s in seeds], floats)
        for mine, other in zip(ours, [g for g, f in zip(theirs, floats, strict=True) if f], strict=True):
            assert (mine is None) == (other is None)
            if mine is not None and other is not None:
                found = mine.numpy("float64")
                assert np.abs(found - other).max() <= 6 * 2.0**-bits * max(1.0, np.abs(other).max())


def _wrt(name: str, inputs: list[np.ndarray]) -> list[int]:
    """Operands that the row lets a gradient through to: cos and sin of rope are made of integers."""
    blind = {"rope": {1, 2}}.get(name, set())
    return [i for i, x in enumerate(inputs) if x.dtype == np.float64 and i not in blind]


@pytest.mark.parametrize("name", [n for n in differentiable() if n != "rope"])
def test_every_subset_of_gradients_matches_torch(name: str) -> None:
    for k, (inputs, attrs) in enumerate(draws(name, deep(DRAWS, 1) if name in MANY_OPERANDS else DRAWS)):
        masks = check_masks(
            OPS[name], inputs, attrs, lambda xs, seeds, mask, a=attrs: torch_grads(name, xs, a, seeds, mask), seed=k
        )
        assert masks == 2 ** sum(x.dtype == np.float64 for x in inputs) - 1


@pytest.mark.parametrize("name", [n for n in differentiable() if n not in ONCE])
def test_second_derivatives_match_finite_differences(name: str) -> None:
    for k, (inputs, attrs) in enumerate(draws(name, deep(2, 1))):
        ports = _wrt(name, inputs)
        fixed = [x if i in ports or x.dtype != np.float64 else Tensor(_array(x)) for i, x in enumerate(inputs)]
        free = [x for i, x in enumerate(inputs) if i in ports or x.dtype != np.float64]

        def fn(*xs: Tensor, _fixed: list = fixed, _attrs: dict = attrs) -> Tensor:
            rest = iter(xs)
            return apply(OPS[name], [x if isinstance(x, Tensor) else next(rest) for x in _fixed], _attrs)

        gradgradcheck(fn, free, seed=k)


def _array(x: np.ndarray):
    from graphwright.array import from_numpy

    return from_numpy(x)


@pytest.mark.parametrize("kind", ["float64", "float32"])
def test_second_derivatives_of_attention_match_torch(kind: str) -> None:
    for inputs, attrs in draws("sdpa"):
        mine = [tensor(x, kind, requires_grad=True) for x in inputs]
        theirs = [torch.tensor(x, requires_grad=True) for x in inputs]
        first = grad((call("sdpa", *mine, **attrs) ** 2).sum(), mine, create_graph=True)
        other = torch.autograd.grad((TORCH["sdpa"](theirs, attrs) ** 2).sum(), theirs, create_graph=True)
        found = grad(sum(((g * g).sum() for g in first), tensor(0.0)), mine)
        truth = torch.autograd.grad(torch.stack([(g * g).sum() for g in other]).sum(), theirs)
        tol = 1e-8 if kind == "float64" else 2e-3
        for a, b in zip(found, truth, strict=True):
            assert_close(a.to("float64"), b.numpy(), rtol=tol, atol=tol)


def test_gradients_at_ties_are_split() -> None:
    a, b = (tensor(v, requires_grad=True) for v in ([1.0, 2.0, 3.0], [2.0, 2.0, 2.0]))
    assert [g.tolist() for g in grad(call("maximum", a, b).sum(), [a, b])] == [[0, 0.5, 1], [1, 0.5, 0]]
    assert [g.tolist() for g in grad(call("minimum", a, b).sum(), [a, b])] == [[1, 0.5, 0], [0, 0.5, 1]]
    t = tensor([[3.0, 1.0, 3.0]], requires_grad=True)
    assert grad(t.amax(1).sum(), t)[0].tolist() == [[0.5, 0, 0.5]]


KINKS = [
    ("relu", {}), ("leaky_relu", {"slope": 0.01}), ("leaky_relu", {"slope": 0.2}), ("elu", {"alpha": 0.7}), ("abs", {}),
    ("clamp", {"low": 0.0, "high": 6.0}), ("clamp", {"low": -1.0, "high": None}), ("sech", {}), ("softplus", {}),
]  # fmt: skip


@pytest.mark.parametrize("executor", ["eager", "aten", "vm"])
@pytest.mark.parametrize(("name", "attrs"), KINKS, ids=str)
def test_slopes_at_kinks_are_those_of_torch(name: str, attrs: dict, executor: str) -> None:
    x = np.array([-1.0, -0.0, 0.0, 1.0, 6.0], "f4")
    mine, theirs = Parameter(from_numpy(x)), torch.tensor(x, requires_grad=True)
    TORCH[name]([theirs], attrs).sum().backward()

    def slope(factor: Tensor) -> Tensor:
        return grad((call(name, mine, **attrs) * factor).sum(), mine)[0]

    run = slope if executor == "eager" else compile(slope, executor=executor)
    assert_close(run(tensor(np.ones((), "f4"))), grad_of(theirs).numpy(), rtol=1e-6, atol=1e-7)


def test_an_infinite_gradient_does_not_reach_the_branch_not_taken() -> None:
    inf = float("inf")
    a, b = tensor([1.0, inf], requires_grad=True), tensor([2.0, inf], requires_grad=True)
    seed = tensor([inf, 1.0])
    for name in ("maximum", "minimum"):
        ga, gb = grad(call(name, a, b), [a, b], [seed])
        assert not np.isnan(ga.numpy()).any()
        assert not np.isnan(gb.numpy()).any()
        assert ga.tolist()[1] == gb.tolist()[1] == 0.5
    x = tensor([-1.0, 1.0], requires_grad=True)
    assert grad(call("relu", x), x, [tensor([inf, inf])])[0].tolist() == [0.0, inf]
    c = tensor([True, False])
    ga, gb = grad(call("where", c, a, b), [a, b], [tensor([inf, inf])])
    assert ga.tolist() == [inf, 0]
    assert gb.tolist() == [0, inf]


def test_gradients_of_repeated_ids_are_summed() -> None:
    table = tensor(np.zeros((4, 2)), requires_grad=True)
    ids = tensor([1, 1, 3, 1])
    g = grad(call("embedding", table, ids).sum(), table)[0]
    assert g.numpy()[:, 0].tolist() == np.bincount([1, 1, 3, 1], minlength=4).tolist()


def test_gradients_of_an_expanded_operand_are_summed() -> None:
    x = tensor(np.arange(3.0).reshape(3, 1), requires_grad=True)
    y = call("expand", x, shape=(2, 3, 4))
    assert grad((y * y).sum(), x)[0].numpy().ravel().tolist() == [0, 16, 32]


@pytest.mark.parametrize("bug", ["too few", "other shape", "other dtype", "left out"])
def test_invalid_vjp_results_are_refused(bug: str) -> None:
    wrong = {
        "too few": lambda g: (g,),
        "other shape": lambda g: (g, g.reshape(6)),
        "left out": lambda g: (g, None),
        "other dtype": lambda g: (g, g.to(float32)),
    }[bug]
    row = replace(OPS["add"], vjp=lambda g, ins, outs, attrs, needs: wrong(g))
    a, b = (tensor(np.ones((2, 3)), requires_grad=True) for _ in range(2))
    with pytest.raises(ComputeError, match="add"):
        grad(apply(row, [a, b], {}).sum(), [a, b])


ELEMENTWISE = [n for n in differentiable() if OPS[n].traits.elementwise and n not in ("where", SCALED)]
EDGE_SHAPES = {
    1: [[()], [(0,)], [(1,)], [(3, 0)], [(1, 1, 2)]],
    2: [[(), (2,)], [(0, 3), (1, 3)], [(2, 1), (1, 3)], [(1,), (1, 1)], [(0,), ()], [(2, 0, 3), (3,)]],
}
"""Shapes of operands that no sample has: without entries, with one, and broadcast between them."""


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_gradients_of_empty_unit_and_broadcast_shapes(name: str) -> None:
    row, attrs = OPS[name], draws(name, 1)[0][1]
    assert isinstance(row.arity, int)
    rng = np.random.default_rng(2)
    for shapes in EDGE_SHAPES[row.arity]:
        inputs = [rng.uniform(0.3, 0.7, shape) for shape in shapes]
        check_masks(row, inputs, attrs, lambda xs, seeds, mask: torch_grads(name, xs, attrs, seeds, mask))


def _floats(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    return [np.random.default_rng(len(s)).normal(size=s) for s in shapes]


EDGES: list[tuple[str, list[np.ndarray], dict]] = [
    *((n, _floats((0, 3)), {"axes": (0,), "keepdims": k}) for n in ("sum", "prod", "logsumexp") for k in (False, True)),
    *((n, _floats((0, 3)), {"axes": (1,)}) for n in ("sum", "prod", "mean", "amax", "amin", "logsumexp")),
    *((n, _floats((1, 1)), {"axes": (0, 1)}) for n in ("sum", "prod", "mean", "amax", "amin", "logsumexp")),
    *((n, _floats(s), {}) for n in ("softmax", "log_softmax") for s in ((0, 3), (3, 0), (1, 1), (2, 0, 3))),
    *(("cumsum", _floats(s), {"axis": 0, "reverse": r}) for s in ((0, 3), (1,), (3, 0)) for r in (False, True)),
    *(("sort", _floats(s), {}) for s in ((0, 3), (3, 0), (1, 1))),
    *(("topk", _floats(s), {"k": k}) for s, k in (((0, 3), 2), ((3, 0), 0), ((1, 1), 1), ((2, 3), 0))),
    *(("layer_norm", _floats(s, s[-1:], s[-1:]), {}) for s in ((0, 3), (2, 1), (1, 1))),
    *(("group_norm", _floats(s, (4,), (4,)), {"groups": 2}) for s in ((0, 4, 2), (1, 4))),
    *(("batch_norm", [*_floats(s, (3,)), np.ones(3)], {}) for s in ((0, 3), (1, 3), (2, 3, 0))),
    *(("rms_norm", _floats(s, s[-1:]), {}) for s in ((0, 3), (2, 1), (1, 1))),
    *(
        ("matmul", _floats(a, b), {})
        for a, b in (((0, 3), (3, 2)), ((2, 0), (0, 2)), ((1, 1), (1, 1)), ((0, 2, 3), (3, 1)))
    ),
    *(("linear", _floats(a, (2, 3), (2,)), {}) for a in ((0, 3), (1, 3), (2, 0, 3))),
    ("embedding", [*_floats((4, 3)), np.zeros((0,), np.int64)], {}),
    ("cross_entropy", [*_floats((0, 3)), np.zeros(0, np.int64)], {}),
    ("cross_entropy", [*_floats((1, 1)), np.zeros(1, np.int64)], {}),
]


@pytest.mark.parametrize(("name", "inputs", "attrs"), EDGES)
def test_gradients_of_empty_and_unit_axes(name: str, inputs: list[np.ndarray], attrs: dict) -> None:
    full = OPS[name].complete(attrs)
    check_masks(OPS[name], inputs, full, lambda xs, seeds, mask: torch_grads(name, xs, full, seeds, mask))
