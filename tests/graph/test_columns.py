"""Typed columns: what they take, one value at a time and many."""

import numpy as np
import pytest

from graphwright.errors import DTypeError, UsageError
from graphwright.graph import ColumnSpec, Graph
from graphwright.graph.slots import Column

DTYPES = ["?", "i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8"]
VALUES = [
    0,
    1,
    -1,
    127,
    128,
    255,
    256,
    2**31 - 1,
    2**31,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**60 + 2**36 + 1,
    1.5,
    -0.0,
    1e30,
    True,
    False,
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_bulk_writes_accept_refuse_and_store_the_same_values_as_single_writes(dtype):
    for value in VALUES:
        if dtype in ("i4", "i8", "u1") and value is True:
            continue  # equal in both, covered by 1
        single, many = Graph({"x": dtype}), Graph({"x": dtype})
        outcomes = []
        for add in (lambda g=single, v=value: g.add_node(x=v), lambda g=many, v=value: g.add_nodes(1, x=[v])):
            try:
                with np.errstate(over="ignore"):
                    add()
                outcomes.append("taken")
            except DTypeError:
                outcomes.append("refused")
        assert len(set(outcomes)) == 1, (dtype, value, outcomes)
        assert single.hash() == many.hash(), (dtype, value)


@pytest.mark.parametrize("dtype", ["U4", "M8[s]", "c8", "V4"])
def test_unsupported_column_dtypes_are_refused(dtype):
    with pytest.raises(DTypeError, match="unsupported column dtype"):
        Graph({"x": dtype})


@pytest.mark.parametrize("name", ["src", "self", "two words", "x"])
def test_invalid_and_duplicate_column_names_are_refused(name):
    g = Graph({"x": "f4"})
    with pytest.raises(UsageError, match=r"invalid column name|a column of this name exists"):
        g.nodes.add_column(name, "i4")


def test_columns_keep_their_values_while_they_grow():
    column = Column("x", ("f4", 2.5))
    seen = []
    for capacity in (3, 10, 40):
        column.grow(capacity)
        column.cells[capacity - 1] = capacity
        seen.append(capacity)
        assert [column.data[c - 1] for c in seen] == seen
        assert column.data.__array_interface__["data"][0] % 64 == 0
    assert column.data[20] == 2.5


def test_a_column_takes_one_value_for_all_rows_or_one_per_row():
    g = Graph({"x": "f4", "o": object})
    nodes = g.add_nodes(3, x=2, o=("a", "b", "c"))  # a tuple is one value
    assert [g.node(n, "o") for n in nodes] == [("a", "b", "c")] * 3
    more = g.add_nodes(3, x=[1, 2, 3], o=["a", "b", "c"])
    assert [(g.node(n, "x"), g.node(n, "o")) for n in more] == [(1, "a"), (2, "b"), (3, "c")]
    for bad in ({"x": [1, 2]}, {"o": ["a"]}, {"x": [[1, 2, 3]]}):
        with pytest.raises(UsageError, match="wrong number of values"):
            g.add_nodes(3, **bad)
    with pytest.raises(DTypeError):
        g.add_nodes(2, x=["a", "b"])
    assert g.node_count == 6


def test_a_deleted_row_releases_its_object():
    g = Graph({"o": object})
    first, rest = g.add_node(o=["kept"]), g.add_nodes(2, o=[["x"], ["y"]])
    g.remove_node(first)
    g.remove_nodes(rest)
    assert g._node_table.columns["o"].data[:3] == [None] * 3


def test_encode_and_decode_convert_objects_for_hash_and_file():
    spec = ColumnSpec(object, complex(0, 0), encode=lambda z: [z.real, z.imag], decode=lambda p: complex(*p))
    g = Graph({"z": spec})
    a, b = g.add_node(z=1 + 2j), g.add_node()
    saved = g.to_dict()
    assert saved["nodes"]["columns"]["z"]["rows"] == [[1.0, 2.0], [0.0, 0.0]]
    loaded = Graph.from_dict(saved, node_columns={"z": spec})
    assert (loaded.node(a, "z"), loaded.node(b, "z")) == (1 + 2j, 0j)
    assert loaded.hash() == g.hash()
    g.set_node(b, z=1j)
    assert loaded.hash() != g.hash()
