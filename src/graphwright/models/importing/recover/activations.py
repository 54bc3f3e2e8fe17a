"""GELU written out, by the error function or by its approximation with tanh -> `gelu`."""

from __future__ import annotations

from collections.abc import Iterator

from graphwright.models.importing.recover.regions import SUMS, Regions
from graphwright.program.op_graph import Value


def recover_gelu(s: Regions) -> None:
    """Replace ½x(1 + erf(x/√2)) and ½x(1 + tanh(√(2/π)(x + 0.044715x³))), with the factors in any order."""
    for root in s.values("erf", "tanh"):
        approximate = "tanh" if s.is_op(root, "tanh") else "none"
        for out in _products(s, root):
            if any(_replace(s, out, x, approximate) for x in _operands(s, root) if s.p.spec(x) == s.p.spec(out)):
                break


def _products(s: Regions, root: Value) -> list[Value]:
    """Return the products that 1 + root goes into, the last first; () if nothing adds 1 to it."""
    shifted = s.next(root, *SUMS)
    found = s.with_number(shifted, *SUMS) if shifted is not None else None
    if shifted is None or found is None or found[1] != 1.0:
        return []
    products, at = [], shifted
    while (onward := s.next(at, "mul", "div")) is not None and len(products) < 2:
        products.append(at := onward)
    return products[::-1]


def _operands(s: Regions, root: Value) -> Iterator[Value]:
    """Yield the values that may be x, from the operand of a function upwards."""
    at = s.p.operands(root.node)[0]
    while (scaled := s.scaled(at)) is not None:
        at = scaled[0]
        yield at
    yield from s.parts(at, *SUMS) or ()
    product = s.parts(at, "mul")  # x·(1 + 0.044715x²)
    yield from product or ()


def _replace(s: Regions, out: Value, x: Value, approximate: str) -> bool:
    new = s.add("gelu", [x], f"{s.module(out)}gelu", out, approximate=approximate)
    if s.agree(out, new, {x: None}):
        s.replace(out, new)
        s.found("gelu", new)
        return True
    s.sweep([new.node])
    return False
