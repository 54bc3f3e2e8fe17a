"""Resizing the vocabulary as an edit: rows of the embedding and of the head are added or removed at the end."""

from __future__ import annotations

import os
from math import prod
from typing import TYPE_CHECKING, Literal

import numpy as np

from graphwright.arguments import checked
from graphwright.array import NDArray
from graphwright.array.random import normal, stream_of
from graphwright.errors import OutOfMemory, UsageError
from graphwright.models.errors import TokenizerMismatch
from graphwright.models.generation.text import vocabulary
from graphwright.ops import traits
from graphwright.ops.axes import Atom
from graphwright.program.axes.axes import AxisGroup
from graphwright.program.axes.resize import Maps, resize
from graphwright.program.axes.solve_axes import origin
from graphwright.program.errors import FrozenAxis
from graphwright.program.op_graph import Value
from graphwright.settings import Range

if TYPE_CHECKING:
    from graphwright.models.model import Model
    from graphwright.program.program import Program

NewRows = Literal["mean", "normal", "zero"]


@checked
def resize_vocab(model: Model, n: int, *, init: NewRows = "mean", seed: int = 0, drop_tokens: bool = False) -> None:
    """Change the number of token ids to `n`, in one edit that `program.undo()` reverts.

    Rows are added or removed at the end of the embedding and of the head, tied or not; the other rows keep their bits.
    `model.vocab` and `model.dims.vocab` are then `n`, and an export has the original class with another `vocab_size`.

    Args:
        n: new number of ids; the tokenizer's ids may be fewer, but not more.
        init: new rows: `mean` of the old rows; `normal`, N(mean, variance) of the old rows in each column; or `zero`.
        seed: seed of the random numbers.
        drop_tokens: remove rows even if ids of the tokenizer or end tokens are among them.
    Raises: OutOfMemory if the new rows exceed the memory of the machine; TokenizerMismatch if a removed id has a
        token, unless `drop_tokens`; UsageError for invalid arguments, or if rows are to be added to a
        quantised weight; FrozenAxis if the program reads the vocabulary in another way.
    Source: the mean as start of new rows is from Hewitt 2021, "Initializing New Word Embeddings for Pretrained
        Language Models".
    """
    p = model.program
    Range(1, 2**31, whole=True).check("n", n)
    groups = _axes(p)
    _refuse_more_than_memory(p, n)
    if not drop_tokens:
        _refuse_dropped_tokens(model, n)

    def rows(key: str, array: NDArray, maps: Maps) -> np.ndarray:
        return _new_rows(key, array, maps, init, seed)

    wanted = {g.name: [*range(min(g.size, n)), *[-1] * (n - g.size)] for g in groups if g.size != n}
    if wanted:
        with p.edit(f"resize the vocabulary from {vocabulary(p)} to {n}") as e:
            e.do(resize(p.axes(), wanted, new=rows))


def _axes(p: Program) -> list[AxisGroup]:
    """Return the axes of token ids: of the embeddings that `ids` indexes, and of the logits, one axis if they are tied.

    Raises: FrozenAxis if a size of the vocabulary is not an axis of its own, or an op depends on it in another way.
    """
    found = p.axes()
    lookups = [n for n in p.consumers("ids") if traits(p.op(n)).lookup]
    tables = [table for n in lookups if (table := origin(p, p.operands(n)[0])) is not None]
    ends = [found.solution.dims[Value(table)][0] for table in tables]
    ends.append(found.solution.dims[p.output("logits")][-1])
    groups = []
    for term in dict.fromkeys(ends):
        if not isinstance(term, Atom) or term not in found.names:
            raise FrozenAxis("the rows of the embedding or the logits are not an axis of their own", where=p.name,
                             fix="undo the edit that split or joined them")  # fmt: skip
        group, notes = found[found.names[term]], found.solution.notes[term]
        if other := [f"{p.path(n)} ({p.op(n)}) {why}" for n, why in notes.frozen if n not in lookups]:
            raise FrozenAxis("the vocabulary cannot be resized", where=group.name, got="; ".join(other[:3]))
        groups.append(group)
    return groups


def _refuse_more_than_memory(p: Program, n: int) -> None:
    """Raise OutOfMemory before rows are made that the memory of this machine cannot hold, where it is known."""
    widths = [prod(p.spec(p.operands(u)[0]).sizes[1:]) for u in p.consumers("ids") if traits(p.op(u)).lookup]
    needed = 16 * n * max(widths, default=0)  # made and sampled in float64
    if hasattr(os, "sysconf") and needed > (there := os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")):
        raise OutOfMemory("the resized embedding does not fit in memory", where="n", fix="use fewer ids",
                          expected=f"<= {there // 2**20} MiB", got=f"{needed // 2**20} MiB for {n} ids")  # fmt: skip


def _refuse_dropped_tokens(model: Model, n: int) -> None:
    """Raise TokenizerMismatch if the tokenizer has an id >= `n`, or a text ends with such an id."""
    if n >= (rows := model.vocab):
        return
    tokens = model.tokenizer.size if model.tokenizer is not None else 0
    last = max([tokens - 1, *(i for i in model.eos_ids if i < rows)])
    if last >= n:
        raise TokenizerMismatch("ids that have a token would be removed", where=f"ids {n} to {last}",
                                expected=f">= {last + 1}", got=n, fix="pass drop_tokens=True")  # fmt: skip


def _new_rows(key: str, array: NDArray, maps: Maps, init: NewRows, seed: int) -> np.ndarray:
    """Return values of the new shape for a weight that grows along the one axis of `maps`."""
    if not array.dtype.is_float:
        raise UsageError("rows cannot be added to a quantised weight", where=key,
                         fix="resize the vocabulary before model.quantize()")  # fmt: skip
    ((axis, old),) = maps.items()
    values = np.moveaxis(array.to_numpy("float32" if array.dtype.is_low else None), axis, 0)
    made, new = np.zeros((len(old), *values.shape[1:])), old < 0
    if init != "zero":
        made[new] = values.mean(axis=0, dtype=np.float64)
    if init == "normal":  # by name: a way to draw rows, which is not the op
        shape = made[new].shape
        drawn = normal(prod(shape), seed=seed, stream=stream_of(key)).reshape(shape)
        made[new] += drawn * values.std(axis=0, dtype=np.float64)
    return np.moveaxis(made, 0, axis)
