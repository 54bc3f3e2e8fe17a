"""Which experts a program uses on some data: tokens, weights, output norms, and experts that are chosen together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from graphwright.array import NDArray, from_numpy
from graphwright.autograd import Tensor, no_grad
from graphwright.experts.picture import together_picture, usage_picture
from graphwright.experts.routed import RoutedLayer, routed_layer, routed_layers
from graphwright.experts.routers import threshold_routers
from graphwright.experts.selection import COMPARABLE, least
from graphwright.graph import NodeId
from graphwright.models.generation.text import check_ids, vocabulary
from graphwright.ops.experts import Expert, run_expert
from graphwright.program.axes.units import Units
from graphwright.program.errors import StaleSelection
from graphwright.report import Report, table
from graphwright.surgery.calibration import (
    ROWS,
    Calibration,
    MissingCalibration,
    Stream,
    as_float,
    chunked,
    windows_of,
)
from graphwright.surgery.matrices import program_of

if TYPE_CHECKING:
    from graphwright.models.model import Model
    from graphwright.program.program import Program
    from graphwright.surgery.calibration import CalibrationSource


@dataclass(frozen=True, slots=True, repr=False)
class LayerUsage(Report):
    """Use of the E experts of one routed layer on N tokens; arrays are float64 [E] unless stated otherwise.

    The tokens of an expert are those that chose it; tokens that a threshold router gives to its fallback chose none.

    Attributes:
        name: of the layer.
        tokens: N, without padding.
        count: tokens of each expert, int64 [E].
        weight: mean weight of an expert over its tokens.
        output: mean norm ‖f(x)‖ of an expert's results over its tokens.
        reap: mean of weight · ‖f(x)‖ over an expert's tokens (Lasby et al. 2025).
        contribution: mean of ‖weight · f(x)‖ / ‖y‖ over an expert's tokens, for the layer's result y.
        per_token: tokens with 0, 1, 2, ... experts, int64 [E + 1].
        together: tokens that chose both of two experts, int64 [E, E]; the diagonal is `count`.
        mean_output: mean of f(x) over an expert's tokens [E, C].
        ids: the different ids among the tokens, int64 [U]; empty for programs without ids.
        by_id: tokens of each id that chose an expert, and in the last column of each id, int64 [U, E + 1].
        nodes: the first param node of each expert, by which it is known after edits.
    """

    name: str
    tokens: int
    count: np.ndarray
    weight: np.ndarray
    output: np.ndarray
    reap: np.ndarray
    contribution: np.ndarray
    per_token: np.ndarray
    together: np.ndarray
    mean_output: np.ndarray
    ids: np.ndarray
    by_id: np.ndarray
    nodes: tuple[NodeId, ...]
    HIDDEN: ClassVar = ("mean_output", "ids", "by_id", "nodes")
    FIGURES: ClassVar = ("share", "mass", "entropy", "max_load", "dead", "mean_k", "unrouted")

    @property
    def share(self) -> np.ndarray:
        """Share of all assignments that an expert got."""
        return self.count / max(int(self.count.sum()), 1)

    @property
    def mass(self) -> np.ndarray:
        """Share of the sum of all weights."""
        mass = self.weight * self.count
        return mass / (mass.sum() or 1.0)

    @property
    def entropy(self) -> float:
        """Entropy of the shares divided by ln E: 1 for equal use, 0 for one expert."""
        share = self.share[self.share > 0]
        return float(-(share * np.log(share)).sum() / log(len(self.count))) if len(self.count) > 1 else 1.0

    @property
    def max_load(self) -> float:
        """Largest share, relative to equal shares."""
        return float(self.share.max() * len(self.share))

    @property
    def dead(self) -> list[int]:
        """Experts without tokens."""
        return np.flatnonzero(self.count == 0).tolist()

    @property
    def mean_k(self) -> float:
        """Mean number of experts per token."""
        return float(self.count.sum() / max(self.tokens, 1))

    @property
    def unrouted(self) -> float:
        """Share of the tokens that chose no expert and went to the fallback."""
        return float(self.per_token[0] / max(self.tokens, 1))

    def now(self, layer: RoutedLayer, by: str = "count") -> np.ndarray:
        """Return a figure of the experts that a layer has now, [E]. Raises: StaleSelection if one was not measured."""
        known = {node: i for i, node in enumerate(self.nodes)}
        indices = [known.get(layer.params(e)[0], -1) for e in range(layer.size)]
        if -1 in indices:
            raise StaleSelection("an expert was added after the use of experts was measured", where=layer.name,
                                 got=f"expert {indices.index(-1)}", fix="measure again")  # fmt: skip
        return np.asarray(getattr(self, by))[indices]

    def lifts(self, expert: int, n: int = 8, *, least: int = 2) -> list[tuple[int, float, int]]:
        """Return the ids that prefer an expert most, as (id, lift, tokens of this id), from the largest lift down.

        The lift is the share of the id's tokens that chose the expert, relative to that of all tokens. Ids with fewer
        than `least` tokens are left out.
        """
        total = self.by_id[:, -1]
        often = np.flatnonzero(total >= least)
        lift = self.by_id[often, expert] / total[often] / max(self.count[expert] / max(self.tokens, 1), 1e-30)
        best = [i for i in np.argsort(-lift, kind="stable")[:n] if lift[i] > 0]
        return [(int(self.ids[often[i]]), float(lift[i]), int(total[often[i]])) for i in best]

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values; arrays as lists."""
        found = {name: getattr(self, name) for name in (*_FIELDS, *self.FIGURES)}
        return {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in found.items()}

    def rows(self) -> list[dict[str, Any]]:
        """Return one dict per expert, for a table."""
        return [
            {"layer": self.name, "expert": e, "tokens": int(self.count[e]), "share": float(self.share[e]),
             "weight": float(self.weight[e]), "mass": float(self.mass[e]), "output": float(self.output[e]),
             "reap": float(self.reap[e]), "contribution": float(self.contribution[e])}
            for e in range(len(self.count))
        ]  # fmt: skip


_FIELDS = ("name", "tokens", "count", "weight", "output", "reap", "contribution", "per_token", "together")
_COLUMNS = ("layer", "expert", "tokens", "share", "weight", "mass", "output", "reap", "contribution")


@dataclass(frozen=True, slots=True, repr=False)
class Usage(Report):
    """Use of all experts of a program, by layer; `print` gives a table, `to_svg` a picture.

    Attributes:
        program: the program.
        version: the version of it that was measured.
        layers: use by the name of the layer.
    """

    program: Program
    version: int
    layers: Mapping[str, LayerUsage] = field(default_factory=dict)
    HIDDEN: ClassVar = ("program",)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict: version, and figures by layer."""
        return {"version": self.version, "layers": {name: u.to_json() for name, u in self.layers.items()}}

    def __getitem__(self, layer: str) -> LayerUsage:
        return self.layers[layer]

    def scores(self, by: str = "share") -> dict[str, np.ndarray]:
        """Return {layer: figure [E]} of the experts that the program has now, which follow edits.

        Args:
            by: share, mass, weight, output, reap or contribution.
        Raises: StaleSelection for an expert that was added after the measurement.
        """
        layers = routed_layers(self.program)
        return {name: u.now(layers[name], by).astype(np.float64) for name, u in self.layers.items() if name in layers}

    def least(self, n: int | float, *, per_layer: bool = True, by: str = "share") -> Units:
        """Select the experts with the smallest figure, to cut them: see `graphwright.experts.least`."""
        return least(self.program, self.scores(by), n, per_layer=per_layer, comparable=by in COMPARABLE)

    def _text(self) -> str:
        lines = [table([row for u in self.layers.values() for row in u.rows()], _COLUMNS), ""]
        for u in self.layers.values():
            dead = f", dead {', '.join(map(str, u.dead))}" if u.dead else ""
            none = f", {u.unrouted:.1%} unrouted" if u.unrouted else ""
            lines.append(f"{u.name}  {u.tokens} tokens, {u.mean_k:.2f} experts per token, entropy {u.entropy:.3f}, "
                         f"largest load {u.max_load:.2f} of equal shares{none}{dead}")  # fmt: skip
        return "\n".join(lines)

    def to_svg(self, path: str | Path | None = None, *, beside: Usage | None = None) -> str:
        """Return a picture of the use of all experts, one row per layer; also write it to `path`.

        With `beside`, another usage, such as one before an edit, is drawn below it in the same colours.
        """
        return usage_picture([self] if beside is None else [self, beside], path)

    def together_svg(self, layer: str, path: str | Path | None = None) -> str:
        """Return a picture of how often two experts of a layer are chosen together; also write it to `path`."""
        return together_picture(self, layer, path)

    def overlay(self) -> dict[str, float]:
        """Return the use of each expert relative to equal use, by path: `program.to_svg(overlay=use.overlay())`."""
        found: dict[str, float] = {}
        for u in self.layers.values():
            for node, share in zip(u.nodes, u.share.tolist(), strict=True):
                if node in self.program.graph:
                    found[".".join(self.program.path(node).split(".")[:-2])] = share * len(u.share)
        return found


def usage(model: Model | Program, data: CalibrationSource | None = None) -> Usage:
    """Measure which experts a model uses on some data, and how much they contribute.

    Args:
        model: a model or program with routed layers; it is not changed.
        data: text, ids, windows of ids, arrays by input name, or a `Calibration`, whose learning windows are used; by
            default the bundled text, for a model with a tokenizer.
    Raises: NotAMixture; MissingCalibration without data; UsageError for invalid data.
    """
    return measured(program_of(model), feeds_for(model, data))


def measured(p: Program, feeds: Sequence[Mapping[str, np.ndarray]]) -> Usage:
    """Measure the use of all experts of a program on chunks of inputs, arrays by input name."""
    layers, hits = routed_layers(p), {r.mixture: r.value("hits") for r in threshold_routers(p)}
    sums = {name: _Sums(layer) for name, layer in layers.items()}
    wanted = [v for layer in layers.values() for v in (layer.tokens, layer.choice, layer.weights)]
    for values, given in zip(Stream(p, feeds).read([*wanted, *hits.values()]), feeds, strict=True):
        for name, layer in layers.items():
            choice = values[layer.choice].to_numpy()
            valid = np.any(choice if choice.dtype == np.bool_ else choice >= 0, axis=1)
            chosen = values[hits[layer.node]].to_numpy() if layer.node in hits else choice
            ids = np.reshape(given.get("ids", ()), -1)
            sums[name].add(values[layer.tokens], chosen, as_float(values[layer.weights]), valid, ids)
    return Usage(p, p.version, {name: s.result() for name, s in sums.items()})


def expert_tokens(model: Model | Program, layer: str, expert: int, data: CalibrationSource | None = None) -> np.ndarray:
    """Return the tokens that an expert processes on some data, as the layer reads them: float [n, C]; see `usage`."""
    p = program_of(model)
    found, parts = routed_layer(p, layer), []
    for values in Stream(p, feeds_for(model, data)).read([found.tokens, found.choice]):
        choice = values[found.choice].to_numpy()
        token, chosen, _ = pairs_of(choice, np.ones(choice.shape))
        parts.append(as_float(values[found.tokens])[token[chosen == expert]])
    return np.concatenate(parts)


def feeds_for(model: Model | Program, data: CalibrationSource | None) -> Sequence[Mapping[str, np.ndarray]]:
    """Return chunks of inputs: all windows of the data, the learning windows of a `Calibration`; see `usage`."""
    p = program_of(model)
    if isinstance(data, Calibration):
        return data.feeds(p)
    if data is not None:
        windows, width = windows_of(data, 512, getattr(model, "tokenizer", None))
        if "ids" in windows:
            windows = {**windows, "ids": check_ids(windows["ids"], vocabulary(p))}
        return chunked(p, windows, max(ROWS // width, 1))
    if getattr(model, "tokenizer", None) is None:
        raise MissingCalibration("this needs data to measure on", where=p.name, fix="pass data=...")
    return Calibration.of(model).feeds(p)  # pyright: ignore[reportArgumentType]  # it has a tokenizer


def pairs_of(choice: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (token, expert, weight) of each assignment, from ids [N, k] with -1 for none, or from a mask [N, E]."""
    if choice.dtype == np.bool_:
        token, expert = np.nonzero(choice)
        return token, expert, weights[token, expert]
    token, column = np.nonzero(choice >= 0)
    return token, choice[token, column], weights[token, column]


def expert_output(layer: RoutedLayer, expert: int, x: NDArray) -> np.ndarray:
    """Compute f(x) of one expert of a layer for tokens x [n, C]; float32 or float64."""
    p = layer.program

    def array(value: Any) -> Any:
        node = value.node
        while p.operands(node):  # a cast
            node = p.operands(node)[0].node
        return Tensor(p.weights.array(p.key(node))).to(x.dtype)

    with no_grad():
        made = Expert(*(None if v is None else array(v) for v in layer.experts[expert]))
        return as_float(run_expert(Tensor(x), made, p.attrs(layer.node)).out.data)


class _Sums:
    """Sums over chunks of tokens, for the figures of one layer."""

    def __init__(self, layer: RoutedLayer) -> None:
        self.layer, n = layer, layer.size
        width = layer.program.spec(layer.tokens).shape[1]
        self.tokens, self.count, self.together = 0, np.zeros(n, np.int64), np.zeros((n, n), np.int64)
        self.weight, self.output, self.reap, self.contribution = (np.zeros(n) for _ in range(4))
        self.per_token, self.mean = np.zeros(n + 1, np.int64), np.zeros((n, int(width)))
        self.ids, self.by_id = np.zeros(0, np.int64), np.zeros((0, n + 1), np.int64)

    def add(self, tokens: NDArray, choice: np.ndarray, weights: np.ndarray, valid: np.ndarray, ids: np.ndarray) -> None:
        """Add a chunk: tokens [N, C], choice and weights [N, k] or [N, E], valid [N]; ids [N], or another number."""
        n = self.layer.size
        token, expert, weight = pairs_of(choice, weights.astype(np.float64))
        chosen = np.zeros((len(choice), n), np.int64)
        np.add.at(chosen, (token, expert), 1)
        self.tokens += int(valid.sum())
        self.count += chosen.sum(axis=0)
        self.together += chosen.T @ chosen
        self.per_token += np.bincount(chosen[valid].sum(axis=1), minlength=n + 1)
        if len(ids) == len(choice):
            self._add_ids(ids[valid], chosen[valid])
        host, parts, total = tokens.to_numpy(bits=True), [], np.zeros(tokens.shape)
        for e in range(n):
            rows, w = token[expert == e], weight[expert == e]
            if len(rows):
                made = expert_output(self.layer, e, from_numpy(np.ascontiguousarray(host[rows]), bits=tokens.dtype))
                parts.append((e, rows, w, made.astype(np.float64)))
                np.add.at(total, rows, w[:, None] * parts[-1][3])
        norms = np.linalg.norm(total, axis=1)
        for e, rows, w, made in parts:
            size = np.linalg.norm(made, axis=1)
            self.weight[e] += w.sum()
            self.output[e] += size.sum()
            self.reap[e] += (w * size).sum()
            self.contribution[e] += (np.abs(w) * size / np.maximum(norms[rows], 1e-30)).sum()
            self.mean[e] += made.sum(axis=0)

    def _add_ids(self, ids: np.ndarray, chosen: np.ndarray) -> None:
        known, at = np.unique(np.concatenate([self.ids, ids]), return_inverse=True)
        rows = np.concatenate([self.by_id, np.pad(chosen, ((0, 0), (0, 1)), constant_values=1)])
        self.ids, self.by_id = known, np.zeros((len(known), rows.shape[1]), np.int64)
        np.add.at(self.by_id, at, rows)

    def result(self) -> LayerUsage:
        """Return the figures."""
        n = np.maximum(self.count, 1)
        return LayerUsage(self.layer.name, self.tokens, self.count, self.weight / n, self.output / n, self.reap / n,
                          self.contribution / n, self.per_token, self.together, self.mean / n[:, None], self.ids,
                          self.by_id, tuple(self.layer.params(e)[0] for e in range(self.layer.size)))  # fmt: skip
