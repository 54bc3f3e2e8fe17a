"""Differences in pictures: exactly what the journal says was added, removed and changed, and nothing else."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from graphwright.program import Program
from graphwright.program.draw import PictureLayout, layout

from . import models
from .random_programs import nested_programs
from .test_dot import parsed
from .test_svg import groups

ALL = 20


def marked(made: PictureLayout) -> dict[str, set]:
    """Marked nodes and edges of a picture."""
    found: dict[str, set] = {}
    for path, box in made.boxes.items():
        found.setdefault(box.mark, set()).add(path)
    for edge in made.edges:
        found.setdefault(edge.mark, set()).add((edge.src, edge.dst))
    found.pop("", None)
    return found


def edited() -> tuple[Program, Program]:
    """A decoder after one edit of each kind, and the decoder before."""
    program, before = models.llama(2), models.llama(2)
    with program.edit("everything") as e:
        e.cut(program.in_edges("layers.0.out")[0])
        e.insert(program.in_edges("layers.1.mlp.act")[0], "tanh", name="layers.1.mlp.extra")
        e.set_attr("layers.1.mlp.norm", eps=1e-3)
        e.set_weight("layers.0.attn.q.weight", lambda w: w + 1)
        e.rewire(program.in_edges("layers.1.mlp.down")[0], "layers.1.mlp.act")
        e.remove("layers.1.mlp.mul")
        e.remove("layers.1.mlp.up")
        e.remove("layers.1.mlp.up.weight")
    return program, before


EXPECTED = {
    "added": {
        "layers.1.mlp.extra",
        ("layers.1.mlp.gate", "layers.1.mlp.extra"),
        ("layers.1.mlp.extra", "layers.1.mlp.act"),
        ("layers.1.mlp.act", "layers.1.mlp.down"),
    },
    "removed": {
        "layers.1.mlp.mul",
        "layers.1.mlp.up",
        ("layers.1.mlp.act", "layers.1.mlp.mul"),
        ("layers.1.mlp.up", "layers.1.mlp.mul"),
        ("layers.1.mlp.mul", "layers.1.mlp.down"),
        ("layers.1.mlp.norm", "layers.1.mlp.up"),
        ("layers.1.mlp.gate", "layers.1.mlp.act"),
        ("layers.0.mid", "layers.0.out"),
    },
    "changed": {"layers.1.mlp.norm", "layers.0.attn.q"},
}


def test_marked_elements_match_the_edit() -> None:
    program, before = edited()
    assert marked(layout(program, diff=before, level=ALL)) == EXPECTED
    assert marked(layout(program, diff=program.fork(), level=ALL)) == {}


def test_the_default_view_expands_changed_groups() -> None:
    program, before = edited()
    assert marked(layout(program, diff=before)) == EXPECTED


def test_marked_elements_match_the_program_diff() -> None:
    program, before = edited()
    reported = program.diff(before)
    made = layout(program, diff=before, level=ALL, params=True)
    nodes = {m: {p for p in paths if isinstance(p, str)} for m, paths in marked(made).items()}
    assert nodes["added"] == set(reported.added)
    assert nodes["removed"] == set(reported.removed)
    rewired_only = {
        c.path for c in reported.changed if set(c.facts) == {"operands"}
    }  # there it is an edge that changed
    assert nodes["changed"] == {c.path for c in reported.changed} - rewired_only | {w.key for w in reported.weights}


def test_a_renamed_node_is_the_only_one_marked_as_changed() -> None:
    program = models.llama(2)
    before = program.fork()
    with program.edit("rename") as e:
        e.rename("layers.1.mlp.act", "layers.1.mlp.squash")
    assert marked(layout(program, diff=before, level=ALL)) == {"changed": {"layers.1.mlp.squash"}}


def test_a_closed_group_is_marked_if_something_inside_is() -> None:
    program, before = edited()
    made = layout(program, expanded=frozenset({"layers"}), diff=before)
    assert {p: b.mark for p, b in made.boxes.items() if b.mark} == {"layers.0": "changed", "layers.1": "changed"}


def test_every_format_has_the_same_marks() -> None:
    program, before = edited()
    nodes, edges, _ = parsed(program.to_dot(diff=before))
    in_dot: dict[str, set] = {}
    for name, facts in nodes.items():
        in_dot.setdefault(facts.get("class", ""), set()).add(name)
    for src, dst, facts in edges:
        mark = next((m for m in EXPECTED if m in facts["class"].split()), "")
        in_dot.setdefault(mark, set()).add((src, dst))
        if mark == "removed":
            assert (facts["style"], facts["color"]) == ("dotted", "grey")
    in_dot.pop("")
    assert in_dot == EXPECTED
    text = program.to_svg(diff=before)
    for mark, things in EXPECTED.items():
        assert {g.get("data-path") for g in groups(text, "gw-b") if f"gw-{mark}" in g.get("class", "").split()} == {
            t for t in things if isinstance(t, str)
        }
        assert sum(f"gw-{mark}" in g.get("class", "").split() for g in groups(text, "gw-e")) == sum(
            isinstance(t, tuple) for t in things
        )
    legend = [t.text for t in ElementTree.fromstring(text).iter() if t.tag.endswith("text")]
    assert {"added", "removed", "changed"} <= set(legend)
    assert '"mark":"removed"' in program.to_html(diff=before)


def test_unchanged_edges_are_faded_as_one_below_the_marked_ones() -> None:
    """Faded one by one, several of them on one another are as dark as an added edge."""
    program, before = edited()
    text = program.to_svg(diff=before)
    (pale,) = groups(text, "gw-unchanged")
    inside = [g.get("class", "").split() for g in pale]
    every = [g.get("class", "").split() for g in groups(text, "gw-e")]
    assert inside
    assert inside == every[: len(inside)]
    assert [any(f"gw-{mark}" in c for mark in EXPECTED) for c in every] == [k >= len(inside) for k in range(len(every))]
    faded = re.findall(r"([^{}]*)\{opacity", text)
    assert not any("gw-e" in rule for rule in faded)
    assert ".gw-diff .gw-unchanged" in faded


def test_dot_texts_before_and_after_differ_only_by_the_edit() -> None:
    program, before = edited()
    old, new = set(before.to_dot(level=ALL).splitlines()), set(program.to_dot(level=ALL).splitlines())
    names = {line for line in (old ^ new) if "->" not in line}
    touched = {name for line in names for name in re.findall(r'^\s*"([^"]*)"', line)}
    assert touched == {"layers.1.mlp.extra", "layers.1.mlp.mul", "layers.1.mlp.up"}


def test_cutting_one_of_two_parallel_edges_marks_one() -> None:
    program, before = models.branches(), models.branches()
    with program.edit("twice") as e:
        e.connect("stem", "block.sum")
    edge = next(e for e in layout(program, diff=before, level=ALL).edges if (e.src, e.dst) == ("stem", "block.sum"))
    assert (edge.count, edge.mark) == (2, "changed")


@settings(max_examples=25)
@given(program=nested_programs(20), data=st.data())
def test_only_the_inserted_node_is_marked(program: Program, data: st.DataObject) -> None:
    before = program.fork()
    targets = {n: program.operands(n)[0].node for n in program.assigns()}  # drawn as an edge back into the state
    drawn = {
        edge: (program.path(a), program.path(targets.get(b, b)))
        for edge in sorted(program.graph.edges())
        for a, b in [program.graph.endpoints(edge)]
        if b not in targets or program.edge_port(edge) == 1
    }
    edge = data.draw(st.sampled_from(list(drawn)))
    ends = drawn[edge]
    assume(ends[0] != ends[1])  # a state that writes itself is drawn without an edge
    twins = list(drawn.values()).count(ends)
    with program.edit("one more") as e:
        e.insert(edge, "relu", name="extra.node")
    found = marked(layout(program, diff=before, level=ALL))
    assert found.pop("added") == {"extra.node", (ends[0], "extra.node"), ("extra.node", ends[1])}
    assert found == {"removed" if twins == 1 else "changed": {ends}}
    program.undo()
    assert marked(layout(program, diff=before, level=ALL)) == {}
