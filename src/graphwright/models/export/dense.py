"""A program read by its family's template, written as that template again: the same function in the stock class.

What was cut comes back as zeros (rung 3), or the config says the smaller sizes (rung 2). Each weight is the program's
own at the places that it has, zero elsewhere; a gate, factors and the scale of a narrower norm are multiplied in, in
float64, and rounded once. Weights that are whole stay the bytes they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isclose
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import NDArray, from_numpy
from graphwright.array import dtype as named
from graphwright.autograd import Parameter
from graphwright.autograd.variable import remapped
from graphwright.models.codegen.statements import LAYER
from graphwright.models.export.affine_map import Stretch, constant
from graphwright.models.export.template_reader import TRUNK, places_of, uncast
from graphwright.program import Builder, Value
from graphwright.program.kinds import STORED
from graphwright.program.weights import SOURCE, as_array

if TYPE_CHECKING:
    from graphwright.models.architectures.config import Config
    from graphwright.models.export.template_reader import Bound, Places, Reading
    from graphwright.models.model import Model
    from graphwright.program import Program


def eps_of(reading: Reading, dims: Any) -> float | str:
    """The one eps that all norms need in a template of sizes `dims`, or why there is none.

    Over d' of d channels, the others zero, x / √(Σx²/d' + ε) = √(d'/d) · x / √(Σx²/d + ε·d'/d).
    """
    found: dict[float, str] = {}
    for part in reading.read_parts():
        for path, eps in part.eps.items():
            needed = eps * (reading.sizes[TRUNK]["hidden"] / dims.hidden if _is_channels(reading, path) else 1.0)
            if isclose(needed, dims.eps, rel_tol=1e-9):
                needed = float(dims.eps)
            if not any(isclose(needed, known, rel_tol=1e-9) for known in found):
                found[needed] = path
    if len(found) > 1:
        (a, first), (b, second), *_ = found.items()
        return f"{first} needs eps {a:.6g} and {second} {b:.6g}, and the config has one"
    return next(iter(found), float(dims.eps))


def _is_channels(reading: Reading, norm: str) -> bool:
    """True for a norm over the residual width, false for one within a head."""
    return next(terms for path, _, _, terms in _weights(reading) if path == f"{norm}.weight") == ("hidden",)


def _weights(reading: Reading) -> Iterable[tuple[str, str, tuple[int, ...], tuple[str, ...]]]:
    return reading.arch.weights(reading.dims)


def conform(
    model: Model, reading: Reading, config: Config, dims: Any, layers: Mapping[int, int] | None = None
) -> Model:
    """The model as the stock class has it: the program that the family's template gives for `dims`.

    Args:
        model: whose program was read.
        reading: of it, whole, and such that `places_of` and `eps_of` give no reason against `dims`.
        config, dims: to be written, and what the family reads from it.
        layers: layer of the result -> layer of the template; by default each is itself.
    """
    maker, p, b = _Maker(model, reading, dims), model.program, Builder(model.program.name)
    params: dict[str, Value] = {}
    untouched: list[NDArray] = []
    for path, _, shape, terms in model.arch.weights(dims):
        array, name = maker.weight(_of_layer(path, layers), shape, terms)
        key = model.keys[path]
        params[path] = b.param(path, Parameter(array, True, name or key), key=key)
        if p.weights.reference_of(array) == SOURCE:
            untouched.append(array)
    model.arch.build(b, dims, params, named(model.compute))
    program = b.build()
    for array in untouched:
        program.weights.refer(array)
    return model.with_program(program, config, dims)


def _of_layer(path: str, layers: Mapping[int, int] | None) -> str:
    return path if layers is None else LAYER.sub(lambda m: f"layers.{layers[int(m[1])]}.", path)


class _Maker:
    """Weights of the template, one at a time."""

    def __init__(self, model: Model, reading: Reading, dims: Any) -> None:
        self.model, self.reading, self.p, self.dims = model, reading, model.program, dims
        self.slot: dict[str, int] = {}
        for i in range(TRUNK, len(reading.slots)):
            part = reading.part(i)
            self.slot |= dict.fromkeys(part.weights if part is not None else (), i)
        t = reading.template
        ends = [uncast(t, v) for s in reading.slots for v in t.operands(s.branch.node)[1:]]
        self.ends = {t.path(v) for v in ends}
        self.places: dict[int, Places] = {}

    def weight(self, path: str, shape: tuple[int, ...], terms: tuple[str, ...]) -> tuple[NDArray, str | None]:
        """The value under a path of the template, and its name in the source if it is an array that the program has."""
        slot, kind = self.slot.get(path), self.reading.template.spec(path).dtype
        if slot is None:
            return self._absent(path, shape, kind)
        part = self.reading.part(slot)
        assert part is not None
        bound, places = part.weights[path], self._spread(slot, terms)
        scale, offset = self._norm(path, terms)
        if isinstance(bound, Value) and self.p.op(bound.node) in STORED and scale == 1:
            variable = self.p.weights[self.p.key(bound.node)]
            array = variable.data
            assert isinstance(array, NDArray)
            if not places:
                return array, variable.name
            host = remapped(array.to_numpy(bits=True), places)
            return from_numpy(np.ascontiguousarray(host), bits=array.dtype), None
        values = (_values(self.p, bound, len(shape)) + offset) * scale - offset
        return as_array(remapped(values, places), kind), None

    def _spread(self, slot: int, terms: tuple[str, ...]) -> dict[int, np.ndarray]:
        """Dimension of a weight -> for each place the place here, or -1; those that are as they were left out."""
        if slot not in self.places:
            found = places_of(self.reading, slot, self.dims)
            assert isinstance(found, dict), found
            self.places[slot] = found
        here = self.reading.sizes[slot]
        places: dict[int, np.ndarray] = {}
        for dim, term in enumerate(terms):
            name, _, each = term.partition("*")
            old = self.places[slot][name]
            if np.array_equal(old, np.arange(here[name])):
                continue
            unit = int(getattr(self.dims, each)) if each else 1
            inside = np.arange(unit)
            places[dim] = np.where(old[:, None] < 0, -1, old[:, None] * unit + inside).reshape(-1)
        return places

    def _norm(self, path: str, terms: tuple[str, ...]) -> tuple[float, float]:
        """Factor on the scale of a norm that gets more channels, and what the op adds to the scale."""
        norm, here, t = path.removesuffix(".weight"), self.reading.sizes[TRUNK]["hidden"], self.reading.template
        norms = {path for part in self.reading.read_parts() for path in part.eps}
        if here == self.dims.hidden or terms != ("hidden",) or norm not in norms:
            return 1.0, 0.0
        return (here / self.dims.hidden) ** 0.5, float(t.attrs(t.node(norm))["unit_offset"])

    def _absent(self, path: str, shape: tuple[int, ...], kind: Any) -> tuple[NDArray, str | None]:
        """A weight of a branch that is gone: as it lies here still, but zero where the branch ends."""
        key = self.model.keys[path]
        known = self.p.weights.get(key)
        if path not in self.ends and known is not None and known.shape == shape:
            assert isinstance(known.data, NDArray)
            return known.data, known.name
        norm = len(shape) == 1 and path.endswith("norm.weight")
        return as_array(np.full(shape, 1.0 if norm else 0.0), kind), None


def _values(p: Program, bound: Bound, rank: int) -> np.ndarray:
    """float64."""
    if isinstance(bound, Stretch):
        return bound.matrix if rank == 2 else bound.bias
    return constant(p, bound)


def multiplied(reading: Reading, dims: Any) -> list[str]:
    """Paths of the template's weights that are computed, and so rounded, in a template of sizes `dims`."""
    p, found = reading.program, []
    for part in reading.read_parts():
        for path, bound in part.weights.items():
            copied = isinstance(bound, Value) and p.op(bound.node) in STORED
            norm = path.removesuffix(".weight") in part.eps and _is_channels(reading, path.removesuffix(".weight"))
            if not copied or (norm and reading.sizes[TRUNK]["hidden"] != dims.hidden):
                found.append(path)
    return found
