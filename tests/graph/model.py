"""The oracle of the container's tests: a graph as two dicts, and a session that edits both and can undo."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from graphwright.graph import EdgeId, Graph, NodeId, StaleHandle

NODE_COLUMNS = {"name": object, "seq": "i8"}
EDGE_COLUMNS = {"weight": "f4", "tag": (object, "-")}


def new_graph(**options: Any) -> Graph:
    return Graph(NODE_COLUMNS, EDGE_COLUMNS, **options)


class Model:
    """What the graph should hold: node -> name, edge -> (source, target, weight)."""

    def __init__(self) -> None:
        self.nodes: dict[NodeId, str] = {}
        self.edges: dict[EdgeId, tuple[NodeId, NodeId, float]] = {}

    def copy(self) -> Model:
        twin = Model()
        twin.nodes, twin.edges = dict(self.nodes), dict(self.edges)
        return twin

    def incident(self, n: NodeId) -> list[EdgeId]:
        return [e for e, (s, t, _) in self.edges.items() if n in (s, t)]


class Session:
    """Random edits on a graph and its model; every handle ever issued is remembered with its payload."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.model = graph, Model()
        self.issued: dict[NodeId | EdgeId, Any] = {}
        self.past: list[tuple[Any, ...]] = []
        self.future: list[tuple[Any, ...]] = []
        self.count = 0

    def name(self) -> str:
        self.count += 1
        return f"n{self.count}"

    def issue(self, handle: NodeId | EdgeId, payload: Any) -> None:
        assert handle not in self.issued, f"{handle!r} was issued twice"
        self.issued[handle] = payload

    def done(self, before: Model, hashed: str, undo: Callable[[], None], redo: Callable[[], None]) -> None:
        self.past.append((before, hashed, self.model.copy(), self.graph.hash(positions=True), undo, redo))
        self.future.clear()

    def undo(self) -> None:
        before, hashed, _, _, undo, _ = entry = self.past.pop()
        undo()
        assert self.graph.hash(positions=True) == hashed
        self.model = before.copy()
        self.future.append(entry)

    def redo(self) -> None:
        _, _, after, hashed, _, redo = entry = self.future.pop()
        redo()
        assert self.graph.hash(positions=True) == hashed
        self.model = after.copy()
        self.past.append(entry)

    # -- edits: each does it, writes it down in the model, and says how to undo and redo it ----------------------------
    def add_node(self) -> NodeId:
        before, hashed, cell = self.model.copy(), self.graph.hash(positions=True), []
        name = self.name()
        n = self.graph.add_node(name=name, seq=self.count)
        self.issue(n, name)
        self.model.nodes[n] = name

        def undo() -> None:
            cell[:] = [self.graph.remove_node(n)]

        def redo() -> None:
            assert self.graph.restore_node(cell[0]) == n

        self.done(before, hashed, undo, redo)
        return n

    def add_edge(self, s: NodeId, t: NodeId) -> EdgeId:
        before, hashed, cell = self.model.copy(), self.graph.hash(positions=True), []
        self.count += 1
        e = self.graph.add_edge(s, t, weight=self.count)
        self.issue(e, self.count)
        self.model.edges[e] = (s, t, self.count)

        def undo() -> None:
            cell[:] = [self.graph.remove_edge(e)]

        def redo() -> None:
            assert self.graph.restore_edge(cell[0]) == e

        self.done(before, hashed, undo, redo)
        return e

    def remove_edge(self, e: EdgeId) -> None:
        before, hashed, cell = self.model.copy(), self.graph.hash(positions=True), []

        def redo() -> None:
            cell[:] = [self.graph.remove_edge(e)]

        def undo() -> None:
            assert self.graph.restore_edge(cell[0]) == e

        redo()
        del self.model.edges[e]
        self.done(before, hashed, undo, redo)

    def remove_node(self, n: NodeId) -> None:
        before, hashed, cell = self.model.copy(), self.graph.hash(positions=True), []

        def redo() -> None:
            cell[:] = [self.graph.remove_node(n)]

        def undo() -> None:
            assert self.graph.restore_node(cell[0]) == n

        redo()
        for e in self.model.incident(n):
            del self.model.edges[e]
        del self.model.nodes[n]
        self.done(before, hashed, undo, redo)

    def rewire(self, e: EdgeId, s: NodeId | None, t: NodeId | None) -> None:
        before, hashed = self.model.copy(), self.graph.hash(positions=True)
        cell = [self.graph.rewire_edge(e, src=s, dst=t)]
        old_s, old_t, weight = self.model.edges[e]
        self.model.edges[e] = (old_s if s is None else s, old_t if t is None else t, weight)

        def swap() -> None:  # restoring gives the record of the way back
            cell[:] = [self.graph.restore_rewire(cell[0])]

        self.done(before, hashed, swap, swap)

    def add_edges(self, pairs: list[tuple[NodeId, NodeId]]) -> None:
        before, hashed, cell = self.model.copy(), self.graph.hash(positions=True), []
        weights = [self.count + i + 1 for i in range(len(pairs))]
        self.count += len(pairs)
        ids = self.graph.add_edges([s for s, _ in pairs], [t for _, t in pairs], weight=weights)
        for e, (s, t), weight in zip(ids, pairs, weights, strict=True):
            self.issue(e, weight)
            self.model.edges[e] = (s, t, weight)

        def undo() -> None:
            cell[:] = [self.graph.remove_edges(ids[::-1])]

        def redo() -> None:
            self.graph.restore_edges(cell[0])

        self.done(before, hashed, undo, redo)

    def remove_edges(self, edges: list[EdgeId]) -> None:
        before, hashed, cell = self.model.copy(), self.graph.hash(positions=True), []

        def redo() -> None:
            cell[:] = [self.graph.remove_edges(edges)]

        def undo() -> None:
            self.graph.restore_edges(cell[0])

        redo()
        for e in edges:
            del self.model.edges[e]
        self.done(before, hashed, undo, redo)

    def remove_nodes(self, nodes: list[NodeId]) -> None:
        before, hashed, cell = self.model.copy(), self.graph.hash(positions=True), []

        def redo() -> None:
            cell[:] = [self.graph.remove_nodes(nodes)]

        def undo() -> None:
            self.graph.restore_nodes(cell[0])

        redo()
        for n in nodes:
            for e in self.model.incident(n):
                del self.model.edges[e]
            del self.model.nodes[n]
        self.done(before, hashed, undo, redo)

    def rewire_edges(self, edges: list[EdgeId], sources: list[NodeId] | None, targets: list[NodeId] | None) -> None:
        before, hashed = self.model.copy(), self.graph.hash(positions=True)
        cell = [self.graph.rewire_edges(edges, src=sources, dst=targets)]
        for i, e in enumerate(edges):
            s, t, weight = self.model.edges[e]
            self.model.edges[e] = (sources[i] if sources else s, targets[i] if targets else t, weight)

        def swap() -> None:
            cell[:] = [self.graph.restore_rewires(cell[0])]

        self.done(before, hashed, swap, swap)

    def reload(self) -> None:
        """Save and load; the records of the past go on working with the loaded graph."""
        self.graph = Graph.from_dict(json.loads(json.dumps(self.graph.to_dict())))

    # -- checks -----------------------------------------------------------------------------------------------------
    def check(self) -> None:
        g, model = self.graph, self.model
        assert (g.node_count, g.edge_count) == (len(model.nodes), len(model.edges))
        assert sorted(g.nodes(), key=lambda n: n.index) == list(g.nodes())
        assert set(g.nodes()) == set(model.nodes)
        assert set(g.edges()) == set(model.edges)
        for n in model.nodes:
            out = {e for e, (s, _, _) in model.edges.items() if s == n}
            into = {e for e, (_, t, _) in model.edges.items() if t == n}
            assert (len(g.out_edges(n)), set(g.out_edges(n)), g.out_degree(n)) == (len(out), out, len(out))
            assert (len(g.in_edges(n)), set(g.in_edges(n)), g.in_degree(n)) == (len(into), into, len(into))
            assert set(g.successors(n)) == {model.edges[e][1] for e in out}
            assert set(g.predecessors(n)) == {model.edges[e][0] for e in into}
        for e, (s, t, _) in model.edges.items():
            assert g.endpoints(e) == (s, t) == (g.source(e), g.target(e))
        self.check_handles()

    def check_handles(self) -> None:
        """Every handle ever issued gives its own payload, or StaleHandle."""
        for handle, payload in self.issued.items():
            alive = handle in self.model.nodes or handle in self.model.edges
            assert (handle in self.graph) == alive
            if isinstance(handle, NodeId):
                read = lambda h=handle: self.graph.node(h, "name")  # noqa: E731  # one name for both kinds
            else:
                read = lambda h=handle: self.graph.edge(h, "weight")  # noqa: E731
            if alive:
                assert read() == payload
            else:
                with pytest.raises(StaleHandle):
                    read()


def random_session(graph: Graph, steps: int, seed: int) -> Session:
    """A session after `steps` random single edits; leaves holes and parallel edges."""
    session, rng = Session(graph), random.Random(seed)
    for _ in range(steps):
        random_edit(session, rng)
    return session


def random_edit(session: Session, rng: random.Random) -> None:
    nodes, edges = list(session.model.nodes), list(session.model.edges)
    choice = rng.random()
    if choice < 0.15 or not nodes:
        session.add_node()
    elif choice < 0.6 or not edges:
        session.add_edge(rng.choice(nodes), rng.choice(nodes))
    elif choice < 0.75:
        session.remove_edge(rng.choice(edges))
    elif choice < 0.8:
        session.remove_node(rng.choice(nodes))
    else:
        ends = rng.choice(nodes), rng.choice(nodes)
        session.rewire(rng.choice(edges), *rng.choice([ends, (ends[0], None), (None, ends[1])]))
