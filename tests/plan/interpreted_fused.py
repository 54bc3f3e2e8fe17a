"""Runs generated kernels in Triton's interpreter, and prints how far they are from the CPU's kernels, as JSON lines.

A process of its own, with TRITON_INTERPRET=1: Triton reads the variable when it defines a kernel.
"""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from random_programs import programs
from test_fusion import elementwise_programs

from graphwright.array import Device, Spec, backend, bfloat16, bool_, float16, float32, float64, int32, int64
from graphwright.array.backend import use
from graphwright.array.cpu.kernel import TORCH_DTYPE
from graphwright.array.ndarray import NDArray
from graphwright.array.triton import expressions, fused, generated
from graphwright.array.vm.encode.operands import View
from graphwright.errors import GraphwrightError
from graphwright.ops import OPS, expansion, get
from graphwright.plan import CaptureExecutable, Executable
from graphwright.program import Builder, Program
from graphwright.testing.simulated_device import SimBackend

GUARD = 40
SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 1e-6, -1e-6, 3e-5, 0.3, -0.34, 0.36, 20.0, -20.0, 90.0, -90.0,
           8388609.0, np.inf, -np.inf, np.nan)  # fmt: skip
ATTRS: dict[str, list[dict[str, Any]]] = {
    "leaky_relu": [{"slope": 0.2}], "elu": [{"alpha": 0.7}], "full_like": [{"value": 2.5}],
    "gelu": [{"approximate": "none"}, {"approximate": "tanh"}],
    "clamp": [{"low": -0.3, "high": 1.5}, {"low": None, "high": 0.7}],
    "rms_norm": [{"unit_offset": u, "cast_before_scale": c} for u in (False, True) for c in (False, True)],
}  # fmt: skip
FINITE = {"gelu", "rms_norm", "swiglu"}
"""Ops whose intermediate values overflow elsewhere than those of the CPU's kernel for infinite and huge operands."""
DTYPES = (float32, bfloat16, float16, float64, int32, int64, bool_)
SHAPES = ((), (1,), (1023,), (1024,), (1025,), (0, 3), (3, 5, 7), (2, 1, 3, 1, 2, 5))


def drawn(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> torch.Tensor:
    """Return random numbers, special ones in a quarter of the elements, at times with a strided innermost axis."""
    values = rng.normal(size=shape) * rng.choice([0.1, 1.0, 5.0], shape)
    values = np.where(rng.random(shape) < 0.25, rng.choice(SPECIAL, shape), values)
    if dtype in (int32, int64):
        values = rng.integers(-9, 9, shape)
    if dtype is bool_:
        values = rng.random(shape) < 0.5
    t = torch.from_numpy(np.array(values)).to(TORCH_DTYPE[dtype])
    if len(shape) > 1 and rng.random() < 0.5:  # reversed axes in memory
        back = tuple(reversed(range(t.ndim)))
        t = t.permute(back).contiguous().permute(back)
    return t


def guarded(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor to write, and the memory around it, which is filled with 0x5a."""
    size = int(np.prod(shape))
    memory = torch.full(((size + 2 * GUARD) * dtype.itemsize,), 0x5A, dtype=torch.uint8)
    inner = memory[GUARD * dtype.itemsize : (GUARD + size) * dtype.itemsize].view(dtype)
    return inner.reshape(shape), memory


TERMS = {
    "bce_with_logits": lambda x, y: x.double().abs() * (1 + y.double().abs()),
    "gelu": lambda x: x.double().abs(),  # x·(1 + erf)/2, as torch computes it
}
"""Op -> size of the terms that it sums, which may cancel."""


def distance(
    found: torch.Tensor, wanted: torch.Tensor, unit: torch.dtype | None = None, terms: torch.Tensor | None = None
) -> float:
    """Return the largest difference relative to max(1e-3, |wanted|, terms), in units of the precision of a dtype."""
    if not found.dtype.is_floating_point:
        return float((found != wanted).sum())
    a, b = found.double(), wanted.double()
    same = (a == b) | (a.isnan() & b.isnan())
    least = b.abs() if terms is None else torch.maximum(b.abs(), terms)
    off = ((a - b).abs() / least.clamp(min=1e-3)).where(~same, torch.zeros(()).double())
    return (
        float(off.nan_to_num(nan=1e30, posinf=1e30).max() / torch.finfo(unit or found.dtype).eps)
        if off.numel()
        else 0.0
    )


def as_array(t: torch.Tensor) -> NDArray:
    """Return a row-major copy as an array."""
    dtype = next(d for d, other in TORCH_DTYPE.items() if other is t.dtype)
    made = backend(Device("cpu")).empty(tuple(t.shape), dtype)
    made.impl.copy_(t)
    return made


def as_tensor(array: NDArray) -> torch.Tensor:
    """Return a copy on the CPU."""
    return array.to(Device("cpu")).copy().impl


def expected(name: str, out: torch.Tensor, ins: list[torch.Tensor], attrs: dict[str, Any]) -> torch.Tensor:
    """Return the result of the CPU's kernel, or of the op's expansion, on row-major copies of the operands."""
    arrays, made, cpu, op = list(map(as_array, ins)), as_array(out), backend(Device("cpu")), get(name)
    scratch = expansion.workspace(op, cpu, [made.spec], [a.spec for a in arrays], attrs)
    work = [cpu.empty(s.sizes, s.dtype) for s in scratch]
    for call in expansion.bind(op, cpu, [made], arrays, attrs, work):
        call()
    return made.impl


def shapes_of(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> list[tuple[int, ...]]:
    """Return shapes of operands: the first has the result's, others may be broadcast."""
    if name == "junction":
        return [shape] * 3
    if name == "rms_norm":
        return [shape, shape[-1:]]
    arity = OPS[name].arity
    count = arity if isinstance(arity, int) else arity[0]
    return [shape, *((shape, shape[-1:], ())[int(rng.integers(3))] for _ in range(count - 1))]


def one_op(name: str, dtype: Any, shape: Any, attrs: dict[str, Any], rng: np.random.Generator) -> float | None:
    """Run one op as a kernel; return its distance from the CPU's, or None where one of both lacks the dtype."""
    op, shapes = OPS[name], shapes_of(name, shape, rng)
    attrs = {key: value for key, value in op.attrs.items() if value is not ...} | attrs
    dtypes = [bool_ if name == "where" and k == 0 else dtype for k in range(len(shapes))]
    ins = [drawn(rng, s, d) for s, d in zip(shapes, dtypes, strict=True)]
    if name in FINITE and dtype.is_float:
        ins = [t.where(t.abs() < 100, torch.ones_like(t)) for t in ins]
    specs = [Spec(s, d) for s, d in zip(shapes, dtypes, strict=True)]
    try:
        (out,) = op.specs(specs, attrs, name)
    except GraphwrightError:  # the op takes no operands of this dtype
        return None
    if expressions.refusal(name, out, specs, attrs):
        return None
    result, memory = guarded(out.sizes, TORCH_DTYPE[out.dtype])
    tensors = dict(enumerate((result, *ins)))
    kinds = (out.dtype, *dtypes)
    operands = [fused.Operand(k, View(kinds[k], tuple(t.shape), t.stride())) for k, t in tensors.items()]
    kernel = fused.kernel(out.sizes, [fused.Member(name, attrs, operands[0], operands[1:])])
    generated.bind(kernel, [tensors[int(str(o.key))] for o in kernel.memory])()
    ends = GUARD * result.element_size()
    assert bool((memory[:ends] == 0x5A).all() and (memory[len(memory) - ends :] == 0x5A).all()), name
    try:
        wanted = expected(name, result, ins, attrs)
    except (NotImplementedError, RuntimeError):  # ATen has no such kernel
        return None
    return distance(result, wanted, terms=TERMS[name](*ins) if name in TERMS else None)


def table(shapes: Any) -> None:
    """Print the largest distance of each op and dtype, in units of the precision of the result's dtype."""
    rng = np.random.default_rng(0)
    for name in sorted({*expressions.EXPRESSIONS, *expressions.ROWS}):
        worst: dict[str, float] = {}
        for dtype in DTYPES:
            for shape in shapes:
                if name in expressions.ROWS and not shape:
                    continue
                for given_attrs in ATTRS.get(name, [{}]):
                    attrs = given_attrs
                    if name == "cast":  # of NaN and infinities no integer is defined
                        attrs = {"dtype": to if (to := DTYPES[int(rng.integers(7))]).is_float else bool_}
                    far = one_op(name, dtype, shape, attrs, rng)
                    if far is not None:
                        worst[dtype.name] = max(worst.get(dtype.name, 0.0), far)
        print(json.dumps([name, worst]), flush=True)


def compare(p: Program, feeds: dict[str, np.ndarray]) -> tuple[float, int]:
    """Return how far a device's plan with generated kernels is from a VM plan, and the number of its groups."""
    shapes = {name: a.shape for name, a in feeds.items()}
    wanted = Executable(p.compile(shapes, executor="vm")).run(feeds)
    plan = p.compile(shapes, device="sim")
    found = Executable(plan, poison=True).run(feeds)
    low = any(spec.dtype.is_low for n in p.order() for spec in p.specs(n))
    unit = torch.bfloat16 if low else None  # the interpreter truncates where a GPU rounds to nearest
    return max(distance(as_tensor(found[k]), as_tensor(wanted[k]), unit) for k in wanted), len(plan.groups)


def groups(examples: int) -> None:
    """Print, for random programs, the largest distance from the VM and the number of groups."""
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    quiet = settings(max_examples=examples, deadline=None, derandomize=True, database=None,
                     suppress_health_check=checks)  # fmt: skip
    for title, strategy in (("elementwise", elementwise_programs()), ("random", programs())):
        found: list[tuple[float, int]] = []

        @quiet
        @given(strategy)
        def run(example: Any) -> None:
            found.append(compare(*example))  # noqa: B023  # called in this turn

        run()
        facts = {"distance": max(far for far, _ in found), "groups": sum(count for _, count in found)}
        print(json.dumps([title, facts]), flush=True)


def mixed() -> None:
    """Print how far groups are from the VM that mix rows, columns, numbers and dtypes, by their formula."""
    rng = np.random.default_rng(2)
    formulas: dict[str, Any] = {
        "rms_norm(exp(x), w)": lambda b, x, y, w, m: b.rms_norm(b.exp(x), w, eps=1e-5),
        "rms_norm(x + y, w)": lambda b, x, y, w, m: b.rms_norm(b.add(x, y), w, eps=1e-5),
        "softmax(x * y)": lambda b, x, y, w, m: b.softmax(b.mul(x, y)),
        "softmax(x, not m)": lambda b, x, y, w, m: b.op("softmax", b.silu(x), b.op("logical_not", m)),
        "softmax(y)": lambda b, x, y, w, m: b.softmax(b.exp(y)),
        "sin(step(x)) in float64": lambda b, x, y, w, m: b.op("sin", b.op("step", b.cast(x, dtype=float64))),
    }
    found = {}
    for name, made in formulas.items():
        b = Builder("mixed")
        inputs = {"x": (6, 33), "y": (6, 1), "w": (33,), "m": (6, 33)}
        values = [b.input(n, shape) for n, shape in inputs.items()]
        b.output(made(b, *values), "z")
        feeds = {n: rng.normal(size=shape).astype("f4") for n, shape in inputs.items()}
        feeds["m"][2:4] = 1.0  # rows that a mask excludes
        found[name] = compare(b.build(), feeds)
    print(json.dumps(["mixed", found]), flush=True)


def captured() -> None:
    """Print how a captured plan follows edits: regions captured, distance from the reference, groups of each plan."""
    b, rng = Builder("edited"), np.random.default_rng(1)
    x = b.input("x", (6, 40))
    w, c = (b.param(name, rng.normal(size=size).astype("f4")) for name, size in (("w", (40, 40)), ("c", (40,))))
    b.output(b.mul(b.silu(b.add(b.matmul(x, w), c)), x), "y")
    p, feeds = b.build(), {"x": rng.normal(size=(6, 40)).astype("f4")}
    run = CaptureExecutable(p.compile(x=(6, 40), device="sim"))
    far, counts = 0.0, []

    def measure() -> None:
        nonlocal far
        for _ in range(4):
            y = run.run(feeds)["y"].to_numpy()
            far = max(far, float(np.abs(y - p.run(feeds)["y"].to_numpy()).max()))
        counts.append([len(group) for group in run.plan.groups])

    measure()
    with p.edit("two functions more") as e:
        e.set_outputs(y=e.add("tanh", e.add("exp", p.output("y"))))
    assert run.adopt(p.compile(x=(6, 40), device="sim"))
    measure()
    p.undo()
    assert run.adopt(p.compile(x=(6, 40), device="sim"))
    measure()
    facts = {"captures": run.captures, "distance": far, "groups": counts, "state": str(run.state)}
    print(json.dumps(["captured", facts]), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    deep = "DEEP" in os.environ
    table(SHAPES if deep else SHAPES[-3:])
    use(Device("sim"), SimBackend(Device("sim"), fuses=True))
    groups(200 if deep else 10)
    mixed()
    captured()
