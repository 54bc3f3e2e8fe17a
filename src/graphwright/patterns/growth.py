"""Patterns of more tokens, and lists in canonical order. `extend` and `compact` are methods of `Pattern`."""

# pyright: reportPrivateUsage=false
# The files of this folder share private attributes of a pattern.
from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..arguments import checked
from ..errors import UsageError
from . import edits, masks, rules
from .errors import NoGenerator, PatternShape
from .masks import Blocks
from .rules import ALL, NONE, Frame, Pairs, Position, Rule, Segments
from .table import FULL, MASKED

if TYPE_CHECKING:
    from .pattern import Pattern

Array = npt.NDArray[Any]


@checked
def extend(self: Pattern, tokens: int | tuple[int, int], segments: Any = None) -> None:
    """Give the pattern more tokens: the generator makes the edges of new rows and keys; other edges stay.

    Edges that were connected, cut or changed manually stay as they are. In a last block that was incomplete, an edge
    allows the new pairs that the generator allows, or those of the base rule if it was connected manually. Costs
    O(new edges + edges of the last row); a causal pattern touches no other row.

    Args:
        tokens: new numbers of (queries, keys); one number n adds n - keys tokens to both.
        segments: document ids of the new tokens, (of queries, of keys) or of both; by default the last ids.
    Raises: NoGenerator if the pattern was not made by a generator, or by one that depends on the number of tokens;
        PatternShape for fewer tokens than now and ids that do not fit; UsageError inside an edit, and for `segments`
        of a pattern that has none.
    """
    queries, keys = (self.frame.queries + tokens - self.frame.keys, tokens) if isinstance(tokens, int) else tokens
    old = self.frame
    if queries < old.queries or keys < old.keys:
        raise PatternShape(
            "a pattern cannot get shorter", expected=f"at least {self.tokens}", got=(queries, keys), fix=None
        )
    if self.rule is None or not rules.extensible(self.rule):
        raise NoGenerator(self.name)
    if (queries, keys) == self.tokens:
        return
    added = _segments(self, queries - old.queries, keys - old.keys, segments)
    with self._transaction(f"extend to {queries} x {keys} tokens", "extend", nested=False):
        before = _Side(self.rule, self.base, old)
        resize(self, (queries, keys), added)  # changes nothing if it raises, so it is noted after
        self._note(
            {"op": np.empty(0, np.uint8), "tokens": ((old.queries, old.keys), (queries, keys)), "segments": added}
        )
        _extend(self, before, _Side(self.rule, self.base, self.frame))


class _Side(NamedTuple):
    rule: Rule
    base: Position
    frame: Frame

    def blocks(self, pairs: Pairs) -> Blocks:
        return masks.of_rule(self.rule, self.base, self.frame, pairs)

    def seen(self, pairs: Pairs, rule: Rule | None = None) -> Array:
        """Return the masks of pairs of blocks, bool [n, block, block]."""
        i, j, exist = self.frame.positions(*pairs)
        return (rule or self.rule).allowed(self.frame, i, j) & exist


def _extend(self: Pattern, before: _Side, after: _Side) -> None:
    old, new = before.frame, after.frame
    first_row, first_column = old.queries // old.block, old.keys // old.block  # the first that get new tokens
    pairs = masks.candidates(after.rule, new, np.arange(first_row, new.rows))
    if first_row and first_column < new.columns and not _future(before, after):
        above = masks.candidates(after.rule, new, np.arange(first_row))
        late = above.k >= first_column
        pairs = Pairs(np.concatenate([above.q[late], pairs.q]), np.concatenate([above.k[late], pairs.k]))
    made = after.blocks(pairs)
    known = (made.q < old.rows) & (made.k < old.columns)
    was = np.zeros(len(made.q), bool)
    was[known] = _allowed(before, Pairs(made.q[known], made.k[known]))
    fresh = made.take(~was)
    changed: list[Array] = []
    for plane in range(self.planes):
        source = self.key_nodes[plane, fresh.k].astype(np.int64)
        target = self.query_nodes[plane, fresh.q].astype(np.int64)
        slots = self._index.find_many(source, target, self._source, self._target)
        absent = slots < 0
        changed.append(_incomplete(self, plane, first_row, first_column, before, after))
        edits.insert(self, source[absent], target[absent], fresh.take(absent))
    _update(self, np.unique(np.concatenate(changed)), before, after)


def _future(before: _Side, after: _Side) -> bool:
    """Return whether the new keys come after all old queries, and the rule is causal."""
    return after.rule.causal and before.frame.keys >= before.frame.q_start + before.frame.queries


def _allowed(side: _Side, pairs: Pairs) -> Array:
    """Return whether the rule allows any pair of tokens of each pair of blocks."""
    found = side.blocks(pairs)
    width = side.frame.columns
    return np.isin(pairs.q * width + pairs.k, found.q * width + found.k)


def _incomplete(self: Pattern, plane: int, row: int, column: int, before: _Side, after: _Side) -> Array:
    """Return the slots of the edges of the last row and the last column whose block was incomplete."""
    found: list[int] = []
    if before.frame.queries % before.frame.block:
        node = self._node_ids[self.query_nodes[plane, row]]
        found += [edge.index for edge in self.graph.in_edges(int(node))]  # pyright: ignore[reportArgumentType]
    if before.frame.keys % before.frame.block and after.frame.keys > before.frame.keys:
        node = self._node_ids[self.key_nodes[plane, column]]
        found += [edge.index for edge in self.graph.out_edges(int(node))]  # pyright: ignore[reportArgumentType]
    return np.array(found, np.int64)


def _update(self: Pattern, slots: Array, before: _Side, after: _Side) -> None:
    """Give edges of blocks that were incomplete the masks of the longer blocks."""
    blocks = self.held(slots)
    pairs = Pairs(blocks.q, blocks.k)
    was, now = (side.rule.cover(side.frame, *pairs) for side in (before, after))
    plain = after.base.cover(after.frame, *pairs)
    stays = (blocks.kind == FULL) & (((was == ALL) & (now == ALL)) | ((was == NONE) & (plain == ALL)))
    slots, blocks = slots[~stays], blocks.take(~stays)
    for part in masks.chunks(len(slots), self.block):
        rows = np.arange(len(slots))[part]
        own = blocks.take(rows)
        pairs = Pairs(own.q, own.k)
        seen = masks.tokens(own, before.base, before.frame)
        generated = after.seen(pairs)
        by_rule = (seen == before.seen(pairs)).all((1, 2))
        grown = generated
        if not by_rule.all():
            manual, was_manual = (
                masks.tokens(edits.manual(side.base, side.frame, *pairs), side.base, side.frame)
                for side in (after, before)
            )
            by_user = (seen == was_manual).all((1, 2)) & ~by_rule
            grown = generated | (manual & by_user[:, None, None])
        old, new = (side.frame.positions(*pairs)[2] for side in (before, after))
        kind, bits = masks.classify(seen | grown & new & ~old, after.base, after.frame, *pairs)
        moved = (kind != own.kind) | (kind == MASKED)
        edits.put_masks(self, slots[rows][moved], kind[moved], bits[moved[kind == MASKED]])


def _segments(self: Pattern, queries: int, keys: int, given: Any) -> tuple[Array, Array] | None:
    """Return the segments of new tokens."""
    segments = self.base.segments or rules.segments(self.rule)
    if segments is None:
        if given is not None:
            raise UsageError("the pattern has no segments to extend", where=self.name or None, got="segments=...")
        return None
    if given is None:
        q, k = np.full(queries, segments.q[-1]), np.full(keys, segments.k[-1])
    else:
        q, k = given if isinstance(given, tuple) else (given, given)
    return rules.document_ids("new queries", q, queries), rules.document_ids("new keys", k, keys)


# -- shape ------------------------------------------------------------------------------------------------------------
def resize(self: Pattern, tokens: tuple[int, int], added: tuple[Array, Array] | None) -> None:
    """Change the numbers of tokens, adding or removing nodes at the end; the nodes that go have no edges."""
    frame = replace(self.frame, queries=tokens[0], keys=tokens[1])
    base = replace(self.base, segments=_resized(self.base.segments, frame, added))
    rule = None if self.rule is None else rules.mapped(self.rule, lambda each: _resized(each, frame, added))
    rows, columns = self.blocks
    if frame.rows < rows or frame.columns < columns:
        last = (self.query_nodes[:, frame.rows : rows], self.key_nodes[:, frame.columns : columns])
        self.graph.remove_nodes(self._node_ids[np.concatenate(last, 1).ravel()[::-1]])
    made = _grown(self, frame, min(rows, frame.rows), min(columns, frame.columns))
    self.frame, self.base, self.rule, (self.query_nodes, self.key_nodes) = frame, base, rule, made
    self._refresh()


def _resized(segments: Segments | None, frame: Frame, added: tuple[Array, Array] | None) -> Segments | None:
    if segments is None:
        return None
    q, k = segments.q, segments.k
    if added is not None:
        q, k = np.concatenate([q, added[0]]), np.concatenate([k, added[1]])
    return Segments(np.ascontiguousarray(q[: frame.queries]), np.ascontiguousarray(k[: frame.keys]))


def add_nodes(self: Pattern) -> None:
    """Add the nodes of all blocks to a pattern without nodes."""
    self.query_nodes, self.key_nodes = _grown(self, self.frame, 0, 0)
    self._refresh()


def _grown(self: Pattern, frame: Frame, have_rows: int, have_columns: int) -> tuple[Array, Array]:
    """Add the nodes of all blocks but the first ones, in each plane those of queries, then those of keys.

    Returns: the node slots of all query blocks and key blocks. If memory is short, nothing has changed.
    """
    rows, columns = frame.rows, frame.columns
    queries, keys = _wider(self.query_nodes, rows), _wider(self.key_nodes, columns)
    numbers = np.concatenate([np.arange(have_rows, rows), np.arange(have_columns, columns)])
    nodes = self.graph.add_nodes(len(numbers) * self.planes, number=np.tile(numbers, self.planes))
    slots = nodes.index.reshape(self.planes, len(numbers))
    queries[:, have_rows:rows] = slots[:, : rows - have_rows]
    keys[:, have_columns:columns] = slots[:, rows - have_rows :]
    return queries, keys


def _wider(nodes: Array, count: int) -> Array:
    if count <= nodes.shape[1]:
        return nodes
    wide = np.zeros((len(nodes), max(count, nodes.shape[1] * 3 // 2)), np.int32)
    wide[:, : nodes.shape[1]] = nodes
    return wide


# -- order ------------------------------------------------------------------------------------------------------------
def compact(self: Pattern) -> None:
    """Sort the edges of every query block by key block, and those of every key block by query block.

    Patterns with equal edges then compute equal bits, whatever their history. Handles stay. O(E log E).

    Raises: UsageError inside an edit.
    """
    with self._transaction("compact", nested=False):
        before = self.graph.sort_lists(self._numbers[self._target], self._numbers[self._source])
        self._note({"op": np.empty(0, np.uint8), "lists": (before, self.graph.save_lists())})
