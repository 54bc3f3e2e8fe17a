"""Architectures: checked access to config.json, and the description of a model family."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from graphwright.files import JsonError, read_file, read_json
from graphwright.models.architectures.tasks import LANGUAGE_MODEL
from graphwright.models.errors import ConfigError, ModelNotFound
from graphwright.report import Report

_LIMIT = 8 << 20
LARGEST = sys.float_info.max  # JSON integers are unbounded; larger ones have no float


class Config(Mapping[str, Any]):
    """The fields of the config.json at `path`; `raw` are the file's bytes, which exports copy if no field changed."""

    def __init__(self, fields: Mapping[str, Any], raw: bytes, path: Path) -> None:
        self.fields, self.raw, self.path = dict(fields), raw, path

    @staticmethod
    def read(directory: Path, name: str = "config.json") -> Config:
        """Read the file `name` in a directory. Raises: ModelNotFound; ConfigError if it is not a JSON object."""
        path = directory / name
        if not path.is_file():
            fix = "give the directory that save_pretrained wrote"
            raise ModelNotFound(f"the directory has no {name}", where=str(directory), fix=fix)
        return Config(read_object(path, _LIMIT, nesting=16), read_file(path), path)

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def __iter__(self) -> Any:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    def size(self, name: str, default: int | None = None, *, least: int = 1, most: int = 1 << 31) -> int:
        """Return an integer field in least..most, or the default if absent or null. Raises: ConfigError naming it."""
        value = self._given(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.invalid(name, f"an integer in {least}..{most}", value)
        return value

    def number(self, name: str, default: float | None = None, most: float = LARGEST) -> float:
        """Return a number field above 0 and at most `most`, or the default if absent or null. Raises: ConfigError."""
        value = self._given(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
            limit = "" if most == LARGEST else f" and at most {most:g}"
            raise self.invalid(name, f"a number above 0{limit}", value)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean field, or the default if absent or null. Raises: ConfigError naming it."""
        value = self._given(name, default)
        if not isinstance(value, bool):
            raise self.invalid(name, "true or false", value)
        return value

    def choice(self, name: str, default: str, among: tuple[str, ...]) -> str:
        """Return a field that is one of `among`, or the default if absent or null. Raises: ConfigError naming it."""
        value = self._given(name, default)
        if value not in among:
            raise self.invalid(name, ", ".join(among), value)
        return value

    def invalid(self, name: str, expected: str, got: object) -> ConfigError:
        """Return the error for an invalid value of a field."""
        return ConfigError(f"config field {name!r} is invalid", where=str(self.path), expected=expected, got=got)

    def _given(self, name: str, default: Any) -> Any:
        value = self.fields.get(name)
        return default if value is None else value

    def __repr__(self) -> str:
        return f"Config({json.dumps(self.fields)[:200]})"


def read_object(path: Path, limit: int, *, nesting: int) -> dict[str, Any]:
    """Read a JSON object from a file of at most `limit` bytes and `nesting` levels. Raises: ConfigError."""
    try:
        data = read_json(path, limit, nesting=nesting)
    except (JsonError, OSError) as error:
        got = str(error)
        if isinstance(error, JsonError):
            got = error.what if error.got is None else f"{error.what}: {error.got}"
        raise ConfigError(f"{path.name} cannot be read", where=str(path), got=got) from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path.name} does not contain a JSON object", where=str(path), got=type(data).__name__)
    return data


FIELDS = {
    "hidden": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads", "head_dim": "head_dim",
    "kv_heads": "num_key_value_heads", "mlp": "intermediate_size", "vocab": "vocab_size", "eps": "rms_norm_eps",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class WeightKey:
    """A weight that the models of a family have, in every layer if `path` contains `{i}`, for every expert if `{e}`.

    Attributes:
        path: name of the param node; `{i}` is the layer, `{e}` the expert.
        key: name in a checkpoint.
        dims: size of each axis, a product of dimension names, e.g. `heads*head_dim`. `expert_width.{e}` is the
            dimension `expert_width`, which edits may make different for each expert.
        when: name of the boolean dimension, e.g. `q_bias`, that tells whether a model has this weight; "" for always.
            Such a dimension may also be a tuple of one boolean per layer, e.g. `routed`.
    """

    path: str
    key: str
    dims: tuple[str, ...]
    when: str = ""


@dataclass(frozen=True, slots=True)
class Stack:
    """A tensor that checkpoints have instead of several weights, one below the other.

    Attributes:
        key: name in these checkpoints; `{i}` is the layer.
        parts: keys of the weights, as in `WeightKey`. With `{e}`, the tensor has a row per expert, and in it these
            weights of the expert.
        transposed: whether the tensor is the transpose of that.
        own: whether the family's class has this tensor, so that every export does; else exports have it if the
            checkpoint does.
    """

    key: str
    parts: tuple[str, ...]
    transposed: bool = False
    own: bool = False


@dataclass(frozen=True, slots=True)
class Join:
    """Several tensors that checkpoints have instead of one weight, whose bytes they are, one after another.

    Attributes:
        key: key of the weight.
        parts: keys of the tensors. With `{e}`, the weight has a row per expert, and in it these tensors of the expert,
            one below the other; else the weight has the tensors one below the other.
    """

    key: str
    parts: tuple[str, ...]

    @property
    def stacked(self) -> bool:
        """True if the weight has a row per expert."""
        return any("{e}" in part for part in self.parts)

    def keys(self, experts: int) -> list[str]:
        """Return the keys of the tensors in byte order; a stacked weight has a row per expert."""
        rows = range(experts) if self.stacked else (0,)
        return [part.replace("{e}", str(e)) for e in rows for part in self.parts]


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model family, such as Llama: which configs it covers, how to read them, and how to build the graph.

    Attributes:
        name: short name.
        classes: Hugging Face classes that the family covers.
        model_types: values of `model_type` that the family covers.
        read: function from a config to an object with dimensions and flags, which `keys` and `build` use.
        keys: the weights of the family.
        build: function of (builder, dimensions, params by path, compute dtype); adds the ops and the output `logits`.
        prefix: prefix of the base model's keys; a checkpoint without it is accepted, and written back without it.
        ignored: regular expressions for the keys of derived tensors, which old checkpoints contain.
        fields: dict from dimension to config field; export writes new sizes into these fields.
        multiples: pairs (a, b): the config class requires dimension a to be a multiple of dimension b.
        attributes: dict from attribute of an op, such as `topk.k`, to the dimension that it holds.
        spellings: dict from config field to another name of it; a config that has that name keeps it.
        stacks: tensors that checkpoints have instead of separate weights; such files keep their form.
        joins: weights that checkpoints have as several tensors; such files keep their form.
        notes: function from a config to notes for who opens it.
        buffers: paths of weights that are not trained, such as running statistics; they are consts of the program.
        imported: report of how a class without a template was captured.
        task: what the models compute; `causal-lm` predicts the next token, so its models generate text.
        defaults: dict from input to the number that `Model.outputs` fills it with if it is not given.
        copies: dict from the key of a tensor that some files repeat to the path of the weight that it equals.
        older: pairs of endings of keys: those of the class, and those of older files.
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
    attributes: Mapping[str, str] = field(default_factory=dict)
    spellings: Mapping[str, str] = field(default_factory=dict)
    stacks: tuple[Stack, ...] = ()
    joins: tuple[Join, ...] = ()
    notes: Callable[[Config], tuple[str, ...]] | None = None
    buffers: frozenset[str] = frozenset()
    imported: Report | None = None
    task: str = LANGUAGE_MODEL
    defaults: Mapping[str, int] = field(default_factory=lambda: {"attention_mask": 1})
    copies: Mapping[str, str] = field(default_factory=lambda: {"lm_head.weight": "embed.weight"})
    older: tuple[tuple[str, str], ...] = ()

    def weights(self, dims: Any) -> Iterator[tuple[str, str, tuple[int, ...], tuple[str, ...]]]:
        """Yield (param path, checkpoint key, shape, dimension names of its axes) of each weight, for sizes `dims`."""
        for row in self.keys:
            given = getattr(dims, row.when) if row.when else True
            shape = _shape(row, dims)
            for i in range(dims.layers) if "{i}" in row.key else (0,):
                if not (given[i] if isinstance(given, tuple) else given):
                    continue
                for e in range(dims.experts) if "{e}" in row.key else (0,):
                    at = {"i": i, "e": e}
                    yield row.path.format(**at), row.key.format(**at), shape, tuple(d.format(**at) for d in row.dims)

    def resized(self, config: Config, compute: str) -> tuple[Architecture, Any]:
        """Return the architecture for another config of the same class, and its dimensions. Raises: ConfigError."""
        return self, self.read(config)

    def shapes_for(self, config: Config) -> dict[str, tuple[int, ...]] | None:
        """Return the shape of each weight by path for another config of the same class; None if it refuses it."""
        try:
            return {path: shape for path, _, shape, _ in self.weights(self.read(config))}
        except ConfigError:
            return None

    def known_fields(self, config: Config) -> Mapping[str, Any]:
        """Return the fields of a config, with the class's defaults of the others, if they are known."""
        return config.fields

    def shapes(self, dims: Any) -> dict[str, tuple[int, ...]]:
        """Return a dict from each key, with `{i}` and `{e}`, to the shape of the weights that have it."""
        return {row.key: _shape(row, dims) for row in self.keys}

    def config_fields(self, config: Mapping[str, Any]) -> dict[str, str]:
        """Return a dict from dimension to config field, in the spelling of a config."""
        known = {name: other for name, other in self.spellings.items() if other in config}
        return {dimension: known.get(name, name) for dimension, name in self.fields.items()}


def _shape(row: WeightKey, dims: Any) -> tuple[int, ...]:
    return tuple(prod(size_of(dims, name) for name in d.split("*")) for d in row.dims)


def dimension_of(name: str) -> str:
    """Return the dimension of a name that may have the number of an expert: `expert_width` for `expert_width.3`."""
    return name.partition(".")[0]


def size_of(dims: Any, name: str) -> int:
    """Return the size of a dimension, whose name may have the number of an expert."""
    return int(getattr(dims, dimension_of(name)))
