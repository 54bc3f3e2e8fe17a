"""Conversion between genomes and Programs, and the edits that turn one genome into another.

The names of nodes encode the genome: `n5` is the neuron with innovation number 5. It contains `n5.sum` (a junction),
`n5.out` (its activation) and per incoming link `n5.l7` (source times weight) and `n5.l7.weight`. The port of a link at
the junction is its number, which keeps sums in the order of numbers. A closed link has all its nodes, but no edge into
the junction. A neuron is one cluster of the picture.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.evolve.errors import TaskError
from graphwright.evolve.mutations.registry import remove_unread_states, rewire_readers
from graphwright.evolve.neurons.genomes import Genome, LinkGene, NodeGene, columns_of
from graphwright.program.errors import UnknownNode
from graphwright.program.kinds import ASSIGN
from graphwright.program.program import Program

if TYPE_CHECKING:
    from graphwright.program import Program
    from graphwright.program.editing.transaction import Transaction

# activations of genomes that are one op of the same name
_DIRECT = ("sigmoid", "tanh", "relu", "leaky_relu", "gelu", "silu", "softplus", "sech", "sin", "abs", "sign")
_LINK = re.compile(r"^n(\d+)\.l(\d+)$")
_STEEP = 4.9


def founder(genome: Genome, names: Iterable[str] = (), batch: int | str = "B", name: str = "genome") -> Program:
    """Build a genome as a Program with input `x` [batch, inputs] and output `y` [batch, outputs].

    Args:
        genome: the genome.
        names: names of the inputs.
        batch: number of cases; a genome with delays needs an integer, since its states store a value per case.
        name: name of the program.
    """
    if isinstance(batch, str) and any(link.delay for link in genome.links):
        batch = 1
    p = Program(name)
    with p.edit("found a genome", author="evolution") as e:
        x = e.input("x", (batch, genome.inputs))
        labels = list(names) or [f"x{i}" for i in range(genome.inputs)]
        for i in range(genome.inputs):
            e.add("slice", x, name=f"n{i}.{_clean(labels[i])}", axis=1, start=i, size=1)
        first = e.add("slice", x, name=f"n{genome.inputs}.like", axis=1, start=0, size=1)
        e.add("full_like", first, name=f"n{genome.inputs}.bias", value=1.0)
        _grow(e, genome, genome.nodes, genome.links)
        ends = [_value(p, genome.inputs + 1 + o, genome.inputs) for o in range(genome.outputs)]
        e.set_outputs(y=ends[0] if len(ends) == 1 else e.add("concat", *ends, name="y", axis=1))
    return p


def apply(p: Program, before: Genome, after: Genome, why: str, author: str = "evolution") -> None:
    """Turn the program of one genome into that of another, as one journal entry."""
    old_nodes, new_nodes = {n.id: n for n in before.nodes}, {n.id: n for n in after.nodes}
    old_links, new_links = {e.id: e for e in before.links}, {e.id: e for e in after.links}
    with p.edit(why, author=author, tool="graphwright.evolve") as e:
        gone = [link for i, link in old_links.items() if i not in new_links]
        for link in gone:
            _drop(e, link)
        for node in (n for i, n in old_nodes.items() if i not in new_nodes):
            e.remove([n for n in p.nodes() if p.path(n).startswith(f"n{node.id}.")])
        added_nodes = [n for i, n in new_nodes.items() if i not in old_nodes]
        _grow(e, after, added_nodes, [link for i, link in new_links.items() if i not in old_links])
        for i, link in new_links.items():
            if (old := old_links.get(i)) is None:
                continue
            if old.open != link.open:
                (_open if link.open else _close)(e, link)
            if np.float32(old.weight) != np.float32(link.weight):
                e.set_weight(f"n{link.dst}.l{i}.weight", np.float32(link.weight))
        for i, node in new_nodes.items():
            if i in old_nodes and old_nodes[i].activation != node.activation:
                _activation(e, node)


def read(p: Program) -> Genome:
    """Read the genome of a program of this form. Raises: TaskError naming the node that a genome cannot express."""
    if "x" not in p.input_names() or not p.outputs():
        raise _no_genome(p)
    inputs = int(p.spec("x").shape[1])
    outputs, nodes, links = int(p.specs(p.outputs()[0].node)[0].shape[1]), [], []
    for node in p.nodes():
        path = p.path(node)
        if path.endswith(".sum") and p.is_junction(node):
            nodes.append(NodeGene(int(path[1:-4]), _activation_of(p, path[:-4])))
        elif found := _LINK.match(path):
            dst, number = int(found[1]), int(found[2])
            source, delay = p.operands(node)[0].node, 0
            while p.op(source) == "state":
                write = next(w for w in p.consumers(source) if p.op(w) == ASSIGN)
                source, delay = p.operands(write)[1].node, delay + 1
            src = p.path(source).split(".")[0]
            if not re.match(r"^n\d+$", src):
                raise TaskError("a link does not start at a neuron", where=path, expected="n<k>....",
                                got=p.path(source))  # fmt: skip
            junction = p.node(f"n{dst}.sum")
            is_open = any(p.graph.source(e) == node for e in p.in_edges(junction))
            weight = p.weights.array(f"{path}.weight").to_numpy()
            if weight.size != 1:
                raise TaskError("the weight of a link is not a scalar", where=f"{path}.weight", got=weight.shape)
            links.append(LinkGene(number, int(src[1:]), dst, delay, is_open, float(weight.reshape(()))))
    if not nodes:
        raise _no_genome(p)
    return Genome(inputs, outputs, tuple(sorted(nodes)), tuple(sorted(links)))


def _no_genome(p: Program) -> TaskError:
    return TaskError("the program is not a genome of neurons and links", where=p.name,
                     fix="evolve.blocks(program) for a network of layers")  # fmt: skip


# -- parts -------------------------------------------------------------------------------------------------------------
def _grow(e: Transaction, genome: Genome, nodes: Iterable[NodeGene], links: Iterable[LinkGene]) -> None:
    """Add nodes and links. A junction takes its spec from its first edge."""
    new = list(nodes)
    p = e.program
    for node in new:
        # an edge from the bias gives the junction its spec, and is removed
        junction = e.add("junction", _value(p, genome.inputs, genome.inputs), name=f"n{node.id}.sum")
        e.cut(p.in_edges(junction)[0])
        _activation(e, node, fresh=True)
    for link in links:
        source: Any = _value(p, link.src, genome.inputs)
        for k in range(1, link.delay + 1):
            source = _delayed(e, source, f"n{link.src}.before{k}")
        weight = e.param(f"n{link.dst}.l{link.id}.weight", np.float32(link.weight))
        e.add("mul", source, weight, name=f"n{link.dst}.l{link.id}")
        if link.open:
            _open(e, link)


def _delayed(e: Transaction, source: Any, name: str) -> Any:
    """The state that holds a value of the previous step; one per source."""
    p = e.program
    if _has(p, name):
        return p.node(name)
    state = e.state(name, np.zeros([int(d) for d in e.spec(source).shape], np.float32))
    e.assign(state, source)
    return state


def _value(p: Program, number: int, inputs: int) -> Any:
    """The node with the value of a neuron."""
    if number == inputs:
        return p.node(f"n{number}.bias")
    if number > inputs:
        return p.node(f"n{number}.out")
    return next(n for n in p.of_kind("slice") if p.path(n).startswith(f"n{number}."))


def _open(e: Transaction, link: LinkGene) -> None:
    e.connect(f"n{link.dst}.l{link.id}", f"n{link.dst}.sum", port=link.id)


def _close(e: Transaction, link: LinkGene) -> None:
    p = e.program
    node = p.node(f"n{link.dst}.l{link.id}")
    for edge in p.out_edges(node):
        e.cut(edge)


def _drop(e: Transaction, link: LinkGene) -> None:
    """Remove a link with all its nodes, and states without other readers."""
    p = e.program
    _close(e, link)
    source = p.operands(p.node(f"n{link.dst}.l{link.id}"))[0].node
    e.remove([f"n{link.dst}.l{link.id}", f"n{link.dst}.l{link.id}.weight"])
    remove_unread_states(e, source)


def _has(p: Program, name: str) -> bool:
    try:
        p.node(name)
    except UnknownNode:
        return False
    return True


def _activation(e: Transaction, node: NodeGene, fresh: bool = False) -> None:
    """Make `n.out` the activation of `n.sum`, and rewire readers of the old activation to it."""
    p, base = e.program, f"n{node.id}"
    if not fresh:
        e.rename(f"{base}.out", f"{base}.old")
    total = f"{base}.sum"
    if node.activation in _DIRECT:
        e.add(node.activation, total, name=f"{base}.out")
    elif node.activation == "sigmoid49":
        e.add("sigmoid", _scaled(e, total, f"{base}.steep", _STEEP), name=f"{base}.out")
    elif node.activation == "gauss":
        e.add("exp", e.add("neg", e.add("mul", total, total, name=f"{base}.square"), name=f"{base}.minus"),
              name=f"{base}.out")  # fmt: skip
    elif node.activation == "step":
        e.add("relu", e.add("sign", total, name=f"{base}.side"), name=f"{base}.out")
    else:
        e.add("copy", total, name=f"{base}.out")
    if not fresh:
        rewire_readers(e, p.node(f"{base}.old"), f"{base}.out")
        kept = {f"{base}.sum", f"{base}.out"}
        above = [p.node(f"{base}.old")]
        while above:
            node_ = above.pop()
            before = [n for n in p.producers(node_) if p.path(n) not in kept]
            e.remove(node_)
            above += [n for n in before if not p.consumers(n)]


def _scaled(e: Transaction, source: str, name: str, factor: float) -> Any:
    return e.add("mul", source, e.const(f"{name}.factor", np.float32(factor)), name=name)


def _activation_of(p: Program, base: str) -> str:
    op = p.op(p.node(f"{base}.out"))
    if _has(p, f"{base}.steep"):
        return "sigmoid49"
    if _has(p, f"{base}.side"):
        return "step"
    return {"exp": "gauss", "copy": "identity"}.get(op, op)  # names of genomes that differ from the op's


def _clean(name: str) -> str:
    """Make a name one segment of a path."""
    return re.sub(r"[^0-9A-Za-z_]+", "_", name).strip("_") or "x"


class PopulationPlan:
    """Programs that run as one batch of genomes; each computes the same bits as alone.

    Args:
        programs: programs of the form of `evolve.program.founder` with equal inputs and outputs; later edits of them
            have no effect.
        threads: number of threads; it changes no result.
    Raises: TaskError for a program that is not a genome, or with other inputs or outputs than the first.

    >>> plan = ev.PopulationPlan([result.best.program, other])
    >>> plan(x).shape  # x [N, inputs]
    (2, N, outputs)
    """

    def __init__(self, programs: Sequence[Program], threads: int = 1) -> None:
        from graphwright.array.population.table import tabulate

        genomes = [read(p) for p in programs]
        if not genomes:
            raise TaskError("a population needs at least one program", got="no programs")
        self.inputs, self.outputs, self.threads = genomes[0].inputs, genomes[0].outputs, threads
        for p, g in zip(programs, genomes, strict=True):
            if (g.inputs, g.outputs) != (self.inputs, self.outputs):
                raise TaskError("the program has other inputs or outputs than the first", where=p.name,
                                expected=(self.inputs, self.outputs), got=(g.inputs, g.outputs))  # fmt: skip
        self.genes = columns_of(genomes)
        self.table = tabulate(self.genes, self.inputs, self.outputs)

    def __len__(self) -> int:
        return len(self.genes.node_off) - 1

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Run all genomes on the same cases: [N, inputs] to float32 [G, N, outputs], sequences likewise."""
        from graphwright.array.population.runner import Cases, outputs

        values = self._checked(x, (2, 3))
        answers = outputs(self.table, self.genes, Cases.of(values), self.threads)
        return (answers if values.ndim == 3 else answers[:, :, 0]).copy()

    def each(self, x: np.ndarray) -> np.ndarray:
        """Run every genome on its own cases: [G, N, inputs] to float32 [G, N, outputs]."""
        from graphwright.array.population.runner import Session

        values = self._checked(x, (3,))
        if len(values) != len(self):
            raise TaskError("the first axis must have one entry per genome", expected=len(self), got=len(values))
        session = Session(self.table, self.genes, values.shape[1], self.inputs, self.threads)
        return np.ascontiguousarray(session.step(values))

    def _checked(self, x: np.ndarray, ranks: tuple[int, ...]) -> np.ndarray:
        values = np.asarray(x, np.float32)
        if values.ndim not in ranks or values.shape[-1] != self.inputs:
            raise TaskError(
                "inputs have the wrong shape", expected=f"[..., {self.inputs}] of rank {ranks}", got=values.shape
            )
        return values
