"""Random edits against the oracle "built from nothing": whatever was done, undone and redone, the program equals it."""

from __future__ import annotations

from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from program_samples import (
    BINARY,
    COLS,
    ROWS,
    UNARY,
    counters,
    fingerprint,
    labels,
    outputs,
    planned,
    random_program,
    rebuilt,
    weight_bytes,
)

from graphwright.array import float32
from graphwright.errors import CycleError, GraphwrightError, UsageError
from graphwright.program import Builder, Program, Transaction, Value, load
from graphwright.program.kinds import STORED

PICK = st.integers(0, 10**6)
FULL = (ROWS, COLS)


class Boom(Exception):
    pass


def values(p: Program) -> list[Value]:
    """Everything of the usual spec."""
    return [Value(n) for n in p.order() if p.specs(n) and p.spec(n).shape == FULL and p.spec(n).dtype is float32]


def pick(items, n: int):
    if not items:
        raise UsageError("there is nothing to pick")  # a script may have removed all junctions
    return items[n % len(items)]


def edge_of_full_spec(p: Program, n: int):
    found = [
        e for e in p.graph.edges() if p.spec(p.edge_value(e)).shape == FULL and p.op(p.graph.target(e)) != "assign"
    ]
    return pick(found, n) if found else None


# -- verbs: (open edit, two numbers) -> None; what they refuse they refuse by a GraphwrightError ---------------------
def add(e: Transaction, a: int, b: int) -> None:
    p = e.program
    one, two = pick(values(p), a), pick(values(p), b)
    if a % 3 == 0:
        e.add(pick(UNARY, b), one)
    elif a % 3 == 1:
        e.add(pick(BINARY, b), one, two, name=p.free_name(f"m{b % 3}.made"))
    else:
        e.add("junction", one, two, one)


def remove(e: Transaction, a: int, b: int) -> None:
    p = e.program
    unread = [n for n in p.nodes() if not p.consumers(n) and p.op(n) != "assign" and Value(n) not in p.outputs()]
    e.remove(pick(unread if unread and b % 4 else list(p.nodes()), a))


def connect(e: Transaction, a: int, b: int) -> None:
    p = e.program
    e.connect(pick(values(p), a), pick(p.junctions(), b), delay=int(a % 11 == 0))


def cut(e: Transaction, a: int, b: int) -> None:
    p = e.program
    found = [edge for j in p.junctions() for edge in p.in_edges(j)]
    e.cut(pick(found if found and b % 5 else list(p.graph.edges()), a))


def rewire(e: Transaction, a: int, b: int) -> None:
    p = e.program
    edge = edge_of_full_spec(p, a)
    if edge is not None:
        e.rewire(edge, pick(values(p), b))


def rewire_there_and_back(e: Transaction, a: int, b: int) -> None:
    p = e.program
    edge = edge_of_full_spec(p, a)
    if edge is not None:
        home = p.edge_value(edge)
        e.rewire(edge, pick(p.inputs(), b))
        e.add("neg", home)  # reuses the position in the list
        e.rewire(edge, home)


def insert(e: Transaction, a: int, b: int) -> None:
    edge = edge_of_full_spec(e.program, a)
    if edge is not None:
        e.insert(edge, pick((*UNARY, "junction"), b))


def replace(e: Transaction, a: int, b: int) -> None:
    p = e.program
    nodes = [v.node for v in values(p) if p.op(v.node) in UNARY]
    if nodes:
        sub = Builder()
        sub.output(sub.op(pick(UNARY, b), sub.op("neg", sub.input("in", FULL), name="inner")), "out")
        e.replace([pick(nodes, a)], sub.build())


def set_attr(e: Transaction, a: int, b: int) -> None:
    p = e.program
    norms = p.of_kind("rms_norm")
    if norms and a % 2:
        e.set_attr(pick(norms, a), eps=10.0 ** -(b % 6))
    else:
        e.set_attr(pick(p.params(), a), trainable=bool(b % 2))


def set_weight(e: Transaction, a: int, b: int) -> None:
    e.set_weight(pick(sorted(e.program.weights), a), lambda w: w * 0.5 + b % 7, inplace=b % 2 == 0)


def rename(e: Transaction, a: int, b: int) -> None:
    p = e.program
    node = pick([n for n in p.nodes() if p.op(n) != "input"], a)
    e.rename(node, f"m{b % 4}.name{b % 9}", key=f"key{b % 5}" if b % 3 == 0 else None)


def link(e: Transaction, a: int, b: int) -> None:
    p = e.program
    e.link(pick(values(p), a), pick(p.junctions(), b), np.full((COLS, COLS), 0.01 * (b % 5), "f4"))


def tie(e: Transaction, a: int, b: int) -> None:
    p = e.program
    square = [n for n in p.params() if p.spec(n).shape == (COLS, COLS)]
    if square:
        e.add("linear", pick(values(p), a), pick(square, b))


def unfold(e: Transaction, a: int, b: int) -> None:
    linears = e.program.of_kind("linear")
    if linears:
        e.unfold(pick(linears, a), pick(("in", "out"), b), units=2 + 2 * (b % 3 == 0))


def fold(e: Transaction, a: int, b: int) -> None:
    p = e.program
    unfolded = [n for n in p.junctions() if any(p.path(n) + ".0" == p.path(m) for m in p.of_kind("linear"))]
    e.fold(pick(unfolded or list(p.nodes()), a))


def set_outputs(e: Transaction, a: int, b: int) -> None:
    p = e.program
    e.set_outputs(y=pick(values(p), a), **({"extra": pick(values(p), b)} if b % 2 else {}))


def train(e: Transaction, a: int, b: int) -> None:
    variable = e.program.weights[pick(sorted(e.program.weights), a)]
    variable.own().to_numpy()[...] += np.float32(b % 5)
    variable.data.writable()


def look(e: Transaction, a: int, b: int) -> None:
    e.spec(pick(values(e.program), a))


VERBS = [
    add,
    remove,
    connect,
    cut,
    rewire,
    rewire_there_and_back,
    insert,
    replace,
    set_attr,
    set_weight,
    rename,
    link,
    tie,
]
VERBS += [unfold, fold, set_outputs, train, look]
SCRIPT = st.lists(st.tuples(st.sampled_from(VERBS), PICK, PICK), min_size=1, max_size=5)


class EditMachine(RuleBasedStateMachine):
    """Attributes: `past` and `ahead` hold the fingerprints that undo and redo must reach."""

    @initialize(seed=st.integers(0, 500))
    def start(self, seed: int) -> None:
        self.p = random_program(seed)
        self.past: list[tuple] = []
        self.ahead: list[tuple] = []
        self.marks: dict[str, tuple[int, tuple]] = {}
        self.seen: tuple = ()

    # -- edits ------------------------------------------------------------------------------------------------------
    def attempt(self, body) -> None:
        """One edit; refused, it must have changed nothing."""
        before, counts = fingerprint(self.p), counters(self.p)
        try:
            with self.p.edit("random") as e:
                body(e)
        except (GraphwrightError, Boom):
            assert fingerprint(self.p) == before
            assert counters(self.p) == counts
            return
        if counters(self.p) == counts:  # nothing was done
            assert fingerprint(self.p) == before
            return
        assert counters(self.p)[:2] == (counts[0] + 1, counts[1] + 1)
        self.past.append(before)
        self.ahead.clear()
        self.marks = {name: m for name, m in self.marks.items() if m[0] < len(self.past)}

    @rule(script=SCRIPT)
    def edit(self, script) -> None:
        def body(e: Transaction) -> None:
            for verb, a, b in script:
                verb(e, a, b)

        self.attempt(body)

    @rule(verb=st.sampled_from(VERBS), a=PICK, b=PICK)
    def edit_once(self, verb, a: int, b: int) -> None:
        self.attempt(lambda e: verb(e, a, b))

    @rule(script=SCRIPT, at=st.integers(0, 5))
    def edit_that_fails(self, script, at: int) -> None:
        def body(e: Transaction) -> None:
            for i, (verb, a, b) in enumerate(script):
                if i == at:
                    raise Boom
                verb(e, a, b)
            raise Boom

        self.attempt(body)

    @rule(script=SCRIPT, inner=SCRIPT, fails=st.booleans())
    def nested(self, script, inner, fails: bool) -> None:
        def body(e: Transaction) -> None:
            for verb, a, b in script:
                verb(e, a, b)
            try:
                with e.program.edit("inner") as same:
                    assert same is e
                    for verb, a, b in inner:
                        verb(e, a, b)
                    if fails:
                        raise Boom
            except (GraphwrightError, Boom):
                pass

        self.attempt(body)

    @rule(a=PICK, b=PICK)
    def a_cycle_is_refused(self, a: int, b: int) -> None:
        p = self.p
        later = [n for n in p.order() if p.specs(n) and p.spec(n).shape == FULL]
        for junction in p.junctions():
            below = [n for n in later if junction in p.reachable([n])]
            if below:
                before = fingerprint(p)
                with pytest.raises(CycleError) as caught, p.edit("cycle") as e:
                    e.connect(pick(below, a), junction)
                assert junction in caught.value.path
                assert fingerprint(p) == before

    # -- time -------------------------------------------------------------------------------------------------------
    @precondition(lambda self: self.past)
    @rule(n=st.integers(1, 4))
    def undo(self, n: int) -> None:
        n = min(n, len(self.past))
        for _ in range(n):
            self.ahead.append(fingerprint(self.p))
            self.p.undo()
            assert fingerprint(self.p) == self.past.pop()

    @precondition(lambda self: self.ahead)
    @rule(n=st.integers(1, 4))
    def redo(self, n: int) -> None:
        for _ in range(min(n, len(self.ahead))):
            self.past.append(fingerprint(self.p))
            self.p.redo()
            assert fingerprint(self.p) == self.ahead.pop()

    @rule(name=st.sampled_from("ab"))
    def mark(self, name: str) -> None:
        self.p.mark(name)
        self.marks[name] = (len(self.past), fingerprint(self.p))

    @precondition(lambda self: any(m[0] <= len(self.past) for m in self.marks.values()))
    @rule(n=PICK)
    def rollback(self, n: int) -> None:
        name = pick([k for k, m in sorted(self.marks.items()) if m[0] <= len(self.past)], n)
        depth, wanted = self.marks[name]
        states = [*self.past[depth:], fingerprint(self.p)]
        assert states[0] == wanted
        assert self.p.rollback(name) == len(states) - 1
        assert fingerprint(self.p) == wanted
        self.ahead += reversed(states[1:])
        del self.past[depth:]

    @precondition(lambda self: self.past)
    @rule()
    def all_the_way_and_back(self) -> None:
        n, now = len(self.past), fingerprint(self.p)
        self.p.undo(n)
        assert fingerprint(self.p) == self.past[0]
        self.p.redo(n)
        assert fingerprint(self.p) == now

    @rule()
    def save_and_load(self) -> None:
        with TemporaryDirectory() as folder:
            self.p.save(f"{folder}/p")
            other = load(f"{folder}/p", verify=True)
            assert fingerprint(other) == fingerprint(self.p)
            assert counters(other) == counters(self.p)
            assert other.state_hash() == self.p.state_hash()
        self.p = other

    @precondition(lambda self: len(self.p.journal) > 0)
    @rule(n=PICK)
    def a_past_state(self, n: int) -> None:
        seq = self.p.history.undoable[n % len(self.past)].seq if self.past else -1
        past = self.p.at(seq)
        assert past.state_hash() == (self.p.journal[seq].after if seq >= 0 else self.p.journal[0].before)
        assert weight_bytes(self.p) == weight_bytes(self.p.fork())

    # -- what always holds --------------------------------------------------------------------------------------------
    @invariant()
    def equals_the_program_built_from_nothing(self) -> None:
        if not hasattr(self, "p") or self.seen == (self.p.version, id(self.p)):
            return
        self.seen = (self.p.version, id(self.p))
        p, fresh = self.p, rebuilt(self.p)
        assert p.valid
        assert p.hash() == fresh.hash()
        assert p.weight_keys() == fresh.weight_keys()
        assert {k: p.readers(k) for k in p.weight_keys()} == walked(p)
        refreshed = p.fork()
        refreshed.weights._references.clear()
        assert p.state_hash() == refreshed.state_hash()
        assert p.validate().ok
        key = labels(p)
        assert all(key[a] < key[b] for e in p.graph.edges() for a, b in [p.graph.endpoints(e)])
        wanted = outputs(fresh)
        assert outputs(p) == wanted
        assert planned(p) == wanted
        p.journal.verify()


def walked(p) -> dict:
    """The nodes that stand for each weight, found by looking at all."""
    found: dict = {}
    for node in sorted((n for n in p.nodes() if p.op(n) in STORED), key=lambda n: (p.op(n), p.seq(n))):
        found.setdefault(p.key(node), []).append(node)
    return {key: tuple(nodes) for key, nodes in found.items()}


EditMachine.TestCase.settings = settings(
    max_examples=max(settings().max_examples // 2, 5), stateful_step_count=25, deadline=None
)
test_edits = EditMachine.TestCase
