"""Patterns from and to masks: dense, functions of positions, block masks of FlexAttention. Methods of `Pattern`.

torch is imported only by `to_flex`, and used by `from_flex` through the tensors that it is given.
"""

# pyright: reportPrivateUsage=false
# The files of this folder share private attributes of a pattern.
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import ShapeError, UsageError, shown
from . import edits, masks
from .errors import MaskLost, PatternShape
from .masks import Blocks
from .table import FULL

if TYPE_CHECKING:
    from .pattern import Pattern

Array = npt.NDArray[Any]
MaskFunction = Callable[[Any, Any, Any, Any], Any]


def from_dense(
    cls: type[Pattern], mask: Any, block: int = 64, *, causal: bool | None = None, q_start: int | None = None,
    **options: Any,
) -> Pattern:  # fmt: skip
    """Return the pattern that allows exactly the pairs of a mask.

    Args:
        mask: bool [queries, keys] or [planes, queries, keys].
        causal: by default, whether no query sees a later key.
        options: as for `Pattern`.
    Raises: ShapeError; CausalityViolation never: with `causal=True` a mask with later keys is a UsageError.
    """
    dense = np.asarray(mask)
    dense = dense[None] if dense.ndim == 2 else dense
    if dense.ndim != 3 or dense.dtype != bool:
        got = f"{dense.dtype} of shape {np.shape(mask)}"
        raise ShapeError("not a dense mask", expected="bool [queries, keys] or [planes, queries, keys]", got=got)
    planes, queries, keys = dense.shape
    start = keys - queries if q_start is None else q_start
    future = np.arange(keys) > start + np.arange(queries)[:, None]
    late = bool((dense & future).any())
    if causal and late:
        raise UsageError("the mask lets a query see a later key", expected="causal=False")
    made = cls((queries, keys), block, planes, not late if causal is None else causal, q_start, **options)
    rows, columns = made.blocks
    padded = np.zeros((planes, rows * block, columns * block), bool)
    padded[:, :queries, :keys] = dense
    tiles = padded.reshape(planes, rows, block, columns, block).swapaxes(2, 3)
    p, q, k = np.nonzero(tiles.any((3, 4)))
    for part in masks.chunks(len(q), block):
        _insert(made, p[part], q[part], k[part], tiles[p[part], q[part], k[part]])
    return made


def from_mask_fn(
    cls: type[Pattern], fn: MaskFunction, tokens: int | tuple[int, int], block: int = 64, planes: int = 1,
    causal: bool = False, **options: Any,
) -> Pattern:  # fmt: skip
    """Return the pattern that allows the pairs for which `fn(batch, head, query, key)` is true.

    Args:
        fn: as FlexAttention's mask_mod; called with integer arrays that broadcast: batch 0, the plane as head, indices
            of queries and of keys (counted from 0 both). It returns a bool array.
        causal: whether the pattern is causal: pairs with a later key are dropped.
    """
    made = cls(tokens, block, planes, causal, **options)
    rows, columns = made.blocks
    for plane in range(planes):
        k = np.arange(columns)
        step = max(masks.CHUNK // (block**2 * columns), 1)
        for first in range(0, rows, step):
            q = np.arange(first, min(first + step, rows))
            _evaluate(made, fn, plane, np.repeat(q, columns), np.tile(k, len(q)))
    return made


def _evaluate(made: Pattern, fn: MaskFunction, plane: int, q: Array, k: Array, tensor: Any = None) -> None:
    """Add the edges of blocks, of which `fn` tells the pairs; its arguments are made by `tensor`."""
    for part in masks.chunks(len(q), made.block):
        i, j, exist = made.frame.positions(q[part], k[part])
        rows = i - made.q_start
        if tensor is None:
            seen = np.asarray(fn(np.int64(0), np.int64(plane), rows, j))
        else:
            seen = np.asarray(fn(tensor(0), tensor(plane), tensor(rows), tensor(j)))
        seen = np.broadcast_to(seen.astype(bool), exist.shape) & exist
        if made.causal:
            seen = seen & (j <= i)
        _insert(made, np.full(len(seen), plane), q[part], k[part], seen)


def _insert(made: Pattern, plane: Array, q: Array, k: Array, seen: Array) -> None:
    """Add edges with the masks `seen`, without those that allow no pair."""
    some = seen.any((1, 2))
    q, k, plane, seen = q[some], k[some], plane[some], seen[some]
    kind, bits = masks.classify(seen, made.base, made.frame, q, k)
    source = made.key_nodes[plane, k].astype(np.int64)
    target = made.query_nodes[plane, q].astype(np.int64)
    edits.insert(made, source, target, Blocks(q, k, kind, bits))


def from_flex(
    cls: type[Pattern], block_mask: Any, *, causal: bool = False, materialize: bool = False, **options: Any
) -> Pattern:
    """Return the pattern of a FlexAttention BlockMask; its heads become planes.

    Args:
        block_mask: of batch size 1, with equal block sizes of queries and keys.
        causal: whether the pattern is causal; it must then not allow later keys.
        materialize: call the mask_mod with one pair of scalars at a time, for functions that take no arrays.
        options: as for `Pattern`, but for tokens and planes.
    Raises: MaskLost if the mask_mod fails for arrays; PatternShape for another batch size or unequal block sizes.
    """
    if not hasattr(block_mask, "BLOCK_SIZE"):
        raise UsageError("not a block mask of FlexAttention", where="block_mask", got=shown(block_mask))
    sizes, lengths = tuple(block_mask.BLOCK_SIZE), tuple(block_mask.seq_lengths)
    batch, heads = block_mask.kv_num_blocks.shape[:2]
    if batch != 1 or sizes[0] != sizes[1]:
        raise PatternShape("the block mask does not fit a pattern", expected="batch size 1 and square blocks",
                           got=f"batch size {batch}, blocks {sizes}", fix=None)  # fmt: skip
    made = cls(lengths, sizes[0], heads, causal, **options)
    counts, indices = block_mask.kv_num_blocks, block_mask.kv_indices

    def tensor(values: Any) -> Any:
        return indices.new_tensor(values, dtype=indices.dtype)

    fn = _one_by_one(block_mask.mask_mod) if materialize else block_mask.mask_mod
    rows = made.blocks[0]
    for plane in range(heads):
        if block_mask.full_kv_num_blocks is not None:
            q, k = _listed(block_mask.full_kv_num_blocks[0, plane], block_mask.full_kv_indices[0, plane], rows)
            _insert(made, np.full(len(q), plane), q, k, made.frame.positions(q, k)[2])
        q, k = _listed(counts[0, plane], indices[0, plane], rows)
        try:
            _evaluate(made, fn, plane, q, k, tensor)
        except Exception as error:  # whatever a function of the caller raises
            if materialize:
                raise
            raise MaskLost(f"the mask_mod cannot be called with arrays: {error}", where=f"head {plane}") from error
    return made


def _one_by_one(fn: MaskFunction) -> MaskFunction:
    def each(batch: Any, head: Any, query: Any, key: Any) -> Any:
        q, k = np.broadcast_arrays(np.asarray(query), np.asarray(key))
        pairs = zip(q.ravel().tolist(), k.ravel().tolist(), strict=True)
        new = query.new_tensor
        return np.array([bool(fn(batch, head, new(i), new(j))) for i, j in pairs]).reshape(q.shape)

    return each


def _listed(counts: Any, indices: Any, rows: int) -> tuple[Array, Array]:
    """Return the pairs of blocks that counts [rows] and indices [rows, columns] list."""
    number, listed = np.asarray(counts.cpu())[:rows], np.asarray(indices.cpu())[:rows]
    chosen = np.arange(listed.shape[1]) < number[:, None]
    return np.nonzero(chosen)[0], listed[chosen].astype(np.int64)


def to_flex(self: Pattern, device: str = "cpu") -> Any:
    """Return a FlexAttention BlockMask that allows the same pairs; its heads are the planes.

    FULL edges are its full blocks; the masks of all others are tabulated, one bool per pair of tokens. Its mask_mod
    alone gives the same pairs, as FlexAttention needs without torch.compile. Imports torch.
    """
    import torch
    from torch.nn.attention.flex_attention import BlockMask

    (rows, columns), block = self.blocks, self.block
    slots = self.edges().index
    blocks, (plane, q, k) = self.held(slots), self.pairs().T
    full = blocks.kind == FULL
    partial = blocks.take(~full)
    table = np.zeros((self.planes, rows, columns), np.int64)  # 0: no pair, 1: all pairs, then masks
    table[plane, q, k] = np.where(full, 1, np.cumsum(~full) + 1)
    constant = np.stack([np.zeros((block, block), bool), np.ones((block, block), bool)])
    seen = np.concatenate([constant, masks.tokens(partial, self.base, self.frame)])
    seen = torch.from_numpy(seen).to(device)
    where = torch.from_numpy(table).to(device)
    planes = self.planes

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        own = where[h if planes > 1 else 0, q_idx // block, kv_idx // block]
        return seen[own, q_idx % block, kv_idx % block]

    lists: list[Any] = []
    for chosen in (~full, full):
        dense = np.zeros((planes, rows, columns), bool)
        dense[plane[chosen], q[chosen], k[chosen]] = True
        order = np.argsort(~dense, axis=-1, kind="stable").astype(np.int32)
        lists += [torch.from_numpy(each)[None].to(device) for each in (dense.sum(-1, dtype=np.int32), order)]
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=block, mask_mod=mask_mod, seq_lengths=self.tokens)
