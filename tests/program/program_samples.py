"""Random programs, what is compared before and after an edit, and the oracle: the same program built from nothing."""

from __future__ import annotations

import numpy as np

import graphwright.plan  # noqa: F401  # registers the planner of Program.compile
from graphwright.autograd import Parameter, Variable
from graphwright.program import Builder, Program, Value
from graphwright.program.kinds import ASSIGN, SOURCES, STORED
from graphwright.program.primitives import add_assign, add_op, add_source, insert_node, set_outputs
from graphwright.program.weights import add_weight

ROWS, COLS = 2, 4
UNARY = ("tanh", "relu", "neg", "sigmoid", "exp")
BINARY = ("add", "mul", "sub", "maximum")
FEEDS = {"x": np.linspace(-1, 1, ROWS * COLS, dtype="f4").reshape(ROWS, COLS), "z": np.full((ROWS, COLS), 0.3, "f4")}


def tiny() -> Program:
    """x -> linear(w) -> junction -> relu -> y."""
    b = Builder("tiny")
    x = b.input("x", ("B", 3))
    w = b.param("w", np.arange(6, dtype="f4").reshape(2, 3) - 2)
    j = b.junction(b.linear(x, w, name="h"), name="j")
    b.output(b.relu(j, name="r"), "y")
    return b.build()


def random_program(seed: int) -> Program:
    """Elementwise ops, linear maps with tied params, junctions, views, a const, a carried state, several outputs."""
    rng = np.random.default_rng(seed)
    b = Builder(f"random_{seed}")
    x, z = b.input("x", (ROWS, COLS)), b.input("z", (ROWS, COLS))
    full = [x, z, b.add(x, b.const("c", rng.normal(size=(COLS,)).astype("f4")), name="m0.plus_c")]
    weights = [b.param(f"m{i}.w", rng.normal(size=(COLS, COLS)).astype("f4")) for i in range(2)]
    norm = b.param("norm.weight", rng.normal(size=COLS).astype("f4"))
    memory = b.state("memory", np.zeros((ROWS, COLS), "f4"))
    for i in range(int(rng.integers(3, 9))):
        kind = rng.integers(7)
        one, two = (full[rng.integers(len(full))] for _ in range(2))
        name = f"m{rng.integers(3)}.n{i}"
        if kind == 0:
            made = b.op(str(rng.choice(UNARY)), one, name=name)
        elif kind == 1:
            made = b.op(str(rng.choice(BINARY)), one, two, name=name)
        elif kind == 2:
            made = b.linear(one, weights[rng.integers(2)], name=name)
        elif kind == 3:
            flipped = b.permute(one, axes=(1, 0), name=f"{name}.t")
            made = b.permute(b.neg(flipped, name=f"{name}.neg"), axes=(1, 0), name=name)
        elif kind == 4:
            made = b.rms_norm(one, norm, name=name)
        elif kind == 5:
            made = b.unflatten(
                b.flatten(one, start=0, end=1, name=f"{name}.flat"), axis=0, sizes=(ROWS, COLS), name=name
            )
        else:
            made = b.junction(one, two, *full[: rng.integers(2)], name=name)
        full.append(made)
    total = b.junction(full[-1], memory, name="total")
    b.assign(memory, b.tanh(total, name="next_memory"))
    b.output(total, "y")
    b.output(full[int(rng.integers(3, len(full)))], "side")
    return b.build()


def rebuilt(p: Program) -> Program:
    """The same nodes and edges put into an empty program; every spec inferred again."""
    fresh, values = Program(p.name), {}
    for node in p.order():
        op, path = p.op(node), p.path(node)
        operands = [values[v] for v in p.operands(node)]
        if op in SOURCES:
            if op in STORED and p.key(node) not in fresh.weights:
                old = p.weights[p.key(node)]
                maker = Parameter if isinstance(old, Parameter) else Variable
                add_weight(
                    fresh.weights, p.key(node), maker(p.weights.array(p.key(node)).copy(), old.requires_grad, old.name)
                )
            made = add_source(fresh, op, path, p.spec(node), p.attrs(node))
        elif op == ASSIGN:
            made = add_assign(fresh, operands[0], operands[1], path)
        elif not operands:
            made = insert_node(fresh, op, p.attrs(node), path, p.specs(node))
        else:
            made = add_op(fresh, op, operands, p.attrs(node), path)
        for port in range(len(p.specs(node))):
            values[Value(node, port)] = Value(made, port)
    set_outputs(fresh, {name: values[v] for name, v in zip(p.output_names(), p.outputs(), strict=True)})
    return fresh


def weight_bytes(p: Program) -> dict[str, bytes]:
    """key -> dtype, shape and bytes."""
    return {k: repr(p.weights.array(k).spec).encode() + p.weights.array(k).tobytes() for k in sorted(p.weights)}


def labels(p: Program) -> dict:
    """Node -> position in the topological order."""
    return {n: p.order_labels.key(n) for n in p.nodes()}


def fingerprint(p: Program) -> tuple:
    """All that an edit which failed, or was undone, must leave as it was. Ports given out are not taken back."""
    structure = {n: (p.path(n), p.op(n), p.specs(n), [(e, p.edge_port(e)) for e in p.in_edges(n)]) for n in p.nodes()}
    lists = {n: (p.graph.out_edges(n), p.graph.in_edges(n)) for n in p.nodes()}
    kinds = [p.inputs(), p.params(), p.states(), p.assigns()]
    return p.hash(), weight_bytes(p), labels(p), structure, lists, kinds, p.valid, p.outputs(), p.output_names()


def counters(p: Program) -> tuple:
    """What only a commit may raise."""
    return p.version, len(p.journal), p.journal.hash, len(p.history.undoable), len(p.history.redoable)


def outputs(p: Program) -> dict[str, bytes]:
    """Outputs of a run, as bytes; on a fork, since a run writes state."""
    twin = p.fork()
    result = twin.run({name: FEEDS[name] for name in map(p.path, p.inputs())})
    return {name: result[name].tobytes() for name in p.output_names()}


def planned(p: Program) -> dict[str, bytes]:
    """Outputs of the compiled plan, as bytes."""
    twin = p.fork()
    feeds = {name: FEEDS[name] for name in map(p.path, p.inputs())}
    return {name: array.tobytes() for name, array in twin.compile(feeds, deterministic=True)(feeds).items()}


def edited() -> Program:
    """A program with a past and something undone; weights changed by structure, by value and by training."""
    p = tiny()
    with p.edit("scale") as e:
        e.set_weight("w", lambda w: w * 2)
        e.insert(p.in_edges("r")[0], "tanh", name="t")
    with p.edit("link") as e:
        e.link("x", "j", np.full((2, 3), 0.5, "f4"))
        e.cut(p.in_edges("j")[0])
    with p.edit("train"):
        p.weights["w"].own().to_numpy()[0] = 7
    p.mark("trained")
    with p.edit("rename") as e:
        e.rename("t", "act.t")
    p.undo()
    return p
