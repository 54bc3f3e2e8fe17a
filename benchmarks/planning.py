"""What planning costs and how tight the arena is: ms per plan, and arena bytes over the lower bound.

python -m benchmarks.planning
"""

from __future__ import annotations

from statistics import median

import numpy as np

from graphwright.plan import make_plan
from graphwright.program import Builder, Program

ROUNDS = 15


def chain(nodes: int) -> Program:
    """Products, activations and views, one after another."""
    b = Builder("chain")
    h, w = b.input("x", (4, 8)), b.param("w", np.eye(8, dtype="f4"))
    for _ in range(nodes // 5):
        h = b.permute(b.reshape(b.tanh(b.matmul(h, w)), shape=(8, 4)), axes=(1, 0))
        h = b.mul(h, h)
    b.output(h, "y")
    return b.build()


def decoder(layers: int, width: int = 64, tokens: int = 16) -> Program:
    """Pre-norm decoder layers with attention and a gated MLP."""
    b = Builder("decoder")
    rng = np.random.default_rng(0)
    h = b.input("x", (1, tokens, width))
    for i in range(layers):
        s = b.scope(f"layers.{i}")

        def w(name: str, *shape: int, s: Builder = s):
            return s.param(name, rng.normal(size=shape).astype("f4"))

        n = s.rms_norm(h, w("norm1", width))
        q, k, v = (
            s.permute(s.unflatten(s.linear(n, w(c, width, width)), axis=2, sizes=(4, width // 4)), axes=(0, 2, 1, 3))
            for c in "qkv"
        )
        a = s.flatten(s.permute(s.sdpa(q, k, v, scale=0.25), axes=(0, 2, 1, 3)), start=2, end=3)
        h = s.junction(h, s.linear(a, w("o", width, width)))
        n = s.rms_norm(h, w("norm2", width))
        g = s.mul(s.silu(s.linear(n, w("gate", 2 * width, width))), s.linear(n, w("up", 2 * width, width)))
        h = s.junction(h, s.linear(g, w("down", width, 2 * width)))
    b.output(h, "y")
    return b.build()


def random_dag(nodes: int) -> Program:
    """Elementwise ops on random earlier values of mixed sizes."""
    b = Builder("random DAG")
    rng = np.random.default_rng(0)
    pool = {n: [b.input(f"x{n}", (n,))] for n in (16, 256, 1024, 5000)}
    for _ in range(nodes):
        same = pool[int(rng.choice(list(pool)))]
        pick = [same[max(0, len(same) - 1 - int(rng.exponential(8)))] for _ in range(2)]
        same.append(b.add(*pick) if rng.random() < 0.5 else b.tanh(pick[0]))
    for n, same in pool.items():
        b.output(same[-1], f"y{n}")
    return b.build()


def main() -> None:
    """Print one row a program."""
    print(f"{'program':<12}{'nodes':>7}{'instrs':>8}{'ms':>8}{'ms none':>9}{'arena/LB':>10}{'naive/LB':>10}")
    for p in (chain(5000), decoder(160), random_dag(5000)):
        specs = {p.path(n): p.spec(n) for n in p.inputs()}
        exact = [make_plan(p, specs) for _ in range(ROUNDS)]
        plain = [make_plan(p, specs, rewrites="none") for _ in range(ROUNDS)]
        naive = make_plan(p, specs, layout="naive")
        plan = exact[0]
        figures = (median(q.ms for q in exact), median(q.ms for q in plain), plan.arena_bytes / plan.lower_bound)
        row = f"{p.name:<12}{len(p):>7}{len(plan.instrs):>8}{figures[0]:>8.1f}{figures[1]:>9.1f}{figures[2]:>10.3f}"
        print(f"{row}{naive.arena_bytes / plan.lower_bound:>10.1f}")


if __name__ == "__main__":
    main()
