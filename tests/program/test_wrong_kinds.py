"""Arguments of a wrong kind are typed errors that name what was got, wherever they are put, and change nothing."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from program_samples import counters, fingerprint, tiny

import graphwright as gw
from graphwright.array import float32
from graphwright.errors import GraphwrightError, UsageError
from graphwright.files import UnwritableTarget
from graphwright.graph import CapacityError, EdgeId, NodeId
from graphwright.program.op_graph import MAX_PORT

WRONG = [
    "x\0y",
    "nope",
    "a..b",
    "\ud800",
    3,
    -7,
    2.5,
    True,
    float("nan"),
    10**30,
    b"x",
    [],
    {},
    ["nope"],
    object(),
    np.zeros(2),
]
W = np.ones((2, 3), "f4")


def call(method, /, *arguments, **named):
    """A method of the program; `...` stands for the wrong value."""
    return lambda p, v: getattr(p, method)(
        *filled(arguments, v), **dict(zip(named, filled(named.values(), v), strict=True))
    )


def verb(method, /, *arguments, **named):
    """The same of an edit."""

    def inside(p, v) -> None:
        with p.edit("wrong") as e:
            call(method, *arguments, **named)(e, v)

    return inside


def filled(arguments, v):
    return [v if a is ... else a for a in arguments]


READERS = [call(n, ...) for n in ("node", "path", "op", "attrs", "specs", "spec", "seq", "key", "operands", "in_edges")]
READERS += [call(n, ...) for n in ("edge", "edge_value", "edge_port", "consumers", "output", "node_digest", "extract")]
READERS += [call("select", ...), call("diff", ...), call("run", ...), call("at", ...), call("rollback", ...)]
EDITS = [
    verb("add", ..., "x"),
    verb("add", "relu", ...),
    verb("add", "relu", "x", name=...),
    verb("input", "q", ...),
    verb("input", ..., (2,)),
    verb("param", ..., W),
    verb("assign", ..., "h"),
    verb("assign", "w", ...),
    verb("remove", ...),
    verb("set_attr", ..., trainable=False),
    verb("rename", ..., "k"),
    verb("rename", "h", ...),
    verb("set_weight", ..., 0),
    verb("connect", ..., "j"),
    verb("connect", "h", ...),
    verb("connect", "h", "j", ...),
    verb("connect", "h", "j", delay=...),
    verb("cut", ...),
    verb("rewire", ..., "x"),
    verb("rewire", "h -> j", ...),
    verb("insert", ..., "relu"),
    verb("insert", "h -> j", ...),
    verb("link", ..., "j", W),
    verb("link", "x", ..., W),
    verb("replace", ["h"], ...),
    verb("unfold", ..., "in"),
    verb("unfold", "h", ...),
    verb("unfold", "h", "in", ...),
    verb("fold", ...),
    verb("set_outputs", y=...),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda v: repr(v)[:12])
def test_each_call_refuses_invalid_arguments(wrong):
    for change in (*READERS, *EDITS):
        p = tiny()
        before, counts = fingerprint(p), counters(p)
        try:
            change(p, wrong)
        except GraphwrightError:
            assert (fingerprint(p), counters(p)) == (before, counts)
        p.validate().check("after")


@pytest.mark.parametrize("count", ["x", "1", -1, 1.0, None, True, [1]])
def test_undo_and_redo_refuse_invalid_counts(count):
    p = tiny()
    with p.edit("one") as e:
        e.add("relu", "x")
    before = fingerprint(p)
    for walk in (p.undo, p.redo):
        with pytest.raises(UsageError, match="invalid number of edits"):
            walk(count)
    assert fingerprint(p) == before
    names: list[Any] = [3, None, "", ["a"]]
    for name in names:
        with pytest.raises(UsageError, match="invalid name of a mark"):
            p.mark(name)


@pytest.mark.parametrize("path", ["a\0b", "\ud800", 3, None, b"bytes"])
def test_invalid_paths_are_refused(path: Any, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    p = tiny()
    with pytest.raises(UnwritableTarget, match="invalid path"):
        p.save(path)
    if path is not None:  # draws without a file
        for draw in (p.to_svg, p.to_dot, p.to_html):
            with pytest.raises(UnwritableTarget, match="invalid path"):
                draw(path)
    with pytest.raises(GraphwrightError):
        gw.load(path)  # pyright: ignore[reportArgumentType]  # None is the point
    with pytest.raises(GraphwrightError):
        gw.replay(path, p)  # pyright: ignore[reportArgumentType]
    assert list(tmp_path.iterdir()) == []


def test_handles_of_another_kind_raise():
    g: Any = tiny().graph.copy()
    kinds: list[Any] = ["h", 2.5, None, [], float32]
    for wrong in kinds:
        for read in (g.in_edges, g.out_degree, g.endpoints, g.remove_edge, g.remove_node):
            with pytest.raises(UsageError, match="not a "):
                read(wrong)
    with pytest.raises(UsageError, match="not a NodeId"):
        g.in_edges(g.edges()[0])
    one, many = ("edge", "node", "rewire"), ("edges", "nodes", "rewires")
    for restore in [getattr(g, f"restore_{name}") for name in (*one, *many)]:
        for wrong in (3, None, g.edges()[0]):
            with pytest.raises(UsageError, match="not an undo record of this kind of edit"):
                restore(wrong)
    assert [type(pickle.loads(pickle.dumps(h))) for h in (g.nodes()[0], g.edges()[0])] == [NodeId, EdgeId]


def test_connecting_after_the_last_port_raises_capacity_error():
    p = tiny()
    with p.edit("far") as e:
        e.connect("h", "j", MAX_PORT)
    before = fingerprint(p)
    with pytest.raises(CapacityError) as caught, p.edit("one more") as e:
        e.connect("h", "j")
    assert caught.value.where == "j"
    assert caught.value.got == MAX_PORT + 1
    assert fingerprint(p) == before
    assert p.run(x=np.ones((1, 3), "f4"))["y"].to_numpy().tolist() == [[0, 12]]
