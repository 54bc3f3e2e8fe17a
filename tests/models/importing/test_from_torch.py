"""`from_torch` beside torch: outputs, gradients, names, sizes, and the module left as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch_layers import LAYERS, random_network

import graphwright as gw
from seeds import deep
from values import grad_of


def compare(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], **options: Any) -> gw.Program:
    """Outputs and the gradients of all parameters in float64."""
    module = module.double().eval()
    p = gw.from_torch(module, inputs, **options)
    names = p.input_names()
    expected = module(*inputs)
    leaves = list(module.parameters())
    up = torch.randn_like(expected)
    grads = torch.autograd.grad(expected, leaves, up, allow_unused=True) if leaves else ()
    feeds = {n: gw.tensor(t.numpy()) for n, t in zip(names, inputs, strict=True)}
    out = p(**feeds)["out"]
    np.testing.assert_allclose(out.numpy(), expected.detach().numpy(), rtol=1e-10, atol=1e-10)
    if leaves:
        out.backward(gw.tensor(up.numpy()))
        for (key, _), grad in zip(module.named_parameters(), grads, strict=True):
            if grad is not None:
                found = grad_of(p.weights[key]).numpy()
                np.testing.assert_allclose(found, grad.numpy(), rtol=1e-9, atol=1e-10, err_msg=key)
    return p


@pytest.mark.parametrize("name", LAYERS)
def test_layer_matches_torch(name):
    torch.manual_seed(1)
    module, inputs = LAYERS[name]()
    compare(module, inputs)


@pytest.mark.parametrize("seed", range(deep(60, 6)))
def test_random_network_matches_torch(seed):
    module, inputs = random_network(seed)
    compare(module, inputs)


class Stopped(torch.nn.Module):
    """Gradients end at `detach` and at what a `no_grad` block returns."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = torch.sin(self.a(x))
        return y + self.b(x).detach() * self.c(x)


def test_gradients_stop_where_the_module_stops_them():
    module = Stopped()
    p = compare(module, (torch.randn(3, 4, dtype=torch.float64),))
    assert p.weights["c.weight"].grad is not None
    for key in ("a.weight", "a.bias", "b.weight", "b.bias"):
        grad = p.weights[key].grad
        assert grad is None or not grad.numpy().any(), key


def test_named_arguments_keep_their_names_in_any_order():
    class Weighted(torch.nn.Module):
        def forward(self, first, second):
            return first + 2 * second

    given = {"second": torch.randn(3, 4), "first": torch.randn(3, 4)}
    p = gw.from_torch(Weighted(), kwargs=given, sizes={"second": ("B", 4), "first": ("B", 4)})
    fed = {name: value.numpy() for name, value in given.items()}
    np.testing.assert_array_equal(p.run(fed)["out"].to_numpy(), Weighted()(**given).numpy())
