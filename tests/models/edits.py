"""Structural edits for export tests: each takes a model and a layer (or two), and commits one journal entry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import graphwright as gw
from graphwright.program.op_graph import Value


def edge(p: Any, source: str, target: str) -> Any:
    """The edge between two nodes."""
    return next(e for e in p.in_edges(target) if p.path(p.graph.source(e)) == source)


def matrix(out: int, into: int, seed: int = 0, scale: float = 0.3) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale / into**0.5, (out, into)).astype(np.float32)


def width(p: Any) -> int:
    return p.spec("norm").shape[-1]


def cut_attention(m: Any, i: int) -> None:
    with m.program.edit(f"cut attention {i}") as e:
        e.cut(edge(m.program, f"layers.{i}.attn.o", f"layers.{i}.mid"))


def cut_mlp(m: Any, i: int) -> None:
    with m.program.edit(f"cut mlp {i}") as e:
        e.cut(edge(m.program, f"layers.{i}.mlp.down", f"layers.{i}.out"))


def skip(m: Any, i: int, j: int | None = None) -> None:
    j = i + 2 if j is None else j
    with m.program.edit(f"skip {i} to {j}") as e:
        e.connect(f"layers.{i}.out", f"layers.{j}.out")


def link(m: Any, i: int, j: int | None = None) -> None:
    j, n = i + 2 if j is None else j, width(m.program)
    with m.program.edit(f"link {i} to {j}") as e:
        e.link(f"layers.{i}.mid", f"layers.{j}.mid", matrix(n, n, i))


def insert(m: Any, i: int, op: str = "tanh") -> None:
    with m.program.edit(f"insert {op} in {i}") as e:
        e.insert(edge(m.program, f"layers.{i}.mlp.down", f"layers.{i}.out"), op)


def insert_stray(m: Any, i: int) -> None:
    """Ops whose names lie outside the layer that they stand in."""
    p = m.program
    with p.edit(f"gate {i} by its own norm") as e:
        gate = e.add("sigmoid", f"layers.{i}.mlp.norm", name=f"stray{i}")
        product = e.add("mul", f"layers.{i}.attn.o", e.add("rsqrt", e.add("exp", f"layers.{i}.attn.norm")))
        e.rewire(edge(p, f"layers.{i}.attn.o", f"layers.{i}.mid"), product)
        down = edge(p, f"layers.{i}.mlp.down", f"layers.{i}.out")
        e.rewire(down, e.add("mul", f"layers.{i}.mlp.down", gate))


def replace_mlp(m: Any, i: int) -> None:
    p, n = m.program, width(m.program)
    b = gw.Builder()
    x = b.input("x", ("B", "T", n))
    up, down = (b.param(f"layers.{i}.new.{k}", matrix(*s, seed=i)) for k, s in (("a", (20, n)), ("b", (n, 20))))
    h = b.gelu(b.linear(x, up, name=f"layers.{i}.new.up"), approximate="tanh")
    b.output(b.linear(h, down, name=f"layers.{i}.new.down"), "y")
    with p.edit(f"replace mlp {i}") as e:
        ends = {"x": f"layers.{i}.mid", "y": f"layers.{i}.mlp.down"}
        e.replace(p.select(f"layers.{i}.mlp.*", kind="op"), b.build(), ends)


def remove_layer(m: Any, i: int) -> None:
    p = m.program
    before = f"layers.{i - 1}.out" if i else p.path(p.operands(p.node("layers.0.attn.norm"))[0])
    with p.edit(f"remove layer {i}") as e:
        for out in p.out_edges(f"layers.{i}.out"):
            e.rewire(out, before)
        e.remove(p.select(f"layers.{i}.**"))


def parallel(m: Any, i: int) -> None:
    """A second, narrow MLP beside the layer's own, from the layer's input."""
    p, n = m.program, width(m.program)
    with p.edit(f"parallel block in {i}") as e:
        down = e.param(f"layers.{i}.side.a.weight", matrix(9, n, i))
        up = e.param(f"layers.{i}.side.b.weight", matrix(n, 9, i))
        h = e.add("silu", e.add("linear", f"layers.{i}.attn.norm", down, name=f"layers.{i}.side.down"))
        e.connect(e.add("linear", h, up, name=f"layers.{i}.side.up"), f"layers.{i}.out")


def narrow(m: Any, i: int) -> None:
    """Fewer neurons in one MLP."""
    p = m.program
    keep = p.spec(f"layers.{i}.mlp.gate.weight").shape[0] - 5 - 2 * i
    with p.edit(f"narrow mlp {i}") as e:
        for name in ("gate", "up"):
            for kind in ("weight", "bias"):
                if f"layers.{i}.mlp.{name}.{kind}" in {p.path(n) for n in p.params()}:
                    e.set_weight(f"layers.{i}.mlp.{name}.{kind}", lambda w: w[:keep])
        e.set_weight(f"layers.{i}.mlp.down.weight", lambda w: w[:, :keep])


def scale_weight(m: Any, key: str, by: float = 1.5) -> None:
    with m.program.edit(f"scale {key}") as e:
        e.set_weight(key, lambda w: w * by)


def factored(m: Any, layer: int = 2, name: str = "mlp.down") -> None:
    """The matrix W of a linear op as B·A, A first; 20 of its directions."""
    p, path = m.program, f"layers.{layer}.{name}"
    w = p.weights.array(p.key(p.node(f"{path}.weight"))).to_numpy("float64")
    u, s, v = np.linalg.svd(w, full_matrices=False)
    with p.edit(f"factor {path}") as e:
        a = e.param(f"{path}.a", (s[:20, None] * v[:20]).astype("f4"))
        b = e.param(f"{path}.b", u[:, :20].astype("f4"))
        node = p.node(path)
        inner = e.add("linear", p.operands(node)[0], a, name=f"{path}.inner")
        rest = [p.edge_value(x) for x in p.in_edges(node)[2:]]
        outer = e.add("linear", inner, b, *rest, name=f"{path}.outer")
        for out in p.out_edges(node):
            e.rewire(out, outer)
        e.remove([path, *(n for n in p.select(f"{path}.weight.cast").nodes), f"{path}.weight"])


def gate(m: Any, layer: int = 3, part: str = "mlp.down", into: str = "out", by: float = 0.7) -> None:
    """A branch times a number that is a weight."""
    p = m.program
    with p.edit("gate a branch") as e:
        g = e.param(f"layers.{layer}.gate.{into}", np.float32(by))
        e.rewire(edge(p, f"layers.{layer}.{part}", f"layers.{layer}.{into}"),
                 e.add("mul", f"layers.{layer}.{part}", g, name=f"layers.{layer}.gated.{into}"))  # fmt: skip


def route(m: Any, layers: Any, experts: int = 4, k: int = 2) -> None:
    """A routed layer for each MLP, whose experts are the MLP times 1, 1.1, 1.2, ..."""
    p, rng = m.program, np.random.default_rng(0)
    with p.edit("experts") as e:
        for i in layers:
            at, h = f"layers.{i}.mlp", p.value(f"layers.{i}.mlp.norm")
            tokens = e.add("flatten", h, start=0, end=1, name=f"{at}.tokens")
            rows = e.param(f"{at}.router.weight", rng.normal(0, 0.5, (experts, width(p))).astype("f4"))
            scores = e.add("softmax", e.add("linear", tokens, rows, name=f"{at}.router"), axis=-1, name=f"{at}.scores")
            chosen = e.add("topk", scores, k=k, name=f"{at}.chosen")
            total = e.add("sum", chosen, axes=(1,), keepdims=True, name=f"{at}.total")
            weights = e.add("div", chosen, total, name=f"{at}.weights")
            runs = e.add("dispatch", Value(chosen, 1), experts=experts, name=f"{at}.dispatch")
            dense = {n: p.weights.array(p.key(p.node(f"{at}.{n}.weight"))).to_numpy() for n in ("gate", "up", "down")}
            matrices = [
                e.param(f"{at}.experts.{j}.{n}.weight", (w * (1 + j / 10)).astype("f4"))
                for j in range(experts) for n, w in dense.items()
            ]  # fmt: skip
            made = e.add(
                "expert_mlp", tokens, *(Value(runs, n) for n in range(3)), weights, *matrices, name=f"{at}.experts"
            )
            mixed = e.add("unflatten", made, axis=0, sizes=p.spec(h).shape[:2], name=f"{at}.mixed")
            for out in p.out_edges(f"{at}.down"):
                e.rewire(out, mixed)
            e.remove([f"{at}.{n}" for n in ("down", "mul", "act", "up", "gate")])
            e.remove([f"{at}.{n}.weight" for n in dense])


EDITS: dict[str, Callable[[Any, int], None]] = {
    f.__name__: f
    for f in (cut_attention, cut_mlp, skip, link, insert, insert_stray, replace_mlp, remove_layer, parallel, narrow)
}


def random_edits(m: Any, seed: int, layers: int) -> list[str]:
    """Four edits at layers of their own, in random order; returns what was done."""
    rng = np.random.default_rng(seed)
    names = rng.choice(sorted(EDITS), 4, replace=False)
    layer_numbers = rng.choice(layers - 2, 4, replace=False)  # skips end two layers on
    if "remove_layer" in names:  # last, so that others find their layers
        names = [*(n for n in names if n != "remove_layer"), "remove_layer"]
        layer_numbers = [*sorted(layer_numbers)[:3], layers - 1]
    done = []
    for name, where in zip(names, layer_numbers, strict=True):
        EDITS[str(name)](m, int(where))
        done.append(f"{name} {where}")
    return done
