"""Large programs: never more elements than the budget, and the picture says what it left out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphwright.program import Program
from graphwright.program.draw import layout
from graphwright.program.draw.svg import CELL

from . import models
from .random_programs import nested_programs


@pytest.fixture(scope="module")
def chains() -> Program:
    return models.chains()


@pytest.fixture(scope="module")
def flat() -> Program:
    return models.flat()


def test_with_ten_thousand_nodes_the_deepest_modules_are_closed_first(chains: Program) -> None:
    assert layout(chains, budget=CELL).elements <= CELL
    made = layout(chains, level=9)
    assert len(chains) > 10_000
    assert made.elements <= 2000
    assert len(made.collapsed) == 625
    assert all(path.count(".") == 1 for path in made.collapsed), "the stages around them stay open"
    assert set(made.groups) == {f"stage{i}" for i in range(25)}
    assert sum(len(b.members) for b in made.boxes.values()) == len(chains)


@pytest.mark.deep
def test_ten_thousand_nodes_without_modules_are_bundled(flat: Program) -> None:
    made = layout(flat, level=1)
    assert made.elements <= 2000
    assert made.collapsed[:2] == ("nodes[0-19]", "nodes[20-39]")
    made = layout(flat)
    assert len(made.boxes) == 100, "unasked, as many as can be read"
    assert made.collapsed[:2] == ("nodes[0-99]", "nodes[100-199]")
    assert sum(len(b.members) for b in made.boxes.values()) == len(flat) == 10_000


def test_equal_blocks_fold_before_their_module_is_closed() -> None:
    made = layout(models.llama(40), level=2, budget=60)
    assert made.boxes["layers.[0-39]"].repeat == 40
    assert made.collapsed == ("layers.0 … layers.39",)
    assert "layers" in made.groups


def test_pictures_in_notebook_cells_are_small(flat: Program) -> None:
    cell = flat._repr_html_()
    assert len(cell.encode()) < 200_000
    assert "closed to stay within the budget: nodes[0-99]" in cell


@given(program=nested_programs(60), budget=st.integers(16, 60), level=st.none() | st.integers(0, 4))
def test_no_budget_is_exceeded_and_no_node_is_lost(program: Program, budget: int, level: int | None) -> None:
    made = layout(program, budget=budget, level=level, params=True)
    assert made.elements <= budget
    assert sorted(m for b in made.boxes.values() for m in b.members) == sorted(program.nodes())
    free = layout(program, level=level, params=True)
    assert bool(made.collapsed) == (free.elements > budget)
