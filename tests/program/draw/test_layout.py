"""Layout: nothing overlaps, wires run around boxes, rows follow the edges, and what is not touched does not move."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from graphwright.errors import UsageError
from graphwright.program import Builder, Program
from graphwright.program.draw import Box, Group, PictureLayout, layout
from graphwright.program.draw.style import count

from . import models
from .random_programs import all_groups, nested_programs

ALL = 20


def items(made: PictureLayout) -> dict[str, list[Box | Group]]:
    """Boxes and frames by the group around them."""
    found: dict[str, list[Box | Group]] = {}
    for item in (*made.boxes.values(), *made.groups.values()):
        found.setdefault(item.parent, []).append(item)
    return found


def relative(made: PictureLayout, group: str) -> dict[str, tuple[int, int, int, int]]:
    """Boxes inside a group, from its top left."""
    frame = made.groups[group]
    inside = {p: b for p, b in made.boxes.items() if p.startswith(f"{group}.")}
    return {p: (b.x - frame.x, b.y - frame.y, b.w, b.h) for p, b in inside.items()}


def ancestors(made: PictureLayout, item: Box | Group) -> list[Box | Group]:
    """The item and the frames around it, outermost first."""
    found = [item]
    while found[-1].parent:
        found.append(made.groups[found[-1].parent])
    return found[::-1]


def check(made: PictureLayout) -> None:
    for parent, inside in items(made).items():
        for a, b in combinations(inside, 2):
            apart = a.x + a.w <= b.x or b.x + b.w <= a.x or a.y + a.h <= b.y or b.y + b.h <= a.y
            assert apart, f"{a.path} overlaps {b.path}"
        for a in inside:
            around = made.groups[parent] if parent else Group("", "", 0, 0, made.width, made.height, 0, "")
            assert around.x < a.x, a.path
            assert around.y < a.y, a.path
            assert a.x + a.w < around.x + around.w, a.path
            assert a.y + a.h < around.y + around.h, a.path
    for edge in made.edges:
        src, dst = made.boxes[edge.src], made.boxes[edge.dst]
        (x, y), (end_x, end_y) = edge.points[0], edge.points[-1]
        assert y == src.y + src.h
        assert end_y == dst.y
        assert src.x < x < src.x + src.w
        assert dst.x < end_x < dst.x + dst.w
        pairs = zip(ancestors(made, src), ancestors(made, dst), strict=False)
        a, b = next((a, b) for a, b in pairs if a.path != b.path)
        assert (a.rank >= b.rank) if edge.back else (a.rank < b.rank), f"{edge.src} -> {edge.dst}"
        assert edge.back or src.y + src.h < dst.y


def check_wires_run_around_boxes(made: PictureLayout) -> None:
    for edge in made.edges:
        for (ax, ay), (bx, by) in zip(edge.points, edge.points[1:], strict=False):
            assert ax == bx or ay == by, "wires are upright or level"
            left, right, top, bottom = min(ax, bx), max(ax, bx), min(ay, by), max(ay, by)
            for box in made.boxes.values():
                outside = right <= box.x or box.x + box.w <= left or bottom <= box.y or box.y + box.h <= top
                assert outside, f"{edge.src} -> {edge.dst} runs through {box.path}"


@given(program=nested_programs(), data=st.data())
def test_boxes_do_not_overlap_and_wires_avoid_them(program: Program, data: st.DataObject) -> None:
    groups = all_groups(program)
    chosen = data.draw(st.one_of(st.just(frozenset(groups)), st.frozensets(st.sampled_from(groups or [""]))))
    made = layout(program, expanded=chosen)
    check(made)
    check_wires_run_around_boxes(made)


@pytest.mark.parametrize("program", [models.llama(3), models.mlp(), models.skip(), models.branches(), models.tangle()])
def test_layouts_of_typical_models_are_valid(program: Program) -> None:
    for made in (layout(program), layout(program, level=ALL), layout(program, level=ALL, params=True)):
        check(made)
        check_wires_run_around_boxes(made)


def test_the_layout_has_the_nodes_and_edges_of_the_program() -> None:
    program = models.llama(2)
    made = layout(program, level=ALL, params=True)
    assert set(made.boxes) == {program.path(n) for n in program.nodes()}
    assert sum(e.count for e in made.edges) == program.graph.edge_count
    ends = {tuple(map(program.path, program.graph.endpoints(e))) for e in program.graph.edges()}
    assert {(e.src, e.dst) for e in made.edges} == ends


def test_a_decoder_is_expanded_to_its_blocks_by_default() -> None:
    made = layout(models.llama(32))
    assert list(made.groups) == ["layers"]
    assert {p for p, b in made.boxes.items() if b.kind == "group"} == {f"layers.{i}" for i in range(32)}
    assert 34 <= len(made.boxes) <= 42  # about 40, says the specification
    assert made.collapsed == ()


def test_the_residual_trunk_is_one_straight_lane() -> None:
    made = layout(models.llama(3), level=ALL)
    sums = [f"layers.{i}.{j}" for i in range(3) for j in ("mid", "out")]
    trunk = [made.boxes[p] for p in ("ids", "embed", *sums, "norm", "lm_head")]
    middles = {box.x + box.w // 2 for box in trunk}
    assert len(middles) == 1
    residual = [e for e in made.edges if e.kind == "residual"]
    assert {(e.src, e.dst) for e in residual} == {
        ("embed", "layers.0.mid"),
        ("layers.0.out", "layers.1.mid"),
        ("layers.1.out", "layers.2.mid"),
        *((f"layers.{i}.mid", f"layers.{i}.out") for i in range(3)),
    }
    assert all(len(e.points) == 2 for e in residual), "no bend in a residual path"


def test_equal_modules_share_an_arrangement() -> None:
    few, many = layout(models.llama(2), level=ALL), layout(models.llama(9), level=ALL)
    assert few.arrangement_count == many.arrangement_count == 5  # the whole, layers, one block, attn, mlp
    same = [relative(many, f"layers.{i}") for i in range(9)]
    assert all(list(r.values()) == list(same[0].values()) for r in same)


def test_closing_an_expanded_group_restores_every_coordinate() -> None:
    program = models.llama(4)
    before = layout(program, expanded=frozenset({"layers"}))
    layout(program, expanded=frozenset({"layers", "layers.2", "layers.2.attn"}))
    assert layout(program, expanded=frozenset({"layers"})) == before


def test_an_edit_keeps_the_layout_inside_other_groups() -> None:
    program = models.llama(4)
    before = layout(program, level=ALL)
    with program.edit("longer") as e:
        e.insert(program.in_edges("layers.2.mlp.act")[0], "tanh", name="layers.2.mlp.extra")
    after = layout(program, level=ALL)
    for group in before.groups:
        if group not in ("layers", "layers.2", "layers.2.mlp"):
            assert relative(before, group) == relative(after, group), group
    assert relative(before, "layers.2") != relative(after, "layers.2")


@settings(max_examples=25)
@given(program=nested_programs(), data=st.data())
def test_an_edit_of_a_random_program_keeps_the_layout_inside_other_groups(
    program: Program, data: st.DataObject
) -> None:
    before = layout(program, level=ALL)
    edges = [e for e in program.graph.edges() if program.op(program.graph.target(e)) != "assign"]
    assume(edges)
    edge = data.draw(st.sampled_from(sorted(edges)))
    touched = program.path(program.graph.target(edge))
    with program.edit("one more") as e:
        e.insert(edge, "relu", name=".".join([*touched.split(".")[:-1], "extra"]))
    after = layout(program, level=ALL)
    for group in before.groups:
        if not touched.startswith(f"{group}."):
            assert relative(before, group) == relative(after, group), group


def test_runs_of_equal_blocks_fold_on_request() -> None:
    made = layout(models.llama(22), fold=True)
    assert made.boxes["layers.[0-21]"].repeat == 22
    assert made.boxes["layers.[0-21]"].lines[0] == "layers.[0-21] × 22"
    opened = layout(models.llama(22), expanded=frozenset({"layers", "layers.[0-21]"}), fold=True)
    assert len(opened.boxes["layers.[0-21].mid"].members) == 22
    assert opened.groups["layers.[0-21]"].repeat == 22
    check(opened)


def test_an_unequal_block_is_not_folded() -> None:
    program = models.llama(7)
    with program.edit("different") as e:
        e.set_attr("layers.3.mlp.norm", eps=1e-3)
    made = layout(program, fold=True)
    assert [p for p, b in made.boxes.items() if b.kind == "group"] == ["layers.[0-2]", "layers.3", "layers.[4-6]"]


def test_modules_that_read_each_other_get_a_return_arc() -> None:
    b = Builder()
    h = b.input("x", ("B", 4))
    for name in ("one.first", "two.first", "one.second", "two.second"):
        h = b.tanh(h, name=name)
    b.output(h, "y")
    made = layout(b.build(), expanded=frozenset())
    assert {(e.src, e.dst): e.back for e in made.edges} == {
        ("x", "one"): False,
        ("one", "two"): False,
        ("two", "one"): True,
    }
    check(made)
    opened = layout(models.skip(), level=ALL)
    assert not any(e.back for e in opened.edges)


def test_node_named_like_a_module_is_inside_it() -> None:
    b = Builder()
    h = b.tanh(b.input("x", ("B", 4)), name="act")
    for i in range(4):
        h = b.relu(h, name=f"act.after{i}")
    b.output(h, "y")
    program = b.build()
    assert {box.parent for path, box in layout(program, level=ALL).boxes.items() if path != "x"} == {"act"}
    assert set(layout(program, expanded=frozenset()).boxes) == {"x", "act"}


def test_weights_are_drawn_inside_their_readers() -> None:
    made = layout(models.mlp())
    assert made.boxes["first"].lines == ("first", "linear [16, 4]", "f32[B, 16]")
    assert "weight: f32[16, 4], key first.weight" in made.boxes["first"].tip
    assert "first.weight" in layout(models.mlp(), params=True).boxes


def test_assignments_to_states_are_drawn_as_recurrent_edges() -> None:
    b = Builder()
    x, held = b.input("x", (4,)), b.state("held", [0.0] * 4)
    total = b.add(x, held, name="total")
    b.assign(held, total)
    b.output(total, "y")
    p = b.build()
    made = layout(p)
    edges = {(e.src, e.dst): e for e in made.edges}
    assert {ends: e.kind for ends, e in edges.items()} == {
        ("held", "total"): "state",
        ("total", "held"): "state",
        ("x", "total"): "data",
    }
    assert [ends for ends, e in edges.items() if e.back] == [("total", "held")], "up again, to the next step"
    assert made.boxes["held"].members == (p.node("held"), p.node("held.next"))
    assert made.boxes["held"].y < made.boxes["total"].y
    apart = {(e.src, e.dst): e.kind for e in layout(p, params=True).edges}
    assert apart["total", "held.next"] == apart["held", "held.next"] == "state"


def test_delayed_edge_shows_its_chain_of_states() -> None:
    b = Builder()
    x = b.input("x", (4,))
    b.output(b.tanh(b.junction(x, name="sum"), name="act"), "y")
    p = b.build()
    with p.edit("lag") as e:
        e.connect("act", "sum", delay=3)
    held = [p.path(n) for n in p.states()]
    made = layout(p, level=9)
    assert set(made.boxes) == {"x", "sum", "act", *held}
    ends = {(e.src, e.dst) for e in made.edges if e.kind == "state"}
    assert ends == {("act", held[0]), (held[0], held[1]), (held[1], held[2]), (held[2], "sum")}
    for before, after in zip(("act", *held[:2]), held, strict=True):  # cutting one is marked where it is drawn
        with p.edit("drop the write") as e:
            write = next(n for n in p.assigns() if p.operands(n)[0].node == p.node(after))
            e.remove(write)
        marks = {(e.src, e.dst): e.mark for e in layout(p, level=9, diff=p.at(p.journal[-2].seq)).edges if e.mark}
        assert marks == {(before, after): "removed"}
        p.undo()


def test_steps_of_a_long_loop_are_drawn_once_but_layers_of_a_decoder_separately() -> None:
    for steps, folded in ((64, False), (70, True)):
        b = Builder()
        x = b.input("x", ("B", 4))
        for i in range(steps):
            x = b.tanh(b.neg(x, name=f"step.{i}.neg"), name=f"step.{i}.act")
        b.output(x, "y")
        boxes = layout(b.build()).boxes
        assert any("[" in path for path in boxes) == folded
        assert len(boxes) < 10 if folded else len(boxes) == 65


def test_too_small_budgets_and_contradictory_options_are_refused() -> None:
    with pytest.raises(UsageError, match=">= 16"):
        layout(models.mlp(), budget=3)
    with pytest.raises(UsageError, match="are both given"):
        layout(models.mlp(), expanded=frozenset(), level=2)


def test_deep_nesting_needs_no_recursion() -> None:
    b = Builder()
    x = b.input("x", ("B", 4))
    b.output(b.tanh(x, name=".".join(["a"] * 1500)), "y")
    program = b.build()
    assert len(layout(program, level=2000).groups) == 1499
    assert program.to_dot(level=2000).count("subgraph") == 1499


def test_a_weight_with_two_readers_in_a_group_is_counted_once() -> None:
    b = Builder()
    x, w = b.input("x", ("B", 4)), b.param("m.w", [[0.5] * 4] * 4)
    b.output(b.linear(b.linear(x, w, name="m.one"), w, name="m.two"), "y")
    assert layout(b.build(), expanded=frozenset()).boxes["m"].lines[1] == "2 ops · 16 params"


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1k"),
        (999_499, "999k"),
        (999_500, "1M"),
        (999_950, "1M"),
        (7_240_000_000, "7.24B"),
    ],
)
def test_counts_are_written_with_three_digits(number: int, text: str) -> None:
    assert count(number) == text
