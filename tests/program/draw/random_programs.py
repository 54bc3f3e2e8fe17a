"""Random programs with nested modules, branches, skips, shared sources, modules that read each other, and states."""

from __future__ import annotations

from hypothesis import strategies as st

from graphwright.program import Builder, Program

_SEGMENTS = ("a", "b", "c0", "c1", "long_module_name")


@st.composite
def nested_programs(draw: st.DrawFn, most: int = 40) -> Program:
    """Up to `most` nodes in modules up to three deep; any node may read any earlier one, a state what comes later."""
    b = Builder("random")
    made = [b.input(f"in{i}", (3, 4)) for i in range(draw(st.integers(1, 3)))]
    states = [
        b.state(".".join([*draw(st.lists(st.sampled_from(_SEGMENTS), max_size=2)), f"s{i}"]), [[0.0] * 4] * 3)
        for i in range(draw(st.integers(0, 3)))
    ]
    made += states
    for i in range(draw(st.integers(1, most))):
        module = draw(st.lists(st.sampled_from(_SEGMENTS), max_size=3))
        sources = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
        operands = [made[-min(k, len(made))] for k in sources]
        name = ".".join([*module, f"n{i}"])
        if len(operands) == 1:
            made.append(b.tanh(*operands, name=name))
        elif len(operands) == 2 and draw(st.booleans()):
            made.append(b.add(*operands, name=name))
        else:
            made.append(b.junction(*operands, name=name))
    for state in states:
        b.assign(state, made[draw(st.integers(0, len(made) - 1))])
    b.output(made[-1], "y")
    return b.build()


def all_groups(program: Program) -> list[str]:
    """Paths of all modules of a program."""
    found: dict[str, None] = {}
    for node in program.nodes():
        path = program.path(node)
        while path := path.rpartition(".")[0]:
            found[path] = None
    return sorted(found)
