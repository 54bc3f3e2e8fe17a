"""Rewrite a matched program as its family's template, so that the original class computes the same function.

Removed units become zeros, or the config gets the smaller sizes. A weight of the template has the program's entries
at the units that remain, and zeros elsewhere. Gates, factors and the scale of a narrower norm are multiplied into
weights in float64 and rounded once. Unchanged weights keep their bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from math import isclose
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import NDArray, from_numpy
from graphwright.autograd import Parameter, Variable
from graphwright.autograd.variable import remapped
from graphwright.models.architectures.architecture import Config, size_of
from graphwright.models.codegen.modules import LAYER
from graphwright.models.export.affine_map import AffineMap, constant
from graphwright.models.export.template_match import TRUNK, TemplateMatch, key_heads, uncast, unit_of
from graphwright.models.loading import assemble, template_keys
from graphwright.ops import traits
from graphwright.program.kinds import STORED
from graphwright.program.op_graph import Value
from graphwright.program.weights import SOURCE, as_array
from graphwright.report import ShortDict

if TYPE_CHECKING:
    from graphwright.models.model import Model
    from graphwright.program.program import Program

IndexMap = dict[str, np.ndarray]
"""Dimension name -> for each unit of the template the unit of the program, or -1."""


# -- the config --------------------------------------------------------------------------------------------------------
def changed(config: Config, fields: dict[str, Any], without: tuple[str, ...] = ()) -> Config:
    """Return a copy of a config with some fields changed and others removed; the order of the fields is preserved."""
    made = {k: v for k, v in {**config.fields, **fields}.items() if k not in without}
    return Config(made, (json.dumps(made, indent=2, ensure_ascii=False) + "\n").encode(), config.path)


def with_eps(config: Config, match: TemplateMatch, dims: Any) -> tuple[Config, Any] | str:
    """Return (config, dimensions) with the eps that the program's norms need in a template of sizes `dims`.

    If norms need different eps, return a message that names two of them. A norm over d' channels equals a scaled norm
    over d channels of which d' are not 0: x / √(Σx²/d' + ε) = √(d'/d) · x / √(Σx²/d + ε·d'/d).
    """
    found: dict[float, str] = {}
    for _, part in match.matched():
        for path, eps in part.eps.items():
            centred = not traits(match.template.op(match.template.node(path))).scales_rows
            if centred and match.sizes[TRUNK]["hidden"] != dims.hidden:
                return f"{path} subtracts the mean of its channels, which zeros would change"
            needed = eps * (match.sizes[TRUNK]["hidden"] / dims.hidden if _over_channels(match, path) else 1.0)
            if isclose(needed, dims.eps, rel_tol=1e-9):
                needed = float(dims.eps)
            if not any(isclose(needed, known, rel_tol=1e-9) for known in found):
                found[needed] = path
    if len(found) > 1:
        (a, first), (b, second), *_ = found.items()
        return f"{first} needs eps {a:.6g} and {second} needs {b:.6g}, but the config has one eps"
    eps = next(iter(found), float(dims.eps))
    if eps == dims.eps:
        return config, dims
    return changed(config, {match.fields["eps"]: eps}), replace(dims, eps=eps)


def _over_channels(match: TemplateMatch, norm: str) -> bool:
    """Return True for a norm over the residual width, False for one within a head."""
    return match.terms[f"{norm}.weight"] == ("hidden",)


# -- from units of the template to the program's ----------------------------------------------------------------------
_UNFILLABLE = {
    "vocab": "",  # zeros would be logits of more ids
    "chosen": "",
    "experts": "; a router row of zeros has logit 0, so tokens would choose it, and no expert is always last",
}
"""Dimension that zeros cannot fill -> why."""


def index_maps(match: TemplateMatch, branch: int, dims: Any) -> IndexMap | str:
    """Map each dimension to an array: for each unit of a template of sizes `dims` the program's unit, or -1 for zeros.

    The units are those of branch number `branch`. If they do not fit into `dims`, return the reason as a string.
    """
    part, sizes, found = match.part(branch), match.sizes[branch], IndexMap()
    assert part is not None
    for name, size in sizes.items():
        wanted = size_of(dims, name)
        if name in ("heads", "kv_heads"):
            continue
        if size > wanted or (name in _UNFILLABLE and size != wanted):
            return f"{size} along {name}, but the class has {wanted}{_UNFILLABLE.get(name, '')}"
        known = _original_indices(match, TRUNK if name == "hidden" else branch, name, wanted)
        found[name] = np.full(wanted, -1)
        found[name][np.arange(size) if known is None else known] = np.arange(size)
    if "heads" in sizes:
        table = key_heads(match.program, part, sizes["heads"], sizes["kv_heads"])
        known = _original_indices(match, branch, "heads", dims.heads)
        made = head_maps(table, sizes["kv_heads"], dims.heads, dims.kv_heads, known)
        if made is None:
            given = f"{sizes['heads']} query heads on {sizes['kv_heads']} key heads"
            return f"{given}, but the class has {dims.heads} on {dims.kv_heads}"
        found["heads"], found["kv_heads"] = made
    return found


def head_maps(
    table: np.ndarray, kv_here: int, heads: int, kv_heads: int, known: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray] | None:
    """Assign the program's heads to a template in which each key head serves equally many query heads.

    Args:
        table: for each query head of the program the key head that it reads, one of `kv_here`.
        heads, kv_heads: numbers of query heads and key heads of the template.
        known: for each query head its index before pruning, which is kept if possible.
    Returns: two arrays with the program's head, or -1, for each query head and each key head of the template; None if
        the heads do not fit. A key head with more query heads than the template's groups have is repeated.
    """
    each = heads // kv_heads
    queries, keys = np.full((kv_heads, each), -1), np.full(kv_heads, -1)
    if known is not None:
        readers = [set(table[known // each == group].tolist()) for group in range(kv_heads)]
        if all(len(read) <= 1 for read in readers):
            queries.reshape(-1)[known] = np.arange(len(table))
            return queries.reshape(-1), np.array([next(iter(read), -1) for read in readers])
    groups = [np.flatnonzero(table == k) for k in range(kv_here)]
    chunks = [(k, g[i : i + each]) for k, g in enumerate(groups) for i in range(0, len(g), each)]
    if len(chunks) > kv_heads:
        return None
    for at, (k, chunk) in enumerate(chunks):
        keys[at] = k
        queries[at, : len(chunk)] = chunk
    return queries.reshape(-1), keys


def _original_indices(match: TemplateMatch, branch: int, name: str, wanted: int) -> np.ndarray | None:
    """Return each unit's index before pruning along dimension `name`; None if one is unknown or >= `wanted`."""
    part, p = match.part(branch), match.program
    for path, source in part.weights.items() if part is not None else ():
        if not isinstance(source, Value) or p.op(source.node) not in STORED:
            continue
        for axis, term in enumerate(match.terms[path]):
            first, unit = unit_of(term, match.dims)
            entries = lineage(p.weights[p.key(source.node)], axis) if first == name else None
            if entries is None:
                continue
            known = entries[::unit] // unit
            if len(np.unique(known)) == len(known) and ((known >= 0) & (known < wanted)).all():
                return known
    return None


def lineage(variable: Variable, axis: int) -> np.ndarray | None:
    """Return the index before all edits of each entry along a weight's axis, -1 for a new entry; None if unknown."""
    indices, step = np.arange(variable.shape[axis]), variable.lineage
    while step is not None:
        back = np.asarray(step.index_maps[axis]) if axis in step.index_maps else np.arange(step.sizes[axis])
        if len(indices) and indices.max() >= len(back):
            return None  # the weight was replaced by one of a different shape in between
        indices = np.where(indices < 0, -1, back[indices])
        step = step.before
    return indices


# -- the weights -------------------------------------------------------------------------------------------------------
def conform(
    model: Model, match: TemplateMatch, config: Config, dims: Any, layers: Mapping[int, int] | None = None
) -> Model:
    """Return a copy of the model whose program is the template for `dims`, with the weights of the old program.

    The match must have no unmatched nodes, and its units and eps must fit `dims`. `layers` maps each layer of the
    result to the layer whose weights it gets, by default the layer with the same number.
    """
    maker, p = _WeightBuilder(model, match, dims), model.program
    keys = template_keys(model.arch, dims, model.keys)
    values: dict[str, Parameter] = {}
    untouched: list[NDArray] = []
    for path, _, shape, terms in model.arch.weights(dims):
        array, name = maker.weight(origin_of(path, layers), shape, terms)
        key = keys[path]
        values[path] = Parameter(array, True, name or key)
        if p.weights.reference_of(array) == SOURCE:
            untouched.append(array)
    program = assemble(model.arch, dims, keys, values, model.compute, p.name)
    for array in untouched:
        program.weights.refer(array)
    made = model.with_program(program, config, dims)
    made.keys = ShortDict({**model.keys, **match.keys, **keys})  # also of removed layers, whose tensors are not written
    return made


def origin_of(path: str, layers: Mapping[int, int] | None) -> str:
    """Return the path that a weight of the result has in the match; `layers` maps layers of the result to it."""
    return path if layers is None else LAYER.sub(lambda m: f"layers.{layers[int(m[1])]}.", path)


class _WeightBuilder:
    def __init__(self, model: Model, match: TemplateMatch, dims: Any) -> None:
        self.model, self.match, self.p, self.dims = model, match, model.program, dims
        self.branch = {path: i for i, part in match.matched() for path in part.weights}
        self.norms = {path for _, part in match.matched() for path in part.eps}
        t = match.template
        ends = [s.branch for s in match.branches] + [v for _, part in match.matched() for v in part.absent]
        self.last = {t.path(uncast(t, v)) for end in ends for v in t.operands(_product(t, end).node)[1:]}
        self.maps: dict[int, IndexMap] = {}

    def weight(self, path: str, shape: tuple[int, ...], terms: tuple[str, ...]) -> tuple[NDArray, str | None]:
        """Return (array of the template's weight at `path`, its key in the source file, or None if it was changed)."""
        branch, kind = self.branch.get(path), self.match.template.spec(path).dtype
        if branch is None:
            return self._of_removed_branch(path, shape, kind)
        part = self.match.part(branch)
        assert part is not None
        source, indices = part.weights[path], self._indices(branch, terms)
        scale, offset = self._norm_scale(path, terms)
        if isinstance(source, Value) and self.p.op(source.node) in STORED and scale == 1:
            variable = self.p.weights[self.p.key(source.node)]
            array = variable.data
            assert isinstance(array, NDArray)
            if not indices:
                return array, variable.name
            host = remapped(array.to_numpy(bits=True), indices)
            return from_numpy(np.ascontiguousarray(host), bits=array.dtype), None
        if isinstance(source, AffineMap):
            values = source.matrix if len(shape) == 2 else source.bias
        else:
            values = constant(self.p, source)
        return as_array(remapped((values + offset) * scale - offset, indices), kind), None

    def _indices(self, branch: int, terms: tuple[str, ...]) -> dict[int, np.ndarray]:
        """Map each changed axis of a weight to an array: for each entry in the template, the program's index or -1."""
        if branch not in self.maps:
            found = index_maps(self.match, branch, self.dims)
            assert isinstance(found, dict), found
            self.maps[branch] = found
        indices: dict[int, np.ndarray] = {}
        for axis, term in enumerate(terms):
            name, unit = unit_of(term, self.dims)
            old = self.maps[branch][name]
            if not np.array_equal(old, np.arange(self.match.sizes[branch][name])):
                entries = old[:, None] * unit + np.arange(unit)
                indices[axis] = np.where(old[:, None] < 0, -1, entries).reshape(-1)
        return indices

    def _norm_scale(self, path: str, terms: tuple[str, ...]) -> tuple[float, float]:
        """Return (factor on a norm's weight for added zero channels, else 1; 1 if it scales by 1 + weight, else 0)."""
        norm, here, t = path.removesuffix(".weight"), self.match.sizes[TRUNK]["hidden"], self.match.template
        if here == self.dims.hidden or terms != ("hidden",) or norm not in self.norms:
            return 1.0, 0.0
        return (here / self.dims.hidden) ** 0.5, float(t.attrs(t.node(norm))["unit_offset"])

    def _of_removed_branch(self, path: str, shape: tuple[int, ...], kind: Any) -> tuple[NDArray, str | None]:
        """Return (array, its key in the file or None) for a removed branch: zeros for its last op, else as stored."""
        known = self.p.weights.get(self.match.keys[path])
        if path not in self.last and known is not None and known.shape == shape:
            assert isinstance(known.data, NDArray)
            return known.data, known.name
        norm = len(shape) == 1 and path.endswith("norm.weight")
        return as_array(np.full(shape, 1.0 if norm else 0.0), kind), None


def _product(t: Program, end: Value) -> Value:
    """Return the product whose zeros make the end of a branch zero: the end itself, or what its norms are applied to.

    Without a bias, a norm of zeros is zero.
    """
    while traits(t.op(end.node)).normalises or traits(t.op(end.node)).multiplies:
        end = t.operands(end.node)[0]
    return end


def computed_weights(match: TemplateMatch, dims: Any) -> list[str]:
    """Return the paths of the template's weights that must be computed, and so rounded, instead of copied."""
    p, found = match.program, []
    for _, part in match.matched():
        for path, source in part.weights.items():
            copied = isinstance(source, Value) and p.op(source.node) in STORED
            norm = path.removesuffix(".weight")
            wider = norm in part.eps and _over_channels(match, norm) and match.sizes[TRUNK]["hidden"] != dims.hidden
            if not copied or wider:
                found.append(path)
    return found
