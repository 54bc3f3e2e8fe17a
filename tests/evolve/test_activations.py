"""Every activation at the ends of its range and between: in the table, on the VM, on ATen and run node by node."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_population import ACT

import graphwright as gw
from graphwright import evolve as ev
from graphwright.array.population.names import ACTIVATIONS
from graphwright.array.population.runner import Cases, Lesson, fit, outputs
from graphwright.array.population.table import tabulate
from graphwright.evolve.neurons.genomes import columns_of
from graphwright.evolve.neurons.program import founder
from values import grad_of

ENDS = np.array([0, 1, -1, 50, -50, 800, -800], np.float32)[:, None]
BETWEEN = np.array([0.3, -0.3, 0.7, -0.7, 1.2, -1.2, 2.5, -2.5], np.float32)[:, None]  # away from kinks


def one(name: str) -> ev.Genome:
    """A neuron that reads one input as it is."""
    return ev.Genome(1, 1, (ev.NodeGene(2, name),), (ev.LinkGene(3, 0, 2, 0, True, 1.0),))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_values_are_finite_and_match_the_formula_in_all_executors(name):
    p, genes = founder(one(name)), columns_of([one(name)])
    x = np.concatenate([ENDS, BETWEEN])
    with np.errstate(over="ignore"):
        expected = ACT[name](x[:, 0].astype(float))
    found = {
        "table": outputs(tabulate(genes, 1, 1), genes, Cases.of(x))[0, :, 0],
        "vm": gw.compile(p, executor="vm")(x=x)["y"].numpy(),
        "aten": gw.compile(p, executor="aten")(x=x)["y"].numpy(),
        "node by node": p.run(x=x)["y"].to_numpy(),
    }
    for where, y in found.items():
        assert np.isfinite(y).all(), where
        np.testing.assert_allclose(y[:, 0], expected, rtol=3e-6, atol=3e-5 if name == "sin" else 1e-6, err_msg=where)


def slopes_of_the_table(name: str, x: np.ndarray) -> np.ndarray:
    """dy/dx of y = act(x), from the gradient of a weight: the first moment after one step is a tenth of it."""
    found = []
    for case in x:
        genes = columns_of([ev.Genome(1, 1, (ev.NodeGene(2, name),), (ev.LinkGene(3, 0, 2, 0, True, float(case[0])),))])
        table, shown = tabulate(genes, 1, 1), np.ones((1, 1))  # the link's weight is what varies
        y = outputs(table, genes, Cases.of(shown))[0, :, 0]
        fit(table, genes, Lesson.of(shown, y - 0.5, "mse"), np.ones(1, int), np.zeros(1), clip=0.0)  # dL/dy = 1
        found.append(genes.first[0] / np.float32(0.1))
    return np.array(found)


@pytest.mark.parametrize("name", ["relu", "leaky_relu", "abs"])
def test_derivatives_at_a_kink_are_those_of_torch_in_all_executors(name):
    x = torch.tensor([[0.0], [-0.0]], requires_grad=True)
    getattr(torch.nn.functional, name, torch.abs)(x).sum().backward()
    expected, feeds = grad_of(x).numpy()[:, 0], x.detach().numpy()
    gradient = founder(one(name), batch=2).grad("y", ["x"])
    found = {
        "table": slopes_of_the_table(name, feeds),
        "vm": gw.compile(gradient, executor="vm")(x=feeds)["grad.x"].numpy()[:, 0],
        "aten": gw.compile(gradient, executor="aten")(x=feeds)["grad.x"].numpy()[:, 0],
        "node by node": gradient.run(x=feeds)["grad.x"].to_numpy()[:, 0],
    }
    for where, slope in found.items():
        np.testing.assert_allclose(slope, expected, rtol=1e-6, err_msg=where)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_derivatives_match_finite_differences_and_stay_finite(name):
    h, x = 1e-6, BETWEEN[:, 0].astype(float)
    expected = (ACT[name](x + h) - ACT[name](x - h)) / (2 * h)
    np.testing.assert_allclose(slopes_of_the_table(name, BETWEEN), expected, rtol=1e-4, atol=1e-5)
    assert np.isfinite(slopes_of_the_table(name, ENDS)).all()
    both = np.concatenate([BETWEEN, ENDS])
    p = founder(one(name), batch=len(both))
    gradient = p.grad("y", ["x"])
    for executor in ("vm", "aten"):
        slope = gw.compile(gradient, executor=executor)(x=both)["grad.x"].numpy()[:, 0]
        np.testing.assert_allclose(slope[: len(x)], expected, rtol=1e-4, atol=1e-5, err_msg=executor)
        assert np.isfinite(slope).all(), executor
