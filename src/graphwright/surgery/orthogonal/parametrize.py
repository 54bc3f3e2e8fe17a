"""Weights that stay orthonormal in training: computed from a generator that any optimizer may change freely.

A linear map has one of three states. *Parametrised*: every run computes the matrix from a generator, which is trained.
*Baked*: the map reads a stored matrix, and the generator is unused. *Dense*: the generator is removed.
Params of a map `q`: `q.generator.weight`, `q.base.weight`, `q.scale.weight`. The computed matrix is `q.orthogonal`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphwright.arguments import checked
from graphwright.graph import NodeId
from graphwright.program.editing.replace import redirect
from graphwright.program.errors import EmptySelection
from graphwright.program.op_graph import Value
from graphwright.surgery.errors import check_choices
from graphwright.surgery.matrices import Matrix, find_matrices, named, selection_of, stored, values
from graphwright.surgery.orthogonal.methods import polar, second_factor

if TYPE_CHECKING:
    from graphwright.program.editing.transaction import Transaction
    from graphwright.program.program import Program
    from graphwright.program.selection import Selection


MAPS = ("cayley", "exp", "householder")
SCALES = ("none", "scalar", "diag", "spd")
SQUARINGS = 3
"""Number of squarings in exp: exact to float32 for angles up to about 3; a rotation for any generator."""


@checked
def parametrize(program: Program, where: str | Selection, map: str = "cayley", scale: str = "none") -> list[str]:
    """Replace matrices by nodes that compute them from generators: W = Q S, Q = R(A) Q₀ (wide: S Q, Q = Q₀ R(A)).

    Q₀ is the fixed polar factor of W. R(A) is a rotation of the longer side, which starts as the identity. Training can
    reach each Q that a rotation maps to Q₀. All matrices are replaced in one edit.

    Args:
        program: edited in place; the new params are trained instead of W.
        where: pattern of linear maps, or a selection.
        map: form of R(A): `cayley`, (I - A/2)⁻¹ (I + A/2), which reaches all rotations without half turns; `exp`,
            exp(A) by a Padé approximant; `householder`, a product of reflections. A is X - Xᵀ of the generator X.
        scale: form of S: `none`, S = I, so that W becomes its polar factor; `scalar`, the mean singular value; `diag`,
            a factor per column of Q (wide: per row); `spd`, S = C Cᵀ, which initially preserves W exactly.
    Returns: paths of the computed matrices.
    Raises: EmptySelection, NonFiniteWeight, UsageError for an unknown map or scale.
    """
    check_choices({"map": map, "scale": scale}, {"map": MAPS, "scale": SCALES})
    matrices, _ = find_matrices(program, where)
    with program.edit(f"parametrise {len(matrices)} matrices: {map}, scale {scale}", author="pass",
                      tool="graphwright.surgery.parametrize") as e:  # fmt: skip
        return [_parametrize(e, m, map, scale) for m in matrices]


def bake(program: Program, where: str | Selection = "**") -> list[str]:
    """Store the matrices of parametrised maps, and rewire their readers to the stored weights, in one edit.

    Returns: paths of the stored weights. Raises: EmptySelection if no selected map is parametrised and not yet baked.
    """
    bases = _chosen(program, where, baked=False)
    with program.edit(f"bake {len(bases)} matrices", author="pass", tool="graphwright.surgery.bake") as e:
        return [_store(e, base, trainable=False) for base in bases]


def unbake(program: Program, where: str | Selection = "**") -> list[str]:
    """Remove the stored matrices of baked maps, and compute the matrices from their generators again, in one edit.

    Returns: paths of the computed matrices. Raises: EmptySelection if no selected map is baked.
    """
    bases = _chosen(program, where, baked=True)
    with program.edit(f"unbake {len(bases)} matrices", author="pass", tool="graphwright.surgery.unbake") as e:
        for base in bases:
            w = program.node(f"{base}.weight")
            redirect(e, {Value(w): Value(program.node(f"{base}.orthogonal"))})
            e.remove(w)
    return [f"{base}.orthogonal" for base in bases]


def make_dense(program: Program, where: str | Selection = "**") -> list[str]:
    """Replace generators by stored, trainable matrices, in one edit, as an export needs.

    Returns: paths of the weights. Raises: EmptySelection if no selected map is parametrised.
    """
    bases = _chosen(program, where)
    with program.edit(f"make {len(bases)} matrices dense", author="pass", tool="graphwright.surgery.make_dense") as e:
        for base in bases:
            if _baked(program, base):
                e.set_attr(f"{base}.weight", trainable=True)
            else:
                _store(e, base, trainable=True)
            e.remove(_generator(program, base)[::-1])
    return [f"{base}.weight" for base in bases]


def _parametrize(e: Transaction, m: Matrix, map: str, scale: str) -> str:
    w = values(e.program, m.key)
    q = polar(w)
    base, key = m.name, m.key.removesuffix(".weight")

    def param(name: str, value: np.ndarray, trainable: bool = True) -> NodeId:
        return e.param(f"{base}.{name}.weight", stored(value, m.dtype), key=f"{key}.{name}.weight", trainable=trainable)

    n, tall = max(w.shape), w.shape[0] >= w.shape[1]
    nodes = _GeneratorNodes(e, base, m)
    generator = param("generator", np.repeat(np.eye(n), 2, axis=1)[:, : n - n % 2] if map == "householder"
                      else np.zeros((n, n)))  # fmt: skip
    rotation = nodes.rotation(generator, map, n)
    fixed = param("base", q, trainable=False)
    made = nodes.add("matmul", rotation, fixed) if tall else nodes.add("matmul", fixed, rotation)
    p = second_factor(w, q)
    if scale == "scalar":
        made = nodes.add("mul", made, param("scale", np.array([[np.trace(p) / len(p)]])))
    elif scale == "diag":
        made = nodes.add("mul", made, param("scale", np.diagonal(p)[None, :] if tall else np.diagonal(p)[:, None]))
    elif scale == "spd":
        root = param("scale", _root(p))
        spd = nodes.add("matmul", root, nodes.add("permute", root, axes=(1, 0)))
        made = nodes.add("matmul", made, spd) if tall else nodes.add("matmul", spd, made)
    redirect(e, {Value(m.param): Value(made)})
    e.remove(m.param)
    e.rename(made, f"{base}.orthogonal")
    return f"{base}.orthogonal"


def _root(p: np.ndarray) -> np.ndarray:
    """Return the symmetric square root of a positive semidefinite matrix."""
    eigenvalues, v = np.linalg.eigh((p + p.T) / 2)
    return (v * np.sqrt(np.maximum(eigenvalues, 0.0))) @ v.T


class _GeneratorNodes:
    """Builder of the nodes that compute a matrix from its generator."""

    def __init__(self, e: Transaction, base: str, m: Matrix) -> None:
        self.e, self.base, self.dtype, self.count = e, base, m.dtype, 0

    def add(self, op: str, *inputs: NodeId, **attrs: object) -> NodeId:
        self.count += 1
        return self.e.add(op, *inputs, name=f"{self.base}.generator.{self.count}_{op}", **attrs)

    def const(self, name: str, value: np.ndarray) -> NodeId:
        return self.e.const(f"{self.base}.generator.{name}", stored(value, self.dtype))

    def rotation(self, x: NodeId, map: str, n: int) -> NodeId:
        if map == "householder":
            return self._reflections(x, self.const("eye", np.eye(n)))
        a = self.add("sub", x, self.add("permute", x, axes=(1, 0)))
        if map == "cayley":
            eye = self.const("eye", np.eye(n))
            half = self.add("mul", a, self.const("half", np.array(0.5)))
            return self.add("solve", self.add("sub", eye, half), self.add("add", eye, half))
        # Padé [3/3] of A / 2^s: U = A (A² + 60), V = 12 A² + 120; a rotation for every skew A
        a = self.add("mul", a, self.const("part", np.array(0.5**SQUARINGS)))
        square = self.add("matmul", a, a)
        u = self.add("matmul", a, self.add("add", square, self.const("c60", 60 * np.eye(n))))
        v = self.add("add", self.add("mul", square, self.const("c12", np.array(12.0))),
                     self.const("c120", 120 * np.eye(n)))  # fmt: skip
        q = self.add("solve", self.add("sub", v, u), self.add("add", v, u))
        for _ in range(SQUARINGS):
            q = self.add("matmul", q, q)
        return q

    def _reflections(self, v: NodeId, eye: NodeId) -> NodeId:
        """Add nodes for I - V T Vᵀ, the product of one Householder reflection per column of V.

        T⁻¹ is the upper triangle of VᵀV with its diagonal halved. V starts with pairs of equal columns, which give I.
        Source: Joffrain et al. 2006, "Accumulating Householder transformations, revisited".
        """
        count = int(self.e.spec(v).shape[1])
        transposed = self.add("permute", v, axes=(1, 0))
        upper = self.const("upper", np.triu(np.ones((count, count)), 1) + 0.5 * np.eye(count))
        triangle = self.add("mul", self.add("matmul", transposed, v), upper)
        return self.add("sub", eye, self.add("matmul", v, self.add("solve", triangle, transposed)))


def _store(e: Transaction, base: str, *, trainable: bool) -> str:
    """Store the computed matrix as a weight, and rewire its readers to the weight. Returns: path of the weight."""
    p, made = e.program, f"{base}.orthogonal"
    value = p.extract(_generator(p, base)).run({}, keep=[made]).value(made).to_numpy()
    key = p.key(p.node(f"{base}.generator.weight")).removesuffix(".generator.weight")
    w = e.param(f"{base}.weight", value, key=f"{key}.weight", trainable=trainable)
    redirect(e, {Value(p.node(made)): Value(w)})
    return f"{base}.weight"


def _generator(p: Program, base: str) -> list[NodeId]:
    """Return the node of the computed matrix and all its ancestors, in topological order."""
    return sorted(p.reachable([p.node(f"{base}.orthogonal")]), key=p.order_labels.key)


def _baked(p: Program, base: str) -> bool:
    return p.free_name(f"{base}.weight") != f"{base}.weight"


def _chosen(p: Program, where: str | Selection, baked: bool | None = None) -> list[str]:
    """Return the names of the selected maps that have a generator.

    If `baked` is True, only maps that read a stored matrix; if False, only maps that read the computed one.
    Raises: EmptySelection if there are no such maps.
    """
    chosen = selection_of(p, where)
    bases = [b for b in named(p, ".generator.weight") if p.node(f"{b}.generator.weight") in chosen]
    if not bases:
        raise EmptySelection("no selected linear map is parametrised", where=str(where), fix="call parametrize first")
    if not (found := [b for b in bases if baked is None or _baked(p, b) == baked]):
        raise EmptySelection(f"the matrices of the selected maps are already {'computed' if baked else 'stored'}",
                             where=str(where), got=", ".join(bases),
                             fix=f"call {'bake' if baked else 'unbake'}(program, where) first")  # fmt: skip
    return found
