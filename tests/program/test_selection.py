"""Selections: patterns against a slow matcher, set laws, and a value that says when it is stale."""

from __future__ import annotations

import re
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from program_samples import fingerprint, outputs, random_program, tiny

from graphwright.errors import UsageError
from graphwright.program import Builder, CountMismatch, EmptySelection, ForeignNode, StaleSelection
from graphwright.program.selection import BadPattern, compile_pattern, matches, stem

PATHS = [
    "embed",
    "layers.0.attn",
    "layers.0.attn.q",
    "layers.0.attn.k",
    "layers.0.attn.q.weight",
    "layers.0.attn_norm",
    "layers.0.mlp.up",
    "layers.0.mlp.down",
    "layers.1.attn.q",
    "layers.1.mlp.up",
    "layers.2.mlp.up",
    "layers.10.attn.q",
    "layers.10.mlp.up",
    "layers",
    "layers.x.attn",
    "head",
    "attn",
    "attn.attn",
    "a.b.c.d.e",
    "l*yers",
    "norm[0]",
]

PATTERNS = [
    "**",
    "*",
    "*.*",
    "*.**",
    "**.*",
    "**.q",
    "**.attn",
    "**.attn.**",
    "**.attn.q",
    "layers",
    "layers.*",
    "layers.1",
    "layers.0",
    "layers.10",
    "layers.*.attn",
    "layers.*.attn.q",
    "layers.*.mlp",
    "layers.*.mlp.up",
    "layers.*.{q,k}",
    "layers.*.attn.{q,k}",
    "layers.*.attn.{q}",
    "layers.[0-1]",
    "layers.[0-1].attn",
    "layers.[2-10].mlp",
    "layers.[10-10]",
    "layers.[0-99].**.up",
    "layers.?",
    "layers.**",
    "layers.**.q",
    "layers.**.up",
    "**.layers",
    "attn",
    "attn_norm",
    "layers.0.attn*",
    "layers.0.*norm",
    "layers.0.*_*",
    "layer*",
    "*s",
    "l*s.*",
    "**.**",
    "**.weight",
    "*.0.*.q",
    "*.*.*.q.weight",
    "a.b",
    "a.**.d",
    "a.**.e",
    "a.**.b",
    "a.*.c",
    "**.c",
    "**.c.**",
    "{embed,head}",
    "{embed,layers}.0",
    "{a,attn}.{b,attn}",
    "layers.{0,1}.mlp",
    "layers.{0,[1-2]}",
    "l.yers",
    "layers.0.attn.q.weight.x",
    "e*d",
    "**.[0-9]",
    "layers.[0-0]*",
    "a.b.c.d.e",
]


def slow(pattern: str, path: str) -> bool:
    """Segment by segment with backtracking, and every prefix of the path, since a module selects what is below it."""

    def one(segment: str, name: str) -> bool:
        if not segment:
            return not name
        if segment[0] == "*":
            least = 1 if len(segment) == 1 and segment_is_whole[0] else 0
            return any(one(segment[1:], name[i:]) for i in range(least, len(name) + 1))
        if found := re.match(r"\[(\d+)-(\d+)\]", segment):
            numbers = map(str, range(int(found[1]), int(found[2]) + 1))
            return any(name.startswith(n) and one(segment[found.end() :], name[len(n) :]) for n in numbers)
        if segment[0] == "{":
            end = segment.index("}")
            choices = segment[1:end].split(",")
            return any(name.startswith(c) and one(segment[end + 1 :], name[len(c) :]) for c in choices)
        return name[:1] == segment[0] and one(segment[1:], name[1:])

    def walk(segments: list[str], names: list[str]) -> bool:
        if not segments:
            return not names
        if segments[0] == "**":
            return any(walk(segments[1:], names[i:]) for i in range(len(names) + 1))
        segment_is_whole[0] = segments[0] == "*"
        return bool(names) and one(segments[0], names[0]) and walk(segments[1:], names[1:])

    segment_is_whole = [False]
    names = path.split(".")
    return any(walk(pattern.split("."), names[:n]) for n in range(1, len(names) + 1))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_match_the_reference_matcher(pattern):
    assert [p for p in PATHS if matches(pattern, p)] == [p for p in PATHS if slow(pattern, p)]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_selected_paths_begin_with_the_stem_of_the_pattern(pattern):
    assert all(path.startswith(stem(pattern)) for path in PATHS if slow(pattern, path))


def test_a_pattern_tests_only_paths_with_its_stem():
    p = random_program(3)
    name = p.select("m1").names()[0]
    seen = []
    assert p.select("m1", where=lambda n: bool(seen.append(p.path(n))) or True).names() == p.select("m1").names()
    assert stem("layers.{1,2}.mlp") == stem("layers") == stem("layers.**") == "layers"
    assert {p.path(n) for n in p.with_prefix("m1")} >= {name}
    assert len(p.with_prefix("m1")) < len(p.with_prefix("")) == len(p)


def test_patterns_match_whole_segments_only():
    assert len(PATTERNS) >= 60
    assert not matches("layers.1", "layers.10.attn.q")
    assert not matches("**.attn", "layers.0.attn_norm")
    assert matches("layers.1", "layers.1.attn.q")


@pytest.mark.parametrize("pattern", ["", "a..b", ".a", "a.", "{a", "a}", "[5-2]", "[a-b]", "[1", "[0-999999]"])
def test_invalid_patterns_are_refused(pattern):
    with pytest.raises(BadPattern):
        compile_pattern(pattern)


@given(st.text(alphabet="ab.*{},[]-019", max_size=12), st.sampled_from(PATHS))
def test_any_text_is_accepted_or_raises_bad_pattern(pattern, path):
    with suppress(BadPattern):
        matches(pattern, path)


# -- sets -----------------------------------------------------------------------------------------------------------
CHOICES = st.lists(st.integers(0, 30), max_size=8)


@given(seed=st.integers(0, 50), a=CHOICES, b=CHOICES, c=CHOICES)
def test_selections_obey_the_laws_of_sets(seed, a, b, c):
    p = random_program(seed)
    nodes = p.order()
    everything = p.select("**")

    def chosen(numbers):
        wanted = {nodes[i % len(nodes)] for i in numbers}
        return everything.where(lambda n: n in wanted)

    x, y, z = chosen(a), chosen(b), chosen(c)
    assert (x | y).nodes == (y | x).nodes
    assert (x & (y | z)).nodes == ((x & y) | (x & z)).nodes
    assert (x - y).nodes == (x & ~y).nodes
    assert (~(x | y)).nodes == (~x & ~y).nodes
    assert (~~x).nodes == x.nodes
    assert (x | ~x).nodes == everything.nodes == tuple(nodes)
    assert (x & ~x).count == 0
    assert (x.inner() | x.boundary()).nodes == x.nodes
    assert not set(x.parents()) & set(x)
    assert set(x.children(2)) >= set(x.children(1))
    inside = set(x)
    assert set(x.in_edges()) == {e for n in x for e in p.in_edges(n) if p.graph.source(e) not in inside}
    assert set(x.out_edges()) == {e for n in x for e in p.out_edges(n) if p.graph.target(e) not in inside}
    for n in x.between(y):
        assert p.reachable([n]) & set(x)
        assert n in p.reachable(list(y))


# -- a value --------------------------------------------------------------------------------------------------------
def layered(count: int = 3):
    b = Builder()
    x = b.input("x", ("B", 2))
    for i in range(count):
        scope = b.scope(f"layers.{i}")
        x = scope.linear(x, scope.param("mlp.w", np.ones((2, 2), "f4")), name="mlp.up")
        x = scope.tanh(x, name="act")
    b.output(x, "y")
    return b.build()


def test_why_not_names_the_filter_that_excluded_a_node():
    p = layered()
    s = p.select(
        "layers.*.mlp", op="linear", kind="op", dtype="float32", where=lambda n: p.path(n)[7] != "1", regex="up$"
    )
    assert s.names() == ["layers.0.mlp.up", "layers.2.mlp.up"]
    assert s.assert_count(2) is s
    assert "where" in s.why_not("layers.1.mlp.up")
    assert "pattern" in s.why_not("layers.0.act")
    assert "op='linear'" in s.why_not("layers.0.mlp.w")
    assert "is selected" in s.why_not("layers.0.mlp.up")
    assert "dtype" in p.select("**", dtype="float64").why_not("x")
    assert "regex" in p.select("**", regex="up").why_not("x")
    assert "kind" in p.select("**", kind="op").why_not("x")
    assert "were combined" in (s - s).why_not("x")
    assert s.nth(1).names() == ["layers.2.mlp.up"]
    with pytest.raises(UsageError, match="kind"):
        p.select("**", kind="some")


def test_count_mismatch_lists_the_first_names():
    with pytest.raises(CountMismatch, match=r"layers\.0\.mlp\.up") as caught:
        layered().select("layers.*.mlp", op="linear").assert_count(6)
    assert caught.value.expected == 6


def test_selections_of_different_programs_do_not_combine():
    p, q = layered(), layered()
    s, other = p.select("layers.0"), q.select("layers.1")
    for mix in (
        lambda: s | other,
        lambda: s & other,
        lambda: s - other,
        lambda: s.between(other),
        lambda: s | p.fork().select("layers.1"),
    ):
        with pytest.raises(ForeignNode, match="different programs"):
            mix()
    with pytest.raises(ForeignNode, match="another type"):
        _ = s & {p.node("x")}  # pyright: ignore[reportOperatorIssue]  # that is the point
    for i in (3, -4, 99):
        with pytest.raises(CountMismatch, match="node index out of range"):
            s.nth(i)
    assert s.nth(-1).names() == ["layers.0.act"]


def test_show_prints_at_most_forty_lines(capsys):
    p = layered(30)
    p.select("**").show()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 40
    assert lines[-1] == f"... {len(p) - 39} more"


def test_a_stale_selection_names_deleted_nodes():
    p = layered()
    s = p.select("layers.2")
    made = s | s
    with p.edit("drop") as e:
        e.set_outputs(y="layers.1.act")
        e.remove(s)
    with pytest.raises(StaleSelection, match=r"layers\.2\.act"):
        s.names()
    assert s.refresh().count == 0
    assert made.refresh().count == 0
    with pytest.raises(StaleSelection):
        _ = s | s
    p.undo()
    assert sorted(s.names()) == ["layers.2.act", "layers.2.mlp.up", "layers.2.mlp.w"]


def test_empty_selections_raise_with_similar_names():
    p = layered()
    with pytest.raises(EmptySelection, match=r"layers\.0\.act") as caught:
        p.select("layers.9.act").edit("nothing")
    assert "did you mean" in str(caught.value.fix)
    with p.select("layers.9").edit("allowed", allow_empty=True) as e:
        e.add("relu", "x")


def test_selection_methods_equal_manual_edits():
    p, q = tiny(), tiny()
    sub = Builder()
    sub.output(sub.sigmoid(sub.input("in", ("B", 2)), name="s"), "out")
    part = sub.build()
    p.select("r").replace(part)
    with q.edit("manual") as e:
        e.replace([q.node("r")], part)
    assert p.hash() == q.hash()
    before = fingerprint(p)
    p.select("h").remove()
    with q.edit("manual") as e:
        e.remove("h")
    assert p.hash() == q.hash()
    p.undo()
    assert fingerprint(p) == before


def test_an_extracted_part_computes_the_same():
    p = layered()
    part = p.extract(p.select("layers.1"))
    x = np.linspace(-1, 1, 4, dtype="f4").reshape(2, 2)
    whole = p.run(x=x)
    fed = {part.path(n): whole.value("layers.0.act") for n in part.inputs()}
    assert list(fed) == ["layers.0.act"]
    assert part.run(fed)["layers.1.act"].tobytes() == whole.value("layers.1.act").tobytes()
    assert part.weights.array("layers.1.mlp.w") is p.weights.array("layers.1.mlp.w")


@given(st.integers(0, 100), st.integers(0, 100))
def test_replacing_any_module_by_itself_keeps_the_function(seed, pick):
    p = random_program(seed)
    ops = [
        n for n in p.order() if p.op(n) in ("tanh", "relu", "neg", "sigmoid", "exp", "linear", "rms_norm", "add", "mul")
    ]
    chosen = [ops[pick % len(ops)]]
    first, before = outputs(p), fingerprint(p)
    with p.edit("by itself") as e:
        e.replace(chosen, p.extract(chosen))
    assert outputs(p) == first
    assert p.validate().ok
    p.undo()
    assert fingerprint(p) == before


def test_the_repr_of_a_selection_shows_names():
    p = tiny()
    assert repr(p.select("h")) == "Selection(1 node of 'tiny': h)"
    assert repr(p.select("nothing")) == "Selection(0 nodes of 'tiny')"
    everything = p.select()
    assert repr(everything) == "Selection(5 nodes of 'tiny': x, w, h, ...)"
    with p.edit("so that one is gone") as e:
        e.set_outputs(y="j")
        e.remove("r")
    assert repr(everything).startswith("Selection(5 nodes")
