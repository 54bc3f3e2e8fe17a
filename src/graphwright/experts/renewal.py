"""A new expert in place of another one: its prototype among unrouted tokens, and all its parameters new."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Protocol

import numpy as np

from graphwright.autograd import Parameter
from graphwright.experts.observed import mlps_of
from graphwright.experts.routers import RouterNodes
from graphwright.graph import NodeId
from graphwright.nn.router import HIGHEST_THRESHOLD
from graphwright.ops.experts import FIRST, Expert, experts_of
from graphwright.program.axes.solve_axes import origin
from graphwright.program.weights import as_array

if TYPE_CHECKING:
    from graphwright.program.editing.transaction import Transaction


class RenewalOptions(Protocol):
    """What `newborn` reads of a controller."""

    @property
    def k0(self) -> float:
        """Mean number of experts per token."""
        ...

    @property
    def near(self) -> float:
        """Cosine of the tokens that a prototype is the mean of."""
        ...

    @property
    def highest(self) -> float:
        """Largest threshold."""
        ...

    @property
    def quiet(self) -> float:
        """Factor of the last matrix."""
        ...


@dataclass(frozen=True, slots=True)
class Newborn:
    """The values of a new expert.

    Attributes:
        prototype: a unit vector [C].
        threshold: θ; its parameter is artanh θ.
        matrices: values by the key of the parameter that they replace.
        tokens: number of unrouted tokens that the prototype is the mean of.
    """

    prototype: np.ndarray
    threshold: float
    matrices: dict[str, np.ndarray]
    tokens: int


def newborn(
    options: RenewalOptions, router: RouterNodes, i: int, unrouted: np.ndarray, recent: np.ndarray,
    rng: np.random.Generator,
) -> Newborn:  # fmt: skip
    """Draw a new expert `i`: its prototype is the mean of the unrouted tokens near a random one of them.

    Args:
        unrouted: the last tokens without an expert [n, C]; without any, the prototype is a random unit vector.
        recent: tokens of the last batch [m, C]; the threshold is the (1 - k0/E) quantile of their cosines.
    """
    p = router.program
    width = int(p.weights.array(router.prototypes[i]).shape[0])
    count, prototype = 0, rng.normal(size=width)
    if len(unrouted):
        tokens = unrouted.astype(np.float64)
        rows = _units(tokens)
        near = tokens[rows @ rows[rng.integers(len(rows))] > options.near]
        if len(near):
            count, prototype = len(near), near.mean(axis=0)
    prototype = prototype / max(float(np.linalg.norm(prototype)), 1e-12)
    alive = int(p.weights.array(router.alive).to_numpy().sum())
    share = min(max(1 - options.k0 / max(alive, 1), 0.0), 1.0)
    cosines = _units(recent.astype(np.float64)) @ prototype
    threshold = min(float(np.quantile(cosines, share)), options.highest) if len(cosines) else options.highest
    threshold = max(threshold, -HIGHEST_THRESHOLD)
    expert, matrices = _expert(router, i), {}
    for name, node in zip(Expert._fields, expert, strict=True):
        if node is None:
            continue
        shape = tuple(int(n) for n in p.spec(node).shape)
        inner = int(p.spec(expert.up if not name.startswith("down") else expert.down).shape[1])
        drawn = rng.uniform(-1, 1, shape) / sqrt(inner)  # as nn.Linear
        matrices[p.key(node)] = drawn * (options.quiet if name.startswith("down") else 1.0)
    return Newborn(prototype, threshold, matrices, count)


def renew(e: Transaction, router: RouterNodes, i: int, made: Newborn, *, born: int) -> None:
    """Replace all parameters of an expert by new ones under the same names and keys, and let it be alive.

    An optimizer begins again with them, as their moments belong to the old ones. `born` is the step: an attribute of
    the prototype, so that undo and files keep it.
    """
    p = router.program
    values = {router.prototypes[i]: made.prototype, router.thresholds[i]: np.asarray(np.arctanh(made.threshold))}
    for key, value in {**values, **made.matrices}.items():
        _replace(e, p.readers(key)[0], value, {"born": born} if key == router.prototypes[i] else {})
    alive = p.weights.array(router.alive).to_numpy()
    if not alive[i]:
        e.set_weight(router.alive, np.where(np.arange(len(alive)) == i, True, alive))


def _replace(e: Transaction, old: NodeId, value: np.ndarray, more: dict[str, int]) -> None:
    """Replace a param node by a new one with the same name, key and readers."""
    p = e.program
    path, key, attrs = p.path(old), p.key(old), {k: v for k, v in p.attrs(old).items() if k not in ("axes", "born")}
    edges, array = p.out_edges(old), as_array(value, p.spec(old).dtype)
    spare = p.weights.free_key(f"{key}.new")
    variable = Parameter(array, bool(attrs.get("trainable", True)), key)
    made = e.add_node(
        p.op(old), {**attrs, "key": spare}, p.free_name(f"{path}.new"), (array.spec,), variable, after=old
    )
    for edge in edges:
        e.rewire(edge, made)
    e.remove(old)
    e.rename(made, path)
    e.set_attr(made, **{**attrs, **more, "key": key})


def drift(router: RouterNodes, i: int, made: Newborn, recent: np.ndarray) -> float:
    """Return the largest share of the weights of a token that the newborn takes, over recent tokens.

    The result of such a token moves from y to (1 - w)·y + w·f(x), and f is small for a new expert.
    """
    p = router.program
    x = _units(recent.astype(np.float64))
    prototypes = np.stack([p.weights.array(k).to_numpy("float64") for k in router.prototypes])
    theta = np.tanh([float(p.weights.array(k).to_numpy("float64")) for k in router.thresholds])
    alive, kappa = (
        p.weights.array(router.alive).to_numpy(),
        np.exp(float(p.weights.array(router.eta).to_numpy("float64"))),
    )
    z = np.where(alive & (np.arange(len(theta)) != i), x @ _units(prototypes).T - theta, -np.inf)
    best = z == z.max(axis=1, keepdims=True)
    chosen = np.where((z > 0).any(axis=1, keepdims=True), z > 0, best)
    own = x @ made.prototype - made.threshold
    s = np.where(own > 0, np.logaddexp(0, kappa * own), 0.0)
    rest = np.where(chosen, np.logaddexp(0, kappa * np.where(np.isfinite(z), z, 0)), 0.0).sum(axis=1)
    rest = np.where((z > 0).any(axis=1), rest, np.where(own > 0, 0.0, rest))  # a fallback gives way to a hit
    total = s + rest
    return float(np.max(np.divide(s, total, out=np.zeros_like(s), where=total > 0), initial=0.0))


def _units(x: np.ndarray) -> np.ndarray:
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-6)


def _expert(router: RouterNodes, i: int) -> Expert:
    """Return the param nodes of one expert of a router."""
    p, node = router.program, mlps_of(router)
    assert node is not None
    found = experts_of(p.operands(node)[FIRST:], p.attrs(node))[i]
    return Expert(*(None if v is None else origin(p, v) for v in found))
