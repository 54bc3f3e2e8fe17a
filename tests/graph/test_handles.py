"""Handles: packing, identity, and that none ever names two things."""

import ast
import copy
import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import graphwright
from graphwright.graph import EdgeArray, EdgeId, Graph, NodeArray, NodeId, StaleHandle
from seeds import deep

from .model import Session, new_graph, random_edit

indices = st.integers(0, 2**31 - 2)
generations = st.integers(1, 2**31 - 1)


@given(indices, generations, indices, generations)
def test_packed_handles_round_trip_and_kinds_never_compare_equal(index, generation, other_index, other_generation):
    n, e = NodeId(index, generation), EdgeId(index, generation)
    for handle in (n, e):
        assert (handle.index, handle.generation) == (index, generation)
        assert 0 < handle < 2**63
        assert type(handle).from_int(int(handle)) == handle
        assert int(np.array([handle], np.int64)[0]) == handle
    same = (index, generation) == (other_index, other_generation)
    assert (n == NodeId(other_index, other_generation)) == same
    assert n != EdgeId(other_index, other_generation)
    with pytest.raises(ValueError, match="not a packed NodeId"):
        NodeId.from_int(e)
    with pytest.raises(ValueError, match="not a packed EdgeId"):
        EdgeId.from_int(n)


@pytest.mark.parametrize(("index", "generation"), [(-1, 1), (2**31 - 1, 1), (0, 0), (0, 2**31)])
def test_handles_out_of_range_are_refused(index, generation):
    with pytest.raises(ValueError, match="needs 0 <= index"):
        NodeId(index, generation)


def test_handles_print_copy_and_pickle_as_integers():
    n = NodeId(3, 1)
    assert (repr(n), str(n), f"{n}") == ("NodeId(3, 1)",) * 3
    assert {n: "here"}[NodeId(3, 1)] == "here"
    assert hash(n) == hash(int(n))
    assert json.loads(json.dumps(n)) == int(n)
    for twin in (copy.copy(n), copy.deepcopy([n])[0]):
        assert (type(twin), twin) == (NodeId, n)


def test_only_the_container_constructs_handles():
    """A made-up generation is always dead, or names another element."""
    package = Path(graphwright.__file__).parent
    found = []
    for path in package.rglob("*.py"):
        if path.parent == package / "graph":
            continue
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "NodeId" in text or "EdgeId" in text else ():
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                found += [f"{path.name}:{node.lineno}"] if name in ("NodeId", "EdgeId") else []
    assert found == []


def test_handle_arrays_return_handles_and_integers():
    ids = [EdgeId(i, 2) for i in (4, 1, 7)]
    array = EdgeArray(ids)
    assert list(array) == array.tolist() == ids
    assert all(type(e) is EdgeId for e in array)
    assert (array[1], array[-1]) == (ids[1], ids[-1])
    assert type(array[0]) is EdgeId
    assert list(array[::-1]) == ids[::-1]
    assert list(array[np.array([True, False, True])]) == [ids[0], ids[2]]
    assert array.index.tolist() == [4, 1, 7]
    assert array.generation.tolist() == [2, 2, 2]
    assert np.asarray(array).dtype == np.int64
    assert np.shares_memory(np.asarray(array), array.ids)
    assert ids[0] in array
    assert EdgeId(9, 1) not in array
    assert array == EdgeArray(np.array(ids))
    assert array != NodeArray([])
    assert len(NodeArray([])) == 0
    with pytest.raises(ValueError, match="read-only"):
        array.ids[0] = 1


@pytest.mark.parametrize("max_generation", [3, 2**31 - 1])
def test_every_handle_ever_issued_gives_its_own_payload_or_raises_stale_handle(max_generation):
    session, rng = Session(new_graph(block=4, max_generation=max_generation)), random.Random(1)
    for step in range(deep(1200, 600)):  # Session.issue fails on a handle issued twice
        choice = rng.random()
        if choice < 0.25 and session.past:
            session.undo()
        elif choice < 0.35 and session.future:
            session.redo()
        else:
            random_edit(session, rng)
        if step % 100 == 0:
            session.reload()
            session.check_handles()
    assert len(session.issued) > 200
    session.check_handles()


def test_a_handle_never_issued_by_this_graph_is_reported_as_foreign():
    here, there = Graph(), Graph()
    here.add_node()
    far = [there.add_node() for _ in range(3)][-1]
    with pytest.raises(StaleHandle, match="was never issued by this graph; is it of a different program"):
        here.remove_node(far)
