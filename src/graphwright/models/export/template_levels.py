"""Export levels of decoders whose family has a template: the original class resized, with zeros, or a host class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from copy import copy
from dataclasses import fields, is_dataclass, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from graphwright.array import BY_TAG, DType
from graphwright.models.architectures.architecture import FIELDS, Config, dimension_of, size_of
from graphwright.models.errors import ConfigError
from graphwright.models.export.conform import (
    changed,
    computed_weights,
    conform,
    index_maps,
    origin_of,
    with_eps,
)
from graphwright.models.export.hosts import as_host
from graphwright.models.export.levels import ExportCase, ExportLevel, LevelPlan, Reason
from graphwright.models.export.lone_experts import dense_where_alone
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
from graphwright.models.tokenizer import known_special_ids

if TYPE_CHECKING:
    from graphwright.models.model import Model


class TemplateCase(ExportCase):
    """A decoder with its template match; `model` has static patterns of attention. No weight payload is read."""

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


class _TemplateLevel(ExportLevel):
    """A level that writes the family's template with the program's weights, in the `sizes` that the subclass finds."""

    case: TemplateCase

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

    def __init__(self, case: TemplateCase) -> None:
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

    def __init__(self, case: TemplateCase) -> None:
        host = as_host(case.model)
        super().__init__(case if host is None else TemplateCase(host))
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
