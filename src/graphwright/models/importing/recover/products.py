"""Products with a weight -> `linear`: x·W, x·Wᵀ, a sum with a bias, and rows that were flattened before."""

from __future__ import annotations

from math import prod

from graphwright.array.sizes import Size
from graphwright.models.importing.recover.regions import SUMS, Regions
from graphwright.program.kinds import PARAM
from graphwright.program.op_graph import Value


def recover_linear(s: Regions) -> None:
    """Replace products of rows with a trained matrix [in, out], as GPT-2 has them, by `linear` of its transposed view.

    The param keeps its key and its layout.
    """
    for root in s.values("matmul"):
        x, weight = s.p.operands(root.node)
        transposed = s.parts(weight, "permute")
        stored = transposed[0] if transposed is not None else weight
        if not s.is_op(s.above(stored, "cast")[-1], PARAM) or len(s.shape(weight)) != 2 or len(s.shape(x)) < 2:
            continue
        out, operands = root, [x]
        onward = s.next(root, *SUMS)
        bias = _bias(s, onward, root) if onward is not None else None
        if onward is not None and bias is not None:
            out, operands = onward, [x, bias]
        flat = s.parts(x, "reshape", "flatten")
        whole = s.next(out, "reshape", "unflatten")
        if flat is not None and whole is not None and _same_rows(s, flat[0], x, whole):
            out, operands[0] = whole, flat[0]
        matrix = stored if transposed is not None else s.add(
            "permute", [weight], f"{s.module(root)}linear.permute", axes=(1, 0))  # fmt: skip
        new = s.add("linear", [operands[0], matrix, *operands[1:]], f"{s.module(root)}linear", out)
        if s.agree(out, new, dict.fromkeys([operands[0], stored, *operands[1:]])):
            s.replace(out, new)
            s.found("linear", new)
        else:
            s.sweep([new.node])
            s.leave("linear", root, "no linear op gives the same result")


def _bias(s: Regions, total: Value, product: Value) -> Value | None:
    """Return the other term of a sum with a product, if it has one entry per output."""
    terms = s.p.operands(total.node)
    others = [v for v in terms if v != product]
    fits = len(terms) == 2 and len(others) == 1 and s.shape(others[0]) == s.shape(product)[-1:]
    return others[0] if fits and s.is_op(s.above(others[0], "cast")[-1], PARAM) else None


def _same_rows(s: Regions, x: Value, flat: Value, whole: Value) -> bool:
    """Return whether rows that were flattened become again those of x."""
    rows = prod((Size.of(n) for n in s.shape(x)[:-1]), start=Size.of(1)).dim
    return s.shape(flat) == (rows, s.shape(x)[-1]) and s.shape(whole)[:-1] == s.shape(x)[:-1]
