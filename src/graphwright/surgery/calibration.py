"""Calibration data: windows that say what a model does, streamed once through the running program.

What is measured on is held out: no held-out window is one of those that an operation learned from, by hash.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.errors import UsageError
from graphwright.models.generation.text import check_ids, vocabulary
from graphwright.program.kinds import INPUT
from graphwright.program.run import run

if TYPE_CHECKING:
    from graphwright.array import NDArray
    from graphwright.graph import NodeId
    from graphwright.models.model import Model
    from graphwright.program import Program, Value

ROWS = 2048
"""Rows (tokens, samples) that run at once, and whose float32 products are summed before they go into float64."""


class MissingCalibration(UsageError):
    """A method needs calibration data and has none."""


class CalibrationTooSmall(UsageError):
    """Fewer rows than a fit has unknowns."""


class CalibrationLeak(UsageError):
    """Windows to measure on are among those that were learned from."""


class Calibration:
    """Windows of data: some to learn from, others to measure on.

    Args:
        source: token ids [N], cut into windows; windows [n, T]; a text, which needs a `tokenizer`; or for programs of
            other inputs a mapping of arrays by input name, the first dimension samples.
        max_tokens: rows to learn from at most: tokens, or samples of a mapping.
        context: tokens per window, of ids that are not windows yet.
        seed: which windows; they are drawn without replacement.
        held_out: source of windows to measure on; by default a quarter of the windows, at most half of `max_tokens`.
        tokenizer: what turns text into ids.

    Attributes:
        windows, held: arrays by input name, the first dimension windows.
        tokens: rows that are learned from.
    Raises: UsageError for an empty source; CalibrationLeak for held-out windows that are learned from.
    """

    def __init__(
        self,
        source: Any,
        max_tokens: int = 8192,
        context: int = 512,
        seed: int = 0,
        *,
        held_out: Any = None,
        tokenizer: Any = None,
    ) -> None:
        if max_tokens < 1 or context < 1:
            raise UsageError("calibration needs tokens", expected="max_tokens and context from 1 up",
                             got=(max_tokens, context))  # fmt: skip
        found, width = _windows(source, context, tokenizer)
        order = np.random.default_rng(seed).permutation(_count(found))
        most = max(max_tokens // width, 1)
        if held_out is None:
            spare = min(len(order) // 4, max(most // 2, 1))
            self.held = _take(found, order[len(order) - spare :])
            order = order[: len(order) - spare]
        else:
            self.held = _take(*_drawn(_windows(held_out, context, tokenizer)[0], max(most // 2, 1), seed))
        self.windows = _take(found, np.sort(order[:most]))
        self.width, self.seed = width, seed
        seen = set(digests(self.windows))
        if held_out is None:  # a window that repeats one that is learned from measures nothing
            fresh = [i for i, d in enumerate(digests(self.held)) if d not in seen]
            self.held = _take(self.held, np.asarray(fresh, np.int64))
        self.check_held_out(self.held)
        self._kept: tuple[Any, Any] | None = None

    @staticmethod
    def of(model: Model, text: str | None = None, **options: Any) -> Calibration:
        """Calibration of a model on a text, or on the bundled one: its training half, measured on the held-out half.

        Raises: UsageError for a model without a tokenizer.
        """
        from graphwright.models.bundled import pydoc_split
        from graphwright.models.tokenizer import need_tokenizer

        tokenizer = need_tokenizer(model)
        if text is not None:
            return Calibration(text, tokenizer=tokenizer, **options)
        learned, held = pydoc_split()
        return Calibration(learned, **{"held_out": held, **options}, tokenizer=tokenizer)

    @property
    def tokens(self) -> int:
        """Rows that are learned from."""
        return _count(self.windows) * self.width

    def check_held_out(self, windows: Mapping[str, np.ndarray]) -> None:
        """Raises: CalibrationLeak if one of the windows is learned from."""
        seen = set(digests(self.windows))
        leaked = [i for i, d in enumerate(digests(windows)) if d in seen]
        if leaked:
            raise CalibrationLeak(
                "held-out windows are among those that are learned from",
                expected="windows of other data",
                got=f"{len(leaked)} of {_count(windows)}, the first one number {leaked[0]}",
                fix="Calibration(..., held_out=other_tokens)",
            )

    def feeds(self, p: Program, held: bool = False) -> list[dict[str, np.ndarray]]:
        """Inputs of a program in chunks of about 2048 rows; positions are counted where the program takes them.

        Raises: PromptError for a token outside the vocabulary, with its place; UsageError without held-out windows.
        """
        windows, per = (self.held if held else self.windows), max(ROWS // self.width, 1)
        if not _count(windows):
            raise UsageError("no window is held out", expected="at least four windows, or held_out=")
        if "ids" in windows:
            windows = {**windows, "ids": check_ids(windows["ids"], vocabulary(p))}
            if "positions" in p.input_names() and "positions" not in windows:
                ids = windows["ids"]
                windows["positions"] = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        return [{name: np.ascontiguousarray(a[i : i + per]) for name, a in windows.items()}
                for i in range(0, _count(windows), per)]  # fmt: skip

    def kept(self, key: Any, make: Any) -> Any:
        """The value made for a key the last time, if it was the same: one layer's statistics stay, no more."""
        if self._kept is None or self._kept[0] != key:
            self._kept = None  # let go of one before the next is made
            self._kept = key, make()
        return self._kept[1]

    def to_json(self) -> dict[str, Any]:
        """What stands in reports: sizes, seed and the hashes of both sides."""
        return {
            "tokens": self.tokens,
            "context": self.width,
            "seed": self.seed,
            "windows": _one(self.windows),
            "held_out_tokens": _count(self.held) * self.width,
            "held_out": _one(self.held),
        }

    def __repr__(self) -> str:
        return f"Calibration({self.tokens} tokens in windows of {self.width}, {_count(self.held)} windows held out)"


class Stream:
    """A program's run on calibration data, layer by layer: only what later layers read is kept between two of them.

    The program may be edited behind where the stream stands, which is how a layer is pruned on what the layers before
    it, pruned already, give.
    """

    def __init__(self, p: Program, feeds: Sequence[Mapping[str, np.ndarray]]) -> None:
        self.p, self.feeds = p, feeds
        self.live: list[dict[Value, NDArray]] = [{} for _ in feeds]

    def advance(self, node: NodeId) -> None:
        """Compute everything that comes before a node in topological order, and keep what is read behind it."""
        p, moved = self.p, moving(self.p)
        order = [n for n in p.order() if n in moved]
        if node not in moved:
            raise UsageError("no input reaches this node", where=p.path(node))
        before = set(order[: order.index(node)])
        needed = p.reachable(p.outputs())
        wanted = list(dict.fromkeys(
            p.edge_value(e) for n in order if n not in before and n in needed
            for e in p.in_edges(n) if p.edge_value(e).node in before and p.op(p.edge_value(e).node) != INPUT
        ))  # fmt: skip
        for i, values in enumerate(self.read(wanted)):
            self.live[i] = {v: values[v] for v in wanted}

    def read(self, values: Sequence[Value]) -> Iterator[dict[Value, NDArray]]:
        """The values of each chunk in turn, computed from where the stream stands."""
        for feeds, live in zip(self.feeds, self.live, strict=True):
            yield run(self.p, feeds, keep=list(values), given=live, whole=False).values if values else {}

    def outputs(self, name: str | None = None) -> Iterator[np.ndarray]:
        """An output of each chunk, as `host` gives it; the first one by default."""
        value = self.p.output(name or self.p.output_names()[0])
        return (host(chunk[value]) for chunk in self.read([value]))


def host(array: NDArray) -> np.ndarray:
    """An array as float32, or float64 where it was computed so."""
    return array.to_numpy("float64" if array.dtype.name == "float64" else "float32")


def moving(p: Program) -> set[NodeId]:
    """Nodes whose value depends on an input; the others are weights and what is made of them alone."""
    known = p.derived.get("moving")
    if known is not None and known[0] == p.version and p.history.open is None:
        return known[1]
    found: set[NodeId] = set()
    for node in p.order():
        if p.op(node) == INPUT or any(v.node in found for v in p.operands(node)):
            found.add(node)
    if p.history.open is None:
        p.derived["moving"] = (p.version, found)
    return found


def digests(windows: Mapping[str, np.ndarray]) -> list[str]:
    """sha256 of each window."""
    columns = [np.ascontiguousarray(windows[name]) for name in sorted(windows)]
    return [sha256(b"".join(c[i].tobytes() for c in columns)).hexdigest() for i in range(_count(windows))]


def _windows(source: Any, context: int, tokenizer: Any) -> tuple[dict[str, np.ndarray], int]:
    """Arrays by input name, and rows per window."""
    if isinstance(source, Mapping):
        found = {str(name): np.asarray(a) for name, a in source.items()}
        if len({len(a) for a in found.values()}) != 1 or not _count(found):
            raise UsageError("samples for every input, equally many", got={n: a.shape for n, a in found.items()})
        return found, 1
    if isinstance(source, str):
        if tokenizer is None:
            raise UsageError("a text needs a tokenizer", fix="Calibration.of(model, text)")
        source = tokenizer.encode(source)
    ids = np.asarray(source)
    if ids.ndim == 1 and len(ids):
        width = min(context, len(ids))
        ids = ids[: len(ids) // width * width].reshape(-1, width)
    if ids.ndim != 2 or not ids.size or ids.dtype.kind not in "iu":
        raise UsageError("calibration needs token ids [N] or windows of them [n, T]", got=f"{ids.dtype} {ids.shape}")
    return {"ids": np.ascontiguousarray(ids, np.int64)}, ids.shape[1]


def _drawn(found: dict[str, np.ndarray], most: int, seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    order = np.random.default_rng(seed).permutation(_count(found))
    return found, np.sort(order[:most])


def _take(found: Mapping[str, np.ndarray], rows: np.ndarray) -> dict[str, np.ndarray]:
    return {name: a[rows] for name, a in found.items()}


def _count(windows: Mapping[str, np.ndarray]) -> int:
    return len(next(iter(windows.values())))


def _one(windows: Mapping[str, np.ndarray]) -> str:
    return sha256("".join(digests(windows)).encode()).hexdigest()
