"""Attention patterns as sources of a program: runs, edits in the journal, undo, forks, files, replay and threads."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pattern_programs import KEY, dense, inputs, program_of

import graphwright as gw
from graphwright.errors import GraphwrightError, UsageError
from graphwright.graph import EdgeId, EditBusy
from graphwright.patterns import BlockRange, Pattern, PatternShape, causal_full, sliding_window
from graphwright.program.errors import ProgramFileError, SpecMismatch
from graphwright.program.pattern_digest import PatternDigest
from graphwright.program.patterns import PatternVariable


def edge_of(pattern: Pattern, query: int, key: int) -> EdgeId:
    """Return the edge of two blocks, which exists."""
    edge = pattern.edge_between(query, key)
    assert edge is not None
    return edge


def close(p: gw.Program, x: np.ndarray) -> None:
    """Assert that run and plan equal dense attention with the present mask of the pattern."""
    want = dense(p, x, p.patterns[KEY].to_dense())
    np.testing.assert_allclose(np.asarray(p.run(x=x)["y"]), want, atol=2e-5)
    np.testing.assert_allclose(np.asarray(gw.compile(p)(x=x)["y"]), want, atol=2e-5)


# -- runs and edits ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tokens", [1, 15, 16, 37])
@pytest.mark.parametrize("planes", [1, 2])
def test_runs_equal_dense_attention_with_the_mask(tokens: int, planes: int) -> None:
    p = program_of(sliding_window(40, 9, block=8, planes=planes))
    close(p, inputs(tokens))


def test_an_edit_is_a_journal_entry_and_changes_the_next_run_of_the_same_plan() -> None:
    p = program_of(sliding_window(48, 8, block=8))
    pattern, x = p.patterns[KEY], inputs(48)
    plan = p.compile(x=x.shape)
    version, structure = p.version, p.structure_hash()
    for query, key in [(5, 0), (4, 1), (3, 0)]:
        before = p.hash()
        with pattern.edit(f"see block {key}") as e:
            edge = e.connect(query, key)
        assert p.journal[-1].why == f"see block {key}"
        assert p.journal[-1].edits[0]["edit"] == "EditPattern"
        assert (p.journal[-1].before, p.journal[-1].after) == (before, p.hash())
        assert before != p.hash()
        np.testing.assert_allclose(np.asarray(plan({"x": x})["y"]), dense(p, x, pattern.to_dense()), atol=2e-5)
        assert plan.fresh
        assert p.compile(x=x.shape) is plan
    pattern.cut(edge)
    np.testing.assert_allclose(np.asarray(plan({"x": x})["y"]), dense(p, x, pattern.to_dense()), atol=2e-5)
    assert p.version == version + 4
    assert p.structure_hash() == structure
    assert p.compile(x=x.shape) is plan
    p.journal.verify()


def test_a_thousand_edits_keep_the_plan_and_the_compiled_program() -> None:
    p = program_of(sliding_window(64, 8, block=8))
    pattern, x, compiled = p.patterns[KEY], inputs(64), gw.compile(p)
    compiled(x=x)
    plan, rng = p.compile(x=x.shape), np.random.default_rng(0)
    for i in range(1000):
        query, key = sorted(rng.integers(0, 8, 2).tolist(), reverse=True)
        if pattern.has(query, key):
            pattern.cut(edge_of(pattern, query, key))
        else:
            pattern.connect(query, key)
        if i % 100 == 0:
            want = dense(p, x, pattern.to_dense())
            np.testing.assert_allclose(np.asarray(compiled(x=x)["y"]), want, atol=2e-5)
            np.testing.assert_allclose(np.asarray(plan({"x": x})["y"]), want, atol=2e-5)
    assert plan.fresh
    assert p.compile(x=x.shape) is plan
    assert len(p.journal) == 1000


def test_undo_and_redo_give_equal_bits_and_hashes() -> None:
    p = program_of(causal_full(40, block=8))
    pattern, x = p.patterns[KEY], inputs(40)
    states = [(p.hash(), pattern.hash(positions=True), p.run(x=x)["y"].tobytes())]
    rng = np.random.default_rng(1)
    for i in range(6):
        with pattern.edit(f"edit {i}", "gate") as e:
            edges = pattern.edges()
            e.cut(edges[: 1 + int(rng.integers(3))])
        states.append((p.hash(), pattern.hash(positions=True), p.run(x=x)["y"].tobytes()))
    assert [entry.author for entry in p.journal] == ["gate"] * 6
    for i in reversed(range(6)):
        p.undo()
        assert (p.hash(), pattern.hash(positions=True), p.run(x=x)["y"].tobytes()) == states[i]
    p.redo(6)
    assert (p.hash(), pattern.hash(positions=True), p.run(x=x)["y"].tobytes()) == states[-1]
    with pytest.raises(UsageError, match="owns"):
        pattern.undo()


def test_pattern_edits_within_a_program_edit_are_a_part_of_it_and_roll_back_with_it() -> None:
    p = program_of(sliding_window(40, 8, block=8))
    pattern, before = p.patterns[KEY], p.hash()
    with p.edit("both") as e:
        pattern.connect(4, 0)
        e.set_weight("layers.0.q.weight", lambda w: 2 * w)
    assert len(p.journal) == 1
    assert [r["edit"] for r in p.journal[0].edits] == ["EditPattern", "SetWeight"]
    after = p.hash()
    with pytest.raises(UsageError, match="already connected"), p.edit("fails"):
        pattern.connect_many([4, 4], [1, 0])
    assert p.hash() == after
    assert not pattern.has(4, 1)
    assert len(p.journal) == 1
    p.undo()
    assert p.hash() == before
    assert not pattern.has(4, 0)
    p.redo()
    assert p.hash() == after
    assert pattern.has(4, 0)


def test_an_edit_of_a_program_that_fails_reverts_the_pattern() -> None:
    p = program_of(sliding_window(40, 8, block=8))
    pattern, before = p.patterns[KEY], p.hash()

    def fails() -> None:
        with p.edit("fails"):
            pattern.connect(4, 1)
            pattern.cut(pattern.edges()[:2])
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fails()
    assert p.hash() == before
    assert not pattern.has(4, 1)


def test_an_edit_that_fails_leaves_program_and_pattern() -> None:
    p = program_of(sliding_window(40, 8, block=8))
    pattern, before = p.patterns[KEY], p.hash()

    def twice() -> None:
        with pattern.edit("twice") as e:
            e.connect(4, 0)
            e.connect(4, 0)

    with pytest.raises(UsageError, match="already connected"):
        twice()
    assert p.hash() == before
    assert len(p.journal) == 0
    assert not pattern.has(4, 0)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.booleans()), max_size=12), st.integers(1, 2))
def test_the_hash_depends_on_the_edges_alone(script: list[tuple[int, int, bool]], planes: int) -> None:
    p = program_of(sliding_window(37, 12, block=8, planes=planes))
    pattern, held = p.patterns[KEY], p.weights.at_key(KEY)
    assert isinstance(held, PatternVariable)
    for query, key, twice in script:
        if key > query:
            continue
        if pattern.has(query, key):
            pattern.cut(edge_of(pattern, query, key))
        else:
            edge = pattern.connect(query, key)
            if twice:
                with pattern.edit("pin") as e:
                    e.set(edge, pinned=1)
        fresh = PatternDigest(pattern)
        assert held.digest == fresh.text
        np.testing.assert_array_equal(held.hashes.rows, fresh.rows)
    other, pairs = Pattern(37, 8, planes, window=12), pattern.pairs()[::-1]
    other.connect_many(pairs[:, 1], pairs[:, 2], pairs[:, 0])
    with pattern.edit("no pins") as e:
        e.set(pattern.edges(), pinned=0)
    assert PatternDigest(other).text == held.digest
    other.cut(other.edges()[:1])
    assert PatternDigest(other).text != held.digest


def test_blame_names_the_edits_of_a_pattern() -> None:
    p = program_of(sliding_window(40, 8, block=8))
    p.patterns[KEY].connect(4, 0)
    with p.edit("other") as e:
        e.set_weight("layers.0.q.weight", lambda w: 2 * w)
    assert [entry.seq for entry in p.blame(KEY)] == [0]


def test_blame_of_one_edge_names_its_edits_alone(tmp_path: Path) -> None:
    p = program_of(sliding_window(40, 8, block=8))
    pattern = p.patterns[KEY]
    pattern.connect(4, 0)
    pattern.connect(3, 0)
    with p.edit("cut it") as e:
        pattern.cut(edge_of(pattern, 4, 0))
        e.set_weight("layers.0.q.weight", lambda w: 2 * w)
    with pattern.edit("both again") as e:
        e.connect(4, 0)
        e.set(edge_of(pattern, 3, 0), pinned=1)
    assert [entry.seq for entry in pattern.blame(4, 0)] == [0, 2, 3]
    assert [entry.seq for entry in pattern.blame(3, 0)] == [1, 3]
    assert pattern.blame(4, 4) == []
    p.undo()
    assert [entry.undoes for entry in pattern.blame(3, 0)] == [None, None, 3]
    pattern.extend(80)
    assert [entry.why for entry in pattern.blame(9, 9)] == ["extend to 80 x 80 tokens"]
    p.save(tmp_path / "saved")
    again = gw.program.load(tmp_path / "saved").patterns[KEY].blame(4, 0)
    assert [entry.seq for entry in again] == [entry.seq for entry in pattern.blame(4, 0)]
    twin = pattern.copy()
    twin.connect(9, 0)
    twin.cut(edge_of(twin, 9, 0))
    assert [entry.why for entry in twin.blame(9, 0)] == ["connect", "cut"]
    with pytest.raises(BlockRange):
        twin.blame(10, 0)


# -- what is refused ---------------------------------------------------------------------------------------------------
def test_a_pattern_belongs_to_one_program() -> None:
    pattern = sliding_window(40, 8, block=8)
    p = program_of(pattern)
    with pytest.raises(UsageError, match="already belongs"):
        program_of(pattern)
    with p.edit("again") as e, pytest.raises(UsageError, match="already belongs"):
        e.pattern("second", pattern)
    assert program_of(pattern.copy()).patterns[KEY].owner is not pattern.owner


def test_the_table_is_not_a_weight() -> None:
    p = program_of(sliding_window(40, 8, block=8))
    with p.edit("no") as e, pytest.raises(UsageError, match="cannot be set"):
        e.set_weight(KEY, np.zeros(40, np.int64))
    with pytest.raises(SpecMismatch, match="does not come from a pattern"), p.edit("addresses from a const") as e:
        e.rewire(f"{KEY} -> layers.0.attention", e.const("fake", np.zeros(40, np.int64)))
    assert KEY not in dict(p.named_parameters())
    assert KEY not in p.constants()
    assert all(variable.name != KEY for variable in p.parameters())


def test_a_removed_pattern_cannot_be_edited_until_it_is_back() -> None:
    p = program_of(causal_full(40, block=8))
    with p.edit("second") as e:
        e.pattern("other", sliding_window(40, 8, block=8))
    other = p.patterns["other"]
    p.undo()
    with pytest.raises(UsageError, match="no longer has it"):
        other.connect(4, 0)
    p.redo()
    other.connect(4, 0)
    assert p.patterns["other"] is other
    assert len(p.journal[-1].edits) == 1


# -- forks, past states, other programs --------------------------------------------------------------------------------
def test_forks_and_past_states_are_independent() -> None:
    p = program_of(sliding_window(40, 8, block=8))
    x, pattern = inputs(40), p.patterns[KEY]
    pattern.connect(4, 0)
    twin = p.fork()
    assert twin.hash() == p.hash()
    assert twin.patterns[KEY] is not pattern
    twin.patterns[KEY].connect(4, 1)
    assert not pattern.has(4, 1)
    assert len(twin.journal) == 1
    assert len(p.journal) == 1
    close(twin, x)
    close(p, x)
    pattern.connect(3, 0)
    past = p.at(0)
    assert past.patterns[KEY].has(4, 0)
    assert not past.patterns[KEY].has(3, 0)
    close(past, x)
    with pytest.raises(UsageError, match="past state"):
        past.patterns[KEY].connect(3, 0)
    assert not past.patterns[KEY].has(3, 0)


def test_the_difference_names_edges() -> None:
    p = program_of(sliding_window(40, 8, block=8))
    pattern, before = p.patterns[KEY], p.fork()
    pattern.connect(4, 0)
    pattern.cut(edge_of(pattern, 1, 0))
    (found,) = p.diff(before).patterns
    assert (found.key, found.added, found.removed) == (KEY, ((0, 4, 0),), ((0, 1, 0),))
    assert "4 <- 0" in str(p.diff(before))
    assert "1 <- 0" in str(p.diff(before))
    p.undo(2)
    assert p.diff(before).identical


def test_a_journal_is_replayed_on_another_program() -> None:
    p = program_of(sliding_window(40, 8, block=8))
    other = p.fork()
    p.patterns[KEY].connect(4, 0)
    with p.edit("second pattern") as e:
        e.pattern("other", causal_full(40, block=8))
    p.patterns["other"].cut(p.patterns["other"].edges()[:2])
    gw.replay(p.journal, onto=other)
    assert other.hash() == p.hash()
    assert [e.why for e in other.journal] == [e.why for e in p.journal]


# -- files -------------------------------------------------------------------------------------------------------------
READ = """
import sys, json, numpy as np, graphwright as gw
from graphwright.program import load
p = load(sys.argv[1])
x = np.load(sys.argv[2])
pattern = p.patterns["window"]
y = np.asarray(p.run(x=x)["y"])
p.undo(); p.redo()
print(json.dumps([p.hash(), pattern.pairs().tolist(), [int(e) for e in pattern.edges()], y.tobytes().hex(),
                  p.patterns["window"].hash(positions=True)]))
"""


def test_a_saved_program_has_its_patterns_in_a_new_process(tmp_path: Path) -> None:
    p = program_of(sliding_window(40, 8, block=8))
    pattern, x = p.patterns[KEY], inputs(40)
    pattern.connect(4, 0)
    pattern.cut(pattern.edges()[:2])
    np.save(tmp_path / "x.npy", x)
    p.save(tmp_path / "saved")
    code = [sys.executable, "-c", READ, str(tmp_path / "saved"), str(tmp_path / "x.npy")]
    made = subprocess.run(code, capture_output=True, text=True, check=True).stdout
    digest, pairs, handles, y, positions = json.loads(made)
    assert digest == p.hash()
    assert pairs == pattern.pairs().tolist()
    assert handles == [int(e) for e in pattern.edges()]
    assert bytes.fromhex(y) == p.run(x=x)["y"].tobytes()
    assert positions == pattern.hash(positions=True)


def test_undo_of_a_loaded_program_brings_back_a_removed_pattern(tmp_path: Path) -> None:
    p = program_of(sliding_window(40, 8, block=8))
    with p.edit("second") as e:
        node = e.pattern("other", causal_full(40, block=8))
    p.patterns["other"].cut(p.patterns["other"].edges()[:2])
    kept = p.hash()
    with p.edit("remove it") as e:
        e.remove(node)
    p.save(tmp_path / "saved")
    loaded = gw.program.load(tmp_path / "saved")
    assert loaded.hash() == p.hash()
    assert list(loaded.patterns) == [KEY]
    loaded.undo()
    assert loaded.hash() == kept
    loaded.undo(2)
    p.undo(3)
    assert loaded.hash() == p.hash()
    loaded.redo(3)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    p = program_of(sliding_window(40, 8, block=8))
    p.patterns[KEY].connect(4, 0)
    p.save(tmp_path / "saved")
    path = tmp_path / "saved" / "patterns.safetensors"
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    for at in np.linspace(start, len(data) - 1, 20).astype(int):
        broken = bytearray(data)
        broken[at] ^= 0x11
        path.write_bytes(bytes(broken))
        with pytest.raises(ProgramFileError, match="damaged"):
            gw.program.load(tmp_path / "saved")
    path.unlink()
    with pytest.raises(ProgramFileError):
        gw.program.load(tmp_path / "saved")


# -- threads -----------------------------------------------------------------------------------------------------------
def test_each_run_during_edits_equals_one_version() -> None:
    p = program_of(sliding_window(64, 8, block=8))
    pattern, x = p.patterns[KEY], inputs(64, rows=1)
    plan = p.compile(x=x.shape)
    pairs = [(q, k) for q in range(2, 8) for k in range(q - 1)]
    results: list[bytes] = []
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            results.append(plan({"x": x})["y"].tobytes())

    thread = threading.Thread(target=run)
    thread.start()
    states = [pattern.to_dense()]
    for query, key in pairs:
        pattern.connect(query, key)
        states.append(pattern.to_dense())
    for query, key in pairs[::2]:
        pattern.cut(edge_of(pattern, query, key))
        states.append(pattern.to_dense())
    time.sleep(0.02)
    stop.set()
    thread.join()
    wanted = [dense(p, x, state) for state in states]
    for made in set(results):
        got = np.frombuffer(made, np.float32).reshape(x.shape)
        assert min(np.abs(got - want).max() for want in wanted) < 2e-5
    assert plan.fresh


def test_an_edit_waits_for_the_run_and_gives_up() -> None:
    p = program_of(sliding_window(40, 8, block=8))
    pattern = p.patterns[KEY]
    pattern.timeout = 0.05
    entered, leave = threading.Event(), threading.Event()

    def read() -> None:
        with pattern.reading():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=read)
    thread.start()
    entered.wait()
    before = p.hash()
    with pytest.raises(EditBusy, match="run reads"):
        pattern.connect(4, 0)
    leave.set()
    thread.join()
    assert p.hash() == before
    assert not pattern.has(4, 0)
    pattern.connect(4, 0)
    assert len(p.journal) == 1


def test_a_run_longer_than_the_pattern_is_refused_and_extend_admits_it() -> None:
    p = program_of(sliding_window(40, 8, block=8))
    x = inputs(64)
    plan = p.compile(x=x.shape)
    with pytest.raises(PatternShape, match=r"layers\.0\.attention: queries or keys are longer"):
        plan({"x": x})
    with pytest.raises(GraphwrightError, match="longer than the pattern"):
        p.run(x=x)
    p.patterns[KEY].extend(64)
    np.testing.assert_allclose(np.asarray(plan({"x": x})["y"]), dense(p, x, p.patterns[KEY].to_dense()), atol=2e-5)
    assert plan.fresh
    assert p.journal[-1].why == "extend to 64 x 64 tokens"
