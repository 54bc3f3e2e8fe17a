"""DOT: read back by another parser, escaped, styled by kind of edge, the same bytes in every process."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path

import pydot
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphwright.errors import UsageError
from graphwright.program import Builder, Program
from graphwright.program.draw import layout

from . import models
from .hostile import hostile
from .random_programs import all_groups, nested_programs

GOLDEN = """\
digraph "small" {
  rankdir="TB";
  node [shape="box", fontname="Arial", fontsize="11"];
  edge [fontname="Arial", fontsize="9"];
  "x" [label="x\\ninput\\nf32[B, 2]", tooltip="x", fillcolor="#eef1f4", style="rounded,filled"];
  subgraph "cluster_body" {
    label="body";
    color="#b9c0c8";
    "body.act" [label="act\\ntanh\\nf32[B, 2]", tooltip="body.act", fillcolor="#e6f5ea", style="filled"];
    "body.sum" [label="+ sum\\n⇒ y", tooltip="body.sum", fillcolor="#ffffff", style="rounded,filled"];
  }
  "body.act" -> "body.sum" [color="green", style="solid", class="data"];
  "x" -> "body.act" [color="green", style="solid", class="data"];
  "x" -> "body.sum" [color="red", style="dashed", class="residual"];
}
"""


def small() -> Program:
    b = Builder("small")
    x = b.input("x", ("B", 2))
    b.output(b.junction(x, b.tanh(x, name="body.act"), name="body.sum"), "y")
    return b.build()


Facts = dict[str, str]


@cache
def parsed(text: str) -> tuple[dict[str, Facts], list[tuple[str, str, Facts]], list[str]]:
    """Nodes, edges and clusters as pydot reads them, without their quotes."""
    with warnings.catch_warnings():  # pydot 4.0 uses names that pyparsing 3.3 calls old
        warnings.simplefilter("ignore", DeprecationWarning)
        graphs = pydot.graph_from_dot_data(text)
    assert graphs is not None, "pydot could not parse it"
    nodes, edges, clusters, stack = {}, [], [], list(graphs)
    while stack:
        part = stack.pop()
        nodes.update({bare(n.get_name()): facts(n) for n in part.get_nodes() if n.get_name() not in ("node", "edge")})
        edges += [(bare(e.get_source()), bare(e.get_destination()), facts(e)) for e in part.get_edges()]
        clusters += [bare(s.get_name()) for s in part.get_subgraphs()]
        stack += part.get_subgraphs()
    return nodes, edges, clusters


def bare(value: object) -> str:
    return str(value)[1:-1] if str(value).startswith('"') else str(value)


def facts(part: pydot.Node | pydot.Edge) -> Facts:
    return {name: bare(value) for name, value in part.get_attributes().items()}


def test_the_dot_text_of_a_small_program_is_as_stored() -> None:
    assert small().to_dot() == GOLDEN


@pytest.mark.parametrize("program", [models.llama(2), models.mlp(), models.skip(), models.branches(), hostile()])
@pytest.mark.parametrize("level", [None, 0, 1, 9])
def test_dot_has_the_boxes_edges_and_frames_of_the_layout(program: Program, level: int | None) -> None:
    made = layout(program, level=level)
    nodes, edges, clusters = parsed(program.to_dot(level=level))
    assert (len(nodes), len(edges), len(clusters)) == (len(made.boxes), len(made.edges), len(made.groups))
    assert {a for a, _, _ in edges} | {b for _, b, _ in edges} <= set(nodes)


@settings(max_examples=max(settings().max_examples // 2, 5))
@given(program=nested_programs(15), data=st.data())
def test_dot_of_random_programs_matches_their_layout(program: Program, data: st.DataObject) -> None:
    chosen = data.draw(st.frozensets(st.sampled_from(all_groups(program) or [""])))
    made = layout(program, expanded=chosen)
    nodes, edges, clusters = parsed(program.to_dot(expanded=chosen))
    assert set(nodes) == set(made.boxes)
    assert {(a, b) for a, b, _ in edges} == {(e.src, e.dst) for e in made.edges}
    assert set(clusters) == {f"cluster_{g}" for g in made.groups}


def test_each_kind_of_edge_has_its_style() -> None:
    _, edges, _ = parsed(models.llama(2).to_dot(level=9))
    style = {(a, b): (e["color"], e["style"]) for a, b, e in edges}
    assert style["layers.0.attn.q_rope", "layers.0.attn.sdpa"] == ("blue", "solid")
    assert style["layers.0.mid", "layers.0.out"] == ("red", "dashed")
    assert style["layers.0.mlp.gate", "layers.0.mlp.act"] == ("green", "solid")
    b = Builder()
    held = b.state("held", [0.0])
    b.assign(held, b.tanh(held, name="next"))
    _, edges, _ = parsed(b.build().to_dot())
    assert {(e["color"], e["style"]) for a, _, e in edges if a == "held"} == {("purple", "dotted")}


def test_parallel_edges_are_one_line_with_their_number() -> None:
    b = Builder()
    x = b.input("x", ("B", 2))
    b.output(b.mul(x, x, name="square"), "y")
    _, edges, _ = parsed(b.build().to_dot())
    assert [e["label"] for _, _, e in edges] == ["×2"]


def test_lines_are_sorted_so_that_edits_give_small_text_diffs() -> None:
    program = models.llama(2)
    before = program.to_dot(level=9).splitlines()
    with program.edit("other epsilon, one more op") as e:
        e.insert(program.in_edges("layers.1.mlp.mul")[0], "tanh", name="layers.1.mlp.extra")
    after = program.to_dot(level=9).splitlines()
    assert len(set(after) - set(before)) == 3  # the node and its two edges
    assert len(set(before) - set(after)) == 1  # the edge that it was put on


def test_the_dot_text_does_not_depend_on_the_process() -> None:
    code = """
from draw import models
from draw.hostile import hostile
for p in (models.llama(3), models.branches(), hostile()):
    print(ascii(p.to_dot(level=9)), ascii(p.to_svg(level=1)), ascii(p.to_html(level=2)))
print(models.llama(3).to_html(diff=models.llama(2)), models.mlp().to_svg(overlay={'act': 1, 'first': 2}))
"""
    texts = set()
    search = os.pathsep.join((str(Path(__file__).parents[1]), *sys.path))
    for seed in ("0", "4242"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": search, "PYTHONIOENCODING": "utf-8"}
        made = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True)
        texts.add(made.stdout)
    assert len(texts) == 1
    assert len(texts.pop()) > 50_000


def test_colours_are_optional_and_may_be_numbers() -> None:
    assert "fillcolor" not in small().to_dot(color=None)
    nodes, _, _ = parsed(small().to_dot(color={"body.act": 1.0, "x": 3.0}))
    assert nodes["x"]["fillcolor"] == "#fde725"
    assert nodes["body.act"]["fillcolor"] == "#440154"
    assert "fillcolor" not in nodes["body.sum"]
    assert "// scale from 1.0 to 3.0" in small().to_dot(color={"body.act": 1.0, "x": 3.0})
    with pytest.raises(UsageError, match="unknown colouring"):
        small().to_dot(color="rainbow")
