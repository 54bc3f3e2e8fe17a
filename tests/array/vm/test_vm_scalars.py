"""Networks of single numbers on the VM, which packs them into runs, beside ATen; and Adam on single numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import graphwright as gw
from graphwright import optim
from graphwright.array.vm.code import Code
from graphwright.plan import Executable
from graphwright.program import Builder, Program

UNARY = ("tanh", "neg", "sigmoid", "exp", "relu")  # relu has no line of a run: it ends one
BINARY = ("add", "sub", "mul", "div")


@st.composite
def scalar_programs(draw) -> tuple[Program, dict[str, np.ndarray]]:
    """DAGs over numbers, some of which meet a vector, of lengths around a run's lines per row."""
    b = Builder("scalars")
    feeds = {name: np.float32(draw(st.floats(-2, 2, width=32))) for name in ("x", "y")}
    vector = np.linspace(0.5, 2, draw(st.sampled_from([1, 3, 40])), dtype="f4")
    made = [b.input(name, ()) for name in feeds]
    wide = b.input("v", vector.shape)
    for _ in range(draw(st.integers(1, 30))):
        one, other = (made[draw(st.integers(max(0, len(made) - 9), len(made) - 1))] for _ in range(2))
        kind = draw(st.integers(0, 7))
        if kind < 4:
            made.append(getattr(b, BINARY[kind])(one, b.tanh(other) if BINARY[kind] != "div" else b.exp(b.tanh(other))))
        elif kind < 7:
            made.append(b.tanh(getattr(b, draw(st.sampled_from(UNARY)))(b.tanh(one))))
        else:
            made.append(b.tanh(b.sum(b.mul(wide, one), axes=(0,))))
    for k, node in enumerate(made[-draw(st.integers(1, 3)) :]):
        b.output(node, f"y{k}")
    return b.build(), {**{name: np.asarray(value) for name, value in feeds.items()}, "v": vector}


@settings(deadline=None)
@given(scalar_programs())
def test_scalar_networks_match_aten(case) -> None:
    p, feeds = case
    sizes = {name: a.shape for name, a in feeds.items()}
    truth = Executable(p.compile(sizes)).run(feeds)
    space = Executable(p.compile(sizes, executor="vm"))
    for _ in range(2):
        for name, value in space.run(feeds).items():
            np.testing.assert_allclose(value.to_numpy(), truth[name].to_numpy(), rtol=2e-5, atol=2e-5)


def test_scalar_arithmetic_is_one_packed_run_and_exact() -> None:
    b = Builder("chain")
    x, y = b.input("x", ()), b.input("y", ())
    made = [x, y]
    for k in range(13):
        made.append(getattr(b, BINARY[k % 4])(made[-1], made[-2]))
    b.output(made[-1], "z")
    space = Executable(b.build().compile(x=(), y=(), executor="vm"))
    values = [np.float32(1.3), np.float32(-0.7)]
    result = space.run({"x": np.asarray(values[0]), "y": np.asarray(values[1])})["z"]
    for k in range(13):
        values.append((np.add, np.subtract, np.multiply, np.divide)[k % 4](values[-1], values[-2]))
    assert result.to_numpy() == values[-1]
    rows = space.kernels.calls[0]._code
    assert [tuple(row[:2]) for row in rows if row[0] == Code.SCALARS] == [(Code.SCALARS, 13)]


def test_adam_on_scalars_matches_adam_on_a_vector() -> None:
    start, slope = (np.random.default_rng(seed).normal(size=5).astype("f4") for seed in (0, 1))
    apart, together = [gw.Parameter(v) for v in start], gw.Parameter(start)

    def stepping(params: list[gw.Parameter]) -> Callable[..., object]:
        opt = optim.AdamW(params, lr=0.1, weight_decay=0.01)

        def step(*grads: gw.Tensor) -> None:
            for p, g in zip(params, grads, strict=True):
                p.grad = g
            opt.step()

        return gw.compile(step, executor="vm")

    one, other = stepping(apart), stepping([together])
    for k in range(5):
        one(*[gw.tensor(v * (k + 1)) for v in slope])
        other(gw.tensor(slope * (k + 1)))
    np.testing.assert_allclose([p.item() for p in apart], together.numpy(), rtol=2e-6)
