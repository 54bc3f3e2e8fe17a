"""Formulas of small programs: their source text against the program, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

import graphwright as gw
from graphwright.array.population.names import ACTIVATIONS as ACTIVATIONS_OF_EVOLUTION
from graphwright.errors import UsageError
from graphwright.evolve.neurons.genomes import Genome, LinkGene, NodeGene
from graphwright.evolve.neurons.program import founder
from graphwright.program import FormulaTooLarge, NoFormula


def run_source(source: str, *columns: np.ndarray) -> list[np.ndarray]:
    names: dict = {}
    exec(source, names)
    found = names["formula"](*columns)
    return list(found) if isinstance(found, tuple) else [found]


def check(p: gw.Program, x: np.ndarray, tolerance: float) -> None:
    """Compare the source text on the columns of x, and on single cases, with the program."""
    f = p.formula(digits=6)
    (name,) = p.input_names()
    expected = p.run({name: x})[p.output_names()[0]].to_numpy().reshape(len(x), -1)
    ours = run_source(f.python, *x.T.astype(np.float64))
    np.testing.assert_allclose(np.stack(ours, 1), expected, atol=tolerance)
    np.testing.assert_allclose(run_source(f.python, *x[0].tolist()), expected[0], atol=tolerance)
    assert f.error < tolerance


ACTIVATIONS = {
    "tanh": gw.nn.Tanh(), "relu": gw.nn.ReLU(), "relu6": gw.nn.ReLU6(),
    "gelu": gw.nn.GELU(), "silu": gw.nn.SiLU(), "sigmoid": gw.nn.Sigmoid(), "softplus": gw.nn.Softplus(),
    "leaky": gw.nn.LeakyReLU(), "elu": gw.nn.ELU(), "softmax": gw.nn.Softmax(-1),
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_formulas_of_layers_compute_what_the_program_computes(name):
    gw.manual_seed(1)
    net = gw.nn.Sequential(gw.nn.Linear(3, 2), ACTIVATIONS[name], gw.nn.Linear(2, 2))
    x = np.random.default_rng(0).standard_normal((40, 3)).astype(np.float32)
    check(gw.trace(net, x, sizes={"x": ("B", 3)}), x, 1e-4)
    check(gw.trace(net, x), x, 1e-4)


def test_formulas_of_champions():
    links = [(4, 0, 3, 1.0), (5, 1, 3, -0.5), (6, 2, 3, 0.25), (8, 0, 7, 2.0), (9, 7, 3, 1.5)]
    genome = Genome(2, 1, (NodeGene(3, "sigmoid49"), NodeGene(7, "gauss")),
                    tuple(LinkGene(i, src, dst, 0, i != 6, w) for i, src, dst, w in links))  # fmt: skip
    p = founder(genome, names=("a", "b"))
    f = p.formula(names=("a", "b"))
    assert str(f) == "y = sigmoid(4.9*a - 2.45*b + 7.35*exp(-4*a**2))"
    x = np.random.default_rng(0).standard_normal((20, 2)).astype(np.float32)
    expected = 1 / (1 + np.exp(-4.9 * (x[:, 0] - 0.5 * x[:, 1] + 1.5 * np.exp(-4 * x[:, 0] ** 2))))
    np.testing.assert_allclose(f(*x.T), expected, atol=1e-6)
    assert r"\operatorname{sigmoid}" in f.latex
    assert "e^{- 4 a^{2}}" in f.latex


@pytest.mark.parametrize("activation", ACTIVATIONS_OF_EVOLUTION)
def test_every_activation_of_evolution_has_a_formula(activation):
    genome = Genome(
        2, 1, (NodeGene(3, activation),), (LinkGene(4, 0, 3, 0, True, 1.5), LinkGene(5, 2, 3, 0, True, 0.5))
    )
    x = np.random.default_rng(0).standard_normal((30, 2)).astype(np.float32)
    check(founder(genome), x, 1e-5)


def test_ones_zeros_and_small_constants_are_left_out():
    p = gw.trace(lambda x: x[:, 0] * 1.0 + x[:, 1] * 0.0 + x[:, 2] * 0.01 + 0.0, gw.rand(4, 3), sizes={"x": ("B", 3)})
    assert str(p.formula()) == "out = x0 + 0.01*x2"
    dropped = p.formula(drop=0.02)
    assert str(dropped) == "out = x0"
    assert 1e-3 < dropped.error < 0.1
    assert str(gw.trace(lambda x: x / 3.0, gw.rand(4), sizes={"x": ("B",)}).formula(digits=2)) == "out = x/3"


def test_terms_of_several_readers_get_names():
    p = gw.trace(lambda x: ((x + 1).tanh() * 2, (x + 1).tanh() - 1), gw.rand(4), sizes={"x": ("B",)})
    f = p.formula()
    assert str(f) == "t0 = tanh(x + 1)\nout = 2*t0\nout_1 = t0 - 1"
    assert f.operations == 4
    assert f.inputs == ("x",)


def test_a_large_network_is_refused():
    p = gw.trace(gw.nn.Sequential(gw.nn.Linear(30, 30), gw.nn.Tanh()), gw.rand(2, 30))
    with pytest.raises(FormulaTooLarge, match="limit=") as raised:
        p.formula()
    assert raised.value.operations == 930
    q = gw.trace(gw.nn.Linear(6, 4), gw.rand(2, 6))
    with pytest.raises(FormulaTooLarge):
        q.formula(limit=20)
    assert q.formula(limit=60).operations <= 60


def delayed():
    genome = Genome(1, 1, (NodeGene(2, "tanh"),), (LinkGene(3, 0, 2, 0, True, 1.0), LinkGene(4, 2, 2, 1, True, 0.5)))
    return founder(genome)


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (delayed, {}, NoFormula, "states"),
        (lambda: gw.trace(lambda x: x - x.mean(0), gw.rand(4, 2)), {}, NoFormula, "on a batch"),
        (lambda: gw.trace(lambda x: x.log() + x.sum(0), gw.rand(4, 2)), {}, NoFormula, "on a batch"),
        (lambda: gw.trace(lambda x: x.cumsum(-1), gw.rand(4, 2)), {}, NoFormula, "cumsum.*has no formula"),
        (lambda: gw.trace(lambda x: x.reshape(8), gw.rand(4, 2)), {}, NoFormula, "named batch size"),
        (lambda: gw.trace(gw.nn.Linear(2, 1), gw.rand(4, 2)), {"digits": 0}, UsageError, "digits"),
        (lambda: gw.trace(gw.nn.Linear(2, 1), gw.rand(4, 2)), {"names": ("a",)}, UsageError, "2 different identifiers"),
        (lambda: gw.trace(gw.nn.Linear(2, 1), gw.rand(4, 2)), {"names": ("a", "b c")}, UsageError, "identifiers"),
        (lambda: gw.trace(gw.nn.Linear(2, 1), gw.rand(4, 2)), {"names": ("a", "np")}, UsageError, "other than np"),
        (lambda: gw.trace(gw.nn.Linear(2, 1), gw.rand(4, 2)), {"names": 5}, UsageError, "identifiers"),
        (lambda: gw.trace(gw.nn.Linear(2, 1), gw.rand(4, 2)), {"limit": "a"}, UsageError, "limit"),
        (lambda: gw.trace(gw.nn.Linear(2, 1), gw.rand(4, 2)), {"drop": float("nan")}, UsageError, "drop"),
    ],
)
def test_programs_without_a_formula_are_refused(make, options, error, message):
    with pytest.raises(error, match=message):
        make().formula(**options)


def test_cases_outside_of_the_domain_are_compared_too():
    p = gw.trace(lambda x: x.log(), gw.rand(4), sizes={"x": ("B",)})
    assert p.formula().error < 1e-6  # NaN in the program and in the formula for the negative ones
    assert np.isnan(gw.trace(lambda x: (-x * x - 1).log(), gw.rand(4), sizes={"x": ("B",)}).formula().error)
