"""What torch or its compiler fuses, beside the same lines as a plan on the VM: one thread, results checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

import graphwright as gw
from benchmarks.harness import Figure, interval, rounds
from graphwright import optim
from graphwright.autograd import grad
from graphwright.nn import functional as F
from graphwright.ops import call

SIZES = ((512, 256), (2048, 2048))
T = torch.nn.functional


class Case(NamedTuple):
    """Operands, the same function for both, and whether its gradients are taken too."""

    arrays: tuple[np.ndarray, ...]
    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    backward: bool = False


def run() -> list[Figure]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [figure(rows, cols) for rows, cols in SIZES] + [attention()]
    finally:
        torch.set_num_threads(threads)


def cases(rows: int, cols: int) -> dict[str, Case]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype("f4")

    x, y, w = normal(rows, cols), normal(rows, cols), normal(cols)
    targets = rng.integers(0, cols, rows)
    q = normal(4, 8, rows // 32, cols // 8)
    angle = rng.uniform(-3, 3, (4, rows // 32, cols // 16))
    cos, sin = np.cos(angle).astype("f4"), np.sin(angle).astype("f4")

    def rotated(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        a, b = q.chunk(2, -1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat([a * c - b * s, b * c + a * s], -1)

    def theirs_loss(x: torch.Tensor) -> torch.Tensor:
        return T.cross_entropy(x, ids)

    ids = torch.from_numpy(targets)
    pairs: dict[str, tuple[tuple[np.ndarray, ...], Callable, Callable]] = {
        "SwiGLU": ((x, y), F.swiglu, lambda a, b: T.silu(a) * b),
        "bias and SiLU": ((x, w), lambda a, b: F.silu(a + b), lambda a, b: T.silu(a + b)),
        "residual and RMSNorm": (
            (x, y, w),
            lambda a, b, w: F.rms_norm(a + b, (cols,), w, 1e-6),
            lambda a, b, w: T.rms_norm(a + b, (cols,), w, 1e-6),
        ),
        "rope": ((q, cos, sin), lambda q, c, s: call("rope", q, c, s), rotated),
        "softmax and cross entropy": ((x,), lambda x: F.cross_entropy(x, gw.tensor(targets)), theirs_loss),
    }
    found = {}
    for name, (arrays, ours, theirs) in pairs.items():
        found[name] = Case(arrays, ours, theirs)
        if name != "rope":
            found[f"{name}, with gradients"] = Case(arrays, ours, theirs, True)
    return found


def mine(case: Case) -> tuple[Callable[[], Any], Callable[[], list[np.ndarray]]]:
    """A bound plan, and what it gave."""
    operands = [gw.Parameter(a) for a in case.arrays]
    out = case.ours(*operands)
    seed = gw.tensor(np.ones(out.shape, "f4"))

    def step(seed: gw.Tensor) -> Any:
        out = case.ours(*operands)
        return grad([out], operands, [seed]) if case.backward else out

    bound = gw.compile(step).bind(seed)
    for memory in bound.inputs.values():
        memory[...] = 1
    return bound, lambda: list(bound.outputs.values())


def theirs(case: Case, compiled: bool) -> tuple[Callable[[], Any], Callable[[], list[np.ndarray]]]:
    operands = [torch.tensor(a, requires_grad=case.backward) for a in case.arrays]
    function = case.theirs
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(function)
    seed = torch.ones_like(function(*operands))

    def step() -> Any:
        out = function(*operands)
        return torch.autograd.grad(out, operands, seed) if case.backward else (out,)

    return step, lambda: [r.detach().numpy() for r in step()]


def figure(rows: int, cols: int) -> Figure:
    made = Figure(f"Fused operations, {rows} x {cols}", "f32, 1 thread; results agree to 1e-4")
    for name, case in cases(rows, cols).items():
        compare(
            made, name, mine(case), {who: theirs(case, who == "torch.compile") for who in ("torch", "torch.compile")}
        )
    adamw(made, rows * cols)
    return made


def compare(made: Figure, name: str, ours: tuple, peers: dict[str, tuple]) -> None:
    ours[0]()
    for who, (_, results) in peers.items():
        for a, b in zip(ours[1](), results(), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4, err_msg=f"{name}, {who}")
    timed(made, name, {"graphwright": ours[0], **{who: step for who, (step, _) in peers.items()}})


def timed(made: Figure, name: str, calls: dict[str, Callable[[], Any]]) -> None:
    taken = rounds(calls, n=9, inner=3)
    medians = {who: 1e6 * float(np.median(taken[who])) for who in calls}
    for who, value in medians.items():
        low, high = (1e6 * v for v in interval(taken[who]))
        made.add(f"{name}: {who}", value, "us", low=low, high=high)
    best = min(value for who, value in medians.items() if who != "graphwright")
    made.notes.append(f"{name}: {best / medians['graphwright']:.2f} times the best peer")


def adamw(made: Figure, size: int) -> None:
    rng = np.random.default_rng(0)
    start, slope = rng.normal(size=size).astype("f4"), rng.normal(size=size).astype("f4")
    p = gw.Parameter(start)
    opt = optim.AdamW([p], lr=1e-3, weight_decay=0.01)

    def step(g: gw.Tensor) -> None:
        p.grad = g
        opt.step()

    bound = gw.compile(step).bind(gw.tensor(slope))
    next(iter(bound.inputs.values()))[...] = slope
    twin = torch.nn.Parameter(torch.tensor(start))
    twin.grad = torch.tensor(slope)
    fused = torch.optim.AdamW([twin], lr=1e-3, weight_decay=0.01, fused=True)
    bound()
    fused.step()
    np.testing.assert_allclose(p.numpy(), twin.detach().numpy(), rtol=1e-4, atol=1e-6)
    timed(made, "AdamW", {"graphwright": bound, "torch fused": fused.step})


def attention() -> Figure:
    made = Figure("Attention, causal", "f32, 1 thread; keys repeated for torch where query heads share them")
    for batch, heads, groups, length, deep in ((16, 6, 2, 256, 32), (1, 8, 8, 1024, 64), (1, 2, 2, 2048, 128)):
        rng = np.random.default_rng(0)
        q, k, v = (rng.normal(size=(batch, h, length, deep)).astype("f4") for h in (heads, groups, groups))
        each = heads // groups

        def ours(q: gw.Tensor, k: gw.Tensor, v: gw.Tensor, scale: float = deep**-0.5) -> gw.Tensor:
            return call("sdpa", q, k, v, scale=scale)

        def peer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, each: int = each) -> torch.Tensor:
            k, v = (t.repeat_interleave(each, 1) if each > 1 else t for t in (k, v))
            return T.scaled_dot_product_attention(q, k, v, is_causal=True)

        for backward in (False, True):
            case = Case((q, k, v), ours, peer, backward)
            name = f"{batch} x {heads} ({groups}) x {length} x {deep}{', with gradients' if backward else ''}"
            compare(made, name, mine(case), {"scaled_dot_product_attention": theirs(case, False)})
    return made
