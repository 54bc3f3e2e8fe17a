"""Prints how many kernels 20 shapes compile, and what some kernels use (with "deep", those of all cases), as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator

import kernel_cases
import torch
from kernel_checks import Case, bound, results, spec

from graphwright.array.cpu.kernel import TORCH_DTYPE
from graphwright.array.triton.ahead import compile_launch, form_key
from graphwright.array.triton.kernel import Launch, table


def launches(case: Case) -> Iterator[Launch]:
    """Yield the launches of a case on tensors that have no memory."""
    outs = [o.to("meta") for o in results(case, case.ins)]
    ins = [i.to("meta") for i in case.ins]
    row = table()[case.op]
    if row.takes(outs, ins, case.attrs):
        return
    work = row.work([spec(o) for o in outs], [spec(i) for i in ins], case.attrs) if row.work else []
    made = [torch.empty(w.sizes, dtype=TORCH_DTYPE[w.dtype], device="meta") for w in work]
    yield from (call for call in bound(case, outs, ins, made) if isinstance(call, Launch) and all(call.grid))


def forms(cases: Iterator[Case]) -> dict[tuple, Launch]:
    return {form_key(launch): launch for case in cases for launch in launches(case)}


def show(name: str, fact: object) -> None:
    print(json.dumps([name, fact]), flush=True)


QUICK = ("softmax", "sdpa")
"""Names of `SHAPES` whose kernels every run compiles, for one GPU."""


def use(launch: Launch, capability: int) -> dict[str, object]:
    """Return what the code of a launch uses."""
    made = compile_launch(launch, capability)
    return {"spills": made.spills, "atomics": made.atomics, "shared": made.shared, "elf": made.cubin[:4] == b"\x7fELF"}


def refused() -> dict[str, str]:
    """Return why kernels refuse operands whose offsets or programs int32 cannot number."""

    def absent(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    q, k, attend = absent(1, 1, 2**16, 64), absent(1, 1, 64, 64), {**kernel_cases.ATTEND, "optional": ("bias",)}
    bias = absent(1, 1, 2**16, 2**16, dtype=torch.bool)
    x, ids = absent(2**16, 2**15), absent(2**15, dtype=torch.int64)
    return {
        name: table()[op].takes([x if op == "index_add" else q], ins, attrs)
        for name, op, ins, attrs in (
            ("part of a large bias", "sdpa", [q, k, k, bias[..., :64]], attend),
            ("part of a bias", "sdpa", [k, k, k, bias[..., :64, :64]], attend),
            ("many rows", "index_add", [x, x, ids], {"axis": 1}),
            ("rows", "index_add", [x, x[:, :64].contiguous(), ids[:64]], {"axis": 1}),
        )
    }  # fmt: skip


if __name__ == "__main__":
    show("ops", sorted(table()))
    show("refused", refused())
    shapes: dict[str, Callable[[int], Case]] = kernel_cases.SHAPES
    for name, of in shapes.items():
        show(f"forms of {name}", len(forms(of(n) for n in range(101, 121))))
    for name in QUICK:
        for launch in launches(shapes[name](120)):
            show(f"{name}: {launch.function.__name__}", use(launch, 90))
    for family, cases in kernel_cases.FAMILIES.items() if sys.argv[1:] == ["deep"] else ():
        for launch in forms(case for _, case in cases(False)).values():
            for capability in (80, 90, 100):
                show(
                    f"{family} {launch.function.__name__} {dict(launch.constants)} sm_{capability}",
                    use(launch, capability),
                )
