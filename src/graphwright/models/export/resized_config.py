"""Export level `resized_config`: the original transformers class with other sizes in its config.

It needs one width, remaining layers with both branches, equal numbers of neurons and heads in all layers, and equally
many query heads per key head.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.models.export.conform import changed, conform, with_eps
from graphwright.models.export.deviation import AXES
from graphwright.models.export.level import ExportLevel, LevelPlan, Reason
from graphwright.models.export.template_match import TRUNK, key_heads

if TYPE_CHECKING:
    from graphwright.models.architectures.config import Config
    from graphwright.models.export.deviation import Deviation
    from graphwright.models.model import Model


class ResizedConfig(ExportLevel):
    """Carries removed layers, and equal sizes in all layers."""

    number, name, summary = 2, "resized_config", "same class, other sizes"

    def plan(self) -> LevelPlan:
        """Possible if one config states all sizes."""
        if not self.case.deviations:
            return self._refused()
        if isinstance(self.sizes, list):
            return self._refused(*self.sizes)
        dims = self.sizes[1]
        return self._accepted(self.case.template_bytes(dims), exact=not self.case.rounded(dims))

    def carries(self, d: Deviation) -> bool:
        """Sizes and removed layers, unless another layer forbids the size."""
        if not d.matched or d.kind in ("op", "dtype", "gate", "factor"):
            return False
        reasons = self.sizes if isinstance(self.sizes, list) else []
        forbidden = (r.branch is None or (r.branch == d.branch and not d.axis) or (d.axis and r.axis == d.axis)
                     for r in reasons)  # fmt: skip
        return not any(forbidden)

    def conformed(self) -> Model:
        """The model with smaller weights, under the new config."""
        assert not isinstance(self.sizes, list)
        return conform(self.case.model, self.case.match, *self.sizes)

    @cached_property
    def sizes(self) -> tuple[Config, Any, dict[int, int]] | list[Reason]:
        """Config, its dimensions, and layer of the result -> layer of the template; or why no config fits."""
        match, reasons = self.case.match, self.case.unmatched
        layers, partial = self._layers()
        sizes, uneven = self._sizes()
        reasons += [*partial, *uneven]
        reasons += [Reason(match.program.path(m.end), f"no config can state a {m.kind}", branch=i)
                    for i, part in match.matched() for m in part.maps]  # fmt: skip
        if reasons or not layers:
            return reasons or [Reason("", "no layer is left", "layers", match.arch.fields["layers"])]
        resized = self._resized(sizes, layers)
        dims = match.arch.read(resized)
        for name, of in match.arch.multiples:
            if getattr(dims, name) % getattr(dims, of):
                a, b = (f"{match.arch.fields[n]} {getattr(dims, n)}" for n in (name, of))
                why = f"the class needs {a} to be a multiple of {b}"
                return [Reason("embed.weight", why, AXES[name], match.arch.fields[name], TRUNK)]
        fitted = with_eps(resized, match, dims)
        if isinstance(fitted, str):
            return [Reason("norm", fitted, "channels", match.arch.fields["eps"], TRUNK)]
        return *fitted, dict(enumerate(layers))

    def _layers(self) -> tuple[list[int], list[Reason]]:
        """Numbers of the remaining layers; reasons for layers that lost only one branch."""
        match = self.case.match
        present: dict[int, list[bool]] = {}
        for branch, part in zip(match.branches, match.parts, strict=True):
            present.setdefault(branch.layer or 0, []).append(part is not None)
        reasons = []
        for i, (branch, part) in enumerate(zip(match.branches, match.parts, strict=True)):
            if part is None and i not in match.mismatched and any(present[branch.layer or 0]):
                why = f"{branch.name} is gone, but the rest of its layer is not"
                field = match.arch.fields["layers"]
                reasons.append(Reason(match.template.path(branch.junction), why, "layers", field, i))
        return [n for n, parts in sorted(present.items()) if any(parts)], reasons

    def _sizes(self) -> tuple[dict[str, int], list[Reason]]:
        """Dimension -> size in all layers; reasons for layers whose size differs from most."""
        match = self.case.match
        found: dict[str, dict[int, int]] = {}
        reasons: list[Reason] = []
        for i, part in enumerate(match.parts):
            if part is None:
                continue
            here = match.sizes[i]
            for name, size in here.items():
                found.setdefault(name, {})[i] = size
            if "heads" in here:
                table = key_heads(match.program, part, here["heads"], here["kv_heads"])
                count = np.bincount(table, minlength=here["kv_heads"])
                if (count != count[0]).any():
                    reasons.append(self._reason(i, "heads", f"{', '.join(map(str, count))} query heads per key head"))
        for name, sizes in found.items():
            most, _ = Counter(sizes.values()).most_common(1)[0]
            of = next(match.branches[i].layer for i, n in sizes.items() if n == most)
            reasons += [self._reason(i, name, f"{n} {AXES.get(name, name)} where layer {of} has {most}")
                        for i, n in sizes.items() if n != most]  # fmt: skip
        return {name: next(iter(sizes.values())) for name, sizes in found.items()}, reasons

    def _reason(self, branch: int, name: str, why: str) -> Reason:
        """A reason with the path of the first weight that has the dimension."""
        match, part = self.case.match, self.case.match.parts[branch]
        assert part is not None
        having = (w for w in part.weights if any(name in t.split("*") for t in match.terms[w]))
        field = match.arch.fields.get(name, "")
        path = next(having, match.branches[branch].name)
        return Reason(path, f"{why} ({field})" if field else why, AXES.get(name, name), field, branch)

    def _resized(self, sizes: dict[str, int], layers: list[int]) -> Config:
        """The config with new sizes and shorter lists per layer, and head_dim, which classes derive from the width."""
        match, config = self.case.match, self.case.model.config
        names, dims = match.arch.fields, match.dims
        now = {**sizes, "layers": len(layers)}
        fields = {names[n]: size for n, size in now.items() if n in names and size != getattr(dims, n)}
        if {"hidden", "heads"} & {n for n, size in now.items() if size != getattr(dims, n, size)}:
            fields[names["head_dim"]] = dims.head_dim
        windows = getattr(dims, "windows", (None,))
        if len(layers) == dims.layers or (len(set(windows)) == 1 and "layer_types" not in config):
            return changed(config, fields)
        types = ["full_attention" if windows[i] is None else "sliding_attention" for i in layers]
        return changed(config, {**fields, "layer_types": types}, without=("max_window_layers",))
