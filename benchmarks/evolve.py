"""Evolution: XOR over 100 seeds and its ablations, hybrid training, control tasks, speed beside neat-python.

neat-python takes part where it is installed; else its rows are missing and the figure says so. A plain Python loop over
the same genomes stands in both cases: it does what neat-python's `activate` does.
`python -m benchmarks evolve:xor,generations` prints some of the figures alone.
"""

from __future__ import annotations

import math
import random
import tempfile
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import numpy as np

import graphwright as gw
from benchmarks.harness import Figure
from graphwright import evolve as ev
from graphwright.array.population.runner import Cases, outputs, tabulate

try:
    import neat
except ImportError:
    neat = None  # type: ignore[assignment]

X = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], np.float32)
ABSENT = "neat-python is not installed: python -m pip install neat-python adds its rows."


def run() -> list[Figure]:
    return [xor(), ablation(), hybrid(), cart(), double_pole(), data(), layers(), evaluations(), generations()]


# -- what is solved ----------------------------------------------------------------------------------------------------
def wilson(k: int, n: int) -> tuple[float, float]:
    """95 % interval of a share."""
    z, p = 1.96, k / n
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, (middle - half) / (1 + z * z / n)), min(1.0, (middle + half) / (1 + z * z / n))


def solve(task: Any, settings: ev.NEAT, seeds: int, **limits: int) -> list[ev.Result]:
    return [ev.Evolution(task(s), None, settings, seed=s).run(**limits) for s in range(seeds)]


def add_runs(figure: Figure, who: str, results: list[ev.Result], extra: str = "") -> None:
    solved = [r for r in results if r.solved]
    low, high = (100 * v for v in wilson(len(solved), len(results)))
    counts = [r.evolution.counters.evaluations for r in results]
    q1, q3 = np.quantile(counts, [0.25, 0.75])
    note = f"median {median(counts):,.0f} evaluations ({q1:,.0f} to {q3:,.0f})"
    if solved:
        note += f", {np.mean([r.best.genome.hidden for r in solved]):.1f} hidden nodes"
    share = len(solved) / len(results)
    figure.add(f"{who}, {len(solved)} of {len(results)} seeds", 100 * share, "%", note + extra, low, high)


def xor() -> Figure:
    figure = Figure("XOR by NEAT, 100 seeds", "population 150, at most 300 generations; all four answers right")
    for who, settings in (("defaults", ev.NEAT()), ("NEAT.paper2002()", ev.NEAT.paper2002())):
        add_runs(figure, who, solve(lambda s: ev.tasks.xor(), settings, 100, max_generations=300))
    figure.says.append("NEAT 2002 reports 4755 evaluations on average (standard deviation 2553), no failures.")
    return figure


def ablation(seeds: int = 100) -> Figure:
    figure = Figure(
        f"XOR without parts of NEAT, {seeds} seeds", "as above, in the paper's order; unsolved seeds count in full"
    )
    rows = {
        "all of it": {},
        "no crossover": {"crossover": False},
        "random start: 3 mutations of each founder": {"start": "random", "burst": 3},
        "no species": {"species": False},
        "no growth": {"growth": False},
    }
    solved: list[int] = []
    for who, changes in rows.items():
        found = solve(lambda s: ev.tasks.xor(), ev.NEAT(**changes), seeds, max_generations=300)
        solved.append(sum(r.solved for r in found))
        add_runs(figure, who, found, f"; p = {fisher(solved[0], solved[-1], seeds):.2g}" if changes else "")
    figure.says.append("p: Fisher's exact test, one-sided, that all of it solves so many more seeds by chance.")
    return figure


def fisher(more: int, fewer: int, seeds: int) -> float:
    """Chance that the first of two samples has at least `more` of all hits, if both are alike."""
    hits, ways = more + fewer, math.comb(2 * seeds, more + fewer)
    return sum(math.comb(seeds, k) * math.comb(seeds, hits - k) for k in range(more, min(seeds, hits) + 1)) / ways


def hybrid() -> Figure:
    figure = Figure("Growing and training: XOR and parity", "population 16, Adam 0.05, function-preserving growth")
    found = solve(lambda s: ev.tasks.xor(), ev.Hybrid(), 20, max_evaluations=1600)
    passes = median(r.evolution.counters.backward for r in found)
    add_runs(figure, "XOR, 60 steps a candidate", found, f", median {passes:,.0f} cases with gradients")
    settings = ev.Hybrid(delays=0.5, train=ev.Train(steps=100))
    found = solve(lambda s: ev.tasks.parity(8, seed=s), settings, 10, max_generations=30)
    right = sum(r.test() >= 0.95 for r in found)
    add_runs(figure, "parity of 8 bits by delays", found, f"; {right} of 10 with test accuracy >= 0.95")
    return figure


def cart() -> Figure:
    figure = Figure(
        "CartPole by NEAT, 20 seeds", "our own physics, greedy, at most 30 generations of 150; 100 unseen starts"
    )
    found = solve(lambda s: ev.tasks.cartpole(), ev.NEAT(), 20, max_generations=30)
    tests = [r.test() for r in found]
    steps = sum(r.evolution.counters.forward for r in found)
    share = sum(r.evolution.counters.environment for r in found) / sum(r.evolution.counters.seconds for r in found)
    add_runs(figure, "solved", found)
    well = sum(t >= 475 for t in tests)
    low, high = (100 * v for v in wilson(well, 20))
    figure.add(f"475 on average over unseen starts, {well} of 20 seeds", 5 * well, "%", "", low, high)
    figure.add("mean return of the champion, worst seed", min(tests), "steps", f"median {median(tests):.0f} of 500")
    figure.says.append(f"{steps:,} steps of environments, which took {100 * share:.0f} % of the time.")
    return figure


def double_pole() -> Figure:
    figure = Figure(
        "Two poles by NEAT, 5 seeds", "velocities in sight; solved: the champion balances for 100 000 steps"
    )
    add_runs(figure, "solved", solve(lambda s: ev.tasks.double_pole(), ev.NEAT(), 5, max_evaluations=30_000))
    figure.says.append("Published for NEAT: 3600 evaluations.")
    return figure


def data() -> Figure:
    figure = Figure("Growing and training on data", "population 16, 15 generations, 100 steps a candidate, 20 seeds")
    for name, task in (("two moons", ev.tasks.two_moons), ("iris", ev.tasks.iris)):
        found = solve(lambda s, t=task: t(seed=s), ev.Hybrid(train=ev.Train(steps=100)), 20, max_generations=15)
        tests = [100 * r.test() for r in found]
        low, high = np.quantile(tests, [0.25, 0.75])
        figure.add(f"{name}, median test accuracy", median(tests), "%", "interval: quartiles", low, high)
    return figure


def layers() -> Figure:
    figure = Figure("Digits, layers evolved from one linear layer", "60 candidates, 200 steps each, 3 seeds")
    for seed in range(3):
        b = gw.Builder("digits")
        w, bias = (b.param(f"out.{n}", np.zeros(s, np.float32)) for n, s in (("weight", (10, 64)), ("bias", 10)))
        b.output(b.linear(b.input("x", ("B", 64)), w, bias, name="out"), "y")
        run = ev.Evolution(ev.tasks.digits(seed=seed), ev.blocks(b.build()), seed=seed)
        found = run.run(max_evaluations=60, target=0.985)
        note = (
            f"{found.best.birth.params:,} parameters, {len(found.births)} candidates, {run.counters.seconds:.0f} s, "
            f"{run.counters.backward:,} cases with gradients"
        )
        figure.add(f"seed {seed}, test accuracy", 100 * found.test(), "%", note)
    return figure


# -- speed -------------------------------------------------------------------------------------------------------------
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
    by_target: dict[int, list[ev.Link]] = {}
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
        genomes = [ev.genomes.genome(genes, g, 2, 1) for g in range(150)]
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
            "PopulationPlan, cases given anew": lambda p=plan, x=x: p(x),
            "with the table written anew": lambda g=genes, c=cases: outputs(tabulate(g, 2, 1), g, c),
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
        figure.says.append(ABSENT)
    return figure


def generations() -> Figure:
    figure = Figure("Generations per second on XOR, population 150",
                    "CPU time of one thread; evaluation, species, crossover, mutation, lineage")  # fmt: skip
    for label, first, count in (("generations 1 to 30", 0, 30), ("generations 100 to 200", 100, 100)):
        ours, theirs, ends, size = [], [], [], ""
        for seed in range(5):
            run = ev.Evolution(ev.tasks.xor(), None, ev.NEAT(), seed=seed)
            if first:
                run.run(first, target=2.0)
            began = process_time()
            run.run(first + count, target=2.0)
            ours.append((process_time() - began) / count)
            ends.append([np.diff(off).mean() for off in (run.genes.node_off, run.genes.link_off)])
            if neat is not None:
                spent, size = neat_time(first, count, seed)
                theirs.append(spent)
        nodes, links = np.mean(ends, axis=0)
        figure.add(f"{label}: graphwright", 1 / median(ours), "/s", f"at the end {nodes:.1f} nodes, {links:.1f} links",
                   1 / max(ours), 1 / min(ours))  # fmt: skip
        if theirs:
            note = f"at the end {size}; {times(theirs, ours)}"
            figure.add(f"{label}: neat-python", 1 / median(theirs), "/s", note, 1 / max(theirs), 1 / min(theirs))
    if neat is None:
        figure.says.append(ABSENT)
    return figure


def neat_time(first: int, count: int, seed: int) -> tuple[float, str]:
    """CPU seconds of a generation of neat-python with its own example's rates."""
    random.seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "xor.cfg"
        path.write_text(CONFIG)
        config = neat.Config(neat.DefaultGenome, neat.DefaultReproduction, neat.DefaultSpeciesSet,
                             neat.DefaultStagnation, str(path))  # fmt: skip
    population, rows = neat.Population(config), X.tolist()

    def fitness(genomes: Any, config: Any) -> None:
        for _, genome in genomes:
            net = neat.nn.FeedForwardNetwork.create(genome, config)
            error = sum(abs(net.activate(row)[0] - y) for row, y in zip(rows, (0, 1, 1, 0), strict=True))
            genome.fitness = (4 - error) ** 2

    if first:
        population.run(fitness, first)
    began = process_time()
    population.run(fitness, count)
    spent = process_time() - began
    genomes = list(population.population.values())
    nodes, links = (np.mean([len(getattr(g, part)) for g in genomes]) for part in ("nodes", "connections"))
    return spent / count, f"{nodes:.1f} nodes, {links:.1f} links"


CONFIG = """[NEAT]
fitness_criterion = max
fitness_threshold = 1e9
pop_size = 150
reset_on_extinction = False
no_fitness_termination = True
[DefaultGenome]
activation_default = sigmoid
activation_mutate_rate = 0.0
activation_options = sigmoid
aggregation_default = sum
aggregation_mutate_rate = 0.0
aggregation_options = sum
bias_init_mean = 0.0
bias_init_stdev = 1.0
bias_init_type = gaussian
bias_max_value = 30.0
bias_min_value = -30.0
bias_mutate_power = 0.5
bias_mutate_rate = 0.7
bias_replace_rate = 0.1
compatibility_disjoint_coefficient = 1.0
compatibility_weight_coefficient = 0.5
conn_add_prob = 0.5
conn_delete_prob = 0.2
enabled_default = True
enabled_mutate_rate = 0.01
feed_forward = True
initial_connection = full_direct
node_add_prob = 0.3
node_delete_prob = 0.1
num_hidden = 0
num_inputs = 2
num_outputs = 1
response_init_mean = 1.0
response_init_stdev = 0.0
response_init_type = gaussian
response_max_value = 30.0
response_min_value = -30.0
response_mutate_power = 0.0
response_mutate_rate = 0.0
response_replace_rate = 0.0
single_structural_mutation = False
structural_mutation_surer = default
enabled_rate_to_true_add = 0.0
enabled_rate_to_false_add = 0.0
weight_init_mean = 0.0
weight_init_stdev = 1.0
weight_init_type = gaussian
weight_max_value = 30
weight_min_value = -30
weight_mutate_power = 0.5
weight_mutate_rate = 0.8
weight_replace_rate = 0.1
[DefaultSpeciesSet]
compatibility_threshold = 4.0
[DefaultStagnation]
species_fitness_func = max
max_stagnation = 20
species_elitism = 2
[DefaultReproduction]
elitism = 2
survival_threshold = 0.2
min_species_size = 1
"""
