"""Export levels: the forms in which a model can be written as a checkpoint for transformers.

A level "carries" a model or a deviation if its files can represent it. The plan of a level tells whether the level
carries the model, and if not, why. New levels are subclasses of `ExportLevel`, listed in `LEVELS`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import numpy as np

from graphwright.array import BY_TAG, DType
from graphwright.errors import UsageError
from graphwright.models.architectures.architecture import FIELDS, Config, dimension_of, size_of
from graphwright.models.codegen.patterns import pattern_of, sparse_attentions
from graphwright.models.codegen.source import CodeFiles, emittable, generate
from graphwright.models.errors import ConfigError, ExportLevelImpossible
from graphwright.models.export.conform import (
    changed,
    computed_weights,
    conform,
    index_maps,
    origin_of,
    with_eps,
)
from graphwright.models.export.dead_units import without_dead_units
from graphwright.models.export.hosts import as_host
from graphwright.models.export.lone_experts import dense_where_alone
from graphwright.models.export.receipt import edit_rows
from graphwright.models.export.static_attention import with_static_attention
from graphwright.models.export.template_match import (
    AXES,
    TRUNK,
    Deviation,
    MatchedPart,
    find_deviations,
    key_heads,
    match_template,
)
from graphwright.models.export.write import exported_companions, write_model
from graphwright.models.tokenizer import known_special_ids
from graphwright.ops import traits
from graphwright.report import Report, listed

if TYPE_CHECKING:
    from graphwright.models.model import Model


@dataclass(frozen=True, slots=True)
class Reason(Report):
    """A reason why a level cannot carry a program; `path` names a node, or is "" for the whole program.

    If a size is the reason, `axis` names its units, e.g. `neurons`, and `field` the config field that counts them.
    `branch` is the number of the template branch, or None for the whole program.
    """

    path: str
    reason: str
    axis: str = ""
    field: str = ""
    branch: int | None = None
    HIDDEN: ClassVar = ("branch",)
    OPTIONAL: ClassVar = ("axis", "field")

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}" if self.path else self.reason


@dataclass(frozen=True, slots=True)
class LevelPlan(Report):
    """Plan of an export at one level: names of the files that it would write, and bytes of the weights.

    Attributes:
        possible: whether this level can be requested.
        exact: whether the files compute the program's function, apart from rounding in float32.
        reasons: why the level is not possible or not exact; empty if it is impossible because a lower level suffices.
    """

    level: int
    name: str
    possible: bool = False
    exact: bool = False
    reasons: tuple[Reason, ...] = ()
    files: tuple[str, ...] = ()
    bytes: int = 0


class ExportCase:
    """A model with its template match and deviations, shared by all levels; no weight payload is read.

    Attributes:
        edited: the model whose edits the files list.
        model: the same model with static patterns of attention, which the levels write.
    """

    def __init__(self, model: Model) -> None:
        self.edited, self.model = model, with_static_attention(model)
        self.match = match_template(self.model)
        self.deviations = find_deviations(self.match)
        self.unmatched = [Reason(self.match.program.path(n), why) for n, why in self.match.unmatched.items()]

    def stored(self, path: str) -> DType:
        """Return the dtype in which a weight of the template will be stored."""
        source, key = self.model.checkpoint, self.match.keys[path]
        found = BY_TAG.get(source.info(key).tag) if source is not None and key in source else None
        return found or self.match.template.spec(path).dtype

    def rounded(self, dims: Any) -> tuple[Reason, ...]:
        """Return why an export with sizes `dims` is inexact: each weight that is computed and rounded to 16 bits."""
        kinds = {path: self.stored(path) for path in computed_weights(self.match, dims)}
        return tuple(Reason(path, f"is computed, and {k.name} rounds it") for path, k in kinds.items() if k.is_low)

    def template_bytes(self, dims: Any, layers: Mapping[int, int] | None) -> int:
        """Return the size in bytes of all weights of a template of sizes `dims`; `layers` are as in `conform`."""
        weights = self.model.arch.weights(dims)
        return sum(prod(shape) * self.stored(origin_of(path, layers)).itemsize for path, _, shape, _ in weights)

    @cached_property
    def files(self) -> tuple[str, ...]:
        """Names of the files that every level writes."""
        model = self.model
        companions = [f.name for f in exported_companions(model)]
        weights, source = ["model.safetensors"], model.checkpoint
        if source is not None and source.index is not None:
            weights = [source.index.name, *(f.path.name for f in source.files)]
        return tuple(sorted({"config.json", "README.md", "receipt.json", *weights, *companions}))


class ExportLevel(ABC):
    """Base class of the export levels; each instance serves one model.

    Attributes:
        number: position among the levels, stable across versions.
        name, summary: identifier in options and receipts; description in one line.
        true_size: whether removed units take no bytes; `prefer="size"` skips levels where they do.
        runs_code: whether transformers must run code of the directory (`trust_remote_code=True`). Graphwright
            itself can only open directories without such code.
    """

    number: ClassVar[int]
    name: ClassVar[str]
    summary: ClassVar[str]
    true_size: ClassVar[bool] = True
    runs_code: ClassVar[bool] = False

    def __init__(self, case: ExportCase) -> None:
        self.case = case

    @abstractmethod
    def plan(self) -> LevelPlan:
        """Return a plan that tells whether this level can carry the model, and if not, why; reads no weight payload."""

    @cached_property
    def written(self) -> Model:
        """The model that a loader of the files computes: the program, or the template that holds its weights."""
        return self.case.model

    @property
    def tables(self) -> frozenset[str]:
        """Keys of the integer tensors in the files, which count as no weights."""
        return frozenset()

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences on limits of the files, for the receipt."""
        return ()

    @abstractmethod
    def carries(self, d: Deviation) -> bool:
        """Return True if this level's files can represent the deviation `d`."""

    def write(self, directory: Path, dtype: str = "keep", max_shard_size: int | str | None = None) -> None:
        """Write config, weights (as `dtype`, files of `max_shard_size`), tokenizer and other files into a directory."""
        write_model(self.written, directory, dtype=dtype, max_shard_size=max_shard_size)

    def _refused(self, *reasons: Reason) -> LevelPlan:
        return LevelPlan(self.number, self.name, reasons=reasons)

    def _accepted(self, nbytes: int, inexact: tuple[Reason, ...] = (), files: tuple[str, ...] = ()) -> LevelPlan:
        names = tuple(sorted((*self.case.files, *files)))
        return LevelPlan(self.number, self.name, True, not inexact, inexact, names, nbytes)


class SameClass(ExportLevel):
    """The original transformers class, config and shapes, for programs that differ from the template only in values."""

    number, name, summary = 1, "same_class", "same class, same shapes"

    def plan(self) -> LevelPlan:
        """Return the plan of this level, which is possible if there are no deviations."""
        found = [Reason(d.path, f"{d.kind}, {d.detail}", d.axis, d.field) for d in self.case.deviations]
        if found:
            return self._refused(*found)
        p = self.case.model.program
        return self._accepted(sum(p.spec(n).nbytes for n in p.params()))

    def carries(self, d: Deviation) -> bool:
        """Return False, because this level carries no deviation."""
        return False


class _TemplateLevel(ExportLevel):
    """A level that writes the family's template with the program's weights, in the `sizes` that the subclass finds."""

    @cached_property
    def sizes(self) -> tuple[Config, Any, dict[int, int] | None] | list[Reason]:
        """(config, its dimensions, dict from new to old layer or None), or reasons why no config fits the program."""
        raise NotImplementedError

    def plan(self) -> LevelPlan:
        """Return the plan of this level, which is possible if `sizes` are found and there are deviations."""
        if not self.case.deviations:
            return self._refused()
        if isinstance(self.sizes, list):
            return self._refused(*self.sizes)
        _, dims, layers = self.sizes
        return self._accepted(self.case.template_bytes(dims, layers), self.case.rounded(dims))

    @cached_property
    def written(self) -> Model:
        assert not isinstance(self.sizes, list)
        return conform(self.case.model, self.case.match, *self.sizes)


class ResizedConfig(_TemplateLevel):
    """The original class with different sizes in its config; removed layers and smaller sizes take no bytes.

    It requires that each remaining layer has both branches, that all layers agree in width and in the numbers of
    neurons and heads, and that each key head serves equally many query heads. A layer with one expert counts as dense.
    """

    number, name, summary = 2, "resized_config", "same class, other sizes"
    fills: ClassVar[bool] = False
    """Whether zeros may stand for a part of a block that the program lacks."""

    def __init__(self, case: ExportCase) -> None:
        dense = copy(case)
        dense.match = dense_where_alone(case.model, case.match)
        super().__init__(dense)

    def carries(self, d: Deviation) -> bool:
        """Return True if the deviation is in a matched branch, and new sizes in the config can express it."""
        if not d.matched or (d.kind in ("op", "dtype", "gate", "factor") and d.dimension != "routed"):
            return False
        reasons = self.sizes if isinstance(self.sizes, list) else []
        forbidden = (r.branch is None or (r.branch == d.branch and not d.axis) or (d.axis and r.axis == d.axis)
                     for r in reasons)  # fmt: skip
        return not any(forbidden)

    @cached_property
    def sizes(self) -> tuple[Config, Any, dict[int, int]] | list[Reason]:
        """(config with the program's sizes, its dimensions, dict from new to old layer), or reasons why none fits."""
        match = self.case.match
        layers, partial = self._layers()
        sizes, uneven = self._sizes()
        reasons = [*self.case.unmatched, *partial, *uneven]
        reasons += [Reason(match.program.path(m.end), f"no config field can describe a {m.kind}", branch=i)
                    for i, part in match.matched() for m in part.maps]  # fmt: skip
        reasons += [Reason(match.program.path(v), "its pattern is not that of a sliding window", branch=i)
                    for i, part in match.matched() for v in part.sparse]  # fmt: skip
        reasons += [Reason(match.template.path(v), "the program lacks this part of the block", branch=i)
                    for i, part in match.matched() for v in part.absent if not self.fills]  # fmt: skip
        if reasons or not layers:
            return reasons or [Reason("", "no layer is left", "layers", match.fields["layers"])]
        resized = self._resized(sizes, layers)
        try:
            dims = match.arch.read(resized)
        except ConfigError as error:
            return [Reason("", f"{error.what}, {error.got}")]
        if changed_too := self._side_effect(dims, sizes, layers):
            return [changed_too]
        routed = getattr(dims, "routed", None)
        if routed is not None and routed != (wanted := tuple(match.dims.routed[i] for i in layers)):
            layer = next(i for i, (a, b) in enumerate(zip(routed, wanted, strict=True)) if a != b)
            why = f"layer {layer} is {'routed' if wanted[layer] else 'dense'}, which no config of this family can say"
            return [Reason(f"layers.{layer}.mlp", why, AXES["routed"])]
        given = getattr(dims, "windows", None)
        for new, (i, part) in enumerate((i, part) for i, part in match.matched() if part.windows):
            (window, otherwise), branch = part.windows[0], match.branches[i].name
            if window != (otherwise if given is None else given[new]):
                return [Reason(branch, f"no config of this family gives this layer the window {window}", branch=i)]
        for name, of in match.arch.multiples:
            if getattr(dims, name) % getattr(dims, of):
                a, b = (f"{match.fields[n]} {getattr(dims, n)}" for n in (name, of))
                why = f"the class needs {a} to be a multiple of {b}"
                return [Reason("embed.weight", why, AXES[name], match.fields[name], TRUNK)]
        fitted = with_eps(resized, match, dims)
        if isinstance(fitted, str):
            return [Reason("norm", fitted, "channels", match.fields["eps"], TRUNK)]
        return *fitted, dict(enumerate(layers))

    def _side_effect(self, dims: Any, sizes: dict[str, int], layers: list[int]) -> Reason | None:
        """Return what else the class would compute differently with `dims`, such as the scale of embeddings."""
        match, known = self.case.match, {*FIELDS, *self.case.match.fields, "windows", "routed"} - {"head_dim"}
        names = [f.name for f in fields(dims) if f.name not in known] if is_dataclass(dims) else []
        wanted: dict[str, Any] = dict(sizes)
        for name in (*names, "local"):
            before = getattr(match.dims, name, None)
            if isinstance(before, tuple) and len(before) == match.dims.layers:
                before = tuple(before[i] for i in layers)
            if isinstance(before, tuple | bool | int | float | str | None):
                wanted.setdefault(name, before)
        for name, value in wanted.items():
            if (after := getattr(dims, name, None)) != value:
                return Reason("", f"the class would then have {name} {after} instead of {value}")
        return None

    def _layers(self) -> tuple[list[int], list[Reason]]:
        """Return the numbers of the remaining layers, and reasons for layers that lost only one branch."""
        match = self.case.match
        present: dict[int, list[bool]] = {}
        for branch, part in zip(match.branches, match.parts, strict=True):
            present.setdefault(branch.layer or 0, []).append(part is not None)
        reasons = []
        for i, (branch, part) in enumerate(zip(match.branches, match.parts, strict=True)):
            if part is None and i not in match.mismatched and any(present[branch.layer or 0]):
                why = f"{branch.name} was removed, but the rest of its layer was not"
                field = match.fields["layers"]
                reasons.append(Reason(match.template.path(branch.junction), why, "layers", field, i))
        return [n for n, parts in sorted(present.items()) if any(parts)], reasons

    def _sizes(self) -> tuple[dict[str, int], list[Reason]]:
        """Return a dict from dimension to size, and reasons for the branches whose size is not the most frequent."""
        match = self.case.match
        found: dict[str, dict[tuple[int, str], int]] = {}
        reasons: list[Reason] = []
        for i, part in enumerate(match.parts):
            if part is None:
                continue
            here = match.sizes[i]
            for name, size in here.items():
                found.setdefault(dimension_of(name), {})[i, name] = size
            if "heads" in here:
                table = key_heads(match.program, part, here["heads"], here["kv_heads"])
                count = np.bincount(table, minlength=here["kv_heads"])
                if (count != count[0]).any():
                    reasons.append(self._reason(i, "heads", f"{', '.join(map(str, count))} query heads per key head"))
        for name, sizes in found.items():
            most, _ = Counter(sizes.values()).most_common(1)[0]
            of = next(match.branches[i].layer for (i, _), n in sizes.items() if n == most)
            reasons += [self._reason(i, full, f"{n} {AXES.get(name, name)} where layer {of} has {most}")
                        for (i, full), n in sizes.items() if n != most]  # fmt: skip
        agreed = {name: next(iter(sizes.values())) for name, sizes in found.items()}
        return agreed | {name: n for name, n in match.sizes[TRUNK].items() if name == "vocab"}, reasons

    def _reason(self, branch: int, name: str, why: str) -> Reason:
        """Return a reason about dimension `name`, located at the branch's first weight with this dimension."""
        match, part = self.case.match, self.case.match.parts[branch]
        assert part is not None
        having = (w for w in part.weights if any(name in t.split("*") for t in match.terms[w]))
        dimension = dimension_of(name)
        field = match.fields.get(dimension, "")
        path = next(having, match.branches[branch].name)
        return Reason(path, f"{why} ({field})" if field else why, AXES.get(dimension, dimension), field, branch)

    def _resized(self, sizes: dict[str, int], layers: list[int]) -> Config:
        """Return the config with new sizes, `layer_types` of the present layers, and `head_dim` if widths changed."""
        match, config = self.case.match, self.case.model.config
        names, dims = match.fields, self.case.model.config_dims
        now = {**sizes, "layers": len(layers)}
        given = {names[n]: size for n, size in now.items() if n in names and size != getattr(dims, n)}
        resized = {n for n, size in now.items() if size != getattr(dims, n, size)}
        if "head_dim" in names and {"hidden", "heads"} & resized:
            given[names["head_dim"]] = dims.head_dim
        given |= known_special_ids(config, self.case.model.vocab)
        made = changed(config, given)
        if hasattr(dims, "routed"):
            made = self._with_routed(made, layers)
        windows = tuple(part.windows[0][0] for _, part in match.matched() if part.windows)
        with suppress(ConfigError):  # `layer_types` has an entry for each old layer
            same = "layer_types" not in config or len(layers) == dims.layers
            if same and getattr(match.arch.read(made), "windows", windows) == windows:
                return made
        return self._with_windows(made, windows)

    def _with_windows(self, config: Config, windows: tuple[int | None, ...]) -> Config:
        """Return the config with the window of each layer; only with their types if the family has no such config."""
        widths = {window for window in windows if window is not None}
        types = ["full_attention" if window is None else "sliding_attention" for window in windows]
        typed = {"layer_types": types}
        window = {"sliding_window": next(iter(widths), None)}
        choices = [(typed, ("max_window_layers",)), (window, ()), ({**window, **typed}, ("max_window_layers",)),
                   ({**window, **typed, "use_sliding_window": bool(widths)}, ("max_window_layers",))]  # fmt: skip
        for given, without in choices if len(widths) <= 1 else ():
            made = changed(config, given, without)
            with suppress(ConfigError):
                if getattr(self.case.match.arch.read(made), "windows", None) == windows:
                    return made
        return changed(config, *choices[0])

    def _with_routed(self, config: Config, layers: list[int]) -> Config:
        """Return the config with the list of the dense ones among the present layers, if it needs one."""
        match = self.case.match
        routed = tuple(match.dims.routed[i] for i in layers)
        with suppress(ConfigError):
            if match.arch.read(config).routed == routed:
                return config
        dense = [i for i, r in enumerate(routed) if not r]
        return changed(config, {"mlp_only_layers": dense, "decoder_sparse_step": 1})


class ZeroFilled(_TemplateLevel):
    """The original class and sizes: what was removed becomes zeros; gates and factors are merged into weights."""

    number, name, summary = 3, "zero_filled", "same class, zeros for removed units"
    true_size = False

    def carries(self, d: Deviation) -> bool:
        """Return True if the deviation's branch is matched and fits into the original sizes and eps."""
        no_eps = isinstance(self.fitted, str) and d.dimension == "hidden"
        fits = (TRUNK if d.branch is None else d.branch) not in self.misfits and d.dimension not in ("layers", "routed")
        return d.matched and d.kind not in ("op", "dtype") and fits and not no_eps

    @cached_property
    def sizes(self) -> tuple[Config, Any, None] | list[Reason]:
        """(original config with the eps of the norms, its dimensions, None: all layers), or reasons against it."""
        case, match = self.case, self.case.match
        for name in match.grown:
            what = f"the class has {getattr(match.given, name)} {AXES[name]}"
            return [Reason("", what, AXES[name], match.fields[name])]
        if changed_layers := [d for d in case.deviations if d.dimension == "routed"]:
            return [Reason(d.path, d.detail) for d in changed_layers]
        why = list(case.unmatched) or [Reason(d.path, f"{d.kind}, {d.detail}")
                                 for d in case.deviations if d.kind in ("op", "dtype")]  # fmt: skip
        why += [Reason("embed" if i == TRUNK else match.branches[i].name, text) for i, text in self.misfits.items()]
        if isinstance(self.fitted, str):
            return [*why, Reason("norm", self.fitted, "channels", match.fields["eps"])]
        return why or (*self.fitted, None)

    @cached_property
    def fitted(self) -> tuple[Config, Any] | str:
        """(config, dimensions) with the eps that all norms need, or the reason why no single eps suits them."""
        return with_eps(self.case.model.config, self.case.match, self.case.match.dims)

    @cached_property
    def misfits(self) -> dict[int, str]:
        """Dict from branch number to reason, for the branches that are too large for the original sizes."""
        match = self.case.match
        maps = {i: index_maps(match, i, match.dims) for i, _ in match.matched()}
        windows = {i: pair for i, part in match.matched() for pair in part.windows if pair[0] != pair[1]}
        other = {i: f"the window {here}, but the class has {there}" for i, (here, there) in windows.items()}
        other |= {i: why for i, part in match.matched() if (why := self._norm_misfit(i, part))}
        return other | {i: found for i, found in maps.items() if isinstance(found, str)}

    def _norm_misfit(self, branch: int, part: MatchedPart) -> str:
        """Return why zeros change a norm within a branch, such as one over all heads; "" if they do not."""
        match, here = self.case.match, self.case.match.sizes[branch]
        for path in part.eps:
            for name in [n for term in match.terms.get(f"{path}.weight", ()) for n in term.split("*")]:
                if name != "hidden" and here.get(name, 0) != size_of(match.given, name) and name in here:
                    return f"{path} normalises {here[name]} {AXES.get(name, name)}, and with zeros other ones"
        return ""


class HostClass(ResizedConfig):
    """The class of another family, which has routed layers: for a dense model whose MLPs were replaced by experts."""

    number, name, summary = 4, "host_class", "another class, with routed layers"
    fills = True

    def __init__(self, case: ExportCase) -> None:
        host = as_host(case.model)
        super().__init__(case if host is None else ExportCase(host))
        self.hosted = host is not None

    def plan(self) -> LevelPlan:
        """Return the plan of this level, which is possible if the host's template matches in some sizes."""
        if not self.hosted:
            return self._refused()
        if isinstance(self.sizes, list):
            host = self.case.model.arch.classes[0]
            return self._refused(*(replace(r, reason=f"{r.reason} (in {host})") for r in self.sizes))
        _, dims, layers = self.sizes
        return self._accepted(self.case.template_bytes(dims, layers), self.case.rounded(dims))

    def carries(self, d: Deviation) -> bool:
        """Return True if the host carries the whole program, and so each deviation from the first template."""
        return self.hosted and not isinstance(self.sizes, list)


_SIZES = {"heads", "kv_heads", "mlp", "experts", "expert_width", "shared_width"}
"""Dimensions whose fields state the sizes of generated code."""

_IN_CODE = (
    *("layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "sliding_window_pattern"),
    *("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor"),
)
"""Fields that generated code replaces: transformers would build windowed caches, and check rotations of equal heads."""


class GeneratedCode(ExportLevel):
    """Generated modeling code for the program's structure, for programs whose ops all have source text.

    Dead experts and heads are left out.
    """

    number, name, summary = 5, "generated_code", "generated modeling code"
    runs_code = True

    @cached_property
    def written(self) -> Model:
        """The model, without units that are switched off."""
        model = self.case.model
        alive = without_dead_units(model.program)
        return model if alive is model.program else model.with_program(alive)

    def plan(self) -> LevelPlan:
        """Return the plan of this level, which is possible if every op has source text."""
        p = self.written.program
        try:
            emittable(p)
        except ExportLevelImpossible as error:
            why = error.what if error.got is None else f"{error.what}: {error.got}"
            return self._refused(Reason(str(error.where), why))
        read = p.reachable(p.outputs()) if self.case.deviations else set(p.params())
        nbytes = sum(p.spec(n).nbytes for n in p.params() if n in read)
        return self._accepted(nbytes, files=("configuration_<id>.py", "modeling_<id>.py"))

    def carries(self, d: Deviation) -> bool:
        """Return True, because this level carries every deviation."""
        return True

    @cached_property
    def _ident(self) -> str:
        """Part of the names of the files; it includes constants, which are code, as loaders cache classes by name."""
        return self.written.program.hash()[:10]

    @cached_property
    def _code(self) -> CodeFiles:
        edits = [f"{row['why']} ({row['author']}; {row['summary']})" for row in edit_rows(self.case.edited)]
        return generate(self.written.program, self._ident, edits)

    @property
    def tables(self) -> frozenset[str]:
        """Keys of the integer tensors in the files: the blocks of patterns."""
        return frozenset(self._code.tensors)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences on limits of the files, for the receipt."""
        found = {pattern_of(self.written.program, n) for n in sparse_attentions(self.written.program)}
        shortest = min((pattern.tokens[0] for pattern in found if pattern is not None), default=None)
        positions = getattr(self.written.config_dims, "positions", 0)
        if shortest is None or shortest >= positions:
            return ()
        return (f"a pattern of attention has {shortest} tokens, so the files refuse longer texts",)

    def write(self, directory: Path, dtype: str = "keep", max_shard_size: int | str | None = None) -> None:
        """Write the weights that outputs need, a config that names the code, and the code."""
        model, p = self.written, self.written.program
        ident, made = self._ident, self._code
        needed = p.reachable(p.outputs())
        count = sum(traits(p.op(n)).attention or traits(p.op(n)).routed_heads for n in needed)
        given = {k: v for k, v in model.config.fields.items() if k not in _IN_CODE}
        code = {"AutoConfig": f"configuration_{ident}.EditedConfig"}
        code["AutoModelForCausalLM"] = f"modeling_{ident}.EditedForCausalLM"
        given |= {"architectures": ["EditedForCausalLM"], "model_type": f"graphwright-{ident}"}
        given |= {**self._widths(), **made.config, "num_hidden_layers": max(count, 1), "auto_map": code}
        config = (json.dumps(given, indent=2) + "\n").encode()
        only = {p.key(n) for n in p.params() if n in needed}
        write_model(model, directory, dtype=dtype, max_shard_size=max_shard_size, config=config, only=only,
                    joined=False, besides=made.tensors)  # fmt: skip
        for name, text in made.files.items():
            (directory / name).write_text(text, encoding="utf-8")

    def _widths(self) -> dict[str, Any]:
        """Return the config fields of sizes that the program changed: a number, or a list with each layer's.

        A layer has 0 where it lacks the branch with this size, and null where this branch computes something else. If
        the experts of a layer differ in width, the layer has a list.
        """
        match, found = self.case.match, dict[str, dict[int, Any]]()
        for i, (branch, part) in enumerate(zip(match.branches, match.parts, strict=True)):
            of_branch = {dimension_of(n) for path, ts in match.terms.items() if path.startswith(f"{branch.name}.")
                         for t in ts for n in t.split("*")} & _SIZES  # fmt: skip
            missing = None if i in match.mismatched else 0
            for name in of_branch:
                here = [n for full, n in match.sizes.get(i, {}).items() if dimension_of(full) == name]
                size = here[0] if len(set(here)) == 1 else here
                found.setdefault(name, {})[branch.layer] = size if part is not None else missing
        made: dict[str, Any] = {}
        for name, sizes in found.items():
            if any(v != getattr(match.given, name) for v in sizes.values()):
                values = [sizes.get(layer, 0) for layer in range(match.dims.layers)]
                made[match.fields[name]] = values if any(v != values[0] for v in values) else values[0]
        hidden = match.sizes[TRUNK].get("hidden", match.dims.hidden)
        made |= {} if hidden == match.dims.hidden else {match.fields["hidden"]: hidden}
        return made | known_special_ids(self.case.model.config, self.case.model.vocab)


LEVELS: dict[int, type[ExportLevel]] = {
    level.number: level for level in (SameClass, ResizedConfig, ZeroFilled, HostClass, GeneratedCode)
}

Prefer = Literal["class", "size"]
PREFERENCES: tuple[Prefer, ...] = get_args(Prefer)
"""Whether `auto` prefers the original class of transformers, or weights without zeros."""


@dataclass(frozen=True, slots=True, repr=False)
class ExportPlan(Report):
    """Plans of all export levels for a model, and its deviations from the family's template.

    Attributes:
        level: number of the level that `auto` takes, the lowest that is exact; None if no level is.
        prefer: `class`, or `size`, which skips levels that store zeros for removed units.
    """

    FIGURES = ("possible", "bytes", "not_better")
    level: int | None
    prefer: str
    levels: tuple[LevelPlan, ...]
    deviations: tuple[Deviation, ...]

    def at(self, level: int | str) -> LevelPlan:
        """Return the plan of a level, by number or name. Raises: UsageError if it is unknown."""
        for row in self.levels:
            if str(level) in (str(row.level), row.name):
                return row
        known = ", ".join(f"{row.level} ({row.name})" for row in self.levels)
        raise UsageError("unknown export level", expected=f"auto, {known}", got=level)

    @property
    def possible(self) -> tuple[int, ...]:
        """Numbers of the levels whose plan is possible."""
        return tuple(row.level for row in self.levels if row.possible)

    @property
    def bytes(self) -> int:
        """Bytes of the weights that `auto` would write."""
        return (self.levels[-1] if self.level is None else self.at(self.level)).bytes

    @property
    def not_better(self) -> tuple[dict[str, Any], ...]:
        """Why each level below `level` was not taken: dicts with the keys level, name, reason and path."""
        return self.why_not(self.level)

    def why_not(self, level: int | None) -> tuple[dict[str, Any], ...]:
        """Return why each level below `level` (None: any) was not taken: dicts with level, name, reason and path."""
        rows = []
        for row, kind in zip(self.levels, LEVELS.values(), strict=True):
            path, reason = "", f"possible, but level {level} was requested"
            if row.reasons:
                first, *rest = row.reasons
                path, reason = first.path, f"{first}{f', and {len(rest)} more' if rest else ''}"
            elif self.prefer == "size" and not kind.true_size:
                reason = "prefer='size' skips zeros"
            if (level is None or row.level < level) and (row.reasons or row.possible):
                rows.append({"level": row.level, "name": row.name, "reason": reason, "path": path})
        return tuple(rows)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict."""
        return {**Report.to_json(self), "name": None if self.level is None else self.at(self.level).name}

    def _text(self) -> str:
        none = f"is exact with prefer={self.prefer!r}" if self.possible else "can carry this structure"
        lines = [f"no export level {none}"]
        if self.level is not None:
            lines = [f"export level {self.level} ({self.at(self.level).name}): {LEVELS[self.level].summary}"]
        reasons: dict[str, list[str]] = {}
        for n in self.not_better:
            reasons.setdefault(n["reason"], []).append(str(n["level"]))
        lines += [f"  not level {', '.join(levels)}: {reason}" for reason, levels in reasons.items()]
        lines += [f"  level {r.level} {'exactly' if r.exact else 'inexactly'}: {r.bytes / 2**20:.2f} MiB"
                  for r in self.levels if r.possible and r.level != self.level]  # fmt: skip
        lines += listed([f"  {d.path}: {d.kind}, {d.detail}" for d in self.deviations], most=20)
        return "\n".join([*lines, f"{self.bytes / 2**20:.2f} MiB of weights"])


class Ladder:
    """All export levels of a model; weight payloads are read only when a level writes its files."""

    def __init__(self, model: Model) -> None:
        case = ExportCase(model)
        self.levels = tuple(level(case) for level in LEVELS.values())
        numbers = [tuple(level.number for level in self.levels if level.carries(d)) for d in case.deviations]
        self.deviations = tuple(replace(d, levels=n) for d, n in zip(case.deviations, numbers, strict=True))

    def plan(self, prefer: str = "class") -> ExportPlan:
        """Plan all levels, and choose one. Raises: UsageError for an unknown preference."""
        if prefer not in PREFERENCES:
            raise UsageError("unknown preference", where="prefer", expected=" or ".join(PREFERENCES), got=prefer)
        rows = tuple(level.plan() for level in self.levels)
        pairs = zip(self.levels, rows, strict=True)
        taken = (row.level for level, row in pairs if row.exact and (level.true_size or prefer != "size"))
        return ExportPlan(next(taken, None), prefer, rows, self.deviations)

    def choose(self, plan: ExportPlan, level: int | str = "auto") -> ExportLevel:
        """Return the level that `auto`, a number or a name stands for. Raises: UsageError, ExportLevelImpossible."""
        row = plan.at(level) if level != "auto" else None if plan.level is None else plan.at(plan.level)
        if row is not None and row.possible:
            return self.levels[plan.levels.index(row)]
        reasons = (row or plan.levels[-1]).reasons
        problem = "cannot carry this structure" if reasons else "is not needed, because a lower level is exact"
        none = f"is exact with prefer={plan.prefer!r}" if plan.possible else "can carry this structure"
        what = f"no export level {none}" if row is None or not plan.possible else f"export level {level} {problem}"
        where, got = (reasons[0].path or None, reasons[0].reason) if reasons else (None, None)
        expected = f"level {' or '.join(map(str, plan.possible))}" if plan.possible else None
        fix = f"level='auto' takes level {plan.level}" if plan.level else "model.save(DIR) keeps any structure"
        raise ExportLevelImpossible(what, where=where, got=got, expected=expected, fix=fix)
