"""Layers whose only expert processes all tokens, as the dense layers that classes with `mlp_only_layers` have."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from graphwright.models.export.template_match import (
    MatchedPart,
    TemplateMatch,
    template,
    template_branches,
)
from graphwright.models.loading import template_keys

if TYPE_CHECKING:
    from graphwright.models.model import Model

_MATRICES = ("gate", "up", "down")


def dense_where_alone(model: Model, match: TemplateMatch) -> TemplateMatch:
    """Return the match with a template in which layers with one expert are dense, if others have more.

    The weight of an only expert is 1, because it is divided by itself or a softmax over one entry. The family must have
    dense layers, and the layer no other terms, such as a shared expert.
    """
    alone = _alone(match)
    if not alone or "mlp" not in match.arch.fields:
        return match
    dims = replace(match.dims, routed=tuple(r and i not in alone.values() for i, r in enumerate(match.dims.routed)))
    keys = template_keys(match.arch, dims, match.keys)
    made, old = template(model, dims, keys), match.template
    parts, sizes = list(match.parts), {i: dict(found) for i, found in match.sizes.items()}
    for i, part in enumerate(match.parts):
        if part is None:
            continue
        if i in alone:
            parts[i] = _dense(part)
            sizes[i] = {n: size for n, size in match.sizes[i].items() if n == "hidden"}
            sizes[i]["mlp"] = match.sizes[i]["expert_width.0"]
        else:
            parts[i] = replace(part, absent=[made.value(old.path(v)) for v in part.absent])
    terms = {path: names for path, _, _, names in match.arch.weights(dims)}
    return replace(match, dims=dims, keys=keys, template=made, branches=template_branches(made), parts=tuple(parts),
                   sizes=sizes, terms=terms)  # fmt: skip


def _alone(match: TemplateMatch) -> dict[int, int]:
    """Return a dict from branch number to layer of the layers with one expert and nothing else; {} if all have one."""
    counts = {i: match.sizes[i]["experts"] for i, part in match.matched() if part and "experts" in match.sizes[i]}
    found = {}
    for i in (i for i, count in counts.items() if count == 1):
        name, part = match.branches[i].name, match.parts[i]
        own = {f"{name}.{w}.weight" for w in ("norm", "router", *(f"experts.0.{m}" for m in _MATRICES))}
        if part is not None and part.weights.keys() == own and not part.maps:
            found[i] = match.branches[i].layer
    return found if any(count > 1 for count in counts.values()) else {}


def _dense(part: MatchedPart) -> MatchedPart:
    """Return the match of a layer with one expert as that of its MLP."""
    name = part.name
    weights = {f"{name}.{m}.weight": part.weights[f"{name}.experts.0.{m}.weight"] for m in _MATRICES}
    weights[f"{name}.norm.weight"] = part.weights[f"{name}.norm.weight"]
    return replace(part, weights=weights, counts={}, absent=[])
