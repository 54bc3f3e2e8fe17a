"""Build a program over mapped weights from the headers of a checkpoint; no weight payload is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from graphwright.array import BY_TAG, CPU, DType, NDArray, Storage, dtype, empty
from graphwright.autograd import Parameter, Variable
from graphwright.models.architectures.architecture import Architecture, Config
from graphwright.models.errors import TensorMismatch, UnsupportedDType
from graphwright.models.stacks import stack_of, stacked_shape
from graphwright.program.builder import Builder
from graphwright.safetensors import Checkpoint

if TYPE_CHECKING:
    from graphwright.program.op_graph import Value
    from graphwright.program.program import Program


TIED_HEAD, EMBEDDING = "lm_head.weight", "embed.weight"


MOST_MISSING = 1000
"""Missing tensors from which on a config with too many layers is not compared further."""


def match_keys(family: Architecture, dims: Any, checkpoint: Checkpoint, config: Config) -> dict[str, str]:
    """Map each param path to its checkpoint key, for sizes `dims`. Raises: TensorMismatch naming all that differ."""
    have = set(checkpoint)
    written = _prefixing(family.prefix, have)
    keys: dict[str, str] = {}
    missing, misshapen = [], list[str]()
    for path, key, shape, names in family.weights(dims):
        stored = next((k for k in _spellings(family, written(key)) if k in have), None)
        if stored is None:
            missing.append(key)
            if len(missing) > MOST_MISSING:
                have.clear()  # the keys that were not compared are not unexpected
                break
            continue
        keys[path] = stored
        if tuple(checkpoint.info(stored).shape) != shape:
            fields, found = " x ".join(names), list(checkpoint.info(stored).shape)
            misshapen.append(f"{stored}: config says {list(shape)} ({fields}), the file has {found}")
    left = have - set(keys.values())
    unexpected = sorted(key for key in left if not any(re.search(p, key) for p in family.ignored))
    missing = _missing_tensors(family, dims, missing, checkpoint, written, unexpected, misshapen)
    if getattr(dims, "tied", False):
        unexpected = [key for key in unexpected if key not in map(written, family.copies)]
    if missing or unexpected or misshapen:
        lines = [*(f"missing: {k}" for k in missing), *(f"unexpected: {k}" for k in unexpected), *misshapen]
        shown = "\n  ".join(lines[:20]) + (f"\n  ... {len(lines) - 20} more" if len(lines) > 20 else "")
        raise TensorMismatch(f"{len(lines)} tensors do not fit the {family.name} architecture:\n  {shown}",
                             where=str(config.path.parent), missing=missing, unexpected=unexpected, misshapen=misshapen,
                             fix="compare config.json with the weights: graphwright inspect DIR --tensors")  # fmt: skip
    return keys


def _spellings(family: Architecture, key: str) -> Iterator[str]:
    """Yield a key of a file, and its names in older files."""
    yield key
    yield from (key.removesuffix(new) + old for new, old in family.older if key.endswith(new))


def _missing_tensors(
    family: Architecture, dims: Any, keys: list[str], checkpoint: Checkpoint, written: Callable[[str], str],
    unexpected: list[str], misshapen: list[str],
) -> list[str]:  # fmt: skip
    """Return the names in a file of the family's missing `keys`, where the class may have several in one tensor.

    A tensor that the file has in a shape that cannot be divided is moved from `unexpected` to `misshapen`.
    """
    found: dict[str, None] = {}
    divided: set[str] = set()
    for key in keys:
        of = stack_of(family, key)
        name = written(key if of is None else of[1])
        if of is None or name not in unexpected:
            found.setdefault(name)
            continue
        unexpected.remove(name)
        divided.add(name)
        shapes = family.shapes(dims)
        wanted = list(stacked_shape(of[0], [shapes[part] for part in of[0].parts]))
        has, count = list(checkpoint.info(name).shape), len(of[0].parts)
        misshapen.append(f"{name}: config says {wanted} (of {count} weights), the file has {has}")
    return [name for name in found if name not in divided]


def template_keys(family: Architecture, dims: Any, known: Mapping[str, str]) -> dict[str, str]:
    """Map each param path of a model of sizes `dims` to a checkpoint key: that of `known`, or one like it."""
    written = _prefixing(family.prefix, set(known.values()))
    return {path: known.get(path) or written(key) for path, key, _, _ in family.weights(dims)}


def _prefixing(prefix: str, have: set[str]) -> Callable[[str], str]:
    """Return a function from a family's key to the file's key; the file's keys `have` may lack or repeat `prefix`."""
    if prefix and any(key.startswith(prefix * 2) for key in have):
        return lambda key: prefix + key
    if prefix and not any(key.startswith(prefix) for key in have):
        return lambda key: key.removeprefix(prefix)
    return lambda key: key


def build(
    family: Architecture, dims: Any, keys: dict[str, str], checkpoint: Checkpoint, stored: str, compute: str, name: str
) -> Program:
    """Build the program of a model over mapped weights.

    `keys` maps param paths to checkpoint keys. `stored` is the dtype to which weights are converted, or `keep`;
    `compute` is the dtype of activations.
    """
    values, arrays = dict[str, Variable](), []
    for path, key in keys.items():
        array = mapped(checkpoint, key, any_dtype=path in family.buffers)
        arrays.append(array)
        if path in family.buffers:
            values[path] = Variable(array, name=key)
            continue
        if stored != "keep" and array.dtype is not dtype(stored):
            array = empty(array.shape, dtype(stored)).copy_from(array)
        values[path] = Parameter(array, True, key)
    program = assemble(family, dims, keys, values, compute, name)
    for array in arrays:
        program.weights.refer(array)
    return program


def assemble(
    family: Architecture, dims: Any, keys: Mapping[str, str], values: Mapping[str, Variable], compute: str, name: str
) -> Program:
    """Build the program of a family for sizes `dims`, with weights by path, under their checkpoint keys `keys`."""
    b = Builder(name)
    params: dict[str, Value] = {}
    for path, value in values.items():
        buffer = path in family.buffers
        params[path] = b.const(path, value) if buffer else b.param(path, value, key=keys[path])
    family.build(b, dims, params, dtype(compute))
    program = b.build()
    program.imported = family.imported
    return program


def mapped(checkpoint: Checkpoint, key: str, *, any_dtype: bool = False) -> NDArray:
    """Return a tensor as an array that maps the file's bytes at first use.

    Raises: UnsupportedDType for an unknown dtype, or unless `any_dtype` for one that is not floating.
    """
    info = checkpoint.info(key)
    kind: DType | None = BY_TAG.get(info.tag)
    if kind is None or not (kind.is_float or any_dtype):  # integers are codes of a quantised checkpoint, not weights
        raise UnsupportedDType("a weight is not stored in a floating dtype", where=key, got=info.tag,
                               expected=", ".join(t for t, d in BY_TAG.items() if d.is_float))  # fmt: skip
    file = checkpoint.file_of(key)
    storage = Storage.mapped(lambda: file.bytes(key), info.nbytes, CPU, file.check_mapped)
    return NDArray(storage, kind, tuple(info.shape))
