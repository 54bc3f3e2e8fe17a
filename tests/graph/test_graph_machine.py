"""The container against a model of dicts: every edit, query, undo, redo, and save, in any order."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from graphwright.graph import buckets

from .model import Session, new_graph


class GraphMachine(RuleBasedStateMachine):
    """Random edits, undo, redo, save and load; `compiled` sends the smallest batch through the compiled loops."""

    compiled = False

    @initialize(block=st.sampled_from([1, 4, 16]), max_generation=st.sampled_from([3, 2**31 - 1]))
    def start(self, block, max_generation):
        self.session = Session(new_graph(block=block, max_generation=max_generation))
        self.patch = pytest.MonkeyPatch()
        if self.compiled:
            self.patch.setattr(buckets, "BULK_MIN", 0)

    def teardown(self):
        if hasattr(self, "patch"):
            self.patch.undo()

    def node(self, data):
        return data.draw(st.sampled_from(list(self.session.model.nodes)))

    def edge(self, data):
        return data.draw(st.sampled_from(list(self.session.model.edges)))

    def some(self, data, of):
        return data.draw(st.lists(st.sampled_from(list(of)), unique=True, max_size=6))

    def has_nodes(self):
        return bool(self.session.model.nodes)

    def has_edges(self):
        return bool(self.session.model.edges)

    @rule()
    def add_node(self):
        self.session.add_node()

    @precondition(has_nodes)
    @rule(data=st.data(), times=st.integers(1, 5))
    def add_edges_in_parallel(self, data, times):
        s, t = self.node(data), self.node(data)
        for _ in range(times):
            self.session.add_edge(s, t)

    @precondition(has_edges)
    @rule(data=st.data())
    def remove_edge(self, data):
        self.session.remove_edge(self.edge(data))

    @precondition(has_nodes)
    @rule(data=st.data())
    def remove_node(self, data):
        self.session.remove_node(self.node(data))

    @precondition(has_edges)
    @rule(data=st.data(), which=st.sampled_from(["source", "target", "both"]))
    def rewire(self, data, which):
        s = None if which == "target" else self.node(data)
        t = None if which == "source" else self.node(data)
        self.session.rewire(self.edge(data), s, t)

    @precondition(has_nodes)
    @rule(data=st.data(), count=st.integers(0, 8))
    def add_edges(self, data, count):
        self.session.add_edges([(self.node(data), self.node(data)) for _ in range(count)])

    @precondition(has_edges)
    @rule(data=st.data())
    def remove_edges(self, data):
        self.session.remove_edges(self.some(data, self.session.model.edges))

    @precondition(has_nodes)
    @rule(data=st.data())
    def remove_nodes(self, data):
        self.session.remove_nodes(self.some(data, self.session.model.nodes))

    @precondition(has_edges)
    @rule(data=st.data(), which=st.sampled_from(["source", "target", "both"]))
    def rewire_edges(self, data, which):
        edges = self.some(data, self.session.model.edges)
        s = None if which == "target" else [self.node(data) for _ in edges]
        t = None if which == "source" else [self.node(data) for _ in edges]
        self.session.rewire_edges(edges, s, t)

    @precondition(lambda self: self.session.past)
    @rule(times=st.integers(1, 4))
    def undo(self, times):
        for _ in range(min(times, len(self.session.past))):
            self.session.undo()

    @precondition(lambda self: self.session.future)
    @rule(times=st.integers(1, 4))
    def redo(self, times):
        for _ in range(min(times, len(self.session.future))):
            self.session.redo()

    @rule()
    def reload(self):
        hashed = self.session.graph.hash(positions=True)
        self.session.reload()
        assert self.session.graph.hash(positions=True) == hashed

    @invariant()
    def agrees_with_the_model(self):
        if hasattr(self, "session"):
            self.session.check()


class CompiledGraphMachine(GraphMachine):
    compiled = True


TestGraph = GraphMachine.TestCase
TestCompiledGraph = CompiledGraphMachine.TestCase
