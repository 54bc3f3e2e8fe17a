"""LoRA: low-rank branches in parallel to linear maps, to train few parameters, and their merge into the maps.

Source: Hu et al. 2021, "LoRA: Low-rank adaptation of large language models".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphwright.arguments import checked
from graphwright.errors import UsageError
from graphwright.graph import NodeId
from graphwright.ops import traits
from graphwright.program.editing.replace import redirect
from graphwright.program.errors import EmptySelection
from graphwright.program.op_graph import Value
from graphwright.settings import Range
from graphwright.surgery.matrices import Matrix, find_matrices, named, selection_of, stored, values

if TYPE_CHECKING:
    from graphwright.program.editing.transaction import Transaction
    from graphwright.program.program import Program
    from graphwright.program.selection import Selection


ENDING = ".lora.outer.weight"


@checked
def lora(program: Program, where: str | Selection, rank: int, seed: int = 0) -> list[str]:
    """Add a parallel branch B A x to each linear map W x, in one edit. B starts at 0, so the function is unchanged.

    Branch and map are summed by the junction after the map, which is created if it is missing.

    Args:
        program: edited in place.
        where: pattern of linear maps, or a selection.
        rank: number of rows of A [rank, in] and of columns of B [out, rank].
        seed: seed of A, whose entries are Gaussian with variance 1 / in.
    Returns: paths of the new params: A and B of each map.
    Raises: EmptySelection; UsageError for a rank below 1, a seed below 0, a tied weight, or a map that has a branch.
    """
    Range(1, 2**31, whole=True).check("rank", rank)
    Range(0, whole=True).check("seed", seed)
    matrices, _ = find_matrices(program, where)
    for m in matrices:
        if len(m.readers) != 1 or traits(m.readers[0].op).contracts != "out_in":
            got = ", ".join(r.op for r in m.readers)
            raise UsageError("the weight is not read by exactly one linear map", where=m.path, got=f"readers: {got}")
    rng = np.random.default_rng(seed)
    with program.edit(f"low-rank branches beside {len(matrices)} maps", author="pass",
                      tool="graphwright.surgery.lora") as e:  # fmt: skip
        return [path for m in matrices for path in _branch(e, m, rank, rng)]


@checked
def merge_lora(program: Program, where: str | Selection = "**") -> list[str]:
    """Merge low-rank branches, in one edit: add B A of each branch to the matrix W of its map; remove the branch.

    Returns: paths of the changed weights. Raises: EmptySelection if no selected map has a branch.
    """
    chosen = selection_of(program, where)
    bases = [base for base in named(program, ENDING) if program.node(base + ENDING) in chosen]
    if not bases:
        raise EmptySelection("the selection has no low-rank branch", where=str(where), fix="add one by lora(...)")
    with program.edit(f"merge {len(bases)} low-rank branches", author="pass", tool="graphwright.surgery.lora") as e:
        return [_merge(e, base) for base in bases]


def _branch(e: Transaction, m: Matrix, rank: int, rng: np.random.Generator) -> tuple[str, str]:
    p, node = e.program, m.readers[0].node
    x, dtype = p.operands(node)[0], p.spec(node).dtype
    key = m.key.removesuffix(".weight")
    first = {"inner": rng.standard_normal((rank, m.shape[1])) / m.shape[1] ** 0.5,
             "outer": np.zeros((m.shape[0], rank))}  # fmt: skip
    value: NodeId | Value = x
    for name, step in (("inner", f"{m.name}.lora.inner"), ("outer", f"{m.name}.lora")):
        w = e.param(f"{m.name}.lora.{name}.weight", stored(first[name], m.dtype), key=f"{key}.lora.{name}.weight")
        wide = w if m.dtype is dtype else e.add("cast", w, dtype=dtype, name=f"{m.name}.lora.{name}.weight.cast")
        value = e.add("linear", value, wide, name=step)
    readers = p.out_edges(node)
    if len(readers) == 1 and p.is_junction(p.graph.target(readers[0])):
        e.connect(value, p.graph.target(readers[0]))
    else:
        total = e.add("junction", node, value, name=f"{m.name}.lora.sum")
        redirect(e, {Value(node): Value(total)})
    return f"{m.name}.lora.inner.weight", f"{m.name}.lora.outer.weight"


def _merge(e: Transaction, base: str) -> str:
    p = e.program
    outer, inner = (values(p, p.key(p.node(f"{base}.lora.{name}.weight"))) for name in ("outer", "inner"))
    path, total = f"{base}.weight", f"{base}.lora.sum"
    e.set_weight(path, values(p, p.key(p.node(path))) + outer @ inner)
    if p.free_name(total) != total:
        redirect(e, {Value(p.node(total)): Value(p.node(base))})
        e.remove(total)
    e.remove([n for n in p.select(f"{base}.lora.**")])
    return path
