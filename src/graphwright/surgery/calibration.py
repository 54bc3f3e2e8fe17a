"""Calibration data: windows of inputs on which a program runs to score, fit and measure it.

Scores and fits use the learning windows; measurements use the held-out windows. Hashes ensure that no held-out window
is also a learning window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import finalize

import numpy as np

from graphwright.arguments import checked
from graphwright.array import NDArray
from graphwright.autograd import Tensor
from graphwright.errors import UsageError
from graphwright.graph import NodeId
from graphwright.models.generation.text import IDS, check_ids, token_rows, vocabulary, with_mask
from graphwright.models.tokenizer import need_tokenizer
from graphwright.program.derived.rewrite import part_for
from graphwright.program.kinds import INPUT
from graphwright.program.op_graph import OpGraph
from graphwright.program.run import run_nodes
from graphwright.surgery.spread import spread
from graphwright.workers import Pool, Workers, pool_of

if TYPE_CHECKING:
    from graphwright.models.model import Model
    from graphwright.program.op_graph import Value
    from graphwright.program.program import Program

R = TypeVar("R")
ROWS = 2048
"""Rows (tokens, samples) per run; float32 products of so many rows are summed before they are added in float64."""
ENTRIES = 2**20
"""Largest number of entries of all inputs per run, e.g. six images of 3 x 224 x 224."""


class MissingCalibration(UsageError):
    """A method needs calibration data and got none, or needs the program to score next tokens."""


class CalibrationTooSmall(UsageError):
    """There are fewer rows of calibration data than a least-squares fit has unknowns."""


class CalibrationLeak(UsageError):
    """Some held-out windows are also learning windows."""


@checked
class Calibration:
    """Windows of data: some to learn from, others to measure on.

    Args:
        source: token ids [N], which are cut into windows; windows [n, T]; a text, a list of texts or of rows of
            different lengths, which are joined and cut, where texts need a `tokenizer`; or, for programs with other
            inputs, arrays by input name whose first dimension counts samples, or a list of such batches, which are
            joined.
        max_tokens: largest number of tokens to learn from (of samples, if `source` is arrays by input name).
        context: tokens per window, where `source` is a text or ids [N].
        seed: seed of the random choice of windows, which draws without replacement.
        held_out: source of the windows to measure on; by default a quarter of the windows of `source`, at most half of
            `max_tokens`.
        tokenizer: converts text to ids.
        workers: workers that run programs on chunks of the data: a number of processes, which end with this object,
            "ray" or "ray://host:port", or a pool of `graphwright.workers`. Results do not depend on it. None for no
            workers.

    Attributes:
        windows, held: arrays by input name of the learning and of the held-out windows; dimension 0 counts windows.
        tokens: number of tokens (or samples) to learn from.
        pool: the workers, or None.
    Raises: UsageError for an invalid or empty source; CalibrationLeak if a window of `held_out` is a learning window.
    """

    def __init__(
        self, source: Any, max_tokens: int = 8192, context: int = 512, seed: int = 0, *, held_out: Any = None,
        tokenizer: Any = None, workers: Workers = None,
    ) -> None:  # fmt: skip
        for name, given in (("max_tokens", max_tokens), ("context", context)):
            if given < 1:
                raise UsageError(f"{name} is too small", where=name, expected=">= 1", got=given)
        found, width = windows_of(source, context, tokenizer)
        order = np.random.default_rng(seed).permutation(_count(found))
        most = max(max_tokens // width, 1)
        if held_out is None:
            spare = min(len(order) // 4, max(most // 2, 1))
            self.held = _take(found, order[len(order) - spare :])
            order = order[: len(order) - spare]
        else:
            other = windows_of(held_out, context, tokenizer)[0]
            drawn = np.random.default_rng(seed).permutation(_count(other))[: max(most // 2, 1)]
            self.held = _take(other, np.sort(drawn))
        self.windows = _take(found, np.sort(order[:most]))
        self.width, self.seed = width, seed
        if held_out is None:  # a held-out window that repeats a learned one would measure nothing
            fresh = np.setdiff1d(np.arange(_count(self.held)), self._leaked(self.held))
            self.held = _take(self.held, fresh)
        self.check_held_out(self.held)
        self._cached: tuple[Any, Any] | None = None
        self.pool = None if workers is None else pool_of(workers)
        if self.pool is not None and self.pool is not workers:
            finalize(self, self.pool.close)

    @staticmethod
    def of(
        model: Model, text: Any = None, max_tokens: int = 8192, context: int = 512, seed: int = 0, *,
        held_out: Any = None, workers: Workers = None,
    ) -> Calibration:  # fmt: skip
        """Build calibration data from any `source`; by default from the bundled text, whose second half is held out.

        Values (images, say) without a name are those of the model's only input.
        Raises: MissingCalibration without data for a model of other inputs than texts; UsageError for a text, the
            bundled one included, and a model without a tokenizer, and for values without a name if there are several
            inputs.
        """
        from graphwright.models.bundled import pydoc_split

        p = model.program
        if text is None and not {"ids", IDS} & {*p.input_names()}:
            inputs = ", ".join(f"{name!r}: array {p.spec(name)}" for name in p.input_names())
            raise MissingCalibration("a model of other inputs than texts needs its own calibration data", where=p.name,
                                     fix=f"pass calibration={{{inputs}}}")  # fmt: skip
        text, held_out = named(p, text), named(p, held_out)
        if text is None or isinstance(text, str):
            need_tokenizer(model)
        if text is None:
            text, held = pydoc_split()
            held_out = held if held_out is None else held_out
        return Calibration(text, max_tokens, context, seed, held_out=held_out, tokenizer=model.tokenizer,
                           workers=workers)  # fmt: skip

    @property
    def tokens(self) -> int:
        """Number of tokens (or samples) to learn from."""
        return _count(self.windows) * self.width

    def check_held_out(self, windows: Mapping[str, np.ndarray]) -> None:
        """Raise CalibrationLeak if one of the given windows (arrays by input name) is also a learning window."""
        if leaked := self._leaked(windows):
            raise CalibrationLeak(
                "some held-out windows are also learning windows", fix="pass other data as held_out=...",
                got=f"{len(leaked)} of {_count(windows)}, first index {leaked[0]}", expected="no common window",
            )  # fmt: skip

    def _leaked(self, windows: Mapping[str, np.ndarray]) -> list[int]:
        """Return the indices of those windows (arrays by input name) that are also learning windows."""
        seen = set(digests(self.windows))
        return [i for i, d in enumerate(digests(windows)) if d in seen]

    def feeds(self, p: Program, held: bool = False) -> list[dict[str, np.ndarray]]:
        """Return the learning windows, or with `held` the held-out ones, in chunks of about 2048 tokens.

        Token positions, and an attention mask of ones, are added if the program has these inputs. If the program has a
        fixed batch size, each chunk has this size, and the rest is left out.
        Raises: PromptError for a token outside the vocabulary; UsageError if `held` is True and no window is held out,
            or if the windows are fewer than a fixed batch.
        """
        windows = self.held if held else self.windows
        if not _count(windows):
            raise UsageError("the calibration data have no held-out windows", expected="four different windows or more",
                             got=f"{_count(self.windows)} learning windows", fix="pass held_out=...")  # fmt: skip
        for name in ("ids", IDS):
            if name in windows:
                windows = {**windows, name: check_ids(windows[name], vocabulary(p))}
        fixed = fixed_batch(p)
        if fixed is not None and _count(windows) < fixed:
            raise UsageError("there are fewer windows than the fixed batch size of the program", where=p.name,
                             expected=f"{fixed} windows or more", got=f"{_count(windows)} windows",
                             fix="pass more data, or sizes= with a name for the batch to from_torch")  # fmt: skip
        chunks = chunked(p, windows, fixed or _chunk(windows))
        return chunks[: _count(windows) // fixed] if fixed else chunks

    def stream(self, p: Program, held: bool = False) -> Stream:
        """Return a run of a program on the learning windows, or with `held` on the held-out ones; see `feeds`."""
        return Stream(p, self.feeds(p, held), self.pool)

    def cached(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the cached value of a key, or call `make` and cache its result; only the latest key stays cached."""
        if self._cached is None or self._cached[0] != key:
            self._cached = None  # free the old value before the new one is made
            self._cached = key, make()
        return self._cached[1]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict of sizes, seed, and hashes of the learning and the held-out windows."""
        return {"tokens": self.tokens, "context": self.width, "seed": self.seed, "windows": _hash(self.windows),
                "held_out_tokens": _count(self.held) * self.width, "held_out": _hash(self.held)}  # fmt: skip

    def __repr__(self) -> str:
        return f"Calibration({self.tokens} tokens in windows of {self.width}, {_count(self.held)} windows held out)"


CalibrationSource = Calibration | str | Sequence[Any] | np.ndarray | NDArray | Tensor | Mapping[str, Any]
"""Calibration data, or a source to make them from."""


def calibration_of(program: Program | Model, source: CalibrationSource | None) -> Calibration | None:
    """Return calibration data or None unchanged; make data from another source, with the tokenizer of a model."""
    if source is None or isinstance(source, Calibration):
        return source
    p = program if isinstance(program, OpGraph) else program.program
    return Calibration(named(p, source), tokenizer=getattr(program, "tokenizer", None))


def named(p: Program, source: Any) -> Any:
    """Return values without a name as a dict by the name of the only input; return any other source as it is.

    Texts, token ids and dicts need no name. A list of arrays is a list of batches, or of samples without a batch
    dimension.
    Raises: UsageError if the program has several inputs.
    """
    if source is None or "ids" in p.input_names() or IDS in p.input_names() or _by_name(source):
        return source
    if isinstance(source, str) or (isinstance(source, Sequence) and any(isinstance(each, str) for each in source)):
        raise UsageError("the program does not read texts", where=p.name, got="a text",
                         expected=", ".join(p.input_names()), fix="pass arrays by input name")  # fmt: skip
    if len(p.input_names()) != 1:
        raise UsageError("the program has several inputs", where=p.name, expected=", ".join(p.input_names()),
                         got="values without a name", fix="pass arrays by input name")  # fmt: skip
    (name,) = p.input_names()
    first = numbers(source[0], name) if isinstance(source, Sequence) and source else None
    if first is not None and first.ndim == len(p.spec(name).shape):
        return [{name: batch} for batch in source]
    return {name: source}


def fixed_batch(p: Program) -> int | None:
    """Return the first dimension of the inputs if it is one number, the same of all inputs; else None."""
    sizes = {p.spec(n).shape[0] for n in p.inputs() if p.spec(n).shape}
    (size,) = sizes if len(sizes) == 1 else (None,)
    return size if isinstance(size, int) else None


class Stream:
    """A run of a program on calibration data, node by node; only values that later nodes read stay in memory.

    Nodes that are not computed yet may be edited while the stream advances. Each layer can thus be pruned with the
    outputs of the earlier, already pruned layers as its inputs. Workers get the nodes of a read with their weights, and
    the values of a chunk that these nodes read; all values stay in this process.

    Args:
        p: the program.
        feeds: chunks of data, arrays by input name.
        pool: the workers that run the program, each on a chunk at a time; None if this process does.
    """

    def __init__(self, p: Program, feeds: Sequence[Mapping[str, np.ndarray]], pool: Pool | None = None) -> None:
        self.p, self.feeds, self.pool = p, feeds, pool
        self.live: list[dict[Value, NDArray]] = [{} for _ in feeds]

    def of(self, p: Program) -> Stream:
        """Return a run of a program on the same data, from the beginning."""
        return Stream(p, self.feeds, self.pool)

    def advance(self, node: NodeId) -> Stream:
        """Compute all nodes before `node` in topological order; retain the values that `node` and later nodes read."""
        p, moving = self.p, input_dependent(self.p)
        order = [n for n in p.order() if n in moving]
        if node not in moving:
            raise UsageError("the node depends on no input, so calibration data do not reach it", where=p.path(node))
        before = set(order[: order.index(node)])
        needed = p.reachable(p.outputs())
        wanted = list(dict.fromkeys(
            p.edge_value(e) for n in order if n not in before and n in needed
            for e in p.in_edges(n) if p.edge_value(e).node in before and p.op(p.edge_value(e).node) != INPUT
        ))  # fmt: skip
        for i, values in enumerate(self.read(wanted)):
            self.live[i] = {v: values[v] for v in wanted}
        return self

    def read(self, values: Sequence[Value]) -> Iterator[dict[Value, NDArray]]:
        """Yield a dict of the requested values for each chunk of data, computed from where `advance` stopped."""
        return (dict(zip(values, found, strict=True)) for found in self.each(_arrays, values))

    def each(
        self, function: Callable[[Mapping[str, np.ndarray], Sequence[NDArray]], R], values: Sequence[Value]
    ) -> Iterator[R]:
        """Yield `function(inputs, arrays of values)` for each chunk of data, computed from where `advance` stopped.

        Args:
            function: at the top level of a module, as workers call it, too; a sum over all chunks is thus added up in
                the order of chunks, from one number or array per chunk.
        """
        if not values:
            yield from (function(feeds, []) for feeds in self.feeds)
        elif self.pool is None or len(self.feeds) < 2:
            for feeds, live in zip(self.feeds, self.live, strict=True):
                found = run_nodes(self.p, feeds, keep=list(values), given=live, whole=False).values
                yield function(feeds, [found[v] for v in values])
        else:
            p, names = part_for(self.p, values, self.live[0])
            given = [{name: live[v] for v, name in names.items()} for live in self.live]
            yield from spread(self.pool, _of_chunk, list(zip(self.feeds, given, strict=True)), (p, function))

    def outputs(self, name: str | None = None) -> Iterator[np.ndarray]:
        """Yield one output of the program (by default the first) for each chunk of data, converted by `as_float`."""
        return self.each(_float, [self.p.output(name or self.p.output_names()[0])])


def _of_chunk(
    shared: tuple[Program, Callable[[Mapping[str, np.ndarray], Sequence[NDArray]], R]],
    chunk: tuple[Mapping[str, np.ndarray], Mapping[str, NDArray]],
) -> R:
    """Run a part of a program on a chunk of data, and return the result of a function of its outputs."""
    (p, function), (feeds, given) = shared, chunk
    inputs = {**feeds, **given}
    run = run_nodes(p, {name: inputs[name] for name in p.input_names()}, keep="outputs")
    return function(feeds, [run[name] for name in p.output_names()])


def _arrays(feeds: Mapping[str, np.ndarray], found: Sequence[NDArray]) -> Sequence[NDArray]:
    return found


def _float(feeds: Mapping[str, np.ndarray], found: Sequence[NDArray]) -> np.ndarray:
    return as_float(found[0])


def chunked(p: Program, rows: Mapping[str, np.ndarray], per: int) -> list[dict[str, np.ndarray]]:
    """Split arrays by input name into chunks of `per` samples, with `ids` under the name that the program has for them.

    Token positions, and an attention mask of ones, are added if the program has these inputs.
    """
    if "ids" in rows and "ids" not in p.input_names() and IDS in p.input_names():
        rows = {IDS if name == "ids" else name: a for name, a in rows.items()}
    if "ids" in rows and "positions" in p.input_names() and "positions" not in rows:
        rows = {**rows, "positions": np.broadcast_to(np.arange(rows["ids"].shape[1]), rows["ids"].shape)}
    rows = with_mask(p, rows)
    return [{name: np.ascontiguousarray(a[i : i + per]) for name, a in rows.items()}
            for i in range(0, _count(rows), per)]  # fmt: skip


def as_float(array: NDArray) -> np.ndarray:
    """Convert an array to NumPy: float64 stays float64, every other dtype becomes float32."""
    return array.to_numpy("float64" if array.dtype.name == "float64" else "float32")


def input_dependent(p: Program) -> set[NodeId]:
    """Return the nodes whose value depends on an input; all other nodes depend on weights alone."""
    if p.history.open is not None:
        return p.dependents(p.inputs())
    known = p.derived.get("moving")
    if known is None or known[0] != p.version:
        known = p.derived["moving"] = p.version, p.dependents(p.inputs())
    return known[1]


def digests(windows: Mapping[str, np.ndarray]) -> list[str]:
    """Return the SHA-256 of each window, as hexadecimal text."""
    columns = [np.ascontiguousarray(windows[name]) for name in sorted(windows)]
    return [sha256(b"".join(c[i].tobytes() for c in columns)).hexdigest() for i in range(_count(windows))]


def windows_of(source: Any, context: int, tokenizer: Any) -> tuple[dict[str, np.ndarray], int]:
    """Cut a source into windows. Returns: a dict of arrays by input name; tokens per window (1 for a mapping)."""
    if not isinstance(source, Mapping) and _by_name(source):
        source = _joined(source)
    if isinstance(source, Mapping):
        found = {str(name): numbers(a, str(name)) for name, a in source.items()}
        shapes = {n: a.shape for n, a in found.items()}
        if len({np.shape(a)[:1] for a in found.values()}) > 1 or not all(map(np.ndim, found.values())):
            raise UsageError("the inputs have different numbers of samples", expected="equal shape[0]", got=shapes)
        if not found or not _count(found):
            raise UsageError("the calibration data are empty", expected="at least one sample per input", got=shapes)
        return found, 1
    rows = token_rows(source, tokenizer)
    if not sum(map(len, rows)):
        raise UsageError("the calibration data are empty", expected="at least one token")
    if len({*map(len, rows)}) > 1 or np.ndim(source) < 2:
        ids = np.concatenate(rows)
        width = min(context, len(ids))
        return {"ids": ids[: len(ids) // width * width].reshape(-1, width)}, width
    return {"ids": np.stack(rows)}, len(rows[0])


def numbers(values: Any, name: str) -> np.ndarray:
    """Convert the values of an input to an array. Raises: UsageError if they are not numbers, or have no one shape."""
    try:
        found = np.asarray(values)
    except ValueError as error:
        raise UsageError("the samples of an input have different shapes", where=name, got=str(error)) from error
    if found.dtype.kind not in "biuf" and found.dtype.name != "bfloat16":
        raise UsageError("the values of an input are not numbers", where=name, expected="an array of numbers",
                         got=f"{type(values).__name__} of {found.dtype}")  # fmt: skip
    return found


def _by_name(source: Any) -> bool:
    """Return whether a source is arrays by input name, or a list of such batches."""
    batches = isinstance(source, Sequence) and len(source) > 0 and all(isinstance(each, Mapping) for each in source)
    return batches or isinstance(source, Mapping)


def _joined(batches: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Join batches along their first dimension. Raises: UsageError if their names or other dimensions differ."""
    parts = [{str(name): numbers(a, str(name)) for name, a in batch.items()} for batch in batches]
    for i, part in enumerate(parts):
        if part.keys() != parts[0].keys():
            raise UsageError("the batches have different inputs", where=f"batch {i}", expected=", ".join(parts[0]),
                             got=", ".join(part))  # fmt: skip
        if [a.shape[1:] for a in part.values()] != [a.shape[1:] for a in parts[0].values()]:
            raise UsageError("the batches have samples of different shapes", where=f"batch {i}",
                             expected={n: a.shape for n, a in parts[0].items()},
                             got={n: a.shape for n, a in part.items()},
                             fix="bring all samples to one shape; pad texts, with an attention_mask")  # fmt: skip
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _chunk(windows: Mapping[str, np.ndarray]) -> int:
    """Return the number of windows per run: at most 2048 tokens or samples, and about a million entries."""
    tokens = [prod(a.shape[1:]) for a in windows.values() if a.dtype.kind in "iu"]
    entries = sum(prod(a.shape[1:]) for a in windows.values())
    return max(min(ROWS // max(max(tokens, default=1), 1), ENTRIES // max(entries, 1)), 1)


def _take(found: Mapping[str, np.ndarray], rows: np.ndarray) -> dict[str, np.ndarray]:
    return {name: a[rows] for name, a in found.items()}


def _count(windows: Mapping[str, np.ndarray]) -> int:
    return len(next(iter(windows.values())))


def _hash(windows: Mapping[str, np.ndarray]) -> str:
    return sha256("".join(digests(windows)).encode()).hexdigest()
