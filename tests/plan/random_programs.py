"""Random programs for the plan tests: elementwise ops, views, reductions, products, junctions, aliases of sources."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import strategies as st

from graphwright.program import Builder, Program, Value

SHAPES = [(2, 3), (3, 2), (6,), (1, 6), (2, 1, 3), (), (4, 4), (1, 1), (0, 3)]
UNARY = ["neg", "tanh", "exp", "relu", "silu", "sigmoid", "abs", "copy"]
BINARY = ["add", "sub", "mul", "minimum", "maximum"]


@st.composite
def programs(draw, most: int = 14) -> tuple[Program, dict[str, np.ndarray]]:
    """A program and feeds for its inputs."""
    b = Builder("random")
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    feeds: dict[str, np.ndarray] = {}
    pool: list[Value] = []

    def fill(shape: tuple[int, ...]) -> np.ndarray:
        values = rng.uniform(-1, 1, shape).astype(np.float32)
        return np.where(rng.random(shape) < 0.1, np.float32(-0.0), values).astype(np.float32)

    for i in range(draw(st.integers(1, 3))):
        shape = draw(st.sampled_from(SHAPES))
        feeds[f"x{i}"] = fill(shape)
        pool.append(b.input(f"x{i}", shape))
    for i in range(draw(st.integers(0, 2))):
        shape = draw(st.sampled_from(SHAPES))
        pool.append(b.param(f"w{i}", fill(shape)))
        if draw(st.booleans()):  # what must be copied to be shown
            transposed = b.permute(pool[-1], axes=tuple(reversed(range(len(shape)))))
            pool.append(b.reshape(transposed, shape=(prod(shape),)))
    pool.append(b.const("one", np.float32(draw(st.sampled_from([1.0, 0.0, -0.0, 0.5])))))
    if draw(st.booleans()):
        pool.append(b.const("table", fill((4, 4))))

    def pick() -> Value:
        return (
            pool[-1 - draw(st.integers(0, min(len(pool) - 1, 5)))]
            if draw(st.booleans())
            else draw(st.sampled_from(pool))
        )

    for _ in range(draw(st.integers(1, most))):
        kind = draw(
            st.sampled_from(
                [
                    "unary",
                    "unary",
                    "binary",
                    "binary",
                    "view",
                    "view",
                    "reduce",
                    "product",
                    "junction",
                    "cast",
                    "concat",
                ]
            )
        )
        a = pick()
        shape = b.spec(a).shape
        if kind == "unary":
            pool.append(b.op(draw(st.sampled_from(UNARY)), a))
        elif kind == "binary":
            c = pick()
            if b.spec(c).dtype is not b.spec(a).dtype or not _broadcast(shape, b.spec(c).shape):
                c = a
            pool.append(b.op(draw(st.sampled_from(BINARY)), a, c))
        elif kind == "view":
            pool.append(_view(draw, b, a))
        elif kind == "reduce" and shape:
            axes = tuple(sorted(draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))))
            pool.append(b.op(draw(st.sampled_from(["sum", "mean"])), a, axes=axes, keepdims=draw(st.booleans())))
        elif kind == "product" and len(shape) == 2:
            pool.append(b.matmul(a, b.permute(a, axes=(1, 0))))
        elif kind == "junction":
            equal = [v for v in pool if b.spec(v) == b.spec(a)]
            pool.append(b.junction(*(draw(st.sampled_from(equal)) for _ in range(draw(st.integers(1, 4))))))
        elif kind == "cast":
            from graphwright.array import dtype

            c = b.cast(a, dtype=dtype(draw(st.sampled_from(["float64", "bfloat16", "float16", "float32"]))))
            pool.append(b.cast(c, dtype=b.spec(a).dtype) if draw(st.booleans()) else c)
        elif kind == "concat" and shape:
            pool.append(b.concat(a, b.neg(a), a, axis=draw(st.integers(0, len(shape) - 1))))
    for i in range(draw(st.integers(1, 4))):
        b.output(draw(st.sampled_from(pool[-6:] if draw(st.booleans()) else pool)), f"y{i}")
    return b.build(), feeds


def _broadcast(a: tuple, c: tuple) -> bool:
    try:
        np.broadcast_shapes(a, c)
    except ValueError:
        return False
    return True


def _view(draw, b: Builder, a: Value) -> Value:
    shape = b.spec(a).sizes
    kind = draw(st.sampled_from(["permute", "reshape", "slice", "expand", "last"]))
    if kind == "permute":
        return b.permute(a, axes=tuple(draw(st.permutations(range(len(shape))))))
    if kind == "reshape":
        return b.reshape(
            a,
            shape=draw(st.sampled_from([shape, (1, *shape), (prod(shape),), tuple(reversed(shape))])),
        )
    if kind == "expand":
        return b.expand(a, shape=(draw(st.integers(1, 2)), *shape))
    if shape and shape[-1]:
        if kind == "last":
            return b.last(a, axis=-1)
        axis = draw(st.integers(0, len(shape) - 1))
        if shape[axis]:
            start = draw(st.integers(0, shape[axis] - 1))
            return b.slice(a, axis=axis, start=start, size=shape[axis] - start)
    return a
