"""Many random edits against dicts: 10^5 single ones each checked, 10^6 in bulk, every handle ever issued."""

from __future__ import annotations

import json
import random
from collections import deque

import numpy as np
import pytest
from hypothesis import settings

from graphwright.graph import EdgeArray, Graph, NodeId, StaleHandle
from seeds import deep

DEEP = settings().max_examples > 1000  # HYPOTHESIS_PROFILE=deep


class Dicts:
    """node -> its out- and in-edges, edge -> its ends; lists allow a random pick in constant time."""

    def __init__(self) -> None:
        self.out, self.into, self.ends = {}, {}, {}
        self.nodes, self.edges, self.at = [], [], {}

    def put(self, pool, handle):
        self.at[handle] = len(pool)
        pool.append(handle)

    def drop(self, pool, handle):
        i, last = self.at.pop(handle), pool.pop()
        if last != handle:
            pool[i] = last
            self.at[last] = i

    def add_node(self, n):
        self.out[n], self.into[n] = set(), set()
        self.put(self.nodes, n)

    def add_edge(self, e, u, v):
        self.ends[e] = (u, v)
        self.out[u].add(e)
        self.into[v].add(e)
        self.put(self.edges, e)

    def remove_edge(self, e):
        u, v = self.ends.pop(e)
        self.out[u].discard(e)
        self.into[v].discard(e)
        self.drop(self.edges, e)

    def remove_node(self, n):
        for e in list(self.out[n] | self.into[n]):
            self.remove_edge(e)
        del self.out[n], self.into[n]
        self.drop(self.nodes, n)

    def agree(self, g, n):
        out, into = g.out_edges(n), g.in_edges(n)
        return (
            set(out) == self.out[n]
            and set(into) == self.into[n]
            and (len(out), len(into)) == (g.out_degree(n), g.in_degree(n))
        )


@pytest.mark.parametrize("block", [4, 16])
def test_a_hundred_thousand_single_edits_match_the_model(block):
    g, model, rng, dead = Graph(block=block), Dicts(), random.Random(block), []
    for _ in range(deep(100_000, 15_000)):
        choice = rng.random()
        touched = ()
        if choice < 0.05 or len(model.nodes) < 5:
            model.add_node(g.add_node())
        elif choice < 0.5 or not model.edges:
            u, v = touched = rng.choice(model.nodes), rng.choice(model.nodes[:40])  # a few hubs
            model.add_edge(g.add_edge(u, v), u, v)
        elif choice < 0.75:
            e = rng.choice(model.edges)
            touched = model.ends[e]
            g.remove_edge(e)
            model.remove_edge(e)
            dead.append(e)
        elif choice < 0.97:
            e, u, v = rng.choice(model.edges), rng.choice(model.nodes), rng.choice(model.nodes)
            touched = (*model.ends[e], u, v)
            g.rewire_edge(e, src=u, dst=v)
            model.remove_edge(e)
            model.add_edge(e, u, v)
        else:
            n = rng.choice(model.nodes)
            touched = {x for e in model.out[n] | model.into[n] for x in model.ends[e]} - {n}
            dead += [n, *model.out[n]]
            g.remove_node(n)
            model.remove_node(n)
        assert (g.node_count, g.edge_count) == (len(model.nodes), len(model.edges))
        assert all(model.agree(g, n) for n in list(touched)[:4])
        if dead:
            gone = rng.choice(dead)
            assert gone not in g
    assert all(model.agree(g, n) for n in model.nodes)
    assert all(g.endpoints(e) == ends for e, ends in model.ends.items())
    for gone in rng.sample(dead, 2000):
        with pytest.raises(StaleHandle):
            g.out_edges(gone) if isinstance(gone, NodeId) else g.endpoints(gone)


@pytest.mark.deep
def test_a_million_bulk_edits_match_the_model():
    """Ten million with the deep profile. Rows of the model are never reused: row -> packed handle, ends, alive."""
    rng, g = np.random.default_rng(0), Graph({}, {"row": "i8"})
    nodes = g.add_nodes(2000).ids
    ids = np.empty(0, np.int64)
    ends = np.empty((0, 2), np.int64)
    alive = np.empty(0, bool)
    done = 0
    while done < (10**7 if DEEP else 10**6):
        n = int(rng.integers(1, 40_000))
        live = np.flatnonzero(alive)
        verb = rng.integers(3) if len(live) else 0
        if verb == 0:
            pairs = rng.integers(0, len(nodes), (n, 2))
            pairs[: n // 3, 1] = 7  # a hub
            rows = np.arange(len(ids), len(ids) + n)
            made = g.add_edges(nodes[pairs[:, 0]], nodes[pairs[:, 1]], row=rows)
            ids, ends, alive = np.append(ids, made.ids), np.vstack([ends, pairs]), np.append(alive, np.ones(n, bool))
        else:
            rows = rng.choice(live, min(n, len(live)), replace=False)
            if verb == 1:
                g.remove_edges(ids[rows])
                alive[rows] = False
            else:
                targets = rng.integers(0, len(nodes), len(rows))
                g.rewire_edges(ids[rows], dst=nodes[targets])
                ends[rows, 1] = targets
        done += len(rows)
        live = np.flatnonzero(alive)
        found = g.edges["row"]
        seen = g.csr()
        assert g.edge_count == len(live) == len(np.unique(found))
        row_of = rows_of(ids, live, seen.edges)
        np.testing.assert_array_equal(ends[row_of, 1], seen.indices)
        np.testing.assert_array_equal(ends[row_of, 0], np.repeat(np.arange(len(nodes)), np.diff(seen.indptr)))
        for gone in rng.choice(np.flatnonzero(~alive), 20) if not alive.all() else ():
            with pytest.raises(StaleHandle):
                g.edge(EdgeArray(ids[gone : gone + 1])[0], "row")
    assert len(np.unique(ids)) == len(ids), "no handle was issued twice"


def rows_of(ids, live, edges):
    """Row of each edge handle."""
    order = np.argsort(ids[live])
    position = np.searchsorted(ids[live], edges.ids, sorter=order)
    rows = live[order[position]]
    np.testing.assert_array_equal(ids[rows], edges.ids)
    return rows


@pytest.mark.parametrize("max_generation", [4, 2**31 - 1])
def test_every_handle_stays_valid_through_undo_redo_save_and_load(max_generation):
    """Payloads are the numbers of the edits; ten times as many edits with the deep profile."""
    g, rng = Graph({"n": "i8"}, {"n": "i8"}, block=4, max_generation=max_generation), random.Random(0)
    issued, recent, past, future = {}, deque(maxlen=50), [], []
    nodes = [g.add_node(n=-1 - i) for i in range(8)]
    for step in range(10**6 if DEEP else 10**5):
        choice = rng.random()
        if choice < 0.2 and past:
            kind, handle, record = past.pop()
            if kind == "add":
                future.append((kind, handle, g.remove_edge(handle)))
            else:
                future.append((kind, g.restore_edge(record), None))
        elif choice < 0.3 and future:
            kind, handle, record = future.pop()
            if kind == "add":
                past.append((kind, g.restore_edge(record), None))
            else:
                past.append((kind, handle, g.remove_edge(handle)))
        elif choice < 0.6 or not g.edge_count:
            e = g.add_edge(rng.choice(nodes), rng.choice(nodes), n=step)
            assert e not in issued
            issued[e] = step
            recent.append(e)
            past.append(("add", e, None))
            future.clear()
        else:
            e = rng.choice(recent)
            if e in g:
                past.append(("remove", e, g.remove_edge(e)))
                future.clear()
        if step % 20_000 == 0:
            g = Graph.from_dict(json.loads(json.dumps(g.to_dict())))
    live = set(g.edges())
    assert live <= issued.keys()
    for e, payload in issued.items():
        if e in live:
            assert g.edge(e, "n") == payload
        else:
            with pytest.raises(StaleHandle):
                g.edge(e, "n")
