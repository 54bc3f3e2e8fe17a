"""Errors of patterns; each derives from a root error of the package and has its details as attributes."""

from __future__ import annotations

from graphwright.graph import EdgeId

from ..errors import ShapeError, UsageError


class BlockRange(UsageError, IndexError):
    """The number of a query block or a key block is outside the pattern; `side` is "query", "key" or "plane"."""

    def __init__(self, side: str, index: int, count: int) -> None:
        what = f"the {side} block is outside the pattern" if side != "plane" else "the plane is outside the pattern"
        super().__init__(what, expected=f"0 <= {side} < {count}", got=index,
                         fix="pattern.extend(tokens) adds blocks" if side != "plane" else None)  # fmt: skip
        self.side, self.index, self.count = side, index, count


class EdgeExists(UsageError):
    """The two blocks are already connected, by `edge`."""

    def __init__(self, edge: EdgeId | None, query: int, key: int, plane: int = 0) -> None:
        where = f"query block {query}, key block {key}, plane {plane}"
        what = "the blocks are already connected" if edge is not None else "the blocks are to be connected twice"
        super().__init__(what, where=where, got=None if edge is None else repr(edge), fix="pattern.has(query, key)")
        self.edge, self.query, self.key, self.plane = edge, query, key, plane


class CausalityViolation(UsageError):
    """Every key of the key block comes after every query of the query block, and the pattern is causal."""

    def __init__(self, query: int, key: int) -> None:
        super().__init__(
            "the key block is in the future of the query block", where=f"query block {query}, key block {key}",
            expected="a key block that begins no later than the query block ends", fix="Pattern(causal=False)",
        )  # fmt: skip
        self.query, self.key = query, key


class PatternShape(ShapeError):
    """Queries or keys have another length than the pattern, or two patterns have different shapes."""

    def __init__(self, what: str, *, expected: object, got: object, fix: str | None = "pattern.extend(tokens)") -> None:
        super().__init__(what, expected=expected, got=got, fix=fix)


class HeadMismatch(ShapeError):
    """The number of planes fits neither the query heads nor the key/value heads."""

    def __init__(self, heads: int, kv_heads: int, planes: int) -> None:
        expected = f"1 plane, {kv_heads} (one per key/value head) or {heads} (one per query head)"
        super().__init__("the planes of the pattern do not fit the heads", expected=expected, got=f"{planes} planes")
        self.heads, self.kv_heads, self.planes = heads, kv_heads, planes


class GateNotAllowed(UsageError):
    """A gate cannot multiply exponentials, because it is negative or, for a gate of this `kind`, may be."""

    def __init__(self, kind: str = "", *, value: float | None = None) -> None:
        got = f"gates of kind {kind!r}" if value is None else f"a gate of {value:g}"
        super().__init__("a signed gate cannot be inside the softmax", got=got,
                         expected="gates >= 0", fix='where="weight"')  # fmt: skip
        self.kind = kind


class NoGenerator(UsageError):
    """A pattern without a generator cannot make the edges of new tokens."""

    def __init__(self, name: str) -> None:
        super().__init__("the pattern has no generator that gives the edges of new tokens", where=name or None,
                         fix="start from a generator, such as sliding_window, and edit its pattern")  # fmt: skip


class BlockSize(UsageError):
    """The block size is not supported here; `nearest` is one that is."""

    def __init__(self, block: int, nearest: int, expected: str) -> None:
        super().__init__("the block size is not supported", expected=expected, got=block, fix=f"block={nearest}")
        self.block, self.nearest = block, nearest


class MaskLost(UsageError):
    """A mask function cannot be tabulated exactly without evaluating it for every pair of tokens."""

    def __init__(self, what: str, *, where: object = None) -> None:
        super().__init__(what, where=where, fix="materialize=True evaluates the mask for every pair of partial blocks")


class PatternFileError(UsageError):
    """The arrays of a saved pattern are malformed or contradict each other."""
