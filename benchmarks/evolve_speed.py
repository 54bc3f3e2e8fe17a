"""Evolution: how fast, beside neat-python, plain Python, padded matrix products and torch.

neat-python takes part where it is installed; else its rows are missing and the figure says so. A plain Python loop over
the same genomes stands in both cases: it does what neat-python's `activate` does. What runs find, over seeds, is
`benchmarks.evolve`.
"""

from __future__ import annotations

import math
import os
import random
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch

import graphwright as gw
from benchmarks.harness import Figure
from graphwright import evolve as ev
from graphwright.array.population.runner import Cases, Lesson, fit, outputs
from graphwright.array.population.species import Parents
from graphwright.array.population.table import Past, tabulate
from graphwright.evolve.neurons import program
from graphwright.evolve.neurons.genomes import columns_of, genome, with_room
from graphwright.evolve.neurons.species import Breeder

os.environ.setdefault("TQDM_DISABLE", "1")  # neat-python shows a bar for each generation
try:
    import neat
except ImportError:
    neat = None  # type: ignore[assignment]

X = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], np.float32)
ABSENT = "neat-python is not installed: python -m pip install neat-python adds its rows."
PARTS = ("evaluations", "generations", "carts", "matrices", "training", "mutation")


def grown(generations: int) -> ev.Evolution:
    """A population on XOR some generations on."""
    run = ev.Evolution(ev.tasks.xor(), None, ev.NEAT(), seed=0)
    run.run(generations, target=2.0)
    return run


def per_call(calls: dict[str, Any], rounds: int = 11, least: float = 0.03) -> dict[str, list[float]]:
    """CPU seconds of a call of each, in rounds that all take part in, each round long enough to be timed."""
    counts = {}
    for name, call in calls.items():
        call()
        count, spent = 1, 0.0
        while spent < least:
            count, began = 2 * count, process_time()
            for _ in range(count):
                call()
            spent = process_time() - began
        counts[name] = count
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            began = process_time()
            for _ in range(counts[name]):
                call()
            taken[name].append((process_time() - began) / counts[name])
    return taken


def times(slow: list[float], fast: list[float]) -> str:
    """How many times as fast, round by round."""
    ratios = sorted(a / b for a, b in zip(slow, fast, strict=True))
    return f"we are {median(ratios):.0f} times as fast ({ratios[0]:.0f} to {ratios[-1]:.0f})"


def sigmoid49(z: float) -> float:
    return 1.0 / (1.0 + math.exp(-4.9 * max(-12.0, min(12.0, z))))


def node_evals(genome: ev.Genome) -> list[tuple[int, float, list[tuple[int, float]]]]:
    """A genome in order: node, bias, and what it reads, as neat-python has it; only what an output needs."""
    by_target: dict[int, list[ev.LinkGene]] = {}
    for link in genome.links:
        if link.open:
            by_target.setdefault(link.dst, []).append(link)
    order: list[int] = []

    def visit(node: int) -> None:
        if node not in order and node > genome.inputs:
            for link in by_target.get(node, []):
                visit(link.src)
            order.append(node)

    for o in range(genome.outputs):
        visit(genome.inputs + 1 + o)
    return [
        (
            n,
            sum(e.weight for e in by_target.get(n, []) if e.src == genome.inputs),
            [(e.src, e.weight) for e in by_target.get(n, []) if e.src != genome.inputs],
        )
        for n in order
    ]


def plain(nets: list[Any], x: list[list[float]], out: int) -> list[list[float]]:
    """What neat-python's `activate` does, in plain Python."""
    answers = []
    for net in nets:
        rows = []
        for row in x:
            values = dict(enumerate(row))
            for node, bias, links in net:
                values[node] = sigmoid49(bias + sum([values[i] * w for i, w in links]))
            rows.append(values.get(out, 0.0))
        answers.append(rows)
    return answers


def evaluations() -> Figure:
    figure = Figure("Evaluations per second, the same 150 genomes", "CPU time of one thread; a genome on a case")
    for label, generations, x in (
        ("XOR, 10 generations", 10, X),
        ("XOR, 60 generations", 60, X),
        ("256 cases, 60 generations", 60, np.random.default_rng(0).normal(size=(256, 2)).astype(np.float32)),
    ):
        run = grown(generations)
        genes, cases = run.genes, Cases.of(x)
        table = tabulate(genes, 2, 1)
        genomes = [genome(genes, g, 2, 1) for g in range(150)]
        nets, rows = [node_evals(g) for g in genomes], x.tolist()
        spread = np.abs(np.array(plain(nets, rows, 3)) - outputs(table, genes, cases)[:, :, 0, 0]).max()
        assert spread < 1e-4, spread
        size = (
            f"{np.mean([g.hidden for g in genomes]):.1f} hidden, {np.mean([g.open_links for g in genomes]):.1f} links"
        )
        plan = ev.PopulationPlan([run.program(genes, g) for g in range(150)])
        calls = {
            "graphwright": lambda t=table, g=genes, c=cases: outputs(t, g, c),
            "graphwright again": lambda t=table, g=genes, c=cases: outputs(t, g, c),
            "PopulationPlan, new cases each time": lambda p=plan, x=x: p(x),
            "with a new table each time": lambda g=genes, c=cases: outputs(tabulate(g, 2, 1), g, c),
            "plain Python loop": lambda n=nets, r=rows: plain(n, r, 3),
        }
        if neat is not None:
            made = [
                neat.nn.FeedForwardNetwork([0, 1], [3], [(n, sigmoid49, sum, b, 1.0, links) for n, b, links in net])
                for net in nets
            ]
            calls["neat-python activate"] = lambda m=made, r=rows: [[net.activate(row) for row in r] for net in m]
        taken = per_call(calls)
        for who, seconds in taken.items():
            slow = who in ("plain Python loop", "neat-python activate")
            note = times(seconds, taken["graphwright"]) if slow else size if who == "graphwright" else ""
            figure.add(f"{label}: {who}", 150 * len(x) / median(seconds) / 1e6, "M/s", note)
    if neat is None:
        figure.notes.append(ABSENT)
    return figure


def generations() -> Figure:
    figure = Figure(
        "Generations per second on XOR, population 150",
        "CPU time of one thread, and wall time beside neat-python on two processes; evaluation, species, crossover, "
        "mutation, lineage",
    )
    for label, first, count in (("generations 1 to 30", 0, 30), ("generations 100 to 200", 100, 100)):
        ours, walls, theirs, two, ends, size = [], [], [], [], [], ""
        for seed in range(5):
            run = ev.Evolution(ev.tasks.xor(), None, ev.NEAT(), seed=seed)
            if first:
                run.run(first, target=2.0)
            began, wall = process_time(), perf_counter()
            run.run(first + count, target=2.0)
            ours.append((process_time() - began) / count)
            walls.append((perf_counter() - wall) / count)
            ends.append([np.diff(off).mean() for off in (run.genes.node_off, run.genes.link_off)])
            if neat is not None:
                spent, _, size = neat_time(first, count, seed)
                theirs.append(spent)
                two.append(neat_time(first, count, seed, workers=2)[1])
        nodes, links = np.mean(ends, axis=0)
        figure.add(f"{label}: graphwright", 1 / median(ours), "/s", f"at the end {nodes:.1f} nodes, {links:.1f} links",
                   1 / max(ours), 1 / min(ours))  # fmt: skip
        if theirs:
            note = f"at the end {size}; {times(theirs, ours)}"
            figure.add(f"{label}: neat-python", 1 / median(theirs), "/s", note, 1 / max(theirs), 1 / min(theirs))
            figure.add(f"{label}: neat-python, ParallelEvaluator(2)", 1 / median(two), "/s", times(two, walls),
                       1 / max(two), 1 / min(two))  # fmt: skip
    if neat is None:
        figure.notes.append(ABSENT)
    return figure


def neat_error(genome: Any, config: Any) -> float:
    net = neat.nn.FeedForwardNetwork.create(genome, config)
    return (4 - sum(abs(net.activate(row)[0] - y) for row, y in zip(X.tolist(), (0, 1, 1, 0), strict=True))) ** 2


def neat_time(first: int, count: int, seed: int, workers: int = 0, size: int = 150) -> tuple[float, float, str]:
    """Seconds of a generation of neat-python with its own example's rates, of this process and by the clock; sizes."""
    random.seed(seed)
    config = neat.Config(neat.DefaultGenome, neat.DefaultReproduction, neat.DefaultSpeciesSet,
                         neat.DefaultStagnation, str(Path(__file__).with_name("neat_xor.cfg")))  # fmt: skip
    config.pop_size = size
    population = neat.Population(config)

    def fitness(genomes: Any, config: Any) -> None:
        for _, one in genomes:
            one.fitness = neat_error(one, config)

    evaluate = neat.ParallelEvaluator(workers, neat_error).evaluate if workers else fitness
    if first:
        population.run(evaluate, first)
    began, wall = process_time(), perf_counter()
    population.run(evaluate, count)
    spent, walked = process_time() - began, perf_counter() - wall
    genomes = list(population.population.values())
    nodes, links = (np.mean([len(getattr(g, part)) for g in genomes]) for part in ("nodes", "connections"))
    return spent / count, walked / count, f"{nodes:.1f} nodes, {links:.1f} links"


def carts() -> Figure:
    figure = Figure(
        "CartPole, population 150, 5 episodes each", "CPU time of one thread; steps of all episodes until all ended"
    )
    run = ev.Evolution(ev.tasks.cartpole(), None, ev.NEAT(), seed=0)
    run.run(2, target=501.0)
    population, task = run.population(), run.task
    began = perf_counter()
    scores = task.score(population)
    share = 100 * scores.seconds / (perf_counter() - began)
    taken = per_call({"graphwright": lambda: task.score(population)}, rounds=7)["graphwright"]
    figure.add(
        "graphwright", scores.passes / median(taken) / 1e6, "M/s", f"the environment is about {share:.0f} % of it"
    )
    if neat is None:
        figure.notes.append(ABSENT)
        return figure
    nets = [node_evals(genome(run.genes, g, 4, 1)) for g in range(150)]
    made = [
        neat.nn.FeedForwardNetwork([0, 1, 2, 3], [5], [(n, sigmoid49, sum, b, 1.0, links) for n, b, links in net])
        for net in nets
    ]

    def alone() -> int:
        steps, rng = 0, np.random.default_rng(0)
        for net in made:
            for _ in range(5):
                cart = ev.tasks.CartPole()
                state, fell, age = cart.reset(rng, ()), False, 0
                while not fell and age < 500:
                    state, _, fell = cart.step(np.array(net.activate(state.tolist())))
                    age += 1
                steps += age
        return steps

    began = process_time()
    steps = alone()
    spent = (process_time() - began) / steps
    figure.add("neat-python activate, one cart at a time", 1e-6 / spent, "M/s",
               times([spent], [median(taken) / scores.passes]))  # fmt: skip
    return figure


# -- against dense products --------------------------------------------------------------------------------------------
def layered(hidden: int, seed: int = 0, inputs: int = 8, count: int = 150) -> tuple[Any, list[np.ndarray]]:
    """Genomes of two full layers of tanh units and one output, and the same as three stacks of matrices [150, out, in].

    Bias is the last column of each; layers are as wide in all genomes, so that padding costs the matrices nothing.
    """
    rng, half = np.random.default_rng(seed), hidden // 2
    sizes, genomes = (inputs, half, half, 1), []
    stacks = [(rng.normal(size=(count, o, i + 1)) / np.sqrt(i + 1)).astype(np.float32)
              for i, o in pairwise(sizes)]  # fmt: skip
    out = inputs + 1
    ids = [list(range(inputs)), *(list(range(out + 1 + k * half, out + 1 + (k + 1) * half)) for k in (0, 1)), [out]]
    for g in range(count):
        links: list[ev.LinkGene] = []
        for stack, below, above in zip(stacks, ids[:-1], ids[1:], strict=True):
            for row, node in zip(stack[g].tolist(), above, strict=True):
                for weight, source in zip(row, [*below, inputs], strict=True):
                    links.append(ev.LinkGene(10_000 + len(links), source, node, 0, True, weight))
        nodes = [ev.NodeGene(out, "identity"), *(ev.NodeGene(n, "tanh") for n in ids[1] + ids[2])]
        genomes.append(ev.Genome(inputs, 1, tuple(nodes), tuple(links)))
    return columns_of(genomes), stacks


def dense(stacks: list[Any], x: Any) -> Any:
    """The answers of `layered` by batched products: [150, cases]."""
    h = x.T.expand(len(stacks[0]), -1, -1)
    for k, stack in enumerate(stacks):
        h = torch.baddbmm(stack[:, :, -1:], stack[:, :, :-1], h)
        h = h.tanh() if k < 2 else h
    return h[:, 0]


SIZES = ((8, 4), (8, 256), (32, 4), (32, 256), (128, 4), (128, 256))


def matrices() -> Figure:
    figure = Figure(
        "150 genomes of two full layers beside batched matrix products",
        "CPU time of one thread; torch.baddbmm without gradients, all genomes of one shape: the best case of padding",
    )
    torch.set_num_threads(1)
    for hidden, cases in SIZES:
        genes, stacks = layered(hidden)
        x = np.random.default_rng(1).normal(size=(cases, 8)).astype(np.float32)
        table, given = tabulate(genes, 8, 1), Cases.of(x)
        tensors, points = [torch.from_numpy(s) for s in stacks], torch.from_numpy(x)
        with torch.inference_mode():
            spread = np.abs(dense(tensors, points).numpy() - outputs(table, genes, given)[:, :, 0, 0]).max()
            assert spread < 1e-4, spread
            taken = per_call({
                "graphwright": lambda t=table, g=genes, c=given: outputs(t, g, c),
                "matrices": lambda s=tensors, p=points: dense(s, p),
            })  # fmt: skip
        note = f"the table takes {ratio(taken['graphwright'], taken['matrices']):.2f} times as long"
        for who, seconds in taken.items():
            figure.add(f"{hidden} hidden, {cases} cases: {who}", 1e6 * median(seconds), "us",
                       note if who == "matrices" else "")  # fmt: skip
    return figure


def ratio(a: list[float], b: list[float]) -> float:
    return median(x / y for x, y in zip(a, b, strict=True))


def crossover(sizes: list[int], ratios: list[float]) -> float | None:
    """The size at which a peer's time falls to ours, by straight lines between logarithms; None if it does not."""
    for (small, high), (large, low) in pairwise(zip(sizes, ratios, strict=True)):
        if high >= 1 > low:
            return small * (large / small) ** (math.log(high) / math.log(high / low))
    return None


def training(steps: int = 60, widths: tuple[int, ...] = (4, 16, 64)) -> Figure:
    """Steps of Adam; all start from the same weights, and end at the same loss."""
    figure = Figure(
        f"{steps} training steps of 150 genomes, 64 cases",
        "CPU time of one thread; Adam, mean squared error, no clipping; genomes of one shape, the best case of vmap",
    )
    torch.set_num_threads(1)
    rate, cases = 0.01, 64
    times: dict[str, list[float]] = {}
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(cases, 8)).astype(np.float32), rng.normal(size=(cases, 1)).astype(np.float32)
    points, wanted = torch.from_numpy(x), torch.from_numpy(y[:, 0])
    for hidden in widths:
        genes, stacks = layered(hidden)
        table, lesson = tabulate(genes, 8, 1), Lesson.of(x, y, "mse")
        ends: dict[str, Any] = {}

        def ours(genes: Any = genes, table: Any = table, lesson: Any = lesson, ends: Any = ends) -> None:
            own = type(genes)(*(column.copy() for column in genes))
            fit(table, own, lesson, np.full(150, steps), np.full(150, rate), 0.0)
            ends["graphwright"] = ((outputs(table, own, Cases.of(x))[:, :, 0, 0] - y[:, 0]) ** 2).mean(1)

        def loop(stacks: Any = stacks, ends: Any = ends) -> None:
            found = []
            for g in range(150):
                own = [torch.from_numpy(s[g : g + 1].copy()).requires_grad_() for s in stacks]
                found.append(torch_steps(own, points, wanted, steps, rate))
            ends["torch, one by one"] = np.concatenate(found)

        def padded(stacks: Any = stacks, ends: Any = ends) -> None:
            own = [torch.from_numpy(s.copy()) for s in stacks]
            ends["torch.vmap"] = vmapped(own, points, wanted, steps, rate)

        taken = {}
        for who, call in (("graphwright", ours), ("torch, one by one", loop), ("torch.vmap", padded)):
            call()
            rounds = 1 if call is loop else 5
            taken[who] = per_call({who: call}, rounds=rounds, least=0.0)[who]
        for who, end in ends.items():
            assert np.allclose(end, ends["graphwright"], rtol=1e-3, atol=1e-4), who
        for who, seconds in taken.items():
            times.setdefault(who, []).append(median(seconds) / median(taken["graphwright"]))
            note = "" if who == "graphwright" else f"{times[who][-1]:.2f} times ours"
            figure.add(f"{hidden} hidden: {who}", 1e3 * median(seconds), "ms", note)
    for who in ("torch, one by one", "torch.vmap"):
        size = crossover(list(widths), times[who])
        where = f"from {size:.0f} hidden neurons on" if size else f"at none of {widths} hidden neurons"
        figure.notes.append(f"{who} is quicker {where}.")
    return figure


def torch_steps(own: list[Any], points: Any, wanted: Any, steps: int, rate: float) -> np.ndarray:
    opt = torch.optim.Adam(own, lr=rate)
    for _ in range(steps):
        opt.zero_grad()
        ((dense(own, points) - wanted) ** 2).mean(1).sum().backward()
        opt.step()
    with torch.no_grad():
        return ((dense(own, points) - wanted) ** 2).mean(1).numpy()


def vmapped(own: list[Any], points: Any, wanted: Any, steps: int, rate: float) -> np.ndarray:
    """Adam on all genomes at once, gradients by `torch.func`."""

    def lost(*one: Any) -> Any:
        return ((dense([w[None] for w in one], points)[0] - wanted) ** 2).mean()

    slopes = torch.func.vmap(torch.func.grad(lost, argnums=(0, 1, 2)))
    first, second = ([torch.zeros_like(w) for w in own] for _ in range(2))
    for t in range(1, steps + 1):
        for w, g, m, v in zip(own, slopes(*own), first, second, strict=True):
            m.mul_(0.9).add_(g, alpha=0.1)
            v.mul_(0.999).addcmul_(g, g, value=0.001)
            w.sub_(rate * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8))
    return ((dense(own, points) - wanted) ** 2).mean(1).numpy()


def mutation() -> Figure:
    """A structural mutation of one genome in ten, and the first result; beside rebuilding everything."""
    figure = Figure(
        "From mutations to first results, 150 genomes",
        "CPU time of one thread; one genome in ten splits a link, 4 cases",
    )
    x = np.random.default_rng(3).normal(size=(4, 8)).astype(np.float32)
    cases, each = Cases.of(x), np.arange(150)
    alone = Parents(np.full(150, -1), each, np.arange(151), each)
    for hidden in (30, 600):
        start: dict[str, Any] = {"start": "random", "burst": hidden, "split_link": 1.0, "add_link": 0.0}
        run = ev.Evolution(ev.Task(x, x[:, 0], "mse", split="same"), None, ev.NEAT(**start), seed=0)
        genes, table, registry = run.genes, run.table, with_room(run.registry, 100_000)
        nursery = Breeder(ev.NEAT(split_link=0.1, add_link=0.0, weights=0.0), 8, 1, 0)

        def breed(genes: Any = genes, registry: Any = registry, nursery: Any = nursery) -> Any:
            return nursery.breed(genes, np.zeros(150), alone, registry, 1)

        child, births, _ = breed()
        past, made = Past(genes, table, births.fitter_parent), tabulate(child, 8, 1)
        taken = per_call({
            "children": breed,
            "table, patched": lambda c=child, p=past: tabulate(c, 8, 1, p),
            "new table": lambda c=child: tabulate(c, 8, 1),
            "answers": lambda c=child, t=made: outputs(t, c, cases),
        }, rounds=7)  # fmt: skip
        parts = [taken[who] for who in ("children", "table, patched", "answers")]
        whole = [sum(spent) for spent in zip(*parts, strict=True)]
        for who, seconds in taken.items():
            note = f"{100 * ratio(seconds, whole):.0f} % of children, patched table and answers"
            figure.add(f"{hidden} hidden: {who}", 1e6 * median(seconds), "us", note)
        if hidden > 30:  # as a Program this large takes seconds
            continue
        one = genome(child, 0, 8, 1)
        taken = per_call({"program": lambda g=one: gw.compile(program.founder(g))(x=x)}, rounds=3, least=0.0)
        figure.add(f"{hidden} hidden: one genome as a Program, planned and run", 1e6 * median(taken["program"]), "us")
    return figure
