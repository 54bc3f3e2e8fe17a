"""The tape and backward: fan-in, depth, and errors that leave gradients unchanged."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import graphwright as gw
from graphwright.array import int64
from graphwright.autograd import (
    GradShapeRequired,
    GraphFreed,
    ModifiedSinceForward,
    NoTape,
    NotDifferentiable,
    Parameter,
    Tensor,
    Variable,
    backward,
    grad,
    no_grad,
    tensor,
    update,
)
from graphwright.errors import DTypeError, ShapeError
from graphwright.ops import OPS, call, compute
from graphwright.testing.gradcheck import gradcheck
from values import array_of, grad_of, source_at, vjp_of


def leaf(*values: float) -> Tensor:
    return tensor(np.array(values), requires_grad=True)


def test_an_operand_used_twice_gets_both_gradients() -> None:
    x = leaf(3.0)
    (x * x).backward(tensor(np.array([1.0])))
    assert grad_of(x).tolist() == [6.0]
    y = leaf(3.0)
    (y + y).sum().backward()
    assert grad_of(y).tolist() == [2.0]


def test_a_diamond_visits_each_node_once() -> None:
    calls = []
    row = OPS["tanh"]
    vjp = vjp_of("tanh")

    def counted(g, ins, outs, attrs, needs):
        calls.append(1)
        return vjp(g, ins, outs, attrs, needs)

    from dataclasses import replace

    from graphwright.autograd.apply import apply

    x = leaf(0.3, -0.2)
    h = apply(replace(row, vjp=counted), [x], {})
    for _ in range(10):
        h = h.reshape(2) + h * 1.0  # 2¹⁰ paths, of two lengths: the younger node must be walked first
    h.sum().backward()
    assert len(calls) == 1
    assert np.allclose(grad_of(x).numpy(), 1024 * (1 - np.tanh([0.3, -0.2]) ** 2))


def test_gradients_of_many_readers_and_of_several_results_are_summed() -> None:
    rng = np.random.default_rng(0)
    gradcheck(lambda x: sum((x * k for k in range(1, 9)), x), [rng.normal(size=4)])

    def both(scores: Tensor) -> Tensor:
        loss, lse = call("cross_entropy", scores, tensor(np.array([0, 2])))
        return loss * 2.0 + lse * lse

    gradcheck(both, [rng.normal(size=(2, 3))])
    gradcheck(lambda s: call("cross_entropy", s, tensor(np.array([0, 2])))[1], [rng.normal(size=(2, 3))])


@pytest.mark.deep
def test_a_chain_of_100_000_needs_no_recursion() -> None:
    x = leaf(1.0)
    y = x
    for _ in range(100_000):
        y = y + 1.0
    y.sum().backward()
    assert grad_of(x).tolist() == [1.0]
    del y  # the tape of a chain is freed without recursion too


def test_two_losses_on_one_trunk_give_the_gradient_of_their_sum() -> None:
    x, w = leaf(0.3, -0.4), leaf(2.0)

    def trunk() -> Tensor:
        return (x * w).tanh()

    h = trunk()
    h.sum().backward(retain_graph=True)
    (h * h).sum().backward()
    apart = [grad_of(x).numpy().copy(), grad_of(w).numpy().copy()]
    h = trunk()
    together = grad(h.sum() + (h * h).sum(), [x, w])
    assert all(np.allclose(a, b.numpy(), rtol=1e-12) for a, b in zip(apart, together, strict=True))


def test_a_second_backward_needs_retain_graph() -> None:
    x = leaf(2.0)
    y = (x * x).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert grad_of(x).tolist() == [8.0]
    with pytest.raises(GraphFreed, match="retain_graph"):
        y.backward()
    assert grad_of(x).tolist() == [8.0]


def test_several_elements_need_an_initial_gradient() -> None:
    x = leaf(1.0, 2.0)
    with pytest.raises(GradShapeRequired):
        (x * 2.0).backward()
    with pytest.raises(ShapeError):
        (x * 2.0).backward(tensor(np.ones(3)))
    assert x.grad is None
    (x * 2.0).sum().reshape(1, 1).backward()
    assert grad_of(x).tolist() == [2.0, 2.0]


def test_backward_without_a_tape_raises() -> None:
    with pytest.raises(NoTape):
        tensor([1.0]).backward()
    x = leaf(1.0)
    with no_grad():
        y = x * 2.0
    with pytest.raises(NoTape):
        y.backward()
    with pytest.raises(NoTape, match="allow_unused"):
        grad(x * 1.0, leaf(1.0))
    assert grad(x * 1.0, leaf(1.0), allow_unused=True) == (None,)


def test_integers_cannot_require_gradients() -> None:
    with pytest.raises(DTypeError):
        tensor([1, 2], requires_grad=True)
    x = tensor([1.5], requires_grad=True)
    assert not x.to(int64).requires_grad
    assert not call("argmax", x).requires_grad


@pytest.mark.parametrize(
    "name", [n for n, row in OPS.items() if row.vjp is not None and (row.saves.inputs or row.saves.outputs)]
)
def test_backward_refuses_an_overwritten_saved_value(name: str) -> None:
    row = OPS[name]
    inputs, attrs = row.sample(np.random.default_rng(0))

    def forward() -> tuple[list[Tensor], tuple[Tensor, ...]]:
        given = [tensor(x, requires_grad=np.asarray(x).dtype == np.float64) for x in inputs]
        out = call(name, *given, **attrs)
        return given, out if isinstance(out, tuple) else (out,)

    def touch(t: Tensor) -> None:
        array_of(t).copy_from(array_of(t).copy())

    for index in range(len(inputs)):
        given, outs = forward()
        touch(given[index])
        if index in row.saves.inputs:
            with pytest.raises(ModifiedSinceForward, match=name) as caught:
                outs[0].sum().backward()
            assert all(t.grad is None for t in given)
            assert (caught.value.op, caught.value.value) == (name, f"operand {index}")
            assert source_at(caught.value.line) == "out = call(name, *given, **attrs)"
        elif name != "rope":
            outs[0].sum().backward()
    for port in row.saves.outputs:
        given, outs = forward()
        touch(outs[port])
        with pytest.raises(ModifiedSinceForward, match=name) as caught:
            outs[0].sum().backward()
        assert caught.value.value == f"result {port}"


def test_a_write_through_a_view_is_detected() -> None:
    x = tensor(np.ones((2, 3)), requires_grad=True)
    h = x * 1.0
    view = h.reshape(6)
    y = (view * view).sum()
    array_of(h).copy_from(array_of(h).copy())
    with pytest.raises(ModifiedSinceForward):
        y.backward()


def test_gradients_of_inner_values_duplicates_and_the_result_are_correct() -> None:
    x = leaf(0.5)
    h = x * 2.0
    y = h * h
    gh, again, gx, gy = grad(y.sum(), [h, h, x, y])
    assert (gh.tolist(), again.tolist(), gx.tolist(), gy.tolist()) == ([2.0], [2.0], [4.0], [1.0])
    assert x.grad is None


def test_higher_derivatives_of_a_cube_are_exact() -> None:
    x = leaf(0.7, -1.3)
    g = grad((x * x * x).sum(), x, create_graph=True)[0]
    assert np.allclose(g.numpy(), 3 * np.array([0.7, -1.3]) ** 2)
    assert np.allclose(grad(g.sum(), x)[0].numpy(), 6 * np.array([0.7, -1.3]))
    third = grad(grad(grad((x * x * x).sum(), x, create_graph=True)[0].sum(), x, create_graph=True)[0].sum(), x)[0]
    assert third.tolist() == [6.0, 6.0]


def test_detach_shares_memory_and_cuts_the_tape() -> None:
    generator, critic = leaf(2.0), leaf(3.0)
    fake = generator * generator
    cut = fake.detach()
    assert array_of(cut).storage is array_of(fake).storage
    assert not cut.requires_grad
    (cut * critic).sum().backward()
    assert generator.grad is None
    assert grad_of(critic).tolist() == [4.0]
    (fake * critic.detach()).sum().backward()
    assert grad_of(generator).tolist() == [12.0]
    assert grad_of(critic).tolist() == [4.0]


def test_clone_and_casts_stay_on_the_tape() -> None:
    x = leaf(1.5, 2.5)
    for out in (x.clone(), x.to("float32"), x.to("bfloat16"), x.to("float32").to("float64")):
        assert out.requires_grad
        g = grad(out.to("float64").sum(), x)[0]
        assert g.spec == x.spec
        assert g.tolist() == [1.0, 1.0]


def test_an_op_without_a_vjp_is_refused_only_when_its_gradient_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    monkeypatch.setitem(OPS, "sdpa_backward", replace(OPS["sdpa_backward"], expand=None))
    inputs, attrs = OPS["sdpa"].sample(np.random.default_rng(0))
    xs = [tensor(x, requires_grad=True) for x in inputs]
    g = grad(call("sdpa", *xs, **attrs).sum(), xs, create_graph=True)[0]
    penalty = call("sdpa", *xs, **attrs).sum() + (g * g).sum()  # a mix that must not lose its second term silently
    with pytest.raises(NotDifferentiable):
        penalty.backward()
    assert all(x.grad is None for x in xs)


def test_frozen_operands_get_no_gradient() -> None:
    seen = []
    from dataclasses import replace

    from graphwright.autograd.apply import apply

    vjp = vjp_of("linear")
    spy = replace(
        OPS["linear"],
        vjp=lambda g, ins, outs, attrs, needs: (seen.append(needs), vjp(g, ins, outs, attrs, needs))[1],
    )
    x, w, b = (tensor(np.ones(s)) for s in ((2, 3), (4, 3), (4,)))
    b.requires_grad = True
    apply(spy, [x, w, b], {}).sum().backward()
    assert seen == [(False, False, True)]
    assert (x.grad, w.grad) == (None, None)
    assert grad_of(b).tolist() == [2.0] * 4


def test_a_parameter_may_change_after_backward_but_not_before() -> None:
    w = Parameter(array_of(tensor(np.ones(3))))
    loss = (w * w).sum()
    update([w], "add", w, tensor(np.ones(3)))
    with pytest.raises(ModifiedSinceForward):
        backward(loss)
    assert w.grad is None
    (w * w).sum().backward()
    assert grad_of(w).tolist() == [4.0] * 3


def test_gradients_of_broadcast_operands_have_their_shapes() -> None:
    rng = np.random.default_rng(2)
    for a, b in (((3, 1, 4), (5, 1)), ((), (2, 3)), ((1, 1), (4,)), ((0, 3), (1, 3)), ((2, 3), (2, 3))):
        for name in ("add", "mul", "sub", "div", "maximum"):
            x, y = (tensor(rng.uniform(0.5, 2, s), requires_grad=True) for s in (a, b))
            gx, gy = grad(call(name, x, y).sum(), [x, y])
            assert (gx.spec, gy.spec) == (x.spec, y.spec)


def test_strided_saved_values_are_read_correctly() -> None:
    rng = np.random.default_rng(3)
    gradcheck(
        lambda a, b: call("matmul", call("permute", a, axes=(1, 0)), b[:, 1:]),
        [rng.normal(size=(3, 4)), rng.normal(size=(3, 5))],
    )
    gradcheck(lambda a: call("softmax", call("permute", a, axes=(1, 0))[::2]), [rng.normal(size=(3, 4))])


def test_the_initial_gradient_may_have_any_layout() -> None:
    x = tensor(np.ones((2, 3)), requires_grad=True)
    seed = tensor(np.arange(6.0).reshape(3, 2)).T
    (x * 2.0).backward(seed)
    assert np.array_equal(grad_of(x).numpy(), 2 * np.arange(6.0).reshape(3, 2).T)
    assert compute(OPS["copy"], [array_of(grad_of(x))], {})[0].contiguous


def test_gradients_of_two_losses_add_up_through_shared_parameters() -> None:
    rng = np.random.default_rng(2)
    low, high = (tensor(rng.normal(size=(4, 4)), requires_grad=True) for _ in range(2))
    x = tensor(rng.normal(size=(3, 4)))

    def losses() -> tuple[Tensor, Tensor]:
        h = (x @ low).tanh()
        return (h @ high).sum(), ((h @ high).tanh() * h).mean()

    first, second = losses()
    first.backward(retain_graph=True)
    second.backward()
    first, second = losses()
    together = grad(first + second, [low, high])
    for w, g in zip((low, high), together, strict=True):
        np.testing.assert_allclose(grad_of(w).numpy(), g.numpy(), rtol=1e-6)


def test_an_invalid_vjp_is_named_in_the_error() -> None:
    from dataclasses import replace

    from graphwright.autograd.apply import apply
    from graphwright.errors import ComputeError

    row, x = OPS["mul"], leaf(1.0, 2.0)
    for wrong in (
        lambda g, ins, outs, attrs, needs: (g,),
        lambda g, ins, outs, attrs, needs: (g[:1].reshape(1, 1, 1), g),
        lambda g, ins, outs, attrs, needs: (g.float(), g),
        lambda g, ins, outs, attrs, needs: (None, g),
    ):
        with pytest.raises(ComputeError, match="mul"):
            apply(replace(row, vjp=wrong), [x, x], {}).sum().backward()
        assert x.grad is None


def test_leaves_and_results_have_the_attributes_of_torch() -> None:
    x = leaf(1.0, 2.0)
    h = x * 3.0
    loss = h.sum()
    assert [(t.is_leaf, t.requires_grad, t.grad) for t in (x, h, loss)] == [
        (True, True, None),
        (False, True, None),
        (False, True, None),
    ]
    assert h.node.op.name == "mul"
    loss.backward()
    g = x.grad
    assert g is not None
    assert x.grad is g  # one object, read as often as one likes
    assert (h.grad, loss.grad, g.requires_grad, g.is_leaf) == (None, None, False, True)
    assert array_of(g).contiguous
    x.grad = None
    (x * 1.0).sum().backward()
    assert grad_of(x).tolist() == [1.0, 1.0]
    assert g.tolist() == [3.0, 3.0]  # a gradient moved out of the leaf is not written again


SAME_BITS: dict[str, tuple[tuple[str, ...], Callable[..., Tensor]]] = {
    "mlp": (("x", "w", "v"), lambda x, w, v: call("linear", call("linear", x, w).tanh(), v).sum()),
    "fan-in": (("x", "w"), lambda x, w: ((h := x @ w.T) * h + h.exp() * 0.1 + h.softmax()).sum()),
    "norm": (("x", "u"), lambda x, u: (call("rms_norm", x, u) * call("silu", x)).mean()),
    "broadcast": (("x", "u"), lambda x, u: (x / (u * u + 1.0) - u).amax(0).sum()),
    "low": (("x", "w"), lambda x, w: call("linear", x.to("bfloat16"), w.to("bfloat16")).float().sum()),
    "parts": (("x", "w"), lambda x, w: (x[:, :2] * w[:5, 1:3] + call("concat", x, x, axis=1)[:, 3:5]).sum()),
}


@pytest.mark.parametrize("name", SAME_BITS)
def test_eager_gradients_equal_program_grad_bit_for_bit(name: str) -> None:
    rng = np.random.default_rng(0)
    shapes = {"x": (5, 4), "w": (6, 4), "v": (3, 6), "u": (4,)}
    wanted, fn = SAME_BITS[name]
    values = {k: rng.normal(size=shapes[k]).astype("f4") for k in wanted}
    leaves = {k: tensor(v, requires_grad=True) for k, v in values.items()}
    eager = grad(fn(*leaves.values()), list(leaves.values()))
    program = gw.trace(fn, *values.values(), names=wanted)
    gradient = program.grad(program.outputs()[0], wanted, {})
    run = gradient.run(values)
    planned = gw.compile(gradient, deterministic=True)(values)
    for k, mine in zip(wanted, eager, strict=True):
        assert mine.numpy().tobytes() == run[f"grad.{k}"].tobytes()
        assert mine.numpy().tobytes() == planned[f"grad.{k}"].numpy().tobytes()


def test_loop_carried_state_is_a_constant_for_gradients() -> None:
    """h_t = a·h_{t-1} + x_t: dL/da = h_{T-1} through a Variable; else s_t = h_{t-1} + a·s_{t-1}."""
    xs = [0.5, -1.0, 2.0, 0.25]

    def roll(a: float) -> tuple[float, float, float]:
        h = s = before = 0.0
        for x in xs:
            before, h, s = h, a * h + x, h + a * s
        return h, s, before

    a = leaf(0.7)
    state = Variable(array_of(tensor(np.array([0.0]))), name="h")
    found = None
    for x in xs:
        last = a * state + x
        found = grad(last.sum(), a)[0].item()
        state.assign(last)
    assert found == pytest.approx(roll(0.7)[2])
    h = tensor(np.array([0.0]))
    for x in xs:
        h = a * h + x
    assert grad(h.sum(), a)[0].item() == pytest.approx(roll(0.7)[1])
    step = (roll(0.7 + 1e-6)[0] - roll(0.7 - 1e-6)[0]) / 2e-6
    assert roll(0.7)[1] == pytest.approx(step, rel=1e-6)


def test_a_junction_sums_gated_edges() -> None:
    rng = np.random.default_rng(0)
    edges = [rng.normal(size=(2, 3)) for _ in range(3)]
    gates = [rng.normal(size=()) for _ in range(3)]

    def gated(*values: Tensor) -> Tensor:
        return call("junction", *(x * s for x, s in zip(values[:3], values[3:], strict=True)))

    gradcheck(gated, [*edges, *gates])
    leaves = [tensor(v, requires_grad=True) for v in (*edges, *gates)]
    seed = rng.normal(size=(2, 3))
    found = grad(gated(*leaves), leaves, [tensor(seed)])
    for g, s in zip(found[:3], gates, strict=True):
        np.testing.assert_allclose(g.numpy(), s * seed)
    for g, x in zip(found[3:], edges, strict=True):
        np.testing.assert_allclose(g.numpy(), (seed * x).sum())
    low = [tensor(e).to("bfloat16") for e in edges]
    theirs = [torch.tensor(e).to(torch.bfloat16) for e in edges]
    assert np.array_equal(call("junction", *low[:2]).numpy("f4"), (theirs[0] + theirs[1]).float().numpy())
    once = (theirs[0].float() + theirs[1].float() + theirs[2].float()).to(torch.bfloat16)
    assert np.array_equal(call("junction", *low).numpy("f4"), once.float().numpy())


@pytest.mark.parametrize("name", [n for n, row in OPS.items() if row.traits.flat])
def test_ops_without_slope_have_gradient_0_as_in_torch(name):
    """Eager, as a derived gradient and in a compiled step; torch's floor_divide has no derivative at all."""
    theirs: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "step": lambda x: torch.heaviside(x, torch.zeros(())),
        "floor_divide": lambda x: torch.floor(x / 2.0),
    }
    operands = {"floor_divide": (2.0,)}.get(name, ())
    x = np.linspace(-2.2, 2.2, 6, dtype="f4").reshape(2, 3)
    reference = torch.tensor(x, requires_grad=True)
    if name != "step":  # heaviside has no derivative in torch either
        function = theirs.get(name) or getattr(torch, name)
        function(reference).sum().backward()
        assert not grad_of(reference).any()
    leaf = gw.tensor(x, requires_grad=True)
    call(name, leaf, *operands).sum().backward()
    assert grad_of(leaf).spec == leaf.spec
    assert not grad_of(leaf).numpy().any()
    p = gw.trace(lambda x: call(name, x, *operands).sum(), x)
    g = p.grad("out", ["x"])
    for found in (g.run(x=x), g.compile(x=x.shape)(x=x)):
        assert found["grad.x"].to_numpy().tolist() == np.zeros((2, 3)).tolist()
    net = gw.nn.Linear(3, 3)
    opt = gw.optim.SGD(net.parameters(), lr=1.0)

    @gw.compile
    def step(x):
        opt.zero_grad()
        loss = call(name, net(x), *operands).sum()
        loss.backward()
        opt.step()
        return loss

    before = {k: v.numpy() for k, v in net.state_dict().items()}
    step(x)
    assert all(np.array_equal(before[k], v.numpy()) for k, v in net.state_dict().items())
