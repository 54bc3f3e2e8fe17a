"""Indices and numbers from the host, and results that the host computes, are on the device of the tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import graphwright as gw

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def beside(x: gw.Tensor, values: Any) -> gw.Tensor:
    return gw.tensor(np.asarray(values)).to(x.device)


def assigned(index: Callable[[gw.Tensor], Any], value: Any) -> Callable[[gw.Tensor], gw.Tensor]:
    def run(x: gw.Tensor) -> gw.Tensor:
        made = x.clone()
        made[index(x)] = value
        return made

    return run


READS: dict[str, Callable[[gw.Tensor], Any]] = {
    "mask": lambda x: x[x > 2],
    "mask of an axis": lambda x: x[x.sum(1) > 3],
    "numpy mask of an axis": lambda x: x[:, np.array([True, False, True])],
    "list": lambda x: x[:, [2, 0]],
    "numpy": lambda x: x[np.array([1, -1])],
    "tensor on the host": lambda x: x[gw.tensor(np.array([1]))],
    "masked_select": lambda x: x.masked_select(x > 1),
    "masked_scatter": lambda x: x.masked_scatter(x > 2, x),
    "nonzero": lambda x: (x > 2).nonzero(),
    "where": lambda x: gw.where(x > 2)[1],
    "unfold": lambda x: x.unfold(1, 2, 1),
    "quantile": lambda x: gw.quantile(x, 0.3),
    "pdist": lambda x: gw.pdist(x),
    "unique": lambda x: x.unique(return_counts=True)[1],
    "unique_consecutive": lambda x: x.unique_consecutive(),
    "histc": lambda x: x.histc(4),
    "gcd": lambda x: x.to("int64").gcd(x.to("int64")),
    "i0": lambda x: x.i0(),
    "take": lambda x: x.take([0, 3]),
    "index_select": lambda x: x.index_select(1, [0, 2]),
    "index_fill": lambda x: x.index_fill(1, [0, 2], 3.0),
    "scatter of a number": lambda x: x.scatter(1, beside(x, [[0], [1]]), 1.0),
    "scatter to a list": lambda x: x.scatter(1, [[0], [1]], 1.0),
    "repeat_interleave": lambda x: x.repeat_interleave(beside(x, [1, 2]), 0),
    "fill_diagonal_": lambda x: x.clone().fill_diagonal_(7.0),
    "embedding_bag": lambda x: gw.nn.functional.embedding_bag(beside(x, [[0, 1], [1, 1]]), x, mode="mean"),
    "ctc_loss": lambda x: gw.nn.functional.ctc_loss(
        x.reshape(2, 1, 3).log_softmax(-1), beside(x, [[1]]), beside(x, [2]), beside(x, [1])
    ),
    "assigned by a mask": assigned(lambda x: x > 2, 0.0),
    "assigned by a list": assigned(lambda x: [1], 5.0),
    "assigned by a tensor": assigned(lambda x: beside(x, [1, 0]), 7.0),
    "assigned from numpy": assigned(lambda x: (slice(None), [0, 2]), np.ones((2, 2), np.float32)),
    "assigned to a slice": assigned(lambda x: (0, slice(1, 3)), np.ones(2, np.float32)),
}


@pytest.mark.parametrize("name", READS)
def test_results_are_those_of_the_host_on_the_device(sim: Any, name: str) -> None:
    found = READS[name](gw.tensor(X).to("sim"))
    assert found.device == sim.device
    np.testing.assert_array_equal(found.numpy(), READS[name](gw.tensor(X)).numpy())


def test_gradients_pass_masks_and_assignments(sim: Any) -> None:
    grads = []
    for device in ("cpu", "sim"):
        x = gw.tensor(X).to(device).detach().requires_grad_()
        made = x * 2
        made[[1]] = 0.5
        made[x < 1] = x[x < 1] * 3
        made[made > 3].sum().backward()
        assert x.grad is not None
        grads.append(x.grad)
    assert grads[1].device == sim.device
    np.testing.assert_array_equal(grads[0].numpy(), grads[1].numpy())
