"""Weights that stay orthonormal while they train: computed from a generator that any optimizer may change freely.

Three states, each an edit from the other: *parametrised*, the matrix is computed from its generator in every run, and
this is what is trained and saved; *baked*, a stored matrix is read and the generator rests; *dense*, the generator is
gone. Names below the map `q`: `q.generator.weight`, `q.base.weight`, `q.scale.weight`, and the matrix `q.orthogonal`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphwright.errors import ShapeError, UsageError
from graphwright.program import EmptySelection, Value
from graphwright.program.editing.replace import redirect
from graphwright.program.kinds import PARAM
from graphwright.surgery.matrices import find_matrices, stored, values
from graphwright.surgery.orthogonal.lie import cayley, skew
from graphwright.surgery.orthogonal.methods import polar, qr, stretch

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.program import Program, Selection, Transaction
    from graphwright.surgery.matrices import Matrix

MAPS = ("cayley", "exp", "householder")
SCALES = ("none", "scalar", "diag", "spd")
SQUARINGS = 3
"""Of exp: it is a rotation for any generator, and exp itself to float32 up to angles of about 3."""


def parametrize(program: Program, where: str | Selection, map: str = "cayley", scale: str = "none") -> list[str]:
    """Let matrices be computed from generators, in one edit: W = Q S with Q = R(A) Q₀ (wide: S Q with Q = Q₀ R(A)).

    Q₀ is the polar factor of W, fixed. R(A) is a rotation of the longer side, so that every orthonormal matrix that
    turns into Q₀ is reached; at the start it is the identity.

    Args:
        program: edited in place; its new params are trained in the place of W.
        where: pattern of linear maps, or a selection.
        map: `cayley`, (I - A/2)⁻¹ (I + A/2), which reaches all rotations but half turns; `exp` of A, by a Padé
            approximant; `householder`, a product of reflections. A is the skew part X - Xᵀ of the generator X.
        scale: `none`, S = I: the weight becomes its polar factor. `scalar` and `diag`: the mean singular value, or a
            factor per column (row) of Q. `spd`: S = C Cᵀ, with which the weight is at first what it was.
    Returns: paths of the computed matrices.
    Raises: EmptySelection, NonFiniteWeight, UsageError for no such map or scale.
    """
    for name, given, known in (("map", map, MAPS), ("scale", scale, SCALES)):
        if given not in known:
            raise UsageError("no such option", where=name, expected=", ".join(known), got=given)
    matrices, _ = find_matrices(program, where)
    with program.edit(f"parametrise {len(matrices)} matrices: {map}, scale {scale}", author="pass",
                      tool="graphwright.surgery.parametrize") as e:  # fmt: skip
        return [_parametrize(e, m, map, scale) for m in matrices]


def bake(program: Program, where: str | Selection = "**") -> list[str]:
    """Store the computed matrices and read those, in one edit; the generators rest until `unbake`.

    Returns: paths of the stored weights. Raises: EmptySelection if nothing here is parametrised and not baked.
    """
    bases = [b for b in _chosen(program, where) if not _has(program, f"{b}.weight")]
    _need(bases, where)
    with program.edit(f"bake {len(bases)} matrices", author="pass", tool="graphwright.surgery.bake") as e:
        for base in bases:
            made = program.node(f"{base}.orthogonal")
            w = e.param(f"{base}.weight", _value(program, base), key=_key(program, base), trainable=False)
            redirect(e, {Value(made): Value(w)})
    return [f"{base}.weight" for base in bases]


def unbake(program: Program, where: str | Selection = "**") -> list[str]:
    """Compute baked matrices from their generators again, in one edit; what was stored goes.

    Returns: paths of the computed matrices. Raises: EmptySelection if nothing here is baked.
    """
    bases = [b for b in _chosen(program, where) if _has(program, f"{b}.weight")]
    _need(bases, where)
    with program.edit(f"unbake {len(bases)} matrices", author="pass", tool="graphwright.surgery.unbake") as e:
        for base in bases:
            w = program.node(f"{base}.weight")
            redirect(e, {Value(w): Value(program.node(f"{base}.orthogonal"))})
            e.remove(w)
    return [f"{base}.orthogonal" for base in bases]


def settle(program: Program, where: str | Selection = "**") -> list[str]:
    """Make matrices dense, in one edit: stored and trainable, their generators gone. For export.

    Returns: paths of the weights. Raises: EmptySelection if nothing here is parametrised.
    """
    bases = _chosen(program, where)
    _need(bases, where)
    with program.edit(f"settle {len(bases)} matrices", author="pass", tool="graphwright.surgery.settle") as e:
        for base in bases:
            made, path = program.node(f"{base}.orthogonal"), f"{base}.weight"
            if _has(program, path):
                e.set_attr(path, trainable=True)
            else:
                w = e.param(path, _value(program, base), key=_key(program, base))
                redirect(e, {Value(made): Value(w)})
            for node in reversed(_generator(program, made)):
                e.remove(node)
    return [f"{base}.weight" for base in bases]


def parametrized(p: Program) -> list[str]:
    """Names of the maps whose matrices have generators, in order of creation."""
    ending = ".generator.weight"
    return [p.path(n).removesuffix(ending) for n in p.of_kind(PARAM) if p.path(n).endswith(ending)]


def _parametrize(e: Transaction, m: Matrix, map: str, scale: str) -> str:
    w = values(e.program, m.key)
    q = polar(w)
    base, key = m.name, m.key.removesuffix(".weight")

    def param(name: str, value: np.ndarray, trainable: bool = True) -> NodeId:
        return e.param(f"{base}.{name}.weight", stored(value, m.dtype), key=f"{key}.{name}.weight", trainable=trainable)

    n, tall = max(w.shape), w.shape[0] >= w.shape[1]
    maker = _Maker(e, base, m)
    generator = param("generator", np.repeat(np.eye(n), 2, axis=1)[:, : n - n % 2] if map == "householder"
                      else np.zeros((n, n)))  # fmt: skip
    rotation = maker.rotation(generator, map, n)
    fixed = param("base", q, trainable=False)
    made = maker.add("matmul", rotation, fixed) if tall else maker.add("matmul", fixed, rotation)
    p = stretch(w, q)
    if scale == "scalar":
        made = maker.add("mul", made, param("scale", np.array([[np.trace(p) / len(p)]])))
    elif scale == "diag":
        made = maker.add("mul", made, param("scale", np.diagonal(p)[None, :] if tall else np.diagonal(p)[:, None]))
    elif scale == "spd":
        root = param("scale", _root(p))
        spd = maker.add("matmul", root, maker.add("permute", root, axes=(1, 0)))
        made = maker.add("matmul", made, spd) if tall else maker.add("matmul", spd, made)
    redirect(e, {Value(m.param): Value(made)})
    e.remove(m.param)
    e.rename(made, f"{base}.orthogonal")
    return f"{base}.orthogonal"


def _root(p: np.ndarray) -> np.ndarray:
    """Symmetric root of a positive semidefinite matrix."""
    eigenvalues, v = np.linalg.eigh((p + p.T) / 2)
    return (v * np.sqrt(np.maximum(eigenvalues, 0.0))) @ v.T


class _Maker:
    """Adds the nodes of one generator."""

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
        """H₁ H₂ .. = I - V T Vᵀ with T⁻¹ the upper triangle of VᵀV, its diagonal halved; pairs begin as equals.

        Source: Joffrain et al. 2006, "Accumulating Householder transformations, revisited".
        """
        count = int(self.e.spec(v).shape[1])
        turned = self.add("permute", v, axes=(1, 0))
        upper = self.const("upper", np.triu(np.ones((count, count)), 1) + 0.5 * np.eye(count))
        triangle = self.add("mul", self.add("matmul", turned, v), upper)
        return self.add("sub", eye, self.add("matmul", v, self.add("solve", triangle, turned)))


def _value(p: Program, base: str) -> np.ndarray:
    """The computed matrix, as the program computes it."""
    made = p.node(f"{base}.orthogonal")
    part = p.extract(_generator(p, made))
    return part.run({}, keep=[f"{base}.orthogonal"]).value(f"{base}.orthogonal").to_numpy()


def _generator(p: Program, made: NodeId) -> list[NodeId]:
    """The matrix and everything it is computed from, in topological order."""
    found, stack = {made}, [made]
    while stack:
        for value in p.operands(stack.pop()):
            if value.node not in found:
                found.add(value.node)
                stack.append(value.node)
    return sorted(found, key=p.order_labels.key)


def _key(p: Program, base: str) -> str:
    return p.key(p.node(f"{base}.generator.weight")).removesuffix(".generator.weight") + ".weight"


def _has(p: Program, path: str) -> bool:
    return p.free_name(path) != path


def _chosen(p: Program, where: str | Selection) -> list[str]:
    chosen = p.select(where) if isinstance(where, str) else where
    return [b for b in parametrized(p) if p.node(f"{b}.generator.weight") in chosen]


def _need(bases: list[str], where: object) -> None:
    if not bases:
        raise EmptySelection("nothing here is in that state", where=str(where), fix="parametrize(program, where) first")


WAYS = ("qr", "polar", "cayley")


def retract(w: np.ndarray, gradient: np.ndarray, lr: float, by: str = "qr") -> np.ndarray:
    """One step against a gradient; the result has orthonormal columns (rows, if it is wide) as `w` has.

    ξ = W skew(WᵀG) + (I - WWᵀ) G is the part of G that does not stretch W.

    Args:
        w: [out, in], orthonormal.
        gradient: [out, in], of a loss by w.
        lr: length of the step, in units of the gradient.
        by: how to come back: `qr` (cheapest), `polar` (nearest), `cayley` (a rotation from the left).
    Raises: UsageError for no such way, ShapeError.
    """
    w, gradient = np.asarray(w, np.float64), np.asarray(gradient, np.float64)
    if w.ndim != 2 or w.shape != gradient.shape:
        raise ShapeError("a gradient has the shape of its matrix", expected=list(w.shape), got=list(gradient.shape))
    if by not in WAYS:
        raise UsageError("no such retraction", where="by", expected=", ".join(WAYS), got=by)
    if w.shape[0] < w.shape[1]:
        return retract(w.T, gradient.T, lr, by).T
    inner = w.T @ gradient
    tangent = w @ skew(inner) + gradient - w @ inner
    if by != "cayley":
        return (qr if by == "qr" else polar)(w - lr * tangent)
    half = tangent - w @ (w.T @ tangent) / 2
    return cayley(-lr * (half @ w.T - w @ half.T)) @ w
