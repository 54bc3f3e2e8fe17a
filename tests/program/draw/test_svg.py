"""SVG: valid XML with any name, self-contained, a title on everything, legends that tell the data."""

from __future__ import annotations

import re
from math import inf, nan
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphwright.errors import UsageError
from graphwright.program import Builder, Program, UnknownNode
from graphwright.program.draw import layout

from . import models
from .hostile import NAMES, hostile
from .random_programs import nested_programs

SVG = "{http://www.w3.org/2000/svg}"


def groups(text: str, kind: str) -> list[ElementTree.Element]:
    """Elements of one class inside the drawing, the legend left out."""
    drawing = next(g for g in ElementTree.fromstring(text) if g.get("class") == "gw-all")
    return [g for g in drawing.iter(f"{SVG}g") if kind in (g.get("class") or "").split()]


def boxes(text: str) -> dict[str, ElementTree.Element]:
    return {g.get("data-path", ""): g for g in groups(text, "gw-b")}


def part(group: ElementTree.Element, tag: str) -> ElementTree.Element:
    found = group.find(f"{SVG}{tag}")
    assert found is not None, f"a group without a {tag}"
    return found


@pytest.mark.parametrize("program", [models.llama(2), models.branches(), hostile()])
@pytest.mark.parametrize("level", [None, 0, 9])
def test_svg_elements_match_the_layout(program: Program, level: int | None) -> None:
    made, text = layout(program, level=level), program.to_svg(level=level)
    assert len(groups(text, "gw-b")) == len(made.boxes)
    assert len(groups(text, "gw-e")) == len(made.edges)
    assert len(groups(text, "gw-f")) == len(made.groups)
    assert all(g.find(f"{SVG}title") is not None for kind in ("gw-b", "gw-e", "gw-f") for g in groups(text, kind))


def test_a_closed_group_names_the_outputs_that_it_computes() -> None:
    b = Builder("net")
    inner = b.scope("head")
    made = inner.tanh(b.input("x", (2, 3)), name="act")
    b.output(made, "y")
    b.output(inner.exp(made, name="odds"), "z")
    lines = layout(b.build(), level=0).boxes["head"].lines
    assert lines == ("head", "2 ops", "f32[2, 3], f32[2, 3]", "⇒ y, z")


def test_hostile_names_are_escaped() -> None:
    text = hostile().to_svg(level=9)
    root = ElementTree.fromstring(text.encode())
    tags = {e.tag.removeprefix(SVG) for e in root.iter()}
    assert tags <= {"svg", "style", "defs", "marker", "pattern", "path", "rect", "g", "title", "text"}
    names = {e.text for e in root.iter(f"{SVG}text")}
    assert {
        "<script>alert(1)</script>",
        "a & b",
        'say "hi"',
        "back\\slash",
        "שלום",
        "emoji \U0001f9e0",
        "漢字",
        "]]>",
    } <= names
    assert {
        "\\u{202e}gnirts",
        "zero\\u{200b}width",
        "del\\u{85}\\u{7f}",
        "\\u{fffe}\\u{ffff}",
    } <= names
    assert max(len(n) for n in names if n) < 60, "long names are shortened"
    titles = [e.text or "" for e in root.iter(f"{SVG}title")]
    assert any("x" * 4000 in t for t in titles), "and stand in full in the title"
    assert len(boxes(text)) == 1 + len(NAMES) + sum(len(n) < 40 for n in NAMES)


@given(name=st.text(st.characters(min_codepoint=32, codec="utf-8"), min_size=1, max_size=80), title=st.text())
def test_any_name_gives_valid_xml(name: str, title: str) -> None:
    name = re.sub(r"[*\[{}]|->|^\s", "_", ".".join(part or "_" for part in name.split(".")))  # no node has these
    b = Builder(title)
    b.output(b.tanh(b.input("x", ("B",)), name=f"{name}.t"), title)
    program = b.build()
    for level in (0, 99):
        ElementTree.fromstring(program.to_svg(level=level).encode())


def test_text_fits_its_box() -> None:
    for text in (hostile().to_svg(level=9), models.llama(2).to_svg(level=9)):
        for g in groups(text, "gw-b"):
            width = float(part(g, "rect").get("width", "nan"))
            longest = max(len(t.text or "") for t in g.iter(f"{SVG}text"))
            assert width >= 4 * longest, "no glyph is narrower than 4 px"


def test_titles_contain_path_op_spec_and_attributes() -> None:
    title = boxes(models.llama(2).to_svg(level=9))["layers.1.attn.norm"].find(f"{SVG}title")
    assert title is not None
    assert (title.text or "").splitlines() == [
        "layers.1.attn.norm",
        "rms_norm",
        "result f32[B, T, 64]",
        "eps = 1e-06",
        "unit_offset = False",
        "cast_before_scale = True",
        "weight: f32[64], key layers.1.attn.norm.weight",
    ]


def test_svg_has_no_outside_references() -> None:
    text = models.llama(2).to_svg(level=9)
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"(?:href|src|@import|url\((?!#))", text)
    assert "prefers-color-scheme:dark" in text
    assert "user-select:text" in text


def test_the_legend_names_the_kinds_of_edge_that_occur() -> None:
    legend = {t.text for t in ElementTree.fromstring(models.llama(2).to_svg(level=9)).iter(f"{SVG}text")}
    assert {"data", "attention", "residual"} <= legend
    assert "state" not in legend
    plain = {t.text for t in ElementTree.fromstring(models.mlp().to_svg()).iter(f"{SVG}text")}
    assert "attention" not in plain


# -- overlay ----------------------------------------------------------------------------------------------------------
def scale(text: str) -> tuple[float, float] | None:
    """Lowest and highest number of the legend's scale."""
    found = re.search(r'class="gw-scale" data-min="([^"]*)" data-max="([^"]*)"', text)
    return (float(found[1]), float(found[2])) if found else None


def fill(text: str, path: str) -> str | None:
    rect = boxes(text)[path].find(f"{SVG}rect")
    assert rect is not None
    return rect.get("style")


@given(values=st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=5, max_size=5))
def test_the_legend_spans_the_finite_values(values: list[float]) -> None:
    text = models.skip().to_svg(overlay={f"layer{i}": v for i, v in enumerate(values)})
    finite = [v for v in values if abs(v) < inf]
    assert scale(text) == ((min(finite), max(finite)) if finite else None)
    hatched = {p for p, g in boxes(text).items() if "gw-none" in (g.get("class") or "")}
    assert hatched == {"x", "join"} | {f"layer{i}" for i, v in enumerate(values) if not abs(v) < inf}


def test_extreme_values_have_the_end_colours_of_the_scale() -> None:
    program = models.skip()
    text = program.to_svg(overlay={"layer0": -5, program.node("layer1"): 2.5, "layer2": 10, "layer3": nan})
    assert fill(text, "layer0") == "fill:#440154"
    assert fill(text, "layer1") == "fill:#21918c"
    assert fill(text, "layer2") == "fill:#fde725"
    assert fill(text, "layer3") is None
    assert "hatched: no value" in text


@pytest.mark.parametrize(
    ("data", "ends"),
    [
        ({}, None),
        ({"layer0": 3}, (3, 3)),
        ({"layer0": 2, "layer1": 2}, (2, 2)),
        ({"layer0": -1, "layer1": 0}, None),
        ({"layer0": nan}, None),
    ],
)
def test_overlays_of_few_or_invalid_values_are_drawn(data: dict[str, float], ends: tuple[float, float] | None) -> None:
    text = models.skip().to_svg(overlay=data, scale="log")
    assert scale(text) == ends
    assert len(boxes(text)) == 7


def test_a_logarithmic_scale_maps_equal_ratios_to_equal_steps() -> None:
    text = models.skip().to_svg(overlay={"layer0": 1, "layer1": 100, "layer2": 10, "layer3": -4}, scale="log")
    assert scale(text) == (1, 100)
    assert fill(text, "layer2") == "fill:#21918c"
    assert fill(text, "layer3") is None


def test_a_closed_group_shows_its_own_value_or_the_largest_inside() -> None:
    program = models.llama(2)
    data = {"layers.0.attn.q": 7, "layers.0.attn.k": 1, "layers.1": 4, "layers.1.attn.q": 9}
    text = program.to_svg(expanded=frozenset({"layers"}), overlay=data)
    value = {p: re.search(r"value (\S+)", part(g, "title").text or "") for p, g in boxes(text).items()}
    assert value["layers.0"] is not None
    assert value["layers.1"] is not None
    assert (value["layers.0"][1], value["layers.1"][1]) == ("7.0", "4.0")
    assert scale(text) == (1, 9)


def test_unknown_keys_and_scales_are_refused() -> None:
    with pytest.raises(UnknownNode):
        models.skip().to_svg(overlay={"layer9": 1})
    with pytest.raises(UsageError, match="unknown scale"):
        models.skip().to_svg(overlay={}, scale="cubic")


# -- files and notebooks ----------------------------------------------------------------------------------------------
def test_the_returned_svg_is_written_to_the_path(tmp_path: Path) -> None:
    program = models.mlp()
    for kind, method in (("dot", program.to_dot), ("svg", program.to_svg), ("html", program.to_html)):
        file = tmp_path / f"picture.{kind}"
        assert method(file) == file.read_text("utf-8")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["picture.dot", "picture.html", "picture.svg"]


def test_programs_are_displayed_as_svg_in_notebooks() -> None:
    text = models.llama(4)._repr_html_()
    assert "<svg " in text
    assert "layers.3" in text
    assert "<script" not in hostile()._repr_html_()


@given(program=nested_programs())
def test_lines_end_at_the_borders_of_boxes(program: Program) -> None:
    made, text = layout(program), program.to_svg()
    ends = {(p[0], p[1]) for e in made.edges for p in (e.points[0], e.points[-1])}
    drawn = [part(g, "path").get("d", "") for g in groups(text, "gw-e")]
    numbers = [[int(n) for n in re.findall(r"-?\d+", d)] for d in drawn]
    assert {(n[0], n[1]) for n in numbers} | {(n[-2], n[-1]) for n in numbers} == ends


def test_colours_need_no_style_sheet_and_no_variables() -> None:
    """Renderers outside browsers know neither variables nor, some of them, style sheets."""
    p = models.llama(2)
    with p.edit("cut", check=False) as e:
        e.cut(p.in_edges(p.junctions()[-1])[0])
    for text in (p.to_svg(level=9), p.to_svg(level=9, diff=p.at(-1)), p.to_svg(level=1)):
        assert "var(" not in text
        root = ElementTree.fromstring(text)
        assert root.get("fill") == "#1b1f24"
        for tag in ("rect", "path"):
            seen = [s for g in root.iter(f"{SVG}g") if "gw-" in g.get("class", "") for s in g.findall(f"{SVG}{tag}")]
            assert seen
            assert all(s.get("fill") and s.get("stroke") for s in seen)
        assert all(m.get("fill") for m in root.iter(f"{SVG}marker"))
        style = root.findtext(f"{SVG}style") or ""
        assert "paint-order" not in style
        light, dark = style.split("@media(prefers-color-scheme:dark)")
        assert "#1b1f24" in light
        assert "#1b1f24" not in dark


def test_titles_are_drawn_above_their_halo() -> None:
    """cairosvg knows no `paint-order`: an outline of the same element would cover the letters."""
    words = list(ElementTree.fromstring(models.llama(2).to_svg(level=9)).iter(f"{SVG}text"))
    halos = [k for k, t in enumerate(words) if "gw-halo" in t.get("class", "")]
    assert halos
    for k in halos:
        halo, text = words[k : k + 2]
        assert (halo.text, halo.get("x"), halo.get("y")) == (text.text, text.get("x"), text.get("y"))
        assert halo.get("stroke") == halo.get("fill") == "#ffffff"
        assert text.get("stroke") is None
