"""Rung 2: a program whose layers are alike, as the stock class of other sizes: the config that says so, or why none.

Uniform is a program with one width, whose remaining layers have both their branches, equal numbers of neurons and of
heads, and as many query heads on each key head.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.models.architectures.config import Config
from graphwright.models.export.dense import eps_of
from graphwright.models.export.template_reader import TRUNK, key_heads, misfits

if TYPE_CHECKING:
    from graphwright.models.export.template_reader import TemplateMatch

AXES = {"mlp": "neurons", "heads": "heads", "kv_heads": "kv_groups", "hidden": "channels", "layers": "layers"}
"""Dimension of a family -> what its units are called."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a rung cannot carry a program.

    Attributes:
        path: of a node.
        why: in words.
        slot: the branch that it is about; None for all.
        axis, field: units, and the config field that counts them, where a size is the reason.
    """

    path: str
    why: str
    slot: int | None = None
    axis: str = ""
    field: str = ""


@dataclass(frozen=True, slots=True)
class Uniform:
    """Sizes of the stock class.

    Attributes:
        config, dims: the config with these sizes, and what the family reads from it.
        layers: layer of the result -> layer of the template.
    """

    config: Config
    dims: Any
    layers: dict[int, int]


@dataclass(frozen=True, slots=True)
class Fits:
    """What the stock class makes of a program that was read.

    Attributes:
        uniform: the sizes of rung 2, or why there are none.
        dense: config and dimensions of rung 3, or why its norms have no eps.
        misfits: branches that are too large for the sizes of the template, each with the reason.
    """

    uniform: Uniform | list[Reason]
    dense: tuple[Config, Any] | str
    misfits: list[tuple[int, str]]


def fits(reading: TemplateMatch, config: Config) -> Fits:
    """Both ways into the stock class; reads no payload but tables of heads."""
    dims = reading.dims
    return Fits(uniform(reading, config), with_eps(config, reading, dims), misfits(reading, dims))


def uniform(reading: TemplateMatch, config: Config) -> Uniform | list[Reason]:
    """The config that gives a program's sizes, or every reason why there is none."""
    reasons = [Reason(reading.program.path(n), why) for n, why in reading.unread.items()]
    layers, partial = _layers(reading)
    reasons += partial
    sizes, uneven = _sizes(reading, layers)
    reasons += uneven
    reasons += [
        Reason(reading.program.path(s.end), f"a {s.kind} has no place in the config", i)
        for i in range(TRUNK, len(reading.slots))
        if (part := reading.part(i)) is not None
        for s in part.stretches
    ]
    if reasons or not layers:
        return reasons or [Reason("", "no layer is left", None, "layers", reading.arch.fields["layers"])]
    resized = _resized(reading, config, sizes, layers)
    dims = reading.arch.read(resized)
    for name, of in reading.arch.multiples:
        if getattr(dims, name) % getattr(dims, of):
            a, b = (f"{reading.arch.fields[n]} {getattr(dims, n)}" for n in (name, of))
            why = f"the class refuses {a}, which is no multiple of {b}"
            return [Reason("embed.weight", why, TRUNK, AXES[name], reading.arch.fields[name])]
    fitted = with_eps(resized, reading, dims)
    if isinstance(fitted, str):
        return [Reason("norm", fitted, TRUNK, "channels", reading.arch.fields["eps"])]
    return Uniform(*fitted, dict(enumerate(layers)))


def changed(config: Config, fields: dict[str, Any], without: tuple[str, ...] = ()) -> Config:
    """A config with other fields, in the order that it has."""
    made = {k: v for k, v in {**config.fields, **fields}.items() if k not in without}
    return Config(made, (json.dumps(made, indent=2, ensure_ascii=False) + "\n").encode(), config.path)


def _layers(reading: TemplateMatch) -> tuple[list[int], list[Reason]]:
    """Numbers of the layers that remain; why one of them is not whole."""
    whole: dict[int, list[bool]] = {}
    for slot, part in zip(reading.slots, reading.parts, strict=True):
        whole.setdefault(slot.layer or 0, []).append(part is not None)
    reasons = []
    for i, (slot, part) in enumerate(zip(reading.slots, reading.parts, strict=True)):
        if part is None and i not in reading.lost and any(whole[slot.layer or 0]):
            why = f"{slot.name} is gone, and the rest of its layer is not"
            path, field = reading.template.path(slot.junction), reading.arch.fields["layers"]
            reasons.append(Reason(path, why, i, "layers", field))
    return [n for n, parts in sorted(whole.items()) if any(parts)], reasons


def _sizes(reading: TemplateMatch, layers: list[int]) -> tuple[dict[str, int], list[Reason]]:
    """Dimension -> size in all layers; where they differ, the layers that are not as most."""
    found: dict[str, dict[int, int]] = {}
    reasons: list[Reason] = []
    each: dict[int, int] = {}
    for i, part in enumerate(reading.parts):
        if part is None:
            continue
        here = reading.sizes[i]
        for name, size in here.items():
            found.setdefault(name, {})[i] = size
        if "heads" in here:
            count = np.bincount(key_heads(reading.program, part, here["heads"], here["kv_heads"]),
                                minlength=here["kv_heads"])  # fmt: skip
            each[i] = int(count[0])
            if (count != count[0]).any():
                why = f"key heads are read by {', '.join(map(str, count))} query heads"
                reasons.append(_reason(reading, i, "heads", why))
    for name, sizes in found.items():
        most, _ = Counter(sizes.values()).most_common(1)[0]
        of = next(reading.slots[i].layer for i, n in sizes.items() if n == most)
        for i, n in sizes.items():
            if n != most:
                why = f"{n} {AXES.get(name, name)} where layer {of} has {most}"
                reasons.append(_reason(reading, i, name, why))
    return {name: next(iter(sizes.values())) for name, sizes in found.items()}, reasons


def _reason(reading: TemplateMatch, slot: int, name: str, why: str) -> Reason:
    """A reason that names the first weight along a dimension."""
    part = reading.parts[slot]
    assert part is not None
    terms = {path: dims for path, _, _, dims in reading.arch.weights(reading.dims)}
    path = next((w for w in part.weights if any(name in t.split("*") for t in terms[w])), reading.slots[slot].name)
    field = reading.arch.fields.get(name, "")
    return Reason(path, f"{why} ({field})" if field else why, slot, AXES.get(name, name), field)


def _resized(reading: TemplateMatch, config: Config, sizes: dict[str, int], layers: list[int]) -> Config:
    """Fields of sizes, and lists by layer cut along. head_dim is written out, as classes derive it from the width."""
    names, dims = reading.arch.fields, reading.dims
    now = {**sizes, "layers": len(layers)}
    fields = {names[n]: size for n, size in now.items() if n in names and size != getattr(dims, n)}
    if {"hidden", "heads"} & {n for n, size in now.items() if size != getattr(dims, n, size)}:
        fields[names["head_dim"]] = dims.head_dim
    windows = getattr(dims, "windows", (None,))
    if len(layers) == dims.layers or (len(set(windows)) == 1 and "layer_types" not in config):
        return changed(config, fields)
    types = ["full_attention" if windows[i] is None else "sliding_attention" for i in layers]
    return changed(config, {**fields, "layer_types": types}, without=("max_window_layers",))


def with_eps(config: Config, reading: TemplateMatch, dims: Any) -> tuple[Config, Any] | str:
    """The config and dimensions in which norms over the template's width have the eps they need, or why none do."""
    eps = eps_of(reading, dims)
    if isinstance(eps, str) or eps == dims.eps:
        return eps if isinstance(eps, str) else (config, dims)
    return changed(config, {reading.arch.fields["eps"]: eps}), replace(dims, eps=eps)
