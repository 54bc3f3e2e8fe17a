"""Saving, loading, snapshots; and that untrusted files are refused before they do harm."""

import copy
import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphwright.graph import Graph, GraphFileError, StaleHandle

from .model import new_graph, random_session


@pytest.mark.parametrize("arrays", [False, True])
def test_loaded_graph_is_equal_and_issues_equal_handles(arrays):
    for seed in range(8):
        g = random_session(new_graph(block=4, max_generation=3), 200, seed).graph
        saved = g.to_dict(arrays=arrays)
        loaded = Graph.from_dict(saved if arrays else json.loads(json.dumps(saved)))
        assert loaded.hash(positions=True) == g.hash(positions=True)
        nodes = list(g.nodes())
        for twin in (g, loaded):  # the same edits issue the same handles at the same indices
            record = twin.remove_node(nodes[0])
            twin.add_edges(nodes[1:], nodes[1:])
            twin.remove_edges(twin.edges()[::3])
            twin.add_nodes(4)
            assert record.node == nodes[0]
        assert loaded.to_dict() == g.to_dict()


def test_records_and_stale_handles_work_in_a_new_process(tmp_path):
    g = new_graph()
    a, b = g.add_node(name="a"), g.add_node(name="b")
    dead = g.remove_edge(g.add_edge(a, b)).edge
    live = g.add_edge(a, b, weight=4)
    (tmp_path / "graph.json").write_text(json.dumps(g.to_dict()))
    code = f"""
import json, sys
from graphwright.graph import EdgeId, Graph, StaleHandle
g = Graph.from_dict(json.load(open(sys.argv[1])))
live, dead = EdgeId.from_int({int(live)}), EdgeId.from_int({int(dead)})
assert g.edge(live, "weight") == 4 and dead not in g
try:
    g.endpoints(dead)
except StaleHandle:
    g.remove_edge(live)
    print(repr(g.add_edge(*g.nodes())))
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "graph.json")], capture_output=True, text=True)
    assert done.stderr == ""
    g.remove_edge(live)
    assert done.stdout.strip() == repr(g.add_edge(a, b))


def test_floats_survive_json_bit_for_bit():
    g = Graph({"x": "f4", "y": "f8"})
    values = [0.1, -0.0, float("nan"), float("inf"), -float("inf"), 1e-45, 3.4e38]
    g.add_nodes(len(values), x=values, y=values)
    text = json.dumps(g.to_dict(), allow_nan=False)
    assert Graph.from_dict(json.loads(text)).hash() == g.hash()


def test_a_snapshot_does_not_change_with_the_graph():
    session = random_session(new_graph(), 150, seed=1)
    g = session.graph
    seen = g.snapshot()
    names, weights = list(seen.node_columns["name"]), seen.edge_columns["weight"].copy()
    ends = [g.endpoints(e) for e in seen.edges]
    g.clear()
    assert list(zip(seen.sources, seen.targets, strict=True)) == ends
    assert list(seen.node_columns["name"]) == names == [session.issued[n] for n in seen.nodes]
    np.testing.assert_array_equal(seen.edge_columns["weight"], weights)


def leaves(data, path=()):
    """Paths to all numbers and lists of a saved graph, but not into column values."""
    items = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in items:
        if key in ("columns", "version", "schema"):
            continue
        if isinstance(value, dict | list):
            yield from leaves(value, (*path, key))
        if isinstance(value, int | list):
            yield (*path, key)


SAVED = random_session(new_graph(block=4, max_generation=4), 120, seed=4).graph.to_dict()
PATHS = list(leaves(SAVED))


@given(st.sampled_from(PATHS), st.sampled_from(["drop", "big", "negative", "plus", "text", "null", "double"]))
def test_a_damaged_file_is_refused_or_loads_as_a_consistent_graph(path, damage):
    data = copy.deepcopy(SAVED)
    at = data
    for key in path[:-1]:
        at = at[key]
    key, value = path[-1], at[path[-1]]
    if damage == "drop":
        at.pop(key)
    elif isinstance(value, list):
        at[key] = {"big": [2**70], "negative": [-1] * len(value), "double": value + value}.get(damage, "x")
    else:
        at[key] = {"big": 2**40, "negative": -5, "text": "x", "null": None}.get(damage, value + 1)
    try:
        g = Graph.from_dict(data)
    except GraphFileError:
        return
    # what loads must hold together: lists agree with endpoints, and editing it works to the end
    for n in g.nodes():
        assert all(g.source(e) == n for e in g.out_edges(n))
        assert all(g.target(e) == n for e in g.in_edges(n))
    assert sum(g.out_degree(n) for n in g.nodes()) == g.edge_count
    fresh = [g.add_node() for _ in range(4)]
    assert len(set(fresh) | set(g.nodes())) == g.node_count
    g.clear()
    assert g.edge_count == 0


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("edges", "source"), "swap"),
        (("out", "items"), "swap"),
        (("out", "blocks"), "repeat"),
        (("in", "free"), "repeat"),
        (("nodes", "free"), "repeat"),
        (("edges", "free"), "live"),
        (("nodes", "high"), "low"),
    ],
)
def test_contradictory_tables_are_refused(path, value):
    data = copy.deepcopy(SAVED)
    rows = data[path[0]][path[1]]
    if value == "swap":
        i = next(i for i, r in enumerate(rows) if r != rows[0])
        # two edges of different nodes exchange indices
        if path[1] == "items":
            i = next(i for i, r in enumerate(rows) if source_of(data, r) != source_of(data, rows[0]))
        rows[0], rows[i] = rows[i], rows[0]
    elif value == "repeat":
        rows.append(rows[0] if rows else 0)
    elif value == "live":
        rows.append(next(i for i, g in enumerate(data["edges"]["generation"]) if g))
    elif value == "low":
        i = next(i for i, g in enumerate(data["nodes"]["generation"]) if g > 1)
        rows[i] = 1
    with pytest.raises(GraphFileError):
        Graph.from_dict(data)


def source_of(data, slot):
    live = [i for i, g in enumerate(data["edges"]["generation"]) if g]
    return data["edges"]["source"][live.index(slot)]


def test_an_unknown_schema_is_refused_by_name():
    with pytest.raises(GraphFileError, match="unknown schema"):
        Graph.from_dict(SAVED | {"schema": 2})


def test_handles_deleted_before_the_save_stay_stale_after_loading():
    g = new_graph()
    n = g.add_node()
    e = g.add_edge(n, n)
    saved = g.to_dict()
    g.remove_node(n)
    loaded = Graph.from_dict(saved)
    assert loaded.endpoints(e) == (n, n)
    later = Graph.from_dict(g.to_dict())
    with pytest.raises(StaleHandle):
        later.endpoints(e)
    fresh = later.add_node()
    assert (fresh.index, fresh.generation) == (n.index, 2)
