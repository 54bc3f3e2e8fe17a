"""Logits of gates and their rows of the table: adding, reusing and freeing them inside an open edit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from graphwright.array.formulas.gates import COLUMNS, GATE_KINDS, KINDS
from graphwright.program import gates as g
from graphwright.program.op_graph import Value

if TYPE_CHECKING:
    from graphwright.program.editing.transaction import Transaction


def allocate(
    e: Transaction, lengths: Sequence[int], kind: str, inits: np.ndarray, costs: np.ndarray, group: str | None, *,
    wide: bool,
) -> list[Value]:  # fmt: skip
    """Add logits and rows of the table for gates with these numbers of elements; return the values of each gate.

    Args:
        inits, costs: initial logit and cost of each element of all gates.
        group: name of the group of gates that share a temperature; by default that of the kind.
        wide: make the logits float64, if they are the program's first.
    """
    p, facts = e.program, GATE_KINDS[kind]
    name = facts.group if group is None else group
    if not g.has_gates(p):
        empty = np.zeros(0, "float64" if wide else "float32")
        logits, table = e.param(g.LOGITS, empty), e.const(g.TABLE, np.zeros((0, len(COLUMNS)), np.int64))
        temperature, run = e.state(g.TEMPERATURE, empty), e.state(g.RUN, np.zeros(3, np.int64))
        e.add("gate", logits, table, temperature, run, name=g.NODE, sizes=())
    node = g.gate_node(p)
    sizes, groups = list(p.attrs(node)["sizes"]), list(p.attrs(node)["groups"])
    if name not in groups:
        groups.append(name)
        temperatures = p.weights[g.TEMPERATURE].data.to_numpy()
        e.set_weight(g.TEMPERATURE, np.append(temperatures, facts.temperature))
    parts = (p.weights[key].data.to_numpy() for key in (g.LOGITS, g.TABLE))
    logits, rows = (np.split(part, np.cumsum(sizes)[:-1]) if sizes else [] for part in parts)
    free = [port for port, part in enumerate(rows) if len(part) and not g.in_use(part)]
    ports, at = [], 0
    for length in lengths:
        reused = next((port for port in free if sizes[port] == length), None)
        free = [port for port in free if port != reused]
        port = len(sizes) if reused is None else reused
        generation = 0 if reused is None else int(rows[port][0, g.GENERATION]) + 1
        row = np.zeros((length, len(COLUMNS)), np.int64)
        row[:, [g.KIND, g.GROUP, g.STATE]] = KINDS.index(kind), groups.index(name), g.SOFT
        row[:, [g.SLOT, g.GENERATION]] = port, generation
        row[:, g.ELEMENT], row[:, g.COST] = np.arange(length), costs[at : at + length]
        if reused is None:
            sizes.append(length)
        logits[port : port + 1], rows[port : port + 1] = [inits[at : at + length]], [row]
        ports.append(port)
        at += length
    e.set_weight(g.LOGITS, np.concatenate(logits))
    e.set_weight(g.TABLE, np.concatenate(rows))
    if sizes != list(p.attrs(node)["sizes"]) or groups != list(p.attrs(node)["groups"]):
        e.set_attr(node, sizes=tuple(sizes), groups=tuple(groups))
    return [Value(node, port) for port in ports]


def free_unread(e: Transaction, part: Value) -> None:
    """Free the logits of the gate with the values `part`, if nothing reads them."""
    p = e.program
    if any(p.edge_value(edge) == part for edge in p.out_edges(part.node)):
        return
    sizes, table = p.attrs(part.node)["sizes"], p.weights[g.TABLE].data.to_numpy().copy()
    start = sum(sizes[: part.port])
    table[start : start + sizes[part.port], g.STATE] = g.FREE
    if (table[:, g.STATE] == g.FREE).all():
        e.remove([part.node, *(v.node for v in p.operands(part.node))])
        return
    e.set_weight(g.TABLE, table)


def use_slots(e: Transaction, found: g.Gate, count: int, init: float, costs: np.ndarray) -> np.ndarray:
    """Return `count` slots of a pattern's gate for new edges: free ones first; the gate grows if there are too few.

    Args:
        init: initial logit; costs: cost of each element. Elements get numbers that were never used.
    """
    p, rows = e.program, e.program.gates().at(found.port).rows
    sizes = list(p.attrs(g.gate_node(p))["sizes"])
    short = count - int((rows[:, g.STATE] == g.FREE).sum())
    node, end = g.gate_node(p), found.offset + found.length
    logits, table = (p.weights[key].data.to_numpy() for key in (g.LOGITS, g.TABLE))
    if short > 0:
        row = rows[:1].copy()
        row[:, g.STATE] = g.FREE
        logits = np.insert(logits, [end] * short, 0.0)
        table = np.insert(table, [end] * short, row, axis=0)
        sizes[found.port] += short
    slots = np.flatnonzero(table[found.offset : end + max(short, 0), g.STATE] == g.FREE)[:count]
    logits, table, at = logits.copy(), table.copy(), found.offset + slots
    logits[at], table[at, g.STATE], table[at, g.COST] = init, g.SOFT, costs
    table[at, g.ELEMENT] = rows[:, g.ELEMENT].max() + 1 + np.arange(count)
    e.set_weight(g.LOGITS, logits)
    e.set_weight(g.TABLE, table)
    if short > 0:
        e.set_attr(node, sizes=tuple(sizes))
        e.touched |= dict.fromkeys(found.sites)
    return slots


def free_slots(e: Transaction, found: g.Gate, slots: np.ndarray) -> None:
    """Free elements of a pattern's gate, whose edges are gone."""
    table = e.program.weights[g.TABLE].data.to_numpy().copy()
    table[found.offset + slots, g.STATE] = g.FREE
    e.set_weight(g.TABLE, table)
