"""Conversion between genomes and Programs, and the edits that turn one genome into another.

The names of nodes encode the genome: `n5` is the neuron with innovation number 5. It contains `n5.sum` (a junction),
`n5.out` (its activation) and per incoming link `n5.l7` (source times weight) and `n5.l7.weight`. The port of a link at
the junction is its innovation number, so links are summed in that order. A closed link has all its nodes, but no edge
into the junction. Pictures draw a neuron as one cluster.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from graphwright.evolve.errors import TaskError, need
from graphwright.evolve.mutations.registry import cut_readers, remove_unread_states, state_of
from graphwright.evolve.neurons import genomes
from graphwright.evolve.neurons.genomes import Genome, LinkGene, NodeGene
from graphwright.evolve.settings import NEAT
from graphwright.files import blake2b_128
from graphwright.program import Program
from graphwright.program.editing.replace import redirect, remove_unread
from graphwright.program.editing.transaction import Transaction
from graphwright.program.kinds import STATE

_RECIPES = {  # by name: how ops compute the activations without an op
    "identity": (("out", "copy"),),
    "sigmoid49": (("steep", "mul"), ("out", "sigmoid")),
    "gauss": (("square", "mul"), ("minus", "neg"), ("out", "exp")),
    "step": (("side", "sign"), ("out", "relu")),
}
"""Activation -> (name, op) of its chained nodes; an activation that is not listed is the op of the same name."""
_LINK = re.compile(r"^n(\d+)\.l(\d+)$")
_STEEP = 4.9


def founder(genome: Genome, names: Iterable[str] = (), batch: int | str = "B", name: str = "genome") -> Program:
    """Build a genome as a Program with input `x` [batch, inputs] and output `y` [batch, outputs].

    Args:
        genome: the genome.
        names: names of the inputs.
        batch: batch size; for a genome with delays an integer (a name becomes 1), since states store a value per case.
        name: name of the program.
    """
    if isinstance(batch, str) and any(link.delay for link in genome.links):
        batch = 1
    p = Program(name)
    with p.edit("found a genome", author="evolution") as e:
        x = e.input("x", (batch, genome.inputs))
        labels = list(names) or [f"x{i}" for i in range(genome.inputs)]
        for i, label in enumerate(labels[: genome.inputs]):
            segment = re.sub(r"[^0-9A-Za-z_]+", "_", label).strip("_") or "x"
            e.add("slice", x, name=f"n{i}.{segment}", axis=1, start=i, size=1)
        first = e.add("slice", x, name=f"n{genome.inputs}.like", axis=1, start=0, size=1)
        e.add("full_like", first, name=f"n{genome.inputs}.bias", value=1.0)
        _grow(e, genome, genome.nodes, genome.links)
        ends = [_value(p, genome.inputs + 1 + o, genome.inputs) for o in range(genome.outputs)]
        e.set_outputs(y=ends[0] if len(ends) == 1 else e.add("concat", *ends, name="y", axis=1))
    return p


def apply(p: Program, before: Genome, after: Genome, why: str, author: str = "evolution") -> None:
    """Change the program `p` of genome `before` into the program of genome `after`, as one journal entry."""
    old_nodes, new_nodes = {n.id: n for n in before.nodes}, {n.id: n for n in after.nodes}
    old_links, new_links = {e.id: e for e in before.links}, {e.id: e for e in after.links}
    with p.edit(why, author=author, tool="graphwright.evolve") as e:
        for name in [f"n{link.dst}.l{i}" for i, link in old_links.items() if i not in new_links]:
            cut_readers(e, p.node(name))
            source = p.operands(p.node(name))[0].node
            e.remove([name, f"{name}.weight"])
            remove_unread_states(e, source)
        for node in (n for i, n in old_nodes.items() if i not in new_nodes):
            e.remove([n for n in p.nodes() if p.path(n).startswith(f"n{node.id}.")])
        added_nodes = [n for i, n in new_nodes.items() if i not in old_nodes]
        _grow(e, after, added_nodes, [link for i, link in new_links.items() if i not in old_links])
        for i, link in new_links.items():
            if (old := old_links.get(i)) is None:
                continue
            if link.open and not old.open:
                _open(e, link)
            elif old.open and not link.open:
                cut_readers(e, p.node(f"n{link.dst}.l{i}"))
            if np.float32(old.weight) != np.float32(link.weight):
                e.set_weight(f"n{link.dst}.l{i}.weight", np.float32(link.weight))
        for i, node in new_nodes.items():
            if i in old_nodes and old_nodes[i].activation != node.activation:
                _activation(e, node)


def read(p: Program) -> Genome:
    """Convert a program to a genome. Raises: TaskError with the path of a node that a genome cannot express."""
    what, fix = "the program is not a genome of neurons and links", "evolve.blocks(program) for a network of layers"
    need("x" in p.input_names() and p.outputs(), what, where=p.name, fix=fix)
    inputs = int(p.spec("x").shape[1])
    outputs, nodes, links = int(p.specs(p.outputs()[0].node)[0].shape[1]), [], []
    for node in p.nodes():
        path = p.path(node)
        if path.endswith(".sum") and p.is_junction(node):
            nodes.append(NodeGene(int(path[1:-4]), _activation_of(p, path[:-4])))
        elif found := _LINK.match(path):
            dst, number = int(found[1]), int(found[2])
            source, delay = p.operands(node)[0].node, 0
            while p.op(source) == STATE:
                write = p.assigns(source)[0]
                source, delay = p.operands(write)[1].node, delay + 1
            src = p.path(source).split(".")[0]
            need(re.match(r"^n\d+$", src), "a link does not start at a neuron", where=path, expected="n<k>.<name>",
                 got=p.path(source))  # fmt: skip
            junction = p.node(f"n{dst}.sum")
            is_open = any(p.graph.source(e) == node for e in p.in_edges(junction))
            weight = p.weights.array(f"{path}.weight").to_numpy()
            scalar = "the weight of a link is not a scalar"
            need(weight.size == 1, scalar, where=f"{path}.weight", got=weight.shape)
            links.append(LinkGene(number, int(src[1:]), dst, delay, is_open, float(weight.reshape(()))))
    need(nodes, what, where=p.name, fix=fix)
    return Genome(inputs, outputs, tuple(sorted(nodes)), tuple(sorted(links)))


# -- parts -------------------------------------------------------------------------------------------------------------
def _grow(e: Transaction, genome: Genome, nodes: Iterable[NodeGene], links: Iterable[LinkGene]) -> None:
    """Add program nodes for new node genes and link genes."""
    p = e.program
    for node in nodes:
        # the junction gets its spec from an edge from the bias, which is then removed
        junction = e.add("junction", _value(p, genome.inputs, genome.inputs), name=f"n{node.id}.sum")
        e.cut(p.in_edges(junction)[0])
        _activation(e, node, fresh=True)
    for link in links:
        source: Any = _value(p, link.src, genome.inputs)
        for k in range(1, link.delay + 1):
            source = state_of(e, f"n{link.src}.before{k}", source)
        weight = e.param(f"n{link.dst}.l{link.id}.weight", np.float32(link.weight))
        e.add("mul", source, weight, name=f"n{link.dst}.l{link.id}")
        if link.open:
            _open(e, link)


def _value(p: Program, number: int, inputs: int) -> Any:
    if number == inputs:
        return p.node(f"n{number}.bias")
    if number > inputs:
        return p.node(f"n{number}.out")
    return next(n for n in p.of_traits(slices=True) if p.path(n).startswith(f"n{number}."))


def _open(e: Transaction, link: LinkGene) -> None:
    e.connect(f"n{link.dst}.l{link.id}", f"n{link.dst}.sum", port=link.id)


def _activation(e: Transaction, node: NodeGene, fresh: bool = False) -> None:
    """Add the activation `n<k>.out` after `n<k>.sum`; if `fresh` is False, it replaces the existing activation."""
    p, base = e.program, f"n{node.id}"
    if not fresh:
        e.rename(f"{base}.out", f"{base}.old")
    value: Any = f"{base}.sum"
    for name, op in _RECIPES.get(node.activation, (("out", node.activation),)):
        steep = [e.const(f"{base}.steep.factor", np.float32(_STEEP))] if name == "steep" else []
        value = e.add(op, value, *steep, *([value] if name == "square" else []), name=f"{base}.{name}")
    if not fresh:
        old = p.value(f"{base}.old")
        redirect(e, {old: p.value(f"{base}.out")})
        remove_unread(e, old)


def _activation_of(p: Program, base: str) -> str:
    for activation, ((name, op), *_) in _RECIPES.items():
        if p.select(f"{base}.{name}").count and p.op(p.node(f"{base}.{name}")) == op:
            return activation
    return p.op(p.node(f"{base}.out"))


class PopulationPlan:
    """A batch of programs of genomes; each program returns the same bits as when it runs alone.

    Args:
        programs: programs with the node names that `founder` gives, and equal numbers of inputs and outputs. Later
            edits of them have no effect.
        threads: number of threads; results do not depend on it.
    Raises: TaskError if a program is not a genome, or if its inputs or outputs do not match those of the first one.

    >>> plan = ev.PopulationPlan([result.best.program, other])
    >>> plan(x).shape  # x [N, inputs]
    (2, N, outputs)
    """

    def __init__(self, programs: Sequence[Program], threads: int = 1) -> None:
        from graphwright.array.population.table import tabulate

        found = [read(p) for p in programs]
        need(found, "no programs were given", expected="at least one program")
        self.inputs, self.outputs, self.threads = found[0].inputs, found[0].outputs, threads
        for p, g in zip(programs, found, strict=True):
            sizes, expected = (g.inputs, g.outputs), (self.inputs, self.outputs)
            what = "the numbers of inputs and outputs of this program are not those of the first one"
            need(sizes == expected, what, where=p.name, expected=expected, got=sizes)
        self.genes = genomes.columns_of(found)
        self.table = tabulate(self.genes, self.inputs, self.outputs)

    def __len__(self) -> int:
        return len(self.genes.node_off) - 1

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Run all genomes on the same cases: [N, inputs] -> float32 [G, N, outputs]; sequences also have an axis T."""
        from graphwright.array.population.runner import Cases, outputs

        values = np.asarray(x, np.float32)
        fits = values.ndim in (2, 3) and values.shape[-1] == self.inputs
        expected = f"[N, {self.inputs}] or [N, T, {self.inputs}]"
        need(fits, "inputs have the wrong shape", expected=expected, got=values.shape)
        answers = outputs(self.table, self.genes, Cases.of(values), self.threads)
        return (answers if values.ndim == 3 else answers[:, :, 0]).copy()


def edited_genome(p: Program, before: Genome, names: tuple[str, ...], settings: NEAT) -> Genome:
    """Convert an edited program to a genome; new genes have the numbers of their node names until `numbered` is called.

    Raises: TaskError if genes cannot express the program or it exceeds the limits.
    """
    after = read(p)
    twin = founder(after, names, batch=1)
    if twin.structure_hash() != p.structure_hash():
        odd = _differing_paths(p, twin) or _differing_paths(twin, p)
        raise TaskError(
            "the edited program is no longer a genome of neurons and links", where=", ".join(odd[:3]) or p.name,
            expected="junctions n<k>.sum, activations n<k>.out, links n<k>.l<i> with one weight",
            fix="edit with evolve.mutations; or edit champion.program outside of the run; or evolve.blocks(program)",
        )  # fmt: skip
    sizes, expected = (after.inputs, after.outputs), (before.inputs, before.outputs)
    need(sizes == expected, "the edit changed (inputs, outputs)", where=p.name, expected=expected, got=sizes)
    need(len(after.nodes) <= settings.max_nodes and len(after.links) <= settings.max_links,
         "the edited genome exceeds the limits of the run", where=p.name,
         expected=f"at most {settings.max_nodes} nodes, {settings.max_links} links",
         got=f"{len(after.nodes)} nodes, {len(after.links)} links",
         fix="start the run with larger max_nodes and max_links")  # fmt: skip
    ends: set[tuple[int, int, int]] = set()
    for e in after.links:  # sorted by number
        need(np.isfinite(e.weight), "a weight is not finite", where=f"n{e.dst}.l{e.id}.weight", got=e.weight)
        need((e.src, e.dst, e.delay) not in ends, "two links have the same ends and delay", where=f"n{e.dst}.l{e.id}",
             fix="set the weight of one of them to the sum, and remove the other")  # fmt: skip
        ends.add((e.src, e.dst, e.delay))
    _acyclic(after)
    return after


def numbered(before: Genome, after: Genome, kept: Collection[int], registry: Any) -> tuple[Genome, Any]:
    """Renumber the new genes of an edited genome by innovation numbers; return the genome and the updated registry.

    Args:
        before, after: the genome before and after the edit; kept: numbers of the old neurons that still exist.
    """
    registry = genomes.with_room(registry, len(after.nodes) + len(after.links))
    mine = {i: i for i in range(before.inputs + 1)} | {n: n for n in kept}
    still = {e.id: e for e in after.links}
    closed = [e for e in before.links if e.open and not (e.id in still and still[e.id].open)]
    for node in after.nodes:
        if node.id not in mine:
            kind, what = _key(node.id, after, closed, mine)
            k = 0
            while (given := genomes.number(registry, kind, what, k)) in mine.values():
                k += 1
            mine[node.id] = given
    nodes, links = [NodeGene(mine[n.id], n.activation) for n in after.nodes], []
    for e in after.links:
        src, dst = mine[e.src], mine[e.dst]
        links.append(e._replace(id=genomes.number(registry, genomes.LINK, src, dst, e.delay), src=src, dst=dst))
    return replace(after, nodes=tuple(sorted(nodes)), links=tuple(sorted(links))), registry


def _key(node: int, after: Genome, closed: list[LinkGene], mine: dict[int, int]) -> tuple[int, int]:
    """Return a new neuron's registry key: (SPLIT, number of the `closed` link it splits) or (MANUAL, links' digest)."""
    ends = {(mine.get(e.src, -1), mine.get(e.dst, -1), e.delay) for e in after.links if node in (e.src, e.dst)}
    for e in closed:
        if {(e.src, -1, e.delay), (-1, e.dst, 0)} <= ends:
            return genomes.SPLIT, e.id
    return genomes.MANUAL, int(blake2b_128(repr(sorted(ends)).encode())[:14], 16)


def inherited(one: Any, old: Any) -> None:
    """Copy the optimizer moments of common links from `old` to `one` in place; both are populations of one genome."""
    here, there = _common(one, old)
    for name in ("first", "second", "steps"):
        getattr(one, name)[here] = getattr(old, name)[there]


def untrained(one: Any, trained: Any, seeds: Any) -> Any:
    """Return a copy of genome `one` in which weights equal to those in `trained` are replaced by those in `seeds`.

    All are populations of one genome: `one` after an edit, `trained` before the edit, `seeds` before training.
    """
    heir = type(one)(*(column.copy() for column in one))
    here, there = _common(one, trained)
    same = one.weight[here] == trained.weight[there]
    for name in ("weight", "first", "second", "steps"):
        getattr(heir, name)[here[same]] = getattr(seeds, name)[there[same]]
    return heir


def _common(one: Any, other: Any) -> np.ndarray:
    """Return the indices of the links that two populations of one genome share, in each of them: int64 [2, N]."""
    index = {i: k for k, i in enumerate(other.link_id.tolist())}
    pairs = [(k, index[i]) for k, i in enumerate(one.link_id.tolist()) if i in index]
    return np.array(pairs, np.int64).reshape(-1, 2).T


def _differing_paths(p: Program, other: Program) -> list[str]:
    theirs = {other.path(n): other.node_digest(n) for n in other.nodes()}
    return [p.path(n) for n in p.nodes() if theirs.get(p.path(n)) != p.node_digest(n)]


def _acyclic(genome: Genome) -> None:
    """Raise TaskError if links without delay form a cycle; closed links count too, since they can be opened."""
    into = {n.id: {e.src for e in genome.links if e.dst == n.id and not e.delay} for n in genome.nodes}
    while ready := [n for n, before in into.items() if not before & into.keys()]:
        for n in ready:
            del into[n]
    need(not into, "links without delay form a cycle", where=", ".join(f"n{n}" for n in sorted(into)),
         fix="remove one of the links, or give it a delay")  # fmt: skip
