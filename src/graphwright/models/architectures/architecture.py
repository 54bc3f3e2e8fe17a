"""Architecture: a model family as data, and the registry of families."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from math import prod
from typing import Any

from graphwright.errors import UsageError
from graphwright.models.architectures.config import Config
from graphwright.models.errors import UnsupportedArchitecture

FIELDS = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp": "intermediate_size",
    "vocab": "vocab_size",
    "eps": "rms_norm_eps",
}


@dataclass(frozen=True, slots=True)
class WeightKey:
    """One weight of a family.

    Attributes:
        path: param node's name; `{i}` is the layer.
        key: name in a checkpoint.
        dims: sizes as products of dimension names, e.g. `heads*head_dim`.
        when: flag of the dimensions that adds the weight; "" for always.
    """

    path: str
    key: str
    dims: tuple[str, ...]
    when: str = ""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A family of models.

    Attributes:
        name: short name.
        classes: Hugging Face classes it describes.
        model_types: values of `model_type` it describes.
        read: config -> dimensions and flags; `keys` and `build` use the attributes of this object.
        keys: its weights.
        build: (builder, dimensions, params by path, compute dtype) -> None; declares inputs and the output `logits`.
        prefix: of keys of the base model; a checkpoint without it is accepted, and written back without it.
        ignored: patterns of derived tensors that old checkpoints contain.
        fields: dimension -> config field; export resizes models by these fields.
        multiples: (a, b) if the config class requires dimension a to be a multiple of b.
    """

    name: str
    classes: tuple[str, ...]
    model_types: tuple[str, ...]
    read: Callable[[Config], Any]
    keys: tuple[WeightKey, ...]
    build: Callable[..., None]
    prefix: str = "model."
    ignored: tuple[str, ...] = (r"rotary_emb\.inv_freq$", r"attn\.bias$", r"masked_bias$")
    fields: Mapping[str, str] = field(default_factory=lambda: dict(FIELDS))
    multiples: tuple[tuple[str, str], ...] = ()

    def weights(self, dims: Any) -> Iterator[tuple[str, str, tuple[int, ...], tuple[str, ...]]]:
        """(param path, checkpoint key, shape, dims) of every weight of these dimensions."""
        for row in self.keys:
            if row.when and not getattr(dims, row.when):
                continue
            shape = tuple(prod(getattr(dims, name) for name in d.split("*")) for d in row.dims)
            for i in range(dims.layers) if "{i}" in row.key else (0,):
                yield row.path.format(i=i), row.key.format(i=i), shape, row.dims


_BUILTIN = "graphwright.models.architectures.families"
"""Importing this module registers the families of this package."""

_registry: dict[str, Architecture] = {}


def register(arch: Architecture) -> Architecture:
    """Add a family. Raises: UsageError if another family has one of its classes or model types."""
    import_module(_BUILTIN)  # so that a conflict with a family of this package shows here
    for name in (*arch.classes, *arch.model_types):
        other = _registry.get(name)
        if other is not None and other is not arch:
            raise UsageError("this class already has an architecture", where=name, expected=other.name, got=arch.name)
    for name in (*arch.classes, *arch.model_types):
        _registry[name] = arch
    return arch


def architectures() -> Mapping[str, Architecture]:
    """All families by class and model type; the first call loads the entry points `graphwright.architectures`."""
    import_module(_BUILTIN)
    _load_entry_points()
    return _registry


def find(config: Config) -> Architecture:
    """Find the family of a config. Raises: UnsupportedArchitecture naming similar classes."""
    known = architectures()
    classes = config.get("architectures") or []
    if not isinstance(classes, list) or not all(isinstance(c, str) for c in classes):
        raise config.invalid("architectures", "a list of class names", classes)
    wanted = classes or [str(config.get("model_type"))]
    for name in wanted:
        if name in known:
            return known[name]
    near = get_close_matches(wanted[0], known, 3, 0.3)
    fix = "add it with graphwright.models.register(Architecture(...)); `graphwright inspect` works without"
    if str(config.get("model_type")).startswith("graphwright-"):
        fix = "this is an export with generated code, for transformers; to edit further, open a directory of model.save"
    raise UnsupportedArchitecture("no registered architecture describes this class", where=str(config.path),
                                  got=wanted[0],
                                  expected=", ".join(near) or ", ".join(sorted({a.name for a in known.values()})),
                                  fix=fix)  # fmt: skip


_entry_points_loaded = False


def _load_entry_points() -> None:
    global _entry_points_loaded
    if _entry_points_loaded:
        return
    _entry_points_loaded = True
    import logging
    from importlib.metadata import entry_points

    for point in entry_points(group="graphwright.architectures"):
        try:
            register(point.load())
        except Exception as error:  # a broken plugin must not break the others
            logging.getLogger("graphwright.models").warning("architecture plugin %r was skipped: %s", point.name, error)
