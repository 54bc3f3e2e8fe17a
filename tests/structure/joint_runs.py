"""Programs with gates on planted edges, and what trains them."""

from __future__ import annotations

from typing import Any

from graphwright import structure as st
from graphwright.testing.planted import Edges


def joint(kind: str = "sigmoid", size: str = "float32", **options: Any) -> tuple[Edges, st.JointOptimizer]:
    problem = Edges(0, size)
    problem.gate(kind)
    penalties = options.pop("penalties", [st.sparsity(0.1)])
    schedule = options.pop("schedule", None)
    view = st.DifferentiableGraph(problem.program, schedule=schedule)
    return problem, st.JointOptimizer(view, "loss", penalties, **{"params": 0.01, "gates": 0.1, **options})
