"""The algorithms of mixtures of experts: values and gradients of a loop over tokens in torch, choice, explanation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import graphwright as gw
from graphwright.array.formulas.experts import ALGORITHMS
from graphwright.errors import UsageError
from graphwright.program import Program

WIDTHS = {"even": (6, 6, 6, 6, 6), "ragged": (3, 8, 1, 6, 5)}


def program(kind: str, bias: bool, widths: tuple[int, ...], dtype: str, **attrs: Any) -> tuple[Program, dict[str, Any]]:
    """A loss of a mixture by ids, with gradients of x, the weights and all matrices; its inputs."""
    rng, c, tokens, experts = np.random.default_rng(len(widths)), 7, 23, len(widths)
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :2].copy()
    ids[3], ids[:, 1][ids[:, 1] == 4] = -1, 0  # a token without experts; expert 4 is chosen first or not at all
    feeds = {"x": rng.normal(size=(tokens, c)), "w": rng.normal(size=(tokens, 2)), "g": rng.normal(size=(tokens, c))}
    b = gw.Builder("mixture")
    x, w, g = (b.input(n, feeds[n].shape, dtype) for n in "xwg")
    offsets, rows, pairs = b.dispatch(b.input("ids", ids.shape, "int64"), experts=experts)
    matrices = []
    for e, inner in enumerate(widths):
        for name, shape in [("gate", (inner, c))] * (kind != "mlp") + [("up", (inner, c)), ("down", (c, inner))]:
            matrices.append(b.param(f"e{e}.{name}", (rng.normal(size=shape) / 2).astype(dtype)))
            matrices += [b.param(f"e{e}.{name}.bias", rng.normal(size=shape[0]).astype(dtype))] if bias else []
    y = b.expert_mlp(x, offsets, rows, pairs, w, *matrices, name="experts", kind=kind, bias=bias, **attrs)
    b.output(y, "y")
    b.output(b.sum(b.mul(y, g), axes=(0, 1), keepdims=False), "loss")
    return b.build(), {"ids": ids, **{n: v.astype(dtype) for n, v in feeds.items()}}


def oracle(p: Program, feeds: dict[str, Any], kind: str) -> dict[str, np.ndarray]:
    """Values and gradients by a loop over tokens and their experts, in float64 by torch."""
    of = {key: torch.tensor(v.numpy().astype("f8"), requires_grad=True) for key, v in p.weights.items()}
    x, w = (torch.tensor(feeds[n].astype("f8"), requires_grad=True) for n in "xw")

    def linear(e: int, name: str, t: torch.Tensor) -> torch.Tensor:
        y = of[f"e{e}.{name}"] @ t
        return y + of[f"e{e}.{name}.bias"] if f"e{e}.{name}.bias" in of else y

    rows = []
    for n, chosen in enumerate(feeds["ids"]):
        total = torch.zeros_like(x[n])
        for slot, e in sorted(enumerate(chosen), key=lambda pair: pair[1]):
            if e < 0:
                continue
            up = linear(e, "up", x[n])
            if kind == "oai":
                gate = linear(e, "gate", x[n]).clamp(max=7)
                inner = (up.clamp(-7, 7) + 1) * gate * torch.sigmoid(1.702 * gate)
            else:
                inner = torch.nn.functional.silu(linear(e, "gate", x[n])) * up if kind == "gated" else up.relu()
            total = total + w[n, slot] * linear(e, "down", inner)
        rows.append(total)
    y = torch.stack(rows)
    (y * torch.tensor(feeds["g"].astype("f8"))).sum().backward()
    found = {"y": y, **{f"grad.{n}": t.grad for n, t in (("x", x), ("w", w), *of.items())}}
    return {n: (torch.zeros_like(of[n[5:]]) if t is None else t).detach().numpy() for n, t in found.items()}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("kind", ["gated", "mlp", "oai"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_algorithms_agree_with_a_loop_over_tokens(algorithm: str, kind: str, widths: str, bias: bool) -> None:
    for dtype, tolerance in (("float32", 1e-5), ("float64", 1e-10)):
        act = {"act": "relu"} if kind == "mlp" else {}
        p, feeds = program(kind, bias, WIDTHS[widths], dtype, **act)
        full = p.grad("loss", [*p.weights, "x", "w"])
        shapes = {n: v.shape for n, v in feeds.items()}
        for executor in ("auto", "aten"):
            plan = p.compile(shapes, outputs=["y"], experts=algorithm, executor=executor)
            back = full.compile(shapes, experts=algorithm, executor=executor)
            found, expected = {**plan(feeds), **back(feeds)}, oracle(p, feeds, kind)
            for name, value in expected.items():
                got = np.asarray(found[name])
                np.testing.assert_allclose(got, value, rtol=tolerance, atol=tolerance * (1 + np.abs(value).max()))
            text = plan.explain("experts")
            assert f"algorithm {algorithm}: as asked for" in text
            native = executor == "auto" and dtype == "float32" and algorithm in ("sorted", "gather")
            assert (" on vm" in text) == native


def test_an_algorithm_of_a_node_is_kept() -> None:
    p, feeds = program("gated", False, WIDTHS["even"], "float32", algorithm="dense")
    plan = p.compile({n: v.shape for n, v in feeds.items()}, experts="gather")
    assert "algorithm dense" in plan.explain("experts")


def test_auto_is_a_function_of_shapes_with_a_reason() -> None:
    p, feeds = program("gated", False, WIDTHS["even"], "float32")
    shapes = {n: v.shape for n, v in feeds.items()}
    texts = {p.compile(shapes, outputs=["y"]).explain("experts") for _ in range(3)}
    assert len(texts) == 1
    assert "algorithm sorted: " in texts.pop()


def stored(tokens: int, experts: int) -> tuple[Program, dict[str, Any]]:
    """A mixture in float32 over weights that are stored in bfloat16."""
    rng, c, inner = np.random.default_rng(0), 40, 33
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :2].copy()
    b = gw.Builder("stored")
    x, w = b.input("x", (tokens, c), "float32"), b.input("w", (tokens, 2), "float32")
    runs = b.dispatch(b.input("ids", (tokens, 2), "int64"), experts=experts)
    matrices = []
    for key, shape in [(f"{e}.{n}", s) for e in range(experts) for n, s in matrices_of(inner, c)]:
        param = b.param(key, gw.tensor(rng.normal(size=shape).astype("f4")).to(gw.bfloat16).data)
        matrices.append(b.cast(param, dtype=gw.float32))
    b.output(b.expert_mlp(x, *runs, w, *matrices, name="experts"), "y")
    feeds = {"x": rng.normal(size=(tokens, c)).astype("f4"), "w": rng.random((tokens, 2)).astype("f4"), "ids": ids}
    return b.build(), feeds


def matrices_of(inner: int, c: int) -> list[tuple[str, tuple[int, int]]]:
    return [("gate", (inner, c)), ("up", (inner, c)), ("down", (c, inner))]


@pytest.mark.parametrize("tokens", [1, 3, 60])
def test_weights_stored_in_bfloat16_are_read_as_they_are(tokens: int) -> None:
    p, feeds = stored(tokens, 6)
    shapes = {n: v.shape for n, v in feeds.items()}
    plan, wide = p.compile(shapes, freeze=True), p.compile(shapes, executor="aten")
    assert len([r for r in plan.rewrites if r.rule == "narrow weight"]) == 18
    assert not any(i.op == "cast" for i in plan.instrs)
    assert not plan.folds
    expected = wide(feeds)["y"]
    np.testing.assert_allclose(plan(feeds)["y"], expected, rtol=1e-5, atol=1e-4)
    others = {name: p.compile(shapes, freeze=True, experts=name) for name in ("dense", "reference")}
    for name, other in others.items():
        assert not any(r.rule == "narrow weight" for r in other.rewrites), f"{name} reads float32"
        np.testing.assert_allclose(other(feeds)["y"], expected, rtol=1e-5, atol=1e-4)


def test_memory_does_not_grow_with_tokens_times_experts() -> None:
    """At equal k, 120 further experts cost a counter each, and an offset."""

    def arena(experts: int, algorithm: str) -> int:
        rng, tokens, c, inner = np.random.default_rng(0), 64, 16, 8
        b = gw.Builder("mixture")
        x, w = b.input("x", (tokens, c), "float32"), b.input("w", (tokens, 2), "float32")
        runs = b.dispatch(b.input("ids", (tokens, 2), "int64"), experts=experts)
        matrices = [
            b.param(f"{e}.{n}", rng.normal(size=s).astype("f4"))
            for e in range(experts)
            for n, s in matrices_of(inner, c)
        ]
        b.output(b.sum(b.expert_mlp(x, *runs, w, *matrices), axes=(0, 1), keepdims=False), "loss")
        p = b.build().grad("loss", ["x", "w"])
        shapes = {"x": (tokens, c), "w": (tokens, 2), "ids": (tokens, 2)}
        return p.compile(shapes, experts=algorithm).arena_bytes

    for algorithm in ("sorted", "gather"):
        assert arena(128, algorithm) - arena(8, algorithm) <= 120 * (8 + 8 + 8) + 256


def test_an_unknown_algorithm_is_refused() -> None:
    p, feeds = program("gated", False, WIDTHS["even"], "float32")
    with pytest.raises(UsageError, match=r"(?s)unknown experts 'dens'.*experts='dense'"):
        p.compile({n: v.shape for n, v in feeds.items()}, experts="dens")
