"""NEAT in plain Python, gene by gene, drawing the numbers that the native loops draw: the oracle of the tests."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from graphwright.array.random import philox

LINK, SPLIT, UNIT = 3, 4, 5
BREEDING = 1


class Stream:
    """Uniform numbers of one child, by `array.random.philox`."""

    def __init__(self, seed, child, generation, purpose):
        self.key, self.rest = (seed & 0xFFFFFFFF, seed >> 32), (child, generation, purpose)
        self.block, self.words = 0, []

    def uniform(self):
        if not self.words:
            counter = np.array([[self.block, *self.rest]], np.uint32)
            self.words = [int(w) for w in philox(counter, self.key)[0]]
            self.block += 1
        return self.words.pop(0) * 2.0**-32

    def below(self, n):
        return int(self.uniform() * n)

    def normal(self):
        u, w = self.uniform(), self.uniform()
        return math.sqrt(-2 * math.log(1 - u)) * math.cos(2 * math.pi * w)


@dataclass
class Gene:
    src: int
    dst: int
    delay: int
    open: bool
    weight: np.float32


@dataclass
class Slow:
    """A genome as dicts by innovation number."""

    nodes: dict = field(default_factory=dict)
    links: dict = field(default_factory=dict)

    @classmethod
    def of(cls, genome):
        links = {e.id: Gene(e.src, e.dst, e.delay, e.open, np.float32(e.weight)) for e in genome.links}
        return cls({n.id: n.activation for n in genome.nodes}, links)

    def copy(self):
        return Slow(dict(self.nodes), {i: Gene(**vars(g)) for i, g in self.links.items()})

    def remove(self, link, last):
        """Without a link, and without nodes above `last` that have none any more."""
        del self.links[link]
        ends = {n for e in self.links.values() for n in (e.src, e.dst)}
        self.nodes = {n: a for n, a in self.nodes.items() if n <= last or n in ends}

    def reaches(self, start, goal):
        if start == goal:
            return True
        return any(self.reaches(g.dst, goal) for g in self.links.values() if g.src == start and not g.delay)


class Numbers:
    """The registry: a dict."""

    def __init__(self, keys):
        self.ids = {tuple(k): i for i, k in enumerate(keys)}

    def __call__(self, *key):
        return self.ids.setdefault((*key, *[0] * (4 - len(key))), len(self.ids))


def distance(a, b, c1, c2, c3, c4):
    common, only_a, only_b = (
        a.links.keys() & b.links.keys(),
        a.links.keys() - b.links.keys(),
        b.links.keys() - a.links.keys(),
    )
    excess = sum(i > max(b.links, default=-1) for i in only_a) + sum(i > max(a.links, default=-1) for i in only_b)
    disjoint = len(only_a) + len(only_b) - excess
    larger = max(len(a.links), len(b.links))
    total = (c1 * excess + c2 * disjoint) / (1 if larger < 20 else larger)
    if common:
        total += c3 * sum(abs(float(a.links[i].weight) - float(b.links[i].weight)) for i in common) / len(common)
    nodes = a.nodes.keys() & b.nodes.keys()
    return total + c4 * sum(a.nodes[i] != b.nodes[i] for i in nodes) / max(len(nodes), 1)


def child(parents, fitness, pools, species, elite, rates, acts, inputs, outputs, numbers, stream):
    """One child, and (fitter_parent, other_parent, mutation, site)."""
    if elite >= 0:
        return parents[elite].copy(), (elite, -1, "copy", -1)

    def pick(pool):
        return pool[min(stream.below(len(pool)) for _ in range(rates.tournament))]

    pool, other_parent = pools[species], -1
    fitter_parent = pick(pool)
    if stream.uniform() >= rates.mutate_only:
        others = [g for k, p in enumerate(pools) if k != species for g in p]
        far = stream.uniform() < rates.interspecies and others
        other_parent = others[stream.below(len(others))] if far else pick(pool)
        if other_parent == fitter_parent:
            other_parent = -1
        else:
            key = lambda i: (-fitness[i], len(parents[i].links) + len(parents[i].nodes), i)  # noqa: E731
            fitter_parent, other_parent = sorted((fitter_parent, other_parent), key=key)
    out = parents[fitter_parent].copy()
    if other_parent >= 0:
        other = parents[other_parent]
        for i in sorted(out.nodes):
            if i in other.nodes and stream.uniform() < 0.5:
                out.nodes[i] = other.nodes[i]
        for i in sorted(out.links):
            if i in other.links:
                mine, theirs = out.links[i], other.links[i]
                if stream.uniform() < 0.5:
                    out.links[i] = Gene(**vars(theirs))
                both = mine.open and theirs.open
                out.links[i].open = True if both else not stream.uniform() < rates.reclose
    mutation, site = mutate(out, rates, acts, inputs, outputs, numbers, stream)
    return out, (fitter_parent, other_parent, mutation, site)


def mutate(g, r, acts, inputs, outputs, number, s):
    def activation():
        return acts[s.below(len(acts))] if len(acts) > 1 else acts[0]

    def unused(*key):
        k = 0
        while (node := number(*key, k)) in g.nodes:
            k += 1
        return node

    def link(src, dst, delay, weight):
        i = number(LINK, src, dst, delay)
        g.links[i] = Gene(src, dst, delay, True, np.float32(weight))
        return i

    if r.grow > 0 and s.uniform() < r.grow:
        node = unused(UNIT)
        g.nodes[node] = activation()
        for i in range(inputs + 1):
            link(i, node, 0, s.normal() / math.sqrt(inputs))
        for o in range(outputs):
            link(node, inputs + 1 + o, 0, 0.0)
        return "grow", node
    if r.split_link > 0 and s.uniform() < r.split_link:
        still = sorted(i for i, e in g.links.items() if e.open)
        if still:
            i = still[s.below(len(still))]
            old = g.links[i]
            old.open = False
            k = 0
            while (node := number(SPLIT, i, k)) in g.nodes:
                k += 1
            g.nodes[node] = activation()
            link(old.src, node, old.delay, 1.0)
            link(node, old.dst, 0, old.weight)
            return "split_link", i
    if r.add_link > 0 and s.uniform() < r.add_link:
        delay = int(r.delays > 0 and s.uniform() < r.delays)
        order = sorted(g.nodes)
        for _ in range(r.tries):
            pick = s.below(inputs + 1 + len(order))
            src = pick if pick <= inputs else order[pick - inputs - 1]
            dst = order[s.below(len(order))]
            if (delay and src == inputs) or any((e.src, e.dst, e.delay) == (src, dst, delay) for e in g.links.values()):
                continue
            if not delay and src > inputs and g.reaches(dst, src):
                continue
            i = number(LINK, src, dst, delay)
            weight = min(max(s.normal() * r.new_link, -r.most), r.most)
            return "add_delay_link" if delay else "add_link", link(src, dst, delay, weight) if i is not None else i
    if r.toggle_link > 0 and s.uniform() < r.toggle_link and g.links:
        i = sorted(g.links)[s.below(len(g.links))]
        g.links[i].open = not g.links[i].open
        return "toggle_link", i
    if r.remove_link > 0 and s.uniform() < r.remove_link and g.links:
        i = sorted(g.links)[s.below(len(g.links))]
        g.remove(i, inputs + outputs)
        return "remove_link", i
    delayed = sorted(i for i, e in g.links.items() if e.delay)
    if r.remove_delay_link > 0 and s.uniform() < r.remove_delay_link and delayed:
        i = delayed[s.below(len(delayed))]
        g.remove(i, inputs + outputs)
        return "remove_delay_link", i
    if r.set_activation > 0 and s.uniform() < r.set_activation:
        hidden = sorted(g.nodes)[outputs:]
        if hidden and len(acts) > 1:
            n = hidden[s.below(len(hidden))]
            choice = acts[s.below(len(acts) - 1)]
            g.nodes[n] = acts[-1] if choice == g.nodes[n] else choice
            return "set_activation", n
    if s.uniform() < r.weights:
        step = r.power * (r.fine_power if s.uniform() < r.fine else 1.0)
        for i in sorted(g.links):
            e = g.links[i]
            moves = s.uniform() < r.perturb
            weight = e.weight + (2.0 * s.uniform() - 1.0) * step if moves else s.normal() * r.power
            e.weight = np.float32(min(max(weight, -r.most), r.most))
        return "weights", -1
    return "copy", -1


def outputs_of(g, x, inputs, outputs, act):
    """Answers [N, T, outputs] in float64, from the definition; delayed values are 0 before the first step."""
    n, steps, _ = x.shape
    past = []
    for t in range(steps):
        now = {i: x[:, t, i].astype(float) for i in range(inputs)} | {inputs: np.ones(n)}

        def value(node, now=now, t=t):
            if node not in now:
                total = np.zeros(n)
                for e in (g.links[i] for i in sorted(g.links)):
                    if e.dst == node and e.open:
                        if not e.delay:
                            total = total + float(e.weight) * value(e.src, now, t)
                        elif t >= e.delay:
                            total = total + float(e.weight) * past[t - e.delay][e.src]
                now[node] = act[g.nodes[node]](total)
            return now[node]

        for node in g.nodes:
            value(node)
        past.append(now)
    return np.stack([np.stack([p[inputs + 1 + o] for o in range(outputs)], -1) for p in past], 1)
