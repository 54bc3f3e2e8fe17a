"""Export levels of models whose class no decoder template describes: what the class computes is found by running it.

The class's program for a config is built with the model's weights, and must give the program's outputs on random
inputs. Level 3 has zeros for removed units; for level 2 the fields of the config that state sizes are found by changing
them one by one and comparing the shapes of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy, deepcopy
from functools import cached_property
from itertools import combinations, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import NDArray, from_numpy
from graphwright.array import dtype as named
from graphwright.autograd import Parameter, Variable
from graphwright.autograd.variable import remapped
from graphwright.errors import GraphwrightError
from graphwright.models.architectures.architecture import Architecture, Config
from graphwright.models.export.conform import changed, lineage
from graphwright.models.export.examples import random_example, random_facts
from graphwright.models.export.levels import ExportCase, ExportLevel, LevelPlan, Reason
from graphwright.models.export.template_match import Deviation, compared_by_path
from graphwright.models.loading import assemble
from graphwright.plan.compile import plan_for
from graphwright.plan.options import CompileOptions
from graphwright.program.kinds import STORED
from graphwright.program.run import check_feeds
from graphwright.program.weights import SOURCE, abstract_array
from graphwright.report import ShortDict

if TYPE_CHECKING:
    from graphwright.models.model import Model
    from graphwright.program.program import Program

MOST = 200
"""Configs that are tried; making a class on the meta device takes 10 ms to 1 s."""
EQUAL = 1e-5
"""Tolerated difference of outputs, relative to the largest entry: rounding of float32 in another order."""
Shapes = Mapping[str, tuple[int, ...]]
"""Path of a weight -> its shape."""


class ClassCase(ExportCase):
    """A model compared with the program of its class, node by node."""

    def __init__(self, model: Model) -> None:
        self.edited = self.model = model
        keys = {path: model.keys.get(path, key) for path, key, _, _ in model.arch.weights(model.config_dims)}
        self.shapes = _shapes(model.arch, model.config_dims)
        here = {path: self.stored(path) for path in keys}
        empty = {path: _placeholder(model, path, self.shapes[path], here[path]) for path in keys}
        self.original = assemble(model.arch, model.config_dims, keys, empty, model.compute, "class")
        found = compared_by_path(model.program, self.original)
        buffers = model.arch.buffers
        self.deviations = [d for d in found if not (d.path in buffers and d.kind == "attrs")]

    def stored(self, path: str) -> Variable | None:
        """Return the program's weight at a path of the class; None if it has none."""
        p, key = self.model.program, self.model.keys.get(path, path)
        return p.weights.get(path if path in self.model.arch.buffers else key)

    @cached_property
    def here(self) -> Shapes:
        """The shapes of the weights that outputs of the program need."""
        p = self.model.program
        needed = p.reachable(p.outputs())
        keys = {p.key(n) for kind in STORED for n in p.of_kind(kind) if n in needed}
        buffers, given = self.model.arch.buffers, self.model.keys
        own = {path: path if path in buffers else given.get(path, path) for path in self.shapes}
        return {path: tuple(p.weights[key].shape) for path, key in own.items() if key in keys}

    def same_function(self, other: Program) -> Reason | None:
        """Compare the outputs of the program and of another one on random inputs; return the difference, if any."""
        p = self.model.program
        for number, facts in enumerate(random_facts(p)):
            feeds = random_example(facts, number)
            ours, theirs = _run(p, feeds), _run(other, feeds)
            for name, value in ours.items():
                if name not in theirs or value.shape != theirs[name].shape:
                    return Reason("", f"the class has no output {name} of the shape {list(value.shape)}")
                moved = np.abs(value.astype(np.float64) - theirs[name]).max(initial=0)
                if not moved <= EQUAL * max(np.abs(value).max(initial=0), 1e-6):
                    return Reason("", f"the class computes another {name}: the difference is {moved:.3g}")
        return None


def _run(p: Program, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    given, _ = check_feeds(p, feeds)
    plan = plan_for(p, {n: t.spec for n, t in given.items()}, p.output_names(), CompileOptions(freeze=True))
    return {name: np.asarray(found.to_numpy("float32")) for name, found in plan(given).items()}


def _shapes(arch: Architecture, dims: Any) -> dict[str, tuple[int, ...]]:
    return {path: shape for path, _, shape, _ in arch.weights(dims)}


def _placeholder(model: Model, path: str, shape: tuple[int, ...], here: Variable | None) -> Variable:
    """Return a weight of a shape and the dtype of the program's weight, without values unless it is a buffer."""
    kind = here.dtype if here is not None else named(model.compute)
    if path in model.arch.buffers:
        return Variable(from_numpy(np.zeros(shape, f"u{kind.itemsize}"), bits=kind), name=path)
    return Parameter(abstract_array(shape, kind), True, path)


class _ClassLevel(ExportLevel):
    """A level that writes the class's program with the model's weights."""

    case: ClassCase

    @cached_property
    def found(self) -> Model | list[Reason]:
        """The model of the files, proved to compute the program's function, or reasons why no such model exists."""
        raise NotImplementedError

    def plan(self) -> LevelPlan:
        """Return the plan of this level; it runs the program and the class's on random inputs."""
        if not self.case.deviations:
            return self._refused()
        if isinstance(self.found, list):
            return self._refused(*self.found)
        return self._accepted(sum(v.data.nbytes for v in _weights(self.found)))

    @cached_property
    def written(self) -> Model:
        assert not isinstance(self.found, list)
        return self.found

    def carries(self, d: Deviation) -> bool:
        """Return True if the level carries the whole program: deviations are not told apart."""
        return not isinstance(self.found, list)


def _weights(model: Model) -> Iterator[Any]:
    p = model.program
    yield from {p.key(n): p.weights[p.key(n)] for n in p.params()}.values()


class ClassZeros(_ClassLevel):
    """The original class and config, with zeros for removed units and for removed parts."""

    number, name, summary = 3, "zero_filled", "same class, zeros for removed units"
    true_size = False

    @cached_property
    def found(self) -> Model | list[Reason]:
        """The original class with the program's entries at their original indices, and zeros elsewhere."""
        case, model = self.case, self.case.model
        if added := [d for d in case.deviations if d.kind in ("added", "op", "dtype")]:
            return [Reason(d.path, f"{d.kind}, {d.detail}") for d in added]
        p, changed_attrs = model.program, {d.path for d in case.deviations if d.kind == "attrs"}
        if routed := [p.path(n) for n in p.of_traits(routes=True) if p.path(n) in changed_attrs]:
            return [Reason(routed[0], "a router's row of zeros would choose the removed experts where others are < 0")]
        values: dict[str, Variable] = {}
        for path, shape in case.shapes.items():
            made = _filled(case, path, shape)
            if isinstance(made, Reason):
                return [made]
            values[path] = made
        found = _with_weights(model, model.arch, model.config, model.config_dims, values, model.keys)
        differs = case.same_function(found.program)
        return found if differs is None else [Reason("", f"with zeros for what was removed, {differs.reason}")]


def _filled(case: ClassCase, path: str, shape: tuple[int, ...]) -> Variable | Reason:
    """Return the weight at a path in its original shape: entries at their index before all edits, zeros elsewhere."""
    here = case.stored(path) if path in case.here else None
    if here is None:
        zeros = np.zeros(shape, f"u{case.original.spec(path).dtype.itemsize}")
        return _of(case, path, from_numpy(zeros, bits=case.original.spec(path).dtype))
    if tuple(here.shape) == shape:
        return here
    if len(here.shape) != len(shape) or any(a > b for a, b in zip(here.shape, shape, strict=True)):
        return Reason(path, f"{list(here.shape)} where the class has {list(shape)}")
    indices: dict[int, np.ndarray] = {}
    for axis, (size, wanted) in enumerate(zip(here.shape, shape, strict=True)):
        if size == wanted:
            continue
        known = lineage(here, axis)
        if known is None or (known < 0).any() or (known >= wanted).any() or len(np.unique(known)) < size:
            known = np.arange(size)  # after save and load the original indices are unknown
        indices[axis] = np.full(wanted, -1)
        indices[axis][known] = np.arange(size)
    assert isinstance(here.data, NDArray)
    host = np.ascontiguousarray(remapped(here.data.to_numpy(bits=True), indices))
    return _of(case, path, from_numpy(host, bits=here.dtype))


def _of(case: ClassCase, path: str, array: NDArray) -> Variable:
    """Return a new weight, which is not the file's."""
    return Variable(array) if path in case.model.arch.buffers else Parameter(array, True)


class ClassResized(_ClassLevel):
    """The original class with other sizes in its config."""

    number, name, summary = 2, "resized_config", "same class, other sizes"

    @cached_property
    def found(self) -> Model | list[Reason]:
        """The class with a config whose fields give the program's shapes."""
        case, model = self.case, self.case.model
        if added := [d for d in case.deviations if d.kind in ("added", "op", "dtype")]:
            return [Reason(d.path, f"{d.kind}, {d.detail}") for d in added]
        search = _ConfigSearch(model, case.shapes, case.here)
        last: list[Reason] = []
        for fields, layers in search.configs():
            try:
                made = self._resized(fields, layers, search.gone)
            except GraphwrightError as error:
                last = [Reason("", f"{error.what}, {error.got}")]
                continue
            if not isinstance(made, Reason):
                return made
            last = [made]
        return last or search.reasons

    def _resized(self, fields: Mapping[str, Any], layers: Mapping[str, str], gone: set[str]) -> Model | Reason:
        case, model = self.case, self.case.model
        config = changed(model.config, dict(fields))
        arch, dims = model.arch.resized(config, model.compute)
        values: dict[str, Variable] = {}
        for path, shape in _shapes(arch, dims).items():
            here = case.stored(layers.get(path, path))
            if here is None or tuple(here.shape) != shape:
                return Reason(path, "the class with this config has another shape")
            values[path] = here
        keys = {path: model.keys.get(path, path) for path in values}
        unread = model.checkpoint if model.checkpoint is not None and gone else ()
        keys |= {key: key for key in unread if key.startswith(tuple(gone)) and key not in keys.values()}
        found = _with_weights(model, arch, config, dims, values, keys)
        stated = ", ".join(f"{name} {value}" for name, value in fields.items())
        differs = case.same_function(found.program)
        return found if differs is None else Reason("", f"with {stated[:120]} {differs.reason}")


def _with_weights(
    model: Model, arch: Architecture, config: Config, dims: Any, values: Mapping[str, Variable], keys: Mapping[str, str]
) -> Model:
    """Return the model as one of the class with a config, with weights by path."""
    p = assemble(arch, dims, keys, values, model.compute, model.program.name)
    old = model.program.weights
    for variable in values.values():
        if isinstance(variable.data, NDArray) and old.reference_of(variable.data) == SOURCE:
            p.weights.refer(variable.data)
    made = copy(model)
    made.program, made.arch, made.config, made.config_dims, made._padded = p, arch, config, dims, None
    made.keys = ShortDict({**model.keys, **keys})  # also of removed layers, whose tensors are not written
    return made


# -- the fields of a config that state sizes --------------------------------------------------------------------------
Location = tuple[Any, ...]
"""Where a number is in a config: name of a field, and names or indices within it."""


class _ConfigSearch:
    """Looks for configs whose class has the shapes `here` instead of `there`."""

    def __init__(self, model: Model, there: Shapes, here: Shapes) -> None:
        self.model, self.there, self.here = model, there, here
        self.fields = dict(model.arch.known_fields(model.config))  # those of config.json, and the class's defaults
        self.reasons: list[Reason] = []
        self.gone: set[str] = set()  # the start of the keys of layers that the class has no longer

    def configs(self) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
        """Yield (changed fields, new path -> old path of weights of renumbered layers) with the program's shapes."""
        effects = {
            location: found for location in _numbers(self.fields) if (found := self._effect(location)) is not None
        }
        fields, renamed, there = self._layers(effects)
        if fields is None:
            return
        wanted = {path: self.here[renamed.get(path, path)] for path in there}
        differing = {(path, axis): (old, n) for path, shape in wanted.items() if len(shape) == len(there[path])
                     for axis, (n, old) in enumerate(zip(shape, there[path], strict=True)) if n != old}  # fmt: skip
        if not differing:
            if fields:
                yield fields, renamed
            self.reasons = self.reasons or [Reason("", "no size differs from the config's")]
            return
        values: dict[Location, int] = {}
        for location, (value, slopes, _) in effects.items():
            implied = {value + (n - old) / slopes[at] for at, (old, n) in differing.items() if at in slopes}
            new = implied.pop() if len(implied) == 1 else 0.0
            if new == int(new) and new >= 1 and new != value:
                values[location] = int(new)
        for numbers in islice(self._choices(values), MOST):
            made = self._changed(numbers, fields)
            if self._shapes(made) == wanted:
                yield made, renamed
        (path, axis), (old, new) = next(iter(differing.items()))
        self.reasons = [Reason(path, f"{new} along axis {axis} where the class has {old}, and no fields of the config "
                                     "give all sizes")]  # fmt: skip

    def _choices(self, values: Mapping[Location, int]) -> Iterator[dict[Location, int]]:
        """Yield one to four of the numbers, each time also with others that change in the same ratio."""
        for count in range(1, min(len(values), 4) + 1):
            for chosen in combinations(values, count):
                given = {location: values[location] for location in chosen}
                yield given
                yield from (given | more for more in self._scaled(given))

    def _scaled(self, given: Mapping[Location, int]) -> Iterator[dict[Location, int]]:
        """Yield one or two more numbers that change in the ratio of a changed one.

        Such as the number of heads, on which no shape depends if their width is the model's divided by it.
        """
        others = [o for o in _numbers(self.fields) if o not in given and _at(self.fields, o) > 1]
        for location, new in given.items():
            old = _at(self.fields, location)
            scaled = {o: _at(self.fields, o) * new // old for o in others if not _at(self.fields, o) * new % old}
            yield from ({o: n} for o, n in scaled.items())
            yield from ({o: scaled[o], q: scaled[q]} for o, q in combinations(scaled, 2))

    def _changed(self, values: Mapping[Location, int], fields: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the fields that have other values after these numbers are changed, beside the changed `fields`."""
        made = dict(fields or {})
        for (name, *inner), value in values.items():
            made.setdefault(name, deepcopy(self.fields[name]))
            if not inner:
                made[name] = value
            else:
                _at(made[name], inner[:-1])[inner[-1]] = value
        return made

    def _shapes(self, fields: Mapping[str, Any]) -> Shapes | None:
        """Return the shapes of the weights of the class with a config; None if it refuses the config."""
        return self.model.arch.shapes_for(changed(self.model.config, dict(fields)))

    def _effect(self, location: Location) -> tuple[int, dict[tuple[str, int], float], set[str]] | None:
        """Change a number of the config; return it, how much each size changes per unit, and the paths that go."""
        value = _at(self.fields, location)
        for other in (2 * value, value // 2, value - 1):  # quotients of multiples are exact
            if other < 1 or other == value:
                continue
            found = self._shapes(self._changed({location: other}))
            if found is None or found == self.there:
                continue
            gone = {path for path in self.there if path not in found}
            slopes = {(path, axis): (n - old) / (other - value) for path, shape in found.items() if path in self.there
                      and len(shape) == len(self.there[path])
                      for axis, (n, old) in enumerate(zip(shape, self.there[path], strict=True))
                      if n != old}  # fmt: skip
            if other == value - 1 or not gone:
                return value, slopes, gone
        return None

    def _layers(self, effects: Mapping[Location, Any]) -> tuple[dict[str, Any] | None, dict[str, str], Shapes]:
        """Return (fields for the layers that are left, new path -> old path, the shapes of such a class).

        The first is None if a layer is incomplete, or no field counts the layers.
        """
        missing = {path for path in self.there if path not in self.here}
        fields, renamed, there = dict[str, Any](), dict[str, str](), dict(self.there)
        for location, (value, _, gone) in effects.items():
            if not missing or not gone:
                continue
            prefix = _layer_prefix(gone, value - 1)
            if prefix is None:
                continue
            of = [{path for path in self.there if path.startswith(f"{prefix}{i}.")} for i in range(value)]
            kept = [i for i, paths in enumerate(of) if not paths <= missing]
            whole = set().union(*(paths for i, paths in enumerate(of) if i not in kept))
            if not whole or not kept:
                continue
            missing -= whole
            fields = self._changed({location: len(kept)}, fields)
            lists = {
                n: v for n, v in self.fields.items() if isinstance(v, list) and len(v) == value and n != location[0]
            }
            fields |= {
                n: [v[i] for i in kept] for n, v in lists.items() if len(location) == 1 and n in self.model.config
            }
            for new, old in enumerate(kept):
                renamed |= {f"{prefix}{new}.{path.removeprefix(f'{prefix}{old}.')}": path for path in of[old]}
            for i in range(len(kept), value):
                self.gone.add(f"{prefix}{i}.")
                there = {path: shape for path, shape in there.items() if not path.startswith(f"{prefix}{i}.")}
        if missing:
            path = min(missing)
            self.reasons = [Reason(path, "was removed, and no field of the config removes it alone")]
            return None, {}, {}
        return fields, renamed, there


def _numbers(fields: Mapping[Any, Any] | Sequence[Any], location: Location = ()) -> Iterator[Location]:
    """Yield the location of each whole number from 1 on in a config."""
    for name, value in fields.items() if isinstance(fields, Mapping) else enumerate(fields):
        if isinstance(value, Mapping | list):
            yield from _numbers(value, (*location, name))
        elif isinstance(value, int) and not isinstance(value, bool) and value >= 1 and not str(name).endswith("_id"):
            yield (*location, name)


def _at(fields: Any, location: Sequence[str | int]) -> Any:
    for name in location:
        fields = fields[name]
    return fields


def _layer_prefix(gone: set[str], number: int) -> str | None:
    """Return the common start of the paths before `<number>.`; None if they have none."""
    starts = {path[: at + 1] for path in gone if (at := f".{path}".find(f".{number}.") - 1) >= -1}
    found = {start if f"{start}{number}." else "" for start in starts}
    usual = [s for s in found if all(path.startswith(f"{s}{number}.") for path in gone)]
    return usual[0] if usual else None
